"""The owner's steps, in Triton."""
import triton
import triton.language as tl

from ds_scape.kernels.triton_rule import age_of, normaliser, position_at, rounded


@triton.jit
def owner_step(weight, momentum, last_sync, mean_value, index, kept, taken, moved, gradient_moved, decay, out, num: tl.int64,
               oldest: tl.int32, longest: tl.int32, step: tl.int32, lr: tl.float32, beta2: tl.float32, rest2: tl.float32, eps: tl.float32,
               HAS_INDEX: tl.constexpr, HAS_DECAY: tl.constexpr, CATCH_UP: tl.constexpr, BY_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """oldest, longest: the last entries of the tables and of ``decay``. BY_PLACE: last_sync is of the coordinates at ``index`` alone."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = i < num
    at = position_at(index, i, is_valid) if HAS_INDEX else i
    mean = tl.load(mean_value + i, is_valid, other=0)
    w, m = tl.load(weight + at, is_valid, other=0), tl.load(momentum + at, is_valid, other=0)
    last_at = last_sync + (i if BY_PLACE else at)
    age = age_of(tl.load(last_at, is_valid, other=0), step - 1) + 1                     # at least 1
    a = tl.minimum(age, oldest) if CATCH_UP else tl.full((BLOCK,), 1, tl.int32)
    if HAS_DECAY:
        w = w * tl.load(decay + tl.minimum(age, longest), is_valid, other=1)
    steps = a.to(tl.float32)
    gradient = tl.div_rn(mean, steps)
    divisor = normaliser(m, tl.div_rn(mean * mean, steps), beta2, rest2, eps)
    towards = tl.load(moved + a, is_valid, other=0) * m + tl.load(gradient_moved + a, is_valid, other=0) * gradient
    w = w - tl.div_rn(towards, divisor) * lr
    m = m * tl.load(kept + a, is_valid, other=0) + tl.load(taken + a, is_valid, other=0) * gradient
    tl.store(weight + at, w, is_valid)
    tl.store(momentum + at, m, is_valid)
    tl.store(last_at, tl.full((BLOCK,), step, tl.int32).to(last_sync.dtype.element_ty), is_valid)
    tl.store(out + i, rounded(w, out), is_valid)


@triton.jit
def dense_step(weight, momentum, gradient, num: tl.int64, lr: tl.float32, kept: tl.float32, taken: tl.float32, beta2: tl.float32,
               rest2: tl.float32, eps: tl.float32, decay: tl.float32, correction: tl.float32, IS_CORRECTED: tl.constexpr,
               BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = i < num
    w, m = tl.load(weight + i, is_valid, other=0), tl.load(momentum + i, is_valid, other=0)
    g = tl.load(gradient + i, is_valid, other=0)
    divisor = normaliser(tl.div_rn(m, correction) if IS_CORRECTED else m, g * g, beta2, rest2, eps)
    m = m * kept + g * taken
    update = tl.div_rn(tl.div_rn(m, correction) if IS_CORRECTED else m, divisor)
    tl.store(weight + i, w * decay - update * lr, is_valid)
    tl.store(momentum + i, m, is_valid)
