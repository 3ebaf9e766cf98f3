"""``ds_zipccl bench step``: whole DeepSpeed training steps, native against ours, over one transport after another."""
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ds_zipccl.cli import bench_collectives, ranks, step_model, step_run
from ds_zipccl.collectives.registry import specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from zipscape.errors import ZipScapeError, describe
from zipscape.machine import write_json

HELP = "training steps: ZeRO natively against zipped, and against the lossy rivals"
DESCRIPTION = """Trains a GPT on random tokens with DeepSpeed, every run from the same start, in rounds: all runs in turn, then all again,
every other round backwards. speedup: of the median step against the run's rival; the run "again" is native once more: its speedup is the
noise, and its losses show whether training repeats itself at all. f: the exposed share of communication in the rival's step (GPU); s: how
many times faster the collectives are alone, measured in the same process; bound = 1 / (1 - f + f / s); reached = speedup / bound. losses:
equal to the rival's in all bits, or not. From a trace (GPU): compute, of it the optimizer's part, and what of communication and of copies
from and to the host is exposed. wire MB: what a rank sends in a step, as rings do. Exit status 1 if a run that promises equal losses has
others."""
COLUMNS = ("transport", "model", "stage", "tokens", "run", "step ms", "speedup", "f", "s", "bound", "reached", "compute ms", "optimizer ms",
           "exposed ms", "copies ms", "codec ms", "wire MB", "ratio", "GiB", "losses")
#: What NCCL is told. "as_is": whatever it finds, NVLink where there is one.
TRANSPORTS = {"as_is": {}, "host": {"NCCL_P2P_DISABLE": "1"},
              "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}}
_BETAS = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
_ADAMW = {"optimizer": {"type": "AdamW", "params": _BETAS | {"torch_adam": True, "fused": True}}}
_ADAMS = {"optimizer": {"type": "ScapeAdamS", "params": _BETAS}}


def _scape(density: float, **more) -> dict:
    return {"optimizer": {"type": "SCAPE", "params": _BETAS | {"density": density} | more}}


@dataclass(frozen=True)
class Run:
    """``config``: what is added to the common ds_config. ``equal``: the losses must be the rival's, at 2 ranks."""
    config: dict
    rival: str | None = None
    equal: bool = False
    stages: tuple[int, ...] = (1, 2, 3)
    zero: dict = field(default_factory=dict)


RUNS = {
    "native": Run(_ADAMW),
    "zipped": Run(_ADAMW | {"zipccl": {"enabled": True}}, "native", True),
    "cached": Run(_ADAMW | {"zipccl": {"enabled": True, "cache_params": True}}, "native", True, (3,)),
    "one_sided": Run(_ADAMW | {"zipccl": {"enabled": True, "transport": "adaptive"}}, "native", True),
    "cached_one_sided": Run(_ADAMW | {"zipccl": {"enabled": True, "cache_params": True, "transport": "adaptive"}}, "native", True, (3,)),
    "zeropp": Run(_ADAMW, "native", False, (3,), {"zero_quantized_weights": True, "zero_quantized_gradients": True}),
    "adams": Run(_ADAMS),
    "scape90": Run(_scape(0.1), "adams", False, (1, 2)),
    "scape99": Run(_scape(0.01), "adams", False, (1, 2)),
    **{f"scape{share}{name}": Run(_scape(density, **params) | more, "adams", False, (1, 2)) for share, density in ((90, 0.1), (99, 0.01))
       for name, params, more in (("_offload", {"offload": True}, {}), ("_zipped", {}, {"zipccl": {"enabled": True}}),
                                  ("_offload_zipped", {"offload": True}, {"zipccl": {"enabled": True}}))},
    "again": Run(_ADAMW, "native", True),
}
DEFAULT_RUNS = "native,zipped,again"


def add_arguments(parser) -> None:
    parser.add_argument("--models", metavar="LIST", default="350m", help=f"of {', '.join(step_model.SIZES)} (default 350m)")
    parser.add_argument("--stages", metavar="LIST", default="2,3", help="ZeRO stages, of 1, 2, 3 (default 2,3)")
    parser.add_argument("--tokens", metavar="LIST", default="2048", help="per GPU and step; multiples of --seq-len (default 2048)")
    parser.add_argument("--runs", metavar="LIST", default=DEFAULT_RUNS, help=f"of {', '.join(RUNS)} (default {DEFAULT_RUNS})")
    parser.add_argument("--transports", metavar="LIST", default="as_is",
                        help=f"of {', '.join(TRANSPORTS)} (default as_is); others than as_is need --ranks")
    parser.add_argument("--choice", choices=("adaptive", "always"), default="adaptive", help="of the zipped runs' collectives")
    parser.add_argument("--min-bytes", type=int, default=1 << 20, help="of the zipped runs' configuration (default 1048576)")
    parser.add_argument("--bucket-size", type=int, default=500_000_000, help="DeepSpeed's reduce_bucket_size (default 5e8, as there)")
    parser.add_argument("--seq-len", type=int, default=2048, help="default 2048")
    parser.add_argument("--rounds", type=int, default=2, help="of all runs (default 2)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps a run and round (default 10)")
    parser.add_argument("--warmup", type=int, default=6, help="steps before them, probes included (default 6)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=None, metavar="N", help="spawn N ranks here instead of using a launcher")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here, again after every row")


def _list(args, name: str, known) -> list[str]:
    values = list(dict.fromkeys(getattr(args, name).split(",")))
    unknown = [value for value in values if value not in known]
    if unknown:
        raise ZipScapeError(describe(f"--{name}", got=", ".join(unknown), expected=f"a list of {', '.join(known)}"))
    return values


def _check(args) -> None:
    _list(args, "models", step_model.SIZES)
    _list(args, "stages", ("1", "2", "3"))
    runs, transports = _list(args, "runs", RUNS), _list(args, "transports", TRANSPORTS)
    for name in runs:
        if RUNS[name].rival not in (None, *runs[:runs.index(name)]):
            raise ZipScapeError(describe("--runs: a rival runs before the run that is compared with it", got=args.runs,
                                         expected=f"{RUNS[name].rival} before {name}"))
    for tokens in args.tokens.split(","):
        if not tokens.isdigit() or int(tokens) < 1 or int(tokens) % args.seq_len:
            raise ZipScapeError(describe("--tokens", got=tokens, expected=f"multiples of --seq-len ({args.seq_len})"))
    if args.steps < 1 or args.warmup < 0 or args.rounds < 1:
        raise ZipScapeError(describe("--steps, --warmup and --rounds", got=f"{args.steps}, {args.warmup}, {args.rounds}",
                                     expected=">= 1, >= 0, >= 1"))
    if transports != ["as_is"] and (ranks.launched() or args.device == "cpu"):
        raise ZipScapeError(describe("--transports are settings of NCCL's, made before the ranks start", got=args.transports,
                                     expected="--ranks N on GPUs, or as_is", todo="or set them in the launcher's environment"))


def run(args) -> int:
    _check(args)
    command, status, rows = "ds_zipccl " + " ".join(sys.argv[1:]), 0, []
    console = Console() if sys.stdout.isatty() else Console(width=200)
    for transport in _list(args, "transports", TRANSPORTS):
        with tempfile.TemporaryDirectory() as folder, _environment(TRANSPORTS[transport]):
            path = Path(folder) / "rows.jsonl"
            status = ranks.run(_bench, args.ranks, args.device, args, transport, str(path), rows, command) or status
            rows += [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if rows:                                            # rank 0 of a launcher, or the parent of the ranks
        console.print(_table(rows))
    return status


@contextlib.contextmanager
def _environment(values: dict[str, str]):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _bench(args, transport: str, rows_path: str, rows_before: list[dict], command: str) -> int:
    """All runs of one transport in this rank. Rank 0 says each row as it comes and keeps it in ``rows_path``."""
    step_run.prepare(args.device)
    first, rows, status = dist.get_rank() == 0, [], 0
    speedups = _collectives(args)
    for model, stage, tokens in itertools.product(_list(args, "models", step_model.SIZES), _list(args, "stages", ("1", "2", "3")),
                                                  map(int, args.tokens.split(","))):
        plans = {name: RUNS[name] for name in _list(args, "runs", RUNS) if int(stage) in RUNS[name].stages}
        plans = {name: plan for name, plan in plans.items() if plan.rival in (None, *plans)}
        jobs = {name: _job(plan, model, int(stage), tokens, args) for name, plan in plans.items()}
        found: dict[str, list[dict]] = {name: [] for name in plans}
        for turn in range(args.rounds):
            for name in reversed(plans) if turn % 2 else plans:
                found[name].append(step_run.run(jobs[name]))
                if first and args.rounds > 1:
                    step_ms = found[name][-1]["step_ms"]
                    print(f"round {turn + 1}  {transport}  {model}  stage {stage}  {name}  step ms {step_ms:.1f}", flush=True)
        done = {name: merged(rounds) for name, rounds in found.items()}
        for name, plan in plans.items():
            row = _row(name, done, int(stage), speedups) | {"transport": transport, "model": model, "tokens": tokens}
            bad = torch.tensor([int(row["losses"] == "differ" and plan.equal and dist.get_world_size() == 2)], device=args.device)
            dist.all_reduce(bad)
            status = status or int(bad.item() > 0)
            rows.append(row)
            if first:
                print(_line(row), flush=True)
                with open(rows_path, "a") as file:
                    file.write(json.dumps(row) + "\n")
                if args.json:
                    write_json(args.json, {"rows": rows_before + rows, "collectives_alone": speedups}, command=command)
    if status and first:
        print("ds_zipccl: losses differ where equal ones are promised", file=sys.stderr)
    return status


def merged(rounds: list[dict]) -> dict:
    """What ``step_run.run`` found in each round, as one: all times, their median, the most memory, the last trace. ``losses``: those of
    every round, one round after another."""
    times = [time for found in rounds for time in found["times_ms"]]
    memory = [found["memory_bytes"] for found in rounds]
    return rounds[-1] | {"times_ms": times, "step_ms": statistics.median(times), "memory_bytes": None if None in memory else max(memory),
                         "losses": [loss for found in rounds for loss in found["losses"]]}


def _job(plan: Run, model: str, stage: int, tokens: int, args) -> step_run.Job:
    micro_batch = tokens // args.seq_len
    return step_run.Job(model=model, seq_len=args.seq_len, micro_batch=micro_batch, steps=args.steps, warmup=args.warmup,
                        device=args.device, config=_config(plan, stage, micro_batch, args))


def _config(plan: Run, stage: int, micro_batch: int, args) -> dict:
    config = {"train_micro_batch_size_per_gpu": micro_batch, "bf16": {"enabled": True}, "steps_per_print": 1 << 30,
              "zero_optimization": {"stage": stage, "reduce_bucket_size": args.bucket_size} | plan.zero} | plan.config
    if "zipccl" in config:
        config["zipccl"] = config["zipccl"] | {"collectives": args.choice, "min_bytes": args.min_bytes}
    return config


def _collectives(args, size: int = 64 << 20) -> dict[str, float]:
    """How many times faster the two collectives of ZeRO are, alone, zipped against native."""
    size = size if args.device == "cuda" else 4 << 20
    config = ZipcclConfig(enabled=True, collectives="always", min_bytes=0)
    runtime = Runtime(config, {args.device: loader.resolve("best", args.device)})
    settings = Namespace(device=args.device, dtype="bf16", iters=11)
    found = {}
    for op in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        *_, ours = bench_collectives.measure(specs()[op], size, settings, runtime, False)
        found[op] = ours["speedup"]
    runtime.close()
    return found


def _row(name: str, done: dict[str, dict], stage: int, speedups: dict[str, float]) -> dict:
    mine, rival = done[name], done.get(RUNS[name].rival)
    raw, wire = (sum(op[kind] for op in mine["ops"].values()) for kind in ("raw_bytes", "wire_bytes"))
    wire = wire if mine["ops"] else sum(mine["sent_bytes"].values())
    row = {"op": "step", "stage": stage, "run": name, "ranks": dist.get_world_size(), "time_us": mine["step_ms"] * 1e3, "wire_bytes": wire,
           "ratio": raw / wire if raw and wire else None, "speedup": None, "losses": ""} | {k: v for k, v in mine.items() if k != "losses"}
    row["last_loss"] = float.fromhex(mine["losses"][-1])
    if rival is None:
        return row
    pairs = [theirs / ours for theirs, ours in zip(rival["times_ms"], mine["times_ms"], strict=True)]
    row |= {"rival": RUNS[name].rival, "speedup": rival["step_ms"] / mine["step_ms"],
            "speedup_interval": bench_collectives.median_interval(pairs),
            "losses": "equal" if mine["losses"] == rival["losses"] else "differ"}
    if rival["trace"] and "zipccl" in RUNS[name].config and RUNS[name].rival == "native":
        gathers = 2 if stage == 3 else 1                # of all parameters, for one reduction of all gradients
        s = (gathers + 1) / (gathers / speedups["all_gather_into_tensor"] + 1 / speedups["reduce_scatter_tensor"])
        f = rival["trace"]["exposed_ms"] / rival["step_ms"]
        row |= {"f": f, "s": s, "bound": 1 / (1 - f + f / s)}
        row["reached"] = row["speedup"] / row["bound"]
    return row


def _cells(row: dict) -> list[str]:
    def number(name: str, digits: int, scale: float = 1) -> str:
        value = row.get(name)
        return "" if value is None else f"{value / scale:.{digits}f}"

    trace = row["trace"] or {}
    return [row["transport"], row["model"], str(row["stage"]), str(row["tokens"]), row["run"], number("time_us", 1, 1e3),
            *(number(name, 3) for name in ("speedup", "f", "s", "bound", "reached")),
            *(f"{trace[name]:.1f}" if name in trace else "" for name in ("compute_ms", "optimizer_ms", "exposed_ms", "exposed_copies_ms",
                                                                         "codec_ms")),
            number("wire_bytes", 1, 1e6), number("ratio", 3), number("memory_bytes", 2, 1 << 30), row["losses"]]


def _line(row: dict) -> str:
    return "  ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, _cells(row), strict=True) if cell)


def _table(rows: list[dict]) -> Table:
    first = rows[0]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo"
    title = f"ds_zipccl bench step: {first['ranks']} ranks, {where}, median of {len(first['times_ms'])} steps"
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("transport", "model", "run", "losses") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table
