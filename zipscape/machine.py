"""Which machine, versions, command and date a result belongs to: the "meta" of every report and benchmark."""
import json
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from zipscape.errors import ConfigError, describe

PACKAGES = ("zipscape", "torch", "deepspeed", "numpy", "triton")


def describe_machine(command: str) -> dict:
    """{"machine", "versions", "command", "date"} as plain data; the date is UTC."""
    import torch  # not at module level: zipscape must stay light

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {"machine": {"system": platform.platform(), "cpu": _cpu_name(), "gpus": gpus}, "versions": versions,
            "command": command, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def write_json(path: str | Path, data: dict, *, command: str) -> None:
    """Writes ``{"meta": describe_machine(command), **data}``. Raises ConfigError where the file cannot be written."""
    text = json.dumps({"meta": describe_machine(command), **data}, indent=1) + "\n"
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(describe("the results cannot be written", got=error.strerror, where=str(path),
                                   todo="make its folder, or name another file")) from None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        return f"{name}, {sum(line.startswith('processor') for line in lines)} cores"
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
