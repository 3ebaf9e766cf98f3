// The numbers a kernel needs to find its way in a frame: the mirror of ds_zipccl/kernels/geometry.py (a test compares
// them). codec/format.py fills them; nothing in csrc/ computes a layout. Shared by the CPU and CUDA sources, also under
// NVRTC.
#ifndef ZIPCCL_GEOMETRY_H
#define ZIPCCL_GEOMETRY_H

#ifdef __CUDACC_RTC__
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;
typedef unsigned char uint8_t;
#else
#include <cstdint>
#endif

// Bytes unless said otherwise. The `last_` fields describe the last tile, which may have fewer blocks.
struct ZipcclGeometry {
    int64_t level;
    int64_t dtype_code;
    int64_t itemsize;
    int64_t exponent_bits;
    int64_t mantissa_bits;
    int64_t byte_planes;
    int64_t extra_plane;
    int64_t window_lo;
    int64_t numel;
    int64_t num_tiles;
    int64_t num_groups;
    int64_t tile_blocks;
    int64_t group_tiles;
    int64_t tiles_offset;
    int64_t tile_bytes;
    int64_t escapes_offset;
    int64_t escapes_capacity;
    int64_t codes_offset;
    int64_t extra_offset;
    int64_t planes_offset;
    int64_t last_blocks;
    int64_t last_escapes_offset;
    int64_t last_escapes_capacity;
    int64_t last_codes_offset;
    int64_t last_extra_offset;
    int64_t last_planes_offset;
    int64_t pools_offset;
    int64_t pool_bytes;
    int64_t last_pool_bytes;
    int64_t spill_per_tile;
    int64_t frame_bytes;
};

// The shape of a block and of the headers (docs/format.md, sections 2-4): what a kernel is written around.
enum {
    kBlockElems = 1024,
    kBlockLanes = 32,
    kLaneElems = 32,
    kCodeBytes = 384,            // one packed 3-bit plane of a block
    kHeaderBytes = 128,
    kWindowOffset = 7,           // one byte, 0 or 1 + given window base
    kStatusOffset = 20,
    kTileHeaderBytes = 16,
    kBlockHeaderBytes = 4,
    kOverflowBit = 1 << 16,
    kNeedMask = kOverflowBit - 1,
    kSpillShift = 17,
    kSpillUnitBytes = 4
};

#endif  // ZIPCCL_GEOMETRY_H
