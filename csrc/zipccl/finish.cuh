// Encode's last item of a row: sub-pools, header and status, once the counts of all tiles have arrived. It is a piece of work of its own, so
// that it runs beside the last tiles and not after them.
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

// One warp: the group's outcome; zeroes what its sub-pool does not use.
__device__ __forceinline__ Outcome finish_group(const Call& c, const u64* tiles, u32 tag, u8* frame, u32 group) {
    constexpr u32 kPerLane = 8;
    const u32 num_tiles = (u32)c.g.num_tiles, first = group * (u32)c.g.group_tiles, size = pool_size(c.g, group);
    const u32 mine = first + lane_id() * kPerLane;               // group_tiles = 32 * kPerLane
    u64 messages[kPerLane];
    for (bool all = false; !all;) {                              // all loads are under way at once
        all = true;
#pragma unroll
        for (u32 i = 0; i < kPerLane; i++) messages[i] = mine + i < num_tiles ? load_message(tiles + mine + i) : 0;
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
    const u32 unit = kSpillUnitBytes * min((u32)c.g.group_tiles, num_tiles - first);
    return {__reduce_max_sync(kAllLanes, need), total > size, (total + unit - 1) / unit};
}

// The CTA: row `row_index` of `num_rows`; with the last one the call's status. `claims`: what the next call starts counting from.
template <u32 kWarps>
__device__ __forceinline__ void finish_row(const Call& c, u32 row_index, u32 num_rows, u32 tag, u32 claims) {
    __shared__ Outcome outcomes[kWarps];
    const Workspace ws = find_workspace(c, row_index);
    u8* frame = c.frames + row_of(c, row_index) * c.frame_stride;
    const u32 warp = warp_id(), lane = lane_id(), num_groups = (u32)c.g.num_groups;
    Outcome o = {0, 0, 0};
    for (u32 group = warp; group < num_groups; group += kWarps) o = worst(o, finish_group(c, ws.tiles, tag, frame, group));
    if (lane == 0) outcomes[warp] = o;
    __syncthreads();
    if (warp != 0) return;
    o = worst_of_lanes(lane < kWarps ? outcomes[lane] : Outcome{0, 0, 0});
    ((u32*)frame)[lane] = lane == kStatusOffset / 4 ? status_word(o) : c.header[lane];
    if (row_index + 1 < num_rows) {
        if (lane == 0) send(ws.row, tag, status_word(o));
        return;
    }
    const u64* first_row = ws.row - (i64)row_index * ws.row_stride;
    Outcome others = {0, 0, 0};
    for (u32 i = lane; i < row_index; i += kWarp) others = worst(others, outcome_of(receive(first_row + i * ws.row_stride, tag)));
    if (num_rows > 1) o = worst(o, worst_of_lanes(others));
    if (lane == 0) {
        *c.status = status_word(o);
        store_message(ws.last, (u64)claims << 32 | tag);             // every CTA with work has read it
    }
}

}  // namespace zipscape

#endif  // ZIPCCL_FINISH_CUH
