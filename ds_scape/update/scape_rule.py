"""What the owner of a partition does with the values it received, and how it ranks its coordinates for the next mask. Rule: docs/scape.md.

Beside the rule stands the literal reading of the paper's summary (``catch_up=False`` and ``score_first_moment``); it trains badly and is
kept to compare with.
"""
import torch

from ds_scape.kernels import impl_reference
from ds_scape.kernels.impl_reference import score_residual  # noqa: F401  (|r| / (sqrt(q) + 1e-9), after the step; kernels fuse it)
from ds_scape.kernels.ops import REFERENCE, Kernels
from ds_scape.update.tables import AgeTables


@torch.no_grad()
def owner_step(weight: torch.Tensor, momentum: torch.Tensor, mean_value: torch.Tensor, age: torch.Tensor, tables: AgeTables,
               decay: torch.Tensor | None, *, lr: float, beta2: float, eps: float, catch_up: bool = True) -> None:
    """Moves the synchronised coordinates as ``age`` dense AdamS steps would have, had each of their gradients been the mean of what came.

    weight, momentum: [k] of one float dtype, changed in place. mean_value: [k], the mean over the workers of what they sent (sums of
    ``age`` gradients). age: int [k] >= 1, steps since the last synchronisation, this one included. tables: entries up to max_age; older
    coordinates count as max_age. decay: [H + 1], product of the weight decay factors of the last a steps; None for no decay.
    """
    impl_reference.catch_up_step(weight, momentum, mean_value, age, tables, decay, lr=lr, beta2=beta2, eps=eps, catch_up=catch_up)


@torch.no_grad()
def synchronise(weight: torch.Tensor, momentum: torch.Tensor, last_sync: torch.Tensor, mean_value: torch.Tensor,
                index: torch.Tensor | None, step: int, tables: AgeTables, decay: torch.Tensor | None, out: torch.Tensor, *, lr: float,
                beta2: float, eps: float, catch_up: bool, kernels: Kernels = REFERENCE) -> None:
    """``owner_step`` for the coordinates of a partition at ``index`` (ascending [k]; None: all) in step number ``step``: weight,
    momentum [P] and last_sync [P] are changed in place; ``out`` [k], of any float dtype, gets the new weights."""
    kernels.owner_step(weight, momentum, last_sync, mean_value, index, step, tables, decay, lr=lr, beta2=beta2, eps=eps,
                       catch_up=catch_up, out=out)


@torch.no_grad()
def track_square(square: torch.Tensor, own_gradient: torch.Tensor, *, beta2: float, factor: float = 1.0,
                 kernels: Kernels = REFERENCE) -> None:
    """q = b2 * q + (1 - b2) * g^2 over the whole partition, in place; g: factor * the owner's own gradient of this step, [n]."""
    kernels.track_square(square, own_gradient, factor, beta2=beta2)


def score_first_moment(momentum: torch.Tensor, own_residual: torch.Tensor, *, beta1: float) -> torch.Tensor:
    """|b1 * m + (1 - b1) * r|: the literal reading. Before the step; a new tensor."""
    return (momentum * beta1).add_(own_residual * (1 - beta1)).abs_()


def step_bound(tables: AgeTables, beta2: float) -> float:
    """Upper bound of one synchronisation's |update| in units of lr, over all ages: about 4.5 * sqrt(age) for the oldest.

    |c*m + (a-c)*u/a| / sqrt(b2*m^2 + (1-b2)*u^2/a) <= sqrt(c^2/b2 + ((a-c)^2/a)/(1-b2)) by Cauchy-Schwarz.
    """
    moved, gradient_moved = tables.momentum_moved[1:].double(), tables.gradient_moved[1:].double()
    ages = torch.arange(1, moved.numel() + 1, dtype=torch.float64, device=moved.device)
    return float((moved ** 2 / beta2 + gradient_moved ** 2 / ages / (1 - beta2)).sqrt().max())
