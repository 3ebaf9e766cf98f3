"""Decode in Triton, and decode with a sum over rows: a program takes L // 32 blocks of one tile. Corruption is noted in ``errors``, with
the bits of csrc/zipccl/frame.cuh; no access leaves the frame or the output."""
import triton
import triton.language as tl

from ds_zipccl.kernels import triton_block as blk
from ds_zipccl.kernels.triton_encode import GROUP_TILES, TILE_ELEMS, u32_at

BAD_HEADER, BAD_BLOCK_COUNT, BAD_TILE_COUNT, BAD_WINDOW, BAD_SPILL = (tl.constexpr(1 << bit) for bit in range(5))


@triton.jit
def decode_pair(places, words, mask, lo, mode, at0, at1, b0, b1, b2, P: tl.constexpr, DT: tl.constexpr):
    """Bits of the two elements of pair P as u32, and the next places. b0..b2: their remainder bytes, 16 bits a plane."""
    tile, pool, pool_room, spill_offset, escapes_offset, capacity, any_spill = places
    w0, w1, w2, t0, t1, t2 = words
    c = blk.get_code(w0, w1, w2, P)
    is0, is1 = ((mask >> P) & 1) != 0, ((mask >> (P + 16)) & 1) != 0
    e0 = tl.load(tile + escapes_offset + at0, mask=is0 & (at0 < capacity), other=0)
    e1 = tl.load(tile + escapes_offset + at1, mask=is1 & (at1 < capacity), other=0)
    if any_spill:
        p0, p1 = spill_offset + (at0 - capacity), spill_offset + (at1 - capacity)
        e0 |= tl.load(pool + p0, mask=is0 & (at0 >= capacity) & (p0 < pool_room), other=0)
        e1 |= tl.load(pool + p1, mask=is1 & (at1 >= capacity) & (p1 < pool_room), other=0)
    e0 = tl.where(is0, e0.to(tl.uint32), blk.uncode(c, lo, mode, 0))
    e1 = tl.where(is1, e1.to(tl.uint32), blk.uncode(c, lo, mode, 1))
    if DT == 1:
        first = (b0 & 0x7F) | (b0 & 0x80) << 8 | (e0 & 0xFF) << 7
        second = ((b0 >> 8) & 0x7F) | (b0 & 0x8000) | (e1 & 0xFF) << 7
    elif DT == 2:
        top = blk.get_code(t0, t1, t2, P)
        first = (b0 & 0xFF) | (top & 3) << 8 | (top & 4) << 13 | (e0 & 31) << 10
        second = ((b0 >> 8) & 0xFF) | ((top >> 16) & 3) << 8 | ((top >> 16) & 4) << 13 | (e1 & 31) << 10
    else:
        first = (b0 & 0xFF) | (b1 & 0xFF) << 8 | (b2 & 0x7F) << 16 | (b2 & 0x80) << 24 | (e0 & 0xFF) << 23
        second = ((b0 >> 8) & 0xFF) | (b1 & 0xFF00) | (b2 & 0x7F00) << 8 | (b2 & 0x8000) << 16 | (e1 & 0xFF) << 23
    return first, second, at0 + is0.to(tl.int32), at1 + is1.to(tl.int32)


@triton.jit
def decode_quarter(tile, pool, pool_room, state, escapes_offset, capacity, planes_offset, block, lane, num_blocks, J: tl.constexpr,
                   L: tl.constexpr, DT: tl.constexpr):
    """Bits of the lane's 8 elements of quarter J, as u32, in the order of load_quarter."""
    w0, w1, w2, t0, t1, t2, mask, lo, mode, at0, at1, spill_offset, any_spill = state
    earlier: tl.constexpr = (1 << (4 * J)) - 1
    at0 += blk.popcount(mask & earlier)
    at1 += blk.popcount((mask >> 16) & earlier)
    x0, y0 = remainder_words(tile, planes_offset, block, lane, num_blocks, J, 0, L, DT)
    x1, y1, x2, y2 = x0, y0, x0, y0
    if DT == 3:
        x1, y1 = remainder_words(tile, planes_offset, block, lane, num_blocks, J, 1, L, DT)
        x2, y2 = remainder_words(tile, planes_offset, block, lane, num_blocks, J, 2, L, DT)
    places = (tile, pool, pool_room, spill_offset, escapes_offset, capacity, any_spill)
    words = (w0, w1, w2, t0, t1, t2)
    l0, h0, at0, at1 = decode_pair(places, words, mask, lo, mode, at0, at1, x0 & 0xFFFF, x1 & 0xFFFF, x2 & 0xFFFF, 4 * J, DT)
    l1, h1, at0, at1 = decode_pair(places, words, mask, lo, mode, at0, at1, x0 >> 16, x1 >> 16, x2 >> 16, 4 * J + 1, DT)
    l2, h2, at0, at1 = decode_pair(places, words, mask, lo, mode, at0, at1, y0 & 0xFFFF, y1 & 0xFFFF, y2 & 0xFFFF, 4 * J + 2, DT)
    l3, h3, at0, at1 = decode_pair(places, words, mask, lo, mode, at0, at1, y0 >> 16, y1 >> 16, y2 >> 16, 4 * J + 3, DT)
    return l0, h0, l1, h1, l2, h2, l3, h3


@triton.jit
def block_state(frame, tile, num_blocks, capacity, codes_offset, extra_offset, pool_room, own_block, block, lane,
                L: tl.constexpr, DT: tl.constexpr):
    """The state of L // 32 blocks that decode_quarter needs, and kinds of corruption."""
    exists, own_exists = block < num_blocks, own_block < num_blocks
    codes = u32_at(tile, codes_offset) + block * 96 + lane
    ones = 0x12491249
    w0 = tl.load(codes, mask=exists, other=ones)
    w1 = tl.load(codes + 32, mask=exists, other=ones)
    w2 = tl.load(codes + 64, mask=exists, other=ones)
    if DT == 2:
        tops = u32_at(tile, extra_offset) + block * 96 + lane
        t0 = tl.load(tops, mask=exists, other=0)
        t1 = tl.load(tops + 32, mask=exists, other=0)
        t2 = tl.load(tops + 64, mask=exists, other=0)
    else:
        t0, t1, t2 = w0, w1, w2
    i = tl.arange(0, 32)
    heads = tl.load(u32_at(tile, 16) + i, mask=i < num_blocks, other=0)
    counts = (heads >> 16).to(tl.int32)
    before_block = tl.sum(tl.where(i[None, :] < own_block[:, None], counts[None, :], 0), 1)
    head = tl.load(u32_at(tile, 16) + own_block, mask=own_exists, other=0)
    lo, mode = head & 0xFF, (head >> 8) & 0xFF
    mask = tl.where(exists, blk.escape_mask(w0, w1, w2), 0)
    before, found = blk.count_before(mask, L)
    num, spill_offset = tl.load(u32_at(tile, 0)), tl.load(u32_at(tile, 4))
    all_counts = tl.sum(counts, 0)
    errors = tl.max(tl.where(own_exists & (found != (head >> 16).to(tl.int32)), BAD_BLOCK_COUNT, 0), 0)
    errors |= tl.max(tl.where((mode > 1) | (lo > blk.top_lo(DT)), BAD_WINDOW, 0), 0)
    errors |= tl.where(num.to(tl.int64) != all_counts, BAD_TILE_COUNT, 0)
    spill = tl.maximum(all_counts - capacity, 0).to(tl.int64)
    errors |= tl.where((spill > 0) & (spill_offset.to(tl.int64) + spill > pool_room), BAD_SPILL, 0)
    at0 = blk.of_lanes(before_block, L) + before
    at1 = at0 + blk.popcount(mask & 0xFFFF)
    state = (w0, w1, w2, t0, t1, t2, mask, blk.of_lanes(lo, L), blk.of_lanes(mode, L), at0, at1, spill_offset.to(tl.int64),
             (spill > 0) | (errors > 0))
    return state, errors


@triton.jit
def remainder_words(tile, planes_offset, block, lane, num_blocks, J: tl.constexpr, PLANE: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """Remainder bytes of the lane's 8 elements of quarter J: two u32 words."""
    planes: tl.constexpr = 3 if DT == 3 else 1
    at = (block * (256 * planes) + 256 * PLANE + 64 * J + 2 * lane)[:, None] + tl.arange(0, 2)[None, :]
    exists = tl.broadcast_to((block < num_blocks)[:, None], (L, 2))
    return tl.split(tl.load(u32_at(tile, planes_offset) + at, mask=exists, other=0))


@triton.jit
def store_pair(row, block, first, present, low, high, W: tl.constexpr, DT: tl.constexpr):
    at = row + block.to(tl.int64) * 1024 + first + 2 * W
    low = low.to(tl.int32, bitcast=True) if DT == 3 else low.to(tl.uint16).to(tl.int16, bitcast=True)
    high = high.to(tl.int32, bitcast=True) if DT == 3 else high.to(tl.uint16).to(tl.int16, bitcast=True)
    tl.store(at, low, mask=first + 2 * W < present)
    tl.store(at + 1, high, mask=first + 2 * W + 1 < present)


@triton.jit
def store_quarter(row, block, first, present, full, l0, h0, l1, h1, l2, h2, l3, h3, WIDE: tl.constexpr, DT: tl.constexpr):
    """Inverse of triton_block.load_quarter, from the bits of single elements."""
    if WIDE and full:
        a = tl.arange(0, 2)
        if DT == 3:
            within = 4 * a[:, None, None] + 2 * a[None, :, None] + a[None, None, :]
            at = (block * 1024 + first)[:, None, None, None] + within[None, :, :, :]
            low, high = tl.join(tl.join(l0, l2), tl.join(l1, l3)), tl.join(tl.join(h0, h2), tl.join(h1, h3))
            tl.store(row + at, tl.join(low, high).to(tl.int32, bitcast=True))
        else:
            at = (block * 512 + first // 2)[:, None, None] + 2 * a[None, :, None] + a[None, None, :]
            words = tl.join(tl.join(l0 | h0 << 16, l2 | h2 << 16), tl.join(l1 | h1 << 16, l3 | h3 << 16))
            tl.store(row.to(tl.pointer_type(tl.int32)) + at, words.to(tl.int32, bitcast=True))
    else:
        store_pair(row, block, first, present, l0, h0, 0, DT)
        store_pair(row, block, first, present, l1, h1, 1, DT)
        store_pair(row, block, first, present, l2, h2, 2, DT)
        store_pair(row, block, first, present, l3, h3, 3, DT)


@triton.jit
def check_header(frame, h0, h1, h2, h3, h4):
    i = tl.arange(0, 32)
    word = tl.load(u32_at(frame, 0) + i).to(tl.int32, bitcast=True)
    expected = tl.where(i == 0, h0, tl.where(i == 1, h1, tl.where(i == 2, h2, tl.where(i == 3, h3, tl.where(i == 4, h4, 0)))))
    bad = tl.where(i == 5, (word & 65536) != 0, word != expected.to(tl.int32))
    # byte 7, the given window, is the writer's: any valid one will do. FP16 has dtype code 2 (byte 5) and 5 exponent bits.
    top = tl.where(((h1 >> 8) & 255) == 2, 25, 249)
    bad = tl.where(i == 1, (((word ^ expected.to(tl.int32)) & 0xFFFFFF) != 0) | (((word >> 24) & 255) > top), bad)
    return tl.max(tl.where(bad, BAD_HEADER, 0), 0)


@blk.kernel
def decode(frames, out, errors_at, row_stride, frame_stride, skip, numel, num_tiles, num_groups, tiles_offset, tile_bytes, last_blocks,
           escapes_offset, capacity, codes_offset, extra_offset, planes_offset, last_escapes_offset, last_capacity, last_codes_offset,
           last_extra_offset, last_planes_offset, pools_offset, pool_bytes, last_pool_bytes, h0, h1, h2, h3, h4, WIDE: tl.constexpr,
           L: tl.constexpr, DT: tl.constexpr):
    """Grid (tiles * 32 / (L / 32), or 1, rows without the skipped one)."""
    per_tile: tl.constexpr = 1024 // L
    t, part, row = tl.program_id(0) // per_tile, tl.program_id(0) % per_tile, tl.program_id(1)
    row += ((skip >= 0) & (row >= skip)).to(tl.int32)
    frame = frames + row.to(tl.int64) * frame_stride
    if tl.program_id(0) == 0:
        bad = check_header(frame, h0, h1, h2, h3, h4)
        if bad > 0:
            tl.atomic_or(errors_at, bad)
    if t < num_tiles:
        last = t == num_tiles - 1
        num_blocks = tl.where(last, last_blocks, 32)
        tile = tl.multiple_of(frame + tiles_offset + t.to(tl.int64) * tile_bytes, 16)
        escapes_offset = tl.where(last, last_escapes_offset, escapes_offset)
        capacity = tl.where(last, last_capacity, capacity)
        codes_offset = tl.where(last, last_codes_offset, codes_offset)
        extra_offset = tl.where(last, last_extra_offset, extra_offset)
        planes_offset = tl.multiple_of(tl.where(last, last_planes_offset, planes_offset), 128)
        group = t // GROUP_TILES
        room = tl.where(group == num_groups - 1, last_pool_bytes, pool_bytes)
        pool = frame + pools_offset + group.to(tl.int64) * pool_bytes
        lanes = tl.arange(0, L)
        own_block = part * (L // 32) + tl.arange(0, L // 32)
        block, lane = part * (L // 32) + lanes // 32, lanes % 32
        state, bad = block_state(frame, tile, num_blocks, capacity, codes_offset, extra_offset, room, own_block, block, lane, L, DT)
        if bad > 0:
            tl.atomic_or(errors_at, bad)
        tile_elems = tl.minimum(numel - t.to(tl.int64) * TILE_ELEMS, TILE_ELEMS).to(tl.int32)
        present = tl.minimum(tl.maximum(tile_elems - block * 1024, 0), 1024)
        target = out + row.to(tl.int64) * row_stride + t.to(tl.int64) * TILE_ELEMS
        if WIDE:
            target = tl.multiple_of(target, 16)
        full = tile_elems == TILE_ELEMS
        for j in tl.static_range(4):
            l0, g0, l1, g1, l2, g2, l3, g3 = decode_quarter(tile, pool, room, state, escapes_offset, capacity, planes_offset, block, lane,
                                                            num_blocks, j, L, DT)
            store_quarter(target, block, 256 * j + 8 * lane, present, full, l0, g0, l1, g1, l2, g2, l3, g3, WIDE, DT)


@triton.jit
def to_float(bits, DT: tl.constexpr):
    if DT == 1:
        return (bits << 16).to(tl.float32, bitcast=True)
    if DT == 2:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rounded(value, DT: tl.constexpr):
    """Bits of one rounding to nearest even; NaNs become the canonical one."""
    bits = value.to(tl.uint32, bitcast=True)
    nan = value != value
    if DT == 1:
        return tl.where(nan, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    if DT == 2:
        return tl.where(nan, 0x7E00, value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32))
    return tl.where(nan, 0x7FC00000, bits)


@blk.kernel
def decode_reduce(frames, own, out, errors_at, frame_stride, own_index, num_rows, numel, num_tiles, num_groups, tiles_offset, tile_bytes,
                  last_blocks, escapes_offset, capacity, codes_offset, extra_offset, planes_offset, last_escapes_offset, last_capacity,
                  last_codes_offset, last_extra_offset, last_planes_offset, pools_offset, pool_bytes, last_pool_bytes, h0, h1, h2, h3, h4,
                  WIDE: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """Grid (tiles * 32 / (L / 32)). A quarter of the blocks at a time, so that the sums fit in registers."""
    per_tile: tl.constexpr = 1024 // L
    t, part = tl.program_id(0) // per_tile, tl.program_id(0) % per_tile
    last = t == num_tiles - 1
    num_blocks = tl.where(last, last_blocks, 32)
    escapes_offset = tl.where(last, last_escapes_offset, escapes_offset)
    capacity = tl.where(last, last_capacity, capacity)
    codes_offset = tl.where(last, last_codes_offset, codes_offset)
    extra_offset = tl.where(last, last_extra_offset, extra_offset)
    planes_offset = tl.multiple_of(tl.where(last, last_planes_offset, planes_offset), 128)
    group = t // GROUP_TILES
    room = tl.where(group == num_groups - 1, last_pool_bytes, pool_bytes)
    lanes = tl.arange(0, L)
    own_block = part * (L // 32) + tl.arange(0, L // 32)
    block, lane = part * (L // 32) + lanes // 32, lanes % 32
    tile_elems = tl.minimum(numel - t.to(tl.int64) * TILE_ELEMS, TILE_ELEMS).to(tl.int32)
    present = tl.minimum(tl.maximum(tile_elems - block * 1024, 0), 1024)
    full = tile_elems == TILE_ELEMS
    nothing = tl.zeros((L,), tl.uint32)
    for j in tl.static_range(4):
        first = 256 * j + 8 * lane
        s0 = tl.zeros((L,), tl.float32)
        s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
        r = 0
        while r < num_rows:
            if r == own_index:
                source = own + t.to(tl.int64) * TILE_ELEMS
                a0, a1, a2, a3, a4, a5, a6, a7 = load_elements(source, block, first, present, nothing, full, WIDE, DT)
            else:
                frame = frames + tl.cast(r, tl.int64) * frame_stride
                tile = frame + tiles_offset + t.to(tl.int64) * tile_bytes
                state, bad = block_state(frame, tile, num_blocks, capacity, codes_offset, extra_offset, room, own_block, block, lane, L, DT)
                if tl.program_id(0) == 0:
                    bad |= check_header(frame, h0, h1, h2, h3, h4)
                if bad > 0:
                    tl.atomic_or(errors_at, bad)
                a0, a1, a2, a3, a4, a5, a6, a7 = decode_quarter(tile, frame + pools_offset + group.to(tl.int64) * pool_bytes, room, state,
                                                                escapes_offset, capacity, planes_offset, block, lane, num_blocks, j, L, DT)
            start = r == 0
            s0 = add(s0, a0, start, DT)
            s1 = add(s1, a1, start, DT)
            s2 = add(s2, a2, start, DT)
            s3 = add(s3, a3, start, DT)
            s4 = add(s4, a4, start, DT)
            s5 = add(s5, a5, start, DT)
            s6 = add(s6, a6, start, DT)
            s7 = add(s7, a7, start, DT)
            r += 1
        store_quarter(out + t.to(tl.int64) * TILE_ELEMS, block, first, present, full, rounded(s0, DT), rounded(s1, DT), rounded(s2, DT),
                      rounded(s3, DT), rounded(s4, DT), rounded(s5, DT), rounded(s6, DT), rounded(s7, DT), WIDE, DT)


@triton.jit
def add(total, bits, start, DT: tl.constexpr):
    value = to_float(bits, DT)
    return tl.where(start, value, total + value)


@triton.jit
def load_elements(row, block, first, present, filler, full, WIDE: tl.constexpr, DT: tl.constexpr):
    """load_quarter with every element by itself."""
    l0, h0, l1, h1, l2, h2, l3, h3 = blk.load_quarter(row, block, first, present, filler, full, WIDE, DT)
    if DT != 3:
        h0, h1, h2, h3 = l0 >> 16, l1 >> 16, l2 >> 16, l3 >> 16
        l0, l1, l2, l3 = l0 & 0xFFFF, l1 & 0xFFFF, l2 & 0xFFFF, l3 & 0xFFFF
    return l0, h0, l1, h1, l2, h2, l3, h3
