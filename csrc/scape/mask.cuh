// Masks as messages (cpu_mask.h has the same in C++). On the way they are 32-bit words, element i being bit i % 32 of word i / 32.
#ifndef SCAPE_MASK_CUH
#define SCAPE_MASK_CUH

#include "device.cuh"

namespace scape {

constexpr i64 kIndexBlock = 1 << 16;
constexpr u32 kBlockWords = kIndexBlock / 32, kWordsPer = kBlockWords / kThreads;

struct Range {
    i64 start, stop;
};

// Bytes that are 0 or 1 -> words, 1,024 bytes a warp. kSixteen: the mask is aligned to 16, so that a lane takes so many at once.
template <bool kSixteen>
__global__ void __launch_bounds__(kThreads) words_kernel(const u8* mask, i64 numel, u32* words) {
    const i64 start = ((i64)blockIdx.x * (kThreads / kWarp) + warp_id()) * kWarp * kWarp;
    if (kSixteen && start + kWarp * kWarp <= numel) {
        uint4 bytes[2];
#pragma unroll
        for (u32 j = 0; j < 2; ++j) bytes[j] = *(const uint4*)(mask + start + (j * kWarp + lane_id()) * 16);
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            const u32 fours[4] = {bytes[j].x, bytes[j].y, bytes[j].z, bytes[j].w};
            u32 own = 0;
#pragma unroll
            for (u32 f = 0; f < 4; ++f) own |= (fours[f] * 0x01020408u >> 24) << 4 * f;          // four bytes to four bits
            const u32 next = __shfl_sync(kAllLanes, own, lane_id() | 1);
            if (lane_id() % 2 == 0) words[start / 32 + (j * kWarp + lane_id()) / 2] = own | next << 16;
        }
        return;
    }
    u32 own = 0;
#pragma unroll 8
    for (u32 j = 0; j < kWarp; ++j) {
        const i64 i = start + j * kWarp + lane_id();
        const u32 word = __ballot_sync(kAllLanes, i < numel && mask[i]);
        if (lane_id() == j) own = word;
    }
    const i64 at = start / 32 + lane_id();
    if (at < (numel + 31) / 32) words[at] = own;
}

// Sets or clears the bits of a range; a CTA for each.
__global__ void __launch_bounds__(kThreads) fill_kernel(u32* words, const Range* ranges, int value) {
    const Range range = ranges[blockIdx.x];
    const i64 last = (range.stop - 1) / 32;
    for (i64 w = range.start / 32 + threadIdx.x; w <= last; w += kThreads) {
        u32 mask = kAllLanes;
        if (32 * w < range.start) mask <<= range.start - 32 * w;
        if (32 * w + 32 > range.stop) mask &= kAllLanes >> (32 * w + 32 - range.stop);
        if (value)
            atomicOr(&words[w], mask);
        else
            atomicAnd(&words[w], ~mask);
    }
}

// A run of up to 65,536 bits that begins and ends anywhere: of a block of the message, or of a part of the positions.
struct Run {
    i64 start, stop;
};

// The words of a thread of the CTA, neighbours', without the bits outside of the run. The run's first word is the CTA's first.
struct RunWords {
    u32 word[kWordsPer + 1];
    i64 first;  // element of the first bit

    __device__ __forceinline__ RunWords(const u32* words, const Run& run) {
        const i64 start = run.start / 32 + threadIdx.x * (kWordsPer + 1);
        first = 32 * start;
#pragma unroll
        for (u32 j = 0; j <= kWordsPer; ++j) {
            const i64 begin = 32 * (start + j);
            word[j] = 0;
            if (begin >= run.stop) continue;
            u32 mask = kAllLanes;
            if (begin < run.start) mask <<= run.start - begin;
            if (begin + 32 > run.stop) mask &= kAllLanes >> (begin + 32 - run.stop);
            word[j] = words[start + j] & mask;
        }
    }
    __device__ __forceinline__ u32 ones() const {
        u32 total = 0;
#pragma unroll
        for (u32 j = 0; j <= kWordsPer; ++j) total += __popc(word[j]);
        return total;
    }
    // visit(k, element) for the k-th one of the CTA, `before` of them being in the threads before.
    template <class Visit>
    __device__ __forceinline__ void each(u32 before, const Visit& visit) const {
#pragma unroll
        for (u32 j = 0; j <= kWordsPer; ++j)
            for (u32 left = word[j]; left; left &= left - 1) visit(before++, first + 32 * j + (__ffs((int)left) - 1));
    }
};

// Ones of every run, into counts[run].
__global__ void __launch_bounds__(kThreads) count_kernel(const u32* words, const Run* runs, u32* counts) {
    __shared__ u32 shared[kThreads / kWarp];
    u32 total;
    scan_cta(RunWords(words, runs[blockIdx.x]).ones(), shared, total);
    if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// before[i]: sum of the counts before i, i up to num, by one CTA. Counts come as 16-bit halves, at any even address. A count beyond
// 65,536, or a sum beyond `room`, makes before[num] -1 and all others 0.
__global__ void __launch_bounds__(kThreads) before_kernel(const u16* counts, i64 num, i64 room, i64* before) {
    __shared__ u32 shared[kThreads / kWarp];
    i64 sum = 0;
    bool wrong = false;
    for (i64 start = 0; start < num; start += kThreads) {
        const i64 i = start + threadIdx.x;
        u32 count = i < num ? counts[2 * i] | (u32)counts[2 * i + 1] << 16 : 0, total;
        if (count > (u32)kIndexBlock) wrong = true, count = 0;
        const u32 own = scan_cta(count, shared, total);
        if (i < num) before[i] = sum + own;
        sum += total;
    }
    u32 wrongs;
    scan_cta(wrong, shared, wrongs);
    if (wrongs || sum > room) {
        for (i64 i = threadIdx.x; i < num; i += kThreads) before[i] = 0;
        sum = -1;
    }
    if (threadIdx.x == 0) before[num] = sum;
}

// The 16-bit offsets of the ones of every block (run), at most `room` in all.
__global__ void __launch_bounds__(kThreads) offsets_kernel(const u32* words, const Run* runs, const i64* before, i64 room, u16* offsets) {
    __shared__ u32 shared[kThreads / kWarp];
    const RunWords own(words, runs[blockIdx.x]);
    u32 total;
    const u32 mine = scan_cta(own.ones(), shared, total);
    const i64 base = before[blockIdx.x];
    own.each(mine, [&](u32 k, i64 element) {
        if (base + k < room) offsets[base + k] = (u16)element;
    });
}

// The inverse: words of every block from its offsets; nothing where the counts were wrong.
__global__ void __launch_bounds__(kThreads) bits_kernel(const u16* offsets, const i64* before, u32* words) {
    __shared__ u32 block[kBlockWords];
    for (u32 w = threadIdx.x; w < kBlockWords; w += kThreads) block[w] = 0;
    __syncthreads();
    if (before[gridDim.x] >= 0)
        for (i64 i = before[blockIdx.x] + threadIdx.x; i < before[blockIdx.x + 1]; i += kThreads)
            atomicOr(&block[offsets[i] / 32], 1u << offsets[i] % 32);
    __syncthreads();
    for (u32 w = threadIdx.x; w < kBlockWords; w += kThreads) words[(i64)blockIdx.x * kBlockWords + w] = block[w];
}

// Positions of the ones of every run, counted from bases[run], one run after another; at most `room` in all. They are put into their order
// in shared memory, and written side by side.
template <class Index>
__global__ void __launch_bounds__(kThreads) positions_kernel(const u32* words, const Run* runs, const i64* bases, const i64* before,
                                                             i64 room, Index* positions) {
    constexpr u32 kStaged = 1 << 13;
    __shared__ u32 shared[kThreads / kWarp];
    __shared__ u16 staged[kStaged];             // from the run's start
    const Run run = runs[blockIdx.x];
    const RunWords own(words, run);
    u32 total;
    const u32 ones = own.ones(), mine = scan_cta(ones, shared, total);
    const i64 first = before[blockIdx.x], shift = run.start - bases[blockIdx.x];
    for (u32 begin = 0; begin < total; begin += kStaged) {
        const u32 num = total - begin < kStaged ? total - begin : kStaged;
        if (mine < begin + num && mine + ones > begin)
            own.each(mine, [&](u32 k, i64 element) {
                if (k >= begin && k - begin < num) staged[k - begin] = (u16)(element - run.start);
            });
        __syncthreads();
        for (u32 k = threadIdx.x; k < num; k += kThreads)
            if (first + begin + k < room) positions[first + begin + k] = (Index)(shift + staged[k]);
        __syncthreads();
    }
}

}  // namespace scape

#endif  // SCAPE_MASK_CUH
