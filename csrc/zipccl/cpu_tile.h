// One tile: sections, block headers, escapes and their spill (docs/format.md, sections 4 and 5).
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "cpu_level2.h"

namespace zipccl {

enum { kMaxTileBlocks = 32, kMaxBytePlanes = 3, kMaxBlockBytes = 4 * kBlockElems };

// What is wrong with a frame, in the order in which readers look. ds_zipccl/kernels/frame_errors.py has the words.
enum FailureKind : int64_t {
    kSound = 0,
    kBadHeader = 1,
    kBadBlockCount = 2,
    kBadTileCount = 3,
    kBadWindow = 4,
    kBadSpill = 5
};

struct Tile {
    const ZipcclGeometry* g;
    int64_t index;

    bool last() const { return index == g->num_tiles - 1; }
    int num_blocks() const { return static_cast<int>(last() ? g->last_blocks : g->tile_blocks); }
    int64_t offset() const { return g->tiles_offset + index * g->tile_bytes; }
    int64_t escapes() const { return last() ? g->last_escapes_offset : g->escapes_offset; }
    uint32_t escapes_capacity() const {
        return static_cast<uint32_t>(last() ? g->last_escapes_capacity : g->escapes_capacity);
    }
    int64_t codes() const { return last() ? g->last_codes_offset : g->codes_offset; }
    int64_t extra() const { return last() ? g->last_extra_offset : g->extra_offset; }
    int64_t planes() const { return last() ? g->last_planes_offset : g->planes_offset; }
    int64_t block_planes() const { return g->byte_planes * kBlockElems; }
    int64_t block_bytes() const { return g->itemsize * kBlockElems; }
    // What a level decides: bytes of a block's codes, the most that a block has behind them, and the limits of its header.
    bool level2() const { return g->level == 2; }
    int64_t code_bytes() const { return level2() ? kCode2Bytes : int64_t{kCodeBytes}; }
    uint32_t max_escapes() const { return level2() ? kStreamBytes : uint32_t{kBlockElems}; }
    uint32_t top_mode() const { return level2() ? kTopMode2 : uint32_t{kZeroMode}; }
    int64_t top_lo() const { return level2() ? kTopLo2 : (1 << g->exponent_bits) - 8; }
    int64_t first_elem() const { return index * g->tile_blocks * kBlockElems; }
    // Elements present in block `b`: kBlockElems but in the frame's last block.
    int64_t block_elems(int b) const {
        return std::min<int64_t>(kBlockElems, g->numel - first_elem() - b * kBlockElems);
    }
    int64_t group() const { return index / g->group_tiles; }
    int64_t pool_offset() const { return g->pools_offset + group() * g->pool_bytes; }
    uint32_t pool_bytes() const {
        return static_cast<uint32_t>(group() == g->num_groups - 1 ? g->last_pool_bytes : g->pool_bytes);
    }
};

// A thread's room for a tile's sections up to the codes, with more escapes than slots and what a block operation may
// touch behind them; taken at first use.
class TileBuffer {
  public:
    uint8_t* get() {
        if (!bytes_) bytes_.reset(new (std::align_val_t{64}) uint8_t[kBytes]);
        return bytes_.get();
    }

  private:
    enum {
        kBytes = kTileHeaderBytes + kBlockHeaderBytes * kMaxTileBlocks + (kMaxTileBlocks + 1) * kStreamBytes + kEscapeSlack
    };
    struct Delete {
        void operator()(uint8_t* bytes) const { ::operator delete[](bytes, std::align_val_t{64}); }
    };
    std::unique_ptr<uint8_t[], Delete> bytes_;
};

// Asks for bytes that are needed soon; past the end of the memory, too: that does nothing.
ZIPCCL_INLINE void fetch_ahead(const uint8_t* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

// Section 5, for a block of which `num_present` elements exist.
inline uint32_t window_base(const Statistics& s, int64_t num_present, int64_t given_lo, int64_t top, uint32_t* mode) {
    const uint32_t n = s.num_nonzero, sum = s.sum;
    *mode = 1024 * (num_present - n) > 26 * num_present ? kZeroMode : kWindowMode;
    if (given_lo >= 0) return static_cast<uint32_t>(std::min(given_lo + *mode, top));
    const bool spread = uint64_t{n} * s.sum_squares > uint64_t{sum} * sum + 3 * n * n;
    const uint32_t below = (*mode == kZeroMode ? (spread ? 29 : 34) : (spread ? 36 : 43)) * n;
    if (n == 0 || 10 * sum < below) return 0;
    return std::min((10 * sum - below) / (10 * n), static_cast<uint32_t>(top));
}

// A block that is ready for encode_codes.
struct PreparedBlock {
    alignas(64) uint8_t exponents[kBlockElems], extra[kBlockElems], planes[kMaxBytePlanes * kBlockElems];
    uint32_t lo, mode;
};

// Splits block `b` of a tile of the row `x`, its byte planes to `planes`, and chooses its window.
inline void prepare_block(const Tile& tile, const BlockOps& ops, const uint8_t* x, int b, uint8_t* planes,
                          PreparedBlock& block) {
    alignas(64) uint8_t padded[kMaxBlockBytes];
    const uint8_t* in = x + tile.first_elem() * tile.g->itemsize + b * tile.block_bytes();
    const int64_t present = tile.block_elems(b);
    if (present < kBlockElems) {
        std::memset(padded, 0, sizeof(padded));
        std::memcpy(padded, in, present * tile.g->itemsize);
        in = padded;
    }
    if (ops.fetch_blocks_ahead) fetch_ahead(in + ops.fetch_blocks_ahead * tile.block_bytes(), tile.block_bytes());
    ops.split(in, block.exponents, planes, block.extra);
    const Statistics statistics = ops.statistics(block.exponents);
    block.lo = tile.level2() ? window_base2(statistics, present, &block.mode)
                             : window_base(statistics, present, tile.g->window_lo, tile.top_lo(), &block.mode);
    for (int64_t e = present; e < kBlockElems; ++e)  // absent: code 1, at level 2 a first code
        block.exponents[e] = static_cast<uint8_t>(block.lo + (tile.level2() ? 3 : 1));
}

// Encodes one tile from the row `x` but for its spill offset; with `uncached` past the caches, to be drained. Returns the
// number of escapes; `buffer` holds the tile's header, block headers and all escapes, one behind the other.
inline uint32_t encode_tile(const Tile& tile, const BlockOps& ops, const uint8_t* x, uint8_t* frame, uint8_t* buffer,
                            bool uncached) {
    uint8_t* const base = frame + tile.offset();
    PreparedBlock blocks[2];
    const auto prepare = [&](int b) {
        PreparedBlock& block = blocks[b % 2];
        prepare_block(tile, ops, x, b, uncached ? block.planes : base + tile.planes() + b * tile.block_planes(), block);
    };
    prepare(0);
    uint32_t count = 0;
    for (int b = 0; b < tile.num_blocks(); ++b) {
        // The next block's statistics wait for their last sums while this block's codes keep the units busy.
        if (b + 1 < tile.num_blocks()) prepare(b + 1);
        const PreparedBlock& block = blocks[b % 2];
        alignas(64) uint8_t packed[2 * kCodeBytes];
        uint8_t* const codes = base + tile.codes() + b * tile.code_bytes();
        uint8_t* const extra = base + tile.extra() + b * kCodeBytes;
        const uint32_t escaped = ops.encode_codes(block.exponents, block.lo, block.mode, uncached ? packed : codes,
                                                  buffer + tile.escapes() + count);
        if (tile.g->extra_plane) ops.pack(block.extra, uncached ? packed + kCodeBytes : extra);
        if (uncached) {
            ops.copy_uncached(packed, codes, tile.code_bytes());
            if (tile.g->extra_plane) ops.copy_uncached(packed + kCodeBytes, extra, kCodeBytes);
            ops.copy_uncached(block.planes, base + tile.planes() + b * tile.block_planes(), tile.block_planes());
        }
        store<uint32_t>(buffer + kTileHeaderBytes + kBlockHeaderBytes * b, block.lo | block.mode << 8 | escaped << 16);
        count += escaped;
    }
    std::memset(buffer, 0, kTileHeaderBytes);
    store<uint32_t>(buffer, count);
    if (count < tile.escapes_capacity())
        std::memset(buffer + tile.escapes() + count, 0, tile.escapes_capacity() - count);
    if (uncached)
        ops.copy_uncached(buffer, base, tile.codes());
    else
        std::memcpy(base, buffer, tile.codes());
    return count;
}

// Reads one tile block by block and never outside the frame, whatever its bytes are.
class TileReader {
  public:
    // Checks all that can be told before the codes are read. `buffer` is used when a part of the escapes lies in the
    // sub-pool.
    FailureKind open(const Tile& tile, const BlockOps& ops, const uint8_t* frame, TileBuffer& buffer) {
        ops_ = &ops;
        tile_ = tile;
        base_ = frame + tile.offset();
        uint64_t sum = 0;
        bool sound = true;
        for (int b = 0; b < tile.num_blocks(); ++b) {
            const uint32_t head = block_head(b);
            sum += head >> 16;
            sound &= head >> 16 <= tile.max_escapes() && (head >> 8 & 255) <= tile.top_mode() && (head & 255) <= tile.top_lo();
        }
        const uint32_t count = load<uint32_t>(base_);
        if (!sound || sum != count || spill_end() > tile.pool_bytes() || within_word()) return diagnose();
        // Past the slots lie at least kCodeBytes + kBlockElems bytes of the tile, so that a block with more escape
        // codes than its header says is read inside the frame too, before it is found out. (Level 2 reads a copy.)
        static_assert(kCodeBytes + kBlockElems >= kBlockElems + kEscapeSlack,
                      "reads past the escape slots stay in the tile");
        escapes_ = base_ + tile.escapes();
        if (count > tile.escapes_capacity()) {
            std::memcpy(buffer.get(), escapes_, tile.escapes_capacity());
            std::memcpy(buffer.get() + tile.escapes_capacity(), frame + tile.pool_offset() + load<uint32_t>(base_ + 4),
                        count - tile.escapes_capacity());
            escapes_ = buffer.get();
        }
        return kSound;
    }

    // Decodes block `b` (blocks in order) to all kBlockElems elements of `x`.
    FailureKind read(int b, uint8_t* x) {
        alignas(64) uint8_t exponents[kBlockElems], extra[kBlockElems];
        const uint32_t head = block_head(b);
        if (ops_->fetch_blocks_ahead) {
            fetch(tile_.codes(), tile_.code_bytes(), b + ops_->fetch_blocks_ahead);
            if (tile_.g->extra_plane) fetch(tile_.extra(), kCodeBytes, b + ops_->fetch_blocks_ahead);
            fetch(tile_.planes(), tile_.block_planes(), b + ops_->fetch_blocks_ahead);
        }
        const uint8_t* escapes = escapes_;
        uint8_t stream[kStreamBytes + kEscapeSlack];
        if (tile_.level2()) {
            std::memcpy(stream, escapes_, head >> 16);
            std::memset(stream + (head >> 16), 0, sizeof(stream) - (head >> 16));
            escapes = stream;
        }
        const uint32_t count = ops_->decode_codes(base_ + tile_.codes() + b * tile_.code_bytes(), head & 255,
                                                  head >> 8 & 255, escapes, exponents);
        if (count != head >> 16) return diagnose();
        escapes_ += count;
        if (tile_.g->extra_plane) ops_->unpack(base_ + tile_.extra() + b * kCodeBytes, extra);
        ops_->join(exponents, base_ + tile_.planes() + b * tile_.block_planes(), extra, x);
        return kSound;
    }

    // End of the tile's spill in its sub-pool, 0 if it has none.
    uint64_t spill_end() const {
        const uint32_t count = load<uint32_t>(base_), capacity = tile_.escapes_capacity();
        return count > capacity ? static_cast<uint64_t>(load<uint32_t>(base_ + 4)) + (count - capacity) : 0;
    }

  private:
    // Level 2: streams, and so spills, are whole words.
    bool within_word() const { return tile_.level2() && spill_end() % 4 != 0; }

    // A section of block `b`; past the tile's last block that is the next section, or the next tile.
    void fetch(int64_t section, int64_t block_bytes, int b) const {
        fetch_ahead(base_ + section + b * block_bytes, block_bytes);
    }
    uint32_t block_head(int b) const { return load<uint32_t>(base_ + kTileHeaderBytes + kBlockHeaderBytes * b); }

    // The first reason, in the reference's order, why this tile is corrupt.
    FailureKind diagnose() const {
        uint64_t sum = 0;
        bool windows = true;
        for (int b = 0; b < tile_.num_blocks(); ++b) {
            const uint32_t head = block_head(b);
            if (!tile_.level2()) {
                uint8_t codes[kBlockElems];
                ops_->unpack(base_ + tile_.codes() + b * kCodeBytes, codes);
                if (std::count(codes, codes + kBlockElems, 0) != static_cast<int64_t>(head >> 16)) return kBadBlockCount;
            }
            sum += head >> 16;
            windows &= (head >> 8 & 255) <= tile_.top_mode() && (head & 255) <= tile_.top_lo();
        }
        if (sum != load<uint32_t>(base_)) return kBadTileCount;
        if (!windows) return kBadWindow;
        return tile_.level2() && spill_end() <= tile_.pool_bytes() && !within_word() ? kBadBlockCount : kBadSpill;
    }

    Tile tile_{};
    const BlockOps* ops_ = nullptr;
    const uint8_t* base_ = nullptr;
    const uint8_t* escapes_ = nullptr;
};

}  // namespace zipccl
