"""The scalar that is known before anything is changed: how large a worker's gradient is, and whether it is finite."""
import math

import torch

from ds_scape.kernels.ops import REFERENCE, Kernels


@torch.no_grad()
def sum_of_squares(tensors: list[torch.Tensor], kernels: Kernels = REFERENCE) -> torch.Tensor:
    """float64 [1]: the sum of all squares, in a fixed order. Not finite if and only if an element is not: finite floats of 32 bits cannot
    overflow a double."""
    device = tensors[0].device if tensors else None
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for tensor in tensors:
        total += kernels.sum_of_squares(tensor.view(-1))
    return total


def clip_factor(mean_square: float, max_norm: float) -> float:
    """min(1, max_norm / sqrt(mean_square)): one factor for all workers; max_norm 0 turns clipping off.

    ``mean_square`` is the mean over the workers of |g_i|^2. Its root bounds the norm of the mean gradient from above, so this bites earlier
    than the clipping of dense training.
    """
    norm = math.sqrt(mean_square)
    return max_norm / norm if 0 < max_norm < norm else 1.0
