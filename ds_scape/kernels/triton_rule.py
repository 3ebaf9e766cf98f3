"""The arithmetic of one coordinate in Triton, as in csrc/scape/rule.h: each operation rounds on its own, in the order of the reference."""
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def rounded(x, to):
    """float32 as the type that lies at ``to``, to nearest even. (The interpreter cuts bfloat16 off.)"""
    if INTERPRETED and to.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, upper).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(to.dtype.element_ty)


@triton.jit
def widened(x):
    """float32 of any float. (The interpreter changes bfloat16's denormals.)"""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def position_at(index, k, is_valid):
    """int64, of positions of 4 bytes, which have no sign, or of 8."""
    position = tl.load(index + k, is_valid, other=0)
    if position.dtype == tl.int32:
        return position.to(tl.uint32, bitcast=True).to(tl.int64)
    else:
        return position


@triton.jit
def age_of(last, step):
    """Steps since a synchronisation that is kept in int32, or in int16 modulo 65,536."""
    if last.dtype == tl.int32:
        return step - last
    else:
        return (step - last.to(tl.int32)) & 0xFFFF


@triton.jit
def normaliser(momentum, gradient_squared, beta2, rest2, eps):
    """sqrt(b2 * m^2 + (1 - b2) * g^2) + eps"""
    return tl.sqrt_rn(momentum * momentum * beta2 + gradient_squared * rest2) + eps


@triton.jit
def tracked_square(square, gradient, beta2, rest2):
    """q = b2 * q + (1 - b2) * g^2"""
    return square * beta2 + gradient * gradient * rest2


@triton.jit
def sort_key(score, overdue):
    """uint32, by which coordinates are ordered, the largest first: overdue ones, then the score; NaN is above all."""
    return (score.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) | (overdue.to(tl.uint32) << 31)


@triton.jit
def residual_score(residual, square):
    """|r| / (sqrt(q) + 1e-9)"""
    size = (residual.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return tl.div_rn(size, tl.sqrt_rn(square) + 1e-9)


@triton.jit
def popcount(x):
    """int32, of uint32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)
