// Encode: a CTA codes tile after tile, a warp two neighbouring blocks at a time. Nothing is decided by the order of execution: escapes are
// placed by prefix sums, inside a tile through shared memory, between tiles (only where a tile spills) by adding up the counts of the
// group's earlier tiles.
//
// Counts travel between CTAs as single words that carry their own "sent" mark, so nothing needs a fence (which would wait for all stores of
// a multiprocessor), a memset or a second kernel.
//
// Items of work are the tiles, row by row, and then the rows' ends (finish.cuh). Either every item has its CTA, or there are fewer CTAs, which
// claim the next item while they work on one, so that its data is on the way before the present one is done. Both ways an item waits
// only for items that a running CTA has.
#ifndef ZIPCCL_ENCODE_CUH
#define ZIPCCL_ENCODE_CUH

#include "finish.cuh"
#include "load.cuh"

namespace zipscape {

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

// Where an item that is a tile belongs.
struct Place { u32 row_index, tile_index; };

__device__ __forceinline__ Place place_of(const Call& c, u32 item) {
    const u32 num_tiles = (u32)c.g.num_tiles;
    if (item < num_tiles) return {0, item};                // spares the usual case two divisions
    return {item / num_tiles, item % num_tiles};
}

// Two neighbouring blocks of the input.
struct Source { const u8* at; i64 block; u32 elems; };       // elems: of the tile, from its first block on

template <class F>
__device__ __forceinline__ Source find_source(const Call& c, u32 item, u32 first) {
    const Place p = place_of(c, item);
    const i64 block = (i64)p.tile_index * 32 + first;
    const u8* row = c.x + row_of(c, p.row_index) * c.row_stride;
    return {row + block * (kBlockElems * F::kItem), block, present_elems(c.g, p.tile_index)};
}

// Raw data of blocks `first` and `first` + 1 of the item's tile, if they are complete and 16-byte aligned.
template <class F>
__device__ __forceinline__ bool load_wide_pair(const Call& c, u32 item, u32 first, u32 (&x)[2][F::kWords]) {
    const Source s = find_source<F>(c, item, first);
    if (!is_aligned(s.at, 16) || s.elems < (first + 2) * kBlockElems) return false;
    load_aligned<F>(s.at, x[0]);
    load_aligned<F>(s.at + kBlockElems * F::kItem, x[1]);
    return true;
}

// The same for all others, as far as they exist. `scratch`: the lane's place for the first block's exponents.
template <class F>
__device__ __forceinline__ void load_any_pair(const Call& c, u32 item, u32 first, u8* scratch, u32 (&x)[2][F::kWords]) {
    const Source s = find_source<F>(c, item, first);
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        const u8* at = s.at + k * (kBlockElems * F::kItem);
        const bool inside = s.block + k > 0 && (s.block + k + 1) * kBlockElems < c.g.numel;
        if (inside) load_shifted<F>(at, x[k]);
        else load_single<F>(at, present_of(s.elems, first + k), scratch, x[k]);
    }
}

// A block to the frame but for its escapes. Returns which elements escape, and its header but for their number.
template <class F>
__device__ __forceinline__ u32 encode_block(u8* tile, const Tile& t, u32 b, const u32 (&x)[F::kWords], Window w, u32& head) {
    u32 words[3];
    pack_codes<F>(x, w, words);
    store_codes(tile + t.codes_offset + b * kCodeBytes, words);
    store_remainders<F>(x, tile + t.extra_offset + b * kCodeBytes, tile + t.planes_offset + b * (kBlockElems * F::kPlanes));
    head = w.lo | w.mode << 8;
    return escape_mask(words);
}

// Two blocks to the frame but for their escapes, whose exponents are left at `stage` (of this lane, for the first block), and which `masks`
// tells. Each block's header, 0 for one that does not exist, goes to `heads`.
template <class F>
__device__ __forceinline__ void encode_pair(const Call& c, u8* frame, u32 tile_index, u32 first, u8* stage, u32 (&x)[2][F::kWords],
                                            u32 (&masks)[2], u32& offsets, u32* heads) {
    const Tile t = find_tile(c.g, tile_index);
    u8* tile = frame + t.offset;
    const u32 elems = present_elems(c.g, tile_index);
    const Sums s0 = stage_exponents<F>(x[0], stage), s1 = stage_exponents<F>(x[1], stage + kBlockStage<F>);
    const u32 sum0 = __reduce_add_sync(kAllLanes, s0.sum), squares0 = __reduce_add_sync(kAllLanes, s0.squares);
    const u32 sum1 = __reduce_add_sync(kAllLanes, s1.sum), squares1 = __reduce_add_sync(kAllLanes, s1.squares);
    const bool zeros = __any_sync(kAllLanes, ((s0.zeros | s1.zeros) & 0x80 * kBytes) != 0);
    u32 head0 = 0, head1 = 0;
    masks[0] = masks[1] = 0;
    if (!zeros && elems >= (first + 2) * kBlockElems && c.g.window_lo < 0) {          // as a rule
        masks[0] = encode_block<F>(tile, t, first, x[0], full_window<F>(sum0, squares0), head0);
        masks[1] = encode_block<F>(tile, t, first + 1, x[1], full_window<F>(sum1, squares1), head1);
    } else {
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            const u32 present = present_of(elems, first + k);
            if (!present) continue;
            const u32 count = __reduce_add_sync(kAllLanes, count_nonzero(stage + k * kBlockStage<F>));
            const Window w = any_window<F>(k ? sum1 : sum0, k ? squares1 : squares0, count, present, (int)c.g.window_lo);
            if (present < kBlockElems) fill_absent<F>(present, w.lo, x[k]);
            masks[k] = encode_block<F>(tile, t, first + k, x[k], w, k ? head1 : head0);
        }
    }
    const u32 counts = __popc(masks[0]) | __popc(masks[1]) << 16, inclusive = scan_inclusive(counts);
    const u32 totals = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    offsets = inclusive - counts;
    if (lane_id() < 2) heads[first + lane_id()] = lane_id() ? head1 | (totals & 0xffff0000u) : head0 | totals << 16;
}

// A block's escapes from `stage` to the slots from `to` on.
__device__ __forceinline__ void store_in_slots(u32 mask, const u8* stage, u8* to) {
    while (mask) {
        const u32 bit = __ffs(mask) - 1;
        mask &= mask - 1;
        *to++ = stage[stage_of_bit(bit)];
    }
}

// The same where slots do not hold all: from place `at` of the tile on, beyond the slots to `pool` (0: nowhere).
__device__ __forceinline__ void store_and_spill(u32 mask, const u8* stage, u32 at, u8* slots, u32 capacity, u8* pool) {
    for (; mask; mask &= mask - 1, at++) {
        const u8 e = stage[stage_of_bit(__ffs(mask) - 1)];
        if (at < capacity) slots[at] = e;
        else if (pool) pool[at - capacity] = e;
    }
}

// The CTA: the tile's headers and escapes, when all blocks' counts are in `heads`.
template <class F, u32 kWarps>
__device__ __forceinline__ void finish_tile(const Call& c, Place p, u8* frame, u32 tag, const u32* heads, const u8* shared,
                                            const u32 (&masks)[16 / kWarps][2], const u32 (&offsets)[16 / kWarps]) {
    const u32 lane = lane_id(), warp = warp_id(), tile_index = p.tile_index;
    const Workspace ws = find_workspace(c, p.row_index);
    const Tile t = find_tile(c.g, tile_index);
    u8* tile = frame + t.offset;
    const u32 head = heads[lane], before = scan_inclusive(head >> 16) - (head >> 16);
    const u32 total = __shfl_sync(kAllLanes, before + (head >> 16), kWarp - 1);
    if (threadIdx.x == 0) send(ws.tiles + tile_index, tag, total);
    u8* slots = tile + t.escapes_offset;
    u8* pool = 0;                                          // where the tile's spill goes, if it has one and it fits
    u32 spill_offset = 0;
    if (total > t.escapes_capacity) {
        const u32 group = tile_index / (u32)c.g.group_tiles;
        spill_offset = earlier_spills(c, ws.tiles, tag, group * (u32)c.g.group_tiles, tile_index);
        if ((u64)spill_offset + (total - t.escapes_capacity) <= pool_size(c.g, group))
            pool = frame + c.g.pools_offset + group * c.g.pool_bytes + spill_offset;
    }
#pragma unroll
    for (u32 i = 0; i < 16 / kWarps; i++)
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            const u32 b = 2 * (warp + i * kWarps) + k, at = __shfl_sync(kAllLanes, before, b) + (offsets[i] >> 16 * k & 0xffff);
            const u8* stage = shared + b * kBlockStage<F> + lane * kLaneStage<F>;
            if (total <= t.escapes_capacity) store_in_slots(masks[i][k], stage, slots + at);
            else store_and_spill(masks[i][k], stage, at, slots, t.escapes_capacity, pool);
        }
    for (u32 i = total + threadIdx.x; i < t.escapes_capacity; i += kWarps * kWarp) slots[i] = 0;
    if (warp == 0 && lane < t.num_blocks) ((u32*)(tile + kTileHeaderBytes))[lane] = head;
    if (warp == 0 && lane < 4) ((u32*)tile)[lane] = lane == 0 ? total : lane == 1 ? spill_offset : 0;
}

template <class F>
constexpr u32 kEncodeShared = 32 * kBlockStage<F>;

// Grid: as many CTAs as there are items, or fewer.
template <class F, u32 kWarps>
__device__ __forceinline__ void encode_items(const Call& c) {
    constexpr u32 kPairs = 16 / kWarps;
    ZIPSCAPE_DYNAMIC_SHARED(shared);
    __shared__ u32 all_heads[2][32], claimed[2];           // of even and odd turns
    __shared__ u32 tag, base;                              // of this call; its first claim
    const u32 lane = lane_id(), warp = warp_id();
    const u32 num_rows = (u32)(c.num_rows - (c.skip >= 0)), tiles = (u32)c.g.num_tiles * num_rows;
    const u32 items = tiles + num_rows;
    const bool claims = gridDim.x < items;
    u32* counter = (u32*)(c.workspace + 1);
    u8* stage = shared + 2 * warp * kBlockStage<F> + lane * kLaneStage<F>;

    u32 item = blockIdx.x;
    u64 last = 0;
    if (threadIdx.x == 0) last = load_message(c.workspace);
    if (claims) {
        if (threadIdx.x == 0) claimed[1] = atomicAdd(counter, 1u) - (u32)(last >> 32);
        __syncthreads();
        item = claimed[1];
    }
    u32 turn = 0;
    {
        u32 x[2][F::kWords];
        bool loaded = item < tiles && load_wide_pair<F>(c, item, 2 * warp, x);
        if (threadIdx.x == 0) tag = (u32)last + 1, base = (u32)(last >> 32);
#pragma unroll 1
        for (; item < tiles; turn ^= 1) {
            u32 next = items;
            if (claims && threadIdx.x == 0) next = atomicAdd(counter, 1u) - base;
            const Place p = place_of(c, item);
            u8* frame = c.frames + row_of(c, p.row_index) * c.frame_stride;
            u32 masks[kPairs][2], offsets[kPairs];
#pragma unroll
            for (u32 i = 0; i < kPairs; i++) {
                const u32 first = 2 * (warp + i * kWarps);
                u8* my_stage = stage + 2 * i * kWarps * kBlockStage<F>;
                if (i > 0) loaded = load_wide_pair<F>(c, item, first, x);
                if (!loaded) load_any_pair<F>(c, item, first, my_stage, x);
                encode_pair<F>(c, frame, p.tile_index, first, my_stage, x, masks[i], offsets[i], all_heads[turn]);
            }
            if (threadIdx.x == 0) claimed[turn] = next;
            __syncthreads();
            next = claimed[turn];
            loaded = next < tiles && load_wide_pair<F>(c, next, 2 * warp, x);       // under way while this tile is finished
            finish_tile<F, kWarps>(c, p, frame, tag, all_heads[turn], shared, masks, offsets);
            item = next;
        }
    }
    for (; item < items; turn ^= 1) {
        if (threadIdx.x == 0) claimed[turn] = claims ? atomicAdd(counter, 1u) - base : items;
        __syncthreads();
        finish_row<kWarps>(c, item - tiles, num_rows, tag, base + (claims ? items + gridDim.x : 0));
        item = claimed[turn];
    }
}

}  // namespace zipscape

#endif  // ZIPCCL_ENCODE_CUH
