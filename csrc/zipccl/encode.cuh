// Encode: one CTA a tile. Nothing is decided by the order of execution: escapes are placed by prefix sums, inside a tile through
// shared memory, between tiles (only where a tile spills) by adding up the counts of the group's earlier tiles.
//
// The frame's status needs the counts of all tiles. The CTA of a group's last tile collects those of its group, the one of a row's last
// group those of its row, the one of the last row all. Counts travel as single words that carry their own "sent" mark, so nothing needs
// a fence (which would wait for all stores of a multiprocessor: 15 % of the time), an atomic, a memset or a second kernel.
#ifndef ZIPCCL_ENCODE_CUH
#define ZIPCCL_ENCODE_CUH

#include "frame.cuh"

namespace zipscape {

struct Outcome { u32 need, overflow, spill; };        // the fields of a status word

// Escapes of a tile that its slots do not hold.
__device__ __forceinline__ u32 spill_of(u32 num_escapes, u32 capacity) { return num_escapes > capacity ? num_escapes - capacity : 0; }

// The spill of the group's tiles before `tile`: every thread of the CTA adds up some of them into `sum` (shared, zero before).
__device__ __forceinline__ void add_earlier_spills(const Call& c, const Workspace& ws, u32 tag, u32 first, u32 tile, u32* sum) {
    for (u32 t = first + threadIdx.x; t < tile; t += blockDim.x) {
        const u32 spill = spill_of(receive(ws.tiles + t, tag), (u32)c.g.escapes_capacity);      // an earlier tile is never the last one
        if (spill) atomicAdd(sum, spill);
    }
}

// One warp: the group's outcome; zeroes what its sub-pool does not use.
__device__ __forceinline__ Outcome finish_group(const Call& c, const Workspace& ws, u32 tag, u8* frame, u32 group) {
    constexpr u32 kPerLane = 8;
    const u32 num_tiles = (u32)c.g.num_tiles, first = group * (u32)c.g.group_tiles, size = pool_size(c.g, group);
    const u32 mine = first + lane_id() * kPerLane;               // group_tiles = 32 * kPerLane
    u64 messages[kPerLane];
    for (bool all = false; !all;) {                              // all loads are under way at once
        all = true;
#pragma unroll
        for (u32 i = 0; i < kPerLane; i++) messages[i] = mine + i < num_tiles ? load_message(ws.tiles + mine + i) : 0;
#pragma unroll
        for (u32 i = 0; i < kPerLane; i++) all = all && (mine + i >= num_tiles || (u32)(messages[i] >> 32) == tag);
    }
    u32 spills[kPerLane], sum = 0, need = 0;
#pragma unroll
    for (u32 i = 0; i < kPerLane; i++) {
        const bool last = mine + i == num_tiles - 1;
        const u32 escapes = (u32)messages[i], nb = (u32)(last ? c.g.last_blocks : c.g.tile_blocks);
        spills[i] = spill_of(escapes, (u32)(last ? c.g.last_escapes_capacity : c.g.escapes_capacity));
        sum += spills[i];
        need = max(need, (escapes + nb - 1) / nb);
    }
    const u32 inclusive = scan_inclusive(sum), total = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    u32 used = 0;                      // end of the last spill that fits
#pragma unroll
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
    const u32 unit = kSpillUnitBytes * min((u32)c.g.group_tiles, num_tiles - first);
    o.spill = (total + unit - 1) / unit;
    return o;
}

__device__ __forceinline__ u32 status_word(Outcome o) {
    return o.need | o.overflow * kOverflowBit | o.spill << kSpillShift;
}

// One warp: `o` together with the `count` outcomes that arrive `stride` words apart.
__device__ __forceinline__ void collect(const u64* from, i64 stride, u32 count, u32 tag, Outcome& o) {
    u32 need = o.need, overflow = o.overflow, spill = o.spill;
    for (u32 i = lane_id(); i < count; i += kWarp) {
        const u32 word = receive(from + i * stride, tag);
        need = max(need, word & kNeedMask), overflow |= word / kOverflowBit & 1, spill = max(spill, word >> kSpillShift);
    }
    o.need = __reduce_max_sync(kAllLanes, need), o.overflow = __reduce_max_sync(kAllLanes, overflow);
    o.spill = __reduce_max_sync(kAllLanes, spill);
}

// One warp, when a row's outcome is known: its header, and with the last row the call's status.
__device__ __forceinline__ void finish_row(const Call& c, const Workspace& ws, u32 tag, u8* frame, Outcome o) {
    ((u32*)frame)[lane_id()] = lane_id() == kStatusOffset / 4 ? status_word(o) : c.header[lane_id()];
    if (blockIdx.y + 1 < gridDim.y) {
        if (lane_id() == 0) send(ws.row, tag, status_word(o));
        return;
    }
    if (gridDim.y > 1) collect(ws.row - (i64)blockIdx.y * ws.row_stride, ws.row_stride, blockIdx.y, tag, o);
    if (lane_id() == 0) {
        *c.status = status_word(o);
        store_message(ws.last_tag, tag);             // every CTA has read it, or it could not have sent anything
    }
}

// Shared memory of encode_tile: each warp's block, raw; each block's escapes.
template <class F, u32 kWarps>
constexpr u32 encode_shared_bytes() { return kWarps * kBlockElems * F::kItem + 32 * kBlockElems; }

// Grid: (tiles, rows without the skipped one). A frame without elements has one CTA, which writes the header.
template <class F, u32 kWarps>
__device__ __forceinline__ void encode_tile(const Call& c) {
    constexpr u32 kPerWarp = 32 / kWarps, kRawBytes = kBlockElems * F::kItem, kThreads = kWarps * kWarp;
    ZIPSCAPE_DYNAMIC_SHARED(shared);
    __shared__ u32 heads[32];                        // block headers
    __shared__ u32 progress;                         // of the warps: escapes, and from bit 20 on warps that have counted theirs
    __shared__ u32 spilled_before, tag;
    const u32 tile_index = blockIdx.x, lane = lane_id(), warp = warp_id();
    const i64 row_index = row_of(c, blockIdx.y);
    u8* frame = c.frames + row_index * c.frame_stride;
    const Workspace ws = find_workspace(c, blockIdx.y);
    Outcome outcome = {0, 0, 0};
    const u32 new_tag = lane == 0 ? (u32)load_message(ws.last_tag) + 1 : 0;          // needed late: nobody waits for it here
    if (c.g.num_tiles == 0) {
        if (warp == 0) finish_row(c, ws, __shfl_sync(kAllLanes, new_tag, 0), frame, outcome);
        return;
    }
    const Tile t = find_tile(c.g, tile_index);
    const u32 tile_elems = present_elems(c.g, tile_index);
    const u8* src = c.x + row_index * c.row_stride + (i64)tile_index * 32 * kRawBytes;
    const bool aligned = is_aligned(src, 16);
    u8* tile = frame + t.offset;
    u8* raw = shared + warp * kRawBytes;
    u8* staged = shared + kWarps * kRawBytes;
    const u32 group = tile_index / (u32)c.g.group_tiles, group_first = group * (u32)c.g.group_tiles;

    u32 x[F::kWords], next[F::kWords];
    u32 present = present_of(tile_elems, warp);
    if (present) load_raw<F>(src + warp * kRawBytes, present, aligned && present == kBlockElems, raw, x);
    u32 num_escapes = 0;                             // of this warp's blocks
    if (threadIdx.x == 0) spilled_before = progress = 0;
    __syncthreads();
#pragma unroll 1
    for (u32 i = 0; i < kPerWarp; i++) {
        const u32 b = warp + i * kWarps, next_present = i + 1 < kPerWarp ? present_of(tile_elems, b + kWarps) : 0;
        if (next_present)
            load_raw<F>(src + (b + kWarps) * kRawBytes, next_present, aligned && next_present == kBlockElems, raw, next);
        u32 mask = 0, head = 0;
        if (present) {
            const Window w = choose_window<F>(x, present, (int)c.g.window_lo);
            if (present < kBlockElems) fill_absent<F>(raw, present, w.lo, x);
            u32 words[3];
            pack_codes<F>(x, w, words);
            store_codes(tile + t.codes_offset + b * kCodeBytes, words);
            mask = escape_mask(words);
            const u32 count = __reduce_add_sync(kAllLanes, __popc(mask));
            head = w.lo | w.mode << 8 | count << 16;
            num_escapes += count;
        }
        if (lane == 0) {
            heads[b] = head;
            // All that other CTAs need is the tile's count: it is on its way while the bulk of the work is done.
            if (i == kPerWarp - 1) {
                const u32 before = atomicAdd(&progress, num_escapes | 1u << 20);
                if (before >> 20 == kWarps - 1) {
                    tag = new_tag;
                    send(ws.tiles + tile_index, new_tag, (before & 0xfffff) + num_escapes);
                }
            }
        }
        if (present) {
            put_raw<F>(raw, x);
            store_remainders<F>(x, tile + t.extra_offset + b * kCodeBytes, tile + t.planes_offset + b * (kBlockElems * F::kPlanes));
            const u32 count = __popc(mask);
            u8* to = staged + b * kBlockElems + scan_inclusive(count) - count;
            while (mask) {
                const u32 bit = __ffs(mask) - 1;
                mask &= mask - 1;
                *to++ = (u8)(raw_bits<F>(raw + element_of_bit(bit) * F::kItem) >> F::kMantissa & F::kExponentMask);
            }
        }
        present = next_present;
#pragma unroll
        for (u32 k = 0; k < F::kWords; k++) x[k] = next[k];
    }
    __syncthreads();

    const u32 head = heads[lane], before = scan_inclusive(head >> 16) - (head >> 16);
    const u32 total = __shfl_sync(kAllLanes, before + (head >> 16), kWarp - 1);
    const u32 num_tiles = (u32)c.g.num_tiles, num_groups = (u32)c.g.num_groups;
    if (warp == kWarps - 1 && tile_index == min(group_first + (u32)c.g.group_tiles, num_tiles) - 1) {
        outcome = finish_group(c, ws, tag, frame, group);
        if (group + 1 < num_groups) {
            if (lane == 0) send(ws.groups + group, tag, status_word(outcome));
        } else {
            if (num_groups > 1) collect(ws.groups, 1, group, tag, outcome);
            finish_row(c, ws, tag, frame, outcome);
        }
    }
    u8* slots = tile + t.escapes_offset;
    u8* pool = 0;                                    // where the tile's spill goes, if it has one and it fits
    u32 spill_offset = 0;
    if (total > t.escapes_capacity) {
        add_earlier_spills(c, ws, tag, group_first, tile_index, &spilled_before);
        __syncthreads();
        spill_offset = spilled_before;
        if ((u64)spill_offset + (total - t.escapes_capacity) <= pool_size(c.g, group))
            pool = frame + c.g.pools_offset + group * c.g.pool_bytes + spill_offset;
    }
#pragma unroll 1
    for (u32 b = warp; b < t.num_blocks; b += kWarps) {
        const u32 count = __shfl_sync(kAllLanes, head, b) >> 16, first = __shfl_sync(kAllLanes, before, b);
        for (u32 i = lane; i < count; i += kWarp) {
            const u8 e = staged[b * kBlockElems + i];
            if (first + i < t.escapes_capacity) slots[first + i] = e;
            else if (pool) pool[first + i - t.escapes_capacity] = e;
        }
    }
    for (u32 i = total + threadIdx.x; i < t.escapes_capacity; i += kThreads) slots[i] = 0;
    if (warp == 0 && lane < t.num_blocks) ((u32*)(tile + kTileHeaderBytes))[lane] = head;
    if (warp == 0 && lane < 4) ((u32*)tile)[lane] = lane == 0 ? total : lane == 1 ? spill_offset : 0;
}

}  // namespace zipscape

#endif  // ZIPCCL_ENCODE_CUH
