// What symmetric.cu queues: a call as the host describes it, and the Engine that knows one rank's end.
#ifndef ZIPCCL_EXCHANGE_H
#define ZIPCCL_EXCHANGE_H

#include "carry.cuh"
#include "queue.h"
#include "ring.h"

namespace zipscape {

// symmetric_calls.py repeats all. Sizes in bytes; host memory, read before return.
struct Part {
    const void* geometry;                                  // as zipccl_cuda_encode takes it
    i64 start, raw_bytes, frame_bytes;                     // of each row, from its byte `start` on
    i64 slot_bytes, num_slots, frame_stride, num_frames;   // its region: slots for the peers' frames, then the frames for them, if made here
    i64 as_it_is;                                          // not 0: it has no frame, and travels behind a header that says so
};

// Where a part is, if not everywhere `start` behind the call's: this rank's row, the same for all, and where rank r's comes, its own too.
struct Place {
    const u8* row;
    u8* out;
    i64 out_stride;
};

// A call. For rank r: the row at `rows` + r * row_stride goes there, its row comes to `out` + r * out_stride (strides may be 0), or into the
// sum `out` in rank order with `own`, this rank's row (null: no sum). Copy engines move frames on `num_lanes` streams (1 or 2) in turns.
// `made`: the parts' frames, null where there is none (or for all). `places`: of the parts, instead of rows, out and the copy, which is then
// each part's (or null). `num_senders` > 0: kernels with so many CTAs carry the messages, and `num_receivers`, or fewer if these are large,
// decode them, `num_groups` of their groups in one go (carried.h).
struct Exchange {
    const u8* rows;
    i64 row_stride;
    u8* out;
    i64 out_stride;
    const u8* own;
    u8* copy_to;                                           // this rank's own part of a result; 0 bytes: none
    const u8* copy_from;
    i64 copy_bytes;
    i64 num_lanes, num_parts;
    const Part* parts;
    const u8* const* made;
    const Place* places;
    void *status, *workspace;                              // for encode
    cudaStream_t stream;
    i64 num_senders, num_receivers, num_groups;
};

// Calls like an earlier one, of other tensors. Places in bytes: of this rank's row in the input (-1: no sum), of its own part of the result,
// and where that comes from. Of a repeat's exchange these, rows, out and num_receivers mean nothing.
struct Repeat {
    void* engine;
    Exchange exchange;
    i64 own, copy_to, copy_from, device;
};
constexpr int kNotSo = -1000;              // nothing was done

inline Exchange exchange_of(const Repeat* r, const u8* x, u8* out, i64 num_receivers) {
    Exchange e = r->exchange;
    e.rows = x, e.out = out, e.num_receivers = num_receivers;
    e.own = r->own < 0 ? nullptr : x + r->own;
    e.copy_to = out + r->copy_to, e.copy_from = x + r->copy_from;
    if (e.copy_to == e.copy_from) e.copy_bytes = 0;
    if (!e.copy_bytes) e.copy_to = nullptr, e.copy_from = nullptr;
    return e;
}

// Gathers of rows like an earlier one, that come to lie elsewhere: part i into output which[i], where its place's `out` is so many bytes
// from the beginning. Of the exchange num_receivers means nothing.
struct Regather {
    void* engine;
    Exchange exchange;
    const i64* which;
    i64 device;
};

// `places`: room for as many as there are parts.
inline Exchange exchange_of(const Regather* r, const uint64_t* outs, i64 num_receivers, Place* places) {
    Exchange e = r->exchange;
    for (i64 i = 0; i < e.num_parts; i++) {
        places[i] = e.places[i];
        places[i].out = (u8*)outs[r->which[i]] + (size_t)places[i].out;
    }
    e.places = places, e.num_receivers = num_receivers;
    return e;
}

typedef int (*Encode)(const void* geometry, const void* x, i64 row_stride, void* frames, i64 frame_stride, i64 num_rows, i64 skip,
                      void* status, void* workspace, cudaStream_t stream);
enum { kOwn = kNumLanes, kNumStreams };
constexpr u32 kNumDone = 64;
constexpr u32 kLead = 3;                   // messages sent before the first is received: on their way while one is encoded and one decoded
constexpr i64 kManyMessages = 16;

struct Message {
    i64 number, offset;
    const Part* part;
    i64 num_parts;                         // one, unless it is carried
    Turn announcement;                     // unless it is carried
};

struct Engine {
    Turn nothing;                                          // who is who; to be filled in
    Encode encode;
    Ring ring;
    u32 *counters, *overflows;                             // [kNumLanes][kMaxRanks]; behind the counters those of carry.cuh
    i64 needed, num_read, num_told;                        // must be read for all regions to be free; reception is queued; peers are told
    std::deque<std::pair<cudaStream_t, i64>> claimed;      // by stream: what it has waited for
    cudaStream_t streams[kNumStreams];
    cudaEvent_t made, step, moved[kNumLanes], done[kNumDone];

    Exchange x;                                            // the call that is being queued
    i64 next;
    bool has_place, is_chain, is_carried, is_moving[kNumLanes], is_behind[kNumLanes];          // is_behind: of what was queued on the caller's stream
    i64 before, num_calls;
    Message place;
    std::deque<Message> waiting;

    u32 rank() const { return nothing.rank; }
    u32 num_ranks() const { return nothing.num_ranks; }
    u8* memory() const { return nothing.memory[nothing.rank]; }
    // What rows of `stride` bytes for the ranks count from. Of two ranks only the other one has a place; else each, this one's left empty.
    i64 row_0(i64 offset, i64 stride) const { return num_ranks() == 2 ? offset - (1 - rank()) * stride : offset; }
    i64 own_row(i64 offset, i64 stride) const { return num_ranks() == 2 ? offset : offset + rank() * stride; }
    // is_chain: a call in one message is a chain on one stream, where it costs the least time of the host. Several use all there is.
    Place place_of(const Part* p) const {
        return x.places ? x.places[p - x.parts] : Place{x.rows + p->start, x.out + p->start, x.out_stride};
    }
    bool has_frames(const Part* p) const { return !p->as_it_is && !(x.made && x.made[p - x.parts]); }
    i64 region_bytes(const Part* p) const {
        return p->num_slots * p->slot_bytes + (has_frames(p) ? p->num_frames * p->frame_stride : 0);
    }
    bool has_copies() const { return x.places || x.copy_bytes; }
    u32 lane_of(i64 message) const { return is_chain ? (u32)kChain : x.num_lanes > 1 ? (u32)(message % 2) : (u32)kPush0; }
};

// This rank's own row to its place, this part of it.
inline OwnCopy own_copy(const Engine* e, const Part* p) {
    const Exchange& x = e->x;
    OwnCopy c = {x.copy_to + p->start, x.copy_from + p->start, x.copy_bytes ? p->raw_bytes : 0};
    if (x.places) {
        const Place at = e->place_of(p);
        c = {at.out + e->rank() * at.out_stride, at.row, p->raw_bytes};
    }
    if (c.to == c.from) c.num_bytes = 0;
    return c;
}

inline bool is_aligned_copy(const OwnCopy& c) { return ((size_t)c.to | (size_t)c.from) % 16 == 0; }

// The call of the codec's for a part, where frames are at `frames`, `frame_stride` further for each rank.
inline Call reception_of(const Engine* e, const Part* p, const u8* frames, i64 frame_stride) {
    const Exchange& x = e->x;
    const Place at = e->place_of(p);
    Call c = {};
    memcpy(&c.g, p->geometry, sizeof c.g);
    memcpy(c.header, (const u8*)p->geometry + sizeof c.g, sizeof c.header);
    c.frames = (u8*)frames, c.frame_stride = frame_stride;
    c.x = x.own ? x.own + p->start : nullptr, c.out = at.out, c.row_stride = at.out_stride;
    c.num_rows = e->num_ranks(), c.skip = e->rank(), c.status = e->nothing.errors;
    return c;
}

}  // namespace zipscape

#endif  // ZIPCCL_EXCHANGE_H
