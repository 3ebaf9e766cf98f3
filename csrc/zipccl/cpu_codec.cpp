// The CPU kernels' C interface (ds_zipccl/kernels/impl_cpu.py calls it; ds_zipccl/kernels/ops.py says what the functions do).
// Nothing here depends on torch; pointers are the host's, strides are in bytes, rows may have any alignment.
#include "cpu_frame.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little-endian and are read and written as they are");

using namespace zipccl;

namespace {

template <class Call>
auto for_dtype(const Rows& rows, const Call& call) {
    switch (rows.g->dtype_code) {
        case 1: return call(Bf16{}, Scalar{});
        case 2: return call(Fp16{}, Scalar{});
        default: return call(Fp32{}, Scalar{});
    }
}

enum { kOutOfMemory = -1, kWrongGeometry = -2 };

bool known(const ZipcclGeometry* g) {
    return g->dtype_code >= 1 && g->dtype_code <= 3 && g->tile_blocks >= 1 && g->tile_blocks <= kMaxTileBlocks;
}

template <class Call>
int64_t report(int64_t* failure, const ZipcclGeometry* g, const Call& call) {
    if (!known(g)) return kWrongGeometry;
    try {
        const Failure first = call();
        failure[0] = first.row;
        failure[1] = first.tile;
        failure[2] = first.got;
        return first.kind;
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
}

}  // namespace

// All return 0, or a negative number: -1 out of memory, -2 a geometry these kernels do not know. The decoders return a positive
// FailureKind for a corrupt frame and put its row, tile and (spill) end in failure[0..2]; their output is then unspecified.
extern "C" {

int64_t zipccl_cpu_encode(const ZipcclGeometry* g, const uint8_t* header, const uint8_t* x, int64_t x_stride, uint8_t* frames,
                          int64_t frame_stride, int64_t num_rows, int64_t skip, int32_t* status, int32_t num_threads) {
    if (!known(g)) return kWrongGeometry;
    const Rows rows{g, header, num_rows, skip, num_threads};
    try {
        *status = static_cast<int32_t>(for_dtype(rows, [&](auto dtype, auto isa) {
            return encode_rows<decltype(dtype), decltype(isa)>(rows, x, x_stride, frames, frame_stride);
        }));
        return 0;
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
}

int64_t zipccl_cpu_decode(const ZipcclGeometry* g, const uint8_t* header, const uint8_t* frames, int64_t frame_stride, uint8_t* out,
                          int64_t out_stride, int64_t num_rows, int64_t skip, int64_t* failure, int32_t num_threads) {
    const Rows rows{g, header, num_rows, skip, num_threads};
    return report(failure, g, [&] {
        return for_dtype(rows, [&](auto dtype, auto isa) {
            return decode_rows<decltype(dtype), decltype(isa)>(rows, frames, frame_stride, out, out_stride);
        });
    });
}

int64_t zipccl_cpu_decode_reduce(const ZipcclGeometry* g, const uint8_t* header, const uint8_t* frames, int64_t frame_stride,
                                 const uint8_t* own, int64_t own_index, uint8_t* out, int64_t num_rows, int64_t* failure,
                                 int32_t num_threads) {
    const Rows rows{g, header, num_rows, own_index, num_threads};
    return report(failure, g, [&] {
        return for_dtype(rows, [&](auto dtype, auto isa) {
            return decode_reduce_rows<decltype(dtype), decltype(isa)>(rows, frames, frame_stride, own, out);
        });
    });
}

}  // extern "C"
