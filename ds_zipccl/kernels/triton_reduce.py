"""Decode with a sum over rows, in Triton: a program takes L // 32 blocks of one tile of every row. Sums of two rows have a kernel of their
own, which holds no sums but adds the own row to each quarter that is decoded: it is decode but for that, and nearly as fast.
"""
import triton
import triton.language as tl

from ds_zipccl.kernels import triton_block as blk
from ds_zipccl.kernels import triton_level2_decode as streams
from ds_zipccl.kernels.triton_block import GROUP_TILES, TILE_ELEMS
from ds_zipccl.kernels.triton_decode import any_block_state, block_start, check_header, decode_quarter, find_tile, load_heads, load_stored
from ds_zipccl.kernels.triton_launch import kernel
from ds_zipccl.kernels.triton_words import begin_in_turn, here, round_halves


@triton.jit
def floats_of(low, high, DT: tl.constexpr):
    """The numbers of a pair."""
    if DT == 1:
        return (low << 16).to(tl.float32, bitcast=True), (low & 0xFFFF0000).to(tl.float32, bitcast=True)
    elif DT == 2:
        return (low & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32), \
            (low >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def add_quarter(sums, x, DT: tl.constexpr):
    """Adds a quarter's 8 numbers to sums."""
    l0, h0, l1, h1, l2, h2, l3, h3 = x
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    v0, v1 = floats_of(l0, h0, DT)
    v2, v3 = floats_of(l1, h1, DT)
    v4, v5 = floats_of(l2, h2, DT)
    v6, v7 = floats_of(l3, h3, DT)
    return s0 + v0, s1 + v1, s2 + v2, s3 + v3, s4 + v4, s5 + v5, s6 + v6, s7 + v7


@triton.jit
def decode_and_add2(sums, stored, state, places, unusual):
    x, state = streams.decode_quarter(stored[0], state, places, unusual, 0)
    a = add_quarter(sums[0], x, 1)
    x, state = streams.decode_quarter(stored[1], state, places, unusual, 1)
    b = add_quarter(sums[1], x, 1)
    x, state = streams.decode_quarter(stored[2], state, places, unusual, 2)
    c = add_quarter(sums[2], x, 1)
    x, state = streams.decode_quarter(stored[3], state, places, unusual, 3)
    return a, b, c, add_quarter(sums[3], x, 1)


@triton.jit
def decode_and_add(sums, loaded, state, places, unusual, DT: tl.constexpr):
    """Adds a row's four quarters to the four quarters' sums."""
    codes, tops, stored = loaded
    q0, q1 = state[4]
    x, q0, q1 = decode_quarter(stored[0], codes, tops, state, places, q0, q1, unusual, 0, DT)
    a = add_quarter(sums[0], x, DT)
    x, q0, q1 = decode_quarter(stored[1], codes, tops, state, places, q0, q1, unusual, 1, DT)
    b = add_quarter(sums[1], x, DT)
    x, q0, q1 = decode_quarter(stored[2], codes, tops, state, places, q0, q1, unusual, 2, DT)
    c = add_quarter(sums[2], x, DT)
    x, q0, q1 = decode_quarter(stored[3], codes, tops, state, places, q0, q1, unusual, 3, DT)
    return a, b, c, add_quarter(sums[3], x, DT)


@triton.jit
def add_raw(sums, source, block, lane, tile_elems, wide, r, L: tl.constexpr, DT: tl.constexpr):
    """The same of row r, of raw data."""
    a, b, c, d = sums
    if wide:
        a = add_quarter(a, blk.load_quarter(source, block, lane, tile_elems, True, 0, L, DT), DT)
        b = add_quarter(b, blk.load_quarter(source, block, lane, tile_elems, True, 1, L, DT), DT)
        c = add_quarter(c, blk.load_quarter(source, block, lane, tile_elems, True, 2, L, DT), DT)
        d = add_quarter(d, blk.load_quarter(source, block, lane, tile_elems, True, 3, L, DT), DT)
    else:                                                # barriers: else all elements are loaded at once, into as many registers
        lane, tile_elems = here(lane, r), here(tile_elems, r)
        a = add_quarter(a, blk.load_quarter(source, block, lane, tile_elems, False, 0, L, DT), DT)
        tl.debug_barrier()
        b = add_quarter(b, blk.load_quarter(source, block, lane, tile_elems, False, 1, L, DT), DT)
        tl.debug_barrier()
        c = add_quarter(c, blk.load_quarter(source, block, lane, tile_elems, False, 2, L, DT), DT)
        tl.debug_barrier()
        d = add_quarter(d, blk.load_quarter(source, block, lane, tile_elems, False, 3, L, DT), DT)
    return a, b, c, d


@triton.jit
def rounded_pair(a, b, DT: tl.constexpr):
    """Words (low, high) of two sums, rounded once to nearest even; NaNs become the canonical one."""
    if DT == 3:
        low, high = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
        return tl.where(a != a, 0x7FC00000, low), tl.where(b != b, 0x7FC00000, high)
    else:
        word = round_halves(a, b, DT)
        return word, word


@triton.jit
def rounded_quarter(sums, DT: tl.constexpr):
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    l0, h0 = rounded_pair(s0, s1, DT)
    l1, h1 = rounded_pair(s2, s3, DT)
    l2, h2 = rounded_pair(s4, s5, DT)
    l3, h3 = rounded_pair(s6, s7, DT)
    return l0, h0, l1, h1, l2, h2, l3, h3


@triton.jit
def row_after(row, own_index, num_rows):
    """The next row after ``row`` that is not the own one; behind the last one there is nothing to decode, but memory."""
    return tl.minimum(tl.where(row + 1 == own_index, row + 2, row + 1), num_rows - 1)


@kernel
def decode_reduce(frames, own, out, errors_at, frame_stride: tl.int64, own_index: tl.int32, num_rows: tl.int32, numel: tl.int64,
                  num_tiles: tl.int32, tiles_offset: tl.int32, tile_bytes: tl.int32, last_blocks: tl.int32, escapes_offset: tl.int32,
                  capacity: tl.int32, codes_offset: tl.int32, extra_offset: tl.int32, planes_offset: tl.int32,
                  last_escapes_offset: tl.int32, last_capacity: tl.int32, last_codes_offset: tl.int32, last_extra_offset: tl.int32,
                  last_planes_offset: tl.int32, pools_offset: tl.int64, pool_bytes: tl.int32, last_pool_bytes: tl.int32, h0: tl.int32,
                  h1: tl.int32, h2: tl.int32, h3: tl.int32, h4: tl.int32, aligned: tl.int32, L: tl.constexpr, DT: tl.constexpr,
                  LEVEL: tl.constexpr):
    """Grid (tiles * 32 / (L / 32)). aligned: own and out start on 16-byte addresses."""
    begin_in_turn()
    per_tile: tl.constexpr = 1024 // L
    t, part = tl.program_id(0) // per_tile, tl.program_id(0) % per_tile
    last = t == num_tiles - 1
    num_blocks = tl.where(last, last_blocks, 32)
    if part * (L // 32) < num_blocks:
        escapes_offset = tl.multiple_of(tl.where(last, last_escapes_offset, escapes_offset), 4)
        capacity = tl.where(last, last_capacity, capacity)
        room = tl.where(t // GROUP_TILES == (num_tiles - 1) // GROUP_TILES, last_pool_bytes, pool_bytes)
        sections = (tl.multiple_of(tl.where(last, last_codes_offset, codes_offset), 128),
                    tl.multiple_of(tl.where(last, last_extra_offset, extra_offset), 128),
                    tl.multiple_of(tl.where(last, last_planes_offset, planes_offset), 128))
        lanes = tl.arange(0, L)
        block, lane = part * (L // 32) + lanes // 32, lanes % 32
        tile_elems = tl.minimum(numel - t.to(tl.int64) * TILE_ELEMS, TILE_ELEMS).to(tl.int32)
        wide = (aligned != 0) & (tile_elems >= (part + 1) * (32 * L))
        source = tl.multiple_of(own + t.to(tl.int64) * TILE_ELEMS, 16)
        target = tl.multiple_of(out + t.to(tl.int64) * TILE_ELEMS, 16)
        tile_0 = tl.multiple_of(frames + (tiles_offset + t.to(tl.int64) * tile_bytes), 16)
        # -0 + x is x, for every x. By its bits: tl.full takes -0.0 for 0 and fills with +0.
        zero = tl.full((L,), 0x80000000, tl.uint32).to(tl.float32, bitcast=True)
        zeros = (zero, zero, zero, zero, zero, zero, zero, zero)
        sums = (zeros, zeros, zeros, zeros)
        # A row's words, and escapes, are loaded while the row before it is decoded, its tile's headers one row earlier.
        position = (num_blocks, block, lane, (part + 1) * (L // 32) >= num_blocks)
        following = tl.where(own_index == 0, tl.minimum(1, num_rows - 1), 0)
        tile = tl.multiple_of(tile_0 + following.to(tl.int64) * frame_stride, 16)
        heads, num = load_heads(tile, num_blocks, lane)
        loaded = load_stored(tile, sections, num_blocks, block, lane, L, DT, LEVEL)
        start = block_start(heads, tl.multiple_of(tile + escapes_offset, 4), capacity, block, lane, L)
        following = row_after(following, own_index, num_rows)
        heads, next_num = load_heads(tl.multiple_of(tile_0 + following.to(tl.int64) * frame_stride, 16), num_blocks, lane)
        for r in range(num_rows):
            if r == own_index:
                sums = add_raw(sums, source, block, lane, tile_elems, wide, r, L, DT)
            else:
                distance = tl.cast(r, tl.int64) * frame_stride
                if tl.program_id(0) == 0:
                    check_header(frames + distance, h0, h1, h2, h3, h4, errors_at, DT, LEVEL)
                tile = tl.multiple_of(tile_0 + distance, 16)
                pool = frames + distance + (pools_offset + (t // GROUP_TILES).to(tl.int64) * pool_bytes)
                places = (tl.multiple_of(tile + escapes_offset, 4), capacity, pool, room)
                now, now_start, now_num, num = loaded, start, num, next_num
                following = row_after(r, own_index, num_rows)
                next_tile = tl.multiple_of(tile_0 + following.to(tl.int64) * frame_stride, 16)
                start = block_start(heads, tl.multiple_of(next_tile + escapes_offset, 4), capacity, block, lane, L)
                loaded = load_stored(next_tile, sections, num_blocks, block, lane, L, DT, LEVEL)
                following = row_after(following, own_index, num_rows)
                heads, next_num = load_heads(tl.multiple_of(tile_0 + following.to(tl.int64) * frame_stride, 16), num_blocks, lane)
                state, unusual, places = any_block_state(tile, now_num, now_start, places, now[0], position, errors_at, L, DT, LEVEL)
                if LEVEL == 2:
                    sums = decode_and_add2(sums, now[2], state, places, unusual)
                else:
                    sums = decode_and_add(sums, now, state, places, unusual, DT)
        for j in tl.static_range(4):
            blk.store_quarter(target, block, lane, tile_elems, wide, rounded_quarter(sums[j], DT), j, L, DT)


@triton.jit
def sum_of_two(x, y, DT: tl.constexpr):
    """Words of x + y, quarters both."""
    v0, v1 = floats_of(x[0], x[1], DT)
    v2, v3 = floats_of(x[2], x[3], DT)
    v4, v5 = floats_of(x[4], x[5], DT)
    v6, v7 = floats_of(x[6], x[7], DT)
    return rounded_quarter(add_quarter((v0, v1, v2, v3, v4, v5, v6, v7), y, DT), DT)


@triton.jit
def decode_and_add_own(source, target, tile_elems, wide, loaded, state, places, block, lane, UNUSUAL: tl.constexpr, L: tl.constexpr,
                       DT: tl.constexpr, LEVEL: tl.constexpr):
    codes, tops, stored = loaded
    owns = ()
    if not UNUSUAL:                                        # all of them before the first store, which may be to the same place
        for j in tl.static_range(4):
            owns = owns + (blk.load_quarter(source, block, lane, tile_elems, wide, j, L, DT),)
    if LEVEL == 1:
        q0, q1 = state[4]
    for j in tl.static_range(4):
        own = blk.load_quarter(source, block, lane, tile_elems, wide, j, L, DT) if UNUSUAL else owns[j]
        if LEVEL == 2:
            x, state = streams.decode_quarter(stored[j], state, places, UNUSUAL, j)
        else:
            x, q0, q1 = decode_quarter(stored[j], codes, tops, state, places, q0, q1, UNUSUAL, j, DT)
        blk.store_quarter(target, block, lane, tile_elems, wide, sum_of_two(own, x, DT), j, L, DT)


@kernel
def decode_reduce2(frames, own, out, errors_at, frame_stride: tl.int64, own_index: tl.int32, num_rows: tl.int32, numel: tl.int64,
                   num_tiles: tl.int32, tiles_offset: tl.int32, tile_bytes: tl.int32, last_blocks: tl.int32, escapes_offset: tl.int32,
                   capacity: tl.int32, codes_offset: tl.int32, extra_offset: tl.int32, planes_offset: tl.int32,
                   last_escapes_offset: tl.int32, last_capacity: tl.int32, last_codes_offset: tl.int32, last_extra_offset: tl.int32,
                   last_planes_offset: tl.int32, pools_offset: tl.int64, pool_bytes: tl.int32, last_pool_bytes: tl.int32, h0: tl.int32,
                   h1: tl.int32, h2: tl.int32, h3: tl.int32, h4: tl.int32, aligned: tl.int32, L: tl.constexpr, DT: tl.constexpr,
                   LEVEL: tl.constexpr):
    """decode_reduce of two rows."""
    begin_in_turn()
    per_tile: tl.constexpr = 1024 // L
    t, part = tl.program_id(0) // per_tile, tl.program_id(0) % per_tile
    frame = tl.multiple_of(frames + (1 - own_index).to(tl.int64) * frame_stride, 16)
    if tl.program_id(0) == 0:
        check_header(frame, h0, h1, h2, h3, h4, errors_at, DT, LEVEL)
    layout = (tiles_offset, tile_bytes, last_blocks, escapes_offset, capacity, codes_offset, extra_offset, planes_offset,
              last_escapes_offset, last_capacity, last_codes_offset, last_extra_offset, last_planes_offset, pools_offset, pool_bytes,
              last_pool_bytes)
    tile, num_blocks, parts, sections = find_tile(frame, t, num_tiles, layout)
    if part * (L // 32) < num_blocks:
        lanes = tl.arange(0, L)
        block, lane = part * (L // 32) + lanes // 32, lanes % 32
        position = (num_blocks, block, lane, (part + 1) * (L // 32) >= num_blocks)
        heads, num = load_heads(tile, num_blocks, lane)
        loaded = load_stored(tile, sections, num_blocks, block, lane, L, DT, LEVEL)
        start = block_start(heads, parts[0], parts[1], block, lane, L)
        state, unusual, places = any_block_state(tile, num, start, parts, loaded[0], position, errors_at, L, DT, LEVEL)
        tile_elems = tl.minimum(numel - t.to(tl.int64) * TILE_ELEMS, TILE_ELEMS).to(tl.int32)
        wide = (aligned != 0) & (tile_elems >= (part + 1) * (32 * L))
        source = tl.multiple_of(own + t.to(tl.int64) * TILE_ELEMS, 16)
        target = tl.multiple_of(out + t.to(tl.int64) * TILE_ELEMS, 16)
        if unusual | (wide == 0):
            decode_and_add_own(source, target, tile_elems, wide, loaded, state, places, block, lane, True, L, DT, LEVEL)
        else:
            decode_and_add_own(source, target, tile_elems, True, loaded, state, places, block, lane, False, L, DT, LEVEL)
