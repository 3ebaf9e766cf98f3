"""Packing and unpacking masks in Triton. In between they are words of 32 elements, the lowest bit first; runs are (start, stop), in
elements, of up to 65,536 each. Atomic operations only set or clear bits, so their order does not matter."""
import triton
import triton.language as tl

from ds_scape.kernels.triton_rule import popcount


@triton.jit
def words_of_mask(mask, words, num: tl.int64, num_words: tl.int64, BLOCK: tl.constexpr):
    w = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 32)[None, :]
    at = w[:, None] * 32 + bit
    is_one = tl.load(mask + at, at < num, other=0).to(tl.int32)
    tl.store(words + w, tl.sum(is_one << bit, 1), w < num_words)


@triton.jit
def _ones_between(w, start, stop):
    """uint32, the bits of words ``w`` from element ``start`` to ``stop``."""
    low, high = tl.maximum(start - w * 32, 0), tl.maximum(tl.minimum(stop - w * 32, 32), 0)
    one = tl.full((1,), 1, tl.int64)
    below = tl.where(low < 32, (one << tl.minimum(low, 32)) - 1, 0xFFFFFFFF)
    return (((one << high) - 1) & (0xFFFFFFFF - below)).to(tl.uint32)


@triton.jit
def fill(words, ranges, SET: tl.constexpr, BLOCK: tl.constexpr):
    """Sets or clears the bits of ranges: (start, stop) each. Grid (ranges, any number)."""
    start, stop = tl.load(ranges + 2 * tl.program_id(0)), tl.load(ranges + 2 * tl.program_id(0) + 1)
    end = (stop + 31) >> 5
    for begin in range((start >> 5) + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        w = begin + tl.arange(0, BLOCK)
        bits = _ones_between(w, start, stop)
        if SET:
            tl.atomic_or(words + w, bits.to(tl.int32, bitcast=True), w < end, sem="relaxed")
        else:
            tl.atomic_and(words + w, (bits ^ 0xFFFFFFFF).to(tl.int32, bitcast=True), w < end, sem="relaxed")


@triton.jit
def _run_words(words, w, start, stop):
    """Of a run, 0 outside of it."""
    word = tl.load(words + w, w * 32 < stop, other=0).to(tl.uint32, bitcast=True)
    return word & _ones_between(w, start, stop)


@triton.jit
def count_ones(words, runs, counts, BLOCK: tl.constexpr):
    """A program for each run."""
    run = tl.program_id(0)
    start, stop = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
    ones = tl.zeros((BLOCK,), tl.int32)
    for begin in range(start >> 5, (stop + 31) >> 5, BLOCK):
        ones += popcount(_run_words(words, begin + tl.arange(0, BLOCK), start, stop))
    tl.store(counts + run, tl.sum(ones, 0))


@triton.jit
def sums_before(counts, before, num: tl.int64, room: tl.int64, BLOCK: tl.constexpr):
    """before[i]: the sum of the counts before i, i = 0 .. num; before[num] is -1 where one is negative or the sum above ``room``."""
    total, is_wrong = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    for begin in range(0, num, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        count = tl.load(counts + i, i < num, other=0)
        is_wrong = tl.maximum(is_wrong, tl.max((count < 0).to(tl.int32), 0))
        count = count.to(tl.int64)
        tl.store(before + i, total + tl.cumsum(count, 0) - count, i < num)
        total += tl.sum(count, 0)
    tl.store(before + num, tl.where((is_wrong != 0) | (total > room), -1, total))


@triton.jit
def write_ones(words, runs, bases, before, out, room: tl.int64, WORDS: tl.constexpr):
    """The positions of the ones of each run, counted from its base, from before[run] on in ``out``; at most ``room`` in all. A program for
    each run. Where ``out`` has 16 bits it gets the lowest ones."""
    run = tl.program_id(0)
    start, stop = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
    base, done = tl.load(bases + run), tl.load(before + run)
    for begin in range(start >> 5, (stop + 31) >> 5, WORDS):
        w = begin + tl.arange(0, WORDS)
        word = _run_words(words, w, start, stop)
        ones = popcount(word)
        k = done + tl.cumsum(ones, 0) - ones
        for i in range(0, tl.max(ones, 0)):                 # a word's lowest one at a time
            bit = popcount((word ^ (word - 1)) >> 1)
            tl.store(out + k + i, (w * 32 + bit - base).to(out.dtype.element_ty), (i < ones) & (k + i < room))
            word = word & (word - 1)
        done += tl.sum(ones, 0)


@triton.jit
def words_of_offsets(offsets, before, words, num_blocks: tl.int64, BLOCK: tl.constexpr):
    """Sets the bits of every block's 16-bit offsets in words that are 0, nothing where the counts were wrong. A program for each block."""
    block = tl.program_id(0).to(tl.int64)
    if tl.load(before + num_blocks) >= 0:
        stop = tl.load(before + block + 1)
        for begin in range(tl.load(before + block), stop, BLOCK):
            k = begin + tl.arange(0, BLOCK)
            offset = tl.load(offsets + k, k < stop, other=0).to(tl.int32) & 0xFFFF
            tl.atomic_or(words + block * 2048 + (offset >> 5), tl.full((BLOCK,), 1, tl.int32) << (offset & 31), k < stop, sem="relaxed")
