// The sum of squares in double precision, in the order that ds_scape/kernels/ops.py says.
#ifndef SCAPE_NORM_CUH
#define SCAPE_NORM_CUH

#include "device.cuh"

namespace scape {

constexpr u32 kLanes = 1 << 19, kLanesPer = 8;         // lanes in all; neighbours of a thread
constexpr u32 kHalved = 16;                             // lanes that a thread adds up into one

// Writes all lanes. by_eights: x is aligned to 16. A square of 32-bit floats is exact in a double, so it does not matter whether it is
// added in one operation.
template <int kDtype>
__global__ void __launch_bounds__(kThreads) lanes_kernel(const void* x, i64 num, bool by_eights, double* lanes) {
    constexpr u32 kRows = 4, kEach = kDtype == kFp32 ? 1 : 2, kWords = kLanesPer / kEach;       // on the way at a time; elements in a word
    const i64 first = ((i64)blockIdx.x * kThreads + threadIdx.x) * kLanesPer;
    double sums[kLanesPer] = {};
    for (i64 start = first; start < num; start += (i64)kRows * kLanes) {
        u32 words[kRows][kWords];
#pragma unroll
        for (u32 row = 0; row < kRows; ++row) {
            const i64 at = start + (i64)row * kLanes;
            if (by_eights && at + kLanesPer <= num) {
#pragma unroll
                for (u32 w = 0; w < kWords; w += 4) load_four(words[row] + w, (const u32*)x + at / kEach + w);
            } else {
#pragma unroll
                for (u32 e = 0; e < kLanesPer; ++e) {
                    const u32 raw = at + e < num ? load_raw(x, at + e, kDtype) : 0;
                    u32& word = words[row][e / kEach];
                    word = e % kEach ? word | raw << 16 : raw;
                }
            }
        }
#pragma unroll
        for (u32 row = 0; row < kRows; ++row)
#pragma unroll
            for (u32 e = 0; e < kLanesPer; ++e) {
                const u32 word = words[row][e / kEach];
                const double value = float_of(kEach == 1 ? word : word >> 16 * (e % 2) & 0xffff, kDtype);
                sums[e] += value * value;
            }
    }
#pragma unroll
    for (u32 e = 0; e < kLanesPer; ++e) lanes[first + e] = sums[e];
}

// `num` lanes from kItems times as many: the upper half to the lower one, again and again.
template <u32 kItems>
__global__ void __launch_bounds__(kThreads) halve_kernel(double* lanes, u32 num) {
    const u32 k = blockIdx.x * kThreads + threadIdx.x;
    if (k >= num) return;
    double sums[kItems];
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) sums[i] = lanes[k + num * i];
#pragma unroll
    for (u32 half = kItems / 2; half; half /= 2)
#pragma unroll
        for (u32 i = 0; i < half; ++i) sums[i] += sums[i + half];
    lanes[k] = sums[0];
}

}  // namespace scape

#endif  // SCAPE_NORM_CUH
