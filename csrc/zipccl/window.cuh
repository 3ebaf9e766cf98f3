// A block's window, from its exponents (docs/format.md, section 5). The exponents are left in shared memory on the way: that is where
// escapes are taken from later.
#ifndef ZIPCCL_WINDOW_CUH
#define ZIPCCL_WINDOW_CUH

#include "block.cuh"

namespace zipscape {

// Shared memory of a lane for a block: its 32 exponents, byte 2 p + h, with a distance to the next lane's at which 16-byte accesses of 8
// lanes meet every bank once; wide enough that a pair of blocks has room for the raw data of one.
template <class F>
constexpr u32 kLaneStage = F::kItem == 4 ? 80 : 48;
template <class F>
constexpr u32 kBlockStage = kWarp * kLaneStage<F>;

// Where the element of bit p + 16 h of an escape mask is.
__device__ __forceinline__ u32 stage_of_bit(u32 bit) { return (bit << 1 | bit >> 4) & 31; }

// Sums over the lane's exponents; `zeros` has bit 7 of a byte set if and only if any exponent is 0.
struct Sums { u32 sum, squares, zeros; };

// Four of the lane's exponents, one a byte, elements 4 i .. 4 i + 3 of the lane.
template <class F>
__device__ __forceinline__ u32 four_exponents(const u32 (&x)[F::kWords], u32 i) {
    if constexpr (F::kItem == 4) {
        const u32 *e = x + 4 * i, first = __byte_perm(e[0] << 1, e[1] << 1, 0x0073), second = __byte_perm(e[2] << 1, e[3] << 1, 0x0073);
        return __byte_perm(first, second, 0x5410);
    } else {
        return __byte_perm(x[2 * i] >> F::kMantissa, x[2 * i + 1] >> F::kMantissa, 0x6420) & F::kExponentMask * kBytes;
    }
}

template <class F>
__device__ __forceinline__ Sums stage_exponents(const u32 (&x)[F::kWords], u8* stage) {
    Sums s = {0, 0, 0};
    u32 e[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        e[i] = four_exponents<F>(x, i);
        s.sum = __dp4a(e[i], kBytes, s.sum);
        s.squares = __dp4a(e[i], e[i], s.squares);
        s.zeros |= (e[i] - kBytes) & ~e[i];
        if (i % 4 == 3) *(uint4*)(stage + 4 * (i - 3)) = make_uint4(e[i - 3], e[i - 2], e[i - 1], e[i]);
    }
    return s;
}

// How many of the lane's exponents are not 0; kStride: bytes from four of them to the next.
template <u32 kStride>
__device__ __forceinline__ u32 count_nonzero(const u8* stage) {
    u32 count = 0;                                   // times 128
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        const u32 e = *(const u32*)(stage + kStride * i);
        count = __dp4a((((e & 0x7f * kBytes) + 0x7f * kBytes) | e) & 0x80 * kBytes, kBytes, count);
    }
    return count / 128;
}

// a / b, rounded down, for a < 2^24 and b in 1..2^24 whose quotient is below 2^16: a guess that may be off by one, put right.
__device__ __forceinline__ u32 divide_small(u32 a, u32 b) {
    const u32 guess = (u32)__fdividef((float)a, (float)b);
    const int rest = (int)(a - guess * b);
    return rest < 0 ? guess - 1 : rest >= (int)b ? guess + 1 : guess;
}

// Of a complete block without zeros, from its sums: the usual case.
template <class F>
__device__ __forceinline__ Window full_window(u32 sum, u32 squares) {
    constexpr u32 n = kBlockElems;
    const bool spread = (u64)n * squares > (u64)sum * sum + 3 * n * n;
    const u32 tenths = (spread ? 36 : 43) * n, scaled = 10 * sum;
    return {scaled < tenths ? 0 : min((scaled - tenths) / (10 * n), F::kTopLo), 0};
}

// Of any block: `count` exponents that are not 0 among `present`; or the given one.
template <class F>
__device__ __forceinline__ Window any_window(u32 sum, u32 squares, u32 count, u32 present, int given_lo) {
    Window w;
    w.mode = 1024 * (present - count) > 26 * present ? kZeroMode : 0;
    if (given_lo >= 0) {
        w.lo = min(given_lo + w.mode, F::kTopLo);
    } else {
        const bool spread = (u64)count * squares > (u64)sum * sum + 3 * count * count;
        const u32 tenths = (w.mode == kZeroMode ? (spread ? 29 : 34) : (spread ? 36 : 43)) * count;
        w.lo = count == 0 || 10 * sum < tenths ? 0 : min(divide_small(10 * sum - tenths, 10 * count), F::kTopLo);
    }
    return w;
}

}  // namespace zipscape

#endif  // ZIPCCL_WINDOW_CUH
