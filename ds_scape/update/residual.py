"""A worker's residual: the gradient that it has not sent yet. What is sent and what is kept add up to what came in, bit for bit."""
import torch

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@torch.no_grad()
def scaled(gradient: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """``factor * gradient`` in ``dtype``, one rounding; ``gradient`` itself is overwritten where it has that dtype. factor: clipping and
    loss scale in one number, never applied to what is in a residual already."""
    gradient = gradient.to(dtype)
    return gradient if factor == 1.0 else gradient.mul_(factor)


@torch.no_grad()
def accumulate(residual: torch.Tensor, gradient: torch.Tensor) -> None:
    """``residual += gradient``, [n] both of one dtype."""
    residual.add_(gradient)


@torch.no_grad()
def take(residual: torch.Tensor, index: torch.Tensor | None, wire: torch.dtype) -> torch.Tensor:
    """Takes what is sent out of the residual: returns [k] in the wire dtype, in the order of ``index`` (int64 [k]; None: everything).

    The wire's rounding error stays: for every coordinate sent, value + residual after == residual before exactly, because the difference of
    a number and its rounding to fewer bits is representable. (A residual beyond the largest wire value would become infinite; it cannot
    come from finite gradients of less than 3e38.)
    """
    before = residual if index is None else residual[index]
    values = before.to(wire, copy=True)
    after = before - values.to(residual.dtype)
    if index is None:
        residual.copy_(after)
    else:
        residual[index] = after
    return values
