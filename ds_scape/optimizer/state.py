"""What one rank keeps for one flat buffer."""
from dataclasses import dataclass, field

import torch

from ds_scape.config import ScapeParams
from ds_scape.optimizer.passage import Passage
from ds_scape.sync.partition import FlatLayout
from ds_scape.update import tables
from ds_scape.update.adams import decay_factor


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
    last_sync: torch.Tensor
    """int32 [P]: step of the last synchronisation, 0 before the first."""
    group: dict
    """The parameter group: "lr", "betas", "eps", "weight_decay", "density", read afresh in every step."""
    params: ScapeParams
    passage: Passage | None = None
    """The way of a residual in host memory through the device; None where it is on the device."""
    decay: torch.Tensor = field(init=False)
    """float64 [H + 1], where the weights are: products of the weight decay factors by age (update/tables.py)."""
    _decays: bool = field(default=False, init=False)
    _tables: tuple = field(default=(None, None), init=False)

    def __post_init__(self):
        self.max_age = self.params.age_limit(self.group["density"])
        # A coordinate that is overdue waits for as long as a round through its segment takes: 1.5 / density at most.
        num_products = min(2 * self.max_age, self.max_age + int(2 / self.group["density"])) + 2
        self.decay = tables.initial_decay(num_products).to(self.weight.device)

    @property
    def residual(self) -> torch.Tensor:
        """[W * P]: what this rank has not sent yet, in gradient units. Under offload in host memory; the host waits until it is whole."""
        if self.passage is not None:
            self.passage.settle()
        return self.stored_residual

    @property
    def age_tables(self) -> tables.AgeTables:
        """For the group's present beta1; schedulers may change it."""
        beta1 = self.group["betas"][0]
        if self._tables[0] != beta1:
            self._tables = (beta1, tables.age_tables(self.max_age, beta1, dtype=self.weight.dtype, device=self.weight.device))
        return self._tables[1]

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
