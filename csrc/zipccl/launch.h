// What a zipped call queues on a GPU: all of it by one call of the host's, or, where the payload is somebody else's to launch, by three:
// before it (what can wait is not in it), beside it and behind it. Knows neither CUDA's and NCCL's headers nor torch: functions come as
// addresses, the codec's (codec.cu), the driver's and NCCL's; streams, events and communicators as handles. What is the same for every call
// of a kind is in its Plan, which the caller keeps; a call brings the addresses of its tensors alone.
//
// launch_calls.py repeats the structs. Functions return 0, a cudaError_t of the codec's, a CUresult of the driver's, or -1 - an ncclResult_t;
// none waits.
#ifndef ZIPCCL_LAUNCH_H
#define ZIPCCL_LAUNCH_H

#include "python.h"

namespace zipscape {
namespace launching {

typedef int64_t i64;
typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;

// zipccl_cuda_encode_telling, zipccl_cuda_decode, zipccl_cuda_decode_reduce; cuEventRecord, cuStreamWaitEvent, cuMemcpyDtoDAsync,
// cuCtxGetCurrent, cuStreamIsCapturing.
struct Functions {
    int (*encode)(const void* geometry, const void* x, i64 row_stride, void* frames, i64 frame_stride, i64 num_rows, i64 skip, void* status,
                  void* workspace, void* mail, u32 stamp, void* stream);
    int (*decode)(const void* geometry, const void* frames, i64 frame_stride, void* out, i64 row_stride, i64 num_rows, i64 skip,
                  void* errors, void* stream);
    int (*decode_reduce)(const void* geometry, const void* frames, i64 frame_stride, i64 num_rows, const void* own, i64 own_index,
                         void* out, void* errors, void* stream);
    int (*record)(void* event, void* stream);
    int (*wait)(void* stream, void* event, unsigned flags);
    int (*copy)(u64 to, u64 from, size_t num_bytes, void* stream);
    int (*context)(void** context);
    int (*is_capturing)(void* stream, int* status);
};

// ncclAllGather, ncclSend, ncclRecv, ncclGroupStart, ncclGroupEnd.
struct Nccl {
    int (*all_gather)(const void* own, void* all, size_t count, int dtype, void* communicator, void* stream);
    int (*send)(const void* data, size_t count, int dtype, int peer, void* communicator, void* stream);
    int (*receive)(void* data, size_t count, int dtype, int peer, void* communicator, void* stream);
    int (*group_start)();
    int (*group_end)();
};

// A part of the payload: what goes to `peer` and what comes from there, in bytes; 0: nothing. Peer -1: an all-gather, of `num_sent` bytes.
struct Transfer {
    void* sent;
    i64 num_sent;
    void* received;
    i64 num_received, peer;
};

// One call of the codec's. Offsets and strides in bytes.
struct Step {
    const void* geometry;
    i64 from, to;                      // where its rows begin in the input; in the output
    i64 row_stride;
    void* frames;
    i64 frame_stride, num_rows;
    i64 skip;                          // a row to leave out, or -1; of a sum the one that comes from the input
    i64 is_sum;                        // of a step after the payload
    void* word;                        // the status; of a step after the payload what it finds wrong
};

struct Plan {
    const Functions* functions;
    const Step *encodes, *decodes;
    i64 num_encodes, num_decodes;
    i64 copy_from, copy_to, copy_bytes;            // this rank's piece of the output, in the input and there; 0 bytes: none
    void* workspace;                               // for encodes
    void *stream, *decode_stream;                  // the caller's; that of what is done once the payload has come
    void *encoded, *filled;                        // events
    const Nccl* nccl;                              // null: the payload is not launched here
    const Transfer* transfers;
    i64 num_transfers;
    void *payload_stream, *arrived;                // its stream; the event behind it
};

// A plan for calls one after another, whose status words are in a ring of a mailbox (mailbox.py): exchange `count` has the entries from
// `count` % `depth` * `num_ranks` on, and a stamp.
struct Repeat {
    const Plan* plan;
    void* context;                                 // of the plan's streams
    i64 x_bytes, out_bytes;                        // of the tensors, which must not share memory,
    i64 anywhere, place;                           // but anywhere (not 0), or where the input is the output's `place` (-1: nowhere)
    u8* mail;                                      // the ring as the GPU sees it
    const u64* ring;                               // as the host does
    u64* mark;                                     // where this rank says how many exchanges it has read
    i64 depth, num_ranks, rank;
    u32 stops;                                     // words that have any of these bits are not for `finish`
    u32* words;                                    // where `finish` puts the ranks' words
};

// Of rows of `row_bytes` that came from `num_ranks`, one behind the other: what is at byte `at` of each, a frame (or, without a geometry, data
// of `num_bytes`), goes to output `which`, from its byte `to` on, rank r's `row_stride` * r further.
struct Piece {
    const void* geometry;
    i64 at, num_bytes, which, to, row_stride;
};
struct Filling {
    const Functions* functions;
    const Piece* pieces;
    i64 num_pieces, row_bytes, num_ranks;
    void* errors;                                  // what decode finds
};

const int MAX_OUTPUTS = 509;                       // of a filling: launch_calls.py repeats it

const int NOT_SO = -1000;                          // nothing was done

const int NCCL_UINT8 = 1;

// In this order, as torch has it, since the ranks' calls of NCCL must match. 0 or an ncclResult_t.
inline int payload(const Plan* p, void* communicator) {
    const Nccl& n = *p->nccl;
    const Transfer* t = p->transfers;
    if (p->num_transfers == 1 && t->peer < 0)
        return n.all_gather(t->sent, t->received, (size_t)t->num_sent, NCCL_UINT8, communicator, p->payload_stream);
    int code = n.group_start();
    if (code) return code;
    for (const Transfer* end = t + p->num_transfers; t < end && !code; t++) {
        if (t->num_sent) code = n.send(t->sent, (size_t)t->num_sent, NCCL_UINT8, (int)t->peer, communicator, p->payload_stream);
        if (t->num_received && !code)
            code = n.receive(t->received, (size_t)t->num_received, NCCL_UINT8, (int)t->peer, communicator, p->payload_stream);
    }
    const int ended = n.group_end();
    return code ? code : ended;
}

extern "C" {

// Encodes on the caller's stream; a plan with one encode puts `stamp` << 32 | status at `mail` (null: nowhere).
int zipccl_launch_begin(const Plan* p, const u8* x, void* mail, u32 stamp) {
    const Functions& f = *p->functions;
    for (i64 i = 0; i < p->num_encodes; i++) {
        const Step& s = p->encodes[i];
        const int code = f.encode(s.geometry, x + s.from, s.row_stride, s.frames, s.frame_stride, s.num_rows, s.skip, s.word, p->workspace,
                                  mail, stamp, p->stream);
        if (code) return code;
    }
    return 0;
}

// Copies this rank's piece, unless it lies there. With nothing queued on the caller's stream since `begin` but the payload, whose stream is
// another one; before the decode stream waits for that.
int zipccl_launch_beside(const Plan* p, const u8* x, u8* out) {
    const Functions& f = *p->functions;
    const u8* from = x + p->copy_from;
    u8* to = out + p->copy_to;
    if (!p->copy_bytes || from == to) return 0;
    int code = f.record(p->encoded, p->stream);
    if (!code) code = f.wait(p->decode_stream, p->encoded, 0);
    return code ? code : f.copy((u64)to, (u64)from, (size_t)p->copy_bytes, p->decode_stream);
}

// Once the decode stream waits for the payload: fills the output, and marks where that ends.
int zipccl_launch_end(const Plan* p, const u8* x, u8* out) {
    const Functions& f = *p->functions;
    for (i64 i = 0; i < p->num_decodes; i++) {
        const Step& s = p->decodes[i];
        const int code = s.is_sum ? f.decode_reduce(s.geometry, s.frames, s.frame_stride, s.num_rows, x + s.from, s.skip, out + s.to,
                                                    s.word, p->decode_stream)
                                  : f.decode(s.geometry, s.frames, s.frame_stride, out + s.to, s.row_stride, s.num_rows, s.skip, s.word,
                                             p->decode_stream);
        if (code) return code;
    }
    return f.record(p->filled, p->decode_stream);
}

// All of it: what `begin` does, the payload on a communicator's handle, what `beside` does, and, if it `fills` the output, `end`; if not, the
// decode stream waits for the payload.
int zipccl_launch_call(const Plan* p, void* communicator, const u8* x, u8* out, void* mail, u32 stamp, i64 fills) {
    const Functions& f = *p->functions;
    int code = zipccl_launch_begin(p, x, mail, stamp);
    if (!code) code = f.record(p->encoded, p->stream);
    if (!code) code = f.wait(p->payload_stream, p->encoded, 0);
    if (code) return code;
    code = payload(p, communicator);
    if (code) return -1 - code;
    code = f.record(p->arrived, p->payload_stream);
    if (!code && p->copy_bytes && x + p->copy_from != out + p->copy_to) {
        code = f.wait(p->decode_stream, p->encoded, 0);
        if (!code) code = f.copy((u64)(out + p->copy_to), (u64)(x + p->copy_from), (size_t)p->copy_bytes, p->decode_stream);
    }
    if (!code) code = f.wait(p->decode_stream, p->arrived, 0);
    return code || !fills ? code : zipccl_launch_end(p, x, out);
}

// `stream` waits for the output.
int zipccl_launch_join(const Plan* p, void* stream) { return p->functions->wait(stream, p->filled, 0); }

// `call`, which fills, with exchange `count`; NOT_SO where another device is current, the stream is captured, or the tensors share memory.
int zipccl_launch_repeat(const Repeat* r, void* communicator, const u8* x, u8* out, u64 count) {
    const Plan* p = r->plan;
    const Functions& f = *p->functions;
    void* context = nullptr;
    int status = 0;
    const bool apart = out >= x + r->x_bytes || x >= out + r->out_bytes;
    if (!apart && !r->anywhere && !(r->place >= 0 && x == out + r->place)) return NOT_SO;
    if (f.context(&context) || context != r->context || f.is_capturing(p->stream, &status) || status) return NOT_SO;
    const u64 entry = count % (u64)r->depth * (u64)r->num_ranks + (u64)r->rank;
    return zipccl_launch_call(p, communicator, x, out, r->mail + 8 * entry, (u32)(count % 0xFFFFFFFFu + 1), 1);
}

// Once all ranks' words of exchange `count` are there, and none stops it: `stream` waits for the output. Else NOT_SO.
int zipccl_launch_finish(const Repeat* r, void* stream, u64 count) {
    const Functions& f = *r->plan->functions;
    const u64* entries = r->ring + count % (u64)r->depth * (u64)r->num_ranks;
    const u64 stamp = count % 0xFFFFFFFFu + 1;
    for (i64 i = 0; i < r->num_ranks; i++) {
        const u64 value = __atomic_load_n(entries + i, __ATOMIC_ACQUIRE);
        if (value >> 32 != stamp || (u32)value & r->stops) return NOT_SO;
        r->words[i] = (u32)value;
    }
    void* context = nullptr;
    if (f.context(&context) || context != r->context || f.wait(stream, r->plan->filled, 0)) return NOT_SO;
    __atomic_store_n(r->mark, count + 1, __ATOMIC_RELEASE);
    return 0;
}

// Queues what fills the outputs on `stream`.
int zipccl_launch_fill(const Filling* filling, const u8* rows, void* stream, const u64* outs) {
    const Functions& f = *filling->functions;
    for (i64 i = 0; i < filling->num_pieces; i++) {
        const Piece& p = filling->pieces[i];
        u8* to = (u8*)outs[p.which] + p.to;
        const u8* from = rows + p.at;
        int code = 0;
        if (p.geometry) {
            code = f.decode(p.geometry, from, filling->row_bytes, to, p.row_stride, filling->num_ranks, -1, filling->errors, stream);
        } else {
            for (i64 r = 0; r < filling->num_ranks && !code; r++)
                code = f.copy((u64)(to + r * p.row_stride), (u64)(from + r * filling->row_bytes), (size_t)p.num_bytes, stream);
        }
        if (code) return code;
    }
    return 0;
}

// The three as Python's own functions; the outputs come last.
void zipccl_launch_python(const Python* functions) { python = *functions; }
void* zipccl_launch_repeat_python(void*, void** arguments, ptrdiff_t) {
    return from_python<5>(arguments, [](const u64* a) {
        return zipccl_launch_repeat((const Repeat*)a[0], (void*)a[1], (const u8*)a[2], (u8*)a[3], a[4]);
    });
}
void* zipccl_launch_fill_python(void*, void** arguments, ptrdiff_t num) {
    return from_python_up_to<MAX_OUTPUTS + 3>(arguments, num, [](const u64* a) {
        return zipccl_launch_fill((const Filling*)a[0], (const u8*)a[1], (void*)a[2], a + 3);
    });
}
void* zipccl_launch_finish_python(void*, void** arguments, ptrdiff_t) {
    return from_python<3>(arguments, [](const u64* a) { return zipccl_launch_finish((const Repeat*)a[0], (void*)a[1], a[2]); });
}

}  // extern "C"

}  // namespace launching
}  // namespace zipscape

#endif  // ZIPCCL_LAUNCH_H
