// One warp codes one block of 1024 elements (docs/format.md, sections 2, 4 and 5). A lane owns 32 elements: pairs p = 0..15 of halves
// h = 0..1; two halves are worked on at once, 16 bits each.
#ifndef ZIPCCL_BLOCK_CUH
#define ZIPCCL_BLOCK_CUH

#include "../common/shared.cuh"
#include "geometry.h"

namespace zipscape {

constexpr u32 kZeroMode = 1;
constexpr u32 kBoth = 0x00010001u;          // factors that copy 16 bits to both halves, 8 bits to all bytes
constexpr u32 kBytes = 0x01010101u;

// The rows of codec/dtypes.py, as compile-time numbers. kWords: u32 words of raw data a lane owns. kAt: bit where two exponents are worked
// on, one in each half: in place for 16-bit types (no shifts), packed for FP32.
struct Bf16 {
    static constexpr u32 kCode = 1, kItem = 2, kMantissa = 7, kExponentMask = 0xff, kTopLo = 248, kPlanes = 1, kExtra = 0, kWords = 16, kAt = 7;
};
struct Fp16 {
    static constexpr u32 kCode = 2, kItem = 2, kMantissa = 10, kExponentMask = 0x1f, kTopLo = 24, kPlanes = 1, kExtra = 1, kWords = 16, kAt = 10;
};
struct Fp32 {
    static constexpr u32 kCode = 3, kItem = 4, kMantissa = 23, kExponentMask = 0xff, kTopLo = 248, kPlanes = 3, kExtra = 0, kWords = 32, kAt = 0;
};

// First of the 8 consecutive elements that this lane owns in quarter j of a block.
__device__ __forceinline__ u32 octet(u32 j) { return 256 * j + 8 * lane_id(); }
// Element of bit b = p + 16 h of an escape mask.
__device__ __forceinline__ u32 element_of_bit(u32 b) { return octet((b & 15) >> 2) + 2 * (b & 3) + (b >> 4); }

template <class F>
__device__ __forceinline__ u32 raw_bits(const u8* element) {
    return F::kItem == 2 ? *(const u16*)element : *(const u32*)element;
}

// The lane's raw data of quarter `j`, part `part` of 16 bytes (BF16, FP16: one part, FP32: two), as an offset in a block.
template <class F>
__device__ __forceinline__ u32 part_offset(u32 i) {
    constexpr u32 kParts = F::kWords / 16;
    return octet(i / kParts) * F::kItem + i % kParts * 16;
}

// Raw data of a block into the lane's part of `raw` (shared memory, layout of the block). The first `present` elements exist, absent
// ones become 0. `wide`: complete and 16-byte aligned; such a copy is under way until wait_copies.
template <class F>
__device__ __forceinline__ void copy_raw(u8* raw, const u8* block, u32 present, bool wide) {
    if (wide) {
#pragma unroll
        for (u32 i = 0; i < F::kWords / 4; i++) copy_16_async(raw + part_offset<F>(i), block + part_offset<F>(i));
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < kLaneElems; i++) {
        const u32 e = octet(i / 8) + i % 8, bits = e < present ? raw_bits<F>(block + e * F::kItem) : 0;
        if (F::kItem == 2) *(u16*)(raw + e * 2) = (u16)bits;
        else *(u32*)(raw + e * 4) = bits;
    }
}

// The exponents of pair p, one in each half, at bit F::kAt.
template <class F>
__device__ __forceinline__ u32 exponents(const u32 (&x)[F::kWords], u32 p) {
    if (F::kItem == 4) return ((x[2 * p % F::kWords] >> 23) & 0xff) | ((x[(2 * p + 1) % F::kWords] >> 7) & 0x00ff0000u);
    return x[p] & (F::kExponentMask * kBoth << F::kAt);
}

struct Window { u32 lo, mode; };

// Adds the 3-bit codes of pair p, which are in `c` at bit `at` of both halves (other bits may be set), to the lane's three words.
__device__ __forceinline__ void put_code(u32 (&words)[3], u32 p, u32 c, u32 at) {
    if (p < 15) {
        const u32 to = 3 * (p / 3);
        words[p % 3] |= (to >= at ? c << (to - at) % 32 : c >> (at - to) % 32) & 7 * kBoth << to;
    } else {
        words[0] |= (c << (15 - at)) & kBoth << 15;
        words[1] |= (c << (14 - at)) & kBoth << 15;
        words[2] |= (c << (13 - at)) & kBoth << 15;
    }
}

// The code of pair p, moved to bit `at` of both halves. `p` and `at` are compile-time numbers after unrolling.
__device__ __forceinline__ u32 get_code(const u32 (&words)[3], u32 p, u32 at) {
    if (p < 15) {
        const u32 from = 3 * (p / 3);
        return (from >= at ? words[p % 3] >> (from - at) % 32 : words[p % 3] << (at - from) % 32) & (7 * kBoth) << at;
    }
    return ((words[0] >> (15 - at)) & kBoth << at) | ((words[1] >> (14 - at)) & 2 * kBoth << at) |
           ((words[2] >> (13 - at)) & 4 * kBoth << at);
}

template <class F>
__device__ __forceinline__ void pack_codes(const u32 (&x)[F::kWords], Window w, u32 (&words)[3]) {
    constexpr u32 kAt = F::kAt, kOne = kBoth << kAt;
    const u32 minus_lo = ((0u - (w.lo << kAt)) & 0xffff) * kBoth;
    words[0] = words[1] = words[2] = 0;
    if (w.mode != kZeroMode) {
#pragma unroll
        for (u32 p = 0; p < 16; p++)                                // distance 1..7, else 0: 8 and more (also negative) lose bit 3
            put_code(words, p, __viaddmin_u16x2(exponents<F>(x, p), minus_lo, 8 * kOne), kAt);
    } else {
#pragma unroll
        for (u32 p = 0; p < 16; p++) {
            const u32 e = exponents<F>(x, p), distance = __viaddmin_u16x2(e, minus_lo, 7 * kOne);
            const u32 zero = __vminu2(e, kOne) ^ kOne, outside = (distance + kOne) >> 3 & kOne;
            put_code(words, p, (distance - outside * 7) | zero * 7, kAt);
        }
    }
}

// Bit p + 16 h is set where the lane's code of (p, h) is 0. Bits ascend in scan order.
__device__ __forceinline__ u32 escape_mask(const u32 (&w)[3]) {
    const u32 fields = 0x12491249u;
    return (~(w[0] | w[0] >> 1 | w[0] >> 2) & fields) | (~(w[1] | w[1] >> 1 | w[1] >> 2) & fields) << 1 |
           (~(w[2] | w[2] >> 1 | w[2] >> 2) & fields) << 2 | (~(w[0] | w[1] | w[2]) & 0x80008000u);
}

__device__ __forceinline__ void store_codes(u8* codes, const u32 (&words)[3]) {
#pragma unroll
    for (u32 k = 0; k < 3; k++) *(u32*)(codes + 128 * k + 4 * lane_id()) = words[k];
}

__device__ __forceinline__ void load_codes(const u8* codes, u32 (&words)[3]) {
#pragma unroll
    for (u32 k = 0; k < 3; k++) words[k] = *(const u32*)(codes + 128 * k + 4 * lane_id());
}

// ---- remainders

template <class F>
__device__ __forceinline__ void store_remainders(const u32 (&x)[F::kWords], u8* extra, u8* planes) {
    if (F::kExtra) {
        u32 words[3] = {0, 0, 0};
#pragma unroll
        for (u32 p = 0; p < 16; p++) put_code(words, p, (x[p] >> 8 & 3 * kBoth) | (x[p] >> 13 & 4 * kBoth), 0);
        store_codes(extra, words);
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        if constexpr (F::kItem == 4) {
            u32 low[4], high[2];               // remainder bytes 0 and 1 of two elements each, byte 2 of four elements
#pragma unroll
            for (u32 i = 0; i < 4; i++) low[i] = __byte_perm(x[8 * j + 2 * i], x[8 * j + 2 * i + 1], 0x5140);
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32* e = x + 8 * j + 4 * i;
                const u32 mantissa = __byte_perm(__byte_perm(e[0], e[1], 0x0062), __byte_perm(e[2], e[3], 0x0062), 0x5410);
                const u32 sign = __byte_perm(__byte_perm(e[0], e[1], 0x0073), __byte_perm(e[2], e[3], 0x0073), 0x5410);
                high[i] = (mantissa & 0x7f7f7f7fu) | (sign & 0x80808080u);
            }
            u8* at = planes + octet(j);
            *(uint2*)at = make_uint2(__byte_perm(low[0], low[1], 0x5410), __byte_perm(low[2], low[3], 0x5410));
            *(uint2*)(at + kBlockElems) = make_uint2(__byte_perm(low[0], low[1], 0x7632), __byte_perm(low[2], low[3], 0x7632));
            *(uint2*)(at + 2 * kBlockElems) = make_uint2(high[0], high[1]);
        } else {
            u32 plane[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 a = x[4 * j + 2 * i], b = x[4 * j + 2 * i + 1];
                plane[i] = __byte_perm(a, b, 0x6420);
                if (F::kMantissa == 7) plane[i] = (plane[i] & 0x7f7f7f7fu) | (__byte_perm(a, b, 0x7531) & 0x80808080u);
            }
            *(uint2*)(planes + octet(j)) = make_uint2(plane[0], plane[1]);
        }
    }
}

// A block as it is stored, without its escapes.
template <class F>
struct Stored {
    u32 codes[3];
    u32 extra[F::kExtra ? 3 : 1];
    uint2 planes[F::kPlanes * 4];
};

template <class F>
__device__ __forceinline__ void load_stored(Stored<F>& s, const u8* codes, const u8* extra, const u8* planes) {
    load_codes(codes, s.codes);
    if constexpr (F::kExtra) load_codes(extra, s.extra);
#pragma unroll
    for (u32 i = 0; i < F::kPlanes; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) s.planes[4 * i + j] = *(const uint2*)(planes + kBlockElems * i + octet(j));
}

// The exponent of the codes of pair p, shifted left by `at`, from lo_at = lo << at in both halves; escapes get `lo`, replaced later.
template <bool kZeros>
__device__ __forceinline__ u32 coded_exponents(const u32 (&codes)[3], u32 p, u32 lo_at, u32 at) {
    const u32 c = get_code(codes, p, at);
    if (!kZeros) return c + lo_at;
    const u32 seven = (c + (kBoth << at)) >> (at + 3) & kBoth;
    return (c + lo_at) & ~(seven * (((0x8000u >> at) - 1) << at));
}

// Raw data of the lane's 4 pairs of quarter j, escapes excepted.
template <class F, bool kZeros>
__device__ __forceinline__ void unpack_quarter(const Stored<F>& s, u32 lo, u32 j, u32 (&x)[F::kWords / 4]) {
    constexpr u32 kAt = F::kAt;
    const u32 lo_at = (lo << kAt) * kBoth;
#pragma unroll
    for (u32 w = 0; w < 4; w++) {
        const u32 odd = w & 1, e = coded_exponents<kZeros>(s.codes, 4 * j + w, lo_at, kAt);
        if constexpr (F::kItem == 4) {
            const u32 b0 = w & 2 ? s.planes[j].y : s.planes[j].x, b1 = w & 2 ? s.planes[4 + j].y : s.planes[4 + j].x;
            const u32 b2 = w & 2 ? s.planes[8 + j].y : s.planes[8 + j].x;
            const u32 low = __byte_perm(b0, b1, odd ? 0x7362 : 0x5140);                  // bytes 0, 1 of both elements
            const u32 first = __byte_perm(low, b2, odd ? 0x6610 : 0x4410), second = __byte_perm(low, b2, odd ? 0x7732 : 0x5532);
            x[2 * w] = (first & 0x807fffffu) | (e & 0xff) << 23;                         // byte 2 twice: its top bit is the sign
            x[2 * w + 1] = (second & 0x807fffffu) | (e >> 16) << 23;
        } else if constexpr (F::kExtra) {
            const u32 high = get_code(s.extra, 4 * j + w, 8);
            x[w] = (e + __byte_perm(w & 2 ? s.planes[j].y : s.planes[j].x, 0, odd ? 0x4342 : 0x4140)) | (high & 0x03000300u) |
                   (high & 0x04000400u) << 5;
        } else {
            const u32 four = w & 2 ? s.planes[j].y : s.planes[j].x;                      // remainders of four elements
            x[w] = e + __byte_perm(four & 0x7f7f7f7fu, four & 0x80808080u, odd ? 0x7362 : 0x5140);
        }
    }
}

// Raw data of the block, escapes excepted, into the lane's part of `raw` (shared memory, layout of the block).
template <class F, bool kZeros>
__device__ __forceinline__ void unpack_as(const Stored<F>& s, u32 lo, u8* raw) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 x[F::kWords / 4];
        unpack_quarter<F, kZeros>(s, lo, j, x);
#pragma unroll
        for (u32 i = 0; i < F::kWords / 16; i++)
            *(uint4*)(raw + part_offset<F>(j * (F::kWords / 16) + i)) = make_uint4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
}

template <class F>
__device__ __forceinline__ void unpack(const Stored<F>& s, Window w, u8* raw) {
    if (w.mode != kZeroMode) unpack_as<F, false>(s, w.lo, raw);
    else unpack_as<F, true>(s, w.lo, raw);
}

}  // namespace zipscape

#endif  // ZIPCCL_BLOCK_CUH
