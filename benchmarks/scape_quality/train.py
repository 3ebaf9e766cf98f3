"""One training run with W workers in one process: dense AdamW, dense AdamS or SCAPE, in resumable pieces."""
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.scape_quality import text
from benchmarks.scape_quality.threads import Ranks, ThreadTransport
from ds_scape.config import ScapeParams
from ds_scape.optimizer.flow import Flow
from ds_scape.optimizer.state import FlatState
from ds_scape.sync.partition import TensorSlot, flat_layout
from ds_scape.update import adams

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT

BETAS, EPS, WEIGHT_DECAY, MAX_NORM, LR_WARMUP = (0.9, 0.95), 1e-6, 0.1, 1.0, 100
EVAL_BATCHES, EVAL_SIZE = 40, 32


@dataclass(frozen=True)
class Job:
    """``optimizer``: adamw, adams or scape. The learning rate rises for 100 steps and falls as a cosine to a tenth."""
    name: str
    optimizer: str
    lr: float
    seed: int
    density: float = 1.0
    dense_warmup_steps: int = 0
    steps: int = 15_000
    workers: int = 4
    batch: int = 8
    seq_len: int = 256
    dim: int = 384
    layers: int = 6
    heads: int = 6
    vocab: int = 8192

    def lr_at(self, step: int) -> float:
        """Of step number ``step``, from 1."""
        done = (step - LR_WARMUP) / max(1, self.steps - LR_WARMUP)
        return self.lr * min(step / LR_WARMUP, 0.1 + 0.45 * (1 + math.cos(math.pi * max(0.0, done))))


class Model:
    """A GPT in bf16 whose parameters and gradients are views of one flat buffer per group: matrices, and the rest."""

    def __init__(self, job: Job, device: torch.device):
        torch.manual_seed(job.seed)
        self.net = GPT(job.vocab, job.dim, job.layers, job.heads).to(device, torch.bfloat16)
        self.job, self.device = job, device
        params = list(self.net.parameters())
        groups = [[p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]]
        self.slots, self.copies, self.gradients = [], [], []
        for group in groups:
            slots, offset = [], 0
            for p in group:
                slots.append(TensorSlot(offset, p.numel(), p.dim()))
                offset += p.numel()
            size = -(-offset // (2 * job.workers)) * 2 * job.workers
            flat, gradient = (torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(2))
            for p, slot in zip(group, slots, strict=True):
                place = slice(slot.offset, slot.offset + slot.numel)
                flat[place] = p.detach().view(-1)
                p.data, p.grad = flat[place].view(p.shape), gradient[place].view(p.shape)
            self.slots.append(slots)
            self.copies.append(flat)
            self.gradients.append(gradient)
        self._tokens = torch.zeros(job.batch, job.seq_len + 1, dtype=torch.long, device=device)
        self._graph = self._loss = None
        if device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._pass()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._pass()

    def _pass(self) -> None:
        for gradient in self.gradients:
            gradient.zero_()
        self._loss = self.loss(self._tokens)
        self._loss.backward()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Fills ``gradients``; returns the loss, to be read before the next call."""
        self._tokens.copy_(tokens, non_blocking=True)
        self._graph.replay() if self._graph is not None else self._pass()
        return self._loss.detach()

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor) -> dict[str, float]:
        """Mean loss and share of next tokens that are predicted, over the same places in every call."""
        generator, loss, right = torch.Generator().manual_seed(12345), 0.0, 0.0
        for _ in range(EVAL_BATCHES):
            batch = text.batch(tokens, EVAL_SIZE, self.job.seq_len, generator).to(self.device)
            logits = self.net(batch[:, :-1]).float()
            loss += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            right += (logits.argmax(-1) == batch[:, 1:]).float().mean()
        return {"loss": float(loss) / EVAL_BATCHES, "accuracy": float(right) / EVAL_BATCHES}


class Dense:
    """AdamS or AdamW on the mean gradient, fp32 masters."""

    def __init__(self, job: Job, model: Model):
        self.job, self.model = job, model
        self.masters = [copy.float() for copy in model.copies]
        self.momenta = [torch.zeros_like(m) for m in self.masters]
        self._adamw = None
        if job.optimizer == "adamw":
            groups = [{"params": [m], "weight_decay": decay} for m, decay in zip(self.masters, (WEIGHT_DECAY, 0.0), strict=True)]
            self._adamw = torch.optim.AdamW(groups, lr=job.lr, betas=BETAS, eps=1e-8)

    def step(self, fresh: list[list[torch.Tensor]], lr: float) -> None:
        means = []
        for gradients in zip(*fresh, strict=True):
            mean = gradients[0].float()
            for gradient in gradients[1:]:
                mean += gradient
            means.append(mean.div_(len(fresh)))
        norm = torch.stack([mean.double().square().sum() for mean in means]).sum().sqrt()
        factor = torch.clamp(MAX_NORM / norm, max=1.0).float()
        for mean in means:
            mean.mul_(factor)
        if self._adamw is not None:
            for group, master, mean in zip(self._adamw.param_groups, self.masters, means, strict=True):
                group["lr"], master.grad = lr, mean
            self._adamw.step()
        else:
            for master, momentum, mean, decay in zip(self.masters, self.momenta, means, (WEIGHT_DECAY, 0.0), strict=True):
                adams.dense_step(master, momentum, mean, lr=lr, betas=BETAS, eps=EPS, weight_decay=decay)
        for copy, master in zip(self.model.copies, self.masters, strict=True):
            copy.copy_(master)

    def state(self) -> dict:
        return {"masters": self.masters, "momenta": self.momenta, "adamw": self._adamw.state_dict() if self._adamw else None}

    def load(self, saved: dict) -> None:
        for mine, theirs in zip(self.masters + self.momenta, saved["masters"] + saved["momenta"], strict=True):
            mine.copy_(theirs)
        if self._adamw:
            self._adamw.load_state_dict(saved["adamw"])
        for copy, master in zip(self.model.copies, self.masters, strict=True):
            copy.copy_(master)

    def report(self) -> dict:
        return {}


class Scape:
    """The product's flow, a thread for every worker."""

    STATE = ("copies", "residual", "weight", "momentum", "square", "last_sync")

    def __init__(self, job: Job, model: Model):
        self.job, self.ranks = job, Ranks(job.workers)
        params = ScapeParams(lr=job.lr, density=job.density, dense_warmup_steps=job.dense_warmup_steps)
        self.groups = [{"lr": job.lr, "betas": BETAS, "eps": EPS, "weight_decay": decay, "density": job.density}
                       for decay in (WEIGHT_DECAY, 0.0)]
        self.flows = []
        for rank in range(job.workers):
            flats = []
            for slots, copies, group in zip(model.slots, model.copies, self.groups, strict=True):
                layout = flat_layout(slots, copies.numel(), job.workers, job.density)
                own = copies.view(job.workers, -1)[rank].float()
                zeros = [torch.zeros_like(own) for _ in range(2)]
                # Rank 0 computes with the model's own copies; all ranks' are equal at every time.
                flats.append(FlatState(layout, copies if rank == 0 else copies.clone(), torch.zeros_like(copies, dtype=torch.float32), own,
                                       *zeros, torch.zeros_like(own, dtype=torch.int32), group, params))
            self.flows.append(Flow(flats, params, ThreadTransport(self.ranks.meeting, rank, job.workers)))

    def step(self, fresh: list[list[torch.Tensor]], lr: float) -> None:
        for group in self.groups:
            group["lr"] = lr
        results = self.ranks.run(lambda rank: self.flows[rank].step(fresh[rank], max_norm=MAX_NORM))
        if not results[0].applied:
            raise FloatingPointError(f"a step was skipped: {results[0]}")

    def state(self) -> dict:
        return {"flows": [flow.state_dict() for flow in self.flows],
                "flats": [[{name: getattr(flat, name) for name in self.STATE} for flat in flow.flats] for flow in self.flows]}

    def load(self, saved: dict) -> None:
        for flow, flats in zip(self.flows, saved["flats"], strict=True):
            for flat, tensors in zip(flow.flats, flats, strict=True):
                for name, tensor in tensors.items():
                    getattr(flat, name).copy_(tensor)
        self.ranks.run(lambda rank: self.flows[rank].load_state_dict(saved["flows"][rank]))

    def report(self) -> dict:
        """Bytes that rank 0 has sent, and how old and how far the coordinates are that it owns."""
        flow = self.flows[0]
        ages = torch.cat([flat.ages(flow.num_steps) for flat in flow.flats])
        return {"sent_bytes": dict(flow.transport.sent_bytes), "largest_age": int(ages.max()), "mean_age": float(ages.float().mean())}


def run(job: Job, tokens: dict[str, torch.Tensor], device: torch.device, folder: Path, deadline: float, eval_every: int) -> dict:
    """Trains until the end or the deadline (of time.time()); goes on from ``folder``'s checkpoint where there is one. Returns the row."""
    model = Model(job, device)
    optimizer = Scape(job, model) if job.optimizer == "scape" else Dense(job, model)
    checkpoint = folder / f"{job.name}.seed{job.seed}.pt"
    row = {"job": asdict(job), "step": 0, "curve": [], "seconds": 0.0, "num_parameters": sum(p.numel() for p in model.net.parameters()),
           "epochs": job.steps * job.workers * job.batch * job.seq_len / tokens["train"].numel()}
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=False)
        optimizer.load(saved["optimizer"])
        row = saved["row"]
    start, before = time.time(), row["seconds"]
    running, since = (saved["running"], saved["since"]) if checkpoint.exists() else (torch.zeros((), device=device), 0)
    while row["step"] < job.steps and time.time() < deadline:
        step = row["step"] + 1
        fresh = []
        for worker in range(job.workers):
            # The place in the text follows from step and worker alone, so a run that goes on reads what it would have read.
            generator = torch.Generator().manual_seed((job.seed * 100_003 + step) * 64 + worker)
            running += model.backward(text.batch(tokens["train"], job.batch, job.seq_len, generator).to(device))
            fresh.append([gradient.clone() for gradient in model.gradients])
        since += job.workers
        optimizer.step(fresh, job.lr_at(step))
        row["step"] = step
        if step % eval_every == 0 or step == job.steps:
            point = {"step": step, "train": float(running) / since}
            point |= {part: model.evaluate(tokens[part]) for part in ("tune", "report")}
            row["curve"].append(point)
            running.zero_()
            since = 0
            if not math.isfinite(point["train"]):
                break
    row["seconds"] = before + time.time() - start
    row |= optimizer.report()
    if row["step"] < job.steps:
        part = checkpoint.with_suffix(".part")
        torch.save({"optimizer": optimizer.state(), "row": row, "running": running, "since": since}, part)
        part.replace(checkpoint)
    else:
        checkpoint.unlink(missing_ok=True)
    return row
