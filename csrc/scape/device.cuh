// What SCAPE's CUDA kernels have in common: launching, conversions, searches and sums that a warp or a CTA does together.
#ifndef SCAPE_DEVICE_CUH
#define SCAPE_DEVICE_CUH

#include "common/device.cuh"
#include "calls.h"

#ifdef ZIPSCAPE_EMULATE
typedef void* cudaStream_t;
#define SCAPE_LAUNCH(kernel, grid, threads, stream, ...) emulate::launch(dim3((unsigned)(grid)), threads, [&] { kernel(__VA_ARGS__); })
#define SCAPE_LAUNCH_NEXT SCAPE_LAUNCH
static int last_error() { return 0; }
#else
#define SCAPE_LAUNCH(kernel, grid, threads, stream, ...) kernel<<<(unsigned)(grid), threads, 0, stream>>>(__VA_ARGS__)
// The same, but it may begin while the kernel before it ends, which is of this library: both call begin_in_turn().
#define SCAPE_LAUNCH_NEXT(kernel, grid, threads, stream, ...) launch_next(kernel, (unsigned)(grid), threads, stream, __VA_ARGS__)
static int last_error() { return (int)cudaGetLastError(); }

__global__ void probe_kernel() {}
// Not where the code is for a GPU that begin_in_turn() does nothing on.
static bool may_overlap() {
    constexpr int kDevices = 64;
    static signed char known[kDevices];             // 0: not yet, 1: yes, -1: no
    int device = 0;
    if (cudaGetDevice(&device) || device >= kDevices) return false;
    if (!known[device]) {
        cudaFuncAttributes attributes;
        known[device] = !cudaFuncGetAttributes(&attributes, probe_kernel) && attributes.ptxVersion >= 90 ? 1 : -1;
    }
    return known[device] > 0;
}

template <class... Wanted, class... Given>
static void launch_next(void (*kernel)(Wanted...), unsigned grid, unsigned threads, cudaStream_t stream, const Given&... given) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid), config.blockDim = dim3(threads), config.stream = stream;
    config.attrs = &attribute, config.numAttrs = may_overlap() ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, Wanted(given)...);
}
#endif

namespace scape {

using namespace zipscape;

constexpr u32 kThreads = 256;

inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

__device__ __forceinline__ u16 to_bf16(float value) { return (u16)floats_to_bf16x2(value, 0.0f); }
__device__ __forceinline__ u16 to_half(float value) { return (u16)floats_to_halfx2(value, 0.0f); }

// An element as it lies in memory, and what it says. Apart, so that a thread asks for all its elements before it needs one of them.
__device__ __forceinline__ u32 load_raw(const void* from, i64 i, int dtype) {
    return dtype == kFp32 ? ((const u32*)from)[i] : ((const u16*)from)[i];
}
__device__ __forceinline__ float float_of(u32 raw, int dtype) {
    return dtype == kFp32 ? __uint_as_float(raw) : dtype == kBf16 ? bf16_to_float(raw) : half_to_float(raw);
}
__device__ __forceinline__ i64 load_position(const void* index, i64 i, int bytes) {
    return bytes == 4 ? (i64)((const u32*)index)[i] : ((const i64*)index)[i];
}
// Of a synchronisation's step, kept in 4 bytes or 2 (calls.h). (Several in a row only where `bytes` is a constant: loads of both kinds into
// one register wait for each other, though one of them never happens.)
__device__ __forceinline__ u32 load_last(const void* last_sync, i64 i, int bytes) {
    return bytes == 4 ? ((const u32*)last_sync)[i] : ((const u16*)last_sync)[i];
}
__device__ __forceinline__ void store_last(void* last_sync, i64 i, int bytes, u32 last) {
    if (bytes == 4)
        ((u32*)last_sync)[i] = last;
    else
        ((u16*)last_sync)[i] = (u16)last;
}
__device__ __forceinline__ int age_of(u32 last, int bytes, int step) {
    return bytes == 4 ? step - (int)last : (int)(u16)((u32)step - last);
}

// About sqrt(x) and 1 / x, to a millionth; denormal x count as 0, negative ones too. (Emulated they are as far off as they may be, this way
// or that.)
#ifdef ZIPSCAPE_EMULATE
__device__ __forceinline__ float off_by(float x) { return bits_of(x) >> 3 & 1 ? 1.000001f : 0.999999f; }
__device__ __forceinline__ float about_root(float x) { return (bits_of(x) & 0x7F800000u) ? root(x) * off_by(x) : x * 0.0f; }
__device__ __forceinline__ float about_inverse(float x) { return off_by(x) / x; }
#else
__device__ __forceinline__ float about_root(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float about_inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// A place in shared memory by its own address: from a pointer the compiler would work it out anew at every access.
#ifdef ZIPSCAPE_EMULATE
typedef u8* SharedPlace;
__device__ __forceinline__ SharedPlace shared_place(void* p) { return (u8*)p; }
__device__ __forceinline__ u32 load_place(SharedPlace p) { return *p; }
__device__ __forceinline__ void store_place(SharedPlace p, u32 value) { *p = (u8)value; }
#else
typedef u32 SharedPlace;
__device__ __forceinline__ SharedPlace shared_place(void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 load_place(SharedPlace p) {
    u32 value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(p) : "memory");
    return value;
}
__device__ __forceinline__ void store_place(SharedPlace p, u32 value) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(p), "r"(value) : "memory");
}
#endif

// Four neighbours of 4 bytes, at once; `from` and `to` are aligned to 16.
__device__ __forceinline__ void load_four(u32* to, const void* from) {
    const uint4 four = *(const uint4*)from;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
__device__ __forceinline__ void store_four(float* to, const float* from) {
    *(uint4*)to = make_uint4(bits_of(from[0]), bits_of(from[1]), bits_of(from[2]), bits_of(from[3]));
}

// Rounds to nearest even; returns what a reader will read.
__device__ __forceinline__ float store_float(void* to, i64 i, float value, int dtype) {
    if (dtype == kFp32) {
        ((float*)to)[i] = value;
        return value;
    }
    const u16 bits = dtype == kBf16 ? to_bf16(value) : to_half(value);
    ((u16*)to)[i] = bits;
    return dtype == kBf16 ? bf16_to_float(bits) : half_to_float(bits);
}

// Exclusive prefix sum over the CTA's threads; `total` is everybody's sum. `shared`: a word for each warp. All threads call it.
__device__ __forceinline__ u32 scan_cta(u32 value, u32* shared, u32& total) {
    const u32 inclusive = scan_inclusive(value), warps = blockDim.x / kWarp;
    __syncthreads();
    if (lane_id() == kWarp - 1) shared[warp_id()] = inclusive;
    __syncthreads();
    u32 before = 0;
    total = 0;
    for (u32 w = 0; w < warps; ++w) {
        if (w < warp_id()) before += shared[w];
        total += shared[w];
    }
    return before + inclusive - value;
}

}  // namespace scape

#endif  // SCAPE_DEVICE_CUH
