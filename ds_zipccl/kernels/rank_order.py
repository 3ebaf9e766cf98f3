"""The arithmetic of our reductions, on plain tensors: what every decode_reduce kernel and every uncompressed path must
equal."""
import torch


def sum_in_order(rows, out: torch.Tensor, divisor: int = 1) -> None:
    """``out`` [n] = sum of ``rows`` (an iterable of [n] tensors of out's dtype), in the order given, divided by ``divisor``.

    fp32 accumulator that starts as the first row's value (so -0 + -0 stays -0), one rounding to nearest even at the
    end, NaN results are the dtype's canonical quiet NaN (BF16 0x7fc0). ``out`` may be one of the rows. With a divisor rows are
    scaled by a power of two first, which is exact, so that no sum overflows whose quotient does not.
    """
    total, scale = None, 0.5 ** (divisor - 1).bit_length()
    for row in rows:
        row = row.to(torch.float32, copy=total is None)
        if divisor != 1:
            row = row.mul(scale)
        total = row if total is None else total.add_(row)
    if divisor != 1:
        total.div_(divisor * scale)
    nan = torch.tensor(float("nan"), dtype=torch.float32, device="cpu").to(out.dtype)      # CUDA converts to another payload
    out.copy_(torch.where(total.isnan(), nan.to(out.device), total.to(out.dtype)))
