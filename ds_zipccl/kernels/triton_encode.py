"""Encode in Triton: three launches. ``tiles``: one program a tile, all but spills. ``groups``: spill offsets, a prefix sum over the
tile headers, and zeroed sub-pools. ``finish``: programs of spilling tiles store their spill; the first one writes headers and status.
"""
import triton
import triton.language as tl

from ds_zipccl.kernels import triton_block as blk

GROUP_TILES = tl.constexpr(256)
TILE_ELEMS = tl.constexpr(32768)


@triton.jit
def u32_at(frame, offset):
    return (frame + offset).to(tl.pointer_type(tl.uint32))


@triton.jit
def encode_chunk(tile, row, chunk, tile_elems, num_blocks, running, escapes_offset, capacity, pool, pool_room, codes_offset,
                 extra_offset, planes_offset, given_lo, WIDE: tl.constexpr, SPILL: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """Codes L // 32 blocks; returns the number of escapes so far. ``SPILL``: stores only escapes beyond ``capacity``, in ``pool``."""
    blocks: tl.constexpr = L // 32
    planes: tl.constexpr = 3 if DT == 3 else 1
    mant: tl.constexpr = 7 if DT == 1 else 10 if DT == 2 else 23
    lanes = tl.arange(0, L)
    own_block = chunk * blocks + tl.arange(0, blocks)
    block, lane = chunk * blocks + lanes // 32, lanes % 32
    full = tile_elems == TILE_ELEMS
    block_present = tl.minimum(tl.maximum(tile_elems - own_block * 1024, 0), 1024)
    present = tl.minimum(tl.maximum(tile_elems - block * 1024, 0), 1024)
    nothing = tl.zeros((L,), tl.uint32)

    total, squares = nothing, nothing
    for j in tl.static_range(4):
        l0, h0, l1, h1, l2, h2, l3, h3 = blk.load_quarter(row, block, 256 * j + 8 * lane, present, nothing, full, WIDE, DT)
        total, squares = blk.add_statistics(total, squares, l0, h0, DT)
        total, squares = blk.add_statistics(total, squares, l1, h1, DT)
        total, squares = blk.add_statistics(total, squares, l2, h2, DT)
        total, squares = blk.add_statistics(total, squares, l3, h3, DT)
    block_total = tl.sum(tl.reshape(total.to(tl.int32, bitcast=True), (blocks, 32)), 1)
    block_squares = tl.sum(tl.reshape(squares.to(tl.int32, bitcast=True), (blocks, 32)), 1)
    block_lo, block_mode = blk.choose_window(block_total.to(tl.uint32, bitcast=True), block_squares, block_present, given_lo, DT)
    any_zero_mode = tl.max(block_mode, 0) > 0
    lo = blk.of_lanes(block_lo, L).to(tl.uint32)
    zero_mode = (0 - blk.of_lanes(block_mode, L)).to(tl.uint32, bitcast=True)
    lo2, filler = lo | lo << 16, (lo + 1) << mant

    w0, w1, w2 = nothing, nothing, nothing
    for j in tl.static_range(4):
        l0, h0, l1, h1, l2, h2, l3, h3 = blk.load_quarter(row, block, 256 * j + 8 * lane, present, filler, full, WIDE, DT)
        w0, w1, w2 = blk.put_code(w0, w1, w2, blk.code(l0, h0, lo2, zero_mode, any_zero_mode, DT), 4 * j)
        w0, w1, w2 = blk.put_code(w0, w1, w2, blk.code(l1, h1, lo2, zero_mode, any_zero_mode, DT), 4 * j + 1)
        w0, w1, w2 = blk.put_code(w0, w1, w2, blk.code(l2, h2, lo2, zero_mode, any_zero_mode, DT), 4 * j + 2)
        w0, w1, w2 = blk.put_code(w0, w1, w2, blk.code(l3, h3, lo2, zero_mode, any_zero_mode, DT), 4 * j + 3)
    mask = blk.escape_mask(w0, w1, w2)
    before, block_count = blk.count_before(mask, L)
    block_before = tl.cumsum(block_count, 0) - block_count
    exists = block < num_blocks
    if not SPILL:
        codes = u32_at(tile, codes_offset) + block * 96 + lane
        tl.store(codes, w0, mask=exists)
        tl.store(codes + 32, w1, mask=exists)
        tl.store(codes + 64, w2, mask=exists)
        tl.store(u32_at(tile, 16) + own_block, (block_lo | block_mode << 8 | block_count << 16).to(tl.uint32), mask=own_block < num_blocks)

    at0 = running + blk.of_lanes(block_before, L) + before             # where the next escape of half 0, of half 1 goes
    at1 = at0 + blk.popcount(mask & 0xFFFF)
    t0, t1, t2 = nothing, nothing, nothing
    slots = tile + escapes_offset
    for j in tl.static_range(4):
        l0, h0, l1, h1, l2, h2, l3, h3 = blk.load_quarter(row, block, 256 * j + 8 * lane, present, filler, full, WIDE, DT)
        if not SPILL:
            for plane in tl.static_range(planes):
                first = blk.remainder_bytes(l0, h0, plane, DT) | blk.remainder_bytes(l1, h1, plane, DT) << 16
                second = blk.remainder_bytes(l2, h2, plane, DT) | blk.remainder_bytes(l3, h3, plane, DT) << 16
                at = (block * (256 * planes) + 256 * plane + 64 * j + 2 * lane)[:, None] + tl.arange(0, 2)[None, :]
                tl.store(u32_at(tile, planes_offset) + at, tl.join(first, second), mask=tl.broadcast_to(exists[:, None], (L, 2)))
            if DT == 2:
                t0, t1, t2 = blk.put_code(t0, t1, t2, blk.remainder_top(l0), 4 * j)
                t0, t1, t2 = blk.put_code(t0, t1, t2, blk.remainder_top(l1), 4 * j + 1)
                t0, t1, t2 = blk.put_code(t0, t1, t2, blk.remainder_top(l2), 4 * j + 2)
                t0, t1, t2 = blk.put_code(t0, t1, t2, blk.remainder_top(l3), 4 * j + 3)
        at0, at1 = store_escapes(slots, capacity, pool, pool_room, mask, blk.exponents(l0, h0, DT), at0, at1, SPILL, 4 * j)
        at0, at1 = store_escapes(slots, capacity, pool, pool_room, mask, blk.exponents(l1, h1, DT), at0, at1, SPILL, 4 * j + 1)
        at0, at1 = store_escapes(slots, capacity, pool, pool_room, mask, blk.exponents(l2, h2, DT), at0, at1, SPILL, 4 * j + 2)
        at0, at1 = store_escapes(slots, capacity, pool, pool_room, mask, blk.exponents(l3, h3, DT), at0, at1, SPILL, 4 * j + 3)
    if DT == 2 and not SPILL:
        tops = u32_at(tile, extra_offset) + block * 96 + lane
        tl.store(tops, t0, mask=exists)
        tl.store(tops + 32, t1, mask=exists)
        tl.store(tops + 64, t2, mask=exists)
    return running + tl.sum(block_count, 0)


@triton.jit
def store_escapes(slots, capacity, pool, pool_room, mask, e, at0, at1, SPILL: tl.constexpr, P: tl.constexpr):
    """Stores the exponents of pair P where they are escapes; returns the next places."""
    is0, is1 = ((mask >> P) & 1) != 0, ((mask >> (P + 16)) & 1) != 0
    e0, e1 = (e & 0xFF).to(tl.uint8), (e >> 16).to(tl.uint8)
    if SPILL:
        tl.store(pool + (at0 - capacity), e0, mask=is0 & (at0 >= capacity) & (at0 - capacity < pool_room))
        tl.store(pool + (at1 - capacity), e1, mask=is1 & (at1 >= capacity) & (at1 - capacity < pool_room))
    else:
        tl.store(slots + at0, e0, mask=is0 & (at0 < capacity))
        tl.store(slots + at1, e1, mask=is1 & (at1 < capacity))
    return at0 + is0.to(tl.int32), at1 + is1.to(tl.int32)


@blk.kernel
def tiles(x, frames, row_stride, frame_stride, skip, numel, num_tiles, given_lo, tiles_offset, tile_bytes, last_blocks,
          escapes_offset, capacity, codes_offset, extra_offset, planes_offset, last_escapes_offset, last_capacity, last_codes_offset,
          last_extra_offset, last_planes_offset, WIDE: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """Grid (tiles, rows without the skipped one)."""
    t, row = tl.program_id(0), tl.program_id(1)
    row += ((skip >= 0) & (row >= skip)).to(tl.int32)
    last = t == num_tiles - 1
    num_blocks = tl.where(last, last_blocks, 32)
    tile_elems = tl.minimum(numel - t.to(tl.int64) * TILE_ELEMS, TILE_ELEMS).to(tl.int32)
    tile = tl.multiple_of(frames + row.to(tl.int64) * frame_stride + tiles_offset + t.to(tl.int64) * tile_bytes, 16)
    source = x + row.to(tl.int64) * row_stride + t.to(tl.int64) * TILE_ELEMS
    if WIDE:
        source = tl.multiple_of(source, 16)
    escapes_offset = tl.where(last, last_escapes_offset, escapes_offset)
    capacity = tl.where(last, last_capacity, capacity)
    codes_offset = tl.where(last, last_codes_offset, codes_offset)
    extra_offset = tl.where(last, last_extra_offset, extra_offset)
    planes_offset = tl.multiple_of(tl.where(last, last_planes_offset, planes_offset), 128)
    running = 0
    for chunk in range(0, 1024 // L):
        running = encode_chunk(tile, source, chunk, tile_elems, num_blocks, running, escapes_offset, capacity, tile, 0, codes_offset,
                               extra_offset, planes_offset, given_lo, WIDE, False, L, DT)
    i = tl.arange(0, 4)
    tl.store(u32_at(tile, 0) + i, tl.where(i == 0, running, 0).to(tl.uint32))
    span = tl.arange(0, 1024)
    at = running + span
    while tl.min(at, 0) < capacity:
        tl.store(tile + escapes_offset + at, tl.zeros((1024,), tl.uint8), mask=at < capacity)
        at += 1024


@blk.kernel
def groups(frames, outcomes, frame_stride, skip, num_tiles, num_groups, tiles_offset, tile_bytes, last_blocks, capacity, last_capacity,
           pools_offset, pool_bytes, last_pool_bytes, GROUP: tl.constexpr):
    """Grid (groups, rows). ``outcomes`` [rows, groups]: status words."""
    group, index = tl.program_id(0), tl.program_id(1)
    row = index + ((skip >= 0) & (index >= skip)).to(tl.int32)
    frame = frames + row.to(tl.int64) * frame_stride
    t = group * GROUP + tl.arange(0, GROUP)
    exists, last = t < num_tiles, t == num_tiles - 1
    head = frame + tiles_offset + t.to(tl.int64) * tile_bytes
    num = tl.load(u32_at(head, 0), mask=exists, other=0).to(tl.int32)
    nb = tl.where(last, last_blocks, 32)
    spill = tl.maximum(num - tl.where(last, last_capacity, capacity), 0)
    spill = tl.where(exists, spill, 0)
    offset = tl.cumsum(spill, 0) - spill
    tl.store(u32_at(head, 4), offset.to(tl.uint32), mask=spill > 0)
    size = tl.where(group == num_groups - 1, last_pool_bytes, pool_bytes)
    overflow = (tl.sum(spill, 0) > size).to(tl.int32)
    unit = 4 * tl.minimum(GROUP, num_tiles - group * GROUP)
    spill_need = (tl.sum(spill, 0) + unit - 1) // unit
    tl.store(outcomes + index * num_groups + group, tl.max((num + nb - 1) // nb, 0) | overflow << 16 | spill_need << 17)
    pool = frame + pools_offset + group.to(tl.int64) * pool_bytes
    span = tl.arange(0, 1024)
    start = 0
    while start < size // 4:
        tl.store(u32_at(pool, 0) + start + span, tl.zeros((1024,), tl.uint32), mask=start + span < size // 4)
        start += 1024


@triton.jit
def worst_outcome(outcomes, count):
    """The status word of ``count`` frames together: the largest of each field."""
    span = tl.arange(0, 64)
    need, overflow, spill = span * 0, span * 0, span * 0
    start = 0
    while start < count:
        words = tl.load(outcomes + start + span, mask=start + span < count, other=0)
        need, overflow, spill = tl.maximum(need, words & 0xFFFF), tl.maximum(overflow, words & 65536), tl.maximum(spill, words >> 17)
        start += 64
    return tl.max(need, 0) | tl.max(overflow, 0) | tl.max(spill, 0) << 17


@blk.kernel
def finish(x, frames, status, outcomes, row_stride, frame_stride, skip, num_rows, numel, num_tiles, num_groups, given_lo, tiles_offset,
           tile_bytes, last_blocks, capacity, last_capacity, pools_offset, pool_bytes, last_pool_bytes, h0, h1, h2, h3, h4,
           WIDE: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """Grid (tiles or 1, rows without the skipped one). h0..h4: the header's first five words, the rest is 0 but for the status."""
    t, index = tl.program_id(0), tl.program_id(1)
    row = index + ((skip >= 0) & (index >= skip)).to(tl.int32)
    frame = frames + row.to(tl.int64) * frame_stride
    if t == 0:
        word_5 = worst_outcome(outcomes + index * num_groups, num_groups)
        i = tl.arange(0, 32)
        word = tl.where(i == 0, h0, tl.where(i == 1, h1, tl.where(i == 2, h2, tl.where(i == 3, h3, tl.where(i == 4, h4, 0)))))
        tl.store(u32_at(frame, 0) + i, tl.where(i == 5, word_5, word).to(tl.uint32))
        if index == 0:
            tl.store(status, worst_outcome(outcomes, num_groups * num_rows))
    if t < num_tiles:
        tile = frame + tiles_offset + t.to(tl.int64) * tile_bytes
        last = t == num_tiles - 1
        room = tl.where(last, last_capacity, capacity)
        spill = tl.load(u32_at(tile, 0)).to(tl.int32) - room
        if spill > 0:
            offset = tl.load(u32_at(tile, 4)).to(tl.int32)
            group = t // GROUP_TILES
            size = tl.where(group == num_groups - 1, last_pool_bytes, pool_bytes)
            if offset + spill <= size:
                pool = frame + pools_offset + group.to(tl.int64) * pool_bytes + offset
                num_blocks = tl.where(last, last_blocks, 32)
                tile_elems = tl.minimum(numel - t.to(tl.int64) * TILE_ELEMS, TILE_ELEMS).to(tl.int32)
                source = x + row.to(tl.int64) * row_stride + t.to(tl.int64) * TILE_ELEMS
                running = 0
                for chunk in range(0, 1024 // L):
                    running = encode_chunk(tile, source, chunk, tile_elems, num_blocks, running, 0, room, pool, spill, 0, 0, 0,
                                           given_lo, WIDE, True, L, DT)
