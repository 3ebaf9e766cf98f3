"""Blocks whose exponents' variance is exactly at the limit of a spread block, or next to it (docs/format.md, section 5)."""
from fractions import Fraction
from math import floor
from typing import NamedTuple

import torch

from ds_zipccl.codec.dtypes import DType
from tests.helpers.bits import gaussian, random_bits

FP32 = torch.float32


class Case(NamedTuple):
    """A block with ``n Q - S S == 3 n n + excess``; ``zeros`` of its ``num_nonzero + zeros`` elements are zero."""
    num_nonzero: int
    zeros: int
    excess: int


# Such integers exist for few n: even ones for 0, odd ones for -1, ones with a square root of -1 for 1.
CASES = [Case(1024, 0, 0), Case(1000, 24, 0), Case(130, 0, 0), Case(900, 124, 0), Case(60, 964, 0),
         Case(1023, 1, -1), Case(1001, 0, -1), Case(901, 123, -1),
         Case(1013, 11, 1), Case(997, 0, 1), Case(101, 2, 1), Case(941, 83, 1), Case(101, 923, 1)]
BASES = {"bfloat16": (5, 100, 131, 250), "float16": (5, 12, 26), "float32": (5, 100, 131, 250)}       # exponents: base - 3 .. base + 3


def nonzero_exponents(case: Case, base: int) -> list[int]:
    """The case's exponents, close to ``base``: their mean is where spread blocks have another window, in both modes."""
    n = case.num_nonzero
    for ones in range(n // 4):                                          # elements at base + 1: the sum of distances to base
        squares, rest = divmod(3 * n * n + case.excess + ones * ones, n)
        if rest or (squares - ones) % 2:
            continue
        distances, left = [1] * ones, squares - ones
        for distance in (3, 2, 1):
            pairs = left // (2 * distance * distance)
            distances += [distance, -distance] * pairs
            left -= 2 * distance * distance * pairs
        if left == 0 and len(distances) <= n:
            return [base + d for d in distances + [0] * (n - len(distances))]
    raise AssertionError(f"no such block: {case}")


def expected_window(case: Case, base: int, dtype: DType) -> tuple[int, int]:
    """(lo, mode) of the case's block, in fractions."""
    e = nonzero_exponents(case, base)
    mean = Fraction(sum(e), len(e))
    spread = Fraction(sum(v * v for v in e), len(e)) - mean * mean > 3
    zero_mode = 1024 * case.zeros > 26 * (case.zeros + len(e))
    offset = (Fraction(29 if spread else 34) if zero_mode else Fraction(36 if spread else 43)) / 10
    other = (Fraction(34 if spread else 29) if zero_mode else Fraction(43 if spread else 36)) / 10
    lo, other_lo = (min(max(floor(mean - o), 0), dtype.top_lo) for o in (offset, other))
    assert spread == (case.excess > 0) and lo != other_lo, "the case would not tell the two rules apart"
    return lo, int(zero_mode)


def block(case: Case, base: int, dtype: DType) -> torch.Tensor:
    """The case's elements, shuffled, with random signs and mantissas: [num_nonzero + zeros]."""
    e = torch.tensor(nonzero_exponents(case, base) + [0] * case.zeros)
    e = e[torch.randperm(e.numel(), generator=torch.Generator().manual_seed(e.numel() + base))]
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    fields = (1 << dtype.exponent_bits) - 1 << dtype.mantissa_bits
    rest = random_bits(e.numel(), base, dtype.torch_dtype).view(bits) & ~fields
    return (rest | (e << dtype.mantissa_bits).to(bits)).view(dtype.torch_dtype)


def tensors(dtype: DType) -> list[torch.Tensor]:
    """Every case: those that fill a block, around one base a tensor, and one of the others as its last block."""
    full = [case for case in CASES if case.num_nonzero + case.zeros == 1024]
    others = [case for case in CASES if case not in full]
    bases = BASES[dtype.name]
    return [torch.cat([block(case, bases[i % len(bases)], dtype) for case in (*full, other)]) for i, other in enumerate(others)]


def mixture(numel: int, seed: int, dtype: torch.dtype, zeros: float = 0.0) -> torch.Tensor:
    """Like gradients: Gaussians whose scale differs from element to element, and from block to block by up to 2, so that mean exponents
    have all fractional parts. About two thirds of the blocks are spread."""
    phase = torch.arange(numel) // 1024 * 0.38 % 1
    x = gaussian(numel, seed, FP32) * torch.exp(0.45 * gaussian(numel, seed + 1, FP32, 1.0)) * torch.exp2(phase)
    kept = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) >= zeros
    return (x * kept).to(dtype)
