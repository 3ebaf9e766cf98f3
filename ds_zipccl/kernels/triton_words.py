"""Operations on u32 words of several numbers, element by element of a Triton tensor: one instruction each where the GPUs here have it, else
plain operators with the same result (other GPUs, the interpreter).
"""
import torch
import triton
import triton.language as tl
from triton import knobs


def _instructions() -> int:
    """90: prmt, dp4a and 16-bit halves in one word; 80: without the halves; 0: none of them."""
    if knobs.runtime.interpret or torch.version.cuda is None or not torch.cuda.is_available():
        return 0
    major = min(torch.cuda.get_device_capability(i)[0] for i in range(torch.cuda.device_count()))
    return 90 if major >= 9 else 80 if major >= 8 else 0


PTX = tl.constexpr(_instructions())


@triton.jit
def begin_in_turn():
    """Lets the next kernel's programs start while this one runs, as far as there is room, and waits for the end of the kernel before it:
    first in every kernel of ours, before any access to memory (csrc/common/device.cuh). The launch has to allow it."""
    if PTX >= 90:
        tl.inline_asm_elementwise("griddepcontrol.launch_dependents; griddepcontrol.wait; // $0", "=r", [], tl.int32, False, 1)


@triton.jit
def ask_l2(places, lane, SIZE: tl.constexpr):
    """Asks L2 for SIZE bytes from each of the addresses ``places`` [L] whose ``lane`` is 0, both multiples of 16: a hint, which may come
    before begin_in_turn."""
    if PTX >= 90:
        tl.inline_asm_elementwise("{ .reg .pred p; setp.eq.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }",
                                  "=r,l,r,r", [places, lane, SIZE], tl.int32, False, 1)


@triton.jit
def _digit(a, b, DIGIT: tl.constexpr):
    if DIGIT < 4:
        return (a >> (8 * DIGIT)) & 0xFF
    else:
        return (b >> (8 * (DIGIT - 4))) & 0xFF


@triton.jit
def byte_perm(a, b, SELECTOR: tl.constexpr):
    """Four of the bytes of ``a`` (0 to 3) and ``b`` (4 to 7), named by the hexadecimal digits of SELECTOR, the lowest first."""
    if PTX >= 80:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, SELECTOR], tl.uint32, True, 1)
    else:
        return _digit(a, b, SELECTOR & 7) | _digit(a, b, (SELECTOR >> 4) & 7) << 8 | _digit(a, b, (SELECTOR >> 8) & 7) << 16 | \
            _digit(a, b, (SELECTOR >> 12) & 7) << 24


@triton.jit
def _looked_up(low, high, selector, DIGIT: tl.constexpr):
    index = (selector >> (4 * DIGIT)) & 7
    return ((tl.where(index < 4, low, high) >> (8 * (index & 3))) & 0xFF) << (8 * DIGIT)


@triton.jit
def look_up(low, high, selector):
    """Four of the bytes of ``low`` (0 to 3) and ``high`` (4 to 7), named by the lowest hexadecimal digits of ``selector``, all below 8."""
    if PTX >= 80:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], tl.uint32, True, 1)
    else:
        return _looked_up(low, high, selector, 0) | _looked_up(low, high, selector, 1) | _looked_up(low, high, selector, 2) | \
            _looked_up(low, high, selector, 3)


@triton.jit
def byte_perm_if(mask, BIT: tl.constexpr, a, b, SELECTOR: tl.constexpr):
    """``byte_perm`` where bit BIT of ``mask`` is set, else ``a``."""
    if PTX >= 80:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; and.b32 t, $1, $2; setp.ne.u32 p, t, 0; mov.b32 $0, $3; @p prmt.b32 $0, $3, $4, $5; }",
            "=&r,r,r,r,r,r", [mask, tl.full((1,), 1 << BIT, tl.uint32), a, b, SELECTOR], tl.uint32, True, 1)
    else:
        return tl.where(((mask >> BIT) & 1) != 0, byte_perm(a, b, SELECTOR), a)


@triton.jit
def shift_add(a, BY: tl.constexpr, b):
    """(a << BY) + b, by the multiplier: the units for shifts and logic are the busy ones."""
    if PTX >= 80:
        return tl.inline_asm_elementwise("mad.lo.u32 $0, $1, $2, $3;", "=r,r,n,r", [a, 1 << BY, b], tl.uint32, True, 1)
    else:
        return (a << BY) + b


@triton.jit
def dot_bytes(a, b, total):
    """``total`` plus the sum of the products of the four bytes of ``a`` and ``b``."""
    if PTX >= 80:
        return tl.inline_asm_elementwise("dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], tl.uint32, True, 1)
    else:
        return total + (a & 0xFF) * (b & 0xFF) + ((a >> 8) & 0xFF) * ((b >> 8) & 0xFF) + ((a >> 16) & 0xFF) * ((b >> 16) & 0xFF) + \
            (a >> 24) * (b >> 24)


@triton.jit
def add_min_halves(a, b, limit):
    """min(a + b, limit) of both 16-bit halves, the sum modulo 65536."""
    if PTX >= 90:
        return tl.inline_asm_elementwise("{ .reg .b32 t; add.u16x2 t, $1, $2; min.u16x2 $0, t, $3; }", "=r,r,r,r", [a, b, limit],
                                         tl.uint32, True, 1)
    else:
        low = tl.minimum((a + b) & 0xFFFF, limit & 0xFFFF)
        high = tl.minimum(((a >> 16) + (b >> 16)) & 0xFFFF, limit >> 16)
        return low | high << 16


@triton.jit
def take_byte_if(mask, BIT: tl.constexpr, e, q, BY: tl.constexpr, FIELD: tl.constexpr):
    """Where bit BIT of ``mask`` is set, the bits FIELD of ``e`` come from ``q`` << BY, and ``q`` loses its lowest byte."""
    if PTX >= 80:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.u32 p, t, 0; shl.b32 t, $5, $6; mov.b32 $0, $4; mov.b32 $1, $5; "
            "@p lop3.b32 $0, $7, t, $4, 0xCA; @p shr.u32 $1, $5, 8; }",
            "=&r,=&r,r,r,r,r,r,r", [mask, tl.full((1,), 1 << BIT, tl.uint32), e, q, BY, tl.full((1,), FIELD, tl.uint32)],
            (tl.uint32, tl.uint32), True, 1)
    else:
        is_set = ((mask >> BIT) & 1) != 0
        return tl.where(is_set, (e & (0xFFFFFFFF - FIELD)) | ((q << BY) & FIELD), e), tl.where(is_set, q >> 8, q)


@triton.jit
def popcount(x):
    """int32."""
    if PTX >= 80:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], tl.int32, True, 1)
    else:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def here(x, i):
    """x, such that what is computed of it is computed here, in a loop over i = 0, 1, .., not before it: that would take up registers."""
    if PTX >= 80:
        return tl.inline_asm_elementwise("{ .reg .b32 t; shr.s32 t, $2, 31; add.s32 $0, $1, t; }", "=r,r,r", [x, i], tl.int32, True, 1)
    else:
        return x


@triton.jit
def _rounded(value, DT: tl.constexpr):
    if DT == 1:
        bits = value.to(tl.uint32, bitcast=True)
        return tl.where(value != value, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    else:
        return tl.where(value != value, 0x7E00, value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32))


@triton.jit
def round_halves(low, high, DT: tl.constexpr):
    """Two floats as BF16 (DT 1) or FP16 (DT 2) in one word, rounded to nearest even; NaNs become the canonical one."""
    if PTX >= 80:
        if DT == 1:
            word = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], tl.uint32, True, 1)
        else:
            word = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], tl.uint32, True, 1)
        # The conversion makes NaNs 0x7fff, the largest signed number.
        if PTX >= 90:
            quiet: tl.constexpr = 0x7FC07FC0 if DT == 1 else 0x7E007E00
            return tl.inline_asm_elementwise("min.s16x2 $0, $1, $2;", "=r,r,r", [word, quiet], tl.uint32, True, 1)
        else:
            nan = (((word & 0x7FFF7FFF) + 0x00010001) >> 15) & 0x00010001
            return word ^ nan * (0x003F if DT == 1 else 0x01FF)
    else:
        return _rounded(low, DT) | _rounded(high, DT) << 16
