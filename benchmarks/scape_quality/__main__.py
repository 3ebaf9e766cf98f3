"""Does SCAPE learn as well as dense AdamS? Trains the same GPT on real text with all of them, W workers simulated in one process a run.

    python -m benchmarks.scape_quality --seconds 400 --json benchmarks/results/scape_quality.json --png benchmarks/results/scape_quality.png

from the repository root, on as many GPUs as there are (or, tiny, on a CPU). Ends after --seconds and goes on where it stopped when it is
called again with the same --folder. Settings must be chosen on the part "tune" of the held-out files; the table shows the part "report".
"""
import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.scape_quality import text, train
from zipscape.machine import write_json

#: lr: AdamS's and SCAPE's from the study's sweep; AdamW's likewise.
ROWS = (("adamw", dict(optimizer="adamw", lr=2e-3)), ("adams", dict(optimizer="adams", lr=5e-4)),
        ("scape90", dict(optimizer="scape", lr=5e-4, density=0.1)), ("scape99", dict(optimizer="scape", lr=5e-4, density=0.01)),
        ("scape90_warm", dict(optimizer="scape", lr=5e-4, density=0.1, dense_warmup_steps=0.05)),
        ("scape99_warm", dict(optimizer="scape", lr=5e-4, density=0.01, dense_warmup_steps=0.05)),
        ("scape99_half_lr", dict(optimizer="scape", lr=2.5e-4, density=0.01)))


def jobs(args) -> list[train.Job]:
    made = []
    for seed in range(1, args.seeds + 1):
        for name, fields in ROWS:
            if args.only and name not in args.only.split(","):
                continue
            warm = {"dense_warmup_steps": round(fields["dense_warmup_steps"] * args.steps)} if "dense_warmup_steps" in fields else {}
            made.append(train.Job(name=name, seed=seed, steps=args.steps, workers=args.workers, vocab=args.vocab, dim=args.dim,
                                  layers=args.layers, heads=max(1, args.dim // 64), batch=args.batch, **(fields | warm)))
    return made


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/scape_quality"), help="of tokens, checkpoints, rows")
    parser.add_argument("--roots", default=str(Path(torch.__file__).resolve().parent.parent),
                        help="folders of text, by commas (default: site-packages)")
    parser.add_argument("--suffixes", default=".py,.md,.rst,.txt,.h,.cuh,.hpp,.pyi")
    parser.add_argument("--max-mb", type=float, default=400)
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 256 tokens a worker and step")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8192, help="256: bytes")
    parser.add_argument("--only", help="of " + ", ".join(name for name, _ in ROWS))
    parser.add_argument("--seconds", type=float, default=400, help="stop, resumable, after so long")
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def load_tokens(args):
    return text.load(args.folder / "tokens.npz", args.roots.split(","), args.suffixes.split(","), int(args.max_mb * 1e6), args.vocab)


def one(args) -> None:
    """A child: one job, on the device that its environment shows."""
    torch.set_num_threads(1)
    job, device = jobs(args)[args.job], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row = train.run(job, load_tokens(args), device, args.folder, args.deadline, args.eval_every)
    (args.folder / f"{job.name}.seed{job.seed}.json").write_text(json.dumps(row))
    last = row["curve"][-1] if row["curve"] else {}
    print(f"{job.name} seed {job.seed}: step {row['step']}/{job.steps}, {row['seconds']:.0f} s, {last}", flush=True)


def finished(args, job) -> bool:
    path = args.folder / f"{job.name}.seed{job.seed}.json"
    return path.exists() and json.loads(path.read_text())["step"] == job.steps


def main(argv=None) -> int:
    args = parse(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.job is not None:
        one(args)
        return 0
    deadline, num_gpus, children = time.time() + args.seconds, torch.cuda.device_count(), []
    tokens = load_tokens(args)
    print({name: part.numel() for name, part in tokens.items()}, "tokens", flush=True)
    for i, job in enumerate(jobs(args)):
        if finished(args, job):
            continue
        visible = {"CUDA_VISIBLE_DEVICES": str(len(children) % num_gpus)} if num_gpus else {}
        command = [sys.executable, "-m", "benchmarks.scape_quality", *(sys.argv[1:] if argv is None else argv), "--job", str(i),
                   "--deadline", str(deadline)]
        children.append(subprocess.Popen(command, env=os.environ | visible))
    failed = sum(child.wait() != 0 for child in children)
    rows = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.seed*.json"))]
    print(table(rows))
    if args.json:
        write_json(args.json, {"rows": rows, "tokens": {name: part.numel() for name, part in tokens.items()}},
                   command="python -m benchmarks.scape_quality " + " ".join(sys.argv[1:]))
    if args.png:
        plot(rows, args.png)
    return 1 if failed else 0


def table(rows: list[dict]) -> str:
    lines = ["| run | seed | step | epochs | train | tune | report | accuracy |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if row["curve"]:
            job, last = row["job"], row["curve"][-1]
            lines.append(f"| {job['name']} | {job['seed']} | {last['step']} | {row['epochs'] * last['step'] / job['steps']:.2f} | "
                         f"{last['train']:.4f} | {last['tune']['loss']:.4f} | {last['report']['loss']:.4f} | "
                         f"{last['report']['accuracy']:.4f} |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5))
    for row in rows:
        steps = [point["step"] for point in row["curve"]]
        label = f"{row['job']['name']}, seed {row['job']['seed']}"
        axes[0].plot(steps, [point["train"] for point in row["curve"]], label=label)
        axes[1].plot(steps, [point["report"]["loss"] for point in row["curve"]], label=label)
    for axis, title in zip(axes, ("training loss", "loss on held-out files"), strict=True):
        axis.set(title=title, xlabel="step", ylabel="nats per token")
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
