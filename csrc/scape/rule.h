// The arithmetic of one coordinate, for C++ and CUDA alike: docs/scape.md, and ds_scape/kernels/impl_reference.py in torch.
//
// Every operation rounds on its own, in the order written there. The CUDA intrinsics are never contracted into a multiply-add; C++ is
// compiled with -ffp-contract=off.
#ifndef SCAPE_RULE_H
#define SCAPE_RULE_H

#if defined(__CUDACC__)
#define SCAPE_RULE __device__ __forceinline__
#else
#include <math.h>
#include <string.h>
#define SCAPE_RULE inline __attribute__((always_inline))
#endif

namespace scape {

#if defined(__CUDACC__)
SCAPE_RULE float plus(float a, float b) { return __fadd_rn(a, b); }
SCAPE_RULE float minus(float a, float b) { return __fsub_rn(a, b); }
SCAPE_RULE float times(float a, float b) { return __fmul_rn(a, b); }
SCAPE_RULE float over(float a, float b) { return __fdiv_rn(a, b); }
SCAPE_RULE float root(float a) { return __fsqrt_rn(a); }
SCAPE_RULE unsigned bits_of(float a) { return __float_as_uint(a); }
SCAPE_RULE float with_bits(unsigned a) { return __uint_as_float(a); }
#else
SCAPE_RULE float plus(float a, float b) { return a + b; }
SCAPE_RULE float minus(float a, float b) { return a - b; }
SCAPE_RULE float times(float a, float b) { return a * b; }
SCAPE_RULE float over(float a, float b) { return a / b; }
SCAPE_RULE float root(float a) { return __builtin_sqrtf(a); }
SCAPE_RULE unsigned bits_of(float a) {
    unsigned bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}
SCAPE_RULE float with_bits(unsigned a) {
    float value;
    memcpy(&value, &a, sizeof value);
    return value;
}
#endif

// Numbers of the rule that are the same for all coordinates of a call, rounded to float once by the caller.
struct Numbers {
    float lr, beta2, rest2, eps;  // rest2: 1 - beta2
};

// sqrt(b2 * m^2 + (1 - b2) * g^2) + eps
SCAPE_RULE float normaliser(float momentum, float gradient_squared, const Numbers& c) {
    return plus(root(plus(times(times(momentum, momentum), c.beta2), times(gradient_squared, c.rest2))), c.eps);
}

// By age a: A = b1^a, 1 - A, c = b1 * (1 - A) / (1 - b1), a - c, and a itself.
struct Coefficients {
    float kept, taken, moved, gradient_moved, steps;
};

// The owner's step for one coordinate, in place. `mean`: of what the workers sent. `decay`: product of its decay factors, if it has any.
template <bool kDecay>
SCAPE_RULE void catch_up(float& weight, float& momentum, float mean, const Coefficients& a, float decay, const Numbers& c) {
    if (kDecay) weight = times(weight, decay);
    const float gradient = over(mean, a.steps);
    const float divisor = normaliser(momentum, over(times(mean, mean), a.steps), c);
    const float update = over(plus(times(a.moved, momentum), times(a.gradient_moved, gradient)), divisor);
    weight = minus(weight, times(update, c.lr));
    momentum = plus(times(momentum, a.kept), times(a.taken, gradient));
}

// One dense AdamS step for one coordinate, in place.
template <bool kCorrected>
SCAPE_RULE void dense_step(float& weight, float& momentum, float gradient, float kept, float taken, float decay, float correction,
                           const Numbers& c) {
    const float divisor = normaliser(kCorrected ? over(momentum, correction) : momentum, times(gradient, gradient), c);
    momentum = plus(times(momentum, kept), times(gradient, taken));
    const float update = over(kCorrected ? over(momentum, correction) : momentum, divisor);
    weight = minus(times(weight, decay), times(update, c.lr));
}

// q = b2 * q + (1 - b2) * g^2
SCAPE_RULE float tracked_square(float square, float gradient, float beta2, float rest2) {
    return plus(times(square, beta2), times(times(gradient, gradient), rest2));
}

// What coordinates are ordered by, largest first: overdue ones, then the score. Bits of floats >= 0 order like integers; NaN is above all.
constexpr float kScoreEps = 1e-9f;
SCAPE_RULE unsigned sort_key(float score, bool overdue) { return (bits_of(score) & 0x7FFFFFFFu) | (unsigned)overdue << 31; }
SCAPE_RULE float residual_score(float residual, float square) {
    return over(with_bits(bits_of(residual) & 0x7FFFFFFFu), plus(root(square), kScoreEps));
}

// The digits of a key that a selection looks at one after another: 13 bits (16 values an octave), 10, 9.
constexpr int kDigits = 3;
SCAPE_RULE int digit_shift(int digit) { return digit == 0 ? 19 : digit == 1 ? 9 : 0; }
SCAPE_RULE unsigned digit_size(int digit) { return digit == 0 ? 8192u : digit == 1 ? 1024u : 512u; }

}  // namespace scape

#endif  // SCAPE_RULE_H
