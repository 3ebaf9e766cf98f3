"""The arithmetic of our reductions, on plain tensors: what every decode_reduce kernel and every uncompressed path must
equal."""
import torch

_NANS = {torch.bfloat16: (torch.int16, 0x7FC0), torch.float16: (torch.int16, 0x7E00), torch.float32: (torch.int32, 0x7FC00000)}


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
    # By its bits: CUDA converts to another payload, and a tensor brought from the host would hold the host until the GPU has come so far.
    bits, nan = _NANS[out.dtype]
    rounded = total.to(out.dtype)
    rounded.view(bits).masked_fill_(total.isnan(), nan)
    out.copy_(rounded)


def load_kernels(device: torch.device) -> None:
    """Has torch load what ``sum_in_order`` of BF16 launches on a GPU, now and not at its first use: sums and averages. Torch has a kernel
    for each alignment, and rows begin anywhere: the second ones here at a multiple of 16 bytes, of 8, of 4, of 2."""
    for numel in (4096, 4100, 4098, 4097):
        for divisor in (1, 3):
            rows = torch.zeros(2, numel, dtype=torch.bfloat16, device=device)
            sum_in_order(rows.unbind(0), torch.empty_like(rows[0]), divisor)
