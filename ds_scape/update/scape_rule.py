"""What the owner of a partition does with the values it received, and how it ranks its coordinates for the next mask. Rule: docs/scape.md.

Beside the rule stands the literal reading of the paper's summary (``catch_up=False`` and ``score_first_moment``); it trains badly and is
kept to compare with.
"""
import torch

from ds_scape.update.adams import normaliser
from ds_scape.update.tables import AgeTables

#: Keeps the score of a coordinate finite whose gradients were all zero.
SCORE_EPS = 1e-9


@torch.no_grad()
def owner_step(weight: torch.Tensor, momentum: torch.Tensor, mean_value: torch.Tensor, age: torch.Tensor, tables: AgeTables,
               decay: torch.Tensor | None, *, lr: float, beta2: float, eps: float, catch_up: bool = True) -> None:
    """Moves the synchronised coordinates as ``age`` dense AdamS steps would have, had each of their gradients been the mean of what came.

    weight, momentum: [k] of one float dtype, changed in place. mean_value: [k], the mean over the workers of what they sent (sums of
    ``age`` gradients). age: int [k] >= 1, steps since the last synchronisation, this one included. tables: entries up to max_age; older
    coordinates count as max_age. decay: [H + 1], product of the weight decay factors of the last a steps; None for no decay.
    """
    if decay is not None:
        weight.mul_(decay[age.clamp(max=decay.numel() - 1)])
    counted = age.clamp(max=tables.momentum_kept.numel() - 1) if catch_up else torch.ones_like(age)
    kept, taken, moved, gradient_moved = (table[counted] for table in tables)
    steps = counted.to(weight.dtype)
    gradient = mean_value / steps
    divisor = normaliser(momentum, mean_value * mean_value / steps, beta2=beta2, eps=eps)
    update = (moved * momentum).add_(gradient_moved * gradient).div_(divisor)
    weight.sub_(update.mul_(lr))
    momentum.mul_(kept).add_(taken.mul_(gradient))


@torch.no_grad()
def track_square(square: torch.Tensor, own_gradient: torch.Tensor, *, beta2: float) -> None:
    """q = b2 * q + (1 - b2) * g^2 over the whole partition, in place; g: the owner's own clipped gradient of this step, [n]."""
    own = own_gradient.to(square.dtype)
    square.mul_(beta2).add_((own * own).mul_(1 - beta2))


def score_residual(own_residual: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """|r| / (sqrt(q) + 1e-9): how much the owner has not sent, in units of its usual gradient. After the step; a new tensor."""
    return own_residual.abs().div_(square.sqrt().add_(SCORE_EPS))


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
