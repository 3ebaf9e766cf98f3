// Fingerprints of many tensors by one kernel (collectives/fingerprint.py has the rule): sums of 64-bit words over rows of 256 bytes, then the
// 16-bit elements before the first and behind the last whole row.
#ifndef ZIPCCL_PRINTS_CUH
#define ZIPCCL_PRINTS_CUH

#include "../common/device.cuh"

namespace zipscape {

// In device memory. fingerprint.py repeats it.
struct Print {
    const u8* data;
    i64 numel, lead;                                       // of 2 bytes each; those before the first row, which is aligned to 8 bytes
    i64* sums;
    u8* differs;                                           // set to 1 where `sums` is not the data's, if that is asked
};

constexpr u32 kPrintWarps = 8, kRowsOfAWarp = 4, kRowWords = 32, kRowHalves = 4 * kRowWords;

__device__ __forceinline__ u64 add_of_lanes(u64 value, u32 distance) {
    const u32 from = lane_id() ^ distance;
    const u32 low = __shfl_sync(kAllLanes, (u32)value, from), high = __shfl_sync(kAllLanes, (u32)(value >> 32), from);
    return value + ((u64)high << 32 | low);
}

// Grid: (any, tensors). Eight lanes have a row.
__device__ __forceinline__ void print_rows(const Print& p, bool compares) {
    const i64 lead = p.lead < p.numel ? p.lead : p.numel, num_rows = (p.numel - lead) / kRowHalves;
    const u64* words = (const u64*)(p.data + 2 * lead);
    const i64 step = (i64)gridDim.x * kPrintWarps * kRowsOfAWarp;
    bool differs = false;
    for (i64 first = ((i64)blockIdx.x * kPrintWarps + warp_id()) * kRowsOfAWarp; first < num_rows; first += step) {
        const i64 row = first + lane_id() / 8;
        u64 sum = 0;
        if (row < num_rows) {
#pragma unroll
            for (u32 i = 0; i < kRowWords / 8; i++) sum += words[row * kRowWords + lane_id() % 8 + 8 * i];
        }
#pragma unroll
        for (u32 distance = 1; distance < 8; distance *= 2) sum = add_of_lanes(sum, distance);
        if (row < num_rows && lane_id() % 8 == 0) {
            if (compares) differs = differs || p.sums[row] != (i64)sum;
            else p.sums[row] = (i64)sum;
        }
    }
    if (blockIdx.x == 0) {
        for (i64 i = threadIdx.x; i < p.numel - num_rows * kRowHalves; i += blockDim.x) {
            const i64 half = ((const short*)p.data)[i < lead ? i : i + num_rows * kRowHalves];
            if (compares) differs = differs || p.sums[num_rows + i] != half;
            else p.sums[num_rows + i] = half;
        }
    }
    if (differs) *p.differs = 1;
}

extern "C" __global__ void __launch_bounds__(kPrintWarps * 32) zipccl_prints(const Print* table, u32 compares) {
    print_rows(table[blockIdx.y], compares != 0);
}

// Of `num` tensors, the largest of `most` elements.
extern "C" int zipccl_cuda_prints(const void* table, i64 num, i64 most, i64 compares, void* stream) {
    const i64 blocks = most / (kRowHalves * kPrintWarps * kRowsOfAWarp * 4) + 1;
    const dim3 grid((u32)(blocks < 256 ? blocks : 256), (u32)num);
    if (!num) return 0;
#ifdef ZIPSCAPE_EMULATE
    (void)stream;
    emulate::launch(grid, kPrintWarps * 32, [&] { zipccl_prints((const Print*)table, (u32)compares); });
    return 0;
#else
    zipccl_prints<<<grid, kPrintWarps * 32, 0, (cudaStream_t)stream>>>((const Print*)table, (u32)compares);
    return (int)cudaGetLastError();
#endif
}

}  // namespace zipscape

#endif  // ZIPCCL_PRINTS_CUH
