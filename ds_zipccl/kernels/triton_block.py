"""Blocks in Triton: what csrc/zipccl/block.cuh does for a warp, for ``L = 32 * blocks`` lanes at once (docs/format.md, sections 2 to 5).

Tensors of shape [L] hold one number a lane; u32 words hold two 16-bit halves. ``DT`` is the dtype code: 1 BF16, 2 FP16, 3 FP32.
"""
import inspect

import triton
import triton.language as tl

POINTERS = ("x", "frames", "out", "own", "status", "outcomes", "errors_at")


def kernel(function):
    """A launchable kernel that is compiled once for a dtype and alignment, not again for other sizes and offsets."""
    sizes = [name for name, parameter in inspect.signature(function).parameters.items()
             if name not in POINTERS and parameter.annotation is inspect.Parameter.empty]
    return triton.jit(function, do_not_specialize=sizes)


@triton.jit
def mantissa_bits(DT: tl.constexpr) -> tl.constexpr:
    return 7 if DT == 1 else 10 if DT == 2 else 23


@triton.jit
def top_lo(DT: tl.constexpr) -> tl.constexpr:
    return 24 if DT == 2 else 248


@triton.jit
def popcount(x):
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def bits32(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def element(row, index, present, filler, DT: tl.constexpr):
    """Bits of elements ``index`` of a block as u32; those from ``present`` on read as ``filler``."""
    v = tl.load(row + index, mask=index < present, other=0)
    v = bits32(v) if DT == 3 else v.to(tl.uint16, bitcast=True).to(tl.uint32)
    return tl.where(index < present, v, filler)


@triton.jit
def load_pair(row, block, first, present, filler, full, W: tl.constexpr, DT: tl.constexpr):
    """Elements first + 2 W and the next one of each lane, as u32 each; ``row`` points to the tile, ``block`` numbers a lane's block."""
    base = row + block.to(tl.int64) * 1024
    i = first + 2 * W
    return element(base, i, present, filler, DT), element(base, i + 1, present, filler, DT)


@triton.jit
def load_quarter(row, block, first, present, filler, full, WIDE: tl.constexpr, DT: tl.constexpr):
    """The 8 elements from ``first`` on of each lane, as 4 pairs (low, high): u32 words of two halves (low only; 16-bit dtypes) or two
    words (FP32). Absent elements read as ``filler``. ``full``: no element of the tile is absent; ``WIDE``: rows are 16-byte aligned."""
    if DT == 3:
        if WIDE and full:
            a = tl.arange(0, 2)
            within = 4 * a[:, None, None] + 2 * a[None, :, None] + a[None, None, :]
            at = (block * 1024 + first)[:, None, None, None] + within[None, :, :, :]
            low, high = tl.split(bits32(tl.load(row + at)))
            l02, l13 = tl.split(low)
            h02, h13 = tl.split(high)
            l0, l2 = tl.split(l02)
            l1, l3 = tl.split(l13)
            h0, h2 = tl.split(h02)
            h1, h3 = tl.split(h13)
        else:
            l0, h0 = load_pair(row, block, first, present, filler, full, 0, DT)
            l1, h1 = load_pair(row, block, first, present, filler, full, 1, DT)
            l2, h2 = load_pair(row, block, first, present, filler, full, 2, DT)
            l3, h3 = load_pair(row, block, first, present, filler, full, 3, DT)
    else:
        if WIDE and full:
            a = tl.arange(0, 2)
            at = (block * 512 + first // 2)[:, None, None] + 2 * a[None, :, None] + a[None, None, :]
            l02, l13 = tl.split(bits32(tl.load(row.to(tl.pointer_type(tl.int32)) + at)))
            l0, l2 = tl.split(l02)
            l1, l3 = tl.split(l13)
        else:
            l0, h0 = load_pair(row, block, first, present, filler, full, 0, DT)
            l1, h1 = load_pair(row, block, first, present, filler, full, 1, DT)
            l2, h2 = load_pair(row, block, first, present, filler, full, 2, DT)
            l3, h3 = load_pair(row, block, first, present, filler, full, 3, DT)
            l0, l1, l2, l3 = l0 | h0 << 16, l1 | h1 << 16, l2 | h2 << 16, l3 | h3 << 16
        h0, h1, h2, h3 = l0, l1, l2, l3
    return l0, h0, l1, h1, l2, h2, l3, h3


@triton.jit
def exponents(low, high, DT: tl.constexpr):
    """The exponents of a pair, one in each half."""
    if DT == 3:
        return ((low >> 23) & 0xFF) | ((high >> 7) & 0x00FF0000)
    if DT == 2:
        return (low >> 10) & 0x001F001F
    return (low >> 7) & 0x00FF00FF


@triton.jit
def add_statistics(total, squares, low, high, DT: tl.constexpr):
    """Adds to u32 totals: sum of exponents (bits 0..19) and number of non-zero ones (from bit 20); sum of squares."""
    e = exponents(low, high, DT)
    nonzero = ((e + 0x00FF00FF) >> 8) & 0x00010001
    e0, e1 = e & 0xFFFF, e >> 16
    return total + e0 + e1 + (((nonzero & 0xFFFF) + (nonzero >> 16)) << 20), squares + e0 * e0 + e1 * e1


@triton.jit
def choose_window(total, squares, present, given_lo, DT: tl.constexpr):
    """(lo, mode) of blocks from their statistics and present elements (format.md, section 5)."""
    exponent_sum = (total & 0xFFFFF).to(tl.int32)
    count = (total >> 20).to(tl.int32)
    mode = (1024 * (present - count) > 26 * present).to(tl.int32)
    n, s = count.to(tl.int64), exponent_sum.to(tl.int64)
    spread = n * squares.to(tl.int64) - s * s > 3 * n * n
    offset = tl.where(mode == 1, tl.where(spread, 29, 34), tl.where(spread, 36, 43))
    tenths = 10 * exponent_sum - offset * count
    lo = tl.where((count == 0) | (tenths < 0), 0, tl.maximum(tenths, 0) // tl.maximum(10 * count, 1))
    lo = tl.where(given_lo >= 0, given_lo + mode, lo)
    return tl.minimum(lo, top_lo(DT)), mode


@triton.jit
def code(low, high, lo2, zero_mode, any_zero_mode, DT: tl.constexpr):
    """3-bit codes of a pair, at bit 0 of the halves. ``lo2``: lo in both halves; ``zero_mode``: all ones or 0 for each lane."""
    e = exponents(low, high, DT)
    distance = ((e | 0x80008000) - lo2) ^ 0x80008000
    outside = (((distance & 0x0FF80FF8) + 0x0FF80FF8) >> 12) & 0x00010001
    c = distance & (0x00070007 ^ outside * 7)
    if any_zero_mode:
        seven = ((c + 0x00010001) >> 3) & 0x00010001
        zero = (((e + 0x00FF00FF) >> 8) & 0x00010001) ^ 0x00010001
        c = (c ^ (seven * 7 & zero_mode)) | (zero * 7 & zero_mode)
    return c


@triton.jit
def put_code(w0, w1, w2, c, P: tl.constexpr):
    """Adds the codes of pair P to the lane's three words."""
    if P == 15:
        w0 |= (c & 0x00010001) << 15
        w1 |= (c & 0x00020002) << 14
        w2 |= (c & 0x00040004) << 13
    elif P % 3 == 0:
        w0 |= c << (3 * (P // 3))
    elif P % 3 == 1:
        w1 |= c << (3 * (P // 3))
    else:
        w2 |= c << (3 * (P // 3))
    return w0, w1, w2


@triton.jit
def get_code(w0, w1, w2, P: tl.constexpr):
    """Inverse of put_code."""
    if P == 15:
        return ((w0 >> 15) & 0x00010001) | ((w1 >> 14) & 0x00020002) | ((w2 >> 13) & 0x00040004)
    if P % 3 == 0:
        return (w0 >> (3 * (P // 3))) & 0x00070007
    if P % 3 == 1:
        return (w1 >> (3 * (P // 3))) & 0x00070007
    return (w2 >> (3 * (P // 3))) & 0x00070007


@triton.jit
def escape_mask(w0, w1, w2):
    """Bit p + 16 h is set where the code of (p, h) is 0."""
    some0, some1, some2 = w0 | w0 >> 1 | w0 >> 2, w1 | w1 >> 1 | w1 >> 2, w2 | w2 >> 1 | w2 >> 2
    coded = (some0 & 0x12491249) | (some1 & 0x12491249) << 1 | (some2 & 0x12491249) << 2 | ((w0 | w1 | w2) & 0x80008000)
    return coded ^ 0xFFFFFFFF


@triton.jit
def count_before(mask, L: tl.constexpr):
    """Of each lane: escapes in the lanes of its block below it [L]; of each block: its escapes [L // 32]."""
    counts = tl.reshape(popcount(mask), (L // 32, 32))
    return tl.reshape(tl.cumsum(counts, 1) - counts, (L,)), tl.sum(counts, 1)


@triton.jit
def of_lanes(per_block, L: tl.constexpr):
    """[L // 32] -> [L]."""
    return tl.reshape(tl.broadcast_to(per_block[:, None], (L // 32, 32)), (L,))


@triton.jit
def remainder_bytes(low, high, PLANE: tl.constexpr, DT: tl.constexpr):
    """Byte PLANE of the remainders of a pair: first element in bits 0..7, second in 8..15."""
    if DT == 3:
        if PLANE == 2:
            return ((low >> 16) & 0x7F) | ((low >> 24) & 0x80) | ((high >> 8) & 0x7F00) | ((high >> 16) & 0x8000)
        return ((low >> (8 * PLANE)) & 0xFF) | (((high >> (8 * PLANE)) & 0xFF) << 8)
    if DT == 1:
        low = (low & 0x007F007F) | ((low >> 8) & 0x00800080)
    return (low & 0xFF) | ((low >> 8) & 0xFF00)


@triton.jit
def remainder_top(low):
    """FP16: remainder bits 8..10 of a pair, as codes."""
    return ((low >> 8) & 0x00030003) | ((low >> 13) & 0x00040004)


@triton.jit
def uncode(c, lo, mode, HALF: tl.constexpr):
    """The exponent of the code in one half, where it is no escape."""
    c = (c >> (16 * HALF)) & 7
    return tl.where((c == 7) & (mode == 1), 0, lo + c)
