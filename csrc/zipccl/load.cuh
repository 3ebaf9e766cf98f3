// A block's raw data into registers: a lane gets its four octets of elements (block.cuh).
#ifndef ZIPCCL_LOAD_CUH
#define ZIPCCL_LOAD_CUH

#include "window.cuh"

namespace zipscape {

template <class F>
__device__ __forceinline__ void set_part(u32 (&x)[F::kWords], u32 part, uint4 v) {
    x[4 * part] = v.x, x[4 * part + 1] = v.y, x[4 * part + 2] = v.z, x[4 * part + 3] = v.w;
}

// 16-byte aligned and complete.
template <class F>
__device__ __forceinline__ void load_aligned(const u8* block, u32 (&x)[F::kWords]) {
#pragma unroll
    for (u32 i = 0; i < F::kWords / 4; i++) set_part<F>(x, i, *(const uint4*)(block + part_offset<F>(i)));
}

// The 16 bytes that start `by` bytes (even, 0..14) into a and b.
__device__ __forceinline__ uint4 shifted(uint4 a, uint4 b, u32 by) {
    u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (u32 i = 0; i < 7; i++) w[i] = by & 4 ? w[i + 1] : w[i];
#pragma unroll
    for (u32 i = 0; i < 5; i++) w[i] = by & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (u32 i = 0; i < 4; i++) w[i] = __funnelshift_r(w[i], w[i + 1], (by & 2) * 8);
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// Complete, any alignment. Reads whole 16-byte units, so what lies around the block must be readable too.
template <class F>
__device__ __forceinline__ void load_shifted(const u8* block, u32 (&x)[F::kWords]) {
    const u32 by = (u32)((u64)block & 15);
#pragma unroll
    for (u32 i = 0; i < F::kWords / 4; i++) {
        const uint4* at = (const uint4*)(block - by + part_offset<F>(i));
        set_part<F>(x, i, shifted(at[0], at[1], by));
        keep_order();                      // all parts under way at once would take more registers than there are
    }
}

// Any alignment; of the block only the first `present` elements exist, the others become 0. `scratch`: kLaneStage bytes of this lane, and
// as many kBlockStage further on.
template <class F>
__device__ __forceinline__ void load_single(const u8* block, u32 present, u8* scratch, u32 (&x)[F::kWords]) {
    constexpr u32 kHalf = kLaneElems / 2 * F::kItem;
#pragma unroll 1
    for (u32 i = 0; i < kLaneElems; i++) {
        const u32 e = octet(i / 8) + i % 8, bits = e < present ? raw_bits<F>(block + e * F::kItem) : 0;
        u8* to = scratch + i / 16 * kBlockStage<F> + i % 16 * F::kItem;
        if (F::kItem == 2) *(u16*)to = (u16)bits;
        else *(u32*)to = bits;
    }
#pragma unroll
    for (u32 i = 0; i < F::kWords / 4; i++)
        set_part<F>(x, i, *(const uint4*)(scratch + 16 * i / kHalf * kBlockStage<F> + 16 * i % kHalf));
}

// Makes absent elements what section 2 says: code 1, remainder 0.
template <class F>
__device__ __forceinline__ void fill_absent(u32 present, u32 lo, u32 (&x)[F::kWords]) {
    const u32 bits = (lo + 1) << F::kMantissa;
#pragma unroll
    for (u32 p = 0; p < 16; p++) {
        const u32 e = element_of_bit(p);
        if (F::kItem == 4) {
            if (e >= present) x[2 * p % F::kWords] = bits;
            if (e + 1 >= present) x[(2 * p + 1) % F::kWords] = bits;
        } else {
            if (e >= present) x[p] = (x[p] & 0xffff0000u) | bits;
            if (e + 1 >= present) x[p] = (x[p] & 0xffff) | bits << 16;
        }
    }
}

}  // namespace zipscape

#endif  // ZIPCCL_LOAD_CUH
