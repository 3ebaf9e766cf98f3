"""``ds_zipccl report``: what is installed, built and compatible here, why not, the settings that a ds_config.json means, and what the
collectives of a run did, from its log."""
import importlib.metadata
import json
import platform
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table

from ds_zipccl.codec import dtypes
from ds_zipccl.codec.format import VERSION as FORMAT_VERSION
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from zipscape import __version__, activate
from zipscape.errors import ConfigError, describe
from zipscape.machine import write_json
from zipscape.op_builder import zipccl

HELP = "versions, what is built, what is compatible and why not, the effective settings, what a run's log says"
TESTED = {"deepspeed": ("0.19.8",), "torch": ("2.11", "2.13")}

_SUMMED = ("calls_zipped", "calls_native", "raw_bytes", "wire_bytes", "overflows")


def add_arguments(parser) -> None:
    parser.add_argument("--config", metavar="FILE", help="a ds_config.json: show what its zipccl section means")
    parser.add_argument("--log", metavar="FILE", help='a run\'s "log": show what its collectives sent and what the switch decided')
    parser.add_argument("--json", metavar="FILE", help="also write the report here")


def _versions() -> list[dict]:
    rows = [{"name": "zipscape", "version": __version__, "compatible": True, "reason": f"frame format {FORMAT_VERSION}"}]
    for name in ("torch", "deepspeed", "pydantic", "numpy", "triton"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            rows.append({"name": name, "version": None, "compatible": name == "triton", "reason": "not installed"})
            continue
        tested = TESTED.get(name)
        good = tested is None or any(version.split("+")[0] == t or version.startswith(t + ".") for t in tested)
        rows.append({"name": name, "version": version, "compatible": good,
                     "reason": None if good else f"tested with {', '.join(tested)}"})
    return rows


def _activation() -> dict:
    names = [e.name for e in importlib.metadata.entry_points(group="torch.backends")]
    row = {"entry_point": "zipscape" in names, "disabled_by_environment": activate.is_disabled(), "failures": list(activate.failures)}
    reason = "; ".join(row["failures"]) or ("off: ZIPSCAPE_DISABLE=1" if row["disabled_by_environment"] else None)
    if reason is None and not row["entry_point"]:
        reason = "zipscape is not installed (pip install .): only `import ds_zipccl` in the script activates it"
    return {**row, "reason": reason}


def _libraries() -> list[dict]:
    """Rows of the native libraries: state() of each, after the kernels were loaded."""
    return [{"name": library.name, **library.state()} for library in zipccl.LIBRARIES]


def _settings(path: str | None) -> dict | None:
    if path is None:
        return None
    try:
        document = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(describe("cannot read the DeepSpeed configuration", got=str(error), where=path,
                                   expected="a JSON file")) from None
    if not isinstance(document, dict):
        raise ConfigError(describe("the DeepSpeed configuration must be a JSON object", got=document, where=path))
    section = document.get("zipccl")
    return None if section is None else ZipcclConfig.from_section(section, path).model_dump()


def _run_of(path: str | None) -> dict | None:
    """{"steps", "ops": {op: counters of all steps}, "switch": the last step's decisions, "switch_times": what they come from,
    "step_trials": what whole steps were found to take, "symmetric_memory": bytes that groups held in the last step} of a step log."""
    if path is None:
        return None
    ops, row, steps, times = {}, {}, 0, {}
    try:
        for line in Path(path).read_text().splitlines():
            row, steps = json.loads(line), steps + 1
            for op, counters in row["ops"].items():
                total = ops.setdefault(op, dict.fromkeys(_SUMMED, 0) | {"native_reasons": Counter()})
                for key in _SUMMED:
                    total[key] += counters[key]
                total["native_reasons"].update(counters["native_reasons"])
            for group, measured in row.get("switch_times", {}).items():
                times.setdefault(group, {}).update(measured)
        return {"steps": steps, "ops": ops, "switch": row.get("switch", {}), "switch_times": times,
                "step_trials": row.get("step_trials", {}), "symmetric_memory": row.get("symmetric_memory", {})}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(describe("cannot read the log of a run", got=f"{type(error).__name__}: {error}", where=path,
                                   expected="a line of JSON per step, as the zipccl section's log has them")) from None


def collect(config_path: str | None = None, log_path: str | None = None) -> dict:
    """The report as plain data."""
    settings = _settings(config_path)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "rows": _versions(),
        "kernels": loader.report(),
        "libraries": _libraries(),
        "best_kernels": {device_type: loader.resolve("best", device_type)},
        "dtypes": [row.name for row in dtypes.TABLE],
        "machine": {"python": platform.python_version(), "system": platform.platform(), "device": device_type,
                    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]},
        "activation": _activation(),
        "settings": settings,
        "run": _run_of(log_path),
    }


def run(args) -> int:
    data = collect(args.config, args.log)
    console = Console()
    table = Table("component", "version", "compatible", "note", title="ds_zipccl report", title_justify="left")
    for row in data["rows"]:
        table.add_row(row["name"], row["version"] or "-", "yes" if row["compatible"] else "NO", row["reason"] or "")
    for name, kernels in data["kernels"].items():
        best = " (best here)" if name in data["best_kernels"].values() else ""
        table.add_row(f"kernels: {name}{best}", "/".join(kernels["devices"]), "yes" if kernels["available"] else "NO",
                      kernels["reason"] or kernels["built"] or "")
    for row in data["libraries"]:
        what = ", ".join(filter(None, (row["installed"] or "not built", row["compiler"], row["arches"] and f"code for {row['arches']}")))
        table.add_row(f"library: {row['name']}", "-", "yes" if row["compatible"] else "NO",
                      " ".join(filter(None, (what if row["compatible"] else "", row["reason"]))))
    reason = data["activation"]["reason"]
    table.add_row("activation from ds_config.json", "-", "NO" if reason else "yes", reason or "")
    console.print(table)
    if args.config:
        settings = data["settings"]
        console.print(f"{args.config}: " + ("no zipccl section: collectives stay native" if settings is None else ""))
        for key, value in (settings or {}).items():
            console.print(f"  {key} = {json.dumps(value)}")
    if args.log:
        _print_run(console, args.log, data["run"])
    if args.json:
        write_json(args.json, data, command="ds_zipccl report")
        console.print(f"written to {args.json}")
    return 0


def _print_run(console: Console, path: str, run: dict) -> None:
    names = ("collective", "zipped", "native", "raw bytes", "wire bytes", "ratio", "overflows", "native because")
    table = Table(*(Column(name, overflow="fold") for name in names),           # nothing is cut off in a narrow terminal
                  title=f"{path}: {run['steps']} steps", title_justify="left")
    for op, row in run["ops"].items():
        table.add_row(op, *(str(row[key]) for key in ("calls_zipped", "calls_native", "raw_bytes", "wire_bytes")),
                      f"{row['raw_bytes'] / row['wire_bytes']:.3f}" if row["wire_bytes"] else "-", str(row["overflows"]),
                      ", ".join(f"{reason} ({count})" for reason, count in row["native_reasons"].items()))
    console.print(table)
    trial = run["step_trials"]
    if trial.get("choice"):
        console.print(f"  last trial of whole steps: zipped {trial['zipped_ms']} ms, native {trial['native_ms']} ms: " + (
            "as the switch says" if trial["choice"] == "zipped" else "all calls go native"))
    for group, num_bytes in run["symmetric_memory"].items():
        console.print(f"  symmetric memory, group {group}: {num_bytes} bytes on each GPU")
    for group, decisions in run["switch"].items():
        for calls, num_bytes in decisions.items():
            first = "never" if num_bytes is None else f"zipped at {num_bytes} bytes, the smallest"
            console.print(f"  switch, group {group}: {calls} {first}")
        for calls, times in run["switch_times"].get(group, {}).items():
            for i, size in enumerate(times["bytes"]):
                ways = (f"{way.replace('_burst', ' back to back')} {us[i]}" for way, us in times.items() if way != "bytes")
                console.print(f"    {calls}, {size} bytes, us: " + ", ".join(ways))
