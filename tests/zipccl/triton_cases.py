"""The Triton kernels on CPU tensors, in a process of its own because Triton decides at import: ``python triton_cases.py DTYPE``."""
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).parents[2]))            # for ``tests``; last, so that the installed packages are used

import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import TABLE
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import impl_reference, impl_triton
from tests.zipccl import window_cases

BITS = {2: torch.int16, 4: torch.int32}
#        kind, elements, rows, skip, offset of the rows, capacity, spill
CASES = (("gauss", 3000, 1, -1, 0, 35, 64), ("sparse", 1500, 2, 1, 1, 20, 2048), ("bits", 1025, 3, 0, 0, 1024, 0),
         ("tail", 32769, 1, -1, 0, 20, 20000), ("tail", 5000, 2, -1, 3, 20, 64), ("gauss", 0, 2, -1, 0, 35, 64),
         ("gauss", 32768, 1, -1, 0, 35, 64))


def rows_of(kind, rows, n, dtype, offset):
    g = torch.Generator().manual_seed(n + offset)
    x = torch.empty(rows * (n + 3) + offset, dtype=dtype.torch_dtype)[offset:].view(rows, n + 3)[:, :n]
    z = torch.randn(rows, n, generator=g)
    if kind == "bits":
        width = 8 * dtype.itemsize - 1
        z = torch.randint(-(1 << width), 1 << width, (rows, n), generator=g).to(BITS[dtype.itemsize]).view(dtype.torch_dtype)
    if kind == "sparse":
        z = z * (torch.rand(rows, n, generator=g) > 0.1)
    if kind == "tail":
        z = z * torch.exp(2 * torch.randn(rows, n, generator=g))
    return x.copy_(z)


def check(kernels, dtype, x, skip, capacity, spill):
    rows, n = x.shape
    g, bits = fmt.layout(dtype, n, capacity, spill), BITS[dtype.itemsize]
    results = []
    for functions in (kernels, impl_reference):
        frames = torch.full((rows, fmt.align(g.frame_bytes)), 0xA5, dtype=torch.uint8)
        status = torch.full((1,), -1, dtype=torch.int32)
        functions.encode(x, frames, status, g, skip)
        results.append((frames, int(status)))
    (frames, status), (expected, expected_status) = results
    assert status == expected_status, (hex(status), hex(expected_status))
    assert torch.equal(frames, expected), f"first difference at {(frames != expected).nonzero()[0].tolist()}"
    if status & 1 << 16:
        return
    out = torch.full((rows, n + 3), 1.5, dtype=dtype.torch_dtype)
    kernels.decode(frames, out[:, :n], g, skip)
    kept = [i for i in range(rows) if i != skip]
    assert torch.equal(out[kept, :n].view(bits), x[kept].view(bits)) and bool((out[:, n:] == 1.5).all())
    own, totals = max(skip, 0), [torch.empty_like(x[0]), torch.empty_like(x[0])]
    kernels.decode_reduce(frames, x[own], own, totals[0], g)
    impl_reference.decode_reduce(frames, x[own], own, totals[1], g)
    assert torch.equal(totals[0].view(bits), totals[1].view(bits))
    kernels.raise_on_error("cpu")


def check_corruption(kernels, dtype):
    """A flipped bit in headers or codes is reported where the reference raises."""
    g = fmt.layout(dtype, 2000, 20, 2048)
    x = rows_of("gauss", 1, 2000, dtype, 0)
    good = torch.empty(1, fmt.align(g.frame_bytes), dtype=torch.uint8)
    kernels.encode(x, good, torch.empty(1, dtype=torch.int32), g)
    out = torch.empty_like(x)
    flips = [(place, 1 << place % 3) for place in (0, 5, 6, 8, 16, 22, 128, 129, 132, 144, 145, 146, 147, 148, 128 + g.last_codes_offset)]
    for place, bits in flips + [(7, value) for value in (1, dtype.top_lo + 1, dtype.top_lo + 2, 255)]:           # 7: the given window
        frames = good.clone()
        frames[0, place] ^= bits
        outcomes = []
        for functions, after in ((kernels, kernels.raise_on_error), (impl_reference, lambda device: None)):
            try:
                functions.decode(frames, out, g)
                after("cpu")
                outcomes.append("silent")
            except FrameError:
                outcomes.append("FrameError")
        assert outcomes[0] == outcomes[1], (place, outcomes)


def main():
    dtype = next(row for row in TABLE if row.name == sys.argv[1])
    kernels = impl_triton.load()
    for case in CASES:
        kind, n, rows, skip, offset, capacity, spill = case
        try:
            check(kernels, dtype, rows_of(kind, rows, n, dtype, offset), skip, capacity, spill)
        except AssertionError as error:
            raise AssertionError(f"{dtype.name} {case}: {error}") from error
    for x in window_cases.tensors(dtype):
        check(kernels, dtype, x.view(1, -1), -1, 1024, 0)
    check_corruption(kernels, dtype)


if __name__ == "__main__":
    main()
