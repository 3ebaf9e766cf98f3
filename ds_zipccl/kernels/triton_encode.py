"""Encode in Triton, one launch: a program a tile, and behind them one for each group of tiles, which ends its sub-pool; a row's last one
also writes the header, the last of all the status.

Nothing is decided by the order of execution: escapes are placed by sums of counts, inside a tile those in its block headers, between tiles
(only where a tile spills) those that the group's earlier tiles tell. Programs tell each other numbers as csrc/zipccl/encode.cuh does: in
``words`` [1 + rows * (tiles + groups)], int64, zeroed once, each with the call's tag: one more than the last call's, which is the first
word. A program waits for programs before it alone, which have started by then. At level 2 (triton_level2.py) bytes of streams take the
place of escapes.
"""
import triton
import triton.language as tl

from ds_zipccl.kernels import triton_block as blk
from ds_zipccl.kernels import triton_level2 as level2
from ds_zipccl.kernels.triton_block import GROUP_TILES, TILE_ELEMS, u32_at
from ds_zipccl.kernels.triton_finish import end_group, receive, send, spill_of, words_of_row
from ds_zipccl.kernels.triton_launch import kernel
from ds_zipccl.kernels.triton_words import ask_l2, begin_in_turn, byte_perm_if, popcount

FIRST_PROGRAMS = tl.constexpr(264)             # of 16 warps, that start at once on an H200


@triton.jit
def push_escapes(q0, q1, mask, e, P: tl.constexpr, DT: tl.constexpr):
    """Puts the exponents of pair P, where they are escapes, before those in the bytes of q0 (half 0) and q1; the last bytes are lost."""
    y = blk.shift_left(e, 8 - blk.at(DT))                  # in bytes 1 and 3
    return byte_perm_if(mask, P, q0, y, 0x2105), byte_perm_if(mask, P + 16, q1, y, 0x2107)


@triton.jit
def code_quarter(words, x, minus_lo, limit, zero_mode, J: tl.constexpr, ZEROS: tl.constexpr, DT: tl.constexpr):
    l0, h0, l1, h1, l2, h2, l3, h3 = x
    c0 = blk.code(blk.exponents(l0, h0, DT), minus_lo, limit, zero_mode, ZEROS, DT)
    c1 = blk.code(blk.exponents(l1, h1, DT), minus_lo, limit, zero_mode, ZEROS, DT)
    c2 = blk.code(blk.exponents(l2, h2, DT), minus_lo, limit, zero_mode, ZEROS, DT)
    c3 = blk.code(blk.exponents(l3, h3, DT), minus_lo, limit, zero_mode, ZEROS, DT)
    words = blk.put_code(words, c0, 4 * J, blk.at(DT))
    words = blk.put_code(words, c1, 4 * J + 1, blk.at(DT))
    words = blk.put_code(words, c2, 4 * J + 2, blk.at(DT))
    return blk.put_code(words, c3, 4 * J + 3, blk.at(DT))


@triton.jit
def code_all(x, minus_lo, limit, zero_mode, ZEROS: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """The three words of codes of each lane."""
    nothing = tl.zeros((L,), tl.uint32)
    words = code_quarter((nothing, nothing, nothing), x[0], minus_lo, limit, zero_mode, 0, ZEROS, DT)
    words = code_quarter(words, x[1], minus_lo, limit, zero_mode, 1, ZEROS, DT)
    words = code_quarter(words, x[2], minus_lo, limit, zero_mode, 2, ZEROS, DT)
    return code_quarter(words, x[3], minus_lo, limit, zero_mode, 3, ZEROS, DT)


@triton.jit
def put_tops(words, x, J: tl.constexpr):
    """FP16: the quarter's remainder bits 8 to 10."""
    words = blk.put_code(words, blk.remainder_top(x[0]), 4 * J, 0)
    words = blk.put_code(words, blk.remainder_top(x[2]), 4 * J + 1, 0)
    words = blk.put_code(words, blk.remainder_top(x[4]), 4 * J + 2, 0)
    return blk.put_code(words, blk.remainder_top(x[6]), 4 * J + 3, 0)


@triton.jit
def push_quarter(q0, q1, mask, x, J: tl.constexpr, DT: tl.constexpr):
    l0, h0, l1, h1, l2, h2, l3, h3 = x
    q0, q1 = push_escapes(q0, q1, mask, blk.exponents(l3, h3, DT), 4 * J + 3, DT)
    q0, q1 = push_escapes(q0, q1, mask, blk.exponents(l2, h2, DT), 4 * J + 2, DT)
    q0, q1 = push_escapes(q0, q1, mask, blk.exponents(l1, h1, DT), 4 * J + 1, DT)
    return push_escapes(q0, q1, mask, blk.exponents(l0, h0, DT), 4 * J, DT)


@triton.jit
def load_chunk(row, chunk, tile_elems, aligned, L: tl.constexpr, DT: tl.constexpr):
    """Raw data of L // 32 blocks: four quarters of load_quarter's words."""
    lanes = tl.arange(0, L)
    block, lane = chunk * (L // 32) + lanes // 32, lanes % 32
    wide = aligned & (tile_elems >= (chunk + 1) * (32 * L))
    a = blk.load_quarter(row, block, lane, tile_elems, wide, 0, L, DT)
    b = blk.load_quarter(row, block, lane, tile_elems, wide, 1, L, DT)
    c = blk.load_quarter(row, block, lane, tile_elems, wide, 2, L, DT)
    d = blk.load_quarter(row, block, lane, tile_elems, wide, 3, L, DT)
    return a, b, c, d


@triton.jit
def encode_chunk(tile, x, chunk, tile_elems, num_blocks, codes_offset, extra_offset, planes_offset, given_lo, L: tl.constexpr,
                 DT: tl.constexpr):
    """Codes L // 32 blocks, but for their escapes. Returns of each lane: its escapes' first four exponents of each half, one a byte (two
    words), and the numbers of its escapes of both halves and of those before it in its block."""
    a, b, c, d = x
    blocks: tl.constexpr = L // 32
    lanes = tl.arange(0, L)
    own_block = chunk * blocks + tl.arange(0, blocks)
    block, lane = chunk * blocks + lanes // 32, lanes % 32
    nothing = tl.zeros((L,), tl.uint32)
    exists = block < num_blocks

    totals = blk.quarter_statistics((nothing, nothing, nothing), a, DT)
    totals = blk.quarter_statistics(totals, b, DT)
    totals = blk.quarter_statistics(totals, c, DT)
    totals = blk.quarter_statistics(totals, d, DT)
    block_present = tl.minimum(tl.maximum(tile_elems - own_block * 1024, 0), 1024)
    block_lo, block_mode = blk.choose_window(totals, block_present, given_lo, L, DT)
    any_zero_mode = tl.max(block_mode, 0) > 0
    lo, mode = blk.of_lanes(block_lo, L).to(tl.uint32), blk.of_lanes(block_mode, L).to(tl.uint32)
    if tile_elems < (chunk + 1) * (32 * L):
        filler = (lo + 1) << (23 if DT == 3 else blk.at(DT))
        a = blk.fill_quarter(a, block, lane, tile_elems, filler, 0, DT)
        b = blk.fill_quarter(b, block, lane, tile_elems, filler, 1, DT)
        c = blk.fill_quarter(c, block, lane, tile_elems, filler, 2, DT)
        d = blk.fill_quarter(d, block, lane, tile_elems, filler, 3, DT)
    x = (a, b, c, d)

    minus_lo = ((0 - (lo << blk.at(DT))) & 0xFFFF) * 0x10001
    limit = (8 - mode) * ((1 << blk.at(DT)) * 0x10001)
    zero_mode = 0 - mode
    if any_zero_mode:
        words = code_all(x, minus_lo, limit, zero_mode, True, L, DT)
    else:
        words = code_all(x, minus_lo, limit, zero_mode, False, L, DT)
    blk.store_words(u32_at(tile, codes_offset), block, lane, exists, words)
    mask = blk.escape_mask(words)
    before, block_count = blk.count_before(mask, L)
    head = lo | mode << 8 | blk.of_lanes(block_count, L).to(tl.uint32) << 16
    tl.store(u32_at(tile, 16) + block, head, mask=exists & (lane == 0))

    planes = u32_at(tile, planes_offset)
    blk.store_remainders(planes, block, lane, num_blocks, a, 0, L, DT)
    blk.store_remainders(planes, block, lane, num_blocks, b, 1, L, DT)
    blk.store_remainders(planes, block, lane, num_blocks, c, 2, L, DT)
    blk.store_remainders(planes, block, lane, num_blocks, d, 3, L, DT)
    if DT == 2:
        tops = put_tops(put_tops(put_tops(put_tops((nothing, nothing, nothing), a, 0), b, 1), c, 2), d, 3)
        blk.store_words(u32_at(tile, extra_offset), block, lane, exists, tops)
    q0, q1 = push_quarter(nothing, nothing, mask, d, 3, DT)
    q0, q1 = push_quarter(q0, q1, mask, c, 2, DT)
    q0, q1 = push_quarter(q0, q1, mask, b, 1, DT)
    q0, q1 = push_quarter(q0, q1, mask, a, 0, DT)
    n0 = popcount(mask & 0xFFFF)
    n1 = popcount(mask >> 16)
    return q0, q1, before | n0 << 16 | n1 << 24


@triton.jit
def encode_chunk2(tile, x, chunk, tile_elems, num_blocks, codes_offset, planes_offset, L: tl.constexpr):
    """The same at level 2. Returns what write_streams needs: parts of streams, places in them, whether any lane has raw exponents, and
    whether any has more than 16 nibbles."""
    a, b, c, d = x
    blocks: tl.constexpr = L // 32
    lanes = tl.arange(0, L)
    block, lane = chunk * blocks + lanes // 32, lanes % 32
    nothing = tl.zeros((L,), tl.uint32)
    totals = blk.quarter_statistics(blk.quarter_statistics((nothing, nothing, nothing), a, 1), b, 1)
    totals = blk.quarter_statistics(blk.quarter_statistics(totals, c, 1), d, 1)
    present = tl.minimum(tl.maximum(tile_elems - (chunk * blocks + tl.arange(0, blocks)) * 1024, 0), 1024)
    block_lo, block_mode = level2.choose_window(totals, present, L)
    lo, mode = blk.of_lanes(block_lo, L).to(tl.uint32), blk.of_lanes(block_mode, L).to(tl.uint32)
    if tile_elems < (chunk + 1) * (32 * L):
        x = level2.fill_absent(x, block, lane, tile_elems, lo)
    f0, f1, parts = level2.stream_parts(x, lo, mode, tl.max(block_mode, 0) >= 2, L)
    places, num_bytes = level2.stream_places(f0, f1, parts, L)
    exists = block < num_blocks
    codes = u32_at(tile, codes_offset) + block * 64 + lane
    tl.store(codes, f0, mask=exists)
    tl.store(codes + 32, f1, mask=exists)
    tl.store(u32_at(tile, 16) + block, lo | mode << 8 | num_bytes.to(tl.uint32) << 16, mask=exists & (lane == 0))
    planes = u32_at(tile, planes_offset)
    blk.store_remainders(planes, block, lane, num_blocks, x[0], 0, L, 1)
    blk.store_remainders(planes, block, lane, num_blocks, x[1], 1, L, 1)
    blk.store_remainders(planes, block, lane, num_blocks, x[2], 2, L, 1)
    blk.store_remainders(planes, block, lane, num_blocks, x[3], 3, L, 1)
    return parts, places, tl.max(popcount(parts[3]), 0) > 0, tl.max(popcount(parts[2]), 0) > 16


@triton.jit
def write_streams(to, end, kept, row, heads, from_byte, chunk, L: tl.constexpr):
    """The streams of a chunk to words ``to`` .. ``to + end``, which were zero and hold the tile's from byte ``from_byte`` on."""
    parts, places, any_raw, any_long = kept
    lanes = tl.arange(0, L)
    block, lane = chunk * (L // 32) + lanes // 32, lanes % 32
    start = earlier_escapes(heads, lane, block, L) - from_byte
    level2.write_stream(to, end, start, parts, places, row + block * 1024 + 8 * lane, any_raw, any_long)


@triton.jit
def clear_words(to, end, L: tl.constexpr):
    first = 0
    while first < end:
        i = first + tl.arange(0, L)
        tl.store(to + i, i * 0, mask=i < end)
        first += L


@triton.jit
def store_spill(row, tile, heads, tile_elems, num_blocks, first, pool, from_byte, num_bytes, L: tl.constexpr):
    """Level 2: bytes from_byte .. from_byte + num_bytes of a tile's streams to ``pool``, from raw data and headers again."""
    lanes = tl.arange(0, L)
    lane = lanes % 32
    to, end = pool.to(tl.pointer_type(tl.int32)), num_bytes // 4
    clear_words(to, end, L)
    tl.debug_barrier()
    for chunk in range(first // (L // 32), (num_blocks + L // 32 - 1) // (L // 32)):
        block = chunk * (L // 32) + lanes // 32
        head = tl.load(u32_at(tile, 16) + block, mask=block < num_blocks, other=0)
        lo, mode = head & 0xFF, (head >> 8) & 0xFF
        x = level2.fill_absent(load_chunk(row, chunk, tile_elems, False, L, 1), block, lane, tile_elems, lo)
        f0, f1, parts = level2.stream_parts(x, lo, mode, tl.max(mode.to(tl.int32), 0) >= 2, L)
        places, _ = level2.stream_places(f0, f1, parts, L)
        write_streams(to, end, (parts, places, tl.max(popcount(parts[3]), 0) > 0, True), row, heads, from_byte, chunk, L)


@triton.jit
def earlier_escapes(heads, lane, own, L: tl.constexpr):
    """Escapes of a tile's blocks before block ``own`` [L]. ``heads`` [L]: block header number ``lane``, 0 if there is none."""
    return blk.of_lanes(blk.sum_of_blocks(tl.where(lane < own, heads >> 16, 0), L), L)


@triton.jit
def store_bytes(slots, place, capacity, q, n):
    """Stores the first n (4 at most) bytes of q of each lane from ``place`` on, up to ``capacity``."""
    to = slots + place
    n = tl.minimum(n, capacity - place)
    tl.store(to, q.to(tl.uint8), mask=n > 0)
    tl.store(to + 1, (q >> 8).to(tl.uint8), mask=n > 1)
    tl.store(to + 2, (q >> 16).to(tl.uint8), mask=n > 2)
    tl.store(to + 3, (q >> 24).to(tl.uint8), mask=n > 3)


@triton.jit
def store_escapes_of_codes(row, tile, heads, codes_offset, first, end, to, from_place, to_place, L: tl.constexpr, DT: tl.constexpr):
    """Escapes number from_place to to_place - 1 of a tile from its codes and raw data, to ``to`` and on, by one group of L // 32 blocks
    after the other from block ``first`` on. For the few that lanes with many of them have, and for spills."""
    lanes = tl.arange(0, L)
    lane = lanes % 32
    for block_0 in range(first, end, L // 32):
        block = block_0 + lanes // 32
        mask = blk.escape_mask(blk.load_words(u32_at(tile, codes_offset), block, lane, block < end))
        mask = tl.where(block < end, mask, 0)
        before, _ = blk.count_before(mask, L)
        place = earlier_escapes(heads, lane, block, L) + before - from_place
        source = row + block * 1024 + 8 * lane
        while tl.max((mask != 0).to(tl.int32), 0) > 0:
            bit = popcount((mask & (0 - mask)) - 1)
            wanted = (mask != 0) & (place >= 0) & (place < to_place - from_place)
            bits = blk.bits32(tl.load(source + (((bit & 12) << 6) | ((bit & 3) << 1) | (bit >> 4)), mask=wanted, other=0).to(tl.int32))
            e = (bits >> (23 if DT == 3 else blk.at(DT))) & blk.exponent_mask(DT)
            tl.store(to + place, e.to(tl.uint8), mask=wanted)
            mask = mask & (mask - 1)
            place += 1


@triton.jit
def ask_for_chunk(source, chunk, L: tl.constexpr):
    """Asks L2 for a chunk of 16-bit raw data, each warp for its block; ``source`` is aligned to 16 bytes."""
    lanes = tl.arange(0, L)
    ask_l2(source.to(tl.int64) + (chunk * (L // 32) + lanes // 32).to(tl.int64) * 2048, lanes % 32, 2048)


@kernel
def encode(x, frames, words, status, row_stride: tl.int64, frame_stride: tl.int64, skip: tl.int32, num_rows: tl.int32, numel: tl.int64,
           num_tiles: tl.int32, given_lo: tl.int32, tiles_offset: tl.int32, tile_bytes: tl.int32, last_blocks: tl.int32,
           escapes_offset: tl.int32, capacity: tl.int32, codes_offset: tl.int32, extra_offset: tl.int32, planes_offset: tl.int32,
           last_escapes_offset: tl.int32, last_capacity: tl.int32, last_codes_offset: tl.int32, last_extra_offset: tl.int32,
           last_planes_offset: tl.int32, pools_offset: tl.int64, pool_bytes: tl.int32, last_pool_bytes: tl.int32, h0: tl.int32,
           h1: tl.int32, h2: tl.int32, h3: tl.int32, h4: tl.int32, aligned: tl.int32, L: tl.constexpr, DT: tl.constexpr,
           LEVEL: tl.constexpr):
    """Grid (tiles, and groups or 1; rows without the skipped one). aligned: rows of x start on 16-byte addresses. h0..h4: the header's
    first five words, the rest is 0 but for the status."""
    t, index = tl.program_id(0), tl.program_id(1)
    row = index + ((skip >= 0) & (index >= skip)).to(tl.int32)
    source = x + (row.to(tl.int64) * row_stride + t.to(tl.int64) * TILE_ELEMS)
    # Raw data is asked for before its turn: a tile's next chunk, and by wide programs, which as a rule start at once, all while the call
    # before this one ends.
    asks = (LEVEL == 1) & (DT != 3) & (aligned != 0) & (t < num_tiles - 1)
    if L >= 512:
        if asks & (t + index * num_tiles < FIRST_PROGRAMS):
            for chunk in tl.static_range(1024 // L):
                ask_for_chunk(source, chunk, L)
    begin_in_turn()
    tag = tl.load(words, volatile=True).to(tl.uint32) + 1
    frame = frames + row.to(tl.int64) * frame_stride
    if t >= num_tiles:
        end_group(frame, words, status, tag, t - num_tiles, index, num_rows, num_tiles, last_blocks, capacity, last_capacity, pools_offset,
                  pool_bytes, last_pool_bytes, h0, h1, h2, h3, h4, L)
    else:
        last = t == num_tiles - 1
        full_capacity = capacity
        num_blocks = tl.where(last, last_blocks, 32)
        tile_elems = tl.minimum(numel - t.to(tl.int64) * TILE_ELEMS, TILE_ELEMS).to(tl.int32)
        tile = tl.multiple_of(frame + (tiles_offset + t.to(tl.int64) * tile_bytes), 16)
        escapes_offset = tl.where(last, last_escapes_offset, escapes_offset)
        capacity = tl.where(last, last_capacity, capacity)
        codes_offset = tl.multiple_of(tl.where(last, last_codes_offset, codes_offset), 128)
        extra_offset = tl.multiple_of(tl.where(last, last_extra_offset, extra_offset), 128)
        planes_offset = tl.multiple_of(tl.where(last, last_planes_offset, planes_offset), 128)
        of_row = words_of_row(words, index, num_tiles)
        chunks: tl.constexpr = 1024 // L
        lanes = tl.arange(0, L)
        lane = lanes % 32

        slots = tile + escapes_offset
        if LEVEL == 2:
            clear_words(u32_at(slots, 0), capacity // 4, L)
        wide_source = tl.multiple_of(source, 16)
        many = lanes * 0
        for chunk in range(chunks):              # in turn: what blocks of earlier chunks have is in their headers by then
            raw = load_chunk(wide_source, chunk, tile_elems, aligned != 0, L, DT)
            if asks & (chunk + 1 < chunks):
                ask_for_chunk(source, chunk + 1, L)
            own = chunk * (L // 32) + lanes // 32
            if LEVEL == 2:
                kept = encode_chunk2(tile, raw, chunk, tile_elems, num_blocks, codes_offset, planes_offset, L)
                tl.debug_barrier()               # the chunk's headers are there, and slots are zero
                heads = tl.load(u32_at(tile, 16) + lane, mask=lane < tl.minimum((chunk + 1) * (L // 32), num_blocks), other=0)
                write_streams(slots.to(tl.pointer_type(tl.int32)), capacity // 4, kept, source, heads, 0, chunk, L)
            else:
                q0, q1, numbers = encode_chunk(tile, raw, chunk, tile_elems, num_blocks, codes_offset, extra_offset, planes_offset,
                                               given_lo, L, DT)
                tl.debug_barrier()
                heads = tl.load(u32_at(tile, 16) + lane, mask=lane < tl.minimum((chunk + 1) * (L // 32), num_blocks), other=0)
                n0, n1 = (numbers >> 16) & 0xFF, numbers >> 24
                place = earlier_escapes(heads, lane, own, L) + (numbers & 0xFFFF)
                store_bytes(slots, place, capacity, q0, n0)
                store_bytes(slots, place + n0, capacity, q1, n1)
                many = tl.maximum(many, tl.maximum(n0, n1))

        tl.debug_barrier()                       # block headers, and codes, are read again
        i = tl.arange(0, 32)
        in_block = (tl.load(u32_at(tile, 16) + i, mask=i < num_blocks, other=0) >> 16).to(tl.int32)
        total = tl.sum(in_block, 0)
        send(of_row + t, tag, total)
        spill = spill_of(total, capacity)
        if LEVEL == 1:
            if tl.max(many, 0) > 4:
                heads = tl.load(u32_at(tile, 16) + lane, mask=lane < num_blocks, other=0)
                store_escapes_of_codes(source, tile, heads, codes_offset, 0, num_blocks, slots, 0, capacity, L, DT)
            at = total
            while at < capacity:
                tl.store(slots + at + lanes, tl.zeros((L,), tl.uint8), mask=at + lanes < capacity)
                at += L
        offset = tl.cast(0, tl.int32)
        if spill > 0:
            group = t // GROUP_TILES
            j = tl.arange(0, GROUP_TILES)
            earlier = j < t % GROUP_TILES
            others = receive(of_row + (group * GROUP_TILES + j), earlier, tag)
            offset = tl.sum(tl.where(earlier, spill_of(others, full_capacity), 0), 0)
            size = tl.where(group == (num_tiles - 1) // GROUP_TILES, last_pool_bytes, pool_bytes)
            if offset + spill <= size:
                pool = frame + (pools_offset + group.to(tl.int64) * pool_bytes) + offset
                heads = tl.load(u32_at(tile, 16) + lane, mask=lane < num_blocks, other=0)
                # The spill starts in the last block before which the slots still had room.
                first = tl.sum((tl.cumsum(in_block, 0) - in_block <= capacity).to(tl.int32), 0) - 1
                if LEVEL == 2:
                    store_spill(source, tile, heads, tile_elems, num_blocks, first, pool, capacity, spill, L)
                else:
                    store_escapes_of_codes(source, tile, heads, codes_offset, first, num_blocks, pool, capacity, total, L, DT)
        field = tl.arange(0, 4)
        tl.store(u32_at(tile, 0) + field, tl.where(field == 0, total, tl.where(field == 1, offset, 0)).to(tl.uint32))
