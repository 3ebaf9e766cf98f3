// Shared memory by its own addresses, 32-bit numbers (the compiler would work out a pointer anew at every access in a loop), and copies to it
// that need no registers on the way. Nothing here is moved across one another, or across a barrier, by the compiler.
#ifndef ZIPSCAPE_SHARED_CUH
#define ZIPSCAPE_SHARED_CUH

#include "device.cuh"

namespace zipscape {

#ifdef ZIPSCAPE_EMULATE
typedef u64 SharedAddress;
__device__ __forceinline__ SharedAddress shared_address(const void* p) { return (u64)p; }
__device__ __forceinline__ u8 load_shared_u8(SharedAddress a) { return *(const u8*)a; }
__device__ __forceinline__ u32 load_shared_u32(SharedAddress a) { return *(const u32*)a; }
__device__ __forceinline__ uint2 load_shared_uint2(SharedAddress a) { return *(const uint2*)a; }
__device__ __forceinline__ uint4 load_shared_uint4(SharedAddress a) { return *(const uint4*)a; }
__device__ __forceinline__ void store_shared(SharedAddress a, u16 v) { *(u16*)a = v; }
__device__ __forceinline__ void store_shared(SharedAddress a, uint4 v) { *(uint4*)a = v; }
__device__ __forceinline__ void add_shared(SharedAddress a, u32 v) { *(u32*)a += v; }
#else
typedef u32 SharedAddress;
__device__ __forceinline__ SharedAddress shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u8 load_shared_u8(SharedAddress a) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
    return (u8)v;
}
__device__ __forceinline__ u32 load_shared_u32(SharedAddress a) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
    return v;
}
__device__ __forceinline__ uint2 load_shared_uint2(SharedAddress a) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_shared_uint4(SharedAddress a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared(SharedAddress a, u16 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"(v) : "memory"); }
__device__ __forceinline__ void store_shared(SharedAddress a, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Adds without waiting for what is there.
__device__ __forceinline__ void add_shared(SharedAddress a, u32 v) { asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
#endif

// ---- copies: a thread sees its own ones after wait_copies. Where `on` is false, nothing is copied.

#ifdef ZIPSCAPE_EMULATE
__device__ __forceinline__ void copy_16_async(SharedAddress to, const void* from, bool on = true) {
    if (on) emulate::copy_async((void*)to, from, 16);
}
__device__ __forceinline__ void copy_4_async(SharedAddress to, const void* from, bool on) {
    if (on) emulate::copy_async((void*)to, from, 4);
}
__device__ __forceinline__ void commit_copies() { emulate::commit_copies(); }
template <u32 kLeft>
__device__ __forceinline__ void wait_copies() { emulate::wait_copies(kLeft); }
#else
__device__ __forceinline__ void copy_16_async(SharedAddress to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_16_async(SharedAddress to, const void* from, bool on) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t@p cp.async.cg.shared.global [%0], [%1], 16;\n\t}"
                 ::"r"(to), "l"(from), "r"((u32)on) : "memory");
}
__device__ __forceinline__ void copy_4_async(SharedAddress to, const void* from, bool on) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t@p cp.async.ca.shared.global [%0], [%1], 4;\n\t}"
                 ::"r"(to), "l"(from), "r"((u32)on) : "memory");
}
// Ends a batch of copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kLeft batches are under way.
template <u32 kLeft>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory"); }
#endif

__device__ __forceinline__ void copy_16_async(void* to, const void* from) { copy_16_async(shared_address(to), from); }

}  // namespace zipscape

#endif  // ZIPSCAPE_SHARED_CUH
