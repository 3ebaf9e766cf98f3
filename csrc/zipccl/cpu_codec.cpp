// The CPU kernels' C interface (ds_zipccl/kernels/impl_cpu.py calls it; ds_zipccl/kernels/ops.py says what the
// functions do). Nothing here depends on torch; pointers are the host's, strides are in bytes, rows may have any
// alignment.
#include "cpu_avx2.h"
#include "cpu_avx512.h"
#include "cpu_frame.h"
#include "cpu_scalar.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "frames are little-endian and are read and written as they are");

using namespace zipccl;

namespace {

enum Isa : int32_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

bool supported(int32_t isa) {
#if defined(__x86_64__)
    if (isa == kAvx2) return Avx2::supported();
    if (isa == kAvx512) return Avx512::supported();
#endif
    return isa == kScalar;
}

template <class D>
const BlockOps* ops_of([[maybe_unused]] int32_t isa) {
#if defined(__x86_64__)
    if (isa == kAvx2) return &kBlockOps<D, Avx2>;
    if (isa == kAvx512) return &kBlockOps<D, Avx512>;
#endif
    return &kBlockOps<D, Scalar>;
}

const BlockOps* level2_ops_of([[maybe_unused]] int32_t isa) {
#if defined(__x86_64__)
    if (isa == kAvx2) return &kLevel2Ops<Avx2, Avx2Level2>;
    if (isa == kAvx512) return &kLevel2Ops<Avx512, Avx512Level2>;
#endif
    return &kLevel2Ops<Scalar, Scalar2>;
}

// Null for an element type, a level or an instruction set that is not known here or not on this machine.
const BlockOps* choose(const ZipcclGeometry* g, int32_t isa) {
    if (!supported(isa) || g->tile_blocks < 1 || g->tile_blocks > kMaxTileBlocks) return nullptr;
    if (g->level == 2) return g->dtype_code == 1 ? level2_ops_of(isa) : nullptr;
    if (g->level != 1) return nullptr;
    switch (g->dtype_code) {
        case 1:
            return ops_of<Bf16>(isa);
        case 2:
            return ops_of<Fp16>(isa);
        case 3:
            return ops_of<Fp32>(isa);
        default:
            return nullptr;
    }
}

// Encoders that read and write more than this find little of it in the caches and leave little there: about half of what
// the cores of a complex share on present servers. (What sysconf calls the last level is a whole socket's on some.)
// Decoders gain nothing by it: they write more than they read, and such stores come out slower than the reads they save.
enum { kCachedBytes = 16 << 20 };

enum { kOutOfMemory = -1, kWrongGeometry = -2 };

int64_t report(const Failure& first, int64_t* failure) {
    failure[0] = first.row;
    failure[1] = first.tile;
    failure[2] = first.got;
    return first.kind;
}

}  // namespace

// All return 0, or a negative number: -1 out of memory, -2 a geometry or instruction set these kernels do not
// know or the machine does not have. The decoders return a positive
// FailureKind for a corrupt frame and put its row, tile and (spill) end in failure[0..2]; their output is then
// unspecified. The encoder writes past the caches if it touches more than `uncached_from` bytes; negative: where that pays.
extern "C" {

// Whether this machine runs instruction set `isa`: 0 scalar, 1 AVX2, 2 AVX-512.
int32_t zipccl_cpu_supports(int32_t isa) {
    return supported(isa);
}

int64_t zipccl_cpu_encode(const ZipcclGeometry* g, const uint8_t* header, const uint8_t* x, int64_t x_stride,
                          uint8_t* frames, int64_t frame_stride, int64_t num_rows, int64_t skip, int32_t* status,
                          int64_t uncached_from, int32_t num_threads, int32_t isa) try {
    Rows rows{g, choose(g, isa), header, num_rows, skip, num_threads};
    if (!rows.ops) return kWrongGeometry;
    const int64_t bytes = num_rows * (rows.row_bytes() + g->frame_bytes);
    rows.uncached = rows.ops->copy_uncached && bytes > (uncached_from < 0 ? kCachedBytes : uncached_from);
    *status = static_cast<int32_t>(encode_rows(rows, x, x_stride, frames, frame_stride));
    return 0;
} catch (const std::bad_alloc&) {
    return kOutOfMemory;
}

int64_t zipccl_cpu_decode(const ZipcclGeometry* g, const uint8_t* header, const uint8_t* frames, int64_t frame_stride,
                          uint8_t* out, int64_t out_stride, int64_t num_rows, int64_t skip, int64_t* failure,
                          int32_t num_threads, int32_t isa) try {
    const Rows rows{g, choose(g, isa), header, num_rows, skip, num_threads};
    if (!rows.ops) return kWrongGeometry;
    return report(decode_rows(rows, frames, frame_stride, out, out_stride), failure);
} catch (const std::bad_alloc&) {
    return kOutOfMemory;
}

int64_t zipccl_cpu_decode_reduce(const ZipcclGeometry* g, const uint8_t* header, const uint8_t* frames,
                                 int64_t frame_stride, const uint8_t* own, int64_t own_index, uint8_t* out,
                                 int64_t num_rows, int64_t* failure, int32_t num_threads, int32_t isa) try {
    const Rows rows{g, choose(g, isa), header, num_rows, own_index, num_threads};
    if (!rows.ops) return kWrongGeometry;
    return report(decode_reduce_rows(rows, frames, frame_stride, own, out), failure);
} catch (const std::bad_alloc&) {
    return kOutOfMemory;
}

}  // extern "C"
