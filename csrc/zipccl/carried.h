// Queueing messages that kernels carry (carry.cuh): their kernels, what goes together, and the launches.
#ifndef ZIPCCL_CARRIED_H
#define ZIPCCL_CARRIED_H

#include "exchange.h"

namespace zipscape {
namespace carrying {

constexpr u32 kCarryCtas = 8, kCarrySumCtas = 5, kCarrySumRows = 4;      // that must fit on a multiprocessor, of 2-byte elements; rows staged at once

// The same of elements of `item` bytes.
constexpr u32 num_fitting(u32 ctas, i64 item) { return ctas * 2 / (u32)item; }

#define ZIPCCL_CARRIER(name, F, ctas, rows, what)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kCarryWarps * 32, num_fitting(ctas, F::kItem)) name(const __grid_constant__ Carried m) { \
        carry<DecodeLevel1<F>, rows, what>(m);                                                                                        \
    }
#define ZIPCCL_CARRIERS(F, dtype)                                              \
    ZIPCCL_CARRIER(zipccl_carry_##dtype, F, kCarryCtas, 1, kGather)            \
    ZIPCCL_CARRIER(zipccl_carry_sum2_##dtype, F, kCarryCtas, 1, kSumOfTwo)     \
    ZIPCCL_CARRIER(zipccl_carry_sum_##dtype, F, kCarrySumCtas, kCarrySumRows, kSumOfMany)
ZIPCCL_CARRIERS(Bf16, bf16)
ZIPCCL_CARRIERS(Fp16, fp16)
ZIPCCL_CARRIERS(Fp32, fp32)

// Of a call: frames that are made on the way go together only while they are small, else they are made beside the ones before.
constexpr i64 kTogetherBytes = 16 << 20;

inline const ZipcclGeometry& geometry_of(const Part* p) { return *(const ZipcclGeometry*)p->geometry; }

inline bool can_carry(const Exchange* x) {
    bool can = x->num_senders > 0;
    for (i64 i = 0; i < x->num_parts; i++) can = can && geometry_of(x->parts + i).num_tiles < kMaxPieces;
    return can;
}

// How many of the next parts are one message: the same on all ranks. They leave room in the ring for others.
inline i64 num_together(const Engine* e) {
    const Exchange& x = e->x;
    const Part* first = x.parts + e->next;
    const i64 most = e->is_carried ? kMaxFrames : 1;
    i64 num = 0, pieces = 0, region = 0, made = 0;
    for (; num < most && e->next + num < x.num_parts; num++) {
        const Part* p = first + num;
        pieces += 1 + geometry_of(p).num_tiles, region += e->region_bytes(p), made += e->has_frames(p) ? p->raw_bytes : 0;
        if (num && (pieces > kMaxPieces || region > e->ring.room / 4 || made > kTogetherBytes)) break;
        if (num && geometry_of(p).dtype_code != geometry_of(first).dtype_code) break;
    }
    return num;
}

inline Carried carried_of(const Engine* e, const Message& m) {
    const Exchange& x = e->x;
    Carried c = {};
    const u32 lane = e->lane_of(m.number);
    c.t = e->nothing;
    c.t.sent = c.t.wanted = m.number, c.t.sent_lane = c.t.wanted_lane = lane, c.t.overflows = e->overflows + lane * kMaxRanks;
    c.num_ended = e->counters + kNumLanes * kMaxRanks, c.tickets = c.num_ended + 1 + lane;
    i64 offset = m.offset;
    for (i64 i = 0; i < m.num_parts; i++) {
        const Part* p = m.part + i;
        CarriedFrame& f = c.frames[c.num_frames++];
        const u8* made = x.made ? x.made[p - x.parts] : nullptr;
        f.call = reception_of(e, p, e->memory() + e->row_0(offset, p->slot_bytes), p->slot_bytes);
        f.frame_stride = x.row_stride ? p->frame_stride : 0, f.rows = e->place_of(p).row, f.row_stride = x.row_stride;
        f.frames = made ? made : e->memory() + e->row_0(offset + p->num_slots * p->slot_bytes, f.frame_stride);
        f.raw_bytes = p->raw_bytes, f.slot = e->own_row(offset, p->slot_bytes), f.as_it_is = p->as_it_is;
        f.own = own_copy(e, p);
        f.first_piece = c.num_pieces;
        c.num_pieces += 1 + (u32)f.call.g.num_tiles;
        offset += e->region_bytes(p);
    }
    return c;
}

// Of `wanted` receivers of the smallest kernels. Of larger ones so many fewer that they take no more of a GPU: else two GPUs that are full
// of receivers, and have no room for what sends, wait for each other.
inline i64 num_receivers_of(i64 wanted, i64 item, bool is_sum, i64 num_ranks) {
    const i64 num = wanted * num_fitting(is_sum && num_ranks > 2 ? kCarrySumCtas : kCarryCtas, item) / kCarryCtas;
    return wanted && !num ? 1 : num;
}

inline int launch(Engine* e, Carried& c, i64 num_senders, i64 num_receivers, cudaStream_t stream) {
    const i64 num_peers = e->num_ranks() - 1;
    c.num_groups = e->x.num_groups > 0 ? (u32)e->x.num_groups : 1;
    const i64 jobs = c.num_pieces * num_peers;
    const i64 groups = (c.num_pieces - c.num_frames) * (32 / kCarryWarps / c.num_groups) * (e->x.own ? 1 : num_peers);
    if (num_senders > jobs) num_senders = jobs;
    num_receivers = num_receivers_of(num_receivers, c.frames[0].call.g.itemsize, e->x.own, e->num_ranks());
    if (num_receivers > groups) num_receivers = groups > 1 ? groups : 1;
    c.num_senders = (u32)num_senders;
    for (u32 i = 0; i < c.num_frames; i++)
        if (!is_aligned_copy(c.frames[i].own)) c.frames[i].own.num_bytes = 0;          // the driver has copied it
    const dim3 grid((u32)(num_senders + num_receivers));
    const i64 dtype = c.frames[0].call.g.dtype_code;
#define ZIPCCL_CARRY(dtype)                                                                                             \
    if (e->x.own && num_peers == 1) ZIPCCL_LAUNCH(zipccl_carry_sum2_##dtype, grid, kCarryWarps * 32, stream, c);       \
    else if (e->x.own) ZIPCCL_LAUNCH(zipccl_carry_sum_##dtype, grid, kCarryWarps * 32, stream, c);                     \
    else ZIPCCL_LAUNCH(zipccl_carry_##dtype, grid, kCarryWarps * 32, stream, c);
    if (dtype == Bf16::kCode) {
        ZIPCCL_CARRY(bf16)
    } else if (dtype == Fp16::kCode) {
        ZIPCCL_CARRY(fp16)
    } else {
        ZIPCCL_CARRY(fp32)
    }
    return last_error();
}

// Queues the message e->place: encode on the caller's stream, the senders on the lane's, or, of a chain, with the receivers.
inline int send_carried(Engine* e) {
    const Exchange& x = e->x;
    const Message& m = e->place;
    const u32 lane = e->lane_of(m.number);
    Carried c = carried_of(e, m);
    bool queued = e->is_behind[lane];                      // something that the lane must wait for
    for (u32 i = 0; i < c.num_frames; i++) {
        const Part* p = m.part + i;
        const CarriedFrame& f = c.frames[i];
        const bool same = x.row_stride == 0;
        if (e->has_frames(p)) {
            ZIPCCL_TRY(e->encode(p->geometry, f.rows, x.row_stride, (u8*)f.frames, f.frame_stride, same ? 1 : e->num_ranks(),
                                 same ? -1 : (i64)e->rank(), x.status, x.workspace, x.stream));
            queued = true;
        }
        if (f.own.num_bytes && !is_aligned_copy(f.own)) {
            ZIPCCL_TRY(copy(f.own.to, f.own.from, f.own.num_bytes, x.stream));
            queued = true;
        }
    }
    if (queued) {
        ZIPCCL_TRY(after(x.stream, e->made, e->streams[lane]));
        if (!e->is_chain) ZIPCCL_TRY(wait_for(e->streams[kChain], e->made));           // no receiver is in the way of encode
    }
    e->is_moving[lane] = true, e->is_behind[lane] = false;
    return e->is_chain && kFuses ? 0 : launch(e, c, x.num_senders, 0, e->streams[lane]);
}

// Queues the receivers, who tell peers themselves what is read.
inline int receive_carried(Engine* e, const Message& m) {
    Carried c = carried_of(e, m);
    e->num_told = e->num_read = m.number;
    return launch(e, c, e->is_chain && kFuses ? e->x.num_senders : 0, e->x.num_receivers, e->streams[kChain]);
}

}  // namespace carrying
}  // namespace zipscape

#endif  // ZIPCCL_CARRIED_H
