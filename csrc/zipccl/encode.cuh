// Encode: a CTA codes a tile, a warp two neighbouring blocks of it. Nothing is decided by the order of execution: escapes are placed by prefix
// sums, inside a tile through shared memory, between tiles (only where a tile spills) by adding up the counts of the group's earlier tiles.
//
// Counts travel between CTAs as single words that carry their own "sent" mark, so nothing needs a fence (which would wait for all stores of
// a multiprocessor), an atomic, a memset or a second kernel.
//
// (Tried on an H200: fewer CTAs that claim tile after tile, the next one's data on the way early, are 2 % slower.)
#ifndef ZIPCCL_ENCODE_CUH
#define ZIPCCL_ENCODE_CUH

#include "finish.cuh"
#include "level2.cuh"
#include "load.cuh"

namespace zipscape {

constexpr u32 kEncodeWarps = 16;                           // two blocks each

// The spill of the group's tiles before `tile`. All threads of the CTA.
__device__ __forceinline__ u32 earlier_spills(const Call& c, const u64* tiles, u32 tag, u32 first, u32 tile) {
    __shared__ u32 sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    for (u32 t = first + threadIdx.x; t < tile; t += blockDim.x) {
        const u32 spill = spill_of(receive(tiles + t, tag), (u32)c.g.escapes_capacity);         // an earlier tile is never the last one
        if (spill) atomicAdd(&sum, spill);
    }
    __syncthreads();
    return sum;
}

// Raw data of two neighbouring blocks, the first of which is number `block` of its row, as far as they exist: `elems` elements. `scratch`: see
// load_single.
template <class F>
__device__ __forceinline__ void load_pair(const Call& c, i64 block, u32 elems, u8* scratch, u32 (&x)[2][F::kWords]) {
    constexpr u32 kRawBytes = kBlockElems * F::kItem;
    const u8* src = c.x + row_of(c, blockIdx.y) * c.row_stride + block * kRawBytes;
    if (is_aligned(src, 16) && elems >= 2 * kBlockElems) {
        load_aligned<F>(src, x[0]);
        load_aligned<F>(src + kRawBytes, x[1]);
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        const bool inside = block + k > 0 && (block + k + 1) * kBlockElems < c.g.numel;
        if (inside) load_shifted<F>(src + k * kRawBytes, x[k]);
        else load_single<F>(src + k * kRawBytes, present_of(elems, k), scratch, x[k]);
    }
}

// A block to the frame but for its escapes: codes to `codes`, remainders to `extra` and `planes`. Returns which elements escape.
template <class F>
__device__ __forceinline__ u32 store_block(const u32 (&x)[F::kWords], Window w, u8* codes, u8* extra, u8* planes) {
    u32 words[3];
    pack_codes<F>(x, w, words);
    store_codes(codes, words);
    store_remainders<F>(x, extra, planes);
    return escape_mask(words);
}

// Two neighbouring blocks to the frame, `b` the first of them, as store_block; the exponents are left at `stage`. Both at once, so that
// one's latencies hide behind the other's. Fills `masks`, and `heads` but for the numbers of escapes.
template <class F>
__device__ __forceinline__ void encode_pair(const Call& c, u8* tile, const Tile& t, u32 b, u32 elems, u8* stage, u32 (&x)[2][F::kWords],
                                            u32 (&masks)[2], u32 (&heads)[2]) {
    u8 *codes = tile + t.codes_offset + b * kCodeBytes, *extra = tile + t.extra_offset + b * kCodeBytes;
    u8* planes = tile + t.planes_offset + b * (kBlockElems * F::kPlanes);
    const Sums s0 = stage_exponents<F>(x[0], stage), s1 = stage_exponents<F>(x[1], stage + kBlockStage<F>);
    const u32 sum0 = __reduce_add_sync(kAllLanes, s0.sum), squares0 = __reduce_add_sync(kAllLanes, s0.squares);
    const u32 sum1 = __reduce_add_sync(kAllLanes, s1.sum), squares1 = __reduce_add_sync(kAllLanes, s1.squares);
    const bool zeros = __any_sync(kAllLanes, ((s0.zeros | s1.zeros) & 0x80 * kBytes) != 0);
    if (!zeros && elems >= 2 * kBlockElems && (int)c.g.window_lo < 0) {                // as a rule
        const Window w0 = full_window<F>(sum0, squares0), w1 = full_window<F>(sum1, squares1);
        masks[0] = store_block<F>(x[0], w0, codes, extra, planes);
        masks[1] = store_block<F>(x[1], w1, codes + kCodeBytes, extra + kCodeBytes, planes + kBlockElems * F::kPlanes);
        heads[0] = w0.lo, heads[1] = w1.lo;
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        const u32 present = present_of(elems, k);
        if (!present) break;
        const u32 count = __reduce_add_sync(kAllLanes, count_nonzero<4>(stage + k * kBlockStage<F>));
        const Window w = any_window<F>(k ? sum1 : sum0, k ? squares1 : squares0, count, present, (int)c.g.window_lo);
        if (present < kBlockElems) fill_absent<F>(present, w.lo, x[k]);
        masks[k] = store_block<F>(x[k], w, codes + k * kCodeBytes, extra + k * kCodeBytes, planes + k * (kBlockElems * F::kPlanes));
        heads[k] = w.lo | w.mode << 8;
    }
}

// The escapes of a lane's two blocks to the slots, from the last to the first; `at`: the places behind them.
template <class F>
__device__ __forceinline__ void store_in_slots(const u32 (&masks)[2], const u8* stage, u8* slots, const u32 (&at)[2]) {
    const SharedAddress shared = shared_address(stage);
    u32 mask0 = masks[0], mask1 = masks[1], at0 = at[0], at1 = at[1];
    while (mask0 | mask1) {            // one of each block in a turn; no branch for a block that has none left
        const u32 bit0 = highest_bit(mask0), bit1 = highest_bit(mask1);
        const u8 e0 = load_shared_u8(shared + stage_of_bit(bit0)), e1 = load_shared_u8(shared + kBlockStage<F> + stage_of_bit(bit1));
        at0--, at1--;
        if (mask0) slots[at0] = e0;
        if (mask1) slots[at1] = e1;
        mask0 &= ~(1u << (bit0 & 31)), mask1 &= ~(1u << (bit1 & 31));
    }
}

// One block's escapes where slots do not hold all: from place `at` of the tile on, beyond the slots to `pool` (0: nowhere).
__device__ __forceinline__ void store_and_spill(u32 mask, const u8* stage, u32 at, u8* slots, u32 capacity, u8* pool) {
    for (; mask; mask &= mask - 1, at++) {
        const u8 e = stage[stage_of_bit(__ffs(mask) - 1)];
        if (at < capacity) slots[at] = e;
        else if (pool) pool[at - capacity] = e;
    }
}

// ---- what the levels do differently

// How a warp codes a pair of blocks at a level, and what a lane keeps of it until the tile's slots are shared out. kWarps of a CTA, which
// needs kShared bytes; `b`: the pair's first block.
template <class F>
struct EncodeLevel1 {
    typedef F Format;
    static constexpr u32 kWarps = kEncodeWarps, kShared = 32 * kBlockStage<F>;
    u8* stage;
    u32 masks[2], inclusive, at[2];                        // at: the places in the tile behind this lane's escapes

    // Of a pair that has no elements, too. Fills `heads` but for the numbers of escapes and returns these, of the second block in the upper
    // half.
    __device__ __forceinline__ u32 encode(const Call& c, u8* tile, const Tile& t, u32 tile_index, u32 b, u32 elems, u8* shared,
                                          u32 (&heads)[2]) {
        stage = shared + b * kBlockStage<F> + lane_id() * kLaneStage<F>;
        masks[0] = masks[1] = 0;
        if (elems) {
            u32 x[2][F::kWords];
            load_pair<F>(c, (i64)tile_index * 32 + b, elems, stage, x);
            encode_pair<F>(c, tile, t, b, elems, stage, x, masks, heads);
        }
        const u32 counts = __popc(masks[0]) | __popc(masks[1]) << 16;
        inclusive = scan_inclusive(counts);
        return __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    }

    // `before`: escapes of the tile's earlier blocks, `totals`: what encode returned.
    __device__ __forceinline__ void place(u32 before, u32 totals) {
        at[0] = before + (inclusive & 0xffff), at[1] = before + (totals & 0xffff) + (inclusive >> 16);
    }

    // The pair's escapes to the slots, all of which fit.
    __device__ __forceinline__ void store(u8* slots) const { store_in_slots<F>(masks, stage, slots, at); }

    // Where the slots do not hold all; see store_and_spill.
    __device__ __forceinline__ void spill(u8* slots, u32 capacity, u8* pool) const {
#pragma unroll
        for (u32 k = 0; k < 2; k++)
            store_and_spill(masks[k], stage + k * kBlockStage<F>, at[k] - __popc(masks[k]), slots, capacity, pool);
    }
};

// What is between the raw data and the stream of a block: first codes to `codes`, remainders to `planes`.
template <bool kZeros>
__device__ __forceinline__ Fields store_block2(const u32 (&x)[16], Window w, u8* codes, u8* planes) {
    const Fields f = code_fields<kZeros>(x, w);
#pragma unroll
    for (u32 k = 0; k < 2; k++) *(u32*)(codes + 128 * k + 4 * lane_id()) = f.first[k];
    store_remainders<Bf16>(x, 0, planes);
    return f;
}

// BF16. Shared memory: the exponents of every warp's pair, then the streams of all blocks.
#ifndef ZIPCCL_ENCODE2_WARPS
#define ZIPCCL_ENCODE2_WARPS 8
#endif
struct EncodeLevel2 {
    typedef Bf16 Format;
    static constexpr u32 kWarps = ZIPCCL_ENCODE2_WARPS, kShared = kWarps * 2 * kBlockElems + 32 * kStreamBytes;
    const u32* streams;                                    // of the pair
    u32 first, counts[2];                                  // in words: where they go in the tile, how long they are

    // As EncodeLevel1's, with bytes of streams for escapes.
    __device__ __forceinline__ u32 encode(const Call& c, u8* tile, const Tile& t, u32 tile_index, u32 b, u32 elems, u8* shared,
                                          u32 (&heads)[2]) {
        u8 *stage = shared + warp_id() * (2 * kBlockElems) + 4 * lane_id(), *out = shared + kWarps * 2 * kBlockElems + b * kStreamBytes;
        streams = (const u32*)out;
        counts[0] = counts[1] = 0;
        if (!elems) return 0;
        u32 x[2][16];
        load_pair<Bf16>(c, (i64)tile_index * 32 + b, elems, out + lane_id() * kLaneStage<Bf16>, x);
        u8 *codes = tile + t.codes_offset + b * kCode2Bytes, *planes = tile + t.planes_offset + b * kBlockElems;
        const Sums s0 = stage_exponents2(x[0], stage), s1 = stage_exponents2(x[1], stage + kBlockElems);
        const u32 sum0 = __reduce_add_sync(kAllLanes, s0.sum), squares0 = __reduce_add_sync(kAllLanes, s0.squares);
        const u32 sum1 = __reduce_add_sync(kAllLanes, s1.sum), squares1 = __reduce_add_sync(kAllLanes, s1.squares);
        const bool zeros = __any_sync(kAllLanes, ((s0.zeros | s1.zeros) & 0x80 * kBytes) != 0);
        __syncwarp();                                      // what load_pair used of `out` is free
        if (!zeros && elems >= 2 * kBlockElems) {          // as a rule
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                const Window w = window2<true>(k ? sum1 : sum0, k ? squares1 : squares0, kBlockElems, kBlockElems);
                const Fields f = store_block2<false>(x[k], w, codes + k * kCode2Bytes, planes + k * kBlockElems);
                counts[k] = write_stream(f, w, stage + k * kBlockElems, (u32*)(out + k * kStreamBytes)) / 4;
                heads[k] = w.lo | w.mode << 8;
            }
        } else {
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                const u32 present = present_of(elems, k);
                if (!present) break;
                const u32 count = __reduce_add_sync(kAllLanes, count_nonzero<128>(stage + k * kBlockElems));
                const Window w = window2<false>(k ? sum1 : sum0, k ? squares1 : squares0, count, present);
                if (present < kBlockElems) fill_absent<Bf16>(present, w.lo + 2, x[k]);
                u8 *my_codes = codes + k * kCode2Bytes, *my_planes = planes + k * kBlockElems;
                const Fields f = w.mode & (kZeroFirst | kZeroSecond) ? store_block2<true>(x[k], w, my_codes, my_planes)
                                                                     : store_block2<false>(x[k], w, my_codes, my_planes);
                counts[k] = write_stream(f, w, stage + k * kBlockElems, (u32*)(out + k * kStreamBytes)) / 4;
                heads[k] = w.lo | w.mode << 8;
            }
        }
        return 4 * counts[0] | 4 * counts[1] << 16;
    }

    __device__ __forceinline__ void place(u32 before, u32) { first = before / 4; }

    // The pair whose first block is `b` again, where a warp has several; `head`: the header of the lane's block.
    __device__ __forceinline__ void find(const u8* shared, u32 b, u32 head, u32 before) {
        streams = (const u32*)(shared + kWarps * 2 * kBlockElems + b * kStreamBytes);
        counts[0] = (__shfl_sync(kAllLanes, head, b) >> 16) / 4, counts[1] = (__shfl_sync(kAllLanes, head, b + 1) >> 16) / 4;
        place(before, 0);
    }

    // Word `i` of the pair's two streams.
    __device__ __forceinline__ u32 word(u32 i) const { return streams[i < counts[0] ? i : i - counts[0] + kStreamBytes / 4]; }

    __device__ __forceinline__ void store(u8* slots) const {
        u32* to = (u32*)slots + first;
#pragma unroll 1
        for (u32 i = lane_id(); i < counts[0] + counts[1]; i += kWarp) to[i] = word(i);
    }

    __device__ __forceinline__ void spill(u8* slots, u32 capacity, u8* pool) const {
#pragma unroll 1
        for (u32 i = lane_id(); i < counts[0] + counts[1]; i += kWarp) {
            const u32 at = first + i, v = word(i);
            if (at < capacity / 4) ((u32*)slots)[at] = v;
            else if (pool) ((u32*)pool)[at - capacity / 4] = v;
        }
    }
};

// Grid: (tiles and the row's end, rows without the skipped one).
template <class L>
__device__ __forceinline__ void encode_tile(const Call& c) {
    constexpr u32 kPairs = 16 / L::kWarps;                 // of a warp
    ZIPSCAPE_DYNAMIC_SHARED(shared);
    __shared__ u32 heads[32];                              // block headers
    const u32 lane = lane_id(), warp = warp_id(), tile_index = blockIdx.x;
    u8* frame = c.frames + row_of(c, blockIdx.y) * c.frame_stride;
    const u32 tag = (u32)load_message(c.workspace) + 1;    // needed late: nobody waits for it here
    if (tile_index == (u32)c.g.num_tiles) {
        finish_row(c, frame, tag);
        return;
    }
    const Tile t = find_tile(c.g, tile_index);
    u8* tile = frame + t.offset;
    const u32 tile_elems = present_elems(c.g, tile_index);
    L pair;
    u32 totals = 0;
#pragma unroll 1
    for (u32 i = 0; i < kPairs; i++) {
        const u32 b = 2 * (warp + i * L::kWarps), elems = tile_elems - min(tile_elems, b * kBlockElems);
        u32 my_heads[2] = {0, 0};
        totals = pair.encode(c, tile, t, tile_index, b, elems, shared, my_heads);
        if (lane < 2) heads[b + lane] = lane ? my_heads[1] | (totals & 0xffff0000u) : my_heads[0] | totals << 16;
    }
    __syncthreads();

    const u32 head = heads[lane], total = __reduce_add_sync(kAllLanes, head >> 16);
    // What earlier blocks of the tile put into the slots before pair `i`'s.
    const auto before = [&](u32 i) { return __reduce_add_sync(kAllLanes, lane < 2 * (warp + i * L::kWarps) ? head >> 16 : 0); };
    if constexpr (kPairs == 1) pair.place(before(0), totals);
    const Workspace ws = find_workspace(c, blockIdx.y);
    if (threadIdx.x == 0) send(ws.tiles + tile_index, tag, total);
    const u32 capacity = t.escapes_capacity;
    u8* slots = tile + t.escapes_offset;
    u32 spill_offset = 0;
    if (total <= capacity) {
#pragma unroll 1
        for (u32 i = 0; i < kPairs; i++) {
            if constexpr (kPairs > 1) pair.find(shared, 2 * (warp + i * L::kWarps), head, before(i));
            pair.store(slots);
        }
#pragma unroll 1
        for (u32 i = total + threadIdx.x; i < capacity; i += L::kWarps * kWarp) slots[i] = 0;
    } else {
        const u32 group = tile_index / (u32)c.g.group_tiles;
        spill_offset = earlier_spills(c, ws.tiles, tag, group * (u32)c.g.group_tiles, tile_index);
        u8* pool = 0;                                      // where the spill goes, if it fits
        if ((u64)spill_offset + (total - capacity) <= pool_size(c.g, group))
            pool = frame + c.g.pools_offset + group * c.g.pool_bytes + spill_offset;
#pragma unroll 1
        for (u32 i = 0; i < kPairs; i++) {
            if constexpr (kPairs > 1) pair.find(shared, 2 * (warp + i * L::kWarps), head, before(i));
            pair.spill(slots, capacity, pool);
        }
    }
    if (warp == 0 && lane < t.num_blocks) ((u32*)(tile + kTileHeaderBytes))[lane] = head;
    if (warp == 0 && lane < 4) ((u32*)tile)[lane] = lane == 0 ? total : lane == 1 ? spill_offset : 0;
}

}  // namespace zipscape

#endif  // ZIPCCL_ENCODE_CUH
