"""``ds_zipccl bench step``: whole DeepSpeed training steps, native against ours, over one transport after another."""
import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from ds_zipccl.cli import bench_collectives, ranks, step_model, step_rows, step_run
from ds_zipccl.cli.step_runs import DEFAULT_RUNS, RUNS, Cell
from ds_zipccl.collectives.registry import specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from zipscape.errors import ZipScapeError, describe
from zipscape.machine import describe_machine, write_json

HELP = "training steps: ZeRO natively against zipped, and against the lossy rivals"
DESCRIPTION = """Trains a GPT on random tokens with DeepSpeed. Runs that differ only in their communication share an engine, whose
collectives are switched between steps. First each run's first steps from the same weights, whose losses, weights and optimizer states are
compared in bits; then rounds: some steps of each run in turn, then again, every other round backwards; then a trace of each.
speedup: of the median over the rounds against the run's rival; the run "again" is native once more: the noise. f: the exposed share of
communication in the rival's step (GPU); f alone: by how much the step gets shorter without collectives (run "silent"); s: how many times
faster the collectives are alone, measured in the same process; bound = 1 / (1 - f + f / s); reached = speedup / bound. From a trace (GPU):
compute, of it the optimizer's part, and what of communication and of copies from and to the host is exposed; idle: the GPU does nothing.
host ms: in forward, backward and optimizer. wire MB: what a rank sends in a step, as rings do. Exit status 1 if a run that promises equal
losses has others."""
#: What NCCL is told. "as_is": whatever it finds, NVLink where there is one.
TRANSPORTS = {"as_is": {}, "host": {"NCCL_P2P_DISABLE": "1"},
              "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}}


def add_arguments(parser) -> None:
    parser.add_argument("--models", metavar="LIST", default="350m", help=f"of {', '.join(step_model.SIZES)} (default 350m)")
    parser.add_argument("--stages", metavar="LIST", default="2,3", help="ZeRO stages, of 1, 2, 3 (default 2,3)")
    parser.add_argument("--tokens", metavar="LIST", default="2048", help="per GPU and step; multiples of --seq-len (default 2048)")
    parser.add_argument("--runs", metavar="LIST", default=DEFAULT_RUNS, help=f"of {', '.join(RUNS)} (default {DEFAULT_RUNS})")
    parser.add_argument("--cells", metavar="MODEL/STAGE/TOKENS/RUNS[/ROUNDS] ...", nargs="+",
                        help="in place of these four: combinations in this order, such as 350m/3/2048,8192/native,zipped")
    parser.add_argument("--transports", metavar="LIST", default="as_is", help=f"of {', '.join(TRANSPORTS)} (default as_is); others than "
                        "as_is need --ranks, or a launcher whose environment has their settings")
    parser.add_argument("--choice", choices=("adaptive", "always"), default="adaptive", help="of the zipped runs' collectives")
    parser.add_argument("--min-bytes", type=int, default=1 << 20, help="of the zipped runs' configuration (default 1048576)")
    parser.add_argument("--bucket-size", type=int, default=50_000_000, help="DeepSpeed's reduce_bucket_size, elements (default 5e7)")
    parser.add_argument("--seq-len", type=int, default=2048, help="default 2048")
    parser.add_argument("--rounds", type=int, default=8, help="of all runs (default 8)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps a run and round, in a row (default 3)")
    parser.add_argument("--skip", type=int, default=1, help="steps before them, which are not measured (default 1)")
    parser.add_argument("--warmup", type=int, default=4,
                        help="first steps of each run, probes included, at least 2; losses are compared (default 4)")
    parser.add_argument("--seconds", type=float, default=None, help="when so many are over, begin nothing more that "
                        "can be left out: rounds after the second, traces, runs, combinations; what was left out is said")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=None, metavar="N", help="spawn N ranks here instead of using a launcher")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here, again after every combination")
    parser.add_argument("--markdown", metavar="FILE", help="also write tables here")
    parser.add_argument("--merge", metavar="FILE", nargs="+", help="measure nothing: put the rows of these --json files together")


def _list(text: str, name: str, known) -> list[str]:
    values = list(dict.fromkeys(text.split(",")))
    unknown = [value for value in values if value not in known]
    if unknown:
        raise ZipScapeError(describe(f"--{name}", got=", ".join(unknown), expected=f"a list of {', '.join(known)}"))
    return values


def _cells(args) -> list[Cell]:
    """What is measured, in order."""
    texts = [text.split("/") for text in args.cells or [f"{args.models}/{args.stages}/{args.tokens}/{args.runs}"]]
    found = []
    for text in texts:
        if len(text) not in (4, 5) or not "".join(text[4:] or "1").isdigit():
            raise ZipScapeError(describe("--cells", got="/".join(text), expected="MODEL/STAGE/TOKENS/RUNS[/ROUNDS]"))
        models, stages, all_tokens, runs = text[:4]
        rounds = int(text[4]) if len(text) == 5 else None
        runs = _list(runs, "runs", RUNS)
        for name in runs:
            if RUNS[name].rival not in (None, *runs[:runs.index(name)]):
                raise ZipScapeError(describe("--runs: a rival runs before the run that is compared with it", got=",".join(runs),
                                             expected=f"{RUNS[name].rival} before {name}"))
        for tokens in all_tokens.split(","):
            if not tokens.isdigit() or int(tokens) < 1 or int(tokens) % args.seq_len:
                raise ZipScapeError(describe("--tokens", got=tokens, expected=f"multiples of --seq-len ({args.seq_len})"))
        found += [Cell(model, int(stage), int(tokens), tuple(runs), rounds) for model, stage, tokens in itertools.product(
            _list(models, "models", step_model.SIZES), _list(stages, "stages", ("1", "2", "3")), all_tokens.split(","))]
    return found


def _check(args) -> None:
    _cells(args)
    transports = _list(args.transports, "transports", TRANSPORTS)
    if min(args.steps, args.rounds, args.warmup - 1) < 1 or args.skip < 0:
        raise ZipScapeError(describe("--steps, --rounds, --warmup and --skip", expected=">= 1, >= 1, >= 2, >= 0",
                                     got=f"{args.steps}, {args.rounds}, {args.warmup}, {args.skip}"))
    are_set = len(transports) == 1 and TRANSPORTS[transports[0]].items() <= os.environ.items()
    if transports != ["as_is"] and (args.device == "cpu" or ranks.launched() and not are_set):
        raise ZipScapeError(describe("--transports are settings of NCCL's, made before the ranks start", got=args.transports,
                                     expected="--ranks N on GPUs, or as_is", todo="or set them in the launcher's environment"))


def run(args) -> int:
    command, status, rows = "ds_zipccl " + " ".join(sys.argv[1:]), 0, []
    if args.merge:
        return _merge(args, command)
    _check(args)
    console = Console() if sys.stdout.isatty() else Console(width=260)
    for transport in _list(args.transports, "transports", TRANSPORTS):
        with tempfile.TemporaryDirectory() as folder, _environment(TRANSPORTS[transport]):
            path = Path(folder) / "rows.jsonl"
            status = ranks.run(_bench, args.ranks, args.device, args, transport, str(path), rows, command) or status
            rows += [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if rows:                                            # rank 0 of a launcher, or the parent of the ranks
        console.print(step_rows.table(rows))
    return status


def _merge(args, command: str) -> int:
    files = [json.loads(Path(path).read_text()) for path in args.merge]
    rows = [row for file in files for row in file["rows"]]
    if args.json:
        merged = {"meta": files[0]["meta"], "commands": [file["meta"]["command"] for file in files], "rows": rows,
                  "left_out": [text for file in files for text in file.get("left_out", [])]}
        Path(args.json).write_text(json.dumps(merged, indent=1) + "\n")
    if args.markdown:
        step_rows.write_markdown(args.markdown, rows, files[0]["meta"])
    Console(width=260).print(step_rows.table(rows))
    return 0


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
    """All combinations over one transport in this rank. Rank 0 says each row as it comes and keeps it in ``rows_path``."""
    step_run.prepare(args.device)
    from ds_zipccl.cli.step_compare import Comparison, Deadline  # imports DeepSpeed

    first, rows, status, start, left_out = dist.get_rank() == 0, [], 0, time.monotonic(), []
    deadline, alone = Deadline(args.seconds, args.device), _collectives(args)
    comparison = Comparison(args, alone, deadline)

    def save() -> None:
        if first and args.json:
            found = {"rows": rows_before + rows, "collectives_alone_us": alone, "left_out": left_out}
            write_json(args.json, found, command=command)

    for cell in _cells(args):
        if deadline.is_over():
            left_out.append(f"{transport} {cell}")
            save()
            continue
        for row in comparison.rows(cell):
            row["transport"] = transport
            bad = row["losses"] == "differ" and RUNS[row["run"]].equal and dist.get_world_size() == 2
            bad = torch.tensor([int(bad)], device=args.device)
            dist.all_reduce(bad)
            status = status or int(bad.item() > 0)
            rows.append(row)
            if first:
                print(f"{time.monotonic() - start:.0f} s  {step_rows.line(row)}", flush=True)
                with open(rows_path, "a") as file:
                    file.write(json.dumps(row) + "\n")
        if comparison.left_out:
            left_out.append(f"{transport} {cell}: {', '.join(comparison.left_out)}")
        save()
        if first and args.markdown:
            step_rows.write_markdown(args.markdown, rows_before + rows, describe_machine(command))
    comparison.close()
    if first and left_out:
        print("left out: " + "; ".join(left_out), flush=True)
    if status and first:
        print("ds_zipccl: losses differ where equal ones are promised", file=sys.stderr)
    return status


def _collectives(args, size: int = 64 << 20) -> dict[str, float]:
    """Microseconds of "native all_gather_into_tensor", "ours all_gather_into_tensor" and so on, alone, of tensors of one size; of
    "one_sided ..." where a run may go so."""
    size = size if args.device == "cuda" else 4 << 20
    parser = argparse.ArgumentParser()
    bench_collectives.add_arguments(parser)
    settings = parser.parse_args(["--device", args.device])
    transports = {"ours": "process_group"}
    if args.device == "cuda" and any("transport" in (RUNS[name].zipccl or {}) for cell in _cells(args) for name in cell.runs):
        transports["one_sided"] = "symmetric_memory"
    found = {}
    for who, transport in transports.items():
        config = ZipcclConfig(enabled=True, collectives="always", min_bytes=0, transport=transport)
        runtime = Runtime(config, {args.device: loader.resolve("best", args.device)})
        for op in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            native, _, ours = bench_collectives.measure(specs()[op], size, settings, {"ours": runtime}, False)
            found |= {f"native {op}": native["time_us"], f"{who} {op}": ours["time_us"]}
        runtime.close()
    return found
