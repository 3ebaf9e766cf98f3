// Fingerprints of many tensors by one kernel (collectives/fingerprint.py has the rule): sums of 64-bit words over rows of 256 bytes, then the
// 16-bit elements before the first and behind the last whole row.
#ifndef ZIPCCL_PRINTS_CUH
#define ZIPCCL_PRINTS_CUH

#include "../common/device.cuh"

namespace zipscape {

// cuda_calls.py repeats it.
struct Print {
    const u8* data;
    i64 numel, lead;                                       // of 2 bytes each; those before the first row, which is aligned to 8 bytes
    i64* sums;
    u8* differs;                                           // set to 1 where `sums` is not the data's, if that is asked
};

// As many as a kernel takes as arguments: no table in device memory, whose making might wait for what the stream has to do.
constexpr u32 kMaxPrints = 100;
struct Prints {
    Print of[kMaxPrints];
    u32 compares;
};
static_assert(sizeof(Prints) <= 4096, "arguments of a kernel");

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

extern "C" __global__ void __launch_bounds__(kPrintWarps * 32) zipccl_prints(const __grid_constant__ Prints p) {
    print_rows(p.of[blockIdx.y], p.compares != 0);
}

// Of `num` tensors; `prints`: host memory, read before return.
extern "C" int zipccl_cuda_prints(const Print* prints, i64 num, i64 compares, void* stream) {
    for (i64 first = 0; first < num; first += kMaxPrints) {
        Prints p;
        const i64 here = num - first < kMaxPrints ? num - first : kMaxPrints;
        i64 most = 0;
        for (i64 i = 0; i < here; i++) {
            p.of[i] = prints[first + i];
            if (p.of[i].numel > most) most = p.of[i].numel;
        }
        p.compares = (u32)compares;
        const i64 blocks = most / (kRowHalves * kPrintWarps * kRowsOfAWarp * 4) + 1;
        const dim3 grid((u32)(blocks < 256 ? blocks : 256), (u32)here);
#ifdef ZIPSCAPE_EMULATE
        (void)stream;
        emulate::launch(grid, kPrintWarps * 32, [&] { zipccl_prints(p); });
#else
        zipccl_prints<<<grid, kPrintWarps * 32, 0, (cudaStream_t)stream>>>(p);
        const int code = (int)cudaGetLastError();
        if (code) return code;
#endif
    }
    return 0;
}

}  // namespace zipscape

#endif  // ZIPCCL_PRINTS_CUH
