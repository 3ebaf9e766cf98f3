"""The dense AdamS rule (arXiv 2505.16363): one state tensor, the normaliser is made from the old momentum and the gradient.

    D = sqrt(b2 * m^2 + (1 - b2) * g^2) + eps        m before its update
    m = b1 * m + (1 - b1) * g
    w = (1 - lr * wd) * w  -  lr * m / D

Without bias correction (the published formula, and what SCAPE's rule reduces to) |m / D| never exceeds ``update_bound``. The authors' code
divides both uses of m by 1 - b1^step; its first step is then 1 / sqrt(1 - b2) = 4.47 lr long instead of 0.447 lr.
"""
import math

import torch

from ds_scape.kernels.ops import REFERENCE, Kernels
from ds_scape.update.tables import one_step


@torch.no_grad()
def dense_step(weight: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, *, lr: float, betas: tuple[float, float], eps: float,
               weight_decay: float, bias_correction_step: int = 0, kernels: Kernels = REFERENCE) -> None:
    """One step, in place on ``weight`` and ``momentum``; ``gradient`` is only read. All three: equal shapes, one float dtype.

    bias_correction_step: 0 for the published formula; the number of this step, from 1, for the authors' bias-corrected variant.

    Every operation rounds on its own (no fused multiply-add), in the order written: SCAPE's owner step at age 1 gives the same bits.
    """
    kept, taken = one_step(betas[0])
    correction = 1 - betas[0] ** bias_correction_step if bias_correction_step else 1.0
    kernels.dense_step(weight, momentum, gradient, lr=lr, kept=kept, taken=taken, beta2=betas[1], eps=eps,
                       decay=decay_factor(lr, weight_decay), correction=correction)


def decay_factor(lr: float, weight_decay: float) -> float:
    """What one step of decoupled weight decay multiplies a weight with."""
    return 1 - lr * weight_decay


def update_bound(betas: tuple[float, float]) -> float:
    """Upper bound of |m / D| without bias correction, by Cauchy-Schwarz: 1.026 at (0.9, 0.95), 3.29 at (0.9, 0.999)."""
    b1, b2 = betas
    return math.sqrt(b1 * b1 / b2 + (1 - b1) ** 2 / (1 - b2))
