"""SCAPE's Triton kernels on CPU tensors, in a process of its own because Triton decides at import: ``python triton_cases.py NAME``, of
GROUPS, or ``ptx``: what they are compiled to for an H200, which need not be there."""
import os
import re
import sys
import warnings
from pathlib import Path

if sys.argv[1] != "ptx":
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).parents[2]))            # for ``tests``; last, so that the installed packages are used

import torch

from ds_scape.kernels import impl_reference as reference
from ds_scape.kernels import impl_triton
from ds_scape.sync.partition import Segment
from tests.helpers import interpreted
from tests.scape import kernel_cases as cases
from tests.scape.kernel_cases import BF16, FP16, FP32

SIZES = (0, 17, 4097, 5003)


def worker(kernels):
    for a, gradient_dtype in enumerate((None, FP32, BF16, FP16)):
        for b, share in enumerate((None, -1, 0.0, 0.1, 1.0)):
            for i, n in enumerate(SIZES):
                if gradient_dtype is None and share == -1:
                    continue
                seed = a + b + i
                cases.check_enter(kernels, n, gradient_dtype=gradient_dtype, wire=(FP32, BF16, FP16)[seed % 3], share=share, seed=seed,
                                  factor=(1.0, 0.37, 1 / 1024)[i % 3], offset=i % 4, first=(0, 12345, cases.FAR - n // 2)[seed % 3],
                                  own=((0, 0), (0, 1), (0.4, 0.3), (0.75, 0.25))[seed % 4], specials=i % 3 != 0)
    for i, n in enumerate(SIZES):
        for dtype in (FP32, BF16, FP16):
            cases.check_track(kernels, n, dtype, (1.0, 0.3)[i % 2], seed=i, offset=i % 4)
            cases.check_scatter(kernels, n, (0.0, 0.02, 1.0)[i % 3], dtype, seed=i, offset=i % 4)
        for share in (None, 0.0, 0.05, 1.0):
            cases.check_take_ages(kernels, n, share, first=(0, 12345, cases.FAR - n // 2)[i % 3], seed=i, offset=i % 4)
        cases.check_mark(kernels, n, max_age=(40, 1, 101)[i % 3], seed=i, offset=i % 4)


def owner(kernels):
    for i, n in enumerate(SIZES):
        for j, share in enumerate((None, 0.05, 1.0)):
            for decay, catch_up in ((True, i % 2 == 0), (False, True)):
                cases.check_owner(kernels, n, share=share, out_dtype=(BF16, FP16, FP32)[(i + j) % 3], decay=decay, catch_up=catch_up,
                                  seed=i, offset=i % 4, max_age=(40, 3)[i % 2], specials=i % 3 != 1, by_place=share == 0.05 and not decay)
        for step in (0, 1, 7):
            cases.check_dense(kernels, n, step=step, decay=(1.0, 0.99)[i % 2], seed=i, offset=i % 4)
    for dtype in (FP32, BF16, FP16):
        for n, offset, specials in ((0, 0, False), (1, 1, False), (4097, 1, True), (9001, 3, False)):
            cases.check_sum(kernels, n, dtype, seed=n % 100, offset=offset, specials=specials)


def masks(kernels):
    for encoding in ("bits", "indices"):
        for i, sizes in enumerate([(1,), (7,), (8, 1), (65, 63), (65536,), (65535, 2, 7001)]):
            n = sum(sizes)
            dense = [(), ((0, 1),), ((n // 3, n // 2),), ((n - 1, n),), tuple((k, k + 1) for k in range(0, min(n, 12), 2))][i % 5]
            for share in (0.01, 0.3, 1.0) if n < 1000 else (0.02,) if encoding == "bits" else (0.1,):
                cases.check_masks(kernels, sizes, share, dense, encoding, seed=i)
    cases.check_far_positions(kernels, is_real=False)
    n, mask = 70_000, torch.rand(70_000, generator=cases.rng(1)) < 0.02
    count = int(mask.sum())
    message = reference.pack_mask(mask, (), "indices", count)
    for place, flip in ((0, 1), (1, 0x80), (3, 0x80), (4, 1), (7, 0x80), (8, 1), (500, 0x80)):          # two counts, then offsets
        broken = message.clone()
        broken[place] ^= flip
        _, expected = reference.unpack_mask(broken, n, (), "indices", (n,), (count,))
        assert list(kernels.unpack_mask(broken, n, (), "indices", (n,), (count,))[1]) == expected, (place, flip)


def select(kernels):
    n = 2000
    segments = (Segment(0, 3, 1), Segment(5, 6, 0), Segment(6, 40, 34), Segment(41, 1000, 300), Segment(1003, n - 1, 600))
    plain, ones = cases.plain(n, 1), torch.ones(n)
    by_kind = {"spread": (cases.spread(n, 1), cases.spread(n, 8)), "plain": (plain, cases.plain(n, 8).abs() ** 2),
               "ties": (torch.randint(-3, 4, (n,), generator=cases.rng(1)).float(), ones), "equal": (-0.5 * ones, 2 * ones),
               "zeros": (0 * ones, torch.where(plain > 0, plain, 0.0)), "given scores": (cases.spread(n, 1).abs(), None),
               "bits": [torch.randint(-1 << 31, 1 << 31, (n,), generator=cases.rng(i)).to(torch.int32).view(FP32) for i in (1, 51)]}
    for i, (r, q) in enumerate(by_kind.values()):
        for overdue in ((0.0, 0.03), (0.03, 1.0))[i % 2]:
            cases.check_select(kernels, r, q, segments, overdue=overdue, seed=i, offset=(1, 8)[i % 2])
    # A sample that misleads.
    n = 18_000
    for count, factor in ((5000, 1e-3), (2000, 100.0)):
        whole = (Segment(3, n - 5, count), Segment(n - 5, n - 1, 2))
        cases.check_select(kernels, cases.misleading(n, count, factor), torch.ones(n), whole, overdue=0.001)


def more(kernels):
    """What takes longer."""
    cases.check_sum(kernels, (5 << 19) + 13, BF16, seed=3)                      # several rows of lanes, the last one not whole
    cases.check_masks(kernels, (65535, 2, 70_001), 0.3, ((3, 5), (100, 66_000)), "bits")
    cases.check_masks(kernels, (65535, 2, 70_001), 0.05, ((3, 5), (100, 66_000)), "indices")
    n = 40_000
    for i, r in enumerate((cases.plain(n, 1), (torch.arange(n) % 3).float(), cases.spread(n, 1), torch.zeros(n))):
        for count in (1, 900, 20_000, n - 21):
            cases.check_select(kernels, r, torch.ones(n), (Segment(3, n - 15, count),), overdue=0.001, seed=i, offset=i % 2)


GROUPS = {"worker": worker, "owner": owner, "masks": masks, "select": select, "more": more}


def ptx():
    """Nothing is contracted, flushed to zero or approximated in what decides bits. The bracket of a selection is a hint."""
    from triton.backends.compiler import GPUTarget

    from ds_scape.kernels.triton_launchers import LAUNCHERS
    i16, i32, i64, u8, fp64 = torch.int16, torch.int32, torch.int64, torch.uint8, torch.float64
    select_data, place = (FP32, FP32, i16), (i32, i64, i32)
    wanted = {"enter": ((FP32, BF16, FP32, BF16, i32, i64), (True, True, 2, 12, 256), "mul.*add"),
              "track_square": ((FP32, BF16), (1024,), "mul.*add"),
              "owner_step": ((FP32, FP32, i16, FP32, i32, *[FP32] * 5, BF16), (True, True, True, False, 256), "div.rn.*sqrt.rn"),
              "dense_step": ((FP32, FP32, FP32), (True, 1024), "div.rn.*sqrt.rn"),
              "lane_sums": ((BF16, fp64), (1024,), "mul.*add"),
              "sample": ((*select_data, *place, i32), (True, 32), "sqrt.rn.*div.rn"),
              "unclear": ((*select_data, u8, *place, i32, i32, i32, i32), (True, 32), "sqrt.rn.*div.rn"),
              "third": ((*select_data, *place, i32, i32, i32), (True, 32), "sqrt.rn.*div.rn"),
              "finish": ((*select_data, u8, *place, i32, i32, i32, i32), (True, 32), "sqrt.rn.*div.rn")}
    for name, (dtypes, constants, needed) in wanted.items():
        for aligned in (True, False):
            code = LAUNCHERS[name].compile(list(dtypes), constants, aligned, GPUTarget("cuda", 90, 32)).asm["ptx"]
            found = re.findall(r"fma\.\S*|mad\.\S*f(?:32|64)|\S*ftz\S*|\S*approx\S*|div\.full\S*", code)
            assert not found, f"{name}: {sorted(set(found))}"
            assert re.search(needed, code, re.DOTALL), f"{name} has no {needed}"


def main():
    if sys.argv[1] == "ptx":
        ptx()
        return
    interpreted.spare_time()
    warnings.simplefilter("ignore", RuntimeWarning)        # numpy's, of infinities
    GROUPS[sys.argv[1]](impl_triton.load())


if __name__ == "__main__":
    main()
