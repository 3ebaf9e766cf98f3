// Encode: one CTA a tile. Nothing is decided by the order of execution: escapes are placed by prefix sums, inside a tile through
// shared memory, between tiles (only where a tile spills) by adding up what the group's earlier tiles published.
//
// The frame's status needs all tiles. The last CTA of a group, then of a row, then of the call, to arrive at a counter finishes the
// work of that level and sets the counter back to zero: no second kernel, no memset, and the workspace is clean for the next call.
// A spilling tile waits for the counts of earlier tiles only; CTAs start in the order of their index, so these are running or done.
#ifndef ZIPCCL_ENCODE_CUH
#define ZIPCCL_ENCODE_CUH

#include "frame.cuh"

namespace zipscape {

struct Outcome { u32 need, overflow; };

// Escapes of a tile that its slots do not hold.
__device__ __forceinline__ u32 spill_of(u32 num_escapes, u32 capacity) { return num_escapes > capacity ? num_escapes - capacity : 0; }

// One warp codes one block: everything but its escapes goes to the frame, the escapes' exponents to `staged` in scan order.
// Returns the block header.
template <class F>
__device__ __forceinline__ u32 encode_block(const Call& c, const u8* row, i64 block, u8* tile, const Tile& t, u32 b, u8* staged) {
    const u8* src = row + block * (kBlockElems * F::kItem);
    const u32 present = present_elems(c.g, block);
    u32 x[F::kWords];
    load_raw<F>(src, present, present == kBlockElems && is_aligned(src, 16), x);
    const Window w = choose_window<F>(x, present, (int)c.g.window_lo);
    if (present < kBlockElems) fill_absent<F>(x, present, w.lo);

    u32 words[3];
    pack_codes<F>(x, w, words);
    store_codes(tile + t.codes_offset + b * kCodeBytes, words);
    store_remainders<F>(x, tile + t.extra_offset + b * kCodeBytes, tile + t.planes_offset + b * (kBlockElems * F::kPlanes));

    u32 mask = escape_mask(words);
    const u32 count = __popc(mask), inclusive = scan_inclusive(count);
    u8* to = staged + (inclusive - count);
    while (mask) {                     // few: re-reading the element (it is in L1) beats keeping 32 exponents addressable
        const u32 bit = __ffs(mask) - 1;
        mask &= mask - 1;
        *to++ = (u8)(raw_bits<F>(src + element_of_bit(bit) * F::kItem) >> F::kMantissa & F::kExponentMask);
    }
    const u32 total = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    return w.lo | w.mode << 8 | total << 16;
}

// The spill of the group's tiles before `tile`: every thread of the CTA adds up some of them into `sum` (shared, zero before).
__device__ __forceinline__ void add_earlier_spills(const Call& c, const Workspace& ws, u32 first, u32 tile, u32* sum) {
    for (u32 t = first + threadIdx.x; t < tile; t += blockDim.x) {
        u32 published;
        while ((published = load_shared_word(ws.tiles + t)) == 0) {}
        const u32 spill = spill_of(published - 1, (u32)c.g.escapes_capacity);     // an earlier tile is never the frame's last
        if (spill) atomicAdd(sum, spill);
    }
}

// One warp, after the group's tiles have all published: the group's outcome; zeroes what its sub-pool does not use.
__device__ __forceinline__ Outcome finish_group(const Call& c, const Workspace& ws, u8* frame, u32 group) {
    constexpr u32 kPerLane = 8;
    const u32 num_tiles = (u32)c.g.num_tiles, first = group * (u32)c.g.group_tiles, size = pool_size(c.g, group);
    u32 spills[kPerLane], sum = 0, need = 0;
#pragma unroll
    for (u32 i = 0; i < kPerLane; i++) {
        const u32 t = first + lane_id() * kPerLane + i;
        spills[i] = 0;
        if (t < num_tiles) {           // group_tiles = 32 * kPerLane
            const bool last = t == num_tiles - 1;
            const u32 escapes = load_shared_word(ws.tiles + t) - 1, nb = (u32)(last ? c.g.last_blocks : c.g.tile_blocks);
            spills[i] = spill_of(escapes, (u32)(last ? c.g.last_escapes_capacity : c.g.escapes_capacity));
            sum += spills[i];
            need = max(need, (escapes + nb - 1) / nb);
            store_shared_word(ws.tiles + t, 0);
        }
    }
    const u32 inclusive = scan_inclusive(sum), total = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    u32 used = 0;                      // end of the last spill that fits
    for (u32 i = 0, end = inclusive - sum; i < kPerLane; i++) {
        end += spills[i];
        if (spills[i] && end <= size) used = end;
    }
    used = __reduce_max_sync(kAllLanes, used);
    u8* pool = frame + c.g.pools_offset + group * c.g.pool_bytes;
    const u32 whole = (used + 15) / 16 * 16;
    if (used + lane_id() < whole) pool[used + lane_id()] = 0;
    for (u32 at = whole + 16 * lane_id(); at < size; at += 16 * kWarp) *(uint4*)(pool + at) = make_uint4(0, 0, 0, 0);
    Outcome o;
    o.need = __reduce_max_sync(kAllLanes, need);
    o.overflow = total > size;
    return o;
}

// One warp arrives where `expected` warps do; true for the last one, which then sees what the others published, and resets `arrivals`.
__device__ __forceinline__ bool arrive(u32* arrivals, u32 expected) {
    u32 last = 0;
    if (lane_id() == 0) {
        __threadfence();
        last = atomicAdd(arrivals, 1) == expected - 1;
        if (last) store_shared_word(arrivals, 0);
        __threadfence();
    }
    return __shfl_sync(kAllLanes, last, 0) != 0;
}

// The same, gathering the outcome of all for the last one.
__device__ __forceinline__ bool arrive(u32* counter, u32 expected, Outcome& o) {
    if (lane_id() == 0) {
        if (o.need) atomicMax(counter + 1, o.need);
        if (o.overflow) atomicOr(counter + 2, 1);
    }
    if (!arrive(counter, expected)) return false;
    if (lane_id() == 0) o.need = atomicExch(counter + 1, 0), o.overflow = atomicExch(counter + 2, 0);
    o.need = __shfl_sync(kAllLanes, o.need, 0), o.overflow = __shfl_sync(kAllLanes, o.overflow, 0);
    return true;
}

// One warp, when a row's groups are done: its header, and with the last row the call's status.
__device__ __forceinline__ void finish_row(const Call& c, const Workspace& ws, u8* frame, Outcome o) {
    const u32 word = o.need | o.overflow * kOverflowBit;
    ((u32*)frame)[lane_id()] = lane_id() == kStatusOffset / 4 ? word : c.header[lane_id()];
    if (gridDim.y > 1 && !arrive(ws.all_rows, gridDim.y, o)) return;
    if (lane_id() == 0) *c.status = o.need | o.overflow * kOverflowBit;
}

// Grid: (tiles, rows without the skipped one). A frame without elements has one CTA, which writes the header.
template <class F, u32 kWarps>
__device__ __forceinline__ void encode_tile(const Call& c) {
    __shared__ u8 staged[32 * kBlockElems];          // each block's escapes
    __shared__ u32 heads[32];                        // block headers
    __shared__ u32 spilled_before;
    const u32 tile_index = blockIdx.x, lane = lane_id(), warp = warp_id();
    const i64 row_index = row_of(c, blockIdx.y);
    const u8* row = c.x + row_index * c.row_stride;
    u8* frame = c.frames + row_index * c.frame_stride;
    const Workspace ws = find_workspace(c, blockIdx.y);
    Outcome outcome = {0, 0};
    if (c.g.num_tiles == 0) {
        if (warp == 0) finish_row(c, ws, frame, outcome);
        return;
    }
    const Tile t = find_tile(c.g, tile_index);
    u8* tile = frame + t.offset;
    if (threadIdx.x == 0) spilled_before = 0;
#pragma unroll 1
    for (u32 b = warp; b < 32; b += kWarps) {
        const u32 head = b < t.num_blocks ? encode_block<F>(c, row, (i64)tile_index * 32 + b, tile, t, b, staged + b * kBlockElems) : 0;
        if (lane == 0) heads[b] = head;
    }
    __syncthreads();

    const u32 head = heads[lane], inclusive = scan_inclusive(head >> 16), total = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    const u32 group = tile_index / (u32)c.g.group_tiles;
    u8* slots = tile + t.escapes_offset;
    u8* pool = 0;                                    // where the tile's spill goes, if it has one and it fits
    u32 spill_offset = 0;
    if (threadIdx.x == 0) store_shared_word(ws.tiles + tile_index, total + 1);
    if (total > t.escapes_capacity) {
        add_earlier_spills(c, ws, group * (u32)c.g.group_tiles, tile_index, &spilled_before);
        __syncthreads();
        spill_offset = spilled_before;
        if ((u64)spill_offset + (total - t.escapes_capacity) <= pool_size(c.g, group))
            pool = frame + c.g.pools_offset + group * c.g.pool_bytes + spill_offset;
    }
#pragma unroll 1
    for (u32 b = warp; b < t.num_blocks; b += kWarps) {
        const u32 count = __shfl_sync(kAllLanes, head, b) >> 16, first = __shfl_sync(kAllLanes, inclusive, b) - count;
        for (u32 i = lane; i < count; i += kWarp) {
            const u8 e = staged[b * kBlockElems + i];
            if (first + i < t.escapes_capacity) slots[first + i] = e;
            else if (pool) pool[first + i - t.escapes_capacity] = e;
        }
    }
    for (u32 i = total + threadIdx.x; i < t.escapes_capacity; i += blockDim.x) slots[i] = 0;
    if (warp != 0) return;

    if (lane < t.num_blocks) ((u32*)(tile + kTileHeaderBytes))[lane] = head;
    if (lane < 4) ((u32*)tile)[lane] = lane == 0 ? total : lane == 1 ? spill_offset : 0;
    const u32 num_tiles = (u32)c.g.num_tiles, first = group * (u32)c.g.group_tiles;
    if (!arrive(ws.groups + group, min((u32)c.g.group_tiles, num_tiles - first))) return;
    outcome = finish_group(c, ws, frame, group);
    if (c.g.num_groups > 1 && !arrive(ws.row, (u32)c.g.num_groups, outcome)) return;
    finish_row(c, ws, frame, outcome);
}

}  // namespace zipscape

#endif  // ZIPCCL_ENCODE_CUH
