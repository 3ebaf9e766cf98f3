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

// Raw data of two neighbouring blocks at `src`, the first of which is number `block` of its row, as far as they exist: `elems` elements from
// `src` on. `scratch`: the lane's place for the first block's exponents.
template <class F>
__device__ __forceinline__ void load_pair(const Call& c, const u8* src, i64 block, u32 elems, u8* scratch, u32 (&x)[2][F::kWords]) {
    constexpr u32 kRawBytes = kBlockElems * F::kItem;
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
        const u32 count = __reduce_add_sync(kAllLanes, count_nonzero(stage + k * kBlockStage<F>));
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

// A block's shared memory, all blocks' of a tile.
template <class F>
constexpr u32 kEncodeShared = 32 * kBlockStage<F>;

// Grid: (tiles and the row's end, rows without the skipped one).
template <class F>
__device__ __forceinline__ void encode_tile(const Call& c) {
    ZIPSCAPE_DYNAMIC_SHARED(shared);
    __shared__ u32 heads[32];                              // block headers
    const u32 lane = lane_id(), warp = warp_id(), tile_index = blockIdx.x, b = 2 * warp;
    u8* frame = c.frames + row_of(c, blockIdx.y) * c.frame_stride;
    const u32 tag = (u32)load_message(c.workspace) + 1;    // needed late: nobody waits for it here
    if (tile_index == (u32)c.g.num_tiles) {
        finish_row(c, frame, tag);
        return;
    }
    const Tile t = find_tile(c.g, tile_index);
    u8* tile = frame + t.offset;
    u8* stage = shared + b * kBlockStage<F> + lane * kLaneStage<F>;
    const u32 tile_elems = present_elems(c.g, tile_index), elems = tile_elems - min(tile_elems, b * kBlockElems);
    u32 masks[2] = {0, 0}, my_heads[2] = {0, 0};
    if (elems) {
        u32 x[2][F::kWords];
        const i64 block = (i64)tile_index * 32 + b;
        load_pair<F>(c, c.x + row_of(c, blockIdx.y) * c.row_stride + block * (kBlockElems * F::kItem), block, elems, stage, x);
        encode_pair<F>(c, tile, t, b, elems, stage, x, masks, my_heads);
    }
    const u32 counts = __popc(masks[0]) | __popc(masks[1]) << 16, inclusive = scan_inclusive(counts);
    const u32 totals = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    if (lane < 2) heads[b + lane] = lane ? my_heads[1] | (totals & 0xffff0000u) : my_heads[0] | totals << 16;
    __syncthreads();

    const u32 head = heads[lane], total = __reduce_add_sync(kAllLanes, head >> 16);
    const u32 before = __reduce_add_sync(kAllLanes, lane < b ? head >> 16 : 0);
    const Workspace ws = find_workspace(c, blockIdx.y);
    if (threadIdx.x == 0) send(ws.tiles + tile_index, tag, total);
    const u32 capacity = t.escapes_capacity;
    u32 at[2] = {before + (inclusive & 0xffff), before + (totals & 0xffff) + (inclusive >> 16)};           // behind this lane's escapes
    u8* slots = tile + t.escapes_offset;
    u32 spill_offset = 0;
    if (total <= capacity) {
        store_in_slots<F>(masks, stage, slots, at);
#pragma unroll 1
        for (u32 i = total + threadIdx.x; i < capacity; i += kEncodeWarps * kWarp) slots[i] = 0;
    } else {
        const u32 group = tile_index / (u32)c.g.group_tiles;
        spill_offset = earlier_spills(c, ws.tiles, tag, group * (u32)c.g.group_tiles, tile_index);
        u8* pool = 0;                                      // where the spill goes, if it fits
        if ((u64)spill_offset + (total - capacity) <= pool_size(c.g, group))
            pool = frame + c.g.pools_offset + group * c.g.pool_bytes + spill_offset;
#pragma unroll
        for (u32 k = 0; k < 2; k++)
            store_and_spill(masks[k], stage + k * kBlockStage<F>, at[k] - __popc(masks[k]), slots, capacity, pool);
    }
    if (warp == 0 && lane < t.num_blocks) ((u32*)(tile + kTileHeaderBytes))[lane] = head;
    if (warp == 0 && lane < 4) ((u32*)tile)[lane] = lane == 0 ? total : lane == 1 ? spill_offset : 0;
}

}  // namespace zipscape

#endif  // ZIPCCL_ENCODE_CUH
