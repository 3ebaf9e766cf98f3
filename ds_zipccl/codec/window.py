"""Window base from a given standard deviation: the paper's way, without statistics of the data at hand."""
import math

import torch

from ds_zipccl.codec.dtypes import BY_TORCH, DType

MEAN_LOG2_ABS_NORMAL = -(0.5772156649015329 + math.log(2)) / (2 * math.log(2))      # E[log2 |Z|] = -0.9164
MEAN_OFFSET = 4.3                                                                   # docs/format.md, section 5


def lo_for_sigma(sigma: float, dtype: DType) -> int:
    """Window base ``lo`` (window = exponents lo+1..lo+7) for zero-mean Gaussian data of standard deviation ``sigma`` >
    0.

    Source: ZipCCL, exponent coding; the closed form and its derivation are in docs/format.md, section 5.
    Raises ValueError when sigma is not a positive finite number.
    """
    if not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma must be positive and finite, got {sigma!r}")
    mean_exponent = dtype.bias + math.log2(sigma) + MEAN_LOG2_ABS_NORMAL - 0.5
    return min(max(math.floor(mean_exponent - MEAN_OFFSET), 0), dtype.top_lo)


def measured_lo(x: torch.Tensor) -> int:
    """``lo_for_sigma`` of the elements of ``x``; -1, the block's own mean, where they have no positive finite standard deviation (too few,
    all equal, not finite). Reads one number on the host."""
    sigma = float(x.std()) if x.numel() > 1 else 0.0
    return lo_for_sigma(sigma, BY_TORCH[x.dtype]) if sigma > 0 and math.isfinite(sigma) else -1
