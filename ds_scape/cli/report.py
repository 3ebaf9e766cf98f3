"""``ds_scape report``: which kernels can be used here, how they were built, and why not."""
import torch
from rich.console import Console
from rich.table import Table

from ds_scape.kernels import loader
from zipscape.machine import write_json
from zipscape.op_builder import scape

HELP = "which kernels are built and usable here, and why not"
DESCRIPTION = HELP


def add_arguments(parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the report here")


def collect() -> dict:
    """The report as plain data; builds what is not built yet."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return {"kernels": loader.report(), "best_kernels": loader.choose("best", device_type).names,
            "libraries": [{"name": library.name, **library.state()} for library in scape.LIBRARIES]}


def run(args) -> int:
    data = collect()
    table = Table("component", "for", "usable", "note", title="ds_scape report", title_justify="left")
    for name, row in data["kernels"].items():
        best = " (best here)" if name in data["best_kernels"].values() else ""
        table.add_row(f"kernels: {name}{best}", "/".join(row["devices"]), "yes" if row["available"] else "NO",
                      row["reason"] or row["built"] or "")
    for row in data["libraries"]:
        what = ", ".join(filter(None, (row["installed"] or "not built", row["compiler"], row["arches"] and f"code for {row['arches']}")))
        table.add_row(f"library: {row['name']}", "-", "yes" if row["compatible"] else "NO",
                      " ".join(filter(None, (what if row["compatible"] else "", row["reason"]))))
    Console().print(table)
    if args.json:
        write_json(args.json, data, command="ds_scape report")
    return 0
