// The rival in benchmarks/gpu_codec.py --nvcomp: nvCOMP's batched ANS in its 16-bit float mode, through its C API.
#include <cuda_runtime.h>
#include <nvcomp/ans.h>

#include <algorithm>
#include <vector>

#define CHECK(call) do { const int code_ = (int)(call); if (code_) return code_; } while (0)

namespace {

template <class F>
int median_us(F launch, cudaStream_t stream, double* us) {
    cudaEvent_t begin, end;
    std::vector<float> times;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int i = 0; i < 12; i++) {
        float ms = 0;
        CHECK(cudaEventRecord(begin, stream));
        CHECK(launch());
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    *us = times[times.size() / 2] * 1e3;
    return 0;
}

template <class T>
int upload(const std::vector<T>& host, T** device) {
    CHECK(cudaMalloc(device, host.size() * sizeof(T)));
    return cudaMemcpy(*device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
}

}  // namespace

// Device pointers in and out [bytes], bytes a multiple of chunk. results: compress us, decompress us, compressed bytes.
extern "C" int nvcomp_ans(char* in, char* out, size_t bytes, size_t chunk, double* results) {
    const size_t num = bytes / chunk;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    auto options = nvcompBatchedANSCompressDefaultOpts;
    options.data_type = NVCOMP_TYPE_FLOAT16;
    const auto decompress_options = nvcompBatchedANSDecompressDefaultOpts;
    size_t temp_bytes, decompress_temp_bytes, max_bytes;
    CHECK(nvcompBatchedANSCompressGetTempSize(num, chunk, options, &temp_bytes, bytes, stream));
    CHECK(nvcompBatchedANSCompressGetMaxOutputChunkSize(chunk, options, &max_bytes));
    CHECK(nvcompBatchedANSDecompressGetTempSize(num, chunk, decompress_options, &decompress_temp_bytes, bytes, stream));
    max_bytes = (max_bytes + 255) / 256 * 256;
    char *temp, *decompress_temp, *compressed;
    CHECK(cudaMalloc(&temp, temp_bytes + 16));
    CHECK(cudaMalloc(&decompress_temp, decompress_temp_bytes + 16));
    CHECK(cudaMalloc(&compressed, max_bytes * num));
    std::vector<void*> ins(num), outs(num), frames(num);
    std::vector<size_t> sizes(num, chunk);
    for (size_t i = 0; i < num; i++) ins[i] = in + i * chunk, outs[i] = out + i * chunk, frames[i] = compressed + i * max_bytes;
    void **d_ins, **d_outs, **d_frames;
    size_t *d_sizes, *d_frame_bytes, *d_out_bytes;
    nvcompStatus_t* statuses;
    CHECK(upload(ins, &d_ins));
    CHECK(upload(outs, &d_outs));
    CHECK(upload(frames, &d_frames));
    CHECK(upload(sizes, &d_sizes));
    CHECK(cudaMalloc(&d_frame_bytes, num * sizeof(size_t)));
    CHECK(cudaMalloc(&d_out_bytes, num * sizeof(size_t)));
    CHECK(cudaMalloc(&statuses, num * sizeof(nvcompStatus_t)));
    CHECK(median_us([&] { return nvcompBatchedANSCompressAsync((const void* const*)d_ins, d_sizes, chunk, num, temp, temp_bytes, d_frames,
                                                               d_frame_bytes, options, statuses, stream); }, stream, results));
    CHECK(median_us([&] { return nvcompBatchedANSDecompressAsync((const void* const*)d_frames, d_frame_bytes, d_sizes, d_out_bytes, num,
                                                                 decompress_temp, decompress_temp_bytes, d_outs, decompress_options,
                                                                 statuses, stream); }, stream, results + 1));
    CHECK(cudaMemcpy(sizes.data(), d_frame_bytes, num * sizeof(size_t), cudaMemcpyDeviceToHost));
    results[2] = 0;
    for (size_t size : sizes) results[2] += (double)size;
    return 0;
}
