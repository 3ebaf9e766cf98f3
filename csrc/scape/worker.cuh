// What a worker does with its residual, one coordinate after another and everything in one pass; and the owner's steps.
#ifndef SCAPE_WORKER_CUH
#define SCAPE_WORKER_CUH

#include "device.cuh"

namespace scape {

constexpr u32 kPerThread = 16, kTile = kThreads * kPerThread;  // elements of the residual that a CTA has in shared memory
constexpr u32 kStepPer = 4;                                    // coordinates of a thread in a dense step

// The place in the tile of a thread's j-th element: neighbours by fours, which are read and written together, or a warp's side by side.
template <bool kFours>
__device__ __forceinline__ u32 place_of(u32 j) {
    return kFours ? (threadIdx.x + j / 4 * kThreads) * 4 + j % 4 : threadIdx.x + j * kThreads;
}

// starts[t]: how many of c.index lie before tile t. A thread for each of them, of which there is at least one.
__global__ void __launch_bounds__(kThreads) starts_kernel(const Enter c) {
    const i64 k = (i64)blockIdx.x * kThreads + threadIdx.x;
    if (k >= c.num_index) return;
    const auto tile_at = [&](i64 j) { return (load_position(c.index, j, c.index_bytes) - c.first) / kTile; };
    const i64 own = tile_at(k), num_tiles = (c.num + kTile - 1) / kTile;
    for (i64 t = k ? tile_at(k - 1) + 1 : 0; t <= own; ++t) c.starts[t] = k;
    for (i64 t = own + 1; k == c.num_index - 1 && t <= num_tiles; ++t) c.starts[t] = c.num_index;
}

// A thread's gradients of 2 or 4 bytes, as they lie in memory.
template <int kDtype>
struct RawOf {
    static constexpr u32 kEach = kDtype > kFp32 ? 2 : 1;        // in a word
    u32 words[kPerThread / kEach];

    __device__ __forceinline__ void load_four(u32 j, const void* from, i64 at) {
        if (kEach == 1) {
            scape::load_four(words + j, (const u32*)from + at);
        } else {
            const uint2 four = *(const uint2*)((const u16*)from + at);
            words[j / 2] = four.x, words[j / 2 + 1] = four.y;
        }
    }
    __device__ __forceinline__ void set(u32 j, u32 raw) {
        u32& word = words[j / kEach];
        word = j % kEach ? word | raw << 16 : raw;
    }
    __device__ __forceinline__ u32 get(u32 j) const { return kEach == 1 ? words[j] : words[j / 2] >> 16 * (j % 2) & 0xffff; }
};

// kGradient: the dtype of fresh gradients that enter, or -1. Takes nothing, everything, or what lies at c.index. kFours: everything that is
// as long as the residual is aligned to four elements.
template <int kGradient, bool kFours>
__global__ void __launch_bounds__(kThreads, 4) enter_kernel(const Enter c) {
    __shared__ __align__(16) float tile[kTile];
    constexpr bool kHasGradient = kGradient >= 0;
    const i64 start = (i64)blockIdx.x * kTile, left = c.num - start;
    const u32 num = left < (i64)kTile ? (u32)left : kTile;
    const bool is_whole = kFours && num == kTile;
    float r[kPerThread];
    RawOf<kGradient> raw;
    if (is_whole) {
#pragma unroll
        for (u32 j = 0; j < kPerThread; j += 4) {
            const i64 at = start + place_of<kFours>(j);
            load_four((u32*)r + j, c.residual + at);
            if (kHasGradient) raw.load_four(j, c.gradient, at);
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < kPerThread; ++j) {
            const u32 i = place_of<kFours>(j);
            r[j] = i < num ? c.residual[start + i] : 0.0f;
            if (kHasGradient) raw.set(j, i < num ? load_raw(c.gradient, start + i, kGradient) : 0);
        }
    }
    // While those are on their way.
    constexpr u32 kAhead = 2;
    i64 next = 0, end = 0;
    u32 taken[kAhead];
    if (c.starts) {
        next = c.starts[blockIdx.x] + threadIdx.x, end = c.starts[blockIdx.x + 1];
#pragma unroll
        for (u32 j = 0; j < kAhead; ++j)
            taken[j] = next + j * kThreads < end ? (u32)(load_position(c.index, next + j * kThreads, c.index_bytes) - c.first - start) : 0;
    }
    if (kHasGradient) {
        float g[kPerThread];
#pragma unroll
        for (u32 j = 0; j < kPerThread; ++j) {
            g[j] = float_of(raw.get(j), kGradient);
            if (c.factor != 1.0f) g[j] = times(g[j], c.factor);
            r[j] = plus(r[j], g[j]);
        }
        if (c.square && start + num > c.own_start && start < c.own_start + c.own_num) {
            const i64 first = start - c.own_start;
            float* const square = c.square + first;             // of the tile's first element
            if (is_whole && first >= 0 && first + kTile <= c.own_num && (u64)square % 16 == 0) {
                float q[kPerThread];
#pragma unroll
                for (u32 j = 0; j < kPerThread; j += 4) load_four((u32*)q + j, square + place_of<kFours>(j));
#pragma unroll
                for (u32 j = 0; j < kPerThread; ++j) q[j] = tracked_square(q[j], g[j], c.beta2, c.rest2);
#pragma unroll
                for (u32 j = 0; j < kPerThread; j += 4) store_four(square + place_of<kFours>(j), q + j);
            } else {
#pragma unroll
                for (u32 j = 0; j < kPerThread; ++j) {
                    const u32 i = place_of<kFours>(j);
                    if (i < num && first + i >= 0 && first + i < c.own_num)
                        square[i] = tracked_square(square[i], g[j], c.beta2, c.rest2);
                }
            }
        }
    }
    if (c.starts) {
#pragma unroll
        for (u32 j = 0; j < kPerThread; ++j) tile[place_of<kFours>(j)] = r[j];
        __syncthreads();
        const auto take = [&](u32 i, i64 k) { tile[i] = minus(tile[i], store_float(c.values, k, tile[i], c.values_dtype)); };
#pragma unroll
        for (u32 j = 0; j < kAhead; ++j, next += kThreads)
            if (next < end) take(taken[j], next);
        for (; next < end; next += kThreads) take((u32)(load_position(c.index, next, c.index_bytes) - c.first - start), next);
        __syncthreads();
#pragma unroll
        for (u32 j = 0; j < kPerThread; ++j) r[j] = tile[place_of<kFours>(j)];
    } else if (c.values && !c.index) {
#pragma unroll
        for (u32 j = 0; j < kPerThread; ++j) {
            const u32 i = place_of<kFours>(j);
            if (i < num) r[j] = minus(r[j], store_float(c.values, start + i, r[j], c.values_dtype));
        }
    }
    if (is_whole) {
#pragma unroll
        for (u32 j = 0; j < kPerThread; j += 4) store_four(c.residual + start + place_of<kFours>(j), r + j);
    } else {
#pragma unroll
        for (u32 j = 0; j < kPerThread; ++j) {
            const u32 i = place_of<kFours>(j);
            if (i < num) c.residual[start + i] = r[j];
        }
    }
}

// Nothing enters: only what is taken is touched.
__global__ void __launch_bounds__(kThreads) take_kernel(const Enter c) {
    const i64 k = (i64)blockIdx.x * kThreads + threadIdx.x;
    if (k >= c.num_index) return;
    float* const r = c.residual + (load_position(c.index, k, c.index_bytes) - c.first);
    *r = minus(*r, store_float(c.values, k, *r, c.values_dtype));
}

template <int kDtype>
__global__ void __launch_bounds__(kThreads) track_kernel(const Enter c) {
    const i64 start = (i64)blockIdx.x * kThreads * kStepPer + threadIdx.x;
    u32 raw[kStepPer];
    float q[kStepPer];
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i < c.num) raw[j] = load_raw(c.gradient, i, kDtype), q[j] = c.square[i];
    }
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i >= c.num) continue;
        float g = float_of(raw[j], kDtype);
        if (c.factor != 1.0f) g = times(g, c.factor);
        c.square[i] = tracked_square(q[j], g, c.beta2, c.rest2);
    }
}

template <class T, int kIndex>
__global__ void __launch_bounds__(kThreads) scatter_kernel(T* target, const void* index, const T* values, i64 num) {
    const i64 start = (i64)blockIdx.x * kThreads * kStepPer + threadIdx.x;
    i64 at[kStepPer];
    T value[kStepPer];
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i < num) at[j] = load_position(index, i, kIndex), value[j] = values[i];
    }
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j)
        if (start + j * kThreads < num) target[at[j]] = value[j];
}

// ops.take_ages, a thread for each.
template <int kLast>
__global__ void __launch_bounds__(kThreads) take_ages_kernel(void* last_sync, const void* index, int index_bytes, i64 first, i64 num,
                                                             int step, void* out) {
    const i64 i = (i64)blockIdx.x * kThreads + threadIdx.x;
    if (i >= num) return;
    const i64 at = index ? load_position(index, i, index_bytes) - first : i;
    store_last(out, i, kLast, load_last(last_sync, at, kLast));
    store_last(last_sync, at, kLast, (u32)step);
}

template <int kLast>
__global__ void __launch_bounds__(kThreads) mark_overdue_kernel(float* rank_by, const void* last_sync, i64 num, int step, int max_age) {
    const i64 start = (i64)blockIdx.x * kThreads * kStepPer + threadIdx.x;
    float r[kStepPer];
    u32 last[kStepPer];
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i < num) r[j] = rank_by[i], last[j] = load_last(last_sync, i, kLast);
    }
#pragma unroll
    for (u32 j = 0; j < kStepPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i < num) rank_by[i] = with_bits(sort_key(r[j], age_of(last[j], kLast, step) >= max_age));
    }
}

// One coordinate that was synchronised at `last` for the last time, in place.
template <bool kDecay, int kLast>
__device__ __forceinline__ void owner_one(const Owner& c, float& w, float& m, float mean, u32 last) {
    const int age = age_of(last, kLast, c.step - 1) + 1;          // at least 1
    const int oldest = (int)c.num_tables - 1, longest = (int)c.num_decay - 1;
    const int a = c.catch_up ? (age < oldest ? age : oldest) : 1;
    const Coefficients by_age = {c.kept[a], c.taken[a], c.moved[a], c.gradient_moved[a], (float)a};
    catch_up<kDecay>(w, m, mean, by_age, kDecay ? c.decay[age < longest ? age : longest] : 1.0f, c.numbers);
}

// kPer: coordinates of a thread. Scattered ones wait long for memory, and are asked for by as many threads as there are. kLast:
// c.last_bytes.
template <bool kDecay, u32 kPer, int kLast>
__global__ void __launch_bounds__(kThreads) owner_kernel(const Owner c) {
    const i64 start = (i64)blockIdx.x * kThreads * kPer + threadIdx.x;
    i64 at[kPer];
    float w[kPer], m[kPer], mean[kPer];
    u32 last[kPer];
#pragma unroll
    for (u32 j = 0; j < kPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i < c.num) at[j] = c.index ? load_position(c.index, i, c.index_bytes) : i, mean[j] = c.mean[i];
    }
#pragma unroll
    for (u32 j = 0; j < kPer; ++j)
        if (start + j * kThreads < c.num)
            w[j] = c.weight[at[j]], m[j] = c.momentum[at[j]],
            last[j] = load_last(c.last_sync, c.lasts_by_place ? start + j * kThreads : at[j], kLast);
#pragma unroll
    for (u32 j = 0; j < kPer; ++j) {
        const i64 i = start + j * kThreads;
        if (i >= c.num) continue;
        owner_one<kDecay, kLast>(c, w[j], m[j], mean[j], last[j]);
        c.weight[at[j]] = w[j];
        c.momentum[at[j]] = m[j];
        store_last(c.last_sync, c.lasts_by_place ? i : at[j], kLast, (u32)c.step);
        store_float(c.out, i, w[j], c.out_dtype);
    }
}

// All coordinates, four neighbours a thread, which are read and written together: everything is aligned to four elements. (One at a time a
// thread has twice as many accesses, and the tables' come on top.)
template <bool kDecay, int kLast>
__global__ void __launch_bounds__(kThreads) owner_fours_kernel(const Owner c) {
    const i64 start = ((i64)blockIdx.x * kThreads + threadIdx.x) * 4;
    if (start + 4 > c.num) {
        for (i64 i = start; i < c.num; ++i) {
            owner_one<kDecay, kLast>(c, c.weight[i], c.momentum[i], c.mean[i], load_last(c.last_sync, i, kLast));
            store_last(c.last_sync, i, kLast, (u32)c.step);
            store_float(c.out, i, c.weight[i], c.out_dtype);
        }
        return;
    }
    float w[4], m[4], mean[4];
    u32 last[4];
    load_four((u32*)w, c.weight + start);
    load_four((u32*)m, c.momentum + start);
    load_four((u32*)mean, c.mean + start);
    if (kLast == 4) {
        load_four(last, (const u32*)c.last_sync + start);
    } else {
        const uint2 four = *(const uint2*)((const u16*)c.last_sync + start);
        last[0] = four.x & 0xffff, last[1] = four.x >> 16, last[2] = four.y & 0xffff, last[3] = four.y >> 16;
    }
#pragma unroll
    for (u32 j = 0; j < 4; ++j) owner_one<kDecay, kLast>(c, w[j], m[j], mean[j], last[j]);
    store_four(c.weight + start, w);
    store_four(c.momentum + start, m);
    if (kLast == 4) {
        *(uint4*)((u32*)c.last_sync + start) = make_uint4((u32)c.step, (u32)c.step, (u32)c.step, (u32)c.step);
    } else {
        const u32 two = (u32)(u16)c.step * 0x10001u;
        *(uint2*)((u16*)c.last_sync + start) = make_uint2(two, two);
    }
    if (c.out_dtype == kFp32) {
        store_four((float*)c.out + start, w);
    } else {
        const bool is_bf16 = c.out_dtype == kBf16;
        *(uint2*)((u16*)c.out + start) = is_bf16 ? make_uint2(floats_to_bf16x2(w[0], w[1]), floats_to_bf16x2(w[2], w[3]))
                                                 : make_uint2(floats_to_halfx2(w[0], w[1]), floats_to_halfx2(w[2], w[3]));
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
