"""The sum of squares in double precision in Triton, in the order that ops.py says."""
import triton
import triton.language as tl

from ds_scape.kernels.triton_rule import widened

#: Lanes that one thread adds up into one; lanes of the last kernel.
HALVED, LAST = tl.constexpr(16), tl.constexpr(2048)


@triton.jit
def lane_sums(x, sums, num: tl.int64, lanes: tl.int64, BLOCK: tl.constexpr):
    """Eight elements of a lane are on the way at a time. (A square of floats is exact in a double.)"""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_lane = lane < lanes
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num, 8 * lanes):
        for row in tl.static_range(8):
            at = start + row * lanes + lane
            value = widened(tl.load(x + at, is_lane & (at < num), other=0)).to(tl.float64)
            total += value * value
    tl.store(sums + lane, total, is_lane)


@triton.jit
def _every_fourth(sums, k, lanes, is_valid, FIRST: tl.constexpr):
    a, b = tl.load(sums + k + FIRST * lanes, is_valid), tl.load(sums + k + (FIRST + 8) * lanes, is_valid)
    c, d = tl.load(sums + k + (FIRST + 4) * lanes, is_valid), tl.load(sums + k + (FIRST + 12) * lanes, is_valid)
    return (a + b) + (c + d)


@triton.jit
def halve(sums, lanes: tl.int64, BLOCK: tl.constexpr):
    """``lanes`` lanes from 16 times as many: the upper half to the lower one, four times. In place: a program reads what it alone writes,
    and what nobody writes."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = k < lanes
    even = _every_fourth(sums, k, lanes, is_valid, 0) + _every_fourth(sums, k, lanes, is_valid, 2)
    odd = _every_fourth(sums, k, lanes, is_valid, 1) + _every_fourth(sums, k, lanes, is_valid, 3)
    tl.store(sums + k, even + odd, is_valid)


@triton.jit
def last_halves(sums, result, lanes: tl.int32):
    """One lane from up to LAST; those that there are not count as 0."""
    lane = tl.arange(0, LAST)
    x = tl.load(sums + lane, lane < lanes, other=0)
    for half in tl.static_range(10, -1, -1):
        x = tl.sum(tl.reshape(x, (2, 1 << half)), 0)
    tl.store(result + tl.arange(0, 1), x)
