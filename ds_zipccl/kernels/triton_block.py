"""Blocks in Triton: what csrc/zipccl/block.cuh does for a warp, for ``L = 32 * blocks`` lanes at once (docs/format.md, sections 2 to 5).

Tensors of shape [L] hold one number a lane; a program has L threads, so a lane is a thread and nothing but sums over lanes leaves a thread.
u32 words hold two 16-bit halves. ``DT`` is the dtype code: 1 BF16, 2 FP16, 3 FP32. Exponents and codes of a pair are worked on at bit
``at(DT)`` of both halves: in place for 16-bit types, at bit 0 for FP32.
"""
import triton
import triton.language as tl

from ds_zipccl.kernels.triton_words import add_min_halves, byte_perm, dot_bytes, popcount

GROUP_TILES = tl.constexpr(256)
TILE_ELEMS = tl.constexpr(32768)
BOTH = tl.constexpr(0x00010001)


@triton.constexpr_function
def at(DT):
    return 7 if DT == 1 else 10 if DT == 2 else 0


@triton.constexpr_function
def exponent_mask(DT):
    return 0x1F if DT == 2 else 0xFF


@triton.constexpr_function
def top_lo(DT):
    return 24 if DT == 2 else 248


@triton.jit
def bits32(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def u32_at(frame, offset):
    return (frame + offset).to(tl.pointer_type(tl.uint32))


# ---- raw data: a lane's 8 elements of quarter j as 4 pairs, each a word of two halves (16-bit types: low only) or two words (FP32)

@triton.jit
def split_4(words, L: tl.constexpr):
    """[L, 4] -> four [L]."""
    even, odd = tl.split(tl.reshape(words, (L, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def join_4(a, b, c, d, L: tl.constexpr):
    """Inverse of split_4."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (L, 4))


@triton.jit
def word_places(row, block, lane, L: tl.constexpr, DT: tl.constexpr):
    """Pointers to the first 4 words of each lane [L, 4]; ``row`` is aligned to 16 bytes."""
    words: tl.constexpr = 8 if DT == 3 else 4              # of a lane, in a quarter
    return row.to(tl.pointer_type(tl.int32)) + ((block * 32 * 4 + lane) * words)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def element(row, index, present, DT: tl.constexpr):
    """Bits of elements ``index`` of a tile as u32; those from ``present`` on read as 0."""
    v = tl.load(row + index, mask=index < present, other=0)
    return bits32(v) if DT == 3 else v.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def element_pair(row, index, present, DT: tl.constexpr):
    low, high = element(row, index, present, DT), element(row, index + 1, present, DT)
    if DT != 3:
        low |= high << 16
        high = low
    return low, high


@triton.jit
def load_quarter(row, block, lane, present, wide, J: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """The 8 words (low, high) of quarter J. ``present``: elements of the tile, others read as 0; ``wide``: none is absent in these
    blocks, and the row is 16-byte aligned."""
    if wide:
        if DT == 3:
            places = word_places(row, block, lane, L, DT) + 256 * J
            l0, h0, l1, h1 = split_4(bits32(tl.load(places)), L)
            l2, h2, l3, h3 = split_4(bits32(tl.load(places + 4)), L)
        else:
            l0, l1, l2, l3 = split_4(bits32(tl.load(word_places(row, block, lane, L, DT) + 128 * J)), L)
            h0, h1, h2, h3 = l0, l1, l2, l3
    else:
        index = block * 1024 + 256 * J + 8 * lane
        l0, h0 = element_pair(row, index, present, DT)
        l1, h1 = element_pair(row, index + 2, present, DT)
        l2, h2 = element_pair(row, index + 4, present, DT)
        l3, h3 = element_pair(row, index + 6, present, DT)
    return l0, h0, l1, h1, l2, h2, l3, h3


@triton.jit
def store_element(row, index, present, bits, DT: tl.constexpr):
    value = bits.to(tl.int32, bitcast=True) if DT == 3 else bits.to(tl.uint16).to(tl.int16, bitcast=True)
    tl.store(row + index, value, mask=index < present)


@triton.jit
def store_pair(row, index, present, low, high, DT: tl.constexpr):
    store_element(row, index, present, low, DT)
    store_element(row, index + 1, present, high if DT == 3 else low >> 16, DT)


@triton.jit
def store_quarter(row, block, lane, present, wide, x, J: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """Inverse of load_quarter."""
    l0, h0, l1, h1, l2, h2, l3, h3 = x
    if wide:
        if DT == 3:
            places = word_places(row, block, lane, L, DT) + 256 * J
            tl.store(places, join_4(l0, h0, l1, h1, L).to(tl.int32, bitcast=True))
            tl.store(places + 4, join_4(l2, h2, l3, h3, L).to(tl.int32, bitcast=True))
        else:
            tl.store(word_places(row, block, lane, L, DT) + 128 * J, join_4(l0, l1, l2, l3, L).to(tl.int32, bitcast=True))
    else:
        index = block * 1024 + 256 * J + 8 * lane
        store_pair(row, index, present, l0, h0, DT)
        store_pair(row, index + 2, present, l1, h1, DT)
        store_pair(row, index + 4, present, l2, h2, DT)
        store_pair(row, index + 6, present, l3, h3, DT)


@triton.jit
def fill_quarter(x, block, lane, present, filler, J: tl.constexpr, DT: tl.constexpr):
    """Gives absent elements the bits ``filler``."""
    l0, h0, l1, h1, l2, h2, l3, h3 = x
    index = block * 1024 + 256 * J + 8 * lane
    if DT == 3:
        l0, h0 = tl.where(index < present, l0, filler), tl.where(index + 1 < present, h0, filler)
        l1, h1 = tl.where(index + 2 < present, l1, filler), tl.where(index + 3 < present, h1, filler)
        l2, h2 = tl.where(index + 4 < present, l2, filler), tl.where(index + 5 < present, h2, filler)
        l3, h3 = tl.where(index + 6 < present, l3, filler), tl.where(index + 7 < present, h3, filler)
    else:
        upper = filler << 16
        l0 |= tl.where(index < present, 0, filler) | tl.where(index + 1 < present, 0, upper)
        l1 |= tl.where(index + 2 < present, 0, filler) | tl.where(index + 3 < present, 0, upper)
        l2 |= tl.where(index + 4 < present, 0, filler) | tl.where(index + 5 < present, 0, upper)
        l3 |= tl.where(index + 6 < present, 0, filler) | tl.where(index + 7 < present, 0, upper)
        h0, h1, h2, h3 = l0, l1, l2, l3
    return l0, h0, l1, h1, l2, h2, l3, h3


# ---- windows and codes

@triton.jit
def exponents(low, high, DT: tl.constexpr):
    """The exponents of a pair, at bit at(DT) of both halves."""
    if DT == 3:
        return byte_perm(low << 1, high << 1, 0x0703) & 0x00FF00FF
    else:
        return low & (exponent_mask(DT) << at(DT)) * BOTH


@triton.jit
def four_exponents(l0, h0, l1, h1, DT: tl.constexpr):
    """The exponents of two pairs, one a byte, in no order that matters."""
    if DT == 3:
        return byte_perm(byte_perm(l0 << 1, h0 << 1, 0x0073), byte_perm(l1 << 1, h1 << 1, 0x0073), 0x5410)
    elif DT == 2:
        return byte_perm(l0 >> 10, l1 >> 10, 0x6420) & 0x1F1F1F1F
    else:
        return byte_perm(l0 << 1, l1 << 1, 0x7531)


@triton.jit
def add_statistics(totals, l0, h0, l1, h1, DT: tl.constexpr):
    """Adds two pairs to the sums of exponents, of their squares, and 128 times the number of non-zero ones."""
    total, squares, count = totals
    e = four_exponents(l0, h0, l1, h1, DT)
    ones = tl.full(e.shape, 0x01010101, tl.uint32)
    nonzero = (((e & 0x7F7F7F7F) + 0x7F7F7F7F) | e) & 0x80808080
    return dot_bytes(e, ones, total), dot_bytes(e, e, squares), dot_bytes(nonzero, ones, count)


@triton.jit
def quarter_statistics(totals, x, DT: tl.constexpr):
    l0, h0, l1, h1, l2, h2, l3, h3 = x
    return add_statistics(add_statistics(totals, l0, h0, l1, h1, DT), l2, h2, l3, h3, DT)


@triton.jit
def sum_of_blocks(per_lane, L: tl.constexpr):
    """u32 [L] -> int32 [L // 32]."""
    return tl.sum(tl.reshape(per_lane.to(tl.int32, bitcast=True), (L // 32, 32)), 1)


@triton.jit
def of_lanes(per_block, L: tl.constexpr):
    """[L // 32] -> [L]."""
    return tl.reshape(tl.broadcast_to(per_block[:, None], (L // 32, 32)), (L,))


@triton.jit
def block_sums(totals, L: tl.constexpr):
    """Of blocks [L // 32], from their lanes' statistics: the sum, number and sum of squares of the non-zero exponents."""
    total, squares, count = totals
    both = sum_of_blocks(total | count << 13, L).to(tl.uint32, bitcast=True)            # sums: below 2^18; counts: 128 times 2^10 at most
    return (both & 0xFFFFF).to(tl.int32), (both >> 20).to(tl.int32), sum_of_blocks(squares, L)


@triton.jit
def is_spread(total, n, squares):
    s = total.to(tl.int64)
    return n.to(tl.int64) * squares.to(tl.int64) - s * s > (3 * n * n).to(tl.int64)


@triton.jit
def divide(a, b):
    """Quotient and rest of int32 a >= 0, below 2^24, by b > 0."""
    guess = (a.to(tl.float32) / b.to(tl.float32)).to(tl.int32)                          # may be off by one
    rest = a - guess * b
    step = (rest >= b).to(tl.int32) - (rest < 0).to(tl.int32)
    return guess + step, rest - step * b


@triton.jit
def choose_window(totals, present, given_lo, L: tl.constexpr, DT: tl.constexpr):
    """(lo, mode) of blocks [L // 32] from their lanes' statistics and present elements (format.md, section 5)."""
    total, n, squares = block_sums(totals, L)
    mode = (1024 * (present - n) > 26 * present).to(tl.int32)
    spread = is_spread(total, n, squares)
    offset = tl.where(mode == 1, tl.where(spread, 29, 34), tl.where(spread, 36, 43))
    lo, _ = divide(tl.maximum(10 * total - offset * n, 0), tl.maximum(10 * n, 1))
    lo = tl.where(given_lo >= 0, given_lo + mode, lo)
    return tl.minimum(lo, top_lo(DT)), mode


@triton.jit
def code(e, minus_lo, limit, zero_mode, ZEROS: tl.constexpr, DT: tl.constexpr):
    """Codes of a pair at bit at(DT) of the halves, other bits undefined, from its exponents. ``minus_lo``: -lo at that bit; ``limit``: 8
    there, 7 in zero mode; ``zero_mode``: all ones in such blocks, else 0. Without ZEROS there are no such blocks."""
    c = add_min_halves(e, minus_lo, limit)
    if ZEROS:
        one: tl.constexpr = (1 << at(DT)) * 0x10001
        outside = ((c + one) >> 3) & one & zero_mode
        zero = (add_min_halves(e, tl.zeros_like(e), tl.full(e.shape, one, tl.uint32)) ^ one) & zero_mode
        c = (c - outside * 7) | zero * 7
    return c


@triton.jit
def shift_left(x, BY: tl.constexpr):
    return x << BY if BY >= 0 else x >> -BY


@triton.jit
def put_code(words, c, P: tl.constexpr, AT: tl.constexpr):
    """Adds the codes of pair P, at bit AT of the halves of ``c`` (other bits may be set), to the lane's three words."""
    w0, w1, w2 = words
    fields: tl.constexpr = (7 << (3 * (P // 3))) * BOTH
    if P == 15:
        w0 |= shift_left(c, 15 - AT) & 0x80008000
        w1 |= shift_left(c, 14 - AT) & 0x80008000
        w2 |= shift_left(c, 13 - AT) & 0x80008000
    elif P % 3 == 0:
        w0 |= shift_left(c, 3 * (P // 3) - AT) & fields
    elif P % 3 == 1:
        w1 |= shift_left(c, 3 * (P // 3) - AT) & fields
    else:
        w2 |= shift_left(c, 3 * (P // 3) - AT) & fields
    return w0, w1, w2


@triton.jit
def get_code(words, P: tl.constexpr, AT: tl.constexpr):
    """Inverse of put_code, other bits zero."""
    w0, w1, w2 = words
    fields: tl.constexpr = (7 << AT) * BOTH
    if P == 15:
        return (shift_left(w0, AT - 15) & (1 << AT) * BOTH) | (shift_left(w1, AT - 14) & (2 << AT) * BOTH) | \
            (shift_left(w2, AT - 13) & (4 << AT) * BOTH)
    elif P % 3 == 0:
        return shift_left(w0, AT - 3 * (P // 3)) & fields
    elif P % 3 == 1:
        return shift_left(w1, AT - 3 * (P // 3)) & fields
    else:
        return shift_left(w2, AT - 3 * (P // 3)) & fields


@triton.jit
def load_if(places, exists, OTHER: tl.constexpr):
    """``exists``: None for all."""
    if exists is None:
        return tl.load(places)
    else:
        return tl.load(places, mask=exists, other=OTHER)


@triton.jit
def load_words(section, block, lane, exists):
    """A lane's three words of the codes, or of FP16's extra plane."""
    places = section + block * 96 + lane
    return load_if(places, exists, 0), load_if(places + 32, exists, 0), load_if(places + 64, exists, 0)


@triton.jit
def store_words(section, block, lane, exists, words):
    places = section + block * 96 + lane
    tl.store(places, words[0], mask=exists)
    tl.store(places + 32, words[1], mask=exists)
    tl.store(places + 64, words[2], mask=exists)


@triton.jit
def escape_mask(words):
    """Bit p + 16 h is set where the code of (p, h) is 0. Bits ascend in scan order."""
    w0, w1, w2 = words
    coded = ((w0 | w0 >> 1 | w0 >> 2) & 0x12491249) | ((w1 | w1 >> 1 | w1 >> 2) & 0x12491249) << 1 | \
        ((w2 | w2 >> 1 | w2 >> 2) & 0x12491249) << 2 | ((w0 | w1 | w2) & 0x80008000)
    return coded ^ 0xFFFFFFFF


@triton.jit
def count_before(mask, L: tl.constexpr):
    """Of each lane: escapes in the lanes of its block below it [L]; of each block: its escapes [L // 32]."""
    counts = tl.reshape(popcount(mask), (L // 32, 32))
    return tl.reshape(tl.cumsum(counts, 1) - counts, (L,)), tl.sum(counts, 1)


@triton.jit
def of_other_lane(x, index, L: tl.constexpr):
    """x of lane ``index`` (modulo 32) of each lane's block."""
    return tl.reshape(tl.gather(tl.reshape(x, (L // 32, 32)), tl.reshape(index & 31, (L // 32, 32)), 1), (L,))


@triton.jit
def bytes_of_lanes(x, place, L: tl.constexpr):
    """Bytes place .. place + 3 (below 128) of the 32 words x of each lane's block, as a word."""
    low, high = of_other_lane(x, place >> 2, L), of_other_lane(x, (place >> 2) + 1, L)
    return ((high.to(tl.uint64) << 32 | low.to(tl.uint64)) >> ((place & 3) * 8).to(tl.uint64)).to(tl.uint32)


# ---- remainders

@triton.jit
def remainder_words(l0, h0, l1, h1, PLANE: tl.constexpr, DT: tl.constexpr):
    """Byte PLANE of the remainders of two pairs."""
    if DT == 3:
        if PLANE == 2:
            mantissa = byte_perm(byte_perm(l0, h0, 0x0062), byte_perm(l1, h1, 0x0062), 0x5410)
            sign = byte_perm(byte_perm(l0, h0, 0x0073), byte_perm(l1, h1, 0x0073), 0x5410)
            return (mantissa & 0x7F7F7F7F) | (sign & 0x80808080)
        else:
            low = byte_perm(l0, h0, 0x5140)
            high = byte_perm(l1, h1, 0x5140)
            return byte_perm(low, high, 0x5410 if PLANE == 0 else 0x7632)
    elif DT == 2:
        return byte_perm(l0, l1, 0x6420)
    else:
        return (byte_perm(l0, l1, 0x6420) & 0x7F7F7F7F) | (byte_perm(l0, l1, 0x7531) & 0x80808080)


@triton.jit
def store_remainders(planes, block, lane, num_blocks, x, J: tl.constexpr, L: tl.constexpr, DT: tl.constexpr):
    """Of a quarter."""
    l0, h0, l1, h1, l2, h2, l3, h3 = x
    count: tl.constexpr = 3 if DT == 3 else 1
    two = tl.arange(0, 2)[None, :]
    places = planes + ((block * (128 * count) + lane) * 2)[:, None] + two
    exist = block[:, None] + 0 * two < num_blocks
    for plane in tl.static_range(count):
        pair = tl.join(remainder_words(l0, h0, l1, h1, plane, DT), remainder_words(l2, h2, l3, h3, plane, DT))
        tl.store(places + (256 * plane + 64 * J), pair, mask=exist)


@triton.jit
def remainder_top(low):
    """FP16: remainder bits 8..10 of a pair, as codes at bit 0."""
    return ((low >> 8) & 0x00030003) | ((low >> 13) & 0x00040004)


@triton.jit
def with_remainders(e, b0, b1, b2, tops, P: tl.constexpr, DT: tl.constexpr):
    """Words (low, high) of pair P from its exponents at bit at(DT) and the bytes of its and its neighbour's remainders, a word a plane."""
    odd: tl.constexpr = P % 2
    if DT == 1:
        low = e + byte_perm(b0 & 0x7F7F7F7F, b0 & 0x80808080, 0x7362 if odd else 0x5140)
        return low, low
    elif DT == 2:
        top = get_code(tops, P, 8)
        low = (e + byte_perm(b0, tl.zeros_like(b0), 0x4342 if odd else 0x4140)) | (top & 0x03000300) | (top & 0x04000400) << 5
        return low, low
    else:
        bytes01 = byte_perm(b0, b1, 0x7362 if odd else 0x5140)
        low = byte_perm(bytes01, b2, 0x6610 if odd else 0x4410)                          # byte 2 twice: its top bit is the sign
        high = byte_perm(bytes01, b2, 0x7732 if odd else 0x5532)
        return (low & 0x807FFFFF) | (e & 0xFF) << 23, (high & 0x807FFFFF) | (e >> 16) << 23
