// Finding the parts of a frame from its geometry (codec/format.py computed it), and what the kernels share across CTAs.
#ifndef ZIPCCL_FRAME_CUH
#define ZIPCCL_FRAME_CUH

#include "block.cuh"

namespace zipscape {

// The arguments of every kernel. All fields are 8 bytes wide: ds_zipccl/kernels/nvrtc.py fills the same struct.
struct Call {
    ZipcclGeometry g;
    u32 header[kHeaderBytes / 4];      // the frame header, status 0
    const u8* x;                       // encode: input rows. decode_reduce: the own row
    u8* frames;
    u8* out;                           // decode, decode_reduce
    i64 row_stride, frame_stride;      // bytes
    i64 num_rows;
    i64 skip;                          // a row to leave out (decode_reduce: the one taken from x), or -1
    u32* status;                       // encode: [1] need and overflow. decode: [1] kinds of corruption found, ORed
    u32* workspace;                    // encode: workspace_words() words, zero before and after every call
};

// What decode and decode_reduce report, bits of the error word.
enum { kBadHeader = 1, kBadBlockCount = 2, kBadTileCount = 4, kBadWindow = 8, kBadSpill = 16 };

// The sections of one tile.
struct Tile {
    u32 num_blocks, escapes_offset, escapes_capacity, codes_offset, extra_offset, planes_offset;
    i64 offset;                        // in the frame
};

__device__ __forceinline__ Tile find_tile(const ZipcclGeometry& g, u32 tile) {
    Tile t;
    const bool last = tile == (u32)g.num_tiles - 1;
    t.num_blocks = (u32)(last ? g.last_blocks : g.tile_blocks);
    t.escapes_offset = (u32)(last ? g.last_escapes_offset : g.escapes_offset);
    t.escapes_capacity = (u32)(last ? g.last_escapes_capacity : g.escapes_capacity);
    t.codes_offset = (u32)(last ? g.last_codes_offset : g.codes_offset);
    t.extra_offset = (u32)(last ? g.last_extra_offset : g.extra_offset);
    t.planes_offset = (u32)(last ? g.last_planes_offset : g.planes_offset);
    t.offset = g.tiles_offset + (i64)tile * g.tile_bytes;
    return t;
}

// Elements of block `block` of the frame that exist.
__device__ __forceinline__ u32 present_elems(const ZipcclGeometry& g, i64 block) {
    const i64 left = g.numel - block * kBlockElems;
    return left < kBlockElems ? (u32)left : (u32)kBlockElems;
}

__device__ __forceinline__ u32 pool_size(const ZipcclGeometry& g, u32 group) {
    return (u32)(group == (u32)g.num_groups - 1 ? g.last_pool_bytes : g.pool_bytes);
}

__device__ __forceinline__ bool is_aligned(const void* p, u32 bytes) { return ((u64)p & (bytes - 1)) == 0; }

// The row a grid row works on.
__device__ __forceinline__ i64 row_of(const Call& c, u32 index) { return index + (c.skip >= 0 && index >= c.skip); }

// ---- encode's words in the workspace. A counter has 4 words: arrivals, need, overflow, unused.

constexpr u32 kCounterWords = 4;

struct Workspace {
    u32* all_rows;                     // counter of the rows
    u32* row;                          // counter of this row's groups
    u32* groups;                       // [num_groups] arrivals of tiles
    u32* tiles;                        // [num_tiles] escapes + 1, 0 while unknown
};

inline __host__ __device__ i64 workspace_words(i64 num_rows, i64 num_groups, i64 num_tiles) {
    return kCounterWords + num_rows * (kCounterWords + num_groups + num_tiles);
}

__device__ __forceinline__ Workspace find_workspace(const Call& c, u32 row_index) {
    Workspace w;
    w.all_rows = c.workspace;
    w.row = c.workspace + workspace_words(row_index, c.g.num_groups, c.g.num_tiles);
    w.groups = w.row + kCounterWords;
    w.tiles = w.groups + c.g.num_groups;
    return w;
}

}  // namespace zipscape

#endif  // ZIPCCL_FRAME_CUH
