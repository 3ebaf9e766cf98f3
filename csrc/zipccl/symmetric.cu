// The one-sided transport (symmetric.cuh): kernels and C launchers. A library of its own, built when the transport is first wanted.
//
// Launchers queue and return a cudaError_t; none waits. An Engine knows the ranks' symmetric memory and owns the streams beside the
// caller's. One call queues a whole collective: the host's time is that of its launches. Numbers of messages and their places follow from
// the calls that were made, so they are the same on every rank.
#include "carried.h"
#include "python.h"

#include <new>
#include <vector>

using namespace zipscape;
using namespace zipscape::carrying;

constexpr u32 kWarps = 4, kDecodeCtas = 16, kSumCtas = 5, kSum2Ctas = 10, kSumRows = 4;
constexpr u32 kAnnounceCtas = 16;                          // an announcement copies only where frames overflow
#ifdef ZIPSCAPE_EMULATE
constexpr u32 kCopyThreads = kMaxRanks;
#else
constexpr u32 kCopyThreads = 512;
#endif
constexpr int kMaxOutputs = 510;                           // of a gather that comes again: symmetric_calls.py repeats it
constexpr u32 kOwnCtas = 32;                               // few: encode and decode run beside it, and the links set the time

#define ZIPCCL_RECEIVER(name, warps, ctas) \
    extern "C" __global__ void __launch_bounds__((warps) * 32, ctas) name(const __grid_constant__ Reception r)
#define ZIPCCL_RECEIVERS(F, dtype)                                                                                              \
    ZIPCCL_RECEIVER(zipccl_receive_##dtype, kWarps, kDecodeCtas * 2 / F::kItem) { receive_blocks<DecodeLevel1<F>, kWarps>(r); } \
    ZIPCCL_RECEIVER(zipccl_sum2_##dtype, kWarps, kSum2Ctas * 2 / F::kItem) {                                                    \
        decode_reduce_blocks<DecodeLevel1<F>, kWarps, 1, true>(r.call, PeerFrames{&r}, blockIdx.x);                             \
    }                                                                                                                           \
    ZIPCCL_RECEIVER(zipccl_sum_##dtype, kWarps, kSumCtas) {                                                                     \
        decode_reduce_blocks<DecodeLevel1<F>, kWarps, kSumRows, false>(r.call, PeerFrames{&r}, blockIdx.x);                     \
    }
ZIPCCL_RECEIVERS(Bf16, bf16)
ZIPCCL_RECEIVERS(Fp16, fp16)
ZIPCCL_RECEIVERS(Fp32, fp32)

extern "C" __global__ void __launch_bounds__(kCopyThreads) zipccl_turn(const __grid_constant__ Turn t) { take_turn(t); }

extern "C" __global__ void __launch_bounds__(kCopyThreads) zipccl_copy_own(const __grid_constant__ OwnCopy c) {
    copy_bytes(c.to, c.from, c.num_bytes);
}

namespace {

int launch_turn(const Turn& t, cudaStream_t stream) {
    const u32 num_peers = t.num_ranks - 1;
    ZIPCCL_LAUNCH(zipccl_turn, t.sent ? dim3(kAnnounceCtas, num_peers) : dim3(1), t.sent ? kCopyThreads : kMaxRanks, stream, t);
    return last_error();
}

// The caller's stream waits until all ranks, this one too, have read the messages whose regions are needed: then nobody uses them any more.
// Where there is time, it waits for more at once, so that small calls seldom wait.
int claim(Engine* e) {
    i64* known = nullptr;
    for (auto& entry : e->claimed)
        if (entry.first == e->x.stream) known = &entry.second;
    if (!known) {
        if (e->claimed.size() == 16) e->claimed.pop_front();           // a stream that is forgotten waits once more
        e->claimed.emplace_back(e->x.stream, 0);
        known = &e->claimed.back().second;
    }
    if (*known >= e->needed) return 0;
    Turn t = e->nothing;
    const i64 ahead = e->num_told - e->needed;
    *known = e->needed + (ahead >= kManyMessages ? ahead / 2 : 0);
    t.read = *known;
    for (bool& lane : e->is_behind) lane = true;
    return launch_turn(t, e->x.stream);
}

// This rank's own row to its place: with the first part all of it, or each part's.
int copy_own(Engine* e, const Part* p) {
    OwnCopy c = own_copy(e, p);
    if (!e->x.places && c.num_bytes) c.num_bytes = e->next ? 0 : e->x.copy_bytes;
    if (!c.num_bytes) return 0;
    cudaStream_t stream = e->is_chain ? e->x.stream : e->streams[kOwn];
    if (!is_aligned_copy(c)) return copy(c.to, c.from, c.num_bytes, stream);
    const i64 needed = (c.num_bytes / 64 + kCopyThreads) / kCopyThreads;
    ZIPCCL_LAUNCH(zipccl_copy_own, dim3(needed < kOwnCtas ? (u32)needed : kOwnCtas), kCopyThreads, stream, c);
    return last_error();
}

// Queues a message to all peers: encode on the caller's stream, copies and what tells of them on its lane's.
int send(Engine* e) {
    const Exchange& x = e->x;
    Message& m = e->place;
    const Part& p = *m.part;
    const u8* made = x.made ? x.made[e->next] : nullptr;
    const bool same = x.row_stride == 0;
    const u32 lane = e->lane_of(m.number), num_ranks = e->num_ranks();
    cudaStream_t stream = e->streams[lane];
    ZIPCCL_TRY(claim(e));
    if (e->is_carried) return send_carried(e);
    Turn& t = m.announcement = e->nothing;
    t.sent = m.number, t.sent_lane = lane, t.counters = e->counters + lane * kMaxRanks;
    t.overflows = e->overflows + lane * kMaxRanks;
    t.slot = e->own_row(m.offset, p.slot_bytes), t.raw_bytes = p.raw_bytes;
    t.rows = e->place_of(&p).row, t.row_stride = x.row_stride, t.frame_stride = same ? 0 : p.frame_stride, t.as_it_is = (u32)p.as_it_is;
    t.frames = made ? made : e->memory() + e->row_0(m.offset + p.num_slots * p.slot_bytes, t.frame_stride);
    if (e->has_frames(&p))
        ZIPCCL_TRY(e->encode(p.geometry, t.rows, x.row_stride, (u8*)t.frames, t.frame_stride, same ? 1 : num_ranks,
                             same ? -1 : (i64)e->rank(), x.status, x.workspace, x.stream));
    if (e->is_behind[lane] || e->has_frames(&p)) ZIPCCL_TRY(after(x.stream, e->made, stream));
    e->is_moving[lane] = true, e->is_behind[lane] = false;
    for (u32 i = 1; i < num_ranks; i++) {
        const u32 peer = (e->rank() + i) % num_ranks;                  // not all to the same one at the same time
        u8* slot = e->nothing.memory[peer] + t.slot;
        ZIPCCL_TRY(p.as_it_is ? copy(slot + kHeaderBytes, t.rows + peer * t.row_stride, p.raw_bytes, stream)
                              : copy(slot, t.frames + peer * t.frame_stride, p.frame_bytes, stream));
    }
    if (e->is_chain && kFuses) return 0;
    return launch_turn(t, stream);
}

// Queues the reception of the oldest message on its way.
int receive(Engine* e) {
    const Exchange& x = e->x;
    const Message m = e->waiting.front();
    e->waiting.pop_front();
    if (e->is_carried) return receive_carried(e, m);
    const Part& p = *m.part;
    cudaStream_t stream = e->streams[kChain];
    Turn t = e->is_chain && kFuses ? m.announcement : e->nothing;
    t.done = e->num_read, t.wanted = m.number, t.wanted_lane = e->lane_of(m.number);
    t.arrivals = e->memory() + e->row_0(m.offset, p.slot_bytes), t.arrival_stride = p.slot_bytes;
    e->num_told = e->num_read, e->num_read = m.number;
    ZIPCCL_TRY(launch_turn(t, stream));
    Reception r = {};
    const Call& c = r.call = reception_of(e, &p, t.arrivals, t.arrival_stride);
    r.raw = t.raw;
    const u32 num_groups = (u32)c.g.num_tiles * (32 / kWarps), num_peers = e->num_ranks() - 1;
#define ZIPCCL_RECEIVE(dtype)                                                                                           \
    if (x.own && num_peers == 1) ZIPCCL_LAUNCH(zipccl_sum2_##dtype, dim3(num_groups), kWarps * 32, stream, r);         \
    else if (x.own) ZIPCCL_LAUNCH(zipccl_sum_##dtype, dim3(num_groups), kWarps * 32, stream, r);                       \
    else ZIPCCL_LAUNCH(zipccl_receive_##dtype, dim3(num_groups, num_peers), kWarps * 32, stream, r);
    if (c.g.dtype_code == Bf16::kCode) {
        ZIPCCL_RECEIVE(bf16)
    } else if (c.g.dtype_code == Fp16::kCode) {
        ZIPCCL_RECEIVE(fp16)
    } else {
        ZIPCCL_RECEIVE(fp32)
    }
    return last_error();
}

// Tells peers what is read; what else the call queued is then before its end: an announcement reads the input where a frame overflows.
int end(Engine* e) {
    cudaStream_t stream = e->streams[kChain];
    Turn t = e->nothing;
    t.done = e->num_told = e->num_read;
    if (!e->is_carried) ZIPCCL_TRY(launch_turn(t, stream));
    for (u32 lane = 0; lane < kChain; lane++)
        if (e->is_moving[lane]) ZIPCCL_TRY(after(e->streams[lane], e->moved[lane], stream));
    if (e->has_copies() && !e->is_carried) ZIPCCL_TRY(after(e->is_chain ? e->x.stream : e->streams[kOwn], e->step, stream));
    return record(e->done[++e->num_calls % kNumDone], stream);
}

int start(Engine* e, const Exchange* x) {
    e->x = *x, e->next = 0, e->has_place = false;
    memset(e->is_moving, 0, sizeof e->is_moving);
    memset(e->is_behind, 1, sizeof e->is_behind);
    e->is_carried = can_carry(x);
    e->is_chain = num_together(e) == x->num_parts;
    if (e->is_chain) return 0;                           // its stream waits once the frames are made
    ZIPCCL_TRY(record(e->step, x->stream));
    if (e->has_copies() && !e->is_carried) ZIPCCL_TRY(wait_for(e->streams[kOwn], e->step));
    return wait_for(e->streams[kChain], e->step);
}

// Queues the next step of the call: *more is 0 after the last one. A region is taken only when the reception of the message that had it is
// queued, so that ranks whose streams share one queue of the hardware cannot wait for each other in a circle.
int step(Engine* e, bool* more) {
    *more = true;
    if (e->next == e->x.num_parts) {
        if (!e->waiting.empty()) return receive(e);
        *more = false;
        return end(e);
    }
    Message& m = e->place;
    if (!e->has_place) {
        m.part = e->x.parts + e->next, m.num_parts = num_together(e);
        i64 num_bytes = 0;
        for (i64 i = 0; i < m.num_parts; i++) num_bytes += e->region_bytes(m.part + i);
        e->ring.take(num_bytes, m.number, m.offset, e->before);
        e->has_place = true;
    }
    if (!e->waiting.empty() && (e->waiting.size() >= (e->is_carried ? 1 : kLead) || e->before > e->num_told)) return receive(e);
    if (e->before > e->needed) e->needed = e->before;
    ZIPCCL_TRY(send(e));
    if (!e->is_carried) ZIPCCL_TRY(copy_own(e, m.part));
    e->waiting.push_back(m);
    e->next += m.num_parts, e->has_place = false;
    return 0;
}

}  // namespace

extern "C" {

// Bytes at the start of a rank's symmetric memory that hold its words, zeroed before peers learn of the memory.
i64 zipccl_symmetric_words_bytes(i64 num_ranks) { return words_bytes(num_ranks); }
// Bytes of scratch, and of host memory that kernels count overflowed frames in, a u32 for each lane and peer; both zeroed.
i64 zipccl_symmetric_scratch_bytes() { return ((1 + kNumLanes) * kMaxRanks + 1 + kNumLanes) * sizeof(u32); }
i64 zipccl_symmetric_overflows_bytes() { return kNumLanes * kMaxRanks * sizeof(u32); }
i64 zipccl_symmetric_max_ranks() { return kMaxRanks; }
// CTAs that receive, and how many of their kernel fit on a multiprocessor, where a call asks for `wanted` (carried.h).
i64 zipccl_symmetric_num_receivers(i64 wanted, i64 item, i64 is_sum, i64 num_ranks) {
    return num_receivers_of(wanted, item, is_sum != 0, num_ranks);
}

// `memory`: the ranks' symmetric memory of num_bytes each. `encode`: zipccl_cuda_encode.
int zipccl_symmetric_open(i64 rank, i64 num_ranks, void* const* memory, i64 num_bytes, void* scratch, void* overflows,
                          void* errors, i64 timeout_ns, Encode encode, void** engine) {
    Engine* e = new (std::nothrow) Engine();
    if (!e) return 2;
    *engine = e;
    Turn& t = e->nothing;
    t.rank = (u32)rank, t.num_ranks = (u32)num_ranks, t.timeout_ns = (u64)timeout_ns;
    memcpy(t.memory, memory, num_ranks * sizeof *memory);
    t.raw = (u32*)scratch, t.errors = (u32*)errors;
    e->counters = t.raw + kMaxRanks, e->overflows = (u32*)overflows, e->encode = encode;
    e->ring.first = words_bytes(num_ranks), e->ring.room = (num_bytes - e->ring.first) / kRegionAlign * kRegionAlign;
    for (u32 i = 0; i < kNumStreams; i++) ZIPCCL_TRY(make(e->streams + i, i != kOwn));
    ZIPCCL_TRY(make(&e->made));
    ZIPCCL_TRY(make(&e->step));
    for (u32 i = 0; i < kNumLanes; i++) ZIPCCL_TRY(make(e->moved + i));
    for (u32 i = 0; i < kNumDone; i++) ZIPCCL_TRY(make(e->done + i));
    return 0;
}

// With nothing in flight.
void zipccl_symmetric_close(void* engine) {
    Engine* e = (Engine*)engine;
    destroy(e->streams, kNumStreams, &e->made, 2 + kNumLanes + kNumDone);
    delete e;
}

// Queues a call. The same calls in the same order on all ranks; the parts' regions must fit in the memory.
int zipccl_symmetric_run(void* engine, const Exchange* exchange) {
    Engine* e = (Engine*)engine;
    ZIPCCL_TRY(start(e, exchange));
    for (bool more = true; more;) ZIPCCL_TRY(step(e, &more));
    return 0;
}

// The same for a call like an earlier one; kNotSo where another device is current or the stream is captured.
int zipccl_symmetric_repeat(const Repeat* r, const u8* x, u8* out, i64 num_receivers) {
    if (!may_queue(r->device, r->exchange.stream)) return kNotSo;
    const Exchange exchange = exchange_of(r, x, out, num_receivers);
    return zipccl_symmetric_run(r->engine, &exchange);
}
void zipccl_symmetric_exchange_of(const Repeat* r, const u8* x, u8* out, i64 num_receivers, Exchange* exchange) {
    *exchange = exchange_of(r, x, out, num_receivers);
}

// The same of rows; `outs`: where its outputs begin.
int zipccl_symmetric_gather(const Regather* r, const uint64_t* outs, i64 num_receivers) {
    if (!may_queue(r->device, r->exchange.stream)) return kNotSo;
    std::vector<Place> places(r->exchange.num_parts);
    const Exchange exchange = exchange_of(r, outs, num_receivers, places.data());
    return zipccl_symmetric_run(r->engine, &exchange);
}
void zipccl_symmetric_places_of(const Regather* r, const uint64_t* outs, Place* places) { exchange_of(r, outs, 0, places); }

// The same step by step, for ranks that take turns in one process: start, then step until it says 0 (negative: an error).
int zipccl_symmetric_start(void* engine, const Exchange* exchange) { return start((Engine*)engine, exchange); }
int zipccl_symmetric_step(void* engine) {
    bool more;
    const int code = step((Engine*)engine, &more);
    return code ? -code : more;
}

// Takes a region as a call would: number, offset, the last message that had a part of it.
void zipccl_symmetric_take(void* engine, i64 num_bytes, i64* taken) { ((Engine*)engine)->ring.take(num_bytes, taken[0], taken[1], taken[2]); }

// What a stream has waited for: the last message whose region is known to be free.
i64 zipccl_symmetric_claimed(void* engine, cudaStream_t stream) {
    for (const auto& entry : ((Engine*)engine)->claimed)
        if (entry.first == stream) return entry.second;
    return 0;
}

#ifdef ZIPSCAPE_EMULATE
i64 zipccl_symmetric_num_queued() { return num_queued; }
#endif

// `stream` waits for the end of call `call`, counted from 1 (of an earlier one: at least).
int zipccl_symmetric_join(void* engine, i64 call, cudaStream_t stream) {
    Engine* e = (Engine*)engine;
    return wait_for(stream, e->done[call % kNumDone]);
}

// Three of these as Python's own functions; a gather's outputs come last.
void zipccl_symmetric_python(const Python* functions) { python = *functions; }
void* zipccl_symmetric_repeat_python(void*, void** arguments, ptrdiff_t) {
    return from_python<4>(arguments, [](const uint64_t* a) {
        return zipccl_symmetric_repeat((const Repeat*)a[0], (const u8*)a[1], (u8*)a[2], (i64)a[3]);
    });
}
void* zipccl_symmetric_gather_python(void*, void** arguments, ptrdiff_t num) {
    return from_python_up_to<kMaxOutputs + 2>(arguments, num, [](const uint64_t* a) {
        return zipccl_symmetric_gather((const Regather*)a[0], a + 2, (i64)a[1]);
    });
}
void* zipccl_symmetric_join_python(void*, void** arguments, ptrdiff_t) {
    return from_python<3>(arguments, [](const uint64_t* a) { return zipccl_symmetric_join((void*)a[0], (i64)a[1], (cudaStream_t)a[2]); });
}

// 1: done, 0: not yet, negative: an error.
int zipccl_symmetric_is_done(void* engine, i64 call) {
    Engine* e = (Engine*)engine;
    return is_done(e->done[call % kNumDone]);
}

}  // extern "C"
