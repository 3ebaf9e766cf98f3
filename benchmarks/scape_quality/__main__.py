"""Does SCAPE learn as well as dense AdamS? Trains the same GPT on real text with all of them, W workers simulated in one process.

    python -m benchmarks.scape_quality --seconds 400 --json benchmarks/results/scape_quality.json --png benchmarks/results/scape_quality.png

from the repository root, on a GPU (or, tiny, on a CPU); prepare.py makes the text. All runs side by side, each on a stream of its own; the
product's kernels do SCAPE's part, and before anything is trained they are compared with the product's flow. Ends after --seconds and goes
on where it stopped, with the same bits, when it is called again with the same --folder; with --whole runs that can't end in time wait.

Settings are chosen on the part "tune" of the held-out files (--runs NAME@LR tries others), and the part "report" is what counts.
"""
import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")      # streams that are a GPU's queues of their own; read when CUDA starts

import torch

from benchmarks.scape_quality import picture, text, verify
from benchmarks.scape_quality.model import Shape
from benchmarks.scape_quality.run import Held, Job, Run, side_by_side
from ds_scape.kernels import loader
from zipscape.machine import write_json

#: The most important first. dense_warmup_steps: a share of all. Learning rates: those with the least loss on the part "tune".
ROWS = {"adams": dict(optimizer="adams", lr=5e-4),
        "scape90": dict(optimizer="scape", lr=2.5e-4, density=0.1),
        "scape99_warm": dict(optimizer="scape", lr=5e-4, density=0.01, dense_warmup_steps=0.05),
        "adamw": dict(optimizer="adamw", lr=2e-3),
        "scape99": dict(optimizer="scape", lr=2.5e-4, density=0.01),
        "scape90_warm": dict(optimizer="scape", lr=5e-4, density=0.1, dense_warmup_steps=0.05)}

#: Questions beside the claims, only by name. bf16: residuals are rounded to that type after every step; v: AdamW's denominator. The
#: product does neither.
QUESTIONS = {"adams_corrected": dict(optimizer="adams_corrected", lr=5e-4),
             "scape99_w8": ROWS["scape99"] | dict(workers=8, batch=2),
             "scape99_warm_w8": ROWS["scape99_warm"] | dict(workers=8, batch=2),
             "scape99_warm_bf16": ROWS["scape99_warm"] | dict(residual="bf16"),
             "scape99_warm_v": ROWS["scape99_warm"] | dict(denominator="adamw", lr=1e-3),
             "scape999_warm": ROWS["scape99_warm"] | dict(density=0.001)}
KNOWN = ROWS | QUESTIONS


def jobs(args) -> list[Job]:
    """All runs of seed 1, then of seed 2; those with a seed of their own once."""
    shape = Shape(args.vocab, args.dim, args.layers, max(1, args.dim // 64), args.seq_len)
    common = dict(steps=args.steps, workers=args.workers, batch=args.batch, shape=shape)
    made = []
    for nth, seed in enumerate(args.seeds):
        for name, lr, own_seed in args.runs:
            if nth and own_seed:
                continue
            fields = dict(KNOWN[name])
            fields["dense_warmup_steps"] = round(fields.get("dense_warmup_steps", 0) * args.steps)
            made.append(Job(name=name, seed=own_seed or seed, **(common | fields | ({"lr": lr} if lr else {}))))
    return made


def named_runs(given: str) -> list[tuple[str, float | None, int | None]]:
    """``NAME[@LR][:SEED],...``."""
    found = []
    for one in given.split(","):
        one, _, seed = one.partition(":")
        name, _, lr = one.partition("@")
        if name not in KNOWN:
            raise argparse.ArgumentTypeError(f"there is no run {name!r}, only {', '.join(KNOWN)}")
        found.append((name, float(lr) if lr else None, int(seed) if seed else None))
    return found


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/scape_quality"), help="of checkpoints and rows")
    parser.add_argument("--text", type=Path, default=Path("runs/scape_quality/text"), help="what prepare.py made")
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--seeds", type=lambda s: [int(n) for n in s.split(",")], default=[1, 2])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences a worker and step")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--runs", type=named_runs, default=",".join(ROWS), help="NAME[@LR][:SEED],...; the most important first")
    parser.add_argument("--side-by-side", type=int, default=6, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=400, help="stop after so long, all told")
    parser.add_argument("--whole", action="store_true", help="where not all can end in time, the least important stop at once")
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-verify", action="store_true")
    return parser.parse_args(argv)


class Chunk:
    """One call: what is left to do, until the deadline."""

    def __init__(self, args, start: float):
        self.args, self.start, self.deadline = args, start, start + args.seconds
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.compiled = self.device.type == "cuda" and not args.no_compile
        self.seconds_per_step = None        # of one run among several, as last seen
        self.verified = None                # None: it was not tried, or could not be
        # These take a while; the model is compiled meanwhile.
        self._unpacking = self._beside("-m", "benchmarks.scape_quality.text", str(args.text))
        self._building = [self._beside("-c", f"from zipscape.op_builder import scape; scape.{name}.build()")
                          for name in ("SCAPE_CUDA", "SCAPE_CPU") if self.device.type == "cuda"]

    @staticmethod
    def _beside(*command: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, *command])

    def say(self, *words) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s]", *words, flush=True)

    def verify(self) -> bool:
        """Whether the compiled model can be used; and against the product: False if there are differences."""
        asked = jobs(self.args)
        sizes = dict.fromkeys((job.workers, job.batch) for job in asked) if self.compiled else ()
        for num_workers, batch in sizes:
            try:
                error, repeats = verify.model_error(asked[0].shape, self.device, batch, num_workers)
                self.compiled = error < 0.05
                self.say(f"{num_workers} workers: the compiled model's gradients differ from the plain one's by {error:.2e} of their norm,",
                         "and asked again they have", "the same bits" if repeats else "OTHER BITS")
            except Exception as error:      # whatever a compiler may raise: the plain one is slower and right
                self.compiled = False
                self.say(f"the compiled model failed: {error!r}"[:1000])
            if not self.compiled:
                self.say("GOING ON WITHOUT torch.compile")
                break
        for build in self._building:
            build.wait()
        try:
            self.verified = verify.main(asked[0].shape if self.device.type == "cuda" else None)
            if self.device.type == "cuda":
                found = verify.resumption([replace(asked[0], **verify.SHORT)], self.device, self.compiled)
                self.say("a run that is stopped and goes on has", f"OTHER BITS in {found[:9]}" if found else "the same bits")
        except Exception:                       # the comparison broke, which says nothing about what is trained with: the rows say so
            traceback.print_exc()
            self.say("NOT VERIFIED: the comparison with the product's flow could not be made")
        return self.verified is not False

    def make(self, job: Job, train, held) -> Run:
        run = Run(job, train, held, self.device, self.compiled)
        if (self.args.folder / f"{job.key}.pt").exists():
            run.load(self.args.folder)
        return run

    def report(self, active, per_round) -> None:
        left = max((run.job.steps - run.row["step"] for run in active), default=0)
        step, self.seconds_per_step = min((run.row["step"] for run in active), default="-"), per_round / max(1, len(active))
        self.say(f"{len(active)} runs, step {step}, {1e3 * per_round:.2f} ms a step of all, {left * per_round:.0f} s to go")

    def keep(self, run: Run) -> None:
        """The row of a run that is done."""
        row, folder = run.settle(), self.args.folder
        row |= {"verified": self.verified, "compiled": self.compiled, "kernels": loader.choose("best", self.device.type).names}
        (folder / f"{run.job.key}.json").write_text(json.dumps(row))
        for ending in ("pt", "stopped.json"):
            (folder / f"{run.job.key}.{ending}").unlink(missing_ok=True)
        self.say(f"{run.job.key}: done,", row["curve"][-1])

    def run(self) -> None:
        args, folder = self.args, self.args.folder
        if self._unpacking.wait():
            raise SystemExit(f"the text in {args.text} could not be read; prepare.py makes it")
        tokens = text.load(args.text)
        self.say({name: part.numel() for name, part in tokens.items()}, "tokens")
        tokens = {name: part.view(torch.int16) for name, part in tokens.items()}
        train, held = tokens["train"].to(self.device), Held(tokens, args.seq_len, self.device)
        gc.freeze()                             # what was loaded so far stays: every capture of a graph collects garbage
        waiting = [job for job in jobs(args) if not (folder / f"{job.key}.json").exists()]
        while waiting and time.monotonic() < self.deadline:
            num = args.side_by_side
            if args.whole and self.seconds_per_step:
                num = min(num, int((self.deadline - time.monotonic()) / (self.seconds_per_step * args.steps)))
                if num == 0:
                    break
            now, waiting = waiting[:num], waiting[num:]
            runs = [self.make(job, train, held) for job in now]
            alone = ", ".join(f"{run.pass_ms:.2f}" for run in runs)
            self.say("ready:", ", ".join(job.key for job in now), f"(forward and backward alone: {alone} ms)")
            stopped = side_by_side(runs, args.eval_every, self.deadline, args.whole, self.report, self.keep)
            for run in stopped:
                (folder / f"{run.job.key}.stopped.json").write_text(json.dumps(run.settle()))
                run.save(folder)
                self.say(f"{run.job.key}: stopped at step {run.row['step']}", run.row["curve"][-1:])
            runs = stopped = run = None         # their memory is for the next ones
        if self.device.type == "cuda":
            self.say(f"GPU memory at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def main(argv=None) -> int:
    start, args = time.monotonic(), parse(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    chunk = Chunk(args, start)
    if not (args.no_verify or chunk.verify()):
        return 1
    chunk.run()
    rows = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.seed*.json"))]
    stopped = [row for row in rows if row["step"] < row["job"]["steps"]]
    rows = [row for row in rows if row not in stopped]
    print(picture.table(rows))
    if args.json:
        manifest = json.loads((args.text / "manifest.json").read_text())
        command = " ".join(["python -m benchmarks.scape_quality", *(sys.argv[1:] if argv is None else argv)])
        write_json(args.json, {"rows": rows, "stopped": stopped, "text": manifest}, command=command)
    if args.png:
        picture.plot(rows, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
