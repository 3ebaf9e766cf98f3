"""A worker's residual: the gradient that it has not sent yet. What is sent and what is kept add up to what came in, bit for bit."""
import torch

from ds_scape.kernels.ops import REFERENCE, Kernels

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@torch.no_grad()
def accumulate(residual: torch.Tensor, gradient: torch.Tensor, factor: float, kernels: Kernels = REFERENCE) -> None:
    """``residual += factor * gradient``, [n]; the product is rounded to the residual's dtype first. factor: clipping and loss scale in one
    number, never applied to what is in a residual already."""
    kernels.enter(residual, gradient, factor)


@torch.no_grad()
def take(residual: torch.Tensor, index: torch.Tensor | None, wire: torch.dtype, kernels: Kernels = REFERENCE) -> torch.Tensor:
    """Takes what is sent out of the residual: returns [k] in the wire dtype, in the order of ``index`` (int64 [k]; None: everything).

    The wire's rounding error stays: for every coordinate sent, value + residual after == residual before exactly, because the difference of
    a number and its rounding to fewer bits is representable. (A residual beyond the largest wire value would become infinite; it cannot
    come from finite gradients of less than 3e38.)
    """
    values = torch.empty(residual.numel() if index is None else len(index), dtype=wire, device=residual.device)
    kernels.enter(residual, None, 1.0, index, values)
    return values
