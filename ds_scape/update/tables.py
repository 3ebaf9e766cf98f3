"""Coefficients of the owner's step by age, computed once in double precision, so that no implementation calls pow().

A coordinate that was not synchronised for ``a`` steps makes up for them at once (docs/scape.md). The coefficients depend on the age alone,
which is a small integer, so every kernel looks them up and all agree on the last bit.
"""
from typing import NamedTuple

import torch


class AgeTables(NamedTuple):
    """Each [max_age + 1], entry a for age a; entry 0 is unused."""
    momentum_kept: torch.Tensor
    """A = b1^a: how much of m is left after a steps."""
    momentum_taken: torch.Tensor
    """1 - A."""
    momentum_moved: torch.Tensor
    """c = b1 * (1 - A) / (1 - b1): what m alone moves the weight by, in a steps."""
    gradient_moved: torch.Tensor
    """a - c: the same for the mean gradient."""


def age_tables(max_age: int, beta1: float, *, dtype: torch.dtype, device) -> AgeTables:
    """The tables for ages up to ``max_age`` >= 1. At age 1 they are b1, 1 - b1, b1, 1 - b1: AdamS."""
    kept, taken = one_step(beta1)
    rows = [(1.0, 0.0, 0.0, 0.0), (kept, taken, kept, taken)]
    for age in range(2, max_age + 1):
        left = beta1 ** age
        moved = beta1 * (1 - left) / (1 - beta1)
        rows.append((left, 1 - left, moved, age - moved))
    return AgeTables(*torch.tensor(rows, dtype=torch.float64, device="cpu").t().contiguous().to(device, dtype).unbind(0))


def one_step(beta1: float) -> tuple[float, float]:
    """(share of m kept, share of the gradient taken) in one step."""
    return beta1, 1 - beta1


def initial_decay(max_age: int) -> torch.Tensor:
    """Decay products before the first step: float64 [max_age + 1] of ones, on the host."""
    return torch.ones(max_age + 1, dtype=torch.float64, device="cpu")


def advance_decay(products: torch.Tensor, factor: float) -> torch.Tensor:
    """The products after one more step with decay ``factor``: entry a is the product of the last a steps' factors, entry 0 is 1.

    This is how decay can be lazy while the learning rate changes: a weight is multiplied by the entry of its age when it is synchronised,
    so the owner's master and every rank's copy differ at no time. Ages beyond the table count as its last entry.
    """
    return torch.cat([products[:1], products[:-1] * factor])
