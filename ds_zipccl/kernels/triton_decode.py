"""Decode in Triton: a program takes L // 32 blocks of one tile. Corruption is noted in ``errors_at``, with
the bits of csrc/zipccl/frame.cuh; no access leaves the frame or the output.

A block's escapes lie in scan order, so those of half 0 of a lane are neighbours, and those of half 1 come next. Up to four of each are held
in a word, one a byte: enough for all of a lane's 32 elements nearly always, and always for a quarter of them. What level 2 has in place of
escapes is in triton_level2_decode.py.
"""
import triton
import triton.language as tl

from ds_zipccl.kernels import triton_block as blk
from ds_zipccl.kernels import triton_level2 as level2
from ds_zipccl.kernels import triton_level2_decode as streams
from ds_zipccl.kernels.triton_block import GROUP_TILES, TILE_ELEMS, u32_at
from ds_zipccl.kernels.triton_launch import kernel
from ds_zipccl.kernels.triton_words import begin_in_turn, byte_perm, popcount, shift_add, take_byte_if

BAD_HEADER, BAD_BLOCK_COUNT, BAD_TILE_COUNT, BAD_WINDOW, BAD_SPILL = (tl.constexpr(1 << bit) for bit in range(5))


@triton.jit
def spill_offset_of(tile, pool_room):
    """At most pool_room, which is as wrong as more."""
    return tl.minimum(tl.load(u32_at(tile, 4)).to(tl.int64), pool_room).to(tl.int32)


@triton.jit
def escape_byte(places, place, wanted):
    """Escape number ``place`` of the tile, wherever it is."""
    slots, capacity, pool, pool_room, spill_offset, _ = places
    spilled = spill_offset + (place - capacity)
    valid = wanted & ((place < capacity) | (spilled < pool_room))
    return tl.load(tl.where(place < capacity, slots + place, pool + spilled), mask=valid, other=0).to(tl.uint32)


@triton.jit
def four_escapes(places, place, n):
    """The first n (four at most) escapes from number ``place`` on, one a byte."""
    return escape_byte(places, place, n > 0) | escape_byte(places, place + 1, n > 1) << 8 | \
        escape_byte(places, place + 2, n > 2) << 16 | escape_byte(places, place + 3, n > 3) << 24


@triton.jit
def put_escape(e, q, mask, BIT: tl.constexpr, DT: tl.constexpr):
    """Where bit BIT of mask is set, takes the first byte out of q for its exponent in e."""
    by: tl.constexpr = blk.at(DT) + BIT // 16 * 16
    return take_byte_if(mask, BIT, e, q, by, blk.exponent_mask(DT) << by)


@triton.jit
def without_zeros(e, c, zero_mode, DT: tl.constexpr):
    """Zero mode: exponents of code 7 become 0."""
    seven = ((c + (1 << blk.at(DT)) * 0x10001) >> (blk.at(DT) + 3)) & 0x00010001
    return e & ((seven * (((0x8000 >> blk.at(DT)) - 1) << blk.at(DT)) & zero_mode) ^ 0xFFFFFFFF)


@triton.jit
def plane_words(planes, block, lane, exists, num_blocks, J: tl.constexpr, PLANE: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """Remainder bytes of the lane's 8 elements of quarter J: two words."""
    count: tl.constexpr = 3 if DT == 3 else 1
    two = tl.arange(0, 2)[None, :]
    places = planes + (((block * (128 * count) + lane) * 2)[:, None] + two)
    if L == 32:
        return tl.split(tl.load(places + (256 * PLANE + 64 * J)))
    else:
        return tl.split(tl.load(places + (256 * PLANE + 64 * J), mask=block[:, None] + 0 * two < num_blocks, other=0))


@triton.jit
def load_stored(tile, sections, num_blocks, block, lane, L: tl.constexpr, DT: tl.constexpr, LEVEL: tl.constexpr):
    """What is stored of a block, escapes or its stream excepted: words of the codes, of FP16's extra plane, and of the planes, four
    quarters of each. A program of one block has work only if that exists."""
    codes_offset, extra_offset, planes_offset = sections
    exists = block < num_blocks if L > 32 else None
    if LEVEL == 2:
        codes = streams.load_codes(tile, codes_offset, block, lane, exists)
    else:
        codes = blk.load_words(u32_at(tile, codes_offset), block, lane, exists)
    tops = codes
    if DT == 2:
        tops = blk.load_words(u32_at(tile, extra_offset), block, lane, exists)
    planes = u32_at(tile, planes_offset)
    stored = ()
    for j in tl.static_range(4):
        x, y = plane_words(planes, block, lane, exists, num_blocks, j, 0, L, DT)
        if DT == 3:
            x1, y1 = plane_words(planes, block, lane, exists, num_blocks, j, 1, L, DT)
            x2, y2 = plane_words(planes, block, lane, exists, num_blocks, j, 2, L, DT)
            stored = stored + ((x, y, x1, y1, x2, y2),)
        else:
            stored = stored + ((x, y, x, y, x, y),)
    return codes, tops, stored


@triton.jit
def find_tile(frame, t, num_tiles, layout):
    """Where the parts of a tile are, from the numbers of a geometry that kernels get. Returns its address and blocks; its escape slots,
    their capacity, its group's sub-pool and the size of that; offsets of codes, extra plane and planes."""
    tiles_offset, tile_bytes, last_blocks, escapes, capacity, codes, extra, planes, last_escapes, last_capacity, last_codes, last_extra, \
        last_planes, pools_offset, pool_bytes, last_pool_bytes = layout
    last, group = t == num_tiles - 1, t // GROUP_TILES
    tile = tl.multiple_of(frame + (tiles_offset + t.to(tl.int64) * tile_bytes), 16)
    parts = (tl.multiple_of(tile + tl.where(last, last_escapes, escapes), 4), tl.where(last, last_capacity, capacity),
             frame + (pools_offset + group.to(tl.int64) * pool_bytes),
             tl.where(group == (num_tiles - 1) // GROUP_TILES, last_pool_bytes, pool_bytes))
    sections = (tl.multiple_of(tl.where(last, last_codes, codes), 128), tl.multiple_of(tl.where(last, last_extra, extra), 128),
                tl.multiple_of(tl.where(last, last_planes, planes), 128))
    return tile, tl.where(last, last_blocks, 32), parts, sections


@triton.jit
def load_heads(tile, num_blocks, lane):
    """The header of block number ``lane`` of the tile, 0 if there is none [L]; and the number of the tile's escapes."""
    return tl.load(u32_at(tile, 16) + lane, mask=lane < num_blocks, other=0), tl.load(u32_at(tile, 0))


@triton.jit
def block_heads(heads, block, lane, L: tl.constexpr):
    """The header of each lane's block, 0 if there is none, and the escapes (or bytes of streams) of the tile's blocks before it [L]."""
    return blk.of_lanes(blk.sum_of_blocks(tl.where(lane == block, heads, 0), L), L).to(tl.uint32, bitcast=True), \
        blk.of_lanes(blk.sum_of_blocks(tl.where(lane < block, heads >> 16, 0), L), L)


@triton.jit
def block_start(heads, slots, capacity, block, lane, L: tl.constexpr):
    """From the headers of the tile [L], of each lane's block: its header; the escapes (or bytes of streams) before it; the word number
    ``lane`` of those of its own, and whether they all are in the block's 32 such words, which is the rule."""
    head, earlier = block_heads(heads, block, lane, L)
    count = (head >> 16).to(tl.int32)
    size, end = (earlier & 3) + count, earlier + count
    near = tl.load(u32_at(slots, 0) + ((earlier >> 2) + lane), mask=(4 * lane < size) & (end <= capacity), other=0)
    return head, earlier, near, (size <= 128) & (end <= capacity)


@triton.jit
def note_corruption(num, places, head, earlier, found, position, errors_at, TOP_LO: tl.constexpr, TOP_MODE: tl.constexpr,
                    UNIT: tl.constexpr):
    """``num``, ``found`` [L]: the escapes (or bytes of streams) of the tile by its header, and of each lane's block by its codes; spills
    start at multiples of UNIT."""
    slots, capacity, pool, pool_room, spill_offset, spills = places
    num_blocks, block, lane, has_end = position
    lo, mode, count = head & 0xFF, (head >> 8) & 0xFF, (head >> 16).to(tl.int32)
    end = earlier + count                                                    # of the block's escapes
    bad = tl.where(found != count, BAD_BLOCK_COUNT, 0)
    bad |= tl.where((mode > TOP_MODE) | (lo > TOP_LO), BAD_WINDOW, 0)
    if has_end:
        bad |= tl.where((block == num_blocks - 1) & (num.to(tl.int64) != end), BAD_TILE_COUNT, 0)
    if spills:
        bad |= tl.where((end > capacity) & ((spill_offset + (end - capacity) > pool_room) | (spill_offset % UNIT != 0)), BAD_SPILL, 0)
    tl.atomic_or(errors_at + lane * 0, bad, mask=(block < num_blocks) & (lane == 0) & (bad != 0), sem="relaxed")


@triton.jit
def block_state(num, start, places, codes, position, errors_at, L: tl.constexpr, DT: tl.constexpr):
    """Notes corruption in the headers. Returns the state of each lane: lo at bit at(DT) of both halves, all ones where the block has zero
    mode, the mask of its escapes, the number of the tile's escapes before those, the first four of both halves if they are near; and
    whether any of these blocks is unusual: it has zero mode, or escapes that are not near, or more than four in one half of a lane."""
    num_blocks, block, lane, _ = position
    head, earlier, near, is_near = start
    mask = blk.escape_mask(codes)
    if L > 32:
        mask = tl.where(block < num_blocks, mask, 0)
    before, found = blk.count_before(mask, L)
    note_corruption(num, places, head, earlier, blk.of_lanes(found, L), position, errors_at, blk.top_lo(DT), 1, 1)
    place = earlier + before
    lo, mode = head & 0xFF, (head >> 8) & 0xFF
    n0, n1 = popcount(mask & 0xFFFF), popcount(mask >> 16)
    unusual = (n0 > 4) | (n1 > 4) | (is_near == 0) | (mode == 1)
    zero_mode = tl.where(mode == 1, 0xFFFFFFFF, 0).to(tl.uint32)
    at = before + (earlier & 3)
    nears = (blk.bytes_of_lanes(near, at, L), blk.bytes_of_lanes(near, at + n0, L))
    return ((lo << blk.at(DT)) * 0x10001, zero_mode, mask, place, nears), tl.max(unusual.to(tl.int32), 0) > 0


@triton.jit
def block_state2(num, start, places, codes, position, errors_at, L: tl.constexpr):
    """The same at level 2: the state that streams.decode_quarter takes. Blocks with raw exponents are unusual."""
    head, earlier, near, is_near = start
    far = tl.min(is_near.to(tl.int32), 0) == 0
    second, rest, queues, raws, length, num_raws = streams.streams_of(places, earlier, near, far, codes, L)
    note_corruption(num, places, head, earlier, length, position, errors_at, level2.TOP_LO, level2.TOP_MODE, 4)
    masks = (level2.zero_fields(codes[0]), level2.zero_fields(codes[1]))
    tables = streams.tables_of(head & 0xFF, (head >> 8) & 0xFF)
    return ((codes[0] | second[0], codes[1] | second[1]), masks, tables, rest, queues, raws), tl.max(num_raws, 0) > 0


@triton.jit
def any_block_state(tile, num, start, places, codes, position, errors_at, L: tl.constexpr, DT: tl.constexpr, LEVEL: tl.constexpr):
    """The state, whether blocks are unusual, and ``places`` (slots, their capacity, the group's sub-pool and its size) with the offset of
    the tile's spill in it and whether there is one."""
    slots, capacity, pool, room = places
    spills, spill_offset = num.to(tl.int64) > capacity, 0
    if spills:
        spill_offset = spill_offset_of(tile, room)
    places = (slots, capacity, pool, room, spill_offset, spills)
    if LEVEL == 2:
        state, unusual = block_state2(num, start, places, codes, position, errors_at, L)
    else:
        state, unusual = block_state(num, start, places, codes, position, errors_at, L, DT)
    return state, unusual, places


@triton.jit
def decode_pair(stored, tops, e, mask, q0, q1, P: tl.constexpr, DT: tl.constexpr):
    e, q0 = put_escape(e, q0, mask, P, DT)
    e, q1 = put_escape(e, q1, mask, P + 16, DT)
    x, y, x1, y1, x2, y2 = stored
    if P % 4 < 2:
        low, high = blk.with_remainders(e, x, x1, x2, tops, P, DT)
    else:
        low, high = blk.with_remainders(e, y, y1, y2, tops, P, DT)
    return low, high, q0, q1


@triton.jit
def quarter_escapes(places, mask, place, J: tl.constexpr):
    """Up to four escapes of both halves of quarter J, wherever they are."""
    earlier: tl.constexpr = (1 << (4 * J)) - 1
    return four_escapes(places, place + popcount(mask & earlier), popcount((mask >> (4 * J)) & 0xF)), \
        four_escapes(places, place + popcount(mask & (0xFFFF | earlier << 16)), popcount((mask >> (4 * J + 16)) & 0xF))


@triton.jit
def add_code(base, words, P: tl.constexpr):
    """BF16: adds the code of pair P to the exponents in ``base``."""
    k: tl.constexpr = P % 3
    bit: tl.constexpr = 3 * (P // 3)
    if P == 15:
        return base + blk.get_code(words, P, 7)
    elif bit <= 6:
        return shift_add(words[k] & (7 << bit) * 0x10001, 7 - bit, base)
    else:
        return shift_add((words[k] >> 5) & (7 << (bit - 5)) * 0x10001, 12 - bit, base)


@triton.jit
def put_escapes(word, mask, q0, q1, P: tl.constexpr):
    word, q0 = put_escape(word, q0, mask, P, 1)
    word, q1 = put_escape(word, q1, mask, P + 16, 1)
    return word, q0, q1


@triton.jit
def decode_quarter_bf16(stored, codes, state, places, q0, q1, unusual, J: tl.constexpr):
    """decode_quarter for BF16, with fewer instructions: the window's base comes with the remainders, escapes are put into whole words."""
    lo, zero_mode, mask, place, _ = state
    x, y = stored[0], stored[1]
    odd, half = lo & 0x00800080, (lo >> 8) & 0x007F007F
    odd, half = odd * 0x101, half * 0x101
    x0, x1 = (x & 0x7F7F7F7F) | odd, (x & 0x80808080) | half
    y0, y1 = (y & 0x7F7F7F7F) | odd, (y & 0x80808080) | half
    l0 = add_code(byte_perm(x0, x1, 0x5140), codes, 4 * J)
    l1 = add_code(byte_perm(x0, x1, 0x7362), codes, 4 * J + 1)
    l2 = add_code(byte_perm(y0, y1, 0x5140), codes, 4 * J + 2)
    l3 = add_code(byte_perm(y0, y1, 0x7362), codes, 4 * J + 3)
    if unusual:
        l0 = without_zeros(l0, blk.get_code(codes, 4 * J, 7), zero_mode, 1)
        l1 = without_zeros(l1, blk.get_code(codes, 4 * J + 1, 7), zero_mode, 1)
        l2 = without_zeros(l2, blk.get_code(codes, 4 * J + 2, 7), zero_mode, 1)
        l3 = without_zeros(l3, blk.get_code(codes, 4 * J + 3, 7), zero_mode, 1)
        q0, q1 = quarter_escapes(places, mask, place, J)
    l0, q0, q1 = put_escapes(l0, mask, q0, q1, 4 * J)
    l1, q0, q1 = put_escapes(l1, mask, q0, q1, 4 * J + 1)
    l2, q0, q1 = put_escapes(l2, mask, q0, q1, 4 * J + 2)
    l3, q0, q1 = put_escapes(l3, mask, q0, q1, 4 * J + 3)
    return (l0, l0, l1, l1, l2, l2, l3, l3), q0, q1


@triton.jit
def decode_quarter(stored, codes, tops, state, places, q0, q1, unusual, J: tl.constexpr, DT: tl.constexpr):
    """The words (low, high) of the lane's 8 elements of quarter J, and the escapes left in q0 and q1. If ``unusual`` (a number or a
    constant; see block_state), q0 and q1 are not used but found for each quarter, and blocks may have zero mode."""
    if DT == 1:
        return decode_quarter_bf16(stored, codes, state, places, q0, q1, unusual, J)
    else:
        return decode_any_quarter(stored, codes, tops, state, places, q0, q1, unusual, J, DT)


@triton.jit
def decode_any_quarter(stored, codes, tops, state, places, q0, q1, unusual, J: tl.constexpr, DT: tl.constexpr):
    lo, zero_mode, mask, place, _ = state
    c0, c1 = blk.get_code(codes, 4 * J, blk.at(DT)), blk.get_code(codes, 4 * J + 1, blk.at(DT))
    c2, c3 = blk.get_code(codes, 4 * J + 2, blk.at(DT)), blk.get_code(codes, 4 * J + 3, blk.at(DT))
    e0, e1, e2, e3 = c0 + lo, c1 + lo, c2 + lo, c3 + lo
    if unusual:
        e0, e1 = without_zeros(e0, c0, zero_mode, DT), without_zeros(e1, c1, zero_mode, DT)
        e2, e3 = without_zeros(e2, c2, zero_mode, DT), without_zeros(e3, c3, zero_mode, DT)
        q0, q1 = quarter_escapes(places, mask, place, J)
    l0, h0, q0, q1 = decode_pair(stored, tops, e0, mask, q0, q1, 4 * J, DT)
    l1, h1, q0, q1 = decode_pair(stored, tops, e1, mask, q0, q1, 4 * J + 1, DT)
    l2, h2, q0, q1 = decode_pair(stored, tops, e2, mask, q0, q1, 4 * J + 2, DT)
    l3, h3, q0, q1 = decode_pair(stored, tops, e3, mask, q0, q1, 4 * J + 3, DT)
    return (l0, h0, l1, h1, l2, h2, l3, h3), q0, q1


@triton.jit
def check_header(frame, h0, h1, h2, h3, h4, errors_at, DT: tl.constexpr, LEVEL: tl.constexpr):
    i = tl.arange(0, 32)
    word = tl.load(u32_at(frame, 0) + i).to(tl.int32, bitcast=True)
    expected = tl.where(i == 0, h0, tl.where(i == 1, h1, tl.where(i == 2, h2, tl.where(i == 3, h3, tl.where(i == 4, h4, 0)))))
    bad = tl.where(i == 5, (word & 65536) != 0, word != expected.to(tl.int32))
    # Byte 7, the given window, is the writer's: any valid one will do, at level 2 none.
    top: tl.constexpr = 0 if LEVEL == 2 else blk.top_lo(DT) + 1
    bad = tl.where(i == 1, (((word ^ expected.to(tl.int32)) & 0xFFFFFF) != 0) | (((word >> 24) & 0xFF) > top), bad)
    if tl.max(bad.to(tl.int32), 0) > 0:
        tl.atomic_or(errors_at, BAD_HEADER, sem="relaxed")


@triton.jit
def decode_and_store(target, tile_elems, wide, loaded, state, places, block, lane, UNUSUAL: tl.constexpr, L: tl.constexpr,
                     DT: tl.constexpr, LEVEL: tl.constexpr):
    codes, tops, stored = loaded
    if LEVEL == 2:
        for j in tl.static_range(4):
            x, state = streams.decode_quarter(stored[j], state, places, UNUSUAL, j)
            blk.store_quarter(target, block, lane, tile_elems, wide, x, j, L, DT)
    else:
        q0, q1 = state[4]
        for j in tl.static_range(4):
            x, q0, q1 = decode_quarter(stored[j], codes, tops, state, places, q0, q1, UNUSUAL, j, DT)
            blk.store_quarter(target, block, lane, tile_elems, wide, x, j, L, DT)


@kernel
def decode(frames, out, errors_at, row_stride: tl.int64, frame_stride: tl.int64, skip: tl.int32, numel: tl.int64, num_tiles: tl.int32,
           tiles_offset: tl.int32, tile_bytes: tl.int32, last_blocks: tl.int32, escapes_offset: tl.int32, capacity: tl.int32,
           codes_offset: tl.int32, extra_offset: tl.int32, planes_offset: tl.int32, last_escapes_offset: tl.int32,
           last_capacity: tl.int32, last_codes_offset: tl.int32, last_extra_offset: tl.int32, last_planes_offset: tl.int32,
           pools_offset: tl.int64, pool_bytes: tl.int32, last_pool_bytes: tl.int32, h0: tl.int32, h1: tl.int32, h2: tl.int32, h3: tl.int32,
           h4: tl.int32, aligned: tl.int32, L: tl.constexpr, DT: tl.constexpr, LEVEL: tl.constexpr):
    """Grid (tiles * 32 / (L / 32), or 1, rows without the skipped one). aligned: rows of out start on 16-byte addresses."""
    begin_in_turn()
    per_tile: tl.constexpr = 1024 // L
    t, part, row = tl.program_id(0) // per_tile, tl.program_id(0) % per_tile, tl.program_id(1)
    row += ((skip >= 0) & (row >= skip)).to(tl.int32)
    frame = tl.multiple_of(frames + row.to(tl.int64) * frame_stride, 16)
    if tl.program_id(0) == 0:
        check_header(frame, h0, h1, h2, h3, h4, errors_at, DT, LEVEL)
    layout = (tiles_offset, tile_bytes, last_blocks, escapes_offset, capacity, codes_offset, extra_offset, planes_offset,
              last_escapes_offset, last_capacity, last_codes_offset, last_extra_offset, last_planes_offset, pools_offset, pool_bytes,
              last_pool_bytes)
    tile, num_blocks, parts, sections = find_tile(frame, t, num_tiles, layout)
    if (t < num_tiles) & (part * (L // 32) < num_blocks):
        lanes = tl.arange(0, L)
        block, lane = part * (L // 32) + lanes // 32, lanes % 32
        position = (num_blocks, block, lane, (part + 1) * (L // 32) >= num_blocks)
        heads, num = load_heads(tile, num_blocks, lane)
        loaded = load_stored(tile, sections, num_blocks, block, lane, L, DT, LEVEL)
        start = block_start(heads, parts[0], parts[1], block, lane, L)
        state, unusual, places = any_block_state(tile, num, start, parts, loaded[0], position, errors_at, L, DT, LEVEL)
        tile_elems = tl.minimum(numel - t.to(tl.int64) * TILE_ELEMS, TILE_ELEMS).to(tl.int32)
        target = tl.multiple_of(out + (row.to(tl.int64) * row_stride + t.to(tl.int64) * TILE_ELEMS), 16)
        wide = (aligned != 0) & (tile_elems >= (part + 1) * (32 * L))
        if unusual | (wide == 0):
            decode_and_store(target, tile_elems, wide, loaded, state, places, block, lane, True, L, DT, LEVEL)
        else:
            decode_and_store(target, tile_elems, True, loaded, state, places, block, lane, False, L, DT, LEVEL)
