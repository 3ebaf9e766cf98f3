// Decode, and decode with a sum over rows. A CTA takes kWarps neighbouring blocks of one tile, a warp each. The tile's headers and
// escape slots are staged in shared memory while the codes and remainders are on their way; where a block's escapes start is the sum
// of the counts before it. Every index that comes from a frame is checked before it is used: a corrupt frame gives wrong numbers and a
// word that says so, never an access outside the frame or the output.
#ifndef ZIPCCL_DECODE_CUH
#define ZIPCCL_DECODE_CUH

#include "frame.cuh"

namespace zipscape {

constexpr u32 kStagedBytes = 2048;          // a full tile's headers and slots up to c = 59; slots beyond are read where they are

// All threads of the CTA: copies the first bytes of the tile to shared memory.
__device__ __forceinline__ void stage_meta(const u8* tile, const Tile& t, u8* meta) {
    for (u32 at = 16 * threadIdx.x; at < min(t.codes_offset, kStagedBytes); at += 16 * blockDim.x)
        *(uint4*)(meta + at) = *(const uint4*)(tile + at);
}

template <class F>
__device__ __forceinline__ void load_block(Stored<F>& s, const u8* tile, const Tile& t, u32 b) {
    load_stored(s, tile + t.codes_offset + b * kCodeBytes, tile + t.extra_offset + b * kCodeBytes,
                tile + t.planes_offset + b * (kBlockElems * F::kPlanes));
}

// Raw data of a block, escapes included, in the lane's part of `patch` (raw layout, shared by the warp). Returns kinds of corruption.
template <class F>
__device__ __forceinline__ u32 decode_block(const Call& c, const Stored<F>& s, const u8* frame, const Tile& t, u32 group, u32 b,
                                            const u8* meta, u8* patch) {
    const u32 lane = lane_id();
    u32 errors = 0;
    const u32 heads = lane < t.num_blocks ? ((const u32*)(meta + kTileHeaderBytes))[lane] : 0;
    const u32 before = scan_inclusive(heads >> 16) - (heads >> 16), head = __shfl_sync(kAllLanes, heads, b);
    const Window w = {head & 0xff, head >> 8 & 0xff};
    u32 x[F::kWords];
    unpack<F>(s, w, x);
#pragma unroll
    for (u32 i = 0; i < F::kWords / 4; i++) {
        const u32 j = i * 4 / (F::kWords / 4), part = i % (F::kWords / 16);
        *(uint4*)(patch + octet(j) * F::kItem + 16 * part) = make_uint4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }

    u32 mask = escape_mask(s.codes);
    const u32 count = __popc(mask), inclusive = scan_inclusive(count);
    if (__shfl_sync(kAllLanes, inclusive, kWarp - 1) != head >> 16) errors |= kBadBlockCount;
    if (w.mode > kZeroMode || w.lo > F::kTopLo) errors |= kBadWindow;
    if (b == t.num_blocks - 1 && *(const u32*)meta != __shfl_sync(kAllLanes, before, b) + (head >> 16)) errors |= kBadTileCount;
    u32 at = __shfl_sync(kAllLanes, before, b) + inclusive - count;
    while (mask) {
        const u32 bit = __ffs(mask) - 1;
        mask &= mask - 1;
        const u32 slot = t.escapes_offset + at;
        u32 e = 0;
        if (at < t.escapes_capacity) {
            e = slot < kStagedBytes ? meta[slot] : (frame + t.offset)[slot];
        } else {
            const u64 spilled = (u64)((const u32*)meta)[1] + (at - t.escapes_capacity);
            if (spilled < pool_size(c.g, group)) e = frame[c.g.pools_offset + group * c.g.pool_bytes + spilled];
            else errors |= kBadSpill;
        }
        at++;
        u8* element = patch + element_of_bit(bit) * F::kItem;
        const u32 keep = ~(F::kExponentMask << F::kMantissa);
        if (F::kItem == 2) *(u16*)element = (u16)((*(u16*)element & keep) | (e & F::kExponentMask) << F::kMantissa);
        else *(u32*)element = (*(u32*)element & keep) | e << F::kMantissa;
    }
    return errors;
}

// Takes the lane's part back from `patch`.
template <class F>
__device__ __forceinline__ void take_patched(const u8* patch, u32 (&x)[F::kWords]) {
#pragma unroll
    for (u32 i = 0; i < F::kWords / 4; i++) {
        const u32 j = i * 4 / (F::kWords / 4), part = i % (F::kWords / 16);
        const uint4 v = *(const uint4*)(patch + octet(j) * F::kItem + 16 * part);
        x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
    }
}

template <class F>
__device__ __forceinline__ void store_raw(u8* block, u32 present, const u32 (&x)[F::kWords]) {
    if (present == kBlockElems && is_aligned(block, 16)) {
#pragma unroll
        for (u32 i = 0; i < F::kWords / 4; i++) {
            const u32 j = i * 4 / (F::kWords / 4), part = i % (F::kWords / 16);
            *(uint4*)(block + octet(j) * F::kItem + 16 * part) = make_uint4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < F::kWords; i++) {
        const u32 e = octet(i / (F::kWords / 4)) + i % (F::kWords / 4) * (4 / F::kItem);
        if (F::kItem == 4) {
            if (e < present) *(u32*)(block + e * 4) = x[i];
        } else {
            if (e < present) *(u16*)(block + e * 2) = (u16)x[i];
            if (e + 1 < present) *(u16*)(block + (e + 1) * 2) = (u16)(x[i] >> 16);
        }
    }
}

// One warp: the frame's header against the one this call expects.
__device__ __forceinline__ u32 check_header(const Call& c, const u8* frame) {
    const u32 word = ((const u32*)frame)[lane_id()];
    const bool bad = lane_id() == kStatusOffset / 4 ? word >> 16 != 0 : word != c.header[lane_id()];
    return bad ? kBadHeader : 0;
}

// Grid: (groups of kWarps blocks, rows without the skipped one).
template <class F, u32 kWarps>
__device__ __forceinline__ void decode_blocks(const Call& c) {
    __shared__ __align__(16) u8 meta[kStagedBytes];
    __shared__ __align__(16) u8 patches[kWarps][kBlockElems * F::kItem];
    const u32 tile_index = blockIdx.x / (32 / kWarps), b = blockIdx.x % (32 / kWarps) * kWarps + warp_id();
    const i64 row = row_of(c, blockIdx.y);
    const u8* frame = c.frames + row * c.frame_stride;
    u32 errors = blockIdx.x == 0 && warp_id() == 0 ? check_header(c, frame) : 0;
    if (c.g.num_tiles == 0) {
        if (errors) atomicOr(c.status, errors);
        return;
    }
    const Tile t = find_tile(c.g, tile_index);
    const u8* tile = frame + t.offset;
    Stored<F> s;
    if (b < t.num_blocks) load_block(s, tile, t, b);
    stage_meta(tile, t, meta);
    __syncthreads();
    if (b < t.num_blocks) {
        const i64 block = (i64)tile_index * 32 + b;
        u8* patch = patches[warp_id()];
        errors |= decode_block(c, s, frame, t, tile_index / (u32)c.g.group_tiles, b, meta, patch);
        u32 x[F::kWords];
        take_patched<F>(patch, x);
        store_raw<F>(c.out + row * c.row_stride + block * (kBlockElems * F::kItem), present_elems(c.g, block), x);
    }
    if (errors) atomicOr(c.status, errors);
}

// ---- sums

template <class F>
__device__ __forceinline__ void add_to(float (&sum)[32], const u32 (&x)[F::kWords], bool first) {
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        float value;
        if (F::kItem == 4) value = __uint_as_float(x[i % F::kWords]);
        else if (F::kMantissa == 7) value = i & 1 ? __uint_as_float(x[i / 2] & 0xffff0000u) : bf16_to_float(x[i / 2]);
        else value = half_to_float(i & 1 ? x[i / 2] >> 16 : x[i / 2] & 0xffff);
        sum[i] = first ? value : sum[i] + value;
    }
}

// One rounding; NaNs become the canonical one: cvt gives 0x7fff, adds give 0x7fffffff.
template <class F>
__device__ __forceinline__ void round_sum(const float (&sum)[32], u32 (&x)[F::kWords]) {
    if (F::kItem == 4) {
#pragma unroll
        for (u32 i = 0; i < F::kWords; i++) x[i] = sum[i] == sum[i] ? __float_as_uint(sum[i]) : 0x7fc00000u;
        return;
    }
    u32 any_nan = 0;
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        x[i] = F::kMantissa == 7 ? floats_to_bf16x2(sum[2 * i], sum[2 * i + 1]) : floats_to_halfx2(sum[2 * i], sum[2 * i + 1]);
        any_nan |= (x[i] & 0x7fff7fffu) + kBoth;               // bit 15 of a half: it was 0x7fff
    }
    if (any_nan & 0x80008000u) {
        const u32 canonical = F::kMantissa == 7 ? 0x7fc0 : 0x7e00;
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            if ((x[i] & 0x7fff) == 0x7fff) x[i] = (x[i] & 0xffff0000u) | canonical;
            if ((x[i] >> 16 & 0x7fff) == 0x7fff) x[i] = (x[i] & 0xffff) | canonical << 16;
        }
    }
}

// Grid: groups of kWarps blocks. Row `skip` comes from x, the others from their frames, added in row order.
template <class F, u32 kWarps, u32 kRows>
__device__ __forceinline__ void decode_reduce_blocks(const Call& c) {
    __shared__ __align__(16) u8 metas[kRows][kStagedBytes];
    __shared__ __align__(16) u8 patches[kWarps][kBlockElems * F::kItem];
    const u32 tile_index = blockIdx.x / (32 / kWarps), b = blockIdx.x % (32 / kWarps) * kWarps + warp_id();
    const Tile t = find_tile(c.g, tile_index);
    const i64 block = (i64)tile_index * 32 + b;
    const u32 present = b < t.num_blocks ? present_elems(c.g, block) : 0;
    u8* patch = patches[warp_id()];
    u32 errors = 0;
    float sum[32];
    Stored<F> s;
    const u32 num_rows = (u32)c.num_rows;
    if (present && c.skip != 0) load_block(s, c.frames + t.offset, t, b);
    for (u32 first = 0; first < num_rows; first += kRows) {
        const u32 end = min(first + kRows, num_rows);
        if (first) __syncthreads();                            // the metas before are used up
        for (u32 r = first; r < end; r++)
            if (r != c.skip) stage_meta(c.frames + r * c.frame_stride + t.offset, t, metas[r - first]);
        __syncthreads();
        if (!present) continue;
#pragma unroll 1
        for (u32 r = first; r < end; r++) {
            const u8* frame = c.frames + r * c.frame_stride;
            u32 x[F::kWords];
            if (r == c.skip) {
                const u8* own = c.x + block * (kBlockElems * F::kItem);
                load_raw<F>(own, present, present == kBlockElems && is_aligned(own, 16), x);
            } else {
                if (block == 0) errors |= check_header(c, frame);
                errors |= decode_block(c, s, frame, t, tile_index / (u32)c.g.group_tiles, b, metas[r - first], patch);
                take_patched<F>(patch, x);
            }
            if (r + 1 < num_rows && r + 1 != c.skip) load_block(s, frame + c.frame_stride + t.offset, t, b);
            add_to<F>(sum, x, r == 0);
        }
    }
    if (present) {
        u32 x[F::kWords];
        round_sum<F>(sum, x);
        store_raw<F>(c.out + block * (kBlockElems * F::kItem), present, x);
    }
    if (errors) atomicOr(c.status, errors);
}

}  // namespace zipscape

#endif  // ZIPCCL_DECODE_CUH
