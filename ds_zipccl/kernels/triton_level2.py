"""Level 2 in Triton (docs/format.md, section 9): what csrc/zipccl/level2.cuh does for a warp, for ``L`` lanes at once. BF16 alone.

As there, a lane's 32 elements are fields of 2 bits in two words k: element (j, k, w, h) is field 4 b + j of word k, with b = w + 2 h. Sets
of elements are masks of their fields' lower bits; a *combined* mask of both words has bit 8 b + 2 j + k. Nibbles that go to a stream, or
come from it, are in four *queues*, one for each b: a lane has 8 elements at most in each, so a queue is a word.
"""
import triton
import triton.language as tl

from ds_zipccl.kernels import triton_block as blk
from ds_zipccl.kernels.triton_words import add_min_halves, byte_perm, look_up, popcount

FIELDS = tl.constexpr(0x55555555)
EVERY_BYTE = tl.constexpr(0x01010101)
TOP_LO, TOP_MODE = tl.constexpr(250), tl.constexpr(5)
CLASS_B, ZERO_SECOND, ZERO_FIRST = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)               # the bits of a block mode


@triton.jit
def choose_window(totals, present, L: tl.constexpr):
    """(lo, mode) of blocks [L // 32] from their lanes' statistics and present elements."""
    total, n, squares = blk.block_sums(totals, L)
    zeros = 1024 * (present - n)
    mode = tl.where(zeros > 170 * present, ZERO_FIRST, tl.where(zeros > 26 * present, ZERO_SECOND, 0))
    spread = blk.is_spread(total, n, squares)
    above = 32 * total - tl.where(spread, 31, 33) * n
    base, rest = blk.divide(tl.maximum(above, 0), tl.maximum(32 * n, 1))
    usable = (n > 0) & (above >= 0)
    class_b = (usable & (rest < 13 * n) & (spread == 0)).to(tl.int32)
    lo = tl.where(usable, base - 1 - class_b, 0)
    return tl.minimum(tl.maximum(lo, 0), TOP_LO), mode | class_b


# ---- fields

@triton.jit
def zero_fields(f):
    return ((f | f >> 1) ^ 0xFFFFFFFF) & FIELDS


@triton.jit
def bits_up_to(mask):
    """Byte i: twice the number of fields in bytes 0..i of a mask."""
    c = (mask & 0x33333333) + ((mask >> 2) & 0x33333333)
    return ((c + (c >> 4)) & 0x0F0F0F0F) * 0x02020202


@triton.jit
def compress_word(v, mask, bits):
    """The masked fields of v, one behind the other from bit 0; the others must be zero. ``bits``: bits_up_to(mask)."""
    absent = mask ^ 0xFFFFFFFF
    q2, q1, q0 = (absent & 0x10101010) * 0x0F, (absent & 0x04040404) * 0x3F, (absent & 0x01010101) * 0xFF
    v = (v & (q2 ^ 0xFFFFFFFF)) | ((v >> 2) & 0x3F3F3F3F & q2)
    v = (v & (q1 ^ 0xFFFFFFFF)) | ((v >> 2) & 0x3F3F3F3F & q1)
    v = (v & (q0 ^ 0xFFFFFFFF)) | ((v >> 2) & 0x3F3F3F3F & q0)
    return (v & 0xFF) | ((v >> 8) & 0xFF) << (bits & 0xFF) | ((v >> 16) & 0xFF) << ((bits >> 8) & 0xFF) | (v >> 24) << ((bits >> 16) & 0xFF)


@triton.jit
def expand_word(packed, mask, bits):
    """Inverse of compress_word; what is behind the last field is ignored."""
    low = byte_perm(packed, packed >> (bits & 0xFF), 0x0040)
    high = byte_perm(packed >> ((bits >> 8) & 0xFF), packed >> ((bits >> 16) & 0xFF), 0x0040)
    v = byte_perm(low, high, 0x5410)
    absent = mask ^ 0xFFFFFFFF
    q0, q1, q2 = (absent & 0x01010101) * 0xFC, (absent & 0x04040404) * 0x3C, (absent & 0x10101010) * 0x0C
    v = (v & (q0 ^ 0xFFFFFFFF)) | ((v << 2) & q0)
    v = (v & (q1 ^ 0xFFFFFFFF)) | ((v << 2) & q1)
    v = (v & (q2 ^ 0xFFFFFFFF)) | ((v << 2) & q2)
    return v & (mask | mask << 1)


@triton.jit
def first_nibble(num_second):
    """Where a stream's nibbles begin, in nibbles."""
    return (num_second + 1) >> 1


@triton.jit
def first_raw(num_second, num_nibbles):
    """Where its raw exponents begin, in bytes."""
    return (first_nibble(num_second) + num_nibbles + 1) >> 1


@triton.jit
def before_and_sum(per_lane, L: tl.constexpr):
    """Of int32 [L]: each lane's sum of the lanes of its block below it, and its block's [L]."""
    numbers = tl.reshape(per_lane, (L // 32, 32))
    return tl.reshape(tl.cumsum(numbers, 1) - numbers, (L,)), blk.of_lanes(tl.sum(numbers, 1), L)


# ---- encode: codes, and what goes to streams

@triton.jit
def fill_absent(x, block, lane, present, lo):
    """Quarters whose elements from ``present`` on, which read as 0, have exponent lo + 3."""
    filler = (lo + 3) << 7
    return blk.fill_quarter(x[0], block, lane, present, filler, 0, 1), blk.fill_quarter(x[1], block, lane, present, filler, 1, 1), \
        blk.fill_quarter(x[2], block, lane, present, filler, 2, 1), blk.fill_quarter(x[3], block, lane, present, filler, 3, 1)


@triton.jit
def codes_of_pairs(l0, l1, minus_lo, low, high, ZEROS: tl.constexpr):
    """A byte an element b of two pairs (w = 0, 1): first code | second code << 4."""
    one: tl.constexpr = 0x00800080
    e0, e1 = l0 & 0x7F807F80, l1 & 0x7F807F80
    seven = tl.full(e0.shape, 7 * one, tl.uint32)
    d0, d1 = add_min_halves(e0, minus_lo, seven), add_min_halves(e1, minus_lo, seven)
    if ZEROS:                                                # 0 stands for the exponent 0, and lo is outside
        nothing, unit = tl.zeros_like(e0), tl.full(e0.shape, one, tl.uint32)
        d0 = (d0 | (add_min_halves(d0, nothing, unit) ^ one) * 7) & (add_min_halves(e0, nothing, unit) * 7)
        d1 = (d1 | (add_min_halves(d1, nothing, unit) ^ one) * 7) & (add_min_halves(e1, nothing, unit) * 7)
    t = (d0 + d1 * 16) >> 7
    return look_up(low, high, byte_perm(t, t, 0x0020))


@triton.jit
def code_fields(x, lo, mode, ZEROS: tl.constexpr):
    """First codes of both words, then second codes. ZEROS: exponent 0 has a code of its own in every one of these blocks."""
    a, b, c, d = x
    minus_lo = ((0 - (lo << 7)) & 0xFFFF) * 0x10001
    class_b, zero_first = (mode & CLASS_B) != 0, (mode & ZERO_FIRST) != 0
    low = tl.where(class_b, 0x01302010, 0x02012010).to(tl.uint32)
    high = tl.where(class_b, 0x00000302, 0x00003003).to(tl.uint32)
    if ZEROS:
        low, high = tl.where(zero_first, 0x02201001, low).to(tl.uint32), tl.where(zero_first, 0x00003003, high).to(tl.uint32)
    a0, a1 = codes_of_pairs(a[0], a[2], minus_lo, low, high, ZEROS), codes_of_pairs(a[4], a[6], minus_lo, low, high, ZEROS)
    b0, b1 = codes_of_pairs(b[0], b[2], minus_lo, low, high, ZEROS), codes_of_pairs(b[4], b[6], minus_lo, low, high, ZEROS)
    c0, c1 = codes_of_pairs(c[0], c[2], minus_lo, low, high, ZEROS), codes_of_pairs(c[4], c[6], minus_lo, low, high, ZEROS)
    d0, d1 = codes_of_pairs(d[0], d[2], minus_lo, low, high, ZEROS), codes_of_pairs(d[4], d[6], minus_lo, low, high, ZEROS)
    a0, a1, c0, c1 = a0 | b0 << 2, a1 | b1 << 2, c0 | d0 << 2, c1 | d1 << 2
    return (a0 & 0x0F0F0F0F) | (c0 << 4 & 0xF0F0F0F0), (a1 & 0x0F0F0F0F) | (c1 << 4 & 0xF0F0F0F0), \
        (a0 >> 4 & 0x0F0F0F0F) | (c0 & 0xF0F0F0F0), (a1 >> 4 & 0x0F0F0F0F) | (c1 & 0xF0F0F0F0)


@triton.jit
def nibbles_of_pairs(l0, l1, minus_base, z):
    """A byte an element b of two pairs: its nibble if it has no code. ``minus_base``: 9 minus the window's lowest exponent, at bit 7 of
    both halves; ``z``: 1 in every byte where zeros have a code of their own, else 0."""
    e0, e1 = l0 & 0x7F807F80, l1 & 0x7F807F80
    twenty = tl.full(e0.shape, 20 * 0x00800080, tl.uint32)
    u = byte_perm(add_min_halves(e0, minus_base, twenty) << 1, add_min_halves(e1, minus_base, twenty) << 1, 0x7351)
    is_above = ((u + 0x77777777) >> 7) & EVERY_BYTE                                                # u >= 9; the window ends below 15 - z
    is_raw = ((u + 0x6C6C6C6C + z) >> 7) & EVERY_BYTE                                              # u >= 20 - z
    v = (u + 0x02020202 - (6 - (z & 1)) * is_above) & ((is_raw * 0xFF) ^ 0xFFFFFFFF)
    e = byte_perm(e0 << 1, e1 << 1, 0x7351)
    is_zero = ((((e & 0x7F7F7F7F) + 0x7F7F7F7F) | e) >> 7 & EVERY_BYTE) ^ EVERY_BYTE
    return (v & ((is_zero * 0xFF) ^ 0xFFFFFFFF)) | is_zero


@triton.jit
def push_nibbles(queues, raws, rest, v, BIT: tl.constexpr):
    """Puts the nibbles v of elements BIT = 2 j + k, where they are in ``rest``, before those in the queues; adds the raw ones to raws."""
    q0, q1, q2, q3 = queues
    here = (rest >> BIT) & EVERY_BYTE
    v &= here * 0x0F
    is_coded = ((v + 0x7F7F7F7F) >> 7) & EVERY_BYTE
    raws |= (here & (is_coded ^ EVERY_BYTE)) << BIT
    by = here << 2
    return (q0 << (by & 4) | (v & 0xF), q1 << ((by >> 8) & 4) | ((v >> 8) & 0xF), q2 << ((by >> 16) & 4) | ((v >> 16) & 0xF),
            q3 << (by >> 24) | (v >> 24)), raws


@triton.jit
def push_quarter(queues, raws, rest, x, minus_base, z, J: tl.constexpr):
    queues, raws = push_nibbles(queues, raws, rest, nibbles_of_pairs(x[4], x[6], minus_base, z), 2 * J + 1)
    return push_nibbles(queues, raws, rest, nibbles_of_pairs(x[0], x[2], minus_base, z), 2 * J)


@triton.jit
def stream_parts(x, lo, mode, any_zero_mode, L: tl.constexpr):
    """Of the four quarters x: the first codes, two words; then what the stream is made of: the second codes that are in it (64 bits), the
    queues, and the combined masks of the elements without codes and of the raw ones."""
    f0, f1, s0, s1 = code_fields(x, lo, mode, False)
    if any_zero_mode:
        g0, g1, t0, t1 = code_fields(x, lo, mode, True)
        is_other = mode >= ZERO_SECOND
        f0, f1, s0, s1 = tl.where(is_other, g0, f0), tl.where(is_other, g1, f1), tl.where(is_other, t0, s0), tl.where(is_other, t1, s1)
    m0, m1 = zero_fields(f0), zero_fields(f1)
    bits0, bits1 = bits_up_to(m0), bits_up_to(m1)
    second = compress_word(s0, m0, bits0).to(tl.uint64) | compress_word(s1, m1, bits1).to(tl.uint64) << (bits0 >> 24).to(tl.uint64)
    rest = (m0 & zero_fields(s0)) | (m1 & zero_fields(s1)) << 1
    z = (mode >= ZERO_SECOND).to(tl.uint32)
    minus_base = (((9 - lo - z) << 7) & 0xFFFF) * 0x10001
    z *= EVERY_BYTE
    nothing = tl.zeros((L,), tl.uint32)
    queues, raws = push_quarter((nothing, nothing, nothing, nothing), nothing, rest, x[3], minus_base, z, 3)
    queues, raws = push_quarter(queues, raws, rest, x[2], minus_base, z, 2)
    queues, raws = push_quarter(queues, raws, rest, x[1], minus_base, z, 1)
    queues, raws = push_quarter(queues, raws, rest, x[0], minus_base, z, 0)
    return f0, f1, (second, queues, rest, raws)


@triton.jit
def stream_places(f0, f1, parts, L: tl.constexpr):
    """Where the parts of each lane go in its block's stream, second code | nibble << 10 | raw byte << 21; and the bytes of the whole
    stream, [L] both."""
    _, _, rest, raws = parts
    num_second = popcount(zero_fields(f0) | zero_fields(f1) << 1)
    both, sums = before_and_sum(num_second | popcount(rest) << 16, L)
    raw_before, num_raws = before_and_sum(popcount(raws), L)
    all_second, all_nibbles = sums & 0xFFFF, sums >> 16
    raw_at = first_raw(all_second, all_nibbles)
    places = (both & 0xFFFF) | (first_nibble(all_second) + (both >> 16)) << 10 | (raw_at + raw_before) << 21
    return places.to(tl.uint32, bitcast=True), (raw_at + num_raws + 3) & -4


@triton.jit
def or_word(to, index, end, word):
    tl.atomic_or(to + index, word.to(tl.int32, bitcast=True), mask=(word != 0) & (index >= 0) & (index < end), sem="relaxed")


@triton.jit
def or_bits(to, bit, end, value):
    """Sets the bits of the u64 ``value`` from bit ``bit`` of the words ``to`` .. ``to + end`` on, as far as they are inside."""
    index, by = bit >> 5, (bit & 31).to(tl.uint64)
    low, high = value << by, (value >> 32) >> (32 - by)
    or_word(to, index, end, low.to(tl.uint32))
    or_word(to, index + 1, end, (low >> 32).to(tl.uint32))
    or_word(to, index + 2, end, high.to(tl.uint32))


@triton.jit
def queue_counts(rest):
    """How many nibbles there are in the queues before each one; the first has none before it."""
    c = rest - ((rest >> 1) & 0x55555555)
    c = (c & 0x33333333) + ((c >> 2) & 0x33333333)
    c = ((c + (c >> 4)) & 0x0F0F0F0F) * EVERY_BYTE
    return (c & 0xFF).to(tl.int32), ((c >> 8) & 0xFF).to(tl.int32), ((c >> 16) & 0xFF).to(tl.int32)


@triton.jit
def write_stream(to, end, start, parts, places, source, any_raw, any_long):
    """Adds the lanes' parts to words ``to`` .. ``to + end``, which were zero. ``start``: of each lane's stream, in bytes from ``to``, also
    negative; ``source``: the lane's first element in raw data; any_long: a lane has more than 16 nibbles."""
    second, queues, rest, raws = parts
    q0, q1, q2, q3 = queues
    or_bits(to, 8 * start + 2 * (places & 0x3FF).to(tl.int32), end, second)
    nibble_bit = 8 * start + 4 * ((places >> 10) & 0x7FF).to(tl.int32)
    c1, c2, c3 = queue_counts(rest)
    if any_long:
        or_bits(to, nibble_bit, end, q0.to(tl.uint64))
        or_bits(to, nibble_bit + 4 * c1, end, q1.to(tl.uint64))
        or_bits(to, nibble_bit + 4 * c2, end, q2.to(tl.uint64))
        or_bits(to, nibble_bit + 4 * c3, end, q3.to(tl.uint64))
    else:
        low = q0.to(tl.uint64) | q1.to(tl.uint64) << (4 * c1).to(tl.uint64)
        or_bits(to, nibble_bit, end, low | shifted_in(q2, c2) | shifted_in(q3, c3))
    if any_raw:
        raw_at = start + (places >> 21).to(tl.int32)
        while tl.max((raws != 0).to(tl.int32), 0) > 0:
            bit = popcount((raws & (0 - raws)) - 1)
            offset = (bit & 6) << 7 | (bit & 1) << 2 | ((bit >> 3) & 1) << 1 | bit >> 4
            e = (tl.load(source + offset, mask=raws != 0, other=0).to(tl.uint16, bitcast=True).to(tl.uint32) >> 7) & 0xFF
            or_word(to, raw_at >> 2, end, e << (8 * (raw_at & 3)).to(tl.uint32))
            raws = raws & (raws - 1)
            raw_at += 1


@triton.jit
def shifted_in(q, c):
    """A queue's nibbles behind c others in a u64, if they are 16 together at most, so that c is 16 only where there are none."""
    return q.to(tl.uint64) << (4 * tl.minimum(c, 15)).to(tl.uint64)
