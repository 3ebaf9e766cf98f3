"""One training run with W workers in one process: dense AdamW, dense AdamS or SCAPE; stops at any step and goes on as if it had not."""
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.scape_quality import text, workers
from benchmarks.scape_quality.adamw_style import AdamWStyle
from benchmarks.scape_quality.lane import Lane
from benchmarks.scape_quality.model import Model, Shape
from ds_scape.config import ScapeParams

LR_WARMUP = 100


@dataclass(frozen=True)
class Job:
    """``optimizer``: adamw, adams, adams_corrected or scape. The learning rate rises for 100 steps and falls as a cosine to a tenth.
    batch: sequences of a worker and step. residual: the type that SCAPE's residuals are rounded to after every step. denominator: adams or
    adamw, what SCAPE's step is divided by."""
    name: str
    optimizer: str
    lr: float
    seed: int = 1
    density: float = 1.0
    dense_warmup_steps: int = 0
    steps: int = 15_000
    workers: int = 4
    batch: int = 4
    residual: str = "fp32"
    denominator: str = "adams"
    shape: Shape = field(default=Shape())

    def lr_at(self, step: int) -> float:
        """Of step number ``step``, from 1."""
        done = (step - LR_WARMUP) / max(1, self.steps - LR_WARMUP)
        return self.lr * min(step / LR_WARMUP, 0.1 + 0.45 * (1 + math.cos(math.pi * max(0.0, done))))

    @property
    def key(self) -> str:
        return f"{self.name}@{self.lr:g}.seed{self.seed}"

    @property
    def tokens_per_step(self) -> int:
        return self.workers * self.batch * self.shape.seq_len


class Held:
    """Sequences of the held-out parts, the same at every evaluation: evenly spread over the files."""

    def __init__(self, tokens: dict[str, torch.Tensor], seq_len: int, device, batches: int = 32, size: int = 16):
        self.batches = {}
        for part in ("tune", "report"):
            starts = torch.linspace(0, tokens[part].numel() - seq_len - 1, batches * size, device="cpu").long()
            rows = torch.stack([tokens[part][start:start + seq_len + 1] for start in starts.tolist()])
            self.batches[part] = rows.to(device).view(batches, size, seq_len + 1)


class Run:
    """``begin`` queues forward and backward of the next step, ``finish`` the optimizer's part: between the two other runs can go on, each
    on a stream of its own, and no run makes another's GPU wait."""

    def __init__(self, job: Job, train: torch.Tensor, held: Held, device: torch.device, compiled: bool = False):
        """train: uint16 tokens as int16 or int32 on the device."""
        self.job, self.device, self._train, self._held = job, device, train, held
        self.lane, self._graphs = Lane(device), None
        self._points, self._since, self._under_way = [], 0, False
        self.pass_ms = math.nan         # of a forward and backward pass alone on a GPU
        self.row = {"job": asdict(job), "step": 0, "curve": [], "num_parameters": job.shape.num_parameters,
                    "epochs": job.steps * job.tokens_per_step / train.numel()}
        with self.lane.joined():
            self._make(compiled)
            if device.type == "cuda":
                self._host_squares = torch.zeros(job.workers, dtype=torch.float64, pin_memory=True)
                self._capture()

    def _make(self, compiled: bool) -> None:
        job, device, shape = self.job, self.device, self.job.shape
        numel = workers.padded(shape.num_parameters, job.workers)
        self.model = Model(shape, job.workers, job.batch, numel, device, compiled)
        initial = shape.initial(job.seed, numel).to(device)
        if job.optimizer == "scape":
            params = ScapeParams(lr=job.lr, density=job.density, dense_warmup_steps=job.dense_warmup_steps, betas=workers.BETAS,
                                 eps=workers.EPS, weight_decay=workers.WEIGHT_DECAY)
            made = {"adams": workers.Scape, "adamw": AdamWStyle}[job.denominator]
            self.optimizer = made(shape.slots(), self.model.copies, initial, job.workers, params, job.residual == "bf16")
        else:
            self.optimizer = workers.Dense(job.optimizer, self.model.copies, initial)
        starts = text.places(self._train.numel(), job.steps * job.workers * job.batch, shape.seq_len, job.seed)
        self._starts = starts.to(device).view(job.steps, -1)
        self._along = torch.arange(shape.seq_len + 1, device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)         # of the step that comes, from 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._squares = torch.zeros(job.workers, dtype=torch.float64, device=device)

    # --- what a graph holds ---------------------------------------------------------------------------------------------------------
    def _pass(self) -> None:
        tokens = self._train[self._starts[self._number].view(-1, 1) + self._along].long() & 0xFFFF
        loss, squares = self.model.forward_backward(tokens)
        self._loss_sum.add_(loss.double().mean())
        self._squares.copy_(squares)
        self._number.add_(1)

    def _evaluate_all(self) -> dict[str, torch.Tensor]:
        self.model.load()
        found = {}
        for part, batches in self._held.batches.items():
            sums = torch.zeros(2, dtype=torch.float64, device=self.device)
            for batch in batches:
                sums += torch.stack(self.model.evaluate(batch.long() & 0xFFFF))
            found[part] = sums / batches[..., 1:].numel()
        return found

    def _capture(self) -> None:
        for _ in range(2):
            self._number.zero_()                # no run is so short that it ends here
            self._pass()
        self._evaluate_all()
        torch.cuda.synchronize()
        self._graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graphs[0], stream=self.lane.stream):
            self._pass()
        with torch.cuda.graph(self._graphs[1], stream=self.lane.stream):
            self._found = self._evaluate_all()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for i in range(12):
            if i in (2, 11):
                marks[i // 11].record()
            self._number.zero_()
            self._graphs[0].replay()
        torch.cuda.synchronize()
        self.pass_ms = marks[0].elapsed_time(marks[1]) / 9
        self._number.zero_()
        self._loss_sum.zero_()

    # --- a step ---------------------------------------------------------------------------------------------------------------------
    @property
    def is_done(self) -> bool:
        return self.row["step"] >= self.job.steps

    def begin(self) -> None:
        """Queues forward and backward of the next step."""
        with self.lane.within():
            self.optimizer.receive()
            if self._graphs:
                self._graphs[0].replay()
                self._host_squares.copy_(self._squares, non_blocking=True)
                self._event = self.lane.stream.record_event()
            else:
                self._pass()
        self._under_way = True

    def finish(self) -> None:
        """Queues the optimizer's part; waits for the gradients' norms, which SCAPE's kernels take as a number."""
        step = self.row["step"] + 1
        with self.lane.within():
            if self._graphs:
                self._event.synchronize()
            squares = (self._host_squares if self._graphs else self._squares).tolist()
            if not all(map(math.isfinite, squares)):
                raise FloatingPointError(f"{self.job.key}: the gradients of step {step} are not finite: {squares}")
            self.optimizer.step(self.model.gradients, self.job.lr_at(step), squares)
        self.row["step"], self._under_way = step, False
        self._since += 1

    def look(self) -> None:
        """Queues a point of the curve: mean training loss since the last one, and both held-out parts now."""
        with self.lane.within():
            if self._graphs:
                self._graphs[1].replay()
            found = self._found if self._graphs else self._evaluate_all()
            self._points.append((self.row["step"], torch.cat([self._loss_sum[None] / self._since, found["tune"], found["report"]])))
            self._loss_sum.zero_()
        self._since = 0

    def settle(self) -> dict:
        """The row, with all that was queued; waits for it."""
        with self.lane.joined():                    # a number is read in the stream that it is made in
            points = [(step, values.tolist()) for step, values in self._points]
            if self.is_done:
                self.row |= self.optimizer.report()
        self.lane.wait()
        for step, (train, *held) in points:
            point = {"step": step, "train": train}
            point |= {part: dict(zip(("loss", "accuracy"), held[at:at + 2], strict=True)) for part, at in (("tune", 0), ("report", 2))}
            self.row["curve"].append(point)
        self._points.clear()
        return self.row

    # --- stopping and going on ------------------------------------------------------------------------------------------------------
    def save(self, folder: Path) -> None:
        """Between two steps."""
        assert not self._under_way
        row, (part, whole) = self.settle(), (folder / f"{self.job.key}{end}" for end in (".part", ".pt"))
        with self.lane.joined():
            torch.save({"optimizer": self.optimizer.state(), "row": row, "loss_sum": self._loss_sum, "since": self._since}, part)
        part.replace(whole)

    def load(self, folder: Path) -> None:
        with self.lane.joined():
            saved = torch.load(folder / f"{self.job.key}.pt", map_location=self.device, weights_only=False)
            if saved["row"]["job"] != self.row["job"]:
                raise ValueError(f"the checkpoint of {self.job.key} in {folder} is of another job: {saved['row']['job']}, "
                                 f"not {self.row['job']}")
            self.optimizer.load(saved["optimizer"])
            self.row, self._since = saved["row"], saved["since"]
            self._loss_sum.copy_(saved["loss_sum"])
            self._number.fill_(self.row["step"])
        self.lane.wait()


def side_by_side(runs: list[Run], eval_every: int, deadline: float, whole: bool = False, report=None, done=None,
                 seconds: float = 2.0) -> list[Run]:
    """Takes the steps of all runs, the most important first, until they are done or the deadline (of time.monotonic()). Returns those
    that are not done, each after a whole step.

    whole: where not all can end in time, the least important stop at once. report(active runs, seconds of a step of all of them): called
    every so many ``seconds``. done(run): called when it is.
    """
    active, stopped, rounds, since = [run for run in runs if not run.is_done], [], 0, time.monotonic()
    for run in active:
        run.begin()
    while active:
        late = None             # a run's next step begins after the next run's step is queued: its mask is there by then
        for run in list(active):
            _finish(run, eval_every)
            if late is not None:
                late.begin()
            late = None if run.is_done else run
            if run.is_done:
                active.remove(run)
                if done:
                    done(run)
        if late is not None:
            late.begin()
        rounds, now = rounds + 1, time.monotonic()
        if now - since < min(seconds, max(0.0, deadline - since)):
            continue
        per_round, rounds, since = (now - since) / rounds, 0, now
        if report:
            report(active, per_round)
        left = max((run.job.steps - run.row["step"] for run in active), default=0)
        # Dense steps of SCAPE's warm-up take longer than the others: at first the estimate is taken for less than it is.
        trust = 0.7 + 0.3 * min(1.0, 5 * max((run.row["step"] / run.job.steps for run in active), default=0.0))
        while active and (now > deadline or whole and len(active) > 1 and now + trust * left * per_round > deadline):
            per_round *= (len(active) - 1) / len(active)
            last = active.pop()
            _finish(last, eval_every)
            if not last.is_done:
                stopped.append(last)
    return stopped


def _finish(run: Run, eval_every: int) -> None:
    """Ends the step, and looks at the losses if it is time: four times as often in the last twentieth, whose mean is what counts."""
    run.finish()
    step, steps = run.row["step"], run.job.steps
    if step == steps or step % eval_every == 0 or step >= 0.95 * steps and step % max(1, eval_every // 4) == 0:
        run.look()
