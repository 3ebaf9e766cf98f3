"""Exactly k per segment in Triton, all segments at once: the steps of csrc/scape/select.cuh.

    sample        counts the first digits of some lines of a search (a segment with a choice to be made), of all of a small one
    set_bracket   the values of the first digit between which the k-th largest key lies, or, by the sample, very likely does
    clear         one pass over everything: chosen above the bracket, not below it, where an approximation of the score tells; a bit each
                  for those where it does not
    unclear       the keys of these: chosen or not, or inside the bracket: their first two digits are counted. All are noted down
    settle_two    the first two digits of the k-th key, if the bracket was right; where not, all of this is done again without sampling
    third         counts the third digit, over what was noted (from here on: triton_select_notes.py)
    equal         equal keys: how many before each tile, where not all of them are taken
    finish        chosen or not, for what was noted

A tile has 512 elements, in 16 words of bits, and notes up to 64 keys. One with more looks at its elements again in the later steps. Atomic
additions only count, so their order does not matter.
"""
import triton
import triton.language as tl

from ds_scape.kernels.triton_rule import age_of, popcount, residual_score, sort_key

TILE, WORDS, NOTES, LINES, BRACKET = (tl.constexpr(i) for i in (512, 16, 64, 16, 128))
#: Bits of a key after the first digit, of 13 bits (16 values an octave); size of a histogram.
LOW, SIZE = tl.constexpr(19), tl.constexpr(8192)
#: Fields of a search that the kernels fill in: the bracket's ends; whether it was wrong; keys above it; digits that are settled, how many
#: keys with them are wanted, and how many are equal to the last one. In the first search: whether any bracket was wrong.
LO, HI, AGAIN, ABOVE, PREFIX, WANTED, EQUAL, ANY_AGAIN = (tl.constexpr(i) for i in range(8))


@triton.jit
def _field(state, s, FIELD: tl.constexpr, is_valid=None):
    return tl.load(state + s * 8 + FIELD, is_valid)


@triton.jit
def third_bits(lo, hi):
    """Of the third digit: 10, more where the bracket has more than 16 values, so that a histogram has room for the first two inside it."""
    return 10 + (hi - lo >= 16).to(tl.int32) + (hi - lo >= 32).to(tl.int32) + (hi - lo >= 64).to(tl.int32)


@triton.jit
def _to_do(state, num_tiles, again):
    """The number of tiles to look through."""
    return tl.where(tl.load(state + ANY_AGAIN, again != 0, other=1) != 0, num_tiles, 0)


@triton.jit
def _tiles(search_of_tile, searches, t, is_valid):
    """Of tiles t: the search; the first element's place, a multiple of four; the search's first element and end; the tile's number."""
    s = tl.load(search_of_tile + t, is_valid, other=0)
    row = searches + s.to(tl.int64) * 10
    start, stop = tl.load(row, is_valid, other=0), tl.load(row + 1, is_valid, other=0)
    number = t - (tl.load(row + 3, is_valid, other=0) & 0xFFFFFFFF).to(tl.int32)
    return s, tl.multiple_of(start + number.to(tl.int64) * TILE, 4), start + (tl.load(row + 4, is_valid, other=0) >> 32), stop, number


@triton.jit
def _load(rank_by, square, last_sync, at, is_valid, HAS_SQUARE: tl.constexpr, ALL: tl.constexpr):
    """What keys are made of. ALL: all of them are valid."""
    r = tl.load(rank_by + at) if ALL else tl.load(rank_by + at, is_valid, other=0)
    last = tl.load(last_sync + at) if ALL else tl.load(last_sync + at, is_valid, other=0)
    if HAS_SQUARE:
        return r, tl.load(square + at) if ALL else tl.load(square + at, is_valid, other=0), last
    else:
        return r, r, last


@triton.jit
def _keys(found, step, max_age, HAS_SQUARE: tl.constexpr):
    r, q, last = found
    return sort_key(residual_score(r, q) if HAS_SQUARE else r, age_of(last, step) >= max_age)


@triton.jit
def count(histogram, digit, is_valid):
    """[rows, n] digits, a histogram for each row. The smallest ones, of zeros most often, are added up before."""
    tl.atomic_add(histogram[:, None] + digit, 1, is_valid & (digit != 0), sem="relaxed")
    num = tl.sum((is_valid & (digit == 0)).to(tl.int32), 1)
    tl.atomic_add(histogram, num, num > 0, sem="relaxed")


@triton.jit
def _stride(searches, s, again, is_valid):
    """Every how many of a tile's lines are sampled: 16, 4 or, where the search is small or is done again, 1."""
    row = searches + s.to(tl.int64) * 10
    size = tl.load(row + 1, is_valid, other=0) - tl.load(row, is_valid, other=0)
    stride = tl.where(tl.load(row + 2, is_valid, other=0) < 4096, 4, 16)
    return tl.where((size < 16384) | again, 1, stride)


@triton.jit
def sample(rank_by, square, last_sync, search_of_tile, searches, state, histograms, num_tiles: tl.int64, step: tl.int32, max_age: tl.int32,
           again: tl.int32, HAS_SQUARE: tl.constexpr, ROWS: tl.constexpr):
    """again: 1 only for searches that have to be done again. A sampled line is another one than in the tile before."""
    for begin in range(tl.program_id(0) * ROWS, _to_do(state, num_tiles, again), tl.num_programs(0) * ROWS):
        t = (begin + tl.arange(0, ROWS)).to(tl.int32)
        is_live = t < num_tiles
        s, place, first, stop, number = _tiles(search_of_tile, searches, t, is_live)
        if again != 0:
            is_live = is_live & (_field(state, s, AGAIN, is_live) != 0)
        stride = _stride(searches, s, again != 0, is_live)
        num_lines = tl.where(is_live, LINES // stride, 0)
        histogram = histograms + s.to(tl.int64) * SIZE
        for j in range(0, tl.max(num_lines, 0)):
            at = place + (j * stride + (number & (stride - 1))) * 32
            at = at[:, None] + tl.arange(0, 32)[None, :]
            is_valid = (j < num_lines)[:, None] & (at >= first[:, None]) & (at < stop[:, None])
            key = _keys(_load(rank_by, square, last_sync, at, is_valid, HAS_SQUARE, False), step, max_age, HAS_SQUARE)
            count(histogram, (key >> LOW).to(tl.int32), is_valid)


@triton.jit
def _from_top(histogram):
    """Counts of a histogram's digits from the largest down, and their sums up to each; the histogram is cleared."""
    at = histogram + (SIZE - 1 - tl.arange(0, SIZE))
    counts = tl.load(at)
    tl.debug_barrier()
    tl.store(at, tl.zeros((SIZE,), tl.int32))
    return counts, tl.cumsum(counts, 0)


@triton.jit
def set_bracket(searches, state, histograms, again: tl.int32):
    """A program for each search."""
    s = tl.program_id(0)
    if (again == 0) | (_field(state, s, AGAIN) != 0):
        _, sums = _from_top(histograms + s.to(tl.int64) * SIZE)
        count, stride = tl.load(searches + s * 10 + 2), _stride(searches, s, again != 0, True)
        # The rank in the sample, give or take what chance makes of it in all but one of some thousand samples.
        share = count.to(tl.float32) / stride
        slack = tl.where(stride > 1, 3.5 * tl.sqrt(share) + 4.0, 0.0)
        low_rank, high_rank = (share + slack).to(tl.int64), (share - slack).to(tl.int64)
        low_rank, high_rank = tl.where(stride > 1, low_rank, count), tl.where(stride > 1, tl.maximum(high_rank, 1), count)
        above_lo, above_hi = tl.sum((sums < low_rank).to(tl.int32), 0), tl.sum((sums < high_rank).to(tl.int32), 0)
        lo, hi = tl.maximum(SIZE - 1 - above_lo, 0), tl.where(above_hi < SIZE, SIZE - 1 - above_hi, SIZE - 1)
        tl.store(state + s * 8 + LO, lo)
        tl.store(state + s * 8 + HI, tl.minimum(hi, lo + BRACKET - 1))                  # found wrong, most likely
        tl.store(state + s * 8 + ABOVE, 0)


@triton.jit
def _start_of(digit):
    """The smallest score with these first digits, overdue or not."""
    return ((digit & 4095) << LOW).to(tl.float32, bitcast=True)


@triton.jit
def _limits(lo, hi):
    """Scores below and above which a key lies outside of the bracket so clearly that an approximation tells: of others, of overdue ones."""
    end, never = hi + 1, float("inf")
    low, high = _start_of(lo), _start_of(end)
    low = tl.where(low < 1e-30, 0.0, tl.where(low > 3e38, 3e38, low) * (1 - 1e-4))
    high = tl.where(high < 1e-30, 1e-30, high) * (1 + 1e-4)                                 # NaN: none is clear
    below, overdue_below = tl.where(lo < 4096, low, never), tl.where(lo < 4096, 0.0, low)
    above = tl.where(end < 4096, high, never)
    return below, above, overdue_below, tl.where(end <= 4096, -1.0, tl.where(end < 8192, high, never))


@triton.jit
def clear(rank_by, square, last_sync, chosen, search_of_tile, searches, state, words, num_tiles: tl.int32, step: tl.int32,
          max_age: tl.int32, again: tl.int32, HAS_SQUARE: tl.constexpr):
    """Tile after tile, by one warp."""
    column = tl.arange(0, TILE)
    for t in range(tl.program_id(0), _to_do(state, num_tiles, again), tl.num_programs(0)):
        s, place, first, stop, _ = _tiles(search_of_tile, searches, t, True)
        if (again == 0) | (_field(state, s, AGAIN) != 0):
            below, above, overdue_below, overdue_above = _limits(_field(state, s, LO), _field(state, s, HI))
            start, end = tl.maximum(first - place, 0).to(tl.int32), tl.minimum(stop - place, TILE).to(tl.int32)
            is_valid = (column >= start) & (column < end)
            is_whole = end - start == TILE
            if is_whole:
                r, q, last = _load(rank_by + place, square + place, last_sync + place, column, is_valid, HAS_SQUARE, True)
            else:
                r, q, last = _load(rank_by + place, square + place, last_sync + place, column, is_valid, HAS_SQUARE, False)
            score = tl.abs(r)
            if HAS_SQUARE:
                score = score / (tl.sqrt(q) + 1e-9)
            is_overdue = age_of(last, step) >= max_age
            is_above = score > tl.where(is_overdue, overdue_above, above)
            is_below = score < tl.where(is_overdue, overdue_below, below)
            if is_whole:
                tl.store(chosen + place + column, is_above.to(tl.uint8))
            else:
                tl.store(chosen + place + column, is_above.to(tl.uint8), is_valid)
            is_unclear = is_valid & ((is_above | is_below) == 0)
            bits = tl.reshape(is_unclear.to(tl.int32), (WORDS, 32)) << tl.arange(0, 32)[None, :]
            tl.store(words + tl.full((), t, tl.int64) * WORDS + tl.arange(0, WORDS), tl.sum(bits, 1))
            tl.atomic_add(state + s * 8 + ABOVE, tl.sum((is_valid & is_above).to(tl.int32), 0), sem="relaxed")


@triton.jit
def words_of_tiles(words, t, is_live):
    """[tiles, WORDS], uint32; how many ones each has; how many lie before each in its tile."""
    word = tl.load(words + t.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :], is_live[:, None], other=0)
    word = word.to(tl.uint32, bitcast=True)
    ones = popcount(word)
    return word, ones, tl.cumsum(ones, 1) - ones


@triton.jit
def lowest(word):
    """The place of the lowest one of each word."""
    return tl.arange(0, WORDS)[None, :] * 32 + popcount((word ^ (word - 1)) >> 1)


@triton.jit
def unclear(rank_by, square, last_sync, chosen, search_of_tile, searches, state, histograms, words, notes, num_notes, num_tiles: tl.int32,
            step: tl.int32, max_age: tl.int32, again: tl.int32, HAS_SQUARE: tl.constexpr, ROWS: tl.constexpr):
    for begin in range(tl.program_id(0) * ROWS, _to_do(state, num_tiles, again), tl.num_programs(0) * ROWS):
        t = begin + tl.arange(0, ROWS)
        is_live = t < num_tiles
        s, place, _, _, _ = _tiles(search_of_tile, searches, t, is_live)
        if again != 0:
            is_live = is_live & (_field(state, s, AGAIN, is_live) != 0)
        lo, hi = _field(state, s, LO, is_live)[:, None], _field(state, s, HI, is_live)[:, None]
        third = third_bits(lo, hi).to(tl.uint32)
        least = lo.to(tl.uint32) << LOW                     # key of the bracket
        word, ones, before = words_of_tiles(words, t, is_live)
        tl.store(num_notes + t, tl.sum(ones, 1), is_live)
        note_at = notes + t.to(tl.int64)[:, None] * NOTES + before
        histogram = histograms + s.to(tl.int64) * SIZE
        num_above, num_least = tl.zeros((ROWS, WORDS), tl.int32), tl.zeros((ROWS, WORDS), tl.int32)
        for i in range(0, tl.max(ones)):
            is_valid = i < ones
            at = place[:, None] + lowest(word)
            key = _keys(_load(rank_by, square, last_sync, at, is_valid, HAS_SQUARE, False), step, max_age, HAS_SQUARE)
            digit = (key >> LOW).to(tl.int32)
            is_above = is_valid & (digit > hi)
            tl.store(chosen + at, tl.full((ROWS, WORDS), 1, tl.uint8), is_above)
            num_above += is_above.to(tl.int32)
            two = ((key - least) >> third).to(tl.int32)
            is_inside = is_valid & (digit >= lo) & (digit <= hi)
            num_least += (is_inside & (two == 0)).to(tl.int32)                              # zeros, most often
            tl.atomic_add(histogram[:, None] + two, 1, is_inside & (two != 0), sem="relaxed")
            tl.store(note_at + i, key.to(tl.int32, bitcast=True), is_valid & (before + i < NOTES))
            word = word & (word - 1)
        tl.atomic_add(state + s * 8 + ABOVE, tl.sum(num_above, 1), is_live, sem="relaxed")
        num = tl.sum(num_least, 1)
        tl.atomic_add(histogram, num, num > 0, sem="relaxed")


@triton.jit
def settle_two(searches, state, histograms, again: tl.int32):
    """The first two digits, from the counts inside the bracket. A program for each search."""
    s = tl.program_id(0)
    if (again == 0) | (_field(state, s, AGAIN) != 0):
        counts, sums = _from_top(histograms + s.to(tl.int64) * SIZE)
        wanted = (tl.load(searches + s * 10 + 2) - _field(state, s, ABOVE)).to(tl.int32)
        number = tl.sum((sums < wanted).to(tl.int32), 0)
        digit = SIZE - 1 - number
        above = tl.sum(tl.where(tl.arange(0, SIZE) < number, counts, 0), 0)
        is_wrong = ((wanted <= 0) | (number == SIZE)).to(tl.int32)
        tl.store(state + s * 8 + AGAIN, is_wrong)
        tl.atomic_or(state + ANY_AGAIN, is_wrong, sem="relaxed")
        lo, hi = _field(state, s, LO), _field(state, s, HI)
        third = third_bits(lo, hi)
        tl.store(state + s * 8 + PREFIX, (lo << LOW) + (digit << third))
        tl.store(state + s * 8 + WANTED, wanted - above)


@triton.jit
def settle_three(state, histograms):
    """The third digit. A program for each search."""
    s = tl.program_id(0)
    counts, sums = _from_top(histograms + s.to(tl.int64) * SIZE)
    wanted = _field(state, s, WANTED)
    number = tl.sum((sums < wanted).to(tl.int32), 0)
    order = tl.arange(0, SIZE)
    tl.store(state + s * 8 + PREFIX, _field(state, s, PREFIX) | (SIZE - 1 - number))
    tl.store(state + s * 8 + WANTED, wanted - tl.sum(tl.where(order < number, counts, 0), 0))
    tl.store(state + s * 8 + EQUAL, tl.sum(tl.where(order == number, counts, 0), 0))
