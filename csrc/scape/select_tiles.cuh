// How a selection (select.cuh) is divided among warps and lanes, and what it keeps between its steps.
//
// A tile of 512 elements belongs to a warp, which looks at four neighbours a lane at a time; tiles begin at multiples of four. A tile notes
// up to 64 keys as 9 bits of position, 4 of first digit (inside the bracket) and 19 bits of key; one with more (many equal keys) looks at
// its elements again in the later steps.
#ifndef SCAPE_SELECT_TILES_CUH
#define SCAPE_SELECT_TILES_CUH

#include "device.cuh"

namespace scape {

constexpr u32 kTileElems = 512, kMaxNotes = 64, kBracket = 16;
constexpr u32 kSelectThreads = 512, kSelectWarps = kSelectThreads / kWarp;
constexpr u32 kAtOnce = 4 * kWarp, kAhead = 2;              // elements that a warp looks at; and how many such it has on the way
constexpr u32 kLowBits = 19, kLowMask = (1u << kLowBits) - 1;
constexpr u32 kThirdBits = 10, kThirdSize = 1u << kThirdBits;     // first digits as in rule.h; the second one has 9 bits

constexpr u32 kTileLines = kTileElems / kWarp;

// A segment whose coordinates have to be chosen, and how far that is. Filled in by the kernels, but for the first two lines.
struct Search {
    i64 start, end, count;                              // of its tiles, a multiple of four; one past its last element; to choose
    int first_tile, num_tiles, first_group, skip;       // skip: elements between `start` and its first one
    i64 wanted;      // of the keys with the digits of `prefix`
    u32 prefix;      // digits that are settled
    u32 lo, hi;      // bracket, in values of the first digit
    u32 above;       // keys above the bracket
    u32 equal;       // keys that are the last one, where all digits are settled
    u32 again;       // the bracket was wrong
    u32 num_done;    // tiles, in the present step
    u32 unused;
};

// Tiles of one search whose notes a CTA looks at in the later steps, one a lane.
struct Group {
    int first_tile, num;
    i64 search;
};

struct Scratch {
    const int* search_of_tile;
    const Group* groups;
    Search* searches;
    u32* histograms;     // [searches][8192], zeroed
    u32* notes;          // [tiles][kMaxNotes]
    u32* num_notes;      // [tiles]
    u32* num_equal;      // [tiles]
    u32* equal_before;   // [groups]
    i64 num_tiles, num_groups;
    i64 by_fours;        // everything as long as the partition is aligned to four elements
};

struct Tile {
    i64 start;
    u32 skip, num;       // its elements: start + skip .. start + num - 1
};

__device__ __forceinline__ Tile tile_of(const Search& search, i64 t) {
    const i64 start = search.start + (t - search.first_tile) * kTileElems, left = search.end - start;
    return {start, t == search.first_tile ? (u32)search.skip : 0, left < (i64)kTileElems ? (u32)left : kTileElems};
}

// Of a tile's 16 lines of 32 elements, how many are sampled: 1, 4 or, where the search is small or is done again, all, as a power of two.
__device__ __forceinline__ u32 log_sampled(const Search& s) {
    const bool is_small = s.end - s.start < 1 << 14;
    return s.again || is_small ? 4 : s.count < 1 << 12 ? 2 : 0;
}

// What other CTAs have written, or added up, in the same kernel.
__device__ __forceinline__ u32 load_fresh(const u32* p) { return *(const volatile u32*)p; }

#ifdef ZIPSCAPE_EMULATE
__device__ __forceinline__ void fence() {}
#else
__device__ __forceinline__ void fence() { __threadfence(); }
#endif

// All threads, after what they wrote for `num` tiles of a search: whether all other tiles of it were done before. `shared`: a word.
__device__ __forceinline__ bool is_last(Search& search, u32 num, u32* shared) {
    fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool last = atomicAdd(&search.num_done, num) + num == (u32)search.num_tiles;
        if (last) search.num_done = 0;
        *shared = last;
    }
    __syncthreads();
    fence();
    return *shared != 0;
}

__device__ __forceinline__ u32 key_of(const Select& c, u32 r, u32 q, bool is_overdue) {
    return sort_key(c.square ? residual_score(with_bits(r), with_bits(q)) : with_bits(r), is_overdue);
}

// Four neighbours of a lane as they lie in memory, so that none of its loads waits for another.
struct Four {
    u32 r[4], q[4], last[4];        // last: two in a word where they have 2 bytes
    u32 valid;                      // bit e: whether there is an element e

    __device__ __forceinline__ void load(const Select& c, i64 at) {
        valid = 15;
        load_four(r, c.rank_by + at);
        if (c.square) load_four(q, c.square + at);
    }
    __device__ __forceinline__ void load_lasts(const Select& c, i64 at, int bytes) {
        if (bytes == 4) {
            load_four(last, (const u32*)c.last_sync + at);
        } else {
            const uint2 two = *(const uint2*)((const u16*)c.last_sync + at);
            last[0] = two.x, last[1] = two.y;
        }
    }
    // Those of the tile only; `at` counts from its start.
    __device__ __forceinline__ void load_some(const Select& c, const Tile& tile, u32 at) {
        valid = 0;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            r[e] = q[e] = last[e] = 0;
            if (at + e < tile.skip || at + e >= tile.num) continue;
            const i64 i = tile.start + at + e;
            valid |= 1u << e;
            r[e] = bits_of(c.rank_by[i]);
            if (c.square) q[e] = bits_of(c.square[i]);
            const u32 raw = load_last(c.last_sync, i, c.last_bytes);
            if (c.last_bytes == 4)
                last[e] = raw;
            else
                last[e / 2] |= raw << 16 * (e % 2);
        }
    }
    __device__ __forceinline__ bool is_overdue(const Select& c, u32 e) const {
        return age_of(c.last_bytes == 4 ? last[e] : last[e / 2] >> 16 * (e % 2), c.last_bytes, c.step) >= c.max_age;
    }
    __device__ __forceinline__ void keys(const Select& c, u32 (&key)[4]) const {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) key[e] = key_of(c, r[e], q[e], is_overdue(c, e));
    }
};

// Asks for a whole tile that is looked at soon to be brought nearer.
__device__ __forceinline__ void fetch_tile(const Select& c, const Scratch& s, const Tile& tile) {
    if (!s.by_fours || tile.skip || tile.num < kTileElems || lane_id() > 2) return;
    const u8* from = (const u8*)c.rank_by + 4 * tile.start;
    u32 bytes = 4 * kTileElems;
    if (lane_id() == 1) {
        if (!c.square) return;
        from = (const u8*)c.square + 4 * tile.start;
    } else if (lane_id() == 2) {
        from = (const u8*)c.last_sync + c.last_bytes * tile.start, bytes = c.last_bytes * kTileElems;
        const u32 off = (u32)(u64)from % 16;            // 8, where they have two bytes
        if (off) from += 16 - off, bytes -= 16;
    }
    fetch_to_l2(from, bytes);
}

// Calls visit(fours, place of the lane's first element in the tile), as a warp, for the elements of a tile in order; the places of a lane's
// next four are kAtOnce further on.
template <class Visit>
__device__ __forceinline__ void tile_fours(const Select& c, const Scratch& s, const Tile& tile, const Visit& visit) {
    const bool is_whole = s.by_fours && tile.skip == 0 && tile.num == kTileElems;
    for (u32 first = 4 * lane_id(); first < tile.num + 4 * lane_id(); first += kAhead * kAtOnce) {
        Four fours[kAhead];
        if (is_whole) {
#pragma unroll
            for (u32 j = 0; j < kAhead; ++j) fours[j].load(c, tile.start + first + j * kAtOnce);
            if (c.last_bytes == 4) {
#pragma unroll
                for (u32 j = 0; j < kAhead; ++j) fours[j].load_lasts(c, tile.start + first + j * kAtOnce, 4);
            } else {
#pragma unroll
                for (u32 j = 0; j < kAhead; ++j) fours[j].load_lasts(c, tile.start + first + j * kAtOnce, 2);
            }
        } else {
#pragma unroll
            for (u32 j = 0; j < kAhead; ++j) fours[j].load_some(c, tile, first + j * kAtOnce);
        }
        visit(fours, first);
    }
}

// visit(bits of those that are valid, four keys, place of the first in the tile)
template <class Visit>
__device__ __forceinline__ void tile_keys(const Select& c, const Scratch& s, const Tile& tile, const Visit& visit) {
    tile_fours(c, s, tile, [&](const Four(&fours)[kAhead], u32 at) {
#pragma unroll
        for (u32 j = 0; j < kAhead; ++j) {
            u32 key[4];
            fours[j].keys(c, key);
            visit(fours[j].valid, key, at + j * kAtOnce);
        }
    });
}

// Of elements that are marked in the lanes' `mine` (bit e: its e-th of four), in order: how many lie before this lane's, and in all.
__device__ __forceinline__ u32 before_fours(u32 mine, u32& total) {
    u32 before = 0;
    total = 0;
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
        const u32 lanes = __ballot_sync(kAllLanes, mine >> e & 1);
        before += __popc(lanes & ((1u << lane_id()) - 1));
        total += __popc(lanes);
    }
    return before;
}

// What a lane works with in the later steps: a tile of the CTA's group, if there are as many.
struct Lane {
    Group group;
    i64 t;
    u32 num;        // of its notes; 0 where there is no tile, or none in question

    __device__ __forceinline__ Lane(const Scratch& s) : group(s.groups[blockIdx.x]) {
        t = group.first_tile + (i64)threadIdx.x;
        num = has_tile() ? s.num_notes[t] : 0;
    }
    __device__ __forceinline__ bool has_tile() const { return threadIdx.x < (u32)group.num; }
    __device__ __forceinline__ bool is_noted() const { return num <= kMaxNotes; }

    // visit(key, place) for every key that the tile noted, in order of places. lo: the bracket's.
    template <class Visit>
    __device__ __forceinline__ void each_note(const Scratch& s, u32 lo, const Visit& visit) const {
        const uint4* const row = (const uint4*)(s.notes + t * kMaxNotes);
        for (u32 i = 0; i < num; i += 4) {
            const uint4 four = row[i / 4];
            const u32 notes[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (i + j < num) visit(((notes[j] >> kLowBits & (kBracket - 1)) + lo) << kLowBits | (notes[j] & kLowMask), notes[j] >> 23);
        }
    }
    // work(tile, its lane), as a warp, for each of the warp's tiles that could not note all its keys.
    template <class Work>
    __device__ __forceinline__ void each_full_tile(const Search& search, const Work& work) const {
        for (u32 full = __ballot_sync(kAllLanes, !is_noted()); full; full &= full - 1) {
            const u32 lane = (u32)__ffs((int)full) - 1;
            work(tile_of(search, t - lane_id() + lane), lane);
        }
    }
};

// Which scores lie below or above a search's bracket so clearly that an approximation of them says so. By whether it is overdue.
struct Limits {
    float below, above, overdue_below, overdue_above;

    __device__ __forceinline__ explicit Limits(const Search& search) {
        constexpr float kSlack = 1e-4f, kSmallest = 1e-30f, kLargest = 3e38f, kAll = -1.0f;
        const u32 overdue = 1u << (31 - kLowBits), end = search.hi + 1;
        const float lo = with_bits((search.lo & (overdue - 1)) << kLowBits), hi = with_bits((end & (overdue - 1)) << kLowBits);
        const float low = lo < kSmallest ? 0.0f : (lo > kLargest ? kLargest : lo) * (1.0f - kSlack);
        const float high = (hi < kSmallest ? kSmallest : hi) * (1.0f + kSlack);         // NaN: none is clear
        const float none = with_bits(0x7F800000u);
        below = search.lo < overdue ? low : none, overdue_below = search.lo < overdue ? 0.0f : low;
        above = end < overdue ? high : none, overdue_above = end <= overdue ? kAll : end < 2 * overdue ? high : none;
    }
};

__device__ __forceinline__ bool in_bracket(const Search& search, u32 key) {
    return key >> kLowBits >= search.lo && key >> kLowBits <= search.hi;
}

__device__ __forceinline__ u32* histogram_of(const Scratch& s, i64 search) { return s.histograms + search * digit_size(0); }

// Runs work(first tile, end, search) over this CTA's share of all tiles, search after search, and adds the CTA's histogram of 8,192 counts
// to the search's; the CTA that is the last at a search calls finish(search, its histogram). Searches for which skip(search) holds are left
// out.
template <class Skip, class Work, class Finish>
__device__ __forceinline__ void over_tiles(const Scratch& s, u32* histogram, const Skip& skip, const Work& work, const Finish& finish) {
    __shared__ u32 flag;
    i64 t = s.num_tiles * blockIdx.x / gridDim.x;
    const i64 end = s.num_tiles * (blockIdx.x + 1) / gridDim.x;
    bool is_clear = false;
    for (int number = t < end ? s.search_of_tile[t] : 0; t < end; ++number) {
        const Search search = s.searches[number];
        const i64 last = (i64)search.first_tile + search.num_tiles, stop = last < end ? last : end;
        if (!skip(search)) {
            for (u32 d = threadIdx.x; d < digit_size(0) && !is_clear; d += kSelectThreads) histogram[d] = 0;
            is_clear = true;
            __syncthreads();
            work(t, stop, search);
            __syncthreads();
            u32* const target = histogram_of(s, number);
            for (u32 d = threadIdx.x; d < digit_size(0); d += kSelectThreads) {
                const u32 count = histogram[d];
                if (count) atomicAdd(&target[d], count), histogram[d] = 0;
            }
            if (is_last(s.searches[number], (u32)(stop - t), &flag)) finish(s.searches[number], target);
        }
        t = stop;
    }
}

}  // namespace scape

#endif  // SCAPE_SELECT_TILES_CUH
