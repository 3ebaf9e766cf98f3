// The device primitives our kernels are written in: CUDA's own under nvcc and NVRTC, one fiber a thread on a CPU
// (ZIPSCAPE_EMULATE, common/emulate.h). No standard headers, so that the same source compiles under NVRTC.
#ifndef ZIPSCAPE_DEVICE_CUH
#define ZIPSCAPE_DEVICE_CUH

#ifdef ZIPSCAPE_EMULATE
#include "emulate.h"
#elif !defined(__CUDACC_RTC__)
#include <cuda_runtime.h>
#endif

namespace zipscape {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;

__device__ __forceinline__ u32 lane_id() { return threadIdx.x % kWarp; }
__device__ __forceinline__ u32 warp_id() { return threadIdx.x / kWarp; }

__device__ __forceinline__ u32 scan_inclusive(u32 value) {
#pragma unroll
    for (u32 distance = 1; distance < kWarp; distance *= 2) {
        const u32 below = __shfl_up_sync(kAllLanes, value, distance);
        if (lane_id() >= distance) value += below;
    }
    return value;
}

// The compiler moves no memory access across this.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

// Words of 8 bytes that CTAs of the device tell each other, whole or not at all; they bypass L1 and order nothing else.
#ifdef ZIPSCAPE_EMULATE
__device__ __forceinline__ u64 load_message(const u64* p) { return *(const volatile u64*)p; }
__device__ __forceinline__ void store_message(u64* p, u64 value) { *(volatile u64*)p = value; }
#else
__device__ __forceinline__ u64 load_message(const u64* p) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
__device__ __forceinline__ void store_message(u64* p, u64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
#endif

// First thing in a kernel whose launch may overlap the one before it on its stream (sm_90; launched without that attribute, it does nothing):
// the next kernel may start as soon as all CTAs of this one have, and this one waits until all before it is done and seen. Every thread calls
// it, before it reads or writes anything: this kernel is done only when its threads are, so the next one waits for those before it, too.
__device__ __forceinline__ void begin_in_turn() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

// Asks for `bytes` that are read soon to be brought to L2 (both multiples of 16; sm_90, else nothing happens). The multiprocessor's own caches
// learn nothing, so this may come before begin_in_turn: what an earlier kernel writes afterwards is seen all the same.
__device__ __forceinline__ void fetch_to_l2(const u8* p, u32 bytes) {
#if defined(ZIPSCAPE_EMULATE)
    (void)*(const volatile u8*)p, (void)*(const volatile u8*)(p + bytes - 1);          // both must exist
#elif __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}

// The same for the 128 bytes at `p` (a multiple of 128), a line for each lane that calls it.
__device__ __forceinline__ void fetch_line_to_l2(const u8* p) {
#if defined(ZIPSCAPE_EMULATE)
    (void)*(const volatile u8*)p, (void)*(const volatile u8*)(p + 127);
#elif __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
#endif
}

// ---- a barrier in shared memory, for one use, that threads arrive at and wait for apart: what is written before the `count` arrivals is seen
// after the wait. Between barrier_init and the rest: __syncthreads.
#ifdef ZIPSCAPE_EMULATE
__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) { *barrier = count; }
__device__ __forceinline__ void barrier_arrive(u64* barrier) { --*barrier; }
__device__ __forceinline__ void barrier_wait(const u64* barrier) {
    while (*(const volatile u64*)barrier) emulate::yield();
}
#else
__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    const u32 at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_wait(const u64* barrier) {
#if __CUDA_ARCH__ >= 900
#define ZIPSCAPE_TRY_WAIT "mbarrier.try_wait.parity.shared.b64"        // sleeps for a while
#else
#define ZIPSCAPE_TRY_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
    u32 done;
    do {
        asm volatile("{\n\t.reg .pred p;\n\t" ZIPSCAPE_TRY_WAIT " p, [%1], 0;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done) : "r"((u32)__cvta_generic_to_shared(barrier)) : "memory");
    } while (!done);
}
#endif

// Four bytes of a table of eight, `low` the first four, by the nibbles of `index` (0..7) at bits 0, 4, 8 and 12.
__device__ __forceinline__ u32 look_up(u32 low, u32 high, u32 index) {
#ifdef ZIPSCAPE_EMULATE
    return __byte_perm(low, high, index);
#else
    u32 bytes;                         // __byte_perm would clear the nibbles' top bits first
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(index));
    return bytes;
#endif
}

// Position of the highest bit that is set; any number for 0.
__device__ __forceinline__ u32 highest_bit(u32 x) { return 31 - __clz(x); }

// Shared memory whose size the launch says.
#ifdef ZIPSCAPE_EMULATE
#define ZIPSCAPE_DYNAMIC_SHARED(name) static __align__(16) u8 name[256 << 10]
#else
#define ZIPSCAPE_DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]
#endif

// ---- floats as bits; every rounding is to nearest even, denormals are kept

__device__ __forceinline__ float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

#ifdef ZIPSCAPE_EMULATE
__device__ __forceinline__ float half_to_float(u32 bits) { return emulate::half_to_float((u16)bits); }
__device__ __forceinline__ u32 floats_to_bf16x2(float low, float high) {
    return emulate::float_to_bf16(low) | (u32)emulate::float_to_bf16(high) << 16;
}
__device__ __forceinline__ u32 floats_to_halfx2(float low, float high) {
    return emulate::float_to_half(low) | (u32)emulate::float_to_half(high) << 16;
}
#else
__device__ __forceinline__ float half_to_float(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}
__device__ __forceinline__ u32 floats_to_bf16x2(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ u32 floats_to_halfx2(float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
#endif

}  // namespace zipscape

#endif  // ZIPSCAPE_DEVICE_CUH
