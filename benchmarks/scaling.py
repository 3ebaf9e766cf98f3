"""How the gain grows with the number of GPUs of one host: collectives and training steps on 2, 4 and 8 of them, over three transports.

    python benchmarks/scaling.py --out benchmarks/results/scaling          # writes scaling.json and scaling.png there

Two commands of ``ds_zipccl bench`` for each number of ranks and transport, which verify their results in the same run; one that fails or
does not end in time is kept as a row with its reason, as is one that no time was left for (--seconds). --dry-run: everything in small and
beside each other, less than a minute on 2 GPUs, to see that it would run. --device cpu does that over gloo.
"""
import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from zipscape.machine import write_json

sys.path.append(str(Path(__file__).parent))
from commands import DS_ZIPCCL, TRANSPORTS, measure

OPS = "all_gather_into_tensor,reduce_scatter_tensor,all_to_all_single"


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"), help="folder of scaling.json and scaling.png (runs/scaling)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="in place of scaling.json")
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks; those for which there are no GPUs are left out (default 2,4,8)")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help=f"of {', '.join(TRANSPORTS)}")
    parser.add_argument("--sizes", default="64M,256M", help="of the collectives, smallest and largest (default 64M,256M)")
    parser.add_argument("--model", default="1.3b")
    parser.add_argument("--tokens", default="2048")
    parser.add_argument("--runs3", default="native,zipped,zipped_sums,again", help="ZeRO-3 runs of bench step")
    parser.add_argument("--runs1", default="adams,adams_again,scape90,scape99", help="ZeRO-1 runs of bench step")
    parser.add_argument("--limit", type=int, default=120, help="seconds a command (default 120)")
    parser.add_argument("--seconds", type=int, default=560, help="for everything: what would begin later is left out (default 560)")
    parser.add_argument("--plot", type=Path, metavar="FILE", nargs="+", help="measure nothing: plot the rows of these files together, into "
                        "--out")
    parser.add_argument("--dry-run", action="store_true", help="small sizes, a tiny model, one round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.dry_run:
        args.sizes, args.model, args.tokens, args.limit = "1M", "tiny", "256", min(args.limit, 60)
    return args


def commands(args, ranks: int, transport: str):
    """(kind, arguments of ds_zipccl) of one number of ranks. Over sockets a step takes more than a second."""
    common = ["--device", args.device, "--ranks", str(ranks)]
    sizes = args.sizes.split(",")
    yield "collectives", ["bench", "collectives", *common, "--op", OPS, "-b", sizes[0], "-e", sizes[-1], "--seconds", "0.3"]
    if args.model == "tiny":
        turns = ["--min-bytes", "0", "--bucket-size", "50000", "--rounds", "1", "--steps", "1", "--warmup", "2"]
    elif transport == "sockets":
        turns = ["--rounds", "4", "--steps", "1", "--warmup", "2", "--skip", "0"]
    else:
        turns = ["--rounds", "4", "--steps", "2", "--warmup", "3"]
    cells = [f"{args.model}/{stage}/{args.tokens}/{runs}" for stage, runs in ((3, args.runs3), (1, args.runs1))]
    yield "step", ["bench", "step", *common, "--cells", *cells, "--seq-len", str(min(2048, int(args.tokens))),
                   "--seconds", str(max(10, args.limit - 40)), *turns]


def main(argv=None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plot:
        plot([row for file in args.plot for row in json.loads(file.read_text())["rows"]], args.out / "scaling.png")
        return 0
    jobs, rows, end, path = [], [], time.monotonic() + args.seconds, args.json or args.out / "scaling.json"
    for ranks in map(int, args.ranks.split(",")):
        if args.device == "cuda" and ranks > torch.cuda.device_count():
            print(f"{ranks} ranks: left out, there are {torch.cuda.device_count()} GPUs", flush=True)
            continue
        jobs += [(ranks, transport, *command) for transport in args.transports.split(",") for command in commands(args, ranks, transport)]

    def do(job) -> tuple[list[dict], float]:
        _, transport, kind, arguments = job
        start = time.monotonic()
        found = measure(kind, [*DS_ZIPCCL, *arguments], TRANSPORTS[transport], min(args.limit, int(end - start)))
        return found["rows"], time.monotonic() - start

    with ThreadPoolExecutor(len(jobs) or 1 if args.dry_run else 1) as pool:
        for (ranks, transport, *_), (found, seconds) in zip(jobs, pool.map(do, jobs), strict=True):
            rows += [row | {"transport": transport, "ranks": ranks} for row in found]
            for row in found:
                if "error" in row or row.get("impl") == "ours" or row["op"] == "step" and row["speedup"]:
                    print(f"{ranks} {transport} {line(row)}", flush=True)
            print(f"   {seconds:.0f} s", flush=True)
            write_json(path, {"rows": rows}, command="python benchmarks/scaling.py " + " ".join(sys.argv[1:]))
    plot(rows, args.out / "scaling.png")
    return 1 if any("error" in row or row.get("wrong") for row in rows) else 0


def line(row: dict) -> str:
    if "error" in row:
        return f"{row['op']} {row['error']}"
    if row["op"] == "step":
        return f"step ZeRO-{row['stage']} {row['run']} against {row['rival']}: {row['speedup']:.3f}, losses {row['losses']}"
    return f"{row['op']} {row['bytes'] >> 20} MiB {'in' if row['in_place'] else 'out of'} place: {row['speedup']:.3f}, wrong {row['wrong']}"


LINES = {"as_is": "-", "host": "--", "sockets": ":"}


def plot(rows: list[dict], path: Path) -> None:
    """Speed-up of calls and of steps over their rivals; and the steps' efficiency: the time on the fewest ranks by that on more (the work
    of a rank is the same). A line's colour says what, its kind over which link."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed; --plot FILE makes it later from scaling.json", flush=True)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(24, 7))
    titles = "collectives: speed-up over native", "steps: speed-up over the rival", "scaling efficiency of a step"
    for axis, title, found in zip(axes, titles, curves(rows), strict=True):
        colours = {what: f"C{i % 10}" for i, what in enumerate(dict.fromkeys(what for what, _ in found))}
        for (what, transport), points in found.items():
            axis.plot(list(points), list(points.values()), LINES.get(transport, "-."), marker="o", color=colours[what],
                      label=f"{what}, {transport}")
        axis.set(title=title, xlabel="GPUs")
        axis.grid(alpha=0.3)
        if found:
            axis.set_xticks(sorted({ranks for points in found.values() for ranks in points}))
            axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    axes[1].set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def curves(rows: list[dict]) -> tuple[dict, dict, dict]:
    """{(what, transport): {ranks: value}} of the three."""
    calls, steps, times = {}, {}, {}
    for row in rows:
        if "error" in row:
            continue
        where = row["transport"]
        if row["op"] == "step":
            what = f"ZeRO-{row['stage']} {row['run']}", where
            times.setdefault(what, {})[row["ranks"]] = row["time_us"]
            if row.get("speedup"):
                steps.setdefault(what, {})[row["ranks"]] = row["speedup"]
        elif row["impl"] == "ours" and not row["in_place"]:
            calls.setdefault((f"{row['op']} {row['bytes'] >> 20} MiB", where), {})[row["ranks"]] = row["speedup"]
    efficiency = {what: {ranks: points[min(points)] / us for ranks, us in sorted(points.items())} for what, points in times.items()}
    return tuple({what: dict(sorted(points.items())) for what, points in found.items()} for found in (calls, steps, efficiency))


if __name__ == "__main__":
    sys.exit(main())
