// How a selection (select.cuh) is divided among warps and lanes, and what it keeps between its steps.
//
// A tile of 512 elements belongs to a warp, which looks at four neighbours a lane at a time; tiles begin at multiples of four. A tile notes
// up to 64 keys: 9 bits of place, and what the key lies above the bracket's lower end in 23 bits. Where the bracket is too wide for those,
// keys are worked out once more from the places. A tile with more keys (many equal ones) looks at its elements again in the later steps.
#ifndef SCAPE_SELECT_TILES_CUH
#define SCAPE_SELECT_TILES_CUH

#include "device.cuh"

namespace scape {

constexpr u32 kTileElems = 512, kMaxNotes = 64, kBracket = 16, kMaxCoarse = 3;
constexpr u32 kSelectThreads = 512, kSelectWarps = kSelectThreads / kWarp;
constexpr u32 kAtOnce = 4 * kWarp, kAhead = 2;              // elements that a warp looks at; and how many such it has on the way
constexpr u32 kNoteBits = 23, kNoteMask = (1u << kNoteBits) - 1;
constexpr u32 kLowBits = 19;                                // those below the first digit, as in rule.h
constexpr u32 kThirdBits = 10;                              // the second digit has 9 bits in a bracket of up to kBracket first digits

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
    u32 coarse;      // the bracket is up to 2^coarse times kBracket wide, and the second digit so much coarser

    __device__ __forceinline__ u32 third_bits() const { return kThirdBits + coarse; }
    __device__ __forceinline__ u32 lowest() const { return lo << kLowBits; }        // key in the bracket
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
    i64 num_tiles, num_groups, num_searches;
    i64 by_fours;        // everything as long as the partition is aligned to four elements

    // How many tiles the searches have that have to be done again. There is no need for that any more where `equal_before` is written.
    __device__ __forceinline__ u32* tiles_again() const { return equal_before; }
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
    return s.again || is_small ? 4 : s.count < 1 << 9 ? 2 : 0;
}

// What other CTAs have written, or added up, in the same kernel.
__device__ __forceinline__ u32 load_fresh(const u32* p) { return *(const volatile u32*)p; }
#ifdef ZIPSCAPE_EMULATE
__device__ __forceinline__ uint4 load_fresh_four(const u32* p) { return *(const uint4*)p; }
#else
__device__ __forceinline__ uint4 load_fresh_four(const u32* p) { return __ldcg((const uint4*)p); }
#endif

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
    if (!*shared) return false;
    fence();
    return true;
}

__device__ __forceinline__ u32 key_of(const Select& c, u32 r, u32 q, bool is_overdue) {
    return sort_key(c.square ? residual_score(with_bits(r), with_bits(q)) : with_bits(r), is_overdue);
}

// What keys are made of, known when compiled: whether there are squares, and the bytes of a last synchronisation; 0: who is overdue is told
// by the sign.
template <bool kHasSquare, int kLastBytes>
struct Kind {
    static constexpr bool kSquare = kHasSquare;
    static constexpr int kLast = kLastBytes;
};

// Keys to a millionth of the score; not where q is negative.
template <class K>
struct AboutKeys {
    u32 step, max_age;

    __device__ __forceinline__ explicit AboutKeys(const Select& c) : step((u32)c.step), max_age((u32)c.max_age) {
        if (K::kLast == 2) step <<= 16, max_age = c.max_age <= 0 ? 0 : c.max_age > 0xffff ? ~0u : max_age << 16;
    }
    // half: where lasts of two bytes lie in a word, which of them
    __device__ __forceinline__ u32 key(u32 r, u32 q, u32 last, u32 half) const {
        u32 score = r;                                  // no arithmetic where there is none to do: it changes a NaN's bits
        if (K::kSquare) score = bits_of(fabsf(with_bits(r)) * about_inverse(about_root(with_bits(q)) + kScoreEps));
        if (K::kLast == 0) return (score & 0x7FFFFFFFu) | (r & 0x80000000u);
        const bool is_overdue = K::kLast == 2 ? step - (half ? last & 0xffff0000u : last << 16) >= max_age
                                              : (int)(step - last) >= (int)max_age;
        return (score & 0x7FFFFFFFu) | (is_overdue ? 0x80000000u : 0);
    }
};

template <class K>
__device__ __forceinline__ u32 key_at(const Select& c, i64 i) {
    const u32 r = bits_of(c.rank_by[i]), last = K::kLast ? load_last(c.last_sync, i, K::kLast) : 0;
    const float score = K::kSquare ? residual_score(with_bits(r), c.square[i]) : with_bits(r);
    return sort_key(score, K::kLast ? age_of(last, K::kLast, c.step) >= c.max_age : r >> 31);
}
// The same where that is seldom done.
__device__ __forceinline__ u32 any_key_at(const Select& c, i64 i) {
    const u32 last = load_last(c.last_sync, i, c.last_bytes), q = c.square ? bits_of(c.square[i]) : 0;
    return key_of(c, bits_of(c.rank_by[i]), q, age_of(last, c.last_bytes, c.step) >= c.max_age);
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
    template <class K>
    __device__ __forceinline__ void load_as(const Select& c, i64 at) {
        load_four(r, c.rank_by + at);
        if (K::kSquare) load_four(q, c.square + at);
        if (K::kLast) load_lasts(c, at, K::kLast);
    }
    __device__ __forceinline__ void load_lasts(const Select& c, i64 at, int bytes) {
        if (bytes == 4) {
            load_four(last, (const u32*)c.last_sync + at);
        } else {
            const uint2 two = *(const uint2*)((const u16*)c.last_sync + at);
            last[0] = two.x, last[1] = two.y;
        }
    }
    // Those of the tile only; `at` counts from its start. bytes: of a last synchronisation, or 0.
    __device__ __forceinline__ void load_some(const Select& c, const Tile& tile, u32 at, bool has_square, int bytes) {
        valid = 0;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            r[e] = q[e] = last[e] = 0;
            if (at + e < tile.skip || at + e >= tile.num) continue;
            const i64 i = tile.start + at + e;
            valid |= 1u << e;
            r[e] = bits_of(c.rank_by[i]);
            if (has_square) q[e] = bits_of(c.square[i]);
            const u32 raw = bytes ? load_last(c.last_sync, i, bytes) : 0;
            if (bytes == 2)
                last[e / 2] |= raw << 16 * (e % 2);
            else
                last[e] = raw;
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
#pragma unroll
            for (u32 j = 0; j < kAhead; ++j) fours[j].load_lasts(c, tile.start + first + j * kAtOnce, c.last_bytes);
        } else {
#pragma unroll
            for (u32 j = 0; j < kAhead; ++j) fours[j].load_some(c, tile, first + j * kAtOnce, c.square, c.last_bytes);
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

    // The group may have as many tiles as the CTA has threads.
    __device__ __forceinline__ Lane(const Scratch& s, const Group& of) : group(of) {
        t = group.first_tile + (i64)threadIdx.x;
        num = has_tile() ? s.num_notes[t] : 0;
    }
    __device__ __forceinline__ bool has_tile() const { return threadIdx.x < (u32)group.num; }
    __device__ __forceinline__ bool is_noted() const { return num <= kMaxNotes; }

    // visit(key, place) for every key that the tile noted, in order of places.
    template <class Visit>
    __device__ __forceinline__ void each_note(const Select& c, const Scratch& s, const Search& search, const Visit& visit) const {
        const i64 start = search.start + (t - search.first_tile) * kTileElems;
        const uint4* const row = (const uint4*)(s.notes + t * kMaxNotes);
        constexpr u32 kAtATime = 8;
        for (u32 i = 0; i < num; i += kAtATime) {
            u32 notes[kAtATime];
#pragma unroll
            for (u32 j = 0; j < kAtATime; j += 4) load_four(notes + j, row + (i + j) / 4);      // there is room for 64
#pragma unroll
            for (u32 j = 0; j < kAtATime; ++j)
                if (i + j < num) {
                    const u32 place = notes[j] >> kNoteBits;
                    visit(search.coarse ? any_key_at(c, start + place) : search.lowest() + (notes[j] & kNoteMask), place);
                }
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

// Approximate keys outside of these need no second look.
constexpr u32 kSlack = 64;
__device__ __forceinline__ u32 first_in_doubt(const Search& search) { return search.lowest() < kSlack ? 0 : search.lowest() - kSlack; }
__device__ __forceinline__ u32 last_in_doubt(const Search& search) {
    const u32 last = (search.hi << kLowBits) + ((1u << kLowBits) - 1);
    return last > ~0u - kSlack ? ~0u : last + kSlack;
}

__device__ __forceinline__ bool in_bracket(const Search& search, u32 key) {
    return key >> kLowBits >= search.lo && key >> kLowBits <= search.hi;
}

__device__ __forceinline__ u32* histogram_of(const Scratch& s, i64 search) { return s.histograms + search * digit_size(0); }

// Runs work(first tile, end, search) over this CTA's share of all tiles, search after search, and adds the CTA's histogram to the search's,
// of up to 8,192 counts: as many as work says; the CTA that is the last at a search calls finish(search, its histogram). again: only
// searches that have to be done again, whose tiles are dealt out among all CTAs anew; nobody changes `again` meanwhile.
template <class Work, class Finish>
__device__ __forceinline__ void over_tiles(const Scratch& s, u32* histogram, bool again, const Work& work, const Finish& finish) {
    constexpr u32 kParts = 64;
    __shared__ u32 shared[kSelectWarps], numbers[kParts], firsts[kParts], stops[kParts], num_parts, flag;
    for (u32 d = threadIdx.x; d < digit_size(0); d += kSelectThreads) histogram[d] = 0;
    begin_in_turn();
    const i64 all = again ? *s.tiles_again() : s.num_tiles;
    const i64 begin = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;
    if (begin == end) return;
    i64 before = 0;                                     // tiles of searches that are looked at
    for (i64 first = again ? 0 : s.search_of_tile[begin]; first < s.num_searches && before < end; first += kParts) {
        const i64 number = first + threadIdx.x;
        const bool is_one = threadIdx.x < kParts && number < s.num_searches && (!again || s.searches[number].again);
        const u32 first_tile = is_one ? (u32)s.searches[number].first_tile : 0, num = is_one ? (u32)s.searches[number].num_tiles : 0;
        u32 total;
        i64 own = before + scan_cta(num, shared, total);
        if (!again) own = is_one ? first_tile : 0, total = 0;
        before += total;
        if (threadIdx.x == 0) num_parts = 0;
        __syncthreads();
        const i64 from = own < begin ? begin : own, to = own + num < end ? own + num : end;
        if (from < to) {
            const u32 i = atomicAdd(&num_parts, 1u);
            numbers[i] = (u32)number, firsts[i] = first_tile + (u32)(from - own), stops[i] = first_tile + (u32)(to - own);
        }
        __syncthreads();
        const u32 parts = num_parts;
        for (u32 i = 0; i < parts; ++i) {
            const u32 search = numbers[i], t = firsts[i], stop = stops[i];
            const u32 size = work((i64)t, (i64)stop, s.searches[search]);
            __syncthreads();
            u32* const target = histogram_of(s, search);
            for (u32 d = threadIdx.x; d < size; d += kSelectThreads) {
                const u32 count = histogram[d];
                if (count) atomicAdd(&target[d], count), histogram[d] = 0;
            }
            if (is_last(s.searches[search], stop - t, &flag)) finish(s.searches[search], target);
        }
        if (!again && (parts < kParts || first + kParts >= s.num_searches)) return;
    }
}

}  // namespace scape

#endif  // SCAPE_SELECT_TILES_CUH
