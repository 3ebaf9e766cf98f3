"""The arithmetic of our reductions, on plain tensors: what every decode_reduce kernel and every uncompressed path must
equal."""
import torch


def sum_in_order(rows, out: torch.Tensor) -> None:
    """``out`` [n] = sum of ``rows`` (an iterable of [n] tensors of out's dtype), in the order given.

    fp32 accumulator that starts as the first row's value (so -0 + -0 stays -0), one rounding to nearest even at the
    end, NaN results are the dtype's canonical quiet NaN (BF16 0x7fc0). ``out`` may be one of the rows.
    """
    total = None
    for row in rows:
        total = row.to(torch.float32, copy=True) if total is None else total.add_(row.to(torch.float32))
    nan = torch.tensor(float("nan"), dtype=torch.float32, device="cpu").to(out.dtype)      # CUDA converts to another payload
    out.copy_(torch.where(total.isnan(), nan.to(out.device), total.to(out.dtype)))
