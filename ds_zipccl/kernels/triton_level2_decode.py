"""Level 2 in Triton, decode: blocks from first codes, remainders and streams (triton_level2.py has the words)."""
import triton
import triton.language as tl

from ds_zipccl.kernels import triton_block as blk
from ds_zipccl.kernels import triton_level2 as level2
from ds_zipccl.kernels.triton_block import u32_at
from ds_zipccl.kernels.triton_level2 import EVERY_BYTE, ZERO_FIRST, ZERO_SECOND
from ds_zipccl.kernels.triton_words import byte_perm, look_up, popcount


@triton.jit
def load_codes(tile, codes_offset, block, lane, exists):
    """The two words of first codes. Blocks that do not exist have neither streams nor an error: all are first codes."""
    places = u32_at(tile, codes_offset) + block * 64 + lane
    return blk.load_if(places, exists, 0x55555555), blk.load_if(places + 32, exists, 0x55555555)


@triton.jit
def stream_word(places, index, wanted):
    """Word ``index`` of a tile's streams, wherever it is; 0 if it is nowhere."""
    slots, capacity, pool, pool_room, spill_offset, _ = places
    room = capacity >> 2
    spilled = (spill_offset >> 2) + (index - room)
    valid = wanted & ((index < room) | (spilled < (pool_room >> 2)))
    return tl.load(tl.where(index < room, u32_at(slots, 0) + index, u32_at(pool, 0) + spilled), mask=valid, other=0)


@triton.jit
def stream_bits(places, start, near, far, bit, wanted, L: tl.constexpr):
    """64 bits of each lane's block's stream from bit ``bit`` on, at least those ``wanted`` (a number). ``start``: the byte of the tile's
    streams where it begins; ``near``: word number lane of it; ``far``: some of these streams are longer than that, or spill."""
    by = (bit & 31).to(tl.uint64)
    if far:
        index, last = (8 * start + bit) >> 5, (bit & 31) + wanted
        w0 = stream_word(places, index, wanted > 0)
        w1 = stream_word(places, index + 1, last > 32)
        w2 = stream_word(places, index + 2, last > 64)
    else:
        index = bit >> 5
        w0 = blk.of_other_lane(near, index, L)
        w1 = blk.of_other_lane(near, index + 1, L)
        w2 = blk.of_other_lane(near, index + 2, L)
    return (w0.to(tl.uint64) | w1.to(tl.uint64) << 32) >> by | (w2.to(tl.uint64) << (63 - by)) << 1


@triton.jit
def raws_of(queue, count):
    """How many of a queue's first ``count`` (8 at most) nibbles are 0."""
    coded = queue | queue >> 2
    coded |= coded >> 1
    within = tl.where(count > 0, 0x11111111 >> (32 - 4 * tl.maximum(count, 1)).to(tl.uint32), 0).to(tl.uint32)
    return popcount((coded ^ 0xFFFFFFFF) & within)


@triton.jit
def streams_of(places, start, near, far, codes, L: tl.constexpr):
    """What is in each lane's block's stream, which begins at byte ``start``: the second codes of both words, the combined mask of elements
    without codes, four queues of nibbles, the places of their raw exponents in bytes; then the bytes that the stream must have [L], and
    each lane's number of raw exponents."""
    f0, f1 = codes
    m0, m1 = level2.zero_fields(f0), level2.zero_fields(f1)
    bits0, bits1 = level2.bits_up_to(m0), level2.bits_up_to(m1)
    num_bits = ((bits0 >> 24) + (bits1 >> 24)).to(tl.int32)
    before, all_bits = level2.before_and_sum(num_bits, L)
    stored = stream_bits(places, start, near, far, before, num_bits, L)
    s0 = level2.expand_word(stored.to(tl.uint32), m0, bits0)
    s1 = level2.expand_word((stored >> (bits0 >> 24).to(tl.uint64)).to(tl.uint32), m1, bits1)
    rest = (m0 & level2.zero_fields(s0)) | (m1 & level2.zero_fields(s1)) << 1

    num_nibbles = popcount(rest)
    before, all_nibbles = level2.before_and_sum(num_nibbles, L)
    num_second = all_bits >> 1
    bit = 4 * (level2.first_nibble(num_second) + before)
    c1, c2, c3 = level2.queue_counts(rest)
    if tl.max(num_nibbles, 0) > 16:
        q0 = stream_bits(places, start, near, far, bit, 4 * c1, L).to(tl.uint32)
        q1 = stream_bits(places, start, near, far, bit + 4 * c1, 4 * (c2 - c1), L).to(tl.uint32)
        q2 = stream_bits(places, start, near, far, bit + 4 * c2, 4 * (c3 - c2), L).to(tl.uint32)
        q3 = stream_bits(places, start, near, far, bit + 4 * c3, 4 * (num_nibbles - c3), L).to(tl.uint32)
    else:
        nibbles = stream_bits(places, start, near, far, bit, 4 * num_nibbles, L)
        q0, q1 = nibbles.to(tl.uint32), (nibbles >> (4 * c1).to(tl.uint64)).to(tl.uint32)
        q2 = (nibbles >> (4 * tl.minimum(c2, 15)).to(tl.uint64)).to(tl.uint32)
        q3 = (nibbles >> (4 * tl.minimum(c3, 15)).to(tl.uint64)).to(tl.uint32)
    r0, r1, r2, r3 = raws_of(q0, c1), raws_of(q1, c2 - c1), raws_of(q2, c3 - c2), raws_of(q3, num_nibbles - c3)
    num_raws = r0 + r1 + r2 + r3
    before, all_raws = level2.before_and_sum(num_raws, L)
    raw_at = level2.first_raw(num_second, all_nibbles)
    at = start + raw_at + before
    return (s0, s1), rest, (q0, q1, q2, q3), (at, at + r0, at + r0 + r1, at + r0 + r1 + r2), (raw_at + all_raws + 3) & -4, num_raws


@triton.jit
def tables_of(lo, mode):
    """Exponents by index, one a byte, the lowest first: 1..3 first codes, 5..7 second codes (two words), and by nibble (four words)."""
    zero_first, zero_second, class_b = (mode & ZERO_FIRST) != 0, (mode & ZERO_SECOND) != 0, (mode & 1) != 0
    first = tl.where(zero_first, 0x04030000, tl.where(class_b, 0x05040300, 0x04030200)).to(tl.uint32) + lo * EVERY_BYTE
    second = tl.where(zero_first, 0x05020100, tl.where(class_b, 0x02010000, 0x05010000)).to(tl.uint32) + lo * EVERY_BYTE
    first = tl.where(zero_first, first & 0xFFFF00FF, first)
    second = tl.where(zero_second, second & 0xFFFF00FF, second)
    below = lo + (mode >= 2).to(tl.uint32) - 11                # modulo 256, a byte at a time
    n0 = ((below + 2) & 0xFF) << 16 | ((below + 3) & 0xFF) << 24
    n1 = ((below + 4) & 0xFF) | ((below + 5) & 0xFF) << 8 | ((below + 6) & 0xFF) << 16 | ((below + 7) & 0xFF) << 24
    n2 = ((below + 8) & 0xFF) | ((below + 9) & 0xFF) << 8 | ((below + 10) & 0xFF) << 16 | ((lo + 6) & 0xFF) << 24
    n3 = ((lo + 7) & 0xFF) | ((lo + 8) & 0xFF) << 8 | ((lo + 9) & 0xFF) << 16 | ((lo + 10) & 0xFF) << 24
    return first, second, n0, n1, n2, n3


@triton.jit
def selector_of(indices):
    """Four numbers below 8, a byte each, as hexadecimal digits."""
    t = indices | indices >> 4
    return byte_perm(t, t, 0x0020)


@triton.jit
def raw_of(places, at, here, nibble):
    """The raw exponent at byte ``at``, if the element is ``here`` and its nibble is 0; and the place of the next one."""
    wanted = (here != 0) & (nibble == 0)
    e = (stream_word(places, at >> 2, wanted) >> (8 * (at & 3)).to(tl.uint32)) & 0xFF
    return tl.where(wanted, e, 0).to(tl.uint32), at + wanted.to(tl.int32)


@triton.jit
def four_exponents(fields, mask, tables, rest, queues, raws, places, unusual, J: tl.constexpr, K: tl.constexpr):
    """The exponents of the lane's elements (J, K, b), a byte each; the queues and places of raw exponents behind them. ``fields``: first
    and second codes of word K, ``mask``: which are second ones; ``unusual``: there may be raw exponents."""
    first, second, n0, n1, n2, n3 = tables
    q0, q1, q2, q3 = queues
    e = look_up(first, second, selector_of(((fields >> (2 * J)) & 0x03030303) | ((mask >> (2 * J)) & EVERY_BYTE) << 2))
    v = byte_perm(byte_perm(q0, q1, 0x0040), byte_perm(q2, q3, 0x0040), 0x5410) & 0x0F0F0F0F
    here = (rest >> (2 * J + K)) & EVERY_BYTE
    selector = selector_of(v & 0x07070707)
    high = ((v >> 3) & EVERY_BYTE) * 0xFF
    rare = (look_up(n0, n1, selector) & (high ^ 0xFFFFFFFF)) | (look_up(n2, n3, selector) & high)
    if unusual:
        a0, a1, a2, a3 = raws
        e0, a0 = raw_of(places, a0, here & 1, v & 15)
        e1, a1 = raw_of(places, a1, here & 0x100, v & 0xF00)
        e2, a2 = raw_of(places, a2, here & 0x10000, v & 0xF0000)
        e3, a3 = raw_of(places, a3, here & 0x1000000, v & 0xF000000)
        rare |= e0 | e1 << 8 | e2 << 16 | e3 << 24
        raws = (a0, a1, a2, a3)
    here_only = here * 0xFF
    by = here << 2
    queues = (q0 >> (by & 4), q1 >> ((by >> 8) & 4), q2 >> ((by >> 16) & 4), q3 >> (by >> 24))
    return (e & (here_only ^ 0xFFFFFFFF)) | (rare & here_only), queues, raws


@triton.jit
def pairs_of(e, remainders):
    """Two pairs (w = 0, 1) from their exponents, by b, and their remainders, in element order."""
    r = byte_perm(remainders, remainders, 0x3120)
    high = (r & 0x80808080) | ((e >> 1) & 0x7F7F7F7F)
    low = (r & 0x7F7F7F7F) | ((e << 7) & 0x80808080)
    return byte_perm(low, high, 0x6240), byte_perm(low, high, 0x7351)


@triton.jit
def decode_quarter(stored, state, places, unusual, J: tl.constexpr):
    """The 8 words of quarter J, and the state for the next one."""
    fields, masks, tables, rest, queues, raws = state
    e0, queues, raws = four_exponents(fields[0], masks[0], tables, rest, queues, raws, places, unusual, J, 0)
    e1, queues, raws = four_exponents(fields[1], masks[1], tables, rest, queues, raws, places, unusual, J, 1)
    l0, l1 = pairs_of(e0, stored[0])
    l2, l3 = pairs_of(e1, stored[1])
    return (l0, l0, l1, l1, l2, l2, l3, l3), (fields, masks, tables, rest, queues, raws)
