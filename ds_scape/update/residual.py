"""A worker's residual: the gradient that it has not sent yet. What is sent and what is kept add up to what came in, bit for bit."""
import torch

#: Elements converted at a time: 64 MiB in fp32.
CHUNK = 1 << 24
WIRE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@torch.no_grad()
def scaled(gradient: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """``factor * gradient`` in ``dtype``, one rounding; ``gradient`` itself where that changes nothing. factor: clipping and loss scale in
    one number, never applied to what is in a residual already."""
    return gradient.to(dtype) if factor == 1.0 else gradient.to(dtype, copy=True).mul_(factor)


@torch.no_grad()
def accumulate(residual: torch.Tensor, gradient: torch.Tensor, factor: float) -> None:
    """``residual += scaled(gradient, factor)``, [n], piece by piece, so that no second buffer of this size comes into being."""
    for part, fresh in zip(residual.split(CHUNK), gradient.split(CHUNK), strict=True):
        part.add_(fresh if factor == 1.0 else scaled(fresh, factor, residual.dtype))


@torch.no_grad()
def take(residual: torch.Tensor, index: torch.Tensor | None, wire: torch.dtype) -> torch.Tensor:
    """Takes what is sent out of the residual: returns [k] in the wire dtype, in the order of ``index`` (int64 [k]; None: everything).

    The wire's rounding error stays: for every coordinate sent, value + residual after == residual before exactly, because the difference of
    a number and its rounding to fewer bits is representable. (A residual beyond the largest wire value would become infinite; it cannot
    come from finite gradients of less than 3e38.)
    """
    if index is None:
        values = residual.to(wire, copy=True)
        residual.sub_(values)               # in the residual's precision, whatever the wire's
        return values
    before = residual[index]
    values = before.to(wire, copy=True)
    residual[index] = before.sub_(values)
    return values
