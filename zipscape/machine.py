"""Which machine, versions, command and date a result belongs to: the "meta" of every report and benchmark."""
import errno
import json
import os
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
        raise _cannot_be_written(path, error.strerror) from None


def check_files(args, *names: str) -> None:
    """Before anything is measured: ConfigError for the first attribute of ``args`` among ``names`` whose file cannot be written. Those that
    are None or not there are left out; nothing is made."""
    for path in filter(None, (getattr(args, name, None) for name in names)):
        file = Path(path)
        problem = (errno.ENOENT if not file.parent.is_dir() else errno.EISDIR if file.is_dir()
                   else 0 if os.access(file if file.exists() else file.parent, os.W_OK) else errno.EACCES)
        if problem:
            raise _cannot_be_written(path, os.strerror(problem))


def _cannot_be_written(path: str | Path, problem: str) -> ConfigError:
    return ConfigError(describe("the results cannot be written", got=problem, where=str(path),
                                todo="make its folder, or name another file"))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        return f"{name}, {sum(line.startswith('processor') for line in lines)} cores"
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
