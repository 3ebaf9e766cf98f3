// What a zipped call queues on a GPU, but for its payload, by three calls of the host's: before the payload is launched (what can wait is not
// in it), beside it and behind it. Knows neither CUDA's headers nor torch: functions come as addresses, the codec's (codec.cu) and the
// driver's; streams and events as handles. What is the same for every call of a kind is in its Plan, which the caller keeps; a call brings
// the addresses of its tensors alone.
//
// launch_calls.py repeats the structs. Functions return 0, a cudaError_t of the codec's or a CUresult of the driver's; none waits.
#ifndef ZIPCCL_LAUNCH_H
#define ZIPCCL_LAUNCH_H

#include <cstddef>
#include <cstdint>

namespace zipscape {
namespace launching {

typedef int64_t i64;
typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;

// zipccl_cuda_encode_telling, zipccl_cuda_decode, zipccl_cuda_decode_reduce; cuEventRecord, cuStreamWaitEvent, cuMemcpyDtoDAsync.
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
};

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

// `stream` waits for the output.
int zipccl_launch_join(const Plan* p, void* stream) { return p->functions->wait(stream, p->filled, 0); }

}  // extern "C"

}  // namespace launching
}  // namespace zipscape

#endif  // ZIPCCL_LAUNCH_H
