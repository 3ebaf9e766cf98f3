"""The rows of ``ds_zipccl bench step``: what is computed from measurements, and how they are shown."""
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

from ds_zipccl.cli.bench_collectives import median_interval
from ds_zipccl.cli.step_run import PARTS, Found
from ds_zipccl.cli.step_runs import RUNS, SILENT, Cell

COLUMNS = ("transport", "model", "stage", "tokens", "run", "step ms", "speedup", "interval", "kept", "if zipped", "on engine", "f", "s",
           "bound", "reached", "f alone", "bound alone", "compute ms", "optimizer ms", "exposed ms", "copies ms", "codec ms", "idle ms",
           "host ms", "wire MB", "ratio", "GiB", "losses")
_TEXT = ("transport", "model", "run", "interval", "kept", "losses")
#: What SCAPE at a density removes of the exposed communication, at most: the number to reach is stated so.
REMOVED = 0.95


def row(cell: Cell, name: str, done: dict[str, Found], first: str, alone: dict[str, float], num_parameters: int) -> dict:
    """``first``: the run of the same engine whose losses are to be equal. ``alone``: see ``gain_alone``."""
    run, mine = RUNS[name], done[name]
    rival = done.get(run.rival)
    raw, wire = (sum(op[kind] for op in mine.ops.values()) for kind in ("raw_bytes", "wire_bytes"))
    wire = wire if mine.ops else sum(mine.sent_bytes.values())
    found = {"op": "step", "model": cell.model, "stage": cell.stage, "tokens": cell.tokens, "run": name, "ranks": dist.get_world_size(),
             "num_parameters": num_parameters, "time_us": mine.step_ms * 1e3, "step_ms": mine.step_ms, "times_ms": mine.times_ms,
             "host_ms": {part: statistics.median(times) for part, times in mine.host_ms.items() if times}, "wire_bytes": wire,
             "ratio": raw / wire if raw and wire else None, "memory_bytes": mine.memory_bytes, "trace": mine.trace, "ops": mine.ops,
             "sent_bytes": mine.sent_bytes, "speedup": None, "losses": "", "last_loss": float.fromhex(mine.losses[-1])}
    trial = mine.trial if rival is not None else None
    if mine.trace:
        busy = mine.trace["compute_ms"] + mine.trace["exposed_ms"] + mine.trace["exposed_copies_ms"]
        found["idle_ms"] = max(0.0, (statistics.median(trial["zipped_ms"]) if trial else mine.step_ms) - busy)
    if name != first and mine.prints and run.zipccl != SILENT:
        found["losses"] = "equal" if (mine.losses, mine.prints) == (done[first].losses, done[first].prints) else "differ"
    if name != first and first != run.rival:
        found["speedup_on_engine"] = done[first].step_ms / mine.step_ms
    if rival is None:
        return found
    found |= {"rival": run.rival} | (_tried(trial) if trial else {})
    if not trial or run.engine_key != RUNS[run.rival].engine_key:       # a trial compares with native on the same engine
        found |= _compared(rival.times_ms, mine.times_ms)
    if rival.trace and (isinstance(run.zipccl, dict) or run.optimizer["type"] == "SCAPE"):
        found |= _bound(name, wire, rival, mine, alone)
        found["reached"] = found["speedup"] / found["bound"]
    silent = next((done[other] for other in done if RUNS[other].zipccl == SILENT and RUNS[other].rival == run.rival), None)
    if silent is not None and run.zipccl != SILENT:
        f = found["f_alone"] = max(0.0, 1 - silent.step_ms / rival.step_ms)
        if "s" in found:
            found["bound_alone"] = 1 / (1 - f + f / found["s"])
    return found


def _compared(rival_ms: list[float], mine_ms: list[float]) -> dict:
    """Of times in turns."""
    num = min(len(rival_ms), len(mine_ms))              # rounds that end early end for all, but trials have their own
    return {"speedup": statistics.median(rival_ms) / statistics.median(mine_ms),
            "speedup_interval": median_interval([a / b for a, b in zip(rival_ms[:num], mine_ms[:num], strict=True)])}


def _tried(trial: dict) -> dict:
    """Of a trial: what is kept is compared with native; "if_zipped" is how zipped steps compare, kept or not."""
    zipped = _compared(trial["native_ms"], trial["zipped_ms"])
    kept = zipped if trial["choice"] == "zipped" else {"speedup": 1.0, "speedup_interval": None}
    return kept | {"trial": trial, "if_zipped": zipped["speedup"], "if_zipped_interval": zipped["speedup_interval"]}


def _bound(name: str, wire: float, rival: Found, mine: Found, alone: dict[str, float]) -> dict[str, float]:
    """f: the exposed share of the rival's traced step. s: of SCAPE how many times fewer bytes it sends, at most what leaves 5 % of the
    exposed communication; of ZipCCL how many times faster its collectives are, alone, than those that DeepSpeed uses natively."""
    f = min(1.0, rival.trace["exposed_ms"] / rival.step_ms)
    if RUNS[name].optimizer["type"] == "SCAPE":
        s = min(1 / (1 - REMOVED), sum(rival.sent_bytes.values()) / wire) if wire else 1.0
    else:
        left = mine.ops.get("all_reduce", {}).get("raw_bytes", 0)
        s = gain_alone(rival.sent_bytes, alone, ("ours", "one_sided") if "transport" in RUNS[name].zipccl else ("ours",),
                       left_reduced=left, scattered=mine.busiest_bytes)
    return {"f": f, "s": s, "bound": 1 / (1 - f + f / s)}


def gain_alone(sent: dict[str, int], alone: dict[str, float], ways: tuple[str, ...] = ("ours",), left_reduced: float = 0,
               scattered: float = 0) -> float:
    """How many times faster the collectives of a step are by themselves. ``sent``: bytes of a native step. ``alone``: microseconds of
    "native all_reduce", "native all_gather_into_tensor", "ours reduce_scatter_tensor" and so on, all of tensors of one size. What ours
    makes of the all_reduces: ``left_reduced``: bytes that are all_reduced still; ``scattered``: that the busiest rank sends or receives
    where ZeRO 1 and 2 reduce-scatter instead, a bucket of one owner twice as many for its size as one that two ranks share."""
    gather, scatter, reduce = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    sizes = {gather: sent.get(gather, 0), scatter: sent.get(scatter, 0), reduce: sent.get(reduce, 0) / 2}       # a ring sends it twice
    native = sum(size * alone[f"native {op}"] for op, size in sizes.items())
    if not native:
        return 1.0
    best = {op: min(alone[f"{who} {op}"] for who in ("native", *ways)) for op in sizes}
    ours = sizes | {reduce: min(sizes[reduce], left_reduced / 2)}
    ours_us = sum(size * best[op] for op, size in ours.items()) + scattered * min(alone[f"{who} {scatter}"] for who in ways)
    return native / ours_us if ours_us else 1.0


def cells(row: dict) -> list[str]:
    def number(name: str, digits: int, scale: float = 1) -> str:
        value = row.get(name)
        return "" if value is None else f"{value / scale:.{digits}f}"

    trace, low_high = row.get("trace") or {}, row.get("speedup_interval")
    return [row["transport"], row["model"], str(row["stage"]), str(row["tokens"]), row["run"], number("time_us", 1, 1e3),
            number("speedup", 3), f"{low_high[0]:.2f}-{low_high[1]:.2f}" if low_high else "",
            (row.get("trial") or {}).get("choice", ""), number("if_zipped", 3), number("speedup_on_engine", 3),
            *(number(name, 3) for name in ("f", "s", "bound", "reached", "f_alone", "bound_alone")),
            *(f"{trace[name]:.1f}" if name in trace else "" for name in ("compute_ms", "optimizer_ms", "exposed_ms", "exposed_copies_ms",
                                                                         "codec_ms")),
            number("idle_ms", 1), "/".join(f"{row['host_ms'][part]:.0f}" for part in PARTS if part in row["host_ms"]),
            number("wire_bytes", 1, 1e6), number("ratio", 3), number("memory_bytes", 2, 1 << 30), row["losses"]]


def line(row: dict) -> str:
    return "  ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells(row), strict=True) if cell)


def table(rows: list[dict]) -> Table:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo"
    shown = Table(title=f"ds_zipccl bench step: {rows[0]['ranks']} ranks, {where}", title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in _TEXT else "right", no_wrap=True)
    for found in rows:
        shown.add_row(*cells(found))
    return shown


def write_markdown(path: str, rows: list[dict], meta: dict) -> None:
    """One table for each transport and stage, without the columns that stay empty in it."""
    gpus = meta["machine"]["gpus"]
    lines = ["# `ds_zipccl bench step`", "", f"{rows[0]['ranks']} ranks, {gpus[0] if gpus else 'CPU, gloo'}; torch "
             f"{meta['versions']['torch']}, DeepSpeed {meta['versions']['deepspeed']}; {meta['date'][:10]}. {EXPLAINED}", ""]
    for key in dict.fromkeys((found["transport"], found["stage"]) for found in rows):
        group = [cells(found) for found in rows if (found["transport"], found["stage"]) == key]
        used = [i for i, name in enumerate(COLUMNS) if name not in ("transport", "stage") and any(cell[i] for cell in group)]
        lines += [f"## ZeRO-{key[1]}, transport {key[0]}", "", "| " + " | ".join(COLUMNS[i] for i in used) + " |",
                  "|" + "|".join("---" if COLUMNS[i] in _TEXT else "---:" for i in used) + "|"]
        lines += ["| " + " | ".join(cell[i] for i in used) + " |" for cell in group] + [""]
    Path(path).write_text("\n".join(lines))


EXPLAINED = """speedup: the rival's median step (native, or dense AdamS) by this one's; interval: 95 % of that median over the rounds;
the runs `again` are the rival itself: the noise. on engine: the same over the first run of the same engine (other settings than the
rival's). kept: what a trial of
whole steps chose, whose times the row has then, in turns with native; if zipped: the speedup of the zipped steps in it, kept or not; bytes,
trace and s of such a row are those of its zipped steps. f: the exposed share of communication in the rival's step, from a trace; s: how
many times
faster the collectives are alone (SCAPE: how many times fewer bytes, at most 20); bound: 1 / (1 - f + f / s); reached: speedup / bound.
f alone: the share by which the step gets shorter when its collectives are left out (silent), less than f where the GPU communicates while
it waits for the host anyway; bound alone: the bound from it. idle: the GPU does nothing, as the host is busy. host: its time in forward /
backward / optimizer, waiting included. wire: what a rank sends in a step. losses: those of the first steps, and all weights and optimizer
states after them, are equal in bits."""
