// Decode, and decode with a sum over rows. A CTA takes kWarps neighbouring blocks of one tile, a warp each. The tile's headers and
// escape slots are staged in shared memory while the codes and remainders are on their way; where a block's escapes start is the sum
// of the counts before it. Every index that comes from a frame is checked before it is used: a corrupt frame gives wrong numbers and a
// word that says so, never an access outside the frame or the output.
#ifndef ZIPCCL_DECODE_CUH
#define ZIPCCL_DECODE_CUH

#include "frame.cuh"
#include "level2.cuh"

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

// Escape number `at` of a tile, wherever it is stored; `errors` learns of places outside the sub-pool.
__device__ __forceinline__ u32 find_escape(const Call& c, const u8* frame, const Tile& t, u32 tile_index, const u8* meta, u32 at,
                                           u32& errors) {
    if (at < t.escapes_capacity) {
        const u32 slot = t.escapes_offset + at;
        return slot < kStagedBytes ? meta[slot] : (frame + t.offset)[slot];
    }
    const u32 group = tile_index / (u32)c.g.group_tiles;
    const u64 spilled = (u64)((const u32*)meta)[1] + (at - t.escapes_capacity);
    if (spilled < pool_size(c.g, group)) return frame[c.g.pools_offset + group * c.g.pool_bytes + spilled];
    errors |= kBadSpill;
    return 0;
}

template <class F>
__device__ __forceinline__ void patch_exponent(u8* element, u32 exponent) {
    const u32 keep = ~(F::kExponentMask << F::kMantissa), bits = (exponent & F::kExponentMask) << F::kMantissa;
    if (F::kItem == 2) *(u16*)element = (u16)((*(u16*)element & keep) | bits);
    else *(u32*)element = (*(u32*)element & keep) | bits;
}

// Raw data of a block, escapes included, into `raw` (shared memory, layout of the block): each lane its own part. Returns kinds of
// corruption.
template <class F>
__device__ __forceinline__ u32 decode_block(const Call& c, const Stored<F>& s, const u8* frame, const Tile& t, u32 tile_index, u32 b,
                                            const u8* meta, u8* raw) {
    const u32 lane = lane_id();
    u32 errors = 0;
    const u32 heads = lane < t.num_blocks ? ((const u32*)(meta + kTileHeaderBytes))[lane] : 0;
    const u32 head = __shfl_sync(kAllLanes, heads, b), before = __reduce_add_sync(kAllLanes, lane < b ? heads >> 16 : 0);
    const Window w = {head & 0xff, head >> 8 & 0xff};
    unpack<F>(s, w, raw);

    u32 mask = escape_mask(s.codes);
    const u32 count = __popc(mask), inclusive = scan_inclusive(count), end = before + (head >> 16);
    if (__shfl_sync(kAllLanes, inclusive, kWarp - 1) != head >> 16) errors |= kBadBlockCount;
    if (w.mode > kZeroMode || w.lo > F::kTopLo) errors |= kBadWindow;
    if (b == t.num_blocks - 1 && *(const u32*)meta != end) errors |= kBadTileCount;
    u32 at = before + inclusive - count;
    const bool staged = end <= t.escapes_capacity && t.escapes_offset + end <= kStagedBytes && (errors & kBadBlockCount) == 0;
    for (; mask; at++) {
        const u32 bit = __ffs(mask) - 1;
        mask &= mask - 1;
        const u32 e = staged ? meta[t.escapes_offset + at] : find_escape(c, frame, t, tile_index, meta, at, errors);
        patch_exponent<F>(raw + element_of_bit(bit) * F::kItem, e);
    }
    return errors;
}

// 16 bytes of the lane's elements to their place in a block, of which the first `present` elements exist.
template <class F>
__device__ __forceinline__ void store_part(u8* block, u32 present, bool wide, u32 part, uint4 v) {
    const u32 at = part_offset<F>(part);
    if (wide) {
        *(uint4*)(block + at) = v;
        return;
    }
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 16 / F::kItem; i++) {
        if (at / F::kItem + i >= present) return;
        if (F::kItem == 4) *(u32*)(block + at + 4 * i) = words[i % 4];
        else *(u16*)(block + at + 2 * i) = (u16)(words[i / 2] >> 16 * (i & 1));
    }
}

// ---- what the levels do differently

// How a warp reads blocks at a level. `Block`: what it loads early of one. kMetaBytes of shared memory for a tile's headers and slots of a
// row (kMetaOfTile, which all threads of the CTA stage) or for one warp.
template <class F>
struct DecodeLevel1 {
    typedef F Format;
    typedef Stored<F> Block;
    static constexpr u32 kMetaBytes = kStagedBytes;
    static constexpr bool kMetaOfTile = true;

    __device__ __forceinline__ static void load(Block& s, const u8* tile, const Tile& t, u32 b) { load_block(s, tile, t, b); }

    // Raw data of a block into `raw` (shared memory, layout of the block, each lane its own part). Returns kinds of corruption.
    __device__ __forceinline__ static u32 decode(const Call& c, const Block& s, const u8* frame, const Tile& t, u32 tile_index, u32 b,
                                                 u8* meta, u8* raw) {
        return decode_block(c, s, frame, t, tile_index, b, meta, raw);
    }
};

struct DecodeLevel2 {
    typedef Bf16 Format;
    struct Block {
        u32 first[2], heads, tile_head;                    // heads, tile_head: a lane's own word of each
        uint2 planes[4];
    };
    // A stream, with what read_block may touch behind it, and its list.
    static constexpr u32 kListOffset = kStreamBytes + 16, kMetaBytes = kListOffset + kBlockElems;
    static constexpr bool kMetaOfTile = false;

    __device__ __forceinline__ static void load(Block& s, const u8* tile, const Tile& t, u32 b) {
        const u32 lane = lane_id();
        s.heads = lane < t.num_blocks ? ((const u32*)(tile + kTileHeaderBytes))[lane] : 0;
        s.tile_head = lane < 2 ? ((const u32*)tile)[lane] : 0;
#pragma unroll
        for (u32 k = 0; k < 2; k++) s.first[k] = *(const u32*)(tile + t.codes_offset + b * kCode2Bytes + 128 * k + 4 * lane);
#pragma unroll
        for (u32 j = 0; j < 4; j++) s.planes[j] = *(const uint2*)(tile + t.planes_offset + b * kBlockElems + octet(j));
    }

    // `count` bytes of streams from byte `before` of the tile to `stream`, wherever they are. Returns kBadSpill if that is not in the frame.
    __device__ __forceinline__ static u32 fetch(const Call& c, const u8* frame, const Tile& t, u32 tile_index, u32 spill_offset, u32 before,
                                                u32 count, u32* stream) {
        u32 errors = 0;
        const u32* slots = (const u32*)(frame + t.offset + t.escapes_offset);
        if (before + count <= t.escapes_capacity) {
#pragma unroll 1
            for (u32 i = lane_id(); i < count / 4; i += kWarp) stream[i] = slots[before / 4 + i];
            return 0;
        }
        const u32 group = tile_index / (u32)c.g.group_tiles;
#pragma unroll 1
        for (u32 i = lane_id(); i < count / 4; i += kWarp) {
            const u32 at = before + 4 * i;
            const u64 spilled = (u64)spill_offset + (at - t.escapes_capacity);
            if (at < t.escapes_capacity) stream[i] = slots[at / 4];
            else if (spilled + 4 <= pool_size(c.g, group) && spilled % 4 == 0)
                stream[i] = *(const u32*)(frame + c.g.pools_offset + group * c.g.pool_bytes + spilled);
            else errors = kBadSpill;
        }
        return errors;
    }

    __device__ __forceinline__ static u32 decode(const Call& c, const Block& s, const u8* frame, const Tile& t, u32 tile_index, u32 b,
                                                 u8* meta, u8* raw) {
        u32 errors = 0, *stream = (u32*)meta;
        const u32 head = __shfl_sync(kAllLanes, s.heads, b), count = head >> 16;
        const u32 before = __reduce_add_sync(kAllLanes, lane_id() < b ? s.heads >> 16 : 0);
        const u32 spill_offset = __shfl_sync(kAllLanes, s.tile_head, 1), total = __shfl_sync(kAllLanes, s.tile_head, 0);
        const Window w = {head & 0xff, head >> 8 & 0xff};
        __syncwarp();                                      // the block before is read
        if (count > kStreamBytes || (before | count) % 4) errors |= kBadBlockCount;
        else errors |= fetch(c, frame, t, tile_index, spill_offset, before, count, stream);
        if (w.mode > kTopMode2 || w.lo > kTopLo2) errors |= kBadWindow;
        if (b == t.num_blocks - 1 && total != before + count) errors |= kBadTileCount;
        __syncwarp();
        if (read_block(s.first, s.planes, w, stream, meta + kListOffset, raw) != count) errors |= kBadBlockCount;
        return errors;
    }
};

// One warp: the frame's header against the one this call expects. A given window is its writer's: any valid one will do, at level 2 none.
__device__ __forceinline__ u32 check_header(const Call& c, const u8* frame) {
    const u32 lane = lane_id(), word = ((const u32*)frame)[lane];
    bool bad = word != c.header[lane];
    if (lane == kWindowOffset / 4) bad = ((word ^ c.header[lane]) & 0xFFFFFF) != 0 || word >> 24 > (c.g.level == 1 ? (1u << c.g.exponent_bits) - 7 : 0);
    if (lane == kStatusOffset / 4) bad = (word & kOverflowBit) != 0;
    return bad ? kBadHeader : 0;
}

// Where frames are when they lie one behind the other. A row may also be raw (symmetric.cuh): its data behind the header, uncompressed.
struct StridedFrames {
    const u8* frames;
    i64 stride;
    __device__ __forceinline__ const u8* frame(i64 row) const { return frames + row * stride; }
    __device__ __forceinline__ bool is_raw(i64) const { return false; }
};

__device__ __forceinline__ StridedFrames strided_frames(const Call& c) { return {c.frames, c.frame_stride}; }

// Block `block` of a raw row.
template <class F>
__device__ __forceinline__ const u8* raw_block(const u8* frame, i64 block) { return frame + kHeaderBytes + block * (kBlockElems * F::kItem); }

// kWarps blocks of a row, the group-th, from their frame to `out_row`.
template <class L, u32 kWarps>
__device__ __forceinline__ void decode_blocks_of(const Call& c, const u8* frame, u8* out_row, u32 group) {
    typedef typename L::Format F;
    constexpr u32 kRawBytes = kBlockElems * F::kItem;
    __shared__ __align__(16) u8 metas[L::kMetaOfTile ? 1 : kWarps][L::kMetaBytes];
    __shared__ __align__(16) u8 raws[kWarps][kRawBytes];
    const u32 tile_index = group / (32 / kWarps), b = group % (32 / kWarps) * kWarps + warp_id();
    u32 errors = group == 0 && warp_id() == 0 ? check_header(c, frame) : 0;
    if (c.g.num_tiles == 0) {
        if (errors) atomicOr(c.status, errors);
        return;
    }
    const Tile t = find_tile(c.g, tile_index);
    const u8* tile = frame + t.offset;
    typename L::Block s;
    if (b < t.num_blocks) L::load(s, tile, t, b);
    if constexpr (L::kMetaOfTile) {
        stage_meta(tile, t, metas[0]);
        __syncthreads();
    }
    if (b < t.num_blocks) {
        u8* raw = raws[warp_id()];
        errors |= L::decode(c, s, frame, t, tile_index, b, metas[L::kMetaOfTile ? 0 : warp_id()], raw);
        const i64 block = (i64)tile_index * 32 + b;
        u8* out = out_row + block * kRawBytes;
        const u32 present = present_of(present_elems(c.g, tile_index), b);
        const bool wide = present == kBlockElems && is_aligned(out, 16);
#pragma unroll
        for (u32 i = 0; i < F::kWords / 4; i++) store_part<F>(out, present, wide, i, *(const uint4*)(raw + part_offset<F>(i)));
    }
    if (errors) atomicOr(c.status, errors);
}

// Grid: (groups of kWarps blocks, rows without the skipped one).
template <class L, u32 kWarps>
__device__ __forceinline__ void decode_blocks(const Call& c) {
    begin_in_turn();
    const i64 row = row_of(c, blockIdx.y);
    decode_blocks_of<L, kWarps>(c, strided_frames(c).frame(row), c.out + row * c.row_stride, blockIdx.x);
}

// ---- sums

// The floats in 16 bytes: 8, or 4 of FP32.
template <class F>
__device__ __forceinline__ void to_floats(uint4 v, float (&f)[16 / F::kItem]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 16 / F::kItem; i++) {
        if (F::kItem == 4) f[i] = __uint_as_float(words[i % 4]);
        else if (F::kMantissa == 7) f[i] = i & 1 ? __uint_as_float(words[i / 2] & 0xffff0000u) : bf16_to_float(words[i / 2]);
        else f[i] = half_to_float(i & 1 ? words[i / 2] >> 16 : words[i / 2] & 0xffff);
    }
}

// One rounding; NaNs become the canonical one: cvt gives 0x7fff, adds give 0x7fffffff.
template <class F>
__device__ __forceinline__ uint4 round_floats(const float* f) {
    u32 words[4];
    if (F::kItem == 4) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) words[i] = f[i] == f[i] ? __float_as_uint(f[i]) : 0x7fc00000u;
    } else {
        u32 any_nan = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            words[i] = F::kMantissa == 7 ? floats_to_bf16x2(f[2 * i], f[2 * i + 1]) : floats_to_halfx2(f[2 * i], f[2 * i + 1]);
            any_nan |= (words[i] & 0x7fff7fffu) + kBoth;           // bit 15 of a half: it was 0x7fff
        }
        if (any_nan & 0x80008000u) {
            const u32 canonical = F::kMantissa == 7 ? 0x7fc0 : 0x7e00;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if ((words[i] & 0x7fff) == 0x7fff) words[i] = (words[i] & 0xffff0000u) | canonical;
                if ((words[i] >> 16 & 0x7fff) == 0x7fff) words[i] = (words[i] & 0xffff) | canonical << 16;
            }
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// kWarps blocks, the group-th. Row `skip` comes from x, the others from `frames`, added in row order. kTwo: two rows, whose sum
// needs no accumulator (a + b = b + a, also in bits, once NaNs are canonical).
template <class L, u32 kWarps, u32 kRows, bool kTwo, class Frames>
__device__ __forceinline__ void decode_reduce_blocks(const Call& c, const Frames& frames, u32 group) {
    typedef typename L::Format F;
    constexpr u32 kRawBytes = kBlockElems * F::kItem, kParts = F::kWords / 4, kFloats = 16 / F::kItem;
    __shared__ __align__(16) u8 metas[L::kMetaOfTile ? kRows : kWarps][L::kMetaBytes];
    __shared__ __align__(16) u8 raws[kWarps][kRawBytes];
    __shared__ __align__(16) u8 owns[kTwo ? kWarps : 1][kRawBytes];
    const u32 tile_index = group / (32 / kWarps), b = group % (32 / kWarps) * kWarps + warp_id();
    const Tile t = find_tile(c.g, tile_index);
    const i64 block = (i64)tile_index * 32 + b;
    const u32 present = present_of(present_elems(c.g, tile_index), b);
    const u8* own = c.x + block * kRawBytes;
    const bool wide_own = present == kBlockElems && is_aligned(own, 16);
    u8* out = c.out + block * kRawBytes;
    const bool wide = present == kBlockElems && is_aligned(out, 16);
    u8* raw = raws[warp_id()];
    u32 errors = 0;
    typename L::Block s;
    if constexpr (kTwo) {
        const i64 other_row = 1 - c.skip;
        const u8* frame = frames.frame(other_row);
        const bool is_raw = frames.is_raw(other_row);
        u8* my_own = owns[warp_id()];
        if (present) {
            copy_raw<F>(my_own, own, present, wide_own);
            if (is_raw) copy_raw<F>(raw, raw_block<F>(frame, block), present, present == kBlockElems);
            commit_copies();
            L::load(s, frame + t.offset, t, b);
            if (block == 0 && !is_raw) errors |= check_header(c, frame);
        }
        if constexpr (L::kMetaOfTile) {
            stage_meta(frame + t.offset, t, metas[0]);
            __syncthreads();
        }
        if (present) {
            if (!is_raw) errors |= L::decode(c, s, frame, t, tile_index, b, metas[L::kMetaOfTile ? 0 : warp_id()], raw);
            wait_copies<0>();
#pragma unroll
            for (u32 i = 0; i < kParts; i++) {
                float f[kFloats], other[kFloats];
                to_floats<F>(*(const uint4*)(raw + part_offset<F>(i)), f);
                to_floats<F>(*(const uint4*)(my_own + part_offset<F>(i)), other);
#pragma unroll
                for (u32 k = 0; k < kFloats; k++) f[k] += other[k];
                store_part<F>(out, present, wide, i, round_floats<F>(f));
            }
        }
    } else {
        const u32 num_rows = (u32)c.num_rows;
        float sum[32];                                             // -0 + x is x, also in bits (but for NaNs, which become canonical)
#pragma unroll
        for (u32 k = 0; k < 32; k++) sum[k] = -0.0f;
        if (present && c.skip != 0) L::load(s, frames.frame(0) + t.offset, t, b);
#pragma unroll 1
        for (u32 first = 0; first < num_rows; first += kRows) {
            const u32 end = min(first + kRows, num_rows);
            if constexpr (L::kMetaOfTile) {
                if (first) __syncthreads();                        // the metas before are used up
                for (u32 r = first; r < end; r++)
                    if (r != c.skip) stage_meta(frames.frame(r) + t.offset, t, metas[r - first]);
                __syncthreads();
            }
            if (!present) continue;
#pragma unroll 1
            for (u32 r = first; r < end; r++) {
                const u8* frame = frames.frame(r);
                if (r == c.skip || frames.is_raw(r)) {
                    if (r == c.skip) copy_raw<F>(raw, own, present, wide_own);
                    else copy_raw<F>(raw, raw_block<F>(frame, block), present, present == kBlockElems);
                    commit_copies();
                    wait_copies<0>();
                } else {
                    if (block == 0) errors |= check_header(c, frame);
                    errors |= L::decode(c, s, frame, t, tile_index, b, metas[L::kMetaOfTile ? r - first : warp_id()], raw);
                }
                if (r + 1 < num_rows && r + 1 != c.skip) L::load(s, frames.frame(r + 1) + t.offset, t, b);
#pragma unroll
                for (u32 i = 0; i < kParts; i++) {
                    float f[kFloats];
                    to_floats<F>(*(const uint4*)(raw + part_offset<F>(i)), f);
#pragma unroll
                    for (u32 k = 0; k < kFloats; k++) sum[i * kFloats + k] += f[k];
                }
            }
        }
        if (present)
#pragma unroll
            for (u32 i = 0; i < kParts; i++) store_part<F>(out, present, wide, i, round_floats<F>(sum + i * kFloats));
    }
    if (errors) atomicOr(c.status, errors);
}

template <class L, u32 kWarps, u32 kRows, bool kTwo>
__device__ __forceinline__ void decode_reduce_blocks(const Call& c) {
    begin_in_turn();
    decode_reduce_blocks<L, kWarps, kRows, kTwo>(c, strided_frames(c), blockIdx.x);
}

}  // namespace zipscape

#endif  // ZIPCCL_DECODE_CUH
