// One warp codes one block at level 2 (docs/format.md, section 9): BF16, six exponents in codes of 2 and 2 bits, a nibble for fifteen
// others, the rest raw. All but the first codes of a block is its stream, which is put together and taken apart in shared memory.
//
// A lane's 32 elements are fields of 2 bits in two words k: element (j, k, w, h) is field 4 (w + 2 h) + j of word k. Sets of elements are
// masks of their fields' lower bits; the masks of both words together have bit 8 (w + 2 h) + 2 j + k.
#ifndef ZIPCCL_LEVEL2_CUH
#define ZIPCCL_LEVEL2_CUH

#include "window.cuh"

namespace zipscape {

constexpr u32 kCode2Bytes = 256, kStreamBytes = 1792, kTopLo2 = 250, kTopMode2 = 5, kFields = 0x55555555u;
enum { kClassB = 1, kZeroSecond = 2, kZeroFirst = 4 };         // bits of a block mode

// ---- window

// The lane's exponents, eight words q = 2 j + k of byte w + 2 h each, at `stage` + 128 q (shared memory; lanes are 4 bytes apart).
__device__ __forceinline__ Sums stage_exponents2(const u32 (&x)[16], u8* stage) {
    Sums s = {0, 0, 0};
#pragma unroll
    for (u32 q = 0; q < 8; q++) {
        const u32 e = __byte_perm(x[2 * q] >> 7, x[2 * q + 1] >> 7, 0x6240);
        s.sum = __dp4a(e, kBytes, s.sum);
        s.squares = __dp4a(e, e, s.squares);
        s.zeros |= (e - kBytes) & ~e;
        *(u32*)(stage + 128 * q) = e;
    }
    return s;
}

// Where the exponent of bit b of a combined mask is.
__device__ __forceinline__ u32 stage2_of_bit(u32 b) { return (b << 7 & 0x380) | b >> 3; }

// kFull: a complete block without zeros.
template <bool kFull>
__device__ __forceinline__ Window window2(u32 sum, u32 squares, u32 count, u32 present) {
    const u32 n = kFull ? kBlockElems : count;
    const bool spread = (u64)n * squares > (u64)sum * sum + 3 * n * n;
    const u32 off = (spread ? 31 : 33) * n;
    Window w = {0, 0};
    if (n != 0 && 32 * sum >= off) {
        const u32 u = 32 * sum - off, base = kFull ? u / (32 * kBlockElems) : divide_small(u, 32 * n), rest = u - base * 32 * n;
        w.mode = !spread && rest < 13 * n ? kClassB : 0;
        const u32 down = 1 + w.mode;
        w.lo = base < down ? 0 : min(base - down, kTopLo2);
    }
    if (!kFull) {
        const u32 zeros = 1024 * (present - count);
        w.mode |= zeros > 170 * present ? kZeroFirst : zeros > 26 * present ? kZeroSecond : 0;
    }
    return w;
}

// ---- codes

struct Fields { u32 first[2], second[2]; };

// First and second codes of the block's elements. kZeros: exponent 0 has a code of its own.
template <bool kZeros>
__device__ __forceinline__ Fields code_fields(const u32 (&x)[16], Window w) {
    constexpr u32 kOne = kBoth << 7;
    const u32 minus_lo = ((0u - (w.lo << 7)) & 0xffff) * kBoth;
    // By distance 0..7 from lo: first code | second code << 4. With kZeros, 0 stands for the exponent 0 and lo is outside.
    const bool b = w.mode & kClassB, zero_first = kZeros && (w.mode & kZeroFirst);
    const u32 low = zero_first ? 0x02201001u : b ? 0x01302010u : 0x02012010u, high = b && !zero_first ? 0x00000302u : 0x00003003u;
    u32 bytes[4][2];
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 d[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 e = x[4 * j + i] & 0xff * kOne;
            d[i] = __viaddmin_u16x2(e, minus_lo, 7 * kOne);
            if (kZeros) {
                const u32 is_lo = __vminu2(d[i], kOne) ^ kOne, nonzero = __vminu2(e, kOne);
                d[i] = (d[i] | is_lo * 7) & nonzero * 7;
            }
        }
        const u32 t01 = d[0] + d[1] * 16, t23 = d[2] + d[3] * 16;
        bytes[j][0] = look_up(low, high, __byte_perm(t01 >> 7, 0, 0x4420));
        bytes[j][1] = look_up(low, high, __byte_perm(t23 >> 7, 0, 0x4420));
    }
    Fields f;
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        const u32 a = bytes[0][k] + 4 * bytes[1][k], c = bytes[2][k] + 4 * bytes[3][k];
        f.first[k] = (a & 0x0f0f0f0fu) | (c << 4 & 0xf0f0f0f0u);
        f.second[k] = (a >> 4 & 0x0f0f0f0fu) | (c & 0xf0f0f0f0u);
    }
    return f;
}

__device__ __forceinline__ u32 zero_fields(u32 f) { return ~(f | f >> 1) & kFields; }

// Byte i: twice the number of fields in bytes 0..i of a mask.
__device__ __forceinline__ u32 bits_up_to(u32 mask) {
    u32 c = (mask & 0x33333333u) + (mask >> 2 & 0x33333333u);
    c = (c + (c >> 4)) & 0x0f0f0f0fu;
    return c * 0x02020202u;
}

// Moves the masked fields of every byte to its bottom; the others must be zero.
__device__ __forceinline__ u32 compress_bytes(u32 v, u32 mask) {
    const u32 q2 = (~mask & 0x10101010u) * 0x0f, q1 = (~mask & 0x04040404u) * 0x3f, q0 = (~mask & 0x01010101u) * 0xff;
    v = (v & ~q2) | (v >> 2 & 0x3f3f3f3fu & q2);
    v = (v & ~q1) | (v >> 2 & 0x3f3f3f3fu & q1);
    v = (v & ~q0) | (v >> 2 & 0x3f3f3f3fu & q0);
    return v;
}

// The reverse; fields behind those of the mask are ignored.
__device__ __forceinline__ u32 expand_bytes(u32 v, u32 mask) {
    const u32 q0 = (~mask & 0x01010101u) * 0xfc, q1 = (~mask & 0x04040404u) * 0x3c, q2 = (~mask & 0x10101010u) * 0x0c;
    v = (v & ~q0) | (v << 2 & q0);
    v = (v & ~q1) | (v << 2 & q1);
    v = (v & ~q2) | (v << 2 & q2);
    return v & (mask | mask << 1);
}

// The masked fields of a word, one behind the other from bit 0. `bits`: bits_up_to(mask).
__device__ __forceinline__ u32 compress_word(u32 v, u32 mask, u32 bits) {
    const u32 c = compress_bytes(v, mask);
    return (c & 0xff) | __funnelshift_l(0, c >> 8 & 0xff, bits) | __funnelshift_l(0, c >> 16 & 0xff, bits >> 8) |
           __funnelshift_l(0, c >> 24, bits >> 16);
}

__device__ __forceinline__ u32 expand_word(u32 packed, u32 mask, u32 bits) {
    const u32 b1 = __funnelshift_r(packed, 0, bits), b2 = __funnelshift_r(packed, 0, bits >> 8);
    const u32 b3 = __funnelshift_r(packed, 0, bits >> 16);
    return expand_bytes(__byte_perm(__byte_perm(packed, b1, 0x0040), __byte_perm(b2, b3, 0x0040), 0x5410), mask);
}

// ---- nibbles

__device__ __forceinline__ u32 lowest_exponent(Window w) { return w.lo + (w.mode & (kZeroFirst | kZeroSecond) ? 1 : 0); }

__device__ __forceinline__ u32 nibble_of(u32 e, Window w) {
    const u32 below = e - lowest_exponent(w) + 9, above = e - w.lo - 6;
    return e == 0 ? 1 : below < 9 ? below + 2 : above < 5 ? above + 11 : 0;
}

__device__ __forceinline__ u32 exponent_of_nibble(u32 v, Window w) {
    return v == 1 ? 0 : v < 11 ? lowest_exponent(w) - 11 + v : w.lo - 5 + v;
}

// Where the parts of a stream begin: in nibbles, in bytes.
__device__ __forceinline__ u32 first_nibble(u32 num_second) { return (2 * num_second + 3) / 4; }
__device__ __forceinline__ u32 first_raw(u32 num_second, u32 num_nibbles) { return (first_nibble(num_second) + num_nibbles + 1) / 2; }

// ---- streams

constexpr u32 kListAt = 768;           // in the room for a stream: exponents that become nibbles, behind the most that there is before them

// One warp: a block's stream to `out` (shared, kStreamBytes). `stage`: the lane's, see stage_exponents2. Returns its bytes.
__device__ __forceinline__ u32 write_stream(const Fields& f, Window w, const u8* stage, u32* out) {
    const u32 m0 = zero_fields(f.first[0]), m1 = zero_fields(f.first[1]);
    const u32 bits0 = bits_up_to(m0), bits1 = bits_up_to(m1), n0 = bits0 >> 24, n1 = bits1 >> 24;
    const u32 s0 = compress_word(f.second[0], m0, bits0), s1 = compress_word(f.second[1], m1, bits1);
    u32 rest = (m0 & zero_fields(f.second[0])) | (m1 & zero_fields(f.second[1])) << 1;
    const u32 counts = (n0 + n1) >> 1 | (u32)__popc(rest) << 16, inclusive = scan_inclusive(counts);
    const u32 totals = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    const u32 num_second = totals & 0xffff, num_nibbles = totals >> 16, nibble_at = first_nibble(num_second);
    const u32 raw_at = first_raw(num_second, num_nibbles);
    u8* list = (u8*)out + kListAt;
#pragma unroll 1
    for (u32 i = lane_id(); i < (raw_at + 3) / 4; i += kWarp) out[i] = 0;
    for (u8* to = list + (inclusive >> 16); rest;) {
        const u32 bit = highest_bit(rest);
        rest ^= 1u << bit;
        *--to = stage[stage2_of_bit(bit)];
    }
    __syncwarp();
    {
        const u32 low = s0 | (n0 < 32 ? s1 << n0 : 0), high = n0 ? s1 >> (32 - n0) : 0;         // s0 has n0 bits, n0 <= 32
        const u32 at = 2 * ((inclusive - counts) & 0xffff), shift = at % 32, last = shift + n0 + n1;
        u32* to = out + at / 32;
        atomicOr(to, low << shift);
        if (last > 32) atomicOr(to + 1, __funnelshift_l(low, high, shift));
        if (last > 64) atomicOr(to + 2, __funnelshift_l(high, 0, shift));
    }
    u32 end = raw_at;
#pragma unroll 1
    for (u32 first = 0; first < num_nibbles; first += kWarp) {
        const u32 i = first + lane_id(), at = nibble_at + i, e = i < num_nibbles ? list[i] : 0, v = nibble_of(e, w);
        if (i < num_nibbles) atomicOr(out + at / 8, v << at % 8 * 4);
        const u32 raws = __ballot_sync(kAllLanes, v == 0);
        if (raws) {                    // they go where the list has been read: never beyond raw_at + i, which is below kListAt + i
            __syncwarp();
            if (v == 0) ((u8*)out)[end + __popc(raws & ((1u << lane_id()) - 1))] = (u8)e;
            end += __popc(raws);
            __syncwarp();              // the next nibbles may share a word with them
        }
    }
    const u32 whole = (end + 3) / 4 * 4;
    if (end != raw_at)                 // the padding; up to raw_at's word it is zero
        for (u32 i = max(end, (raw_at + 3) / 4 * 4) + lane_id(); i < whole; i += kWarp) ((u8*)out)[i] = 0;
    return whole;
}

// Offset of the element of bit b of a combined mask, from the lane's first, in raw data.
__device__ __forceinline__ u32 offset2_of_bit(u32 b) { return (b & 6) << 8 | (b & 1) << 3 | (b >> 1 & 4) | (b >> 3 & 2); }

// One warp: raw data of a block into `raw` (shared, layout of the block, each lane its own part) from its first codes, remainders and stream
// (shared). `list`: scratch, a byte an element. Returns the bytes that the stream must have; of a stream that has others the raw data are
// some numbers.
__device__ __forceinline__ u32 read_block(const u32 (&first)[2], const uint2 (&planes)[4], Window w, const u32* stream, u8* list, u8* raw) {
    const u32 m0 = zero_fields(first[0]), m1 = zero_fields(first[1]);
    const u32 bits0 = bits_up_to(m0), bits1 = bits_up_to(m1), n0 = bits0 >> 24, n1 = bits1 >> 24;
    const u32 ends = scan_inclusive(n0 + n1), num_second = __shfl_sync(kAllLanes, ends, kWarp - 1) / 2, at = ends - n0 - n1;
    const u32 *from = stream + at / 32, *from_1 = stream + (at + n0) / 32;
    const u32 s0 = __funnelshift_r(from[0], from[1], at), s1 = __funnelshift_r(from_1[0], from_1[1], at + n0);
    const u32 second[2] = {expand_word(s0, m0, bits0), expand_word(s1, m1, bits1)}, masks[2] = {m0, m1};

    // Exponents by index 0..7: 1..3 first codes, 5..7 second codes, 4 the rest. Their upper 7 bits and the lowest one, where BF16 has them.
    const bool b = w.mode & kClassB, zero_first = w.mode & kZeroFirst, zero_second = w.mode & kZeroSecond;
    u32 e_low = (zero_first ? 0x04030000u : b ? 0x05040300u : 0x04030200u) + w.lo * kBytes;
    u32 e_high = (zero_first ? 0x05020100u : b ? 0x02010000u : 0x05010000u) + w.lo * kBytes;
    if (zero_first) e_low &= ~0xff00u;
    if (zero_second) e_high &= ~0xff00u;
    const u32 half_low = e_low >> 1 & 0x7f * kBytes, half_high = e_high >> 1 & 0x7f * kBytes;
    const u32 odd_low = e_low << 7 & 0x80 * kBytes, odd_high = e_high << 7 & 0x80 * kBytes;
#pragma unroll
    for (u32 pass = 0; pass < 2; pass++) {             // fields j = pass and pass + 2
        u32 out[2][4];
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            const u32 f = first[k] | second[k];
            const u32 index = pass ? (f >> 2 & 0x33333333u) | (masks[k] & 0x44444444u) : (f & 0x33333333u) | (masks[k] << 2 & 0x44444444u);
            // Nibbles of four bytes side by side; the order is (w, h) = (1, 0), (0, 0), (1, 1), (0, 1).
            const u32 a = (index & 0x0f0f0f0fu) * 0x1001u, c = (index >> 4 & 0x0f0f0f0fu) * 0x1001u, s = __byte_perm(a, c, 0x7531);
#pragma unroll
            for (u32 g = 0; g < 2; g++) {
                const u32 selector = g ? s >> 16 : s, j = pass + 2 * g;
                const u32 r = __byte_perm(k ? planes[j].y : planes[j].x, 0, 0x1302);
                const u32 high = (r & 0x80 * kBytes) | look_up(half_low, half_high, selector);
                const u32 low = (r & 0x7f * kBytes) | look_up(odd_low, odd_high, selector);
                out[g][2 * k] = __byte_perm(low, high, 0x7351);
                out[g][2 * k + 1] = __byte_perm(low, high, 0x6240);
            }
        }
#pragma unroll
        for (u32 g = 0; g < 2; g++)
            *(uint4*)(raw + part_offset<Bf16>(pass + 2 * g)) = make_uint4(out[g][0], out[g][1], out[g][2], out[g][3]);
    }

    u32 rest = (m0 & zero_fields(second[0])) | (m1 & zero_fields(second[1])) << 1;
    const u32 nibble_ends = scan_inclusive((u32)__popc(rest)), num_nibbles = __shfl_sync(kAllLanes, nibble_ends, kWarp - 1);
    u32 end = first_raw(num_second, num_nibbles);
#pragma unroll 1
    for (u32 first_of = 0; first_of < num_nibbles; first_of += kWarp) {
        const u32 i = first_of + lane_id(), nibble = first_nibble(num_second) + i, v = stream[nibble / 8] >> nibble % 8 * 4 & 15;
        u32 e = exponent_of_nibble(v, w);
        const u32 raws = __ballot_sync(kAllLanes, v == 0 && i < num_nibbles);
        if (raws) {
            if (v == 0 && i < num_nibbles) e = ((const u8*)stream)[end + __popc(raws & ((1u << lane_id()) - 1))];
            end += __popc(raws);
        }
        list[i] = (u8)e;
    }
    __syncwarp();
    for (const u8* last = list + nibble_ends; rest;) {
        const u32 bit = highest_bit(rest);
        rest ^= 1u << bit;
        u16* element = (u16*)(raw + octet(0) * 2 + offset2_of_bit(bit));
        *element = (u16)((*element & 0x807f) | *--last << 7);
    }
    return (end + 3) / 4 * 4;
}

}  // namespace zipscape

#endif  // ZIPCCL_LEVEL2_CUH
