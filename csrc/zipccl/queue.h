// What is queued on a GPU's streams: launches, copies, events. Each returns 0 or a cudaError_t. In emulation all is done at once, and streams
// and events are nothing.
#ifndef ZIPCCL_QUEUE_H
#define ZIPCCL_QUEUE_H

#include "frame.cuh"

#include <cstring>

namespace zipscape {

#ifdef ZIPSCAPE_EMULATE
typedef void* cudaStream_t;
typedef void* cudaEvent_t;
constexpr bool kFuses = false;                             // a rank's turn comes only when others have sent: ranks run one after the other
static i64 num_queued;                                     // what would have been calls of CUDA
#define ZIPCCL_LAUNCH(kernel, grid, threads, stream, arguments) \
    (void)(stream), num_queued++, emulate::launch(grid, threads, [&] { kernel(arguments); })
static int last_error() { return 0; }
static int copy(void* to, const void* from, i64 num_bytes, cudaStream_t) {
    memcpy(to, from, num_bytes);
    return num_queued++, 0;
}
static int record(cudaEvent_t, cudaStream_t) { return num_queued++, 0; }
static int wait_for(cudaStream_t, cudaEvent_t) { return num_queued++, 0; }
static int make(cudaStream_t*, bool) { return 0; }
static int make(cudaEvent_t*) { return 0; }
static int is_done(cudaEvent_t) { return 1; }
static bool may_queue(i64, cudaStream_t) { return true; }
static void destroy(cudaStream_t*, u32, cudaEvent_t*, u32) {}
#else
constexpr bool kFuses = true;
#define ZIPCCL_LAUNCH(kernel, grid, threads, stream, arguments) kernel<<<grid, threads, 0, stream>>>(arguments)
static int last_error() { return (int)cudaGetLastError(); }
static int copy(void* to, const void* from, i64 num_bytes, cudaStream_t stream) {
    return (int)cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, stream);
}
static int record(cudaEvent_t event, cudaStream_t stream) { return (int)cudaEventRecord(event, stream); }
static int wait_for(cudaStream_t stream, cudaEvent_t event) { return (int)cudaStreamWaitEvent(stream, event, 0); }
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
// Whether the device is the current one, and its stream is not captured.
static bool may_queue(i64 device, cudaStream_t stream) {
    int current = -1;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaGetDevice(&current) || current != device) return false;
    if (!cudaStreamIsCapturing(stream, &status)) return status == cudaStreamCaptureStatusNone;
    cudaGetLastError();                                    // the default stream's, while another one is captured: nobody else's
    return false;
}
static void destroy(cudaStream_t* streams, u32 num_streams, cudaEvent_t* events, u32 num_events) {
    for (u32 i = 0; i < num_streams; i++) cudaStreamDestroy(streams[i]);
    for (u32 i = 0; i < num_events; i++) cudaEventDestroy(events[i]);
}
#endif

#define ZIPCCL_TRY(expression) \
    if (const int code = (expression)) return code

static int after(cudaStream_t first, cudaEvent_t event, cudaStream_t then) {
    const int code = record(event, first);
    return code ? code : wait_for(then, event);
}

}  // namespace zipscape

#endif  // ZIPCCL_QUEUE_H
