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
    u64* workspace;                    // encode: workspace_words() words, zeroed once, used by one call after the other
    i64 look_ahead;                    // encode, decode_reduce: multiprocessors of the device
    u64* mail;                         // encode: where stamp << 32 | status goes too, in memory that hosts read; or null
    u64 stamp;
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

// Elements of a tile that exist, and of block `b` of a tile of `tile_elems`.
__device__ __forceinline__ u32 present_elems(const ZipcclGeometry& g, u32 tile) {
    const i64 left = g.numel - (i64)tile * (32 * kBlockElems);
    return left < 32 * kBlockElems ? (u32)left : 32u * kBlockElems;
}

__device__ __forceinline__ u32 present_of(u32 tile_elems, u32 b) {
    const u32 before = b * kBlockElems;
    return tile_elems <= before ? 0 : min(tile_elems - before, (u32)kBlockElems);
}

__device__ __forceinline__ u32 pool_size(const ZipcclGeometry& g, u32 group) {
    return (u32)(group == (u32)g.num_groups - 1 ? g.last_pool_bytes : g.pool_bytes);
}

__device__ __forceinline__ bool is_aligned(const void* p, u32 bytes) { return ((u64)p & (bytes - 1)) == 0; }

// The row a grid row works on.
__device__ __forceinline__ i64 row_of(const Call& c, u32 index) { return index + (c.skip >= 0 && index >= c.skip); }

// ---- encode's workspace: what CTAs tell each other. A message is a value below its tag; a tag no earlier call used marks it as sent.

struct Workspace {
    u64* last_tag;                     // of the calls so far
    u64* row;                          // this row's status
    u64* tiles;                        // [num_tiles] numbers of escapes
    i64 row_stride;                    // words to the same of the next row
};

inline __host__ __device__ i64 workspace_words(i64 num_rows, i64 num_tiles) { return 1 + num_rows * (1 + num_tiles); }

__device__ __forceinline__ Workspace find_workspace(const Call& c, u32 row_index) {
    Workspace w;
    w.last_tag = c.workspace;
    w.row_stride = 1 + c.g.num_tiles;
    w.row = c.workspace + 1 + row_index * w.row_stride;
    w.tiles = w.row + 1;
    return w;
}

__device__ __forceinline__ void send(u64* to, u32 tag, u32 value) { store_message(to, (u64)tag << 32 | value); }

// Waits for a message. Only CTAs of a lower index may be waited for: CTAs start in that order, so the sender runs or is done.
__device__ __forceinline__ u32 receive(const u64* from, u32 tag) {
    u64 message;
    while ((u32)((message = load_message(from)) >> 32) != tag) {}
    return (u32)message;
}

}  // namespace zipscape

#endif  // ZIPCCL_FRAME_CUH
