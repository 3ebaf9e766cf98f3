// Encode's end of a row: sub-pools, header and status, once the counts of all tiles have arrived. It has a CTA of its own, so that it runs
// beside the last tiles and not after them.
#ifndef ZIPCCL_FINISH_CUH
#define ZIPCCL_FINISH_CUH

#include "frame.cuh"

namespace zipscape {

struct Outcome { u32 need, overflow, spill; };        // the fields of a status word

// Escapes of a tile that its slots do not hold.
__device__ __forceinline__ u32 spill_of(u32 num_escapes, u32 capacity) { return num_escapes > capacity ? num_escapes - capacity : 0; }

__device__ __forceinline__ u32 status_word(Outcome o) {
    return o.need | o.overflow * kOverflowBit | o.spill << kSpillShift;
}

__device__ __forceinline__ Outcome outcome_of(u32 word) { return {word & kNeedMask, word / kOverflowBit & 1, word >> kSpillShift}; }

__device__ __forceinline__ Outcome worst(Outcome a, Outcome b) {
    return {max(a.need, b.need), a.overflow | b.overflow, max(a.spill, b.spill)};
}

// One warp: the worst of its lanes' outcomes.
__device__ __forceinline__ Outcome worst_of_lanes(Outcome o) {
    return {__reduce_max_sync(kAllLanes, o.need), __reduce_max_sync(kAllLanes, o.overflow), __reduce_max_sync(kAllLanes, o.spill)};
}

// One warp: the outcome of a group, some tile of which spills; all its messages have arrived. Zeroes what its sub-pool does not use.
__device__ __forceinline__ Outcome finish_group(const Call& c, const u64* tiles, u8* frame, u32 group) {
    const u32 num_tiles = (u32)c.g.num_tiles, first = group * (u32)c.g.group_tiles, size = pool_size(c.g, group);
    const u32 end = min(first + (u32)c.g.group_tiles, num_tiles);
    u32 total = 0, used = 0;           // used: end of the last spill that fits
#pragma unroll 1
    for (u32 t = first; t < end; t += kWarp) {
        const u32 mine = t + lane_id();
        const u32 capacity = (u32)(mine == num_tiles - 1 ? c.g.last_escapes_capacity : c.g.escapes_capacity);
        const u32 spill = mine < end ? spill_of((u32)load_message(tiles + mine), capacity) : 0, up_to = total + scan_inclusive(spill);
        used = max(used, __reduce_max_sync(kAllLanes, spill && up_to <= size ? up_to : 0));
        total = __shfl_sync(kAllLanes, up_to, kWarp - 1);
    }
    u8* pool = frame + c.g.pools_offset + group * c.g.pool_bytes;
    const u32 whole = (used + 15) / 16 * 16;
    if (used + lane_id() < whole) pool[used + lane_id()] = 0;
    for (u32 at = whole + 16 * lane_id(); at < size; at += 16 * kWarp) *(uint4*)(pool + at) = make_uint4(0, 0, 0, 0);
    const u32 unit = kSpillUnitBytes * (end - first);
    return {0, total > size, (total + unit - 1) / unit};
}

// The CTA: the grid row's end; with the last one the call's status. A thread waits for its tiles' messages only, so that the last one is
// noticed at once; where no tile spills (as a rule), little is left to do then.
__device__ __forceinline__ void finish_row(const Call& c, u8* frame, u32 tag) {
    constexpr u32 kAtOnce = 8;
    __shared__ Outcome outcomes[kWarp];
    __shared__ u32 any_spill;
    const Workspace ws = find_workspace(c, blockIdx.y);
    const u32 warp = warp_id(), num_warps = blockDim.x / kWarp, lane = lane_id(), num_tiles = (u32)c.g.num_tiles;
    if (threadIdx.x == 0) any_spill = 0;
    __syncthreads();
    Outcome o = {0, 0, 0};
    u32 spills = 0;
    for (u32 first = threadIdx.x; first < num_tiles; first += kAtOnce * blockDim.x) {
        u64 messages[kAtOnce];
        for (bool all = false; !all;) {                    // all loads are under way at once
            all = true;
#pragma unroll
            for (u32 i = 0; i < kAtOnce; i++) {
                const u32 t = first + i * blockDim.x;
                messages[i] = t < num_tiles ? load_message(ws.tiles + t) : (u64)tag << 32;
            }
#pragma unroll
            for (u32 i = 0; i < kAtOnce; i++) all = all && (u32)(messages[i] >> 32) == tag;
        }
#pragma unroll
        for (u32 i = 0; i < kAtOnce; i++) {
            const bool last = first + i * blockDim.x == num_tiles - 1;
            const u32 escapes = (u32)messages[i], nb = (u32)(last ? c.g.last_blocks : c.g.tile_blocks);
            o.need = max(o.need, (escapes + nb - 1) / nb);
            spills |= spill_of(escapes, (u32)(last ? c.g.last_escapes_capacity : c.g.escapes_capacity));
        }
    }
    if (spills) any_spill = 1;
    o.need = __reduce_max_sync(kAllLanes, o.need);
    if (lane == 0) outcomes[warp] = o;
    __syncthreads();
    if (any_spill) {
        for (u32 group = warp; group < (u32)c.g.num_groups; group += num_warps) o = worst(o, finish_group(c, ws.tiles, frame, group));
        if (lane == 0) outcomes[warp] = o;
        __syncthreads();
    } else {
        u8* pools = frame + c.g.pools_offset;
        for (i64 at = 16 * threadIdx.x; at < c.g.frame_bytes - c.g.pools_offset; at += 16 * blockDim.x)
            *(uint4*)(pools + at) = make_uint4(0, 0, 0, 0);
    }
    if (warp != 0) return;
    o = worst_of_lanes(lane < num_warps ? outcomes[lane] : Outcome{0, 0, 0});
    ((u32*)frame)[lane] = lane == kStatusOffset / 4 ? status_word(o) : c.header[lane];
    if (blockIdx.y + 1 < gridDim.y) {
        if (lane == 0) send(ws.row, tag, status_word(o));
        return;
    }
    const u64* first_row = ws.row - (i64)blockIdx.y * ws.row_stride;
    Outcome others = {0, 0, 0};
    for (u32 i = lane; i < blockIdx.y; i += kWarp) others = worst(others, outcome_of(receive(first_row + i * ws.row_stride, tag)));
    if (gridDim.y > 1) o = worst(o, worst_of_lanes(others));
    if (lane == 0) {
        *c.status = status_word(o);
        if (c.mail) *(volatile u64*)c.mail = c.stamp << 32 | status_word(o);         // one store: nobody sees half of it
        store_message(ws.last_tag, tag);                   // every CTA has read it, or it could not have sent anything
    }
}

}  // namespace zipscape

#endif  // ZIPCCL_FINISH_CUH
