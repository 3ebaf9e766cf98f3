// The CUDA codec: kernels by name (so that NVRTC finds them) and, where a host compiler is at hand, C launchers.
//
// Launchers queue on `stream` and return a cudaError_t; they neither allocate nor wait. Pointers are device pointers. Frames are
// 16-byte aligned with a stride that is a multiple of 16; rows need the alignment of their elements only (16 bytes is the fast case).
#include "decode.cuh"
#include "encode.cuh"
#include "reduce_rows.cuh"

using namespace zipscape;

// Warps of a CTA, and CTAs that must fit on a multiprocessor: what the compiler may spend on registers. nvrtc.py repeats the warps. Encode's
// are in encode.cuh.
constexpr u32 kDecodeWarps = 4, kReduceWarps = 4, kReduce2Warps = 4, kReduceRowsWarps = 1;
constexpr u32 kDecodeCtas = 16, kReduceCtas = 5, kReduce2Ctas = 10, kReduceRowsCtas = 24;
constexpr u32 kReduceRows = 4;              // rows whose headers are staged at once
#ifndef ZIPCCL_ENCODE2_CTAS
#define ZIPCCL_ENCODE2_CTAS 3
#endif
constexpr u32 kEncode2Ctas = ZIPCCL_ENCODE2_CTAS, kDecode2Ctas = 10, kReduce2Level2Ctas = 7;      // at level 2; warps as above, encode's with it

#define ZIPCCL_KERNEL(name, warps, ctas) \
    extern "C" __global__ void __launch_bounds__((warps) * 32, ctas) name(const __grid_constant__ Call c)
// What fits of 16-bit elements on a multiprocessor, fits half of FP32.
#define ZIPCCL_KERNELS(F, dtype)                                                                                            \
    ZIPCCL_KERNEL(zipccl_encode_##dtype, kEncodeWarps, kEncodeCtas * 2 / F::kItem) { encode_tile<EncodeLevel1<F>>(c); } \
    ZIPCCL_KERNEL(zipccl_decode_##dtype, kDecodeWarps, kDecodeCtas * 2 / F::kItem) { decode_blocks<DecodeLevel1<F>, kDecodeWarps>(c); }    \
    ZIPCCL_KERNEL(zipccl_reduce2_##dtype, kReduce2Warps, kReduce2Ctas * 2 / F::kItem) {                                      \
        decode_reduce_blocks<DecodeLevel1<F>, kReduce2Warps, 1, true>(c);                                                                  \
    }                                                                                                                        \
    ZIPCCL_KERNEL(zipccl_reduce_##dtype, F::kItem == 2 ? kReduceRowsWarps : kReduceWarps, F::kItem == 2 ? kReduceRowsCtas : kReduceCtas) { \
        if constexpr (F::kItem == 2) reduce_rows<F, kReduceRowsWarps, kReduceRowsCtas>(c);                                   \
        else decode_reduce_blocks<DecodeLevel1<F>, kReduceWarps, kReduceRows, false>(c);                                     \
    }
ZIPCCL_KERNELS(Bf16, bf16)
ZIPCCL_KERNELS(Fp16, fp16)
ZIPCCL_KERNELS(Fp32, fp32)
ZIPCCL_KERNEL(zipccl_encode_bf16_level2, EncodeLevel2::kWarps, kEncode2Ctas) { encode_tile<EncodeLevel2>(c); }
ZIPCCL_KERNEL(zipccl_decode_bf16_level2, kDecodeWarps, kDecode2Ctas) { decode_blocks<DecodeLevel2, kDecodeWarps>(c); }
ZIPCCL_KERNEL(zipccl_reduce2_bf16_level2, kReduce2Warps, kReduce2Level2Ctas) { decode_reduce_blocks<DecodeLevel2, kReduce2Warps, 1, true>(c); }
ZIPCCL_KERNEL(zipccl_reduce_bf16_level2, kReduceWarps, kReduceCtas) { decode_reduce_blocks<DecodeLevel2, kReduceWarps, kReduceRows, false>(c); }

// Zero when the module is loaded, so that neither needs an allocation or a memset (graph capture allows none): workspaces, handed out by
// the caller and never given back, and the word decode reports corruption to.
extern "C" {
__device__ u64 zipccl_workspaces[1 << 17];
__device__ u32 zipccl_errors[1];
}

#ifndef __CUDACC_RTC__

#include "launch.h"
#include "prints.cuh"

// Whether kernels can start before the one before them on their stream has ended (begin_in_turn), and whether they may: not while somebody
// measures without.
static bool can_overlap = true, may_overlap = true;

#ifdef ZIPSCAPE_EMULATE
typedef void* cudaStream_t;
static int launch(void (*kernel)(Call), dim3 grid, u32 warps, u32, cudaStream_t, const Call& call) {
    emulate::launch(grid, warps * 32, [&] { kernel(call); });
    return 0;
}
template <class T>
static int address_of(void** p, T& symbol) { *p = &symbol; return 0; }
static int allow_shared(void (*)(Call), u32) { return 0; }
static int num_multiprocessors = 2;
static int look_at_device() { return 0; }
#else
static int launch(void (*kernel)(Call), dim3 grid, u32 warps, u32 shared, cudaStream_t stream, const Call& call) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(warps * 32), config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = can_overlap && may_overlap ? 1 : 0;
    return (int)cudaLaunchKernelEx(&config, kernel, call);
}
template <class T>
static int address_of(void** p, T& symbol) { return (int)cudaGetSymbolAddress(p, symbol); }
static int allow_shared(void (*kernel)(Call), u32 bytes) {
    return (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}
// Of the last device that was prepared: as a rule all of a process are alike, and speed alone depends on it.
static int num_multiprocessors = 0;
static int look_at_device() {
    cudaFuncAttributes attributes;
    int device = 0;
    cudaError_t code = cudaFuncGetAttributes(&attributes, zipccl_encode_bf16);
    can_overlap = can_overlap && !code && attributes.ptxVersion >= 90;         // code for less, also on a newer device, would not wait
    if (!code) code = cudaGetDevice(&device);
    if (!code) code = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
    return (int)code;
}
#endif

// The kernel of an operation for a call's dtype and level.
#define ZIPCCL_KERNEL_OF(operation, g)                                                                                   \
    ((g).level == 2 ? zipccl_##operation##_bf16_level2 : (g).dtype_code == Bf16::kCode ? zipccl_##operation##_bf16       \
     : (g).dtype_code == Fp16::kCode ? zipccl_##operation##_fp16 : zipccl_##operation##_fp32)

// `geometry`: the integers of ZipcclGeometry, then the 128 header bytes; host memory, read before return.
static Call make_call(const void* geometry, const void* x, i64 row_stride, void* frames, i64 frame_stride, i64 num_rows, i64 skip,
                      void* out, void* status, void* workspace) {
    Call c;
    memcpy(&c.g, geometry, sizeof c.g);
    memcpy(c.header, (const u8*)geometry + sizeof c.g, sizeof c.header);
    c.x = (const u8*)x, c.frames = (u8*)frames, c.out = (u8*)out;
    c.row_stride = row_stride, c.frame_stride = frame_stride, c.num_rows = num_rows, c.skip = skip;
    c.status = (u32*)status, c.workspace = (u64*)workspace, c.look_ahead = num_multiprocessors;
    c.mail = 0, c.stamp = 0;
    return c;
}

extern "C" {

// Words of 8 bytes that encode needs, zeroed once by the caller and owned by one stream.
i64 zipccl_cuda_workspace_words(i64 num_rows, i64 num_tiles) { return workspace_words(num_rows, num_tiles); }

// For measurements: what a call costs whose head does not overlap the tail of the call before it. They may overlap unless told otherwise.
void zipccl_cuda_allow_overlap(int allowed) { may_overlap = allowed != 0; }

// Once for each device, before anything else: lets the encode kernels have their shared memory. Gives the device addresses of
// zipccl_workspaces (and its number of words) and zipccl_errors.
int zipccl_cuda_prepare(void** workspaces, i64* num_words, void** errors) {
    *num_words = sizeof zipccl_workspaces / sizeof(u64);
    int code = look_at_device();
    if (!code) code = address_of(workspaces, zipccl_workspaces);
    if (!code) code = address_of(errors, zipccl_errors);
    if (!code) code = allow_shared(zipccl_encode_bf16, EncodeLevel1<Bf16>::kShared);
    if (!code) code = allow_shared(zipccl_encode_fp16, EncodeLevel1<Fp16>::kShared);
    if (!code) code = allow_shared(zipccl_encode_fp32, EncodeLevel1<Fp32>::kShared);
    if (!code) code = allow_shared(zipccl_encode_bf16_level2, EncodeLevel2::kShared);
    return code;
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

// ops.encode: x [num_rows] rows of row_stride bytes; status: [1]; row `skip` (or none: -1) is left out. `mail`: 8 bytes that the device can
// write, where `stamp` << 32 | status goes in one store; null: nowhere.
int zipccl_cuda_encode_telling(const void* geometry, const void* x, i64 row_stride, void* frames, i64 frame_stride, i64 num_rows, i64 skip,
                               void* status, void* workspace, void* mail, u32 stamp, cudaStream_t stream) {
    Call c = make_call(geometry, x, row_stride, frames, frame_stride, num_rows, skip, 0, status, workspace);
    c.mail = (u64*)mail, c.stamp = stamp;
    const dim3 grid((u32)c.g.num_tiles + 1, (u32)(num_rows - (skip >= 0)));
    if (!grid.y) return 0;
    const bool level2 = c.g.level == 2;
    const u32 shared = level2 ? EncodeLevel2::kShared : c.g.itemsize == 4 ? EncodeLevel1<Fp32>::kShared : EncodeLevel1<Bf16>::kShared;
    return launch(ZIPCCL_KERNEL_OF(encode, c.g), grid, level2 ? EncodeLevel2::kWarps : kEncodeWarps, shared, stream, c);
}

int zipccl_cuda_encode(const void* geometry, const void* x, i64 row_stride, void* frames, i64 frame_stride, i64 num_rows, i64 skip,
                       void* status, void* workspace, cudaStream_t stream) {
    return zipccl_cuda_encode_telling(geometry, x, row_stride, frames, frame_stride, num_rows, skip, status, workspace, 0, 0, stream);
}

// ops.decode: errors: [1], kinds of corruption are ORed in.
int zipccl_cuda_decode(const void* geometry, const void* frames, i64 frame_stride, void* out, i64 row_stride, i64 num_rows, i64 skip,
                       void* errors, cudaStream_t stream) {
    const Call c = make_call(geometry, 0, row_stride, (void*)frames, frame_stride, num_rows, skip, out, errors, 0);
    const dim3 grid((u32)(c.g.num_tiles ? c.g.num_tiles * (32 / kDecodeWarps) : 1), (u32)(num_rows - (skip >= 0)));
    if (!grid.y) return 0;
    return launch(ZIPCCL_KERNEL_OF(decode, c.g), grid, kDecodeWarps, 0, stream, c);
}

// ops.decode_reduce: row own_index comes from `own`. out may be own.
int zipccl_cuda_decode_reduce(const void* geometry, const void* frames, i64 frame_stride, i64 num_rows, const void* own, i64 own_index,
                              void* out, void* errors, cudaStream_t stream) {
    const Call c = make_call(geometry, own, 0, (void*)frames, frame_stride, num_rows, own_index, out, errors, 0);
    if (!c.g.num_tiles) return 0;
    if (num_rows == 2)
        return launch(ZIPCCL_KERNEL_OF(reduce2, c.g), dim3((u32)c.g.num_tiles * (32 / kReduce2Warps)), kReduce2Warps, 0, stream, c);
    const u32 warps = c.g.level == 1 && c.g.itemsize == 2 ? kReduceRowsWarps : kReduceWarps;
    return launch(ZIPCCL_KERNEL_OF(reduce, c.g), dim3((u32)c.g.num_tiles * (32 / warps)), warps, 0, stream, c);
}

}  // extern "C"

#endif  // __CUDACC_RTC__
