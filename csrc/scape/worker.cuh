// What a worker does with its residual, one coordinate after another and everything in one pass; and the owner's steps.
#ifndef SCAPE_WORKER_CUH
#define SCAPE_WORKER_CUH

#include "device.cuh"

namespace scape {

constexpr u32 kPerThread = 16, kTile = kThreads * kPerThread;  // elements of the residual that a CTA has in shared memory
constexpr u32 kStepPer = 4;                                    // coordinates of a thread in the owner's steps

// kHasGradient: fresh gradients enter. Takes nothing, everything, or what lies at c.index.
template <bool kHasGradient>
__global__ void __launch_bounds__(kThreads) enter_kernel(const Enter c) {
    __shared__ float tile[kTile];
    __shared__ i64 range[2];
    const i64 start = (i64)blockIdx.x * kTile, left = c.num - start;
    const u32 num = left < (i64)kTile ? (u32)left : kTile;
    float r[kPerThread], g[kPerThread];
#pragma unroll
    for (u32 j = 0; j < kPerThread; ++j) {
        const u32 i = threadIdx.x + j * kThreads;
        r[j] = g[j] = 0.0f;
        if (i >= num) continue;
        r[j] = c.residual[start + i];
        if (kHasGradient) g[j] = load_float(c.gradient, start + i, c.gradient_dtype);
    }
    // While those are on their way.
    if (c.index && warp_id() < 2) {
        const i64 found = first_not_below(c.index, c.index_bytes, c.num_index, c.first + start + (warp_id() ? num : 0));
        if (lane_id() == 0) range[warp_id()] = found;
    }
    if (kHasGradient) {
#pragma unroll
        for (u32 j = 0; j < kPerThread; ++j) {
            if (c.factor != 1.0f) g[j] = times(g[j], c.factor);
            r[j] = plus(r[j], g[j]);
        }
        if (c.square && start + num > c.own_start && start < c.own_start + c.own_num) {
#pragma unroll
            for (u32 j = 0; j < kPerThread; ++j) {
                const u32 i = threadIdx.x + j * kThreads;
                const i64 own = start + i - c.own_start;
                if (i < num && own >= 0 && own < c.own_num) c.square[own] = tracked_square(c.square[own], g[j], c.beta2, c.rest2);
            }
        }
    }
    if (c.index) {
#pragma unroll
        for (u32 j = 0; j < kPerThread; ++j) tile[threadIdx.x + j * kThreads] = r[j];
        __syncthreads();
        for (i64 k = range[0] + threadIdx.x; k < range[1]; k += kThreads) {
            const u32 i = (u32)(position_at(c.index, k, c.index_bytes) - c.first - start);
            tile[i] = minus(tile[i], store_float(c.values, k, tile[i], c.values_dtype));
        }
        __syncthreads();
#pragma unroll
        for (u32 j = 0; j < kPerThread; ++j) r[j] = tile[threadIdx.x + j * kThreads];
    }
#pragma unroll
    for (u32 j = 0; j < kPerThread; ++j) {
        const u32 i = threadIdx.x + j * kThreads;
        if (i >= num) continue;
        if (c.values && !c.index) r[j] = minus(r[j], store_float(c.values, start + i, r[j], c.values_dtype));
        c.residual[start + i] = r[j];
    }
}

// Nothing enters: only what is taken is touched.
__global__ void __launch_bounds__(kThreads) take_kernel(const Enter c) {
    const i64 k = (i64)blockIdx.x * kThreads + threadIdx.x;
    if (k >= c.num_index) return;
    float* const r = c.residual + (position_at(c.index, k, c.index_bytes) - c.first);
    *r = minus(*r, store_float(c.values, k, *r, c.values_dtype));
}

__global__ void __launch_bounds__(kThreads) track_kernel(const Enter c) {
    const i64 start = (i64)blockIdx.x * kThreads * kStepPer + threadIdx.x;
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i >= c.num) continue;
        float g = load_float(c.gradient, i, c.gradient_dtype);
        if (c.factor != 1.0f) g = times(g, c.factor);
        c.square[i] = tracked_square(c.square[i], g, c.beta2, c.rest2);
    }
}

template <class T>
__global__ void __launch_bounds__(kThreads) scatter_kernel(T* target, const void* index, int index_bytes, const T* values, i64 num) {
    const i64 start = (i64)blockIdx.x * kThreads * kStepPer + threadIdx.x;
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i < num) target[position_at(index, i, index_bytes)] = values[i];
    }
}

template <bool kDecay>
__global__ void __launch_bounds__(kThreads) owner_kernel(const Owner c) {
    const i64 start = (i64)blockIdx.x * kThreads * kStepPer + threadIdx.x;
    i64 at[kStepPer];
    float w[kStepPer], m[kStepPer], mean[kStepPer];
    int ages[kStepPer];     // at least 1
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i < c.num) at[j] = c.index ? position_at(c.index, i, c.index_bytes) : i;
    }
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i >= c.num) continue;
        w[j] = c.weight[at[j]], m[j] = c.momentum[at[j]], mean[j] = c.mean[i];
        ages[j] = age_at(c.last_sync, at[j], c.last_bytes, c.step - 1) + 1;
    }
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i >= c.num) continue;
        const int age = ages[j], oldest = (int)c.num_tables - 1, longest = (int)c.num_decay - 1;
        const int a = c.catch_up ? (age < oldest ? age : oldest) : 1;
        const Coefficients by_age = {c.kept[a], c.taken[a], c.moved[a], c.gradient_moved[a], (float)a};
        catch_up<kDecay>(w[j], m[j], mean[j], by_age, kDecay ? c.decay[age < longest ? age : longest] : 1.0f, c.numbers);
        c.weight[at[j]] = w[j];
        c.momentum[at[j]] = m[j];
        if (c.last_bytes == 4)
            ((int32_t*)c.last_sync)[at[j]] = c.step;
        else
            ((int16_t*)c.last_sync)[at[j]] = (int16_t)c.step;
        store_float(c.out, i, w[j], c.out_dtype);
    }
}

template <bool kCorrected>
__global__ void __launch_bounds__(kThreads) dense_kernel(const Dense c) {
    const i64 start = (i64)blockIdx.x * kThreads * kStepPer + threadIdx.x;
    float w[kStepPer], m[kStepPer], g[kStepPer];
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i < c.num) w[j] = c.weight[i], m[j] = c.momentum[i], g[j] = c.gradient[i];
    }
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i >= c.num) continue;
        dense_step<kCorrected>(w[j], m[j], g[j], c.kept, c.taken, c.decay, c.correction, c.numbers);
        c.weight[i] = w[j];
        c.momentum[i] = m[j];
    }
}

}  // namespace scape

#endif  // SCAPE_WORKER_CUH
