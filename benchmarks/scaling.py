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
    parser.add_argument("--model", default="350m")
    parser.add_argument("--tokens", default="2048")
    parser.add_argument("--runs3", default="native,zipped,zipped_sums,again", help="ZeRO-3 runs of bench step")
    parser.add_argument("--runs1", default="adams,adams_again,scape90,scape99", help="ZeRO-1 runs of bench step")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit", type=int, default=120, help="seconds a command (default 120)")
    parser.add_argument("--seconds", type=int, default=560, help="for everything: what would begin later is left out (default 560)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing: plot the rows of this scaling.json, into --out")
    parser.add_argument("--dry-run", action="store_true", help="small sizes, a tiny model, one round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.dry_run:
        args.sizes, args.model, args.tokens, args.rounds, args.limit = "1M", "tiny", "256", 1, min(args.limit, 60)
    return args


def commands(args, ranks: int):
    """(kind, arguments of ds_zipccl) of one number of ranks and any transport."""
    common = ["--device", args.device, "--ranks", str(ranks)]
    sizes = args.sizes.split(",")
    yield "collectives", ["bench", "collectives", *common, "--op", OPS, "-b", sizes[0], "-e", sizes[-1]]
    small = ["--min-bytes", "0", "--bucket-size", "50000", "--steps", "1", "--warmup", "2"] if args.model == "tiny" else []
    cells = [f"{args.model}/{stage}/{args.tokens}/{runs}" for stage, runs in ((3, args.runs3), (1, args.runs1))]
    yield "step", ["bench", "step", *common, "--cells", *cells, "--seq-len", str(min(2048, int(args.tokens))),
                   "--rounds", str(args.rounds), "--seconds", str(max(10, args.limit - 40)), *small]


def main(argv=None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plot:
        plot(json.loads(args.plot.read_text())["rows"], args.out / "scaling.png")
        return 0
    jobs, rows, end, path = [], [], time.monotonic() + args.seconds, args.json or args.out / "scaling.json"
    for ranks in map(int, args.ranks.split(",")):
        if args.device == "cuda" and ranks > torch.cuda.device_count():
            print(f"{ranks} ranks: left out, there are {torch.cuda.device_count()} GPUs", flush=True)
            continue
        jobs += [(ranks, transport, *command) for transport in args.transports.split(",") for command in commands(args, ranks)]

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


def plot(rows: list[dict], path: Path) -> None:
    """Speed-up over the rival, and of steps also the efficiency: the time of a step on the fewest ranks by its time on more (the work of a
    rank is the same)."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed; --plot FILE makes it later from scaling.json", flush=True)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    speedups, times = {}, {}
    for row in rows:
        if "error" in row:
            continue
        if row["op"] == "step":
            name = f"ZeRO-{row['stage']} {row['run']}, {row['transport']}"
            times.setdefault(name, {})[row["ranks"]] = row["time_us"]
        elif row["impl"] != "ours" or row["in_place"]:
            continue
        else:
            name = f"{row['op']} {row['bytes'] >> 20} MiB, {row['transport']}"
        if row.get("speedup"):
            speedups.setdefault(name, {})[row["ranks"]] = row["speedup"]
    figure, axes = pyplot.subplots(1, 2, figsize=(18, 7))
    for name, points in speedups.items():
        axes[0].plot(list(points), list(points.values()), marker="o", label=name)
    for name, points in times.items():
        axes[1].plot(list(points), [points[min(points)] / us for us in points.values()], marker="o", label=name)
    for axis, title in zip(axes, ("speed-up over the rival", "scaling efficiency of a step"), strict=True):
        axis.set(title=title, xlabel="GPUs")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.set_xticks(sorted({x for line in axis.lines for x in line.get_xdata()}))
            axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
