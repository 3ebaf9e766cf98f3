"""What one rank keeps for one flat buffer."""
from dataclasses import dataclass, field

import torch

from ds_scape.config import ScapeParams
from ds_scape.kernels import impl_reference
from ds_scape.optimizer.passage import Passage, host_zeros
from ds_scape.sync.partition import FlatLayout
from ds_scape.update import tables
from ds_scape.update.adams import decay_factor


def _oldest(params: ScapeParams, density: float) -> int:
    """More steps than a coordinate ever waits: one that is overdue does for a round through its segment, 1.5 / density at most."""
    max_age = params.age_limit(density)
    return min(2 * max_age, max_age + int(2 / density)) + 2


def sync_steps(weight: torch.Tensor, params: ScapeParams, density: float, passage: Passage | None = None) -> torch.Tensor:
    """Zeros [P] of the smallest type that ages can be read from (padding may wait for longer; it has no age): beside the weights, or in
    host memory where residuals pass through the weights' device, and the ages with them."""
    dtype = torch.int16 if _oldest(params, density) < 1 << 16 else torch.int32
    if passage is not None and passage.device == weight.device:
        return host_zeros(weight.numel(), dtype, weight.device, params.offload.pin_memory)
    return torch.zeros_like(weight, dtype=dtype, requires_grad=False)


@dataclass
class FlatState:
    """One flat buffer on one rank. P: elements of a partition; W: world size. ``weight``, ``momentum``, ``square`` share one dtype, the
    residual's; they and the others are changed in place and may be views of other owners' storage."""
    layout: FlatLayout
    copies: torch.Tensor
    """[W * P], model dtype: the weights that this rank computes with."""
    stored_residual: torch.Tensor
    """[W * P]: see ``residual``. Under offload its last pieces may still be on their way."""
    weight: torch.Tensor
    """[P]: master weights of the rank's partition."""
    momentum: torch.Tensor
    """[P]: AdamS's m."""
    square: torch.Tensor
    """[P]: moving average of the rank's own squared gradient; ranks coordinates, nothing else."""
    stored_last_sync: torch.Tensor
    """[P]: see ``last_sync``. Under offload its last pieces may still be on their way."""
    group: dict
    """The parameter group: "lr", "betas", "eps", "weight_decay", "density", read afresh in every step."""
    params: ScapeParams
    passage: Passage | None = None
    """The way of a residual in host memory through the device; None where it is on the device."""
    decay: torch.Tensor = field(init=False)
    """float64 [H + 1], where the weights are: products of the weight decay factors by age (update/tables.py)."""
    hints: dict = field(default_factory=dict, init=False)
    """Of the last choice for the next (ops.select)."""
    _decays: bool = field(default=False, init=False)
    _tables: tuple = field(default=(None, None), init=False)

    def __post_init__(self):
        self.max_age = self.params.age_limit(self.group["density"])
        self.decay = tables.initial_decay(_oldest(self.params, self.group["density"])).to(self.weight.device)

    @property
    def residual(self) -> torch.Tensor:
        """[W * P]: what this rank has not sent yet, in gradient units. Under offload in host memory; the host waits until it is whole."""
        if self.passage is not None:
            self.passage.settle()
        return self.stored_residual

    @property
    def last_sync(self) -> torch.Tensor:
        """[P]: step of the last synchronisation, 0 before the first; int16 where the step modulo 65,536 says enough, else int32. Under
        offload in host memory; the host waits until it is whole."""
        if self.passage is not None:
            self.passage.settle()
        return self.stored_last_sync

    @property
    def age_tables(self) -> tables.AgeTables:
        """For the group's present beta1; schedulers may change it."""
        beta1 = self.group["betas"][0]
        if self._tables[0] != beta1:
            self._tables = (beta1, tables.age_tables(self.max_age, beta1, dtype=self.weight.dtype, device=self.weight.device))
        return self._tables[1]

    def ages(self, step: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """int32: steps from the last synchronisation to ``step``, of a part of the partition."""
        return impl_reference.ages(self.last_sync[start:stop], step)

    def all_are_synchronised(self, step: int) -> None:
        """Nothing is waiting after ``step``."""
        self.last_sync.fill_(impl_reference.stamp(step, self.last_sync.dtype))

    def advance_decay(self) -> None:
        """Enters this step's decay; once per step."""
        factor = decay_factor(self.group["lr"], self.group["weight_decay"])
        self._decays = self._decays or factor != 1
        self.decay = tables.advance_decay(self.decay, factor)

    def restore_decay(self, saved: torch.Tensor) -> None:
        """Takes over products saved with this or another max_age."""
        num = self.decay.numel()
        saved = torch.cat([saved, saved[-1:].expand(max(0, num - saved.numel()))])[:num]
        self.decay = saved.to(self.weight.device, torch.float64, copy=True)
        self._decays = bool((saved != 1.0).any())

    @property
    def decay_products(self) -> torch.Tensor | None:
        """By age, in the weights' dtype; None if there was no decay yet."""
        return self.decay.to(self.weight.dtype) if self._decays else None

    def own(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank's partition of a whole buffer, a view."""
        return whole.narrow(0, rank * self.layout.partition_numel, self.layout.partition_numel)
