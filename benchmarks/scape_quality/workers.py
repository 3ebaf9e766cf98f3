"""The optimizers of the benchmark, for W workers in one thread.

``Scape`` is the product's step on all ranks' state at once: its kernels, tables, layout and order of work (ds_scape/optimizer/flow.py), but
one call where the ranks would make one each for the same coordinates, and copies in memory for a network. Same bits: ``verify.py``.
"""
import math

import torch

from ds_scape.config import ScapeParams
from ds_scape.kernels import loader
from ds_scape.optimizer.state import FlatState, sync_steps
from ds_scape.sync.partition import FlatLayout, flat_layout
from ds_scape.sync.sparse_reduce import mean_of_rows
from ds_scape.update import adams, norms, scape_rule

BETAS, EPS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.95), 1e-6, 0.1, 1.0


def padded(numel: int, workers: int) -> int:
    """Elements of the flat buffer: partitions of an even number of elements."""
    return -(-numel // (2 * workers)) * 2 * workers


class Scape:
    """``step`` moves ``copies`` bf16 [n] from ``gradients`` [W, n]."""

    STATE = ("weight", "momentum", "square", "last_sync")

    def __init__(self, slots, copies: torch.Tensor, initial: torch.Tensor, workers: int, params: ScapeParams,
                 rounds_residual: bool = False):
        """initial: fp32 [n], the master weights; becomes this object's. rounds_residual: to bf16 after every step; not the product."""
        self._rounds_residual = rounds_residual
        self.copies, self.params, self.workers, device = copies, params, workers, copies.device
        self.layout: FlatLayout = flat_layout(slots, copies.numel(), workers, params.density)
        self.group = {"lr": params.lr, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "density": params.density}
        self.residual = torch.zeros(workers, copies.numel(), device=device)
        # All ranks' partitions, one after another.
        self.flat = FlatState(self.layout, copies, self.residual, initial, torch.zeros_like(initial), torch.zeros_like(initial),
                              sync_steps(initial, params, params.density), self.group, params)
        self.kernels = loader.choose(params.kernels, device.type)
        size, ranks = self.layout.partition_numel, range(workers)
        self._size = size
        self._segments = tuple((s.start + rank * size, s.stop + rank * size, s.num_sent)
                               for rank in ranks for s in self.layout.segments[rank] if s.stop > s.start)
        self._dense = tuple((start, stop) for start, stop, count in self._segments if count == stop - start)
        self._num_sent = sum(count for _, _, count in self._segments)
        self._free = sum(count for start, stop, count in self._segments if count != stop - start)
        self._values = torch.zeros(workers, copies.numel(), dtype=torch.bfloat16, device=device)
        self._mean, self._own = torch.zeros_like(initial), torch.zeros_like(initial)
        self._chosen = torch.zeros(copies.numel(), dtype=torch.bool, device=device)
        self._message = None
        self.num_steps, self.num_clipped, self.positions = 0, 0, None
        copies.copy_(initial)

    def is_dense(self, step: int) -> bool:
        return step == 1 or step <= self.params.dense_warmup_steps or self.layout.is_full

    def receive(self) -> None:
        """Decodes the mask that the last step sent; waits for it on a GPU, so it is best called late."""
        if self._message is not None and self.positions is None:
            counts = (self._num_sent,)
            (self.positions,), found = self.kernels.unpack_mask(self._message, self.copies.numel(), self._dense, "bits",
                                                                (self.copies.numel(),), counts)
            assert tuple(found) == counts, (found, counts)

    def step(self, gradients: torch.Tensor, lr: float, squares: list[float]) -> None:
        """squares: of every worker's gradient; finite."""
        self.num_steps = step = self.num_steps + 1
        self.receive()
        self.group["lr"] = lr
        self.flat.advance_decay()
        factor = norms.clip_factor(math.fsum(squares) / self.workers, MAX_NORM)
        self.num_clipped += factor < 1
        index = None if self.is_dense(step) else self.positions
        num = self.copies.numel() if index is None else self._num_sent
        values, size, flat = self._values.view(-1)[:self.workers * num].view(self.workers, num), self._size, self.flat
        for rank in range(self.workers):
            own = slice(rank * size, (rank + 1) * size)
            self.kernels.enter(self.residual[rank], gradients[rank], factor, index, values[rank],
                               square=None if self.layout.is_full else flat.square[own], own_start=own.start, beta2=BETAS[1])
        mean = mean_of_rows(values, self._mean[:num])
        out = self.copies if index is None else self.copies.new_empty(num)
        self._owner_step(mean, index, step, lr, out)
        if index is not None:
            self.kernels.scatter(self.copies, index, out)
        if self._rounds_residual:
            self.residual.copy_(self.residual.bfloat16())
        self.positions = self._message = None
        if not self.is_dense(step + 1):
            torch.cat([self.residual[rank, rank * size:(rank + 1) * size] for rank in range(self.workers)], out=self._own)
            self.kernels.select(self._own, flat.square, flat.last_sync, step, flat.max_age, self._segments, self._chosen)
            self._message = self.kernels.pack_mask(self._chosen, self._dense, "bits", self._free)

    def _owner_step(self, mean, index, step, lr, out) -> None:
        flat = self.flat
        scape_rule.synchronise(flat.weight, flat.momentum, flat.last_sync, mean, index, step, flat.age_tables, flat.decay_products, out,
                               lr=lr, beta2=BETAS[1], eps=EPS, catch_up=self.params.catch_up, kernels=self.kernels)

    def state(self) -> dict:
        flat = {name: getattr(self.flat, name) for name in self.STATE}
        return {**flat, "residual": self.residual, "decay": self.flat.decay, "message": self._message, "num_steps": self.num_steps,
                "num_clipped": self.num_clipped}

    def load(self, saved: dict) -> None:
        for name in self.STATE:
            getattr(self.flat, name).copy_(saved[name])
        self.residual.copy_(saved["residual"])
        self.flat.restore_decay(saved["decay"])
        self.num_steps, self.num_clipped, self._message, self.positions = saved["num_steps"], saved["num_clipped"], saved["message"], None
        self.copies.copy_(self.flat.weight)         # they are the rounded masters at all times

    def report(self) -> dict:
        """How old and how far the coordinates are; after the last step."""
        ages = self.flat.ages(self.num_steps)
        largest = max(int(ages[start:stop].max()) for start, stop, _ in self._segments)
        return {"largest_age": largest, "mean_age": float(ages.float().mean()), "share_sent": self._num_sent / self.copies.numel(),
                "residual_norm": float(self.residual.norm() / self.workers ** 0.5),
                "share_clipped": self.num_clipped / max(1, self.num_steps)}


class Dense:
    """AdamS (the product's ScapeAdamS; adams_corrected: with bias correction) or AdamW (torch's) on the mean gradient, fp32 masters,
    torch's way of clipping."""

    def __init__(self, name: str, copies: torch.Tensor, initial: torch.Tensor):
        self.copies, self.weight, self.momentum, self.num_steps = copies, initial, torch.zeros_like(initial), 0
        self.mean, self._corrected = torch.zeros_like(initial), name == "adams_corrected"
        self._kernels, self._adamw = loader.choose("best", copies.device.type), None
        if name == "adamw":
            self._adamw = torch.optim.AdamW([self.weight], lr=0.0, betas=BETAS, eps=1e-8, weight_decay=WEIGHT_DECAY,
                                            fused=copies.device.type == "cuda")
        copies.copy_(initial)

    def receive(self) -> None:
        pass

    def step(self, gradients: torch.Tensor, lr: float, squares=None) -> None:
        self.num_steps += 1
        mean_of_rows(gradients, self.mean)
        norm = torch.linalg.vector_norm(self.mean)
        self.mean.mul_(torch.clamp(MAX_NORM / norm, max=1.0))
        if self._adamw is None:
            adams.dense_step(self.weight, self.momentum, self.mean, lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY,
                             bias_correction_step=self.num_steps * self._corrected, kernels=self._kernels)
        else:
            self._adamw.param_groups[0]["lr"], self.weight.grad = lr, self.mean
            self._adamw.step()
        self.copies.copy_(self.weight)

    def state(self) -> dict:
        return {"weight": self.weight, "momentum": self.momentum, "num_steps": self.num_steps,
                "adamw": self._adamw.state_dict() if self._adamw else None}

    def load(self, saved: dict) -> None:
        self.num_steps = saved["num_steps"]
        self.weight.copy_(saved["weight"])
        self.momentum.copy_(saved["momentum"])
        if self._adamw:
            self._adamw.load_state_dict(saved["adamw"])
        self.copies.copy_(self.weight)

    def report(self) -> dict:
        return {}
