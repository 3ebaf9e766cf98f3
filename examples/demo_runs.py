"""The demo's runs: one row each, and the ds_config.json that every run gets. train_gpt.py knows nothing of what is compared."""
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
ADAMS_PARAMS = ("lr", "betas", "eps", "weight_decay")  # what SCAPE and its dense relative have in common
WARMUP_SHARE = 10  # one step in so many is dense, at the start
#: What a run leaves in its folder; removed before it starts, so that no earlier run can be compared by mistake.
RESULTS = ("losses.json", "weights.pt", "masters.pt", "zipccl.jsonl", "scape.jsonl", "log.txt")


@dataclass(frozen=True)
class DemoRun:
    """One training. ``change(config, folder, num_ranks, num_steps)`` returns the top-level entries of ds_config.json that differ from the
    file ``base`` in configs/; ``length``: optimizer steps, in units of --steps; ``arguments``: further ones of train_gpt.py."""
    name: str
    base: str
    change: Callable[[dict, Path, int, int], dict] = lambda *_: {}
    length: int = 1
    arguments: tuple[str, ...] = ()


def _zipped(config, folder, num_ranks, num_steps):
    """The zipccl section. Beyond 2 ranks a zipped reduction is summed in rank order, which is not the native order: left native."""
    collectives = "always" if num_ranks == 2 else {"all_gather": "always", "reduce_scatter": "never"}
    return {"zipccl": {"enabled": True, "collectives": collectives, "min_bytes": 4096, "log": str(folder / "zipccl.jsonl")}}


def _counted(folder):
    """Nothing is compressed, but ds_zipccl counts what goes through deepspeed.comm, without knowing SCAPE."""
    return {"zipccl": {"enabled": True, "collectives": "never", "log": str(folder / "zipccl.jsonl")}}


def _adams(config, folder, num_ranks, num_steps):
    params = config["optimizer"]["params"]
    return {"optimizer": {"type": "ScapeAdamS", "params": {key: params[key] for key in ADAMS_PARAMS}}, **_counted(folder)}


def _scape(config, folder, num_ranks, num_steps):
    own = {"dense_warmup_steps": max(1, num_steps // WARMUP_SHARE), "log": str(folder / "scape.jsonl")}
    optimizer = config["optimizer"]
    return {"optimizer": {**optimizer, "params": {**optimizer["params"], **own}}, **_counted(folder)}


RUNS = (
    DemoRun("native", "zero3_demo.json"),
    DemoRun("control", "zero3_demo.json"),
    DemoRun("zipped", "zero3_demo.json", _zipped),
    DemoRun("adams", "scape_demo.json", _adams, length=3, arguments=("--masters",)),
    DemoRun("scape", "scape_demo.json", _scape, length=3, arguments=("--masters",)),
)


def write_configs(out, num_ranks, num_steps):
    """Makes out/<run>/ds_config.json for every run; returns {run: its configuration}. num_steps: --steps."""
    configs = {}
    for run in RUNS:
        folder = Path(out) / run.name
        folder.mkdir(parents=True, exist_ok=True)
        for name in RESULTS:
            (folder / name).unlink(missing_ok=True)
        base = json.loads((CONFIGS / run.base).read_text())
        configs[run.name] = base | run.change(base, folder.resolve(), num_ranks, num_steps * run.length)
        (folder / "ds_config.json").write_text(json.dumps(configs[run.name], indent=2) + "\n")
    return configs
