"""What a worker does with its residual, one coordinate after another and everything in one pass, in Triton."""
import triton
import triton.language as tl

from ds_scape.kernels.triton_rule import age_of, position_at, rounded, sort_key, tracked_square, widened


@triton.jit
def tile_starts(index, starts, num: tl.int64, num_tiles: tl.int64, first: tl.int64, LOG_TILE: tl.constexpr, BLOCK: tl.constexpr):
    """starts[t], t = 0 .. num_tiles: how many positions lie before tile t, written by those that are the first in or after it."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = k < num
    own = (position_at(index, k, is_valid) - first) >> LOG_TILE
    before = (position_at(index, k - 1, is_valid & (k > 0)) - first) >> LOG_TILE
    before = tl.where(k > 0, before, -1)
    begun = tl.where(is_valid, own - before, 0)
    for i in range(0, tl.max(begun, 0)):
        tl.store(starts + before + 1 + i, k, i < begun)
    ended = tl.where(k == num - 1, num_tiles - own, 0)
    for i in range(0, tl.max(ended, 0)):
        tl.store(starts + own + 1 + i, k + 1, i < ended)


@triton.jit
def enter(residual, gradient, square, values, index, starts, num: tl.int64, own_start: tl.int64, own_num: tl.int64, first: tl.int64,
          factor: tl.float32, beta2: tl.float32, rest2: tl.float32, HAS_GRADIENT: tl.constexpr, HAS_SQUARE: tl.constexpr,
          TAKE: tl.constexpr, LOG_TILE: tl.constexpr, CHUNK: tl.constexpr):
    """TAKE: 0 nothing, 1 everything, 2 what lies at ``index``; those of a tile go through the cache, where the tile just was."""
    t = tl.program_id(0).to(tl.int64)
    at = (t << LOG_TILE) + tl.arange(0, 1 << LOG_TILE)
    is_valid = at < num
    if TAKE == 2:                                           # asked for before what takes longer
        begin, stop = tl.load(starts + t), tl.load(starts + t + 1)
    r = tl.load(residual + at, is_valid, other=0)
    if HAS_GRADIENT:
        g = widened(tl.load(gradient + at, is_valid, other=0)) * factor
        r = r + g
        if HAS_SQUARE:
            own = at - own_start
            is_own = is_valid & (own >= 0) & (own < own_num)
            tl.store(square + own, tracked_square(tl.load(square + own, is_own, other=0), g, beta2, rest2), is_own)
    if TAKE == 1:
        sent = rounded(r, values)
        tl.store(values + at, sent, is_valid)
        r = r - widened(sent)
    tl.store(residual + at, r, is_valid)
    if TAKE == 2:
        tl.debug_barrier()                                  # what one thread wrote another one reads
        for next in range(begin, stop, CHUNK):
            k = next + tl.arange(0, CHUNK)
            _take(residual, values, index, k, k < stop, first)


@triton.jit
def _take(residual, values, index, k, is_valid, first):
    place = residual + (position_at(index, k, is_valid) - first)
    r = tl.load(place, is_valid, other=0)
    sent = rounded(r, values)
    tl.store(values + k, sent, is_valid)
    tl.store(place, r - widened(sent), is_valid)


@triton.jit
def take(residual, values, index, num: tl.int64, first: tl.int64, BLOCK: tl.constexpr):
    """Nothing enters: only what is taken is touched."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _take(residual, values, index, k, k < num, first)


@triton.jit
def track_square(square, gradient, num: tl.int64, factor: tl.float32, beta2: tl.float32, rest2: tl.float32, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = at < num
    g = widened(tl.load(gradient + at, is_valid, other=0)) * factor
    tl.store(square + at, tracked_square(tl.load(square + at, is_valid, other=0), g, beta2, rest2), is_valid)


@triton.jit
def scatter(target, values, index, num: tl.int64, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = k < num
    tl.store(target + position_at(index, k, is_valid), tl.load(values + k, is_valid, other=0), is_valid)


@triton.jit
def take_ages(last_sync, out, index, num: tl.int64, first: tl.int64, step: tl.int32, HAS_INDEX: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = k < num
    at = position_at(index, k, is_valid) - first if HAS_INDEX else k
    tl.store(out + k, tl.load(last_sync + at, is_valid, other=0), is_valid)
    tl.store(last_sync + at, tl.full((BLOCK,), step, tl.int32).to(last_sync.dtype.element_ty), is_valid)


@triton.jit
def mark_overdue(rank_by, last_sync, num: tl.int64, step: tl.int32, max_age: tl.int32, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = at < num
    is_overdue = age_of(tl.load(last_sync + at, is_valid, other=0), step) >= max_age
    key = sort_key(tl.load(rank_by + at, is_valid, other=0), is_overdue)
    tl.store(rank_by + at, key.to(tl.float32, bitcast=True), is_valid)
