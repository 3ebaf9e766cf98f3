// The one-sided transport (symmetric.cuh): kernels and C launchers. A library of its own, built when the transport is first wanted.
//
// Launchers queue and return a cudaError_t; none waits. An Engine knows the ranks' symmetric memory and owns the streams beside the
// caller's: copies to peers, announcements, reception. Numbers of messages and places in the memory are the caller's to choose (ring.py),
// the same on every rank.
#include "symmetric.cuh"

#include <cstring>
#include <new>

using namespace zipscape;

// Where a frame is read from local memory, few warps share a tile's headers; over a link they would be fetched by each CTA again.
constexpr u32 kLocalWarps = 4, kLocalCtas = 16, kSumWarps = 4, kSumCtas = 5, kSum2Ctas = 10, kSumRows = 4;
template <class F>
constexpr u32 kRemoteWarps = 32 / F::kItem;
constexpr u32 kAnnounceCtas = 32, kAnnounceThreads = 512;

#define ZIPCCL_RECEIVER(name, warps, ctas) \
    extern "C" __global__ void __launch_bounds__((warps) * 32, ctas) name(const __grid_constant__ Reception r)
#define ZIPCCL_RECEIVERS(F, dtype)                                                                                                 \
    ZIPCCL_RECEIVER(zipccl_receive_##dtype, kLocalWarps, kLocalCtas * 2 / F::kItem) { receive_blocks<DecodeLevel1<F>, kLocalWarps>(r); } \
    ZIPCCL_RECEIVER(zipccl_pull_##dtype, kRemoteWarps<F>, 2048 / 32 / kRemoteWarps<F> * 2 / F::kItem) {                                  \
        receive_blocks<DecodeLevel1<F>, kRemoteWarps<F>>(r);                                                                             \
    }                                                                                                                                    \
    ZIPCCL_RECEIVER(zipccl_sum2_##dtype, kSumWarps, kSum2Ctas * 2 / F::kItem) {                                                          \
        decode_reduce_blocks<DecodeLevel1<F>, kSumWarps, 1, true>(r.call, PeerFrames{&r});                                               \
    }                                                                                                                                    \
    ZIPCCL_RECEIVER(zipccl_sum_##dtype, kSumWarps, kSumCtas) {                                                                           \
        decode_reduce_blocks<DecodeLevel1<F>, kSumWarps, kSumRows, false>(r.call, PeerFrames{&r});                                       \
    }
ZIPCCL_RECEIVERS(Bf16, bf16)
ZIPCCL_RECEIVERS(Fp16, fp16)
ZIPCCL_RECEIVERS(Fp32, fp32)

extern "C" __global__ void __launch_bounds__(kMaxRanks) zipccl_turn(const __grid_constant__ Turn t) { take_turn(t); }
extern "C" __global__ void __launch_bounds__(kAnnounceThreads) zipccl_announce(const __grid_constant__ Announcement a) { announce(a); }

#ifdef ZIPSCAPE_EMULATE
typedef void* cudaStream_t;
typedef void* cudaEvent_t;
typedef int cudaError_t;
#define ZIPCCL_LAUNCH(kernel, grid, threads, stream, arguments) (void)(stream), emulate::launch(grid, threads, [&] { kernel(arguments); })
static int last_error() { return 0; }
static int copy(void* to, const void* from, i64 num_bytes, cudaStream_t) {
    memcpy(to, from, num_bytes);
    return 0;
}
static int after(cudaStream_t, cudaEvent_t, cudaStream_t) { return 0; }
static int record(cudaEvent_t, cudaStream_t) { return 0; }
static int wait_for(cudaStream_t, cudaEvent_t) { return 0; }
static int make(cudaStream_t*, bool) { return 0; }
static int make(cudaEvent_t*) { return 0; }
static int is_done(cudaEvent_t) { return 1; }
static void destroy(cudaStream_t*, u32, cudaEvent_t*, u32) {}
#else
#define ZIPCCL_LAUNCH(kernel, grid, threads, stream, arguments) kernel<<<grid, threads, 0, stream>>>(arguments)
static int last_error() { return (int)cudaGetLastError(); }
static int copy(void* to, const void* from, i64 num_bytes, cudaStream_t stream) {
    return (int)cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, stream);
}
static int record(cudaEvent_t event, cudaStream_t stream) { return (int)cudaEventRecord(event, stream); }
static int wait_for(cudaStream_t stream, cudaEvent_t event) { return (int)cudaStreamWaitEvent(stream, event, 0); }
static int after(cudaStream_t first, cudaEvent_t event, cudaStream_t then) {
    const int code = record(event, first);
    return code ? code : wait_for(then, event);
}
static int make(cudaStream_t* stream, bool urgent) {
    int least, greatest;
    const cudaError_t code = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    return (int)(code ? code : cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, urgent ? greatest : least));
}
static int make(cudaEvent_t* event) { return (int)cudaEventCreateWithFlags(event, cudaEventDisableTiming); }
static int is_done(cudaEvent_t event) {
    const cudaError_t code = cudaEventQuery(event);
    return code == cudaSuccess ? 1 : code == cudaErrorNotReady ? 0 : -(int)code;
}
static void destroy(cudaStream_t* streams, u32 num_streams, cudaEvent_t* events, u32 num_events) {
    for (u32 i = 0; i < num_streams; i++) cudaStreamDestroy(streams[i]);
    for (u32 i = 0; i < num_events; i++) cudaEventDestroy(events[i]);
}
#endif

#define ZIPCCL_TRY(expression) \
    if (const int code = (expression)) return code

namespace {

enum { kPush0, kPush1, kTell, kReceive, kOwn, kNumStreams };
constexpr u32 kNumDone = 64;

struct Engine {
    u32 rank, num_ranks;
    u8* memory[kMaxRanks];                                 // the ranks' symmetric memory; signal words at its start
    u32 *raw, *counters;                                   // own scratch, kMaxRanks words each, zeroed by the caller
    u32* errors;
    u64 timeout_ns;
    u32 num_pushes;
    cudaStream_t streams[kNumStreams];
    cudaEvent_t made, pushed[2], step, done[kNumDone];

    u32* arrived(u32 at, u32 from) const { return (u32*)memory[at] + from * kWordStride; }
    u32* read_by(u32 at, u32 by) const { return (u32*)memory[at] + (kMaxRanks + by) * kWordStride; }
};

}  // namespace

extern "C" {

// Bytes at the start of a rank's symmetric memory that hold its signal words, zeroed before peers learn of the memory.
i64 zipccl_symmetric_words_bytes() { return 2 * kMaxRanks * kWordStride * sizeof(u32); }
// Bytes of scratch, zeroed.
i64 zipccl_symmetric_scratch_bytes() { return 2 * kMaxRanks * sizeof(u32); }
i64 zipccl_symmetric_max_ranks() { return kMaxRanks; }

int zipccl_symmetric_open(i64 rank, i64 num_ranks, void* const* memory, void* scratch, void* errors, i64 timeout_ns, void** engine) {
    Engine* e = new (std::nothrow) Engine();
    if (!e) return 2;
    *engine = e;
    e->rank = (u32)rank, e->num_ranks = (u32)num_ranks, e->timeout_ns = (u64)timeout_ns;
    memcpy(e->memory, memory, num_ranks * sizeof *memory);
    e->raw = (u32*)scratch, e->counters = e->raw + kMaxRanks, e->errors = (u32*)errors;
    for (u32 i = 0; i < kNumStreams; i++) ZIPCCL_TRY(make(e->streams + i, i == kReceive || i == kTell));
    ZIPCCL_TRY(make(&e->made));
    ZIPCCL_TRY(make(e->pushed));
    ZIPCCL_TRY(make(e->pushed + 1));
    ZIPCCL_TRY(make(&e->step));
    for (u32 i = 0; i < kNumDone; i++) ZIPCCL_TRY(make(e->done + i));
    return 0;
}

// With nothing in flight.
void zipccl_symmetric_close(void* engine) {
    Engine* e = (Engine*)engine;
    destroy(e->streams, kNumStreams, &e->made, 4 + kNumDone);
    delete e;
}

// A call starts: what is received or copied waits for what is on `stream` by now.
int zipccl_symmetric_begin(void* engine, cudaStream_t stream) {
    Engine* e = (Engine*)engine;
    ZIPCCL_TRY(record(e->step, stream));
    ZIPCCL_TRY(wait_for(e->streams[kReceive], e->step));
    return wait_for(e->streams[kOwn], e->step);
}

// `stream` waits until all ranks, this one too, have read message `message`: then nobody uses its place in anyone's memory any more.
int zipccl_symmetric_claim(void* engine, i64 message, cudaStream_t stream) {
    Engine* e = (Engine*)engine;
    Turn t = {};
    t.num_ranks = t.except = e->num_ranks, t.wanted = (u32)message;
    t.words = e->read_by(e->rank, 0), t.errors = e->errors, t.timeout_ns = e->timeout_ns;
    ZIPCCL_LAUNCH(zipccl_turn, dim3(1), kMaxRanks, stream, t);
    return last_error();
}

// Message `message` to all peers, whose frames are made on `stream`. For rank r: the frame at `frames` + r * frame_stride, the raw row at
// `rows` + r * row_stride, the slot at `slot` + r * slot_stride of memory r (of this rank's own memory where `slots_here`). `lanes` > 0: the
// frames, of frame_bytes, are copied to the slots by the copy engines, on so many streams (1 or 2) in turns; 0: they are there already, and
// `frames` is not read.
int zipccl_symmetric_send(void* engine, i64 message, const void* frames, i64 frame_stride, i64 frame_bytes, const void* rows, i64 row_stride,
                          i64 raw_bytes, i64 slot, i64 slot_stride, i64 slots_here, i64 lanes, cudaStream_t stream) {
    Engine* e = (Engine*)engine;
    Announcement a = {};
    a.message = (u32)message, a.raw_bytes = raw_bytes, a.counters = e->counters;
    const bool moves = lanes > 0;
    const u32 lane = lanes > 1 ? e->num_pushes++ % 2 : 0;
    cudaStream_t push = e->streams[kPush0 + lane], tell = e->streams[kTell];
    if (moves) ZIPCCL_TRY(after(stream, e->made, push));
    for (u32 i = 0; i + 1 < e->num_ranks; i++) {
        const u32 peer = (e->rank + 1 + i) % e->num_ranks;             // not all to the same one at the same time
        u8* to = e->memory[slots_here ? e->rank : peer] + slot + peer * slot_stride;
        const u8* frame = moves ? (const u8*)frames + peer * frame_stride : to;
        if (moves) ZIPCCL_TRY(copy(to, frame, frame_bytes, push));
        a.headers[i] = frame, a.slots[i] = to;
        a.rows[i] = (const u8*)rows + peer * row_stride;
        a.words[i] = e->arrived(peer, e->rank);
    }
    ZIPCCL_TRY(moves ? after(push, e->pushed[lane], tell) : after(stream, e->made, tell));
    ZIPCCL_LAUNCH(zipccl_announce, dim3(kAnnounceCtas, e->num_ranks - 1), kAnnounceThreads, tell, a);
    return last_error();
}

// Takes message `message`: rank r's frame is at `slot` + r * slot_stride of this rank's memory (of memory r where `slots_there`), then in
// row r of `out` (`own`: null), or in the sum `out` (`own`: this rank's row). `geometry` as zipccl_cuda_decode. `read_before`: a message to
// report as read first, or 0.
int zipccl_symmetric_receive(void* engine, const void* geometry, i64 message, i64 read_before, i64 slot, i64 slot_stride, i64 slots_there,
                             const void* own, void* out, i64 row_stride) {
    Engine* e = (Engine*)engine;
    cudaStream_t stream = e->streams[kReceive];
    Turn t = {};
    t.num_ranks = e->num_ranks, t.except = e->rank, t.done = (u32)read_before, t.wanted = (u32)message;
    t.words = e->arrived(e->rank, 0), t.raw = e->raw, t.errors = e->errors, t.timeout_ns = e->timeout_ns;
    Reception r = {};
    Call& c = r.call;
    memcpy(&c.g, geometry, sizeof c.g);
    memcpy(c.header, (const u8*)geometry + sizeof c.g, sizeof c.header);
    c.x = (const u8*)own, c.out = (u8*)out, c.row_stride = row_stride;
    c.num_rows = e->num_ranks, c.skip = e->rank, c.status = e->errors;
    r.raw = e->raw;
    for (u32 i = 0; i < e->num_ranks; i++) {
        r.frames[i] = t.frames[i] = e->memory[slots_there ? i : e->rank] + slot + i * slot_stride;
        t.ranks_words[i] = e->read_by(i, e->rank);
    }
    ZIPCCL_LAUNCH(zipccl_turn, dim3(1), kMaxRanks, stream, t);
    ZIPCCL_TRY(last_error());
    const u32 num_tiles = (u32)c.g.num_tiles, num_peers = e->num_ranks - 1;
#define ZIPCCL_RECEIVE(F, dtype)                                                                                                \
    if (own && num_peers == 1) ZIPCCL_LAUNCH(zipccl_sum2_##dtype, dim3(num_tiles * (32 / kSumWarps)), kSumWarps * 32, stream, r); \
    else if (own) ZIPCCL_LAUNCH(zipccl_sum_##dtype, dim3(num_tiles * (32 / kSumWarps)), kSumWarps * 32, stream, r);               \
    else if (slots_there)                                                                                                         \
        ZIPCCL_LAUNCH(zipccl_pull_##dtype, dim3(num_tiles * (32 / kRemoteWarps<F>), num_peers), kRemoteWarps<F> * 32, stream, r); \
    else ZIPCCL_LAUNCH(zipccl_receive_##dtype, dim3(num_tiles * (32 / kLocalWarps), num_peers), kLocalWarps * 32, stream, r);
    if (c.g.dtype_code == Bf16::kCode) {
        ZIPCCL_RECEIVE(Bf16, bf16)
    } else if (c.g.dtype_code == Fp16::kCode) {
        ZIPCCL_RECEIVE(Fp16, fp16)
    } else {
        ZIPCCL_RECEIVE(Fp32, fp32)
    }
    return last_error();
}

// This rank's own part of a result, beside the rest.
int zipccl_symmetric_copy_own(void* engine, void* to, const void* from, i64 num_bytes) {
    Engine* e = (Engine*)engine;
    return copy(to, from, num_bytes, e->streams[kOwn]);
}

// A call ends: tells peers that `message` is read. `call` numbers the calls; join and is_done take it.
int zipccl_symmetric_end(void* engine, i64 message, i64 call) {
    Engine* e = (Engine*)engine;
    cudaStream_t stream = e->streams[kReceive];
    Turn t = {};
    t.num_ranks = e->num_ranks, t.done = (u32)message;
    for (u32 i = 0; i < e->num_ranks; i++) t.ranks_words[i] = e->read_by(i, e->rank);
    ZIPCCL_LAUNCH(zipccl_turn, dim3(1), kMaxRanks, stream, t);
    ZIPCCL_TRY(last_error());
    ZIPCCL_TRY(after(e->streams[kOwn], e->step, stream));
    ZIPCCL_TRY(after(e->streams[kTell], e->step, stream));              // it reads the input where a frame overflows
    return record(e->done[call % kNumDone], stream);
}

// `stream` waits for the end of call `call` (of an earlier one: at least).
int zipccl_symmetric_join(void* engine, i64 call, cudaStream_t stream) {
    Engine* e = (Engine*)engine;
    return wait_for(stream, e->done[call % kNumDone]);
}

// 1: done, 0: not yet, negative: an error.
int zipccl_symmetric_is_done(void* engine, i64 call) {
    Engine* e = (Engine*)engine;
    return is_done(e->done[call % kNumDone]);
}

}  // extern "C"
