"""Rows of ``bench collectives`` as tables: one line each on the console, one for each call in Markdown."""
from pathlib import Path

import torch
from rich.table import Table

COLUMNS = ("op", "size", "count", "type", "place", "calls", "turns", "path", "time us", "algbw", "busbw", "wire", "ratio", "speedup",
           "95 %", "decision", "#wrong")
_TEXT = "op", "type", "place", "path", "decision"


def _where(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU, gloo"


def console_table(rows: list[dict], device: str) -> Table:
    title = f"ds_zipccl bench collectives: {rows[0]['ranks']} ranks, {_where(device)}, medians"
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in _TEXT else "right", no_wrap=True)
    for row in rows:
        low, high = row["speedup_interval"]
        table.add_row(row["op"], str(row["bytes"]), str(row["count"]), row["dtype"], "in" if row["in_place"] else "out",
                      str(row["calls"]), str(row["turns"]), row["impl"], f"{row['time_us']:.1f}", f"{row['algbw']:.2f}",
                      f"{row['busbw']:.2f}", str(row["wire_bytes"]), f"{row['ratio']:.3f}", f"{row['speedup']:.3f}",
                      f"{low:.2f}-{high:.2f}", row["decision"], str(row["wrong"]))
    return table


def size_text(num_bytes: int) -> str:
    """To the nearest KiB or MiB: rows of odd sizes are a few elements short."""
    return f"{round(num_bytes / (1 << 20))} MiB" if num_bytes > 1 << 19 else f"{round(num_bytes / 1024)} KiB"


def markdown(rows: list[dict]) -> str:
    """One table; a line for each call, a column for the time of native and for each other path: time, speedup with its interval, and how
    ours went."""
    paths = [path for path in dict.fromkeys(row["impl"] for row in rows) if path != "native"]
    head = ["op", "size", "place", "calls", "turns", "native us", *paths]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|---|" + "---:|" * (len(head) - 3)]
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["bytes"], row["in_place"], row["calls"]), {})[row["impl"]] = row
    for (op, num_bytes, in_place, calls), by_path in groups.items():
        native = by_path["native"]
        cells = [op, size_text(num_bytes), "in" if in_place else "out", str(calls), str(native["turns"]), _microseconds(native)]
        lines.append("| " + " | ".join([*cells, *(_cell(by_path.get(path)) for path in paths)]) + " |")
    return "\n".join(lines) + "\n"


def _microseconds(row: dict) -> str:
    return f"{row['time_us']:.{1 if row['time_us'] < 100 else 0}f}"


def _cell(row: dict | None) -> str:
    if row is None:
        return ""
    low, high = row["speedup_interval"]
    speedup = f"{row['speedup']:.2f} ({low:.2f}-{high:.2f})"
    if row["impl"] == "native again":
        return speedup
    return f"{_microseconds(row)}: {speedup}" + (f" {row['decision']}" if row["decision"] else "")


def write_markdown(path: str, rows: list[dict], meta: dict, notes: list[str]) -> None:
    gpus, versions = meta["machine"]["gpus"], meta["versions"]
    head = (f"{rows[0]['ranks']} ranks, {gpus[0] if gpus else 'CPU, gloo'}; torch {versions['torch']}, CUDA {versions['cuda']}; "
            f"{meta['date'][:10]}; `{meta['command']}`")
    Path(path).write_text("\n".join(["# `ds_zipccl bench collectives`", "", head, "", *notes, "", markdown(rows)]))
