// How a selection (select.cuh) is divided among warps and lanes, and what it keeps between its steps.
//
// A tile of 1,024 elements belongs to a warp. It notes up to 128 keys as 10 bits of position, 3 of first digit (inside the bracket) and 19
// bits of key; a tile with more (many equal keys) looks at its elements again in the later steps.
#ifndef SCAPE_SELECT_TILES_CUH
#define SCAPE_SELECT_TILES_CUH

#include "device.cuh"

namespace scape {

constexpr u32 kTileElems = 1024, kMaxNotes = 128, kBracket = 8;
constexpr u32 kSelectThreads = 512, kSelectWarps = kSelectThreads / kWarp;
constexpr u32 kSampleStep = 16, kSampleFrom = 1 << 18;      // segments of so many elements are sampled, a line of 32 in 16
constexpr u32 kLowBits = 19, kLowMask = (1u << kLowBits) - 1;

struct Tile {
    i64 start;
    int num, search;
};

// A segment whose coordinates have to be chosen, and how far that is. Filled in by the kernels, but for the first line.
struct Search {
    i64 first_tile, num_tiles, numel, count;
    i64 wanted;      // of the keys with the digits of `prefix`
    u32 prefix;      // digits that are settled
    u32 lo, hi;      // bracket, in values of the first digit
    u32 above;       // keys above the bracket
    u32 equal;       // keys that are the last one, where all digits are settled
    u32 again;       // the bracket was wrong
};

struct Scratch {
    const Tile* tiles;
    Search* searches;
    u32* histograms;     // [searches][8192], zeroed
    u32* notes;          // [tiles][kMaxNotes]
    u32* num_notes;      // [tiles]
    u32* num_equal;      // [tiles]
    i64 num_tiles;
};

__device__ __forceinline__ bool is_sampled(const Search& s) { return s.numel >= (i64)kSampleFrom && !s.again; }

// Calls visit(is valid, key, place in the tile), as a warp, for the elements of a tile in order.
template <class Visit>
__device__ __forceinline__ void tile_keys(const Select& c, const Tile& tile, const Visit& visit) {
    constexpr u32 kAhead = 8;
    for (u32 line = 0; line * kWarp < (u32)tile.num; line += kAhead) {
        float r[kAhead], q[kAhead];
        int age[kAhead];
#pragma unroll
        for (u32 j = 0; j < kAhead; ++j) {
            const u32 at = (line + j) * kWarp + lane_id();
            r[j] = q[j] = 0.0f, age[j] = 0;
            if (at >= (u32)tile.num) continue;
            r[j] = c.rank_by[tile.start + at];
            age[j] = age_at(c.last_sync, tile.start + at, c.last_bytes, c.step);
            if (c.square) q[j] = c.square[tile.start + at];
        }
#pragma unroll
        for (u32 j = 0; j < kAhead; ++j) {
            const u32 at = (line + j) * kWarp + lane_id();
            const float score = c.square ? residual_score(r[j], q[j]) : r[j];
            visit(at < (u32)tile.num, sort_key(score, age[j] >= c.max_age), at);
        }
    }
}

// What a lane that has a tile of its own works with in the later steps.
struct Lane {
    i64 t;
    Tile tile;
    const Search* search;
    u32 num;        // of its notes; 0 where there is no tile, or none in question

    __device__ __forceinline__ Lane(const Scratch& s, i64 t_) : t(t_), search(s.searches), num(0) {
        if (t >= s.num_tiles) return;
        tile = s.tiles[t];
        search = s.searches + tile.search;
        num = s.num_notes[t];
    }
    __device__ __forceinline__ bool is_noted() const { return num <= kMaxNotes; }

    // visit(key, place) for every key that the tile noted, in order of places.
    template <class Visit>
    __device__ __forceinline__ void each_note(const Scratch& s, const Visit& visit) const {
        const uint4* const row = (const uint4*)(s.notes + t * kMaxNotes);
        const u32 lo = search->lo;
        for (u32 i = 0; i < num; i += 4) {
            const uint4 four = row[i / 4];
            const u32 notes[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (i + j < num) visit(((notes[j] >> kLowBits & (kBracket - 1)) + lo) << kLowBits | (notes[j] & kLowMask), notes[j] >> 22);
        }
    }
};

// Calls work(tile, search, its lane) as a warp for each of the warp's tiles that could not note all its keys.
template <class Work>
__device__ __forceinline__ void each_full_tile(const Scratch& s, const Lane& own, const Work& work) {
    for (u32 full = __ballot_sync(kAllLanes, !own.is_noted()); full; full &= full - 1) {
        const u32 lane = (u32)__ffs((int)full) - 1;
        const Tile tile = s.tiles[own.t - lane_id() + lane];
        work(tile, s.searches[tile.search], lane);
    }
}

__device__ __forceinline__ bool in_bracket(const Search& search, u32 key) {
    return key >> kLowBits >= search.lo && key >> kLowBits <= search.hi;
}

// Runs work(first tile, end, search) over this CTA's share of all tiles, search after search, and adds the CTA's histogram of `size` counts
// to the search's, then flush(search's number). Searches for which skip(search) holds are left out.
template <class Skip, class Work, class Flush>
__device__ __forceinline__ void over_tiles(const Scratch& s, u32* histogram, u32 size, const Skip& skip, const Work& work, const Flush& flush) {
    i64 t = s.num_tiles * blockIdx.x / gridDim.x;
    const i64 end = s.num_tiles * (blockIdx.x + 1) / gridDim.x;
    for (u32 d = threadIdx.x; d < size; d += kSelectThreads) histogram[d] = 0;
    while (t < end) {
        const int number = s.tiles[t].search;
        const Search search = s.searches[number];
        const i64 last = search.first_tile + search.num_tiles, stop = last < end ? last : end;
        if (!skip(search)) {
            __syncthreads();
            work(t, stop, search);
            __syncthreads();
            u32* const target = s.histograms + (i64)number * digit_size(0);
            for (u32 d = threadIdx.x; d < size; d += kSelectThreads) {
                const u32 count = histogram[d];
                if (count) atomicAdd(&target[d], count), histogram[d] = 0;
            }
            flush(number);
        }
        t = stop;
    }
}

}  // namespace scape

#endif  // SCAPE_SELECT_TILES_CUH
