"""The Triton kernels on CPU tensors, in a process of its own because Triton decides at import: ``python triton_cases.py DTYPE LEVEL``."""
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
from tests.helpers import interpreted
from tests.zipccl import window_cases

BITS = {2: torch.int16, 4: torch.int32}
# By level: kind, elements, rows, skip, offset of the rows, capacity, spill
CASES = {1: (("gauss", 3000, 1, -1, 0, 35, 64), ("sparse", 1500, 2, 1, 1, 20, 2048), ("bits", 1025, 3, 0, 0, 1024, 0),
             ("tail", 32769, 1, -1, 0, 20, 20000), ("tail", 5000, 2, -1, 3, 20, 64), ("gauss", 0, 2, -1, 0, 35, 64),
             ("gauss", 32768, 1, -1, 0, 35, 64), ("gauss", 700, 5, 2, 0, 35, 64),
             ("scattered", 2100, 1, -1, 0, 160, 64)),
         2: (("gauss", 3000, 1, -1, 0, 95, 64), ("sparse", 1500, 2, 1, 1, 60, 4096), ("half zeros", 2100, 1, -1, 0, 95, 4096),
             ("bits", 1025, 3, 0, 0, 1792, 0), ("bits", 3000, 1, -1, 0, 700, 40000), ("specials", 2500, 3, 1, 0, 300, 9000),
             ("tail", 32769, 1, -1, 0, 60, 40000), ("tail", 5000, 2, -1, 3, 60, 64), ("gauss", 0, 2, -1, 0, 95, 64),
             ("denormals", 3000, 2, 0, 0, 95, 64), ("tail", 700, 5, 2, 0, 300, 64),
             ("limits", 7 * 1024, 1, -1, 0, 300, 64))}
# Warps of the kernels' programs. What is done by many programs, or turns of one, costs the interpreter most: wide ones where there is much,
# but such that many cases have a whole program's blocks, which is another way through decode.
NARROW = {"encode": 32, "encode_many": 32, "decode": 2, "decode_reduce": 1, "decode_reduce2": 2}
WIDE, MUCH = {"encode": 16, "encode_many": 16, "decode": 8, "decode_reduce": 8, "decode_reduce2": 8}, 8192
FAULTS = {1: (20, 2048), 2: (60, 4096)}                    # capacity, spill


def rows_of(kind, rows, n, dtype, offset):
    g = torch.Generator().manual_seed(n + offset)
    x = torch.empty(rows * (n + 3) + offset, dtype=dtype.torch_dtype)[offset:].view(rows, n + 3)[:, :n]
    z = torch.randn(rows, n, generator=g)
    if kind == "bits":
        width = 8 * dtype.itemsize - 1
        z = torch.randint(-(1 << width), 1 << width, (rows, n), generator=g).to(BITS[dtype.itemsize]).view(dtype.torch_dtype)
    if kind in ("sparse", "half zeros"):
        z = z * (torch.rand(rows, n, generator=g) > (0.1 if kind == "sparse" else 0.5))
    if kind == "specials":
        z[:, ::7], z[:, 3::11], z[:, 5::13], z[:, 1::17] = float("inf"), float("nan"), 1e-39, -0.0
        z[:, 2::19], z[:, 4::23] = -float("inf"), -1e-40
    if kind == "limits":                                   # of class B, by the number of higher exponents, and of zeros
        order = torch.rand(rows, 7, 1024, generator=g).argsort(-1)
        higher, zeros = (torch.tensor(counts)[:, None] for counts in ((447, 448, 449, 448, 448, 448, 448), (0, 0, 0, 26, 27, 170, 171)))
        z = z.abs().frac().view(rows, 7, 1024) + 1
        z = torch.where(order < higher, 2 * z, torch.where(order >= 1024 - zeros, 0, z)).view(rows, n)
    if kind == "scattered":                                # 136 escapes a block, four at most of a lane's even elements
        z = (z.abs().frac() + 1) * torch.randint(1, 3, (rows, n), generator=g)
        z[:, ::8] /= 512
        z[:, 1::128] /= 512
    if kind == "denormals":
        z = z * 1e-39
    if kind == "tail":
        z = z * torch.exp(2 * torch.randn(rows, n, generator=g))
    return x.copy_(z)


def check(sets, dtype, x, skip, capacity, spill, level):
    """``sets``: kernels with narrow and wide programs."""
    rows, n = x.shape
    kernels = sets[n >= MUCH]
    g, bits = fmt.layout(dtype, n, capacity, spill, level=level), BITS[dtype.itemsize]
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


def check_corruption(kernels, dtype, level):
    """A flipped bit in headers, codes or streams is reported where the reference raises."""
    g = fmt.layout(dtype, 2000, *FAULTS[level], level=level)
    x = rows_of("tail" if level == 2 else "gauss", 1, 2000, dtype, 0)
    good = torch.empty(1, fmt.align(g.frame_bytes), dtype=torch.uint8)
    kernels.encode(x, good, torch.empty(1, dtype=torch.int32), g)
    out = torch.empty_like(x)
    flips = [(place, 1 << place % 3) for place in (0, 5, 6, 8, 16, 22, 128, 129, 132, 144, 145, 146, 147, 148, 128 + g.last_codes_offset)]
    flips += [(7, value) for value in (1, dtype.top_lo + 1, dtype.top_lo + 2, 255)]                             # the given window
    if level == 2:
        flips += [(133, 1), (145, 6), (144, 0x80), *((128 + g.last_escapes_offset + 9 * i, 0x11 << i % 4) for i in range(5))]
        flips += [(g.pools_offset + 7 * i, 0x11 << i % 4) for i in range(5)]
    seen = set()
    for place, bits in flips:
        frames = good.clone()
        frames[0, place] ^= bits
        expected, outcomes = torch.empty_like(x), []
        for functions, after, to in ((kernels, kernels.raise_on_error, out), (impl_reference, lambda device: None, expected)):
            try:
                functions.decode(frames, to, g)
                after("cpu")
                outcomes.append("silent")
            except FrameError:
                outcomes.append("FrameError")
        assert outcomes[0] == outcomes[1], (place, outcomes)
        assert outcomes[0] == "FrameError" or torch.equal(out.view(torch.uint8), expected.view(torch.uint8)), place
        seen.add(outcomes[0])
    assert seen == {"silent", "FrameError"}


def check_spills(sets, dtype, level):
    """Spills of two tiles: they lie one behind the other in their group's sub-pool, or the second one overflows it."""
    capacity, spills = {1: (22, (100, 30)), 2: (80, (500, 200))}[level]
    for spill in spills:
        check(sets, dtype, rows_of("gauss", 1, 32768 + 9000, dtype, 0), -1, capacity, spill, level)


def main():
    interpreted.spare_time()
    dtype, level = next(row for row in TABLE if row.name == sys.argv[1]), int(sys.argv[2])
    sets = [impl_triton.TritonKernels({level: {name: (n, None) for name, n in warps.items()}}) for warps in (NARROW, WIDE)]
    for case in CASES[level]:
        kind, n, rows, skip, offset, capacity, spill = case
        try:
            check(sets, dtype, rows_of(kind, rows, n, dtype, offset), skip, capacity, spill, level)
        except AssertionError as error:
            raise AssertionError(f"{dtype.name} level {level} {case}: {error}") from error
    for x in window_cases.tensors(dtype):
        check(sets, dtype, x.view(1, -1), -1, fmt.LEVELS[level].max_slot_bytes, 0, level)
    check_corruption(impl_triton.load(), dtype, level)
    if level == 2 or dtype.code == 1:
        check_spills(sets, dtype, level)


if __name__ == "__main__":
    main()
