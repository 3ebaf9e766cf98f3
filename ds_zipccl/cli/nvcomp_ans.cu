// nvCOMP's batched ANS in its 16-bit float mode, through its C API: the rival of `ds_zipccl bench codec` on a GPU (bench_nvcomp.py).
// nvCOMP itself is loaded by the caller beforehand; nothing here is linked against it.
#include <cuda_runtime.h>
#include <nvcomp/ans.h>

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#define CHECK(call) do { const int code_ = (int)(call); if (code_) return code_; } while (0)

namespace {

constexpr int kBadStatus = 100000;          // added to the status of a chunk that failed

struct Ans {
    size_t num = 0, chunk = 0, bytes = 0;
    nvcompBatchedANSCompressOpts_t options = nvcompBatchedANSCompressDefaultOpts;
    nvcompBatchedANSDecompressOpts_t decompress_options = nvcompBatchedANSDecompressDefaultOpts;
    size_t temp_bytes = 0, decompress_temp_bytes = 0;
    char *temp = nullptr, *decompress_temp = nullptr, *frames = nullptr;
    void **ins = nullptr, **outs = nullptr, **frame_ptrs = nullptr;             // device: the chunks
    size_t *sizes = nullptr, *frame_bytes = nullptr, *out_bytes = nullptr;      // device: their bytes
    nvcompStatus_t* statuses = nullptr;

    ~Ans() {
        for (void* p : {(void*)temp, (void*)decompress_temp, (void*)frames, (void*)ins, (void*)outs, (void*)frame_ptrs, (void*)sizes,
                        (void*)frame_bytes, (void*)out_bytes, (void*)statuses})
            cudaFree(p);
    }
};

template <class T>
int upload(const std::vector<T>& host, T** device) {
    CHECK(cudaMalloc(device, host.size() * sizeof(T)));
    return cudaMemcpy(*device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
}

int prepare(Ans& a, char* in, char* out, cudaStream_t stream) {
    a.options.data_type = NVCOMP_TYPE_FLOAT16;
    size_t max_bytes;
    CHECK(nvcompBatchedANSCompressGetTempSize(a.num, a.chunk, a.options, &a.temp_bytes, a.bytes, stream));
    CHECK(nvcompBatchedANSCompressGetMaxOutputChunkSize(a.chunk, a.options, &max_bytes));
    CHECK(nvcompBatchedANSDecompressGetTempSize(a.num, a.chunk, a.decompress_options, &a.decompress_temp_bytes, a.bytes, stream));
    max_bytes = (max_bytes + 255) / 256 * 256;
    CHECK(cudaMalloc(&a.temp, a.temp_bytes + 16));
    CHECK(cudaMalloc(&a.decompress_temp, a.decompress_temp_bytes + 16));
    CHECK(cudaMalloc(&a.frames, max_bytes * a.num));
    std::vector<void*> ins(a.num), outs(a.num), frames(a.num);
    std::vector<size_t> sizes(a.num);
    for (size_t i = 0; i < a.num; i++) {
        ins[i] = in + i * a.chunk, outs[i] = out + i * a.chunk, frames[i] = a.frames + i * max_bytes;
        sizes[i] = std::min(a.chunk, a.bytes - i * a.chunk);
    }
    CHECK(upload(ins, &a.ins));
    CHECK(upload(outs, &a.outs));
    CHECK(upload(frames, &a.frame_ptrs));
    CHECK(upload(sizes, &a.sizes));
    CHECK(cudaMalloc(&a.frame_bytes, a.num * sizeof(size_t)));
    CHECK(cudaMalloc(&a.out_bytes, a.num * sizeof(size_t)));
    CHECK(cudaMalloc(&a.statuses, a.num * sizeof(nvcompStatus_t)));
    return 0;
}

}  // namespace

extern "C" {

// Device memory of `bytes` (even, > 0) in and out; `chunk` bytes are compressed together. The handle is freed by nvcomp_ans_close.
// Every function returns 0, a cudaError_t, an nvcompStatus_t, or kBadStatus + the status of a chunk.
int nvcomp_ans_open(void* in, void* out, size_t bytes, size_t chunk, cudaStream_t stream, void** handle) {
    std::unique_ptr<Ans> a(new (std::nothrow) Ans);
    if (!a) return (int)cudaErrorMemoryAllocation;
    a->bytes = bytes, a->chunk = chunk, a->num = (bytes + chunk - 1) / chunk;
    CHECK(prepare(*a, (char*)in, (char*)out, stream));
    *handle = a.release();
    return 0;
}

int nvcomp_ans_compress(void* handle, cudaStream_t stream) {
    Ans& a = *(Ans*)handle;
    return (int)nvcompBatchedANSCompressAsync((const void* const*)a.ins, a.sizes, a.chunk, a.num, a.temp, a.temp_bytes, a.frame_ptrs,
                                              a.frame_bytes, a.options, a.statuses, stream);
}

int nvcomp_ans_decompress(void* handle, cudaStream_t stream) {
    Ans& a = *(Ans*)handle;
    return (int)nvcompBatchedANSDecompressAsync((const void* const*)a.frame_ptrs, a.frame_bytes, a.sizes, a.out_bytes, a.num,
                                                a.decompress_temp, a.decompress_temp_bytes, a.outs, a.decompress_options, a.statuses,
                                                stream);
}

// Waits for `stream`. total: bytes of all chunks together after a compress, without the list of their sizes.
int nvcomp_ans_compressed_bytes(void* handle, cudaStream_t stream, size_t* total) {
    Ans& a = *(Ans*)handle;
    std::vector<size_t> sizes(a.num);
    std::vector<nvcompStatus_t> statuses(a.num);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(sizes.data(), a.frame_bytes, a.num * sizeof(size_t), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(statuses.data(), a.statuses, a.num * sizeof(nvcompStatus_t), cudaMemcpyDeviceToHost));
    *total = 0;
    for (size_t i = 0; i < a.num; i++) {
        if (statuses[i] != nvcompSuccess) return kBadStatus + (int)statuses[i];
        *total += sizes[i];
    }
    return 0;
}

// When nothing on it is running any more.
void nvcomp_ans_close(void* handle) { delete (Ans*)handle; }

}  // extern "C"
