// Frames: rows of tensors to frames and back, in parallel over chunks of tiles.
#pragma once

#include <mutex>

#include "common/cpu_threads.h"
#include "cpu_tile.h"

namespace zipccl {

using zipscape::parallel_for;

// The arguments of one call. Strides are bytes between rows; row `skip` is left alone.
struct Rows {
    const ZipcclGeometry* g;
    const BlockOps* ops;
    const uint8_t* header;  // kHeaderBytes, status 0
    int64_t num_rows;
    int64_t skip;
    int64_t num_threads;
    bool uncached = false;  // frames are written past the caches

    // A chunk, the unit of work of a thread, is some tiles of one group: enough chunks to share out, few enough to
    // manage.
    int64_t chunk_tiles() const {
        return std::max<int64_t>(
            1, std::min<int64_t>(8, num_rows * g->num_tiles / (8 * std::max<int64_t>(num_threads, 1))));
    }
    int64_t group_chunks() const {
        return (std::min(g->group_tiles, g->num_tiles) + chunk_tiles() - 1) / chunk_tiles();
    }
    // Chunks of a row; those past the end of the last group are empty.
    int64_t num_chunks() const { return g->num_groups * group_chunks(); }
    int64_t chunk_begin(int64_t chunk) const {
        return chunk / group_chunks() * g->group_tiles + chunk % group_chunks() * chunk_tiles();
    }
    int64_t chunk_end(int64_t chunk) const {
        const int64_t group_end = std::min((chunk / group_chunks() + 1) * g->group_tiles, g->num_tiles);
        return std::min(chunk_begin(chunk) + chunk_tiles(), group_end);
    }
    int64_t row_bytes() const { return g->numel * g->itemsize; }
};

struct Failure {
    int64_t kind = kSound, row = 0, tile = 0, got = 0;
    // Rows in order; in a row runs (a group's tiles but for the frame's last tile, which is a run) in order; in a run
    // by kind.
    int64_t run = 0;

    bool before(const Failure& other) const {
        if (other.kind == kSound) return true;
        if (row != other.row) return row < other.row;
        if (run != other.run) return run < other.run;
        if (kind != other.kind) return kind < other.kind;
        return tile < other.tile;
    }
};

class FirstFailure {
  public:
    void add(FailureKind kind, int64_t row, const Tile& tile, int64_t got) {
        const std::lock_guard<std::mutex> guard(mutex_);
        const Failure failure{kind, row, tile.index, got, 2 * tile.group() + tile.last()};
        if (failure.before(first_)) first_ = failure;
    }
    const Failure& get() const { return first_; }

  private:
    std::mutex mutex_;
    Failure first_;
};

// Spilled escapes of a chunk, until the group's earlier spills are known.
struct ChunkSpill {
    uint32_t need = 0;
    uint64_t total = 0;
    std::vector<uint8_t> bytes;  // at most a sub-pool: what comes after can never be stored
};

struct PoolUse {
    bool overflow = false;
    uint64_t bytes = 0;  // of all spills, stored or not
};

// Second step of encoding: spill offsets are a prefix sum over the group's tiles.
inline PoolUse place_spills(const Rows& rows, int64_t group, const ChunkSpill* chunks, uint8_t* frame) {
    const Tile first{rows.g, group * rows.g->group_tiles};
    uint8_t* pool = frame + first.pool_offset();
    const uint64_t capacity = first.pool_bytes();
    uint64_t used = 0, filled = 0;
    bool overflow = false;
    for (int64_t c = group * rows.group_chunks(); c < (group + 1) * rows.group_chunks(); ++c) {
        if (chunks[c].total == 0) continue;
        const uint8_t* bytes = chunks[c].bytes.data();
        for (int64_t t = rows.chunk_begin(c); t < rows.chunk_end(c); ++t) {
            const Tile tile{rows.g, t};
            uint8_t* head = frame + tile.offset();
            const uint32_t count = load<uint32_t>(head), slots = tile.escapes_capacity();
            if (count <= slots) continue;
            const uint32_t spill = count - slots;
            store<uint32_t>(head + 4, static_cast<uint32_t>(used));
            if (used + spill <= capacity) {
                std::memcpy(pool + used, bytes, spill);
                bytes += spill;
                filled = used + spill;
            } else {
                overflow = true;
            }
            used += spill;
        }
    }
    std::memset(pool + filled, 0, capacity - filled);
    return {overflow, used};
}

// The group's spill need, in units of kSpillUnitBytes a tile.
inline uint32_t spill_need(const Rows& rows, int64_t group, uint64_t spill_bytes) {
    const int64_t num_tiles = std::min(rows.g->group_tiles, rows.g->num_tiles - group * rows.g->group_tiles);
    const uint64_t unit = static_cast<uint64_t>(kSpillUnitBytes * num_tiles);
    return static_cast<uint32_t>((spill_bytes + unit - 1) / unit);
}

inline uint32_t encode_rows(const Rows& rows, const uint8_t* x, int64_t x_stride, uint8_t* frames,
                            int64_t frame_stride) {
    const int64_t num_chunks = rows.num_chunks();
    std::vector<ChunkSpill> spills(static_cast<size_t>(rows.num_rows * num_chunks));
    parallel_for<TileBuffer>(
        rows.num_rows * num_chunks, rows.num_rows * rows.row_bytes(), rows.num_threads,
        [&](TileBuffer& buffer, int64_t item) {
            const int64_t row = item / num_chunks, chunk = item % num_chunks;
            if (row == rows.skip) return;
            ChunkSpill& spill = spills[static_cast<size_t>(item)];
            for (int64_t t = rows.chunk_begin(chunk); t < rows.chunk_end(chunk); ++t) {
                const Tile tile{rows.g, t};
                const uint32_t count =
                    encode_tile(tile, *rows.ops, x + row * x_stride, frames + row * frame_stride, buffer.get(),
                                rows.uncached);
                const uint32_t nb = static_cast<uint32_t>(tile.num_blocks()), slots = tile.escapes_capacity();
                spill.need = std::max(spill.need, (count + nb - 1) / nb);
                if (count <= slots) continue;
                spill.total += count - slots;
                const uint8_t* escapes = buffer.get() + tile.escapes();
                if (spill.total <= tile.pool_bytes())
                    spill.bytes.insert(spill.bytes.end(), escapes + slots, escapes + count);
            }
            if (rows.uncached) rows.ops->drain();
        });
    uint32_t need = 0, overflowed = 0, spill = 0;
    for (int64_t row = 0; row < rows.num_rows; ++row) {
        if (row == rows.skip) continue;
        uint8_t* frame = frames + row * frame_stride;
        const ChunkSpill* chunks = spills.data() + row * num_chunks;
        uint32_t row_need = 0, row_overflow = 0, row_spill = 0;
        for (int64_t c = 0; c < num_chunks; ++c) row_need = std::max(row_need, chunks[c].need);
        for (int64_t group = 0; group < rows.g->num_groups; ++group) {
            const PoolUse use = place_spills(rows, group, chunks, frame);
            if (use.overflow) row_overflow = kOverflowBit;
            row_spill = std::max(row_spill, spill_need(rows, group, use.bytes));
        }
        std::memcpy(frame, rows.header, kHeaderBytes);
        store<uint32_t>(frame + kStatusOffset, row_need | row_overflow | row_spill << kSpillShift);
        need = std::max(need, row_need);
        overflowed |= row_overflow;
        spill = std::max(spill, row_spill);
    }
    return need | overflowed | spill << kSpillShift;
}

// The first row (but `skip`) whose header is not the expected one or says overflow; num_rows if there is none. A given window is its
// writer's: any valid one will do, at level 2 none.
inline int64_t first_bad_header(const Rows& rows, const uint8_t* frames, int64_t frame_stride) {
    const int top = rows.g->level == 2 ? 0 : (1 << rows.g->exponent_bits) - 7;
    for (int64_t row = 0; row < rows.num_rows; ++row) {
        if (row == rows.skip) continue;
        const uint8_t* frame = frames + row * frame_stride;
        if (std::memcmp(frame, rows.header, kWindowOffset) != 0 || frame[kWindowOffset] > top ||
            std::memcmp(frame + kWindowOffset + 1, rows.header + kWindowOffset + 1, kStatusOffset - kWindowOffset - 1) != 0 ||
            (load<uint32_t>(frame + kStatusOffset) & kOverflowBit) != 0 ||
            std::memcmp(frame + kStatusOffset + 4, rows.header + kStatusOffset + 4, kHeaderBytes - kStatusOffset - 4) !=
                0)
            return row;
    }
    return rows.num_rows;
}

inline Failure decode_rows(const Rows& rows, const uint8_t* frames, int64_t frame_stride, uint8_t* out,
                           int64_t out_stride) {
    const int64_t num_chunks = rows.num_chunks();
    const int64_t num_sound = first_bad_header(rows, frames, frame_stride);
    FirstFailure failure;
    const auto work = [&](TileBuffer& buffer, int64_t item) {
        const int64_t row = item / num_chunks, chunk = item % num_chunks;
        if (row == rows.skip) return;
        for (int64_t t = rows.chunk_begin(chunk); t < rows.chunk_end(chunk); ++t) {
            const Tile tile{rows.g, t};
            TileReader reader;
            FailureKind kind = reader.open(tile, *rows.ops, frames + row * frame_stride, buffer);
            uint8_t* x = out + row * out_stride + tile.first_elem() * rows.g->itemsize;
            for (int b = 0; b < tile.num_blocks() && kind == kSound; ++b, x += tile.block_bytes()) {
                const int64_t present = tile.block_elems(b);
                alignas(64) uint8_t padded[kMaxBlockBytes];
                kind = reader.read(b, present < kBlockElems ? padded : x);
                if (present < kBlockElems && kind == kSound) std::memcpy(x, padded, present * rows.g->itemsize);
            }
            if (kind != kSound) failure.add(kind, row, tile, static_cast<int64_t>(reader.spill_end()));
        }
    };
    parallel_for<TileBuffer>(num_sound * num_chunks, num_sound * rows.row_bytes(), rows.num_threads, work);
    if (failure.get().kind == kSound && num_sound < rows.num_rows) return Failure{kBadHeader, num_sound};
    return failure.get();
}

// `rows.skip` is the row taken from `own`. A block is summed over all rows before the next one, so `out` may be `own`.
inline Failure decode_reduce_rows(const Rows& rows, const uint8_t* frames, int64_t frame_stride, const uint8_t* own,
                                  uint8_t* out) {
    const int64_t num_sound = first_bad_header(rows, frames, frame_stride);
    struct Reader {
        TileBuffer buffer;
        TileReader tile;
    };
    FirstFailure failure;
    const auto work = [&](std::vector<Reader>& readers, int64_t chunk) {
        readers.resize(static_cast<size_t>(num_sound));
        for (int64_t t = rows.chunk_begin(chunk); t < rows.chunk_end(chunk); ++t) {
            const Tile tile{rows.g, t};
            bool sound = num_sound == rows.num_rows;
            for (int64_t row = 0; row < num_sound; ++row) {
                if (row == rows.skip) continue;
                Reader& reader = readers[static_cast<size_t>(row)];
                const FailureKind kind = reader.tile.open(tile, *rows.ops, frames + row * frame_stride, reader.buffer);
                if (kind == kSound) continue;
                failure.add(kind, row, tile, static_cast<int64_t>(reader.tile.spill_end()));
                sound = false;
            }
            for (int b = 0; b < tile.num_blocks() && sound; ++b) {
                alignas(64) uint8_t part[kMaxBlockBytes];
                alignas(64) float sum[kBlockElems];
                const int64_t offset = tile.first_elem() * rows.g->itemsize + b * tile.block_bytes();
                const int64_t present_bytes = tile.block_elems(b) * rows.g->itemsize;
                const bool whole = present_bytes == tile.block_bytes();
                for (int64_t row = 0; row < rows.num_rows; ++row) {
                    const uint8_t* source = part;
                    if (row != rows.skip) {
                        const FailureKind kind = readers[static_cast<size_t>(row)].tile.read(b, part);
                        if (kind != kSound) {
                            failure.add(kind, row, tile, 0);
                            sound = false;
                            break;
                        }
                    } else if (whole) {
                        source = own + offset;
                    } else {
                        std::memset(part, 0, sizeof(part));
                        std::memcpy(part, own + offset, present_bytes);
                    }
                    rows.ops->accumulate(source, sum, row == 0);
                }
                if (!sound) break;
                rows.ops->round(sum, whole ? out + offset : part);
                if (!whole) std::memcpy(out + offset, part, present_bytes);
            }
        }
    };
    parallel_for<std::vector<Reader>>(rows.num_chunks(), rows.num_rows * rows.row_bytes(), rows.num_threads, work);
    if (failure.get().kind == kSound && num_sound < rows.num_rows) return Failure{kBadHeader, num_sound};
    return failure.get();
}

}  // namespace zipccl
