// The CUDA codec: kernels by name (so that NVRTC finds them) and, where a host compiler is at hand, C launchers.
//
// Launchers queue on `stream` and return a cudaError_t; they neither allocate nor wait. Pointers are device pointers. Frames are
// 16-byte aligned with a stride that is a multiple of 16; rows need the alignment of their elements only (16 bytes is the fast case).
#include "decode.cuh"
#include "encode.cuh"

using namespace zipscape;

// Warps of a CTA, and CTAs that must fit on a multiprocessor: what the compiler may spend on registers.
constexpr u32 kEncodeWarps = 16, kDecodeWarps = 8, kReduceWarps = 8;
constexpr u32 kEncodeCtas = 2, kDecodeCtas = 8, kReduceCtas = 2;
constexpr u32 kReduceRows = 4;              // rows whose headers are staged at once

#define ZIPCCL_KERNELS(F, name)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(kEncodeWarps * 32, kEncodeCtas) zipccl_encode_##name(const __grid_constant__ Call c) { \
        encode_tile<F, kEncodeWarps>(c);                                                                                           \
    }                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(kDecodeWarps * 32, kDecodeCtas * 2 / F::kItem) zipccl_decode_##name(const __grid_constant__ Call c) { \
        decode_blocks<F, kDecodeWarps>(c);                                                                                         \
    }                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(kReduceWarps * 32, kReduceCtas) zipccl_reduce_##name(const __grid_constant__ Call c) { \
        decode_reduce_blocks<F, kReduceWarps, kReduceRows>(c);                                                                     \
    }
ZIPCCL_KERNELS(Bf16, bf16)
ZIPCCL_KERNELS(Fp16, fp16)
ZIPCCL_KERNELS(Fp32, fp32)

// Zero when the module is loaded, so that neither needs an allocation or a memset (graph capture allows none): workspaces, handed out by
// the caller and never given back, and the word decode reports corruption to.
extern "C" {
__device__ u32 zipccl_workspaces[1 << 18];
__device__ u32 zipccl_errors[1];
}

#ifndef __CUDACC_RTC__

#ifdef ZIPSCAPE_EMULATE
typedef void* cudaStream_t;
#define ZIPCCL_LAUNCH(kernel, grid, warps, stream, call) emulate::launch(grid, (warps) * 32, [&] { kernel(call); })
static int last_error() { return 0; }
template <class T>
static int address_of(void** p, T& symbol) { *p = &symbol; return 0; }
#else
#define ZIPCCL_LAUNCH(kernel, grid, warps, stream, call) kernel<<<grid, (warps) * 32, 0, stream>>>(call)
static int last_error() { return (int)cudaGetLastError(); }
template <class T>
static int address_of(void** p, T& symbol) { return (int)cudaGetSymbolAddress(p, symbol); }
#endif

#define ZIPCCL_LAUNCH_DTYPE(operation, grid, warps, stream, call)                                                \
    switch (call.g.dtype_code) {                                                                                 \
        case Bf16::kCode: ZIPCCL_LAUNCH(zipccl_##operation##_bf16, grid, warps, stream, call); break;            \
        case Fp16::kCode: ZIPCCL_LAUNCH(zipccl_##operation##_fp16, grid, warps, stream, call); break;            \
        default: ZIPCCL_LAUNCH(zipccl_##operation##_fp32, grid, warps, stream, call); break;                     \
    }

// `geometry`: the integers of ZipcclGeometry, then the 128 header bytes; host memory, read before return.
static Call make_call(const void* geometry, const void* x, i64 row_stride, void* frames, i64 frame_stride, i64 num_rows, i64 skip,
                      void* out, void* status, void* workspace) {
    Call c;
    memcpy(&c.g, geometry, sizeof c.g);
    memcpy(c.header, (const u8*)geometry + sizeof c.g, sizeof c.header);
    c.x = (const u8*)x, c.frames = (u8*)frames, c.out = (u8*)out;
    c.row_stride = row_stride, c.frame_stride = frame_stride, c.num_rows = num_rows, c.skip = skip;
    c.status = (u32*)status, c.workspace = (u32*)workspace;
    return c;
}

extern "C" {

// Words of u32 that encode needs, zeroed once by the caller and owned by one stream (encode leaves them zero).
i64 zipccl_cuda_workspace_words(i64 num_rows, i64 num_groups, i64 num_tiles) {
    return workspace_words(num_rows, num_groups, num_tiles);
}

// Device addresses, on the current device, of zipccl_workspaces (and its number of words) and zipccl_errors.
int zipccl_cuda_globals(void** workspaces, i64* num_words, void** errors) {
    *num_words = sizeof zipccl_workspaces / sizeof(u32);
    const int code = address_of(workspaces, zipccl_workspaces);
    return code ? code : address_of(errors, zipccl_errors);
}

// Waits for `stream`, then moves the word at a device address to the host, leaving zero.
int zipccl_cuda_take_word(void* address, u32* word, cudaStream_t stream) {
#ifdef ZIPSCAPE_EMULATE
    memcpy(word, address, sizeof *word), memset(address, 0, sizeof *word);
    return 0;
#else
    cudaError_t code = cudaMemcpyAsync(word, address, sizeof *word, cudaMemcpyDeviceToHost, stream);
    if (!code) code = cudaMemsetAsync(address, 0, sizeof *word, stream);
    return (int)(code ? code : cudaStreamSynchronize(stream));
#endif
}

// ops.encode: x [num_rows] rows of row_stride bytes; status: [1]; row `skip` (or none: -1) is left out.
int zipccl_cuda_encode(const void* geometry, const void* x, i64 row_stride, void* frames, i64 frame_stride, i64 num_rows, i64 skip,
                       void* status, void* workspace, cudaStream_t stream) {
    const Call c = make_call(geometry, x, row_stride, frames, frame_stride, num_rows, skip, 0, status, workspace);
    const dim3 grid((u32)(c.g.num_tiles ? c.g.num_tiles : 1), (u32)(num_rows - (skip >= 0)));
    if (!grid.y) return 0;
    ZIPCCL_LAUNCH_DTYPE(encode, grid, kEncodeWarps, stream, c)
    return last_error();
}

// ops.decode: errors: [1], kinds of corruption are ORed in.
int zipccl_cuda_decode(const void* geometry, const void* frames, i64 frame_stride, void* out, i64 row_stride, i64 num_rows, i64 skip,
                       void* errors, cudaStream_t stream) {
    const Call c = make_call(geometry, 0, row_stride, (void*)frames, frame_stride, num_rows, skip, out, errors, 0);
    const dim3 grid((u32)(c.g.num_tiles ? c.g.num_tiles * (32 / kDecodeWarps) : 1), (u32)(num_rows - (skip >= 0)));
    if (!grid.y) return 0;
    ZIPCCL_LAUNCH_DTYPE(decode, grid, kDecodeWarps, stream, c)
    return last_error();
}

// ops.decode_reduce: row own_index comes from `own`. out may be own.
int zipccl_cuda_decode_reduce(const void* geometry, const void* frames, i64 frame_stride, i64 num_rows, const void* own, i64 own_index,
                              void* out, void* errors, cudaStream_t stream) {
    const Call c = make_call(geometry, own, 0, (void*)frames, frame_stride, num_rows, own_index, out, errors, 0);
    const dim3 grid((u32)(c.g.num_tiles * (32 / kReduceWarps)));
    if (!grid.x) return 0;
    ZIPCCL_LAUNCH_DTYPE(reduce, grid, kReduceWarps, stream, c)
    return last_error();
}

}  // extern "C"

#endif  // __CUDACC_RTC__
