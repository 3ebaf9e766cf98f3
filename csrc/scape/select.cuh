// Exactly k per segment, without a tensor of scores, all segments at once: keys (rule.h) are computed where they are looked at.
//
//   sample    counts the first digits of every 16th line of a large segment, of all of a small one. From them: a few values of the first
//             digit between which the k-th largest key must lie, or, from a sample, very likely does: the bracket
//   choose    one pass over everything: chosen above the bracket, not below it; keys inside are noted down, and their first two digits
//             counted. From them: these digits of the k-th, if the bracket was right; where it was not, both steps are done again
//             without sampling
//   digit     the third digit, over what was noted
//   equal     equal keys: how many before each tile, where not all of them are taken
//   finish    chosen or not, for what was noted
//
// What follows from a search's counts is worked out by the CTA that is the last to add to them.
#ifndef SCAPE_SELECT_CUH
#define SCAPE_SELECT_CUH

#include "select_tiles.cuh"

namespace scape {

// Takes part of the searches that have to be done again only, or of all.
__device__ __forceinline__ bool is_skipped(const Search& search, bool again) { return again && !search.again; }

// The keys of every 16th line of a search's elements, another one in every tile, for eight tiles. The few elements before the first one may
// be counted with it.
template <class Visit>
__device__ __forceinline__ void sampled_keys(const Select& c, const Search& search, i64 tile, const Visit& visit) {
    constexpr u32 kTiles = 8;
    static_assert(kTileElems / kWarp == kSampleStep, "one line in a tile");
    u32 r[kTiles], q[kTiles], last[kTiles];
    const auto place = [&](u32 j) { return search.start + (tile + j) * kTileElems + (tile + j) % kSampleStep * kWarp + lane_id(); };
#pragma unroll
    for (u32 j = 0; j < kTiles; ++j) {
        const i64 at = place(j);
        r[j] = q[j] = last[j] = 0;
        if (at >= search.end) continue;
        r[j] = bits_of(c.rank_by[at]);
        if (c.square) q[j] = bits_of(c.square[at]);
        last[j] = load_last(c.last_sync, at, c.last_bytes);
    }
#pragma unroll
    for (u32 j = 0; j < kTiles; ++j) {
        const float score = c.square ? residual_score(with_bits(r[j]), with_bits(q[j])) : with_bits(r[j]);
        visit(j, place(j) < search.end, sort_key(score, age_of(last[j], c.last_bytes, c.step) >= c.max_age));
    }
}

// Sums of a histogram from the top: `found(d, sum of the counts above d, count of d)` is called, by one thread, for the largest d at which
// the sum with d reaches `rank` >= 1. Never called if there are not so many. `size`: a multiple of the number of threads, who all call it.
template <class Found>
__device__ __forceinline__ void find_from_top(const u32* histogram, u32 size, i64 rank, u32* shared, const Found& found) {
    const u32 per = size / blockDim.x, top = size - threadIdx.x * per;     // this thread: top - per .. top - 1
    u32 own = 0, total;
    for (u32 j = 1; j <= per; ++j) own += load_fresh(&histogram[top - j]);
    i64 above = scan_cta(own, shared, total);
    if (above >= rank || above + own < rank) return;
    for (u32 j = 1; j <= per; ++j) {
        const u32 count = load_fresh(&histogram[top - j]);
        if (above + count >= rank) {
            found(top - j, above, count);
            return;
        }
        above += count;
    }
}

__device__ __forceinline__ void clear(u32* histogram, u32 size) {
    __syncthreads();
    for (u32 d = threadIdx.x; d < size; d += blockDim.x) histogram[d] = 0;
}

__device__ __forceinline__ void set_bracket(Search& search, u32* histogram) {
    __shared__ u32 shared[kSelectWarps];
    __shared__ u32 ends[2];
    i64 low_rank = search.count, high_rank = search.count;
    if (is_sampled(search)) {
        // The rank in the sample, give or take five times what chance makes of it.
        const float share = (float)search.count / kSampleStep, slack = 5.0f * root(share) + 8.0f;
        low_rank = (i64)(share + slack), high_rank = (i64)(share - slack);
        if (high_rank < 1) high_rank = 1;
    }
    if (threadIdx.x == 0) ends[0] = 0, ends[1] = digit_size(0) - 1;
    __syncthreads();
    find_from_top(histogram, digit_size(0), low_rank, shared, [&](u32 d, i64, u32) { ends[0] = d; });
    find_from_top(histogram, digit_size(0), high_rank, shared, [&](u32 d, i64, u32) { ends[1] = d; });
    clear(histogram, digit_size(0));
    if (threadIdx.x == 0) {
        search.lo = ends[0], search.hi = ends[1];
        if (search.hi - search.lo >= kBracket) search.hi = search.lo + kBracket - 1;     // found wrong, most likely
        search.above = 0;
    }
}

__global__ void __launch_bounds__(kSelectThreads, 2) sample_kernel(const Select c, const Scratch s, bool again) {
    __shared__ u32 histogram[8192];
    const auto count = [&](bool valid, u32 key) {
        if (valid) atomicAdd(&histogram[key >> kLowBits], 1u);
    };
    over_tiles(s, histogram, [&](const Search& search) { return is_skipped(search, again); },
               [&](i64 t, i64 stop, const Search& search) {
                   if (is_sampled(search)) {
                       for (i64 tile = t + warp_id() * 8; tile < stop; tile += kSelectWarps * 8)
                           sampled_keys(c, search, tile - search.first_tile, [&](u32 j, bool valid, u32 key) {
                               count(valid && tile + j < stop, key);
                           });
                       return;
                   }
                   for (i64 tile = t + warp_id(); tile < stop; tile += kSelectWarps)
                       tile_keys(c, s, tile_of(search, tile), [&](u32 valid, const u32 (&key)[4], u32) {
                           for (u32 e = 0; e < 4; ++e) count(valid >> e & 1, key[e]);
                       });
               },
               set_bracket);
}

// The first two digits, from the counts inside the bracket.
__device__ __forceinline__ void settle_two(Search& search, u32* histogram) {
    __shared__ u32 shared[kSelectWarps];
    const i64 wanted = search.count - (i64)load_fresh(&search.above);
    const u32 lo = search.lo << (kLowBits - digit_shift(1));
    if (threadIdx.x == 0) search.again = 1;
    __syncthreads();
    if (wanted > 0)
        find_from_top(histogram, digit_size(0), wanted, shared, [&](u32 d, i64 above, u32) {
            search.again = 0;
            search.prefix = (lo + d) << digit_shift(1), search.wanted = wanted - above;
        });
    clear(histogram, digit_size(0));
}

__global__ void __launch_bounds__(kSelectThreads, 2) choose_kernel(const Select c, const Scratch s, bool again) {
    __shared__ u32 histogram[8192];       // of first two digits inside the bracket
    static_assert(kBracket << (kLowBits - 9) == 8192, "");
    over_tiles(s, histogram, [&](const Search& search) { return is_skipped(search, again); },
               [&](i64 first, i64 stop, const Search& search) {
                   const u32 lo = search.lo << (kLowBits - digit_shift(1));
                   u32 above = 0;
                   for (i64 t = first + warp_id(); t < stop; t += kSelectWarps) {
                       const Tile tile = tile_of(search, t);
                       u32* const notes = s.notes + t * kMaxNotes;
                       u32 num = 0;
                       tile_keys(c, s, tile, [&](u32 valid, const u32 (&key)[4], u32 at) {
                           u32 bytes = 0, inside = 0, total;
#pragma unroll
                           for (u32 e = 0; e < 4; ++e) {
                               const u32 digit = key[e] >> kLowBits;
                               bytes |= (u32)(digit > search.hi) << 8 * e;
                               inside |= (u32)(digit >= search.lo && digit <= search.hi) << e;
                           }
                           inside &= valid;
                           if (valid == 15 && s.by_fours) {
                               *(u32*)(c.chosen + tile.start + at) = bytes;
                               above += __popc(bytes);
                           } else {
#pragma unroll
                               for (u32 e = 0; e < 4; ++e) {
                                   if (!(valid >> e & 1)) continue;
                                   c.chosen[tile.start + at + e] = (u8)(bytes >> 8 * e & 1);
                                   above += bytes >> 8 * e & 1;
                               }
                           }
                           u32 i = num + before_fours(inside, total);
                           num += total;
#pragma unroll
                           for (u32 e = 0; e < 4; ++e) {
                               if (!(inside >> e & 1)) continue;
                               const u32 place = (key[e] >> kLowBits) - search.lo;
                               if (i < kMaxNotes) notes[i] = (at + e) << 22 | place << kLowBits | (key[e] & kLowMask);
                               atomicAdd(&histogram[(key[e] >> digit_shift(1)) - lo], 1u);
                               ++i;
                           }
                       });
                       if (lane_id() == 0) s.num_notes[t] = num;
                   }
                   above = __reduce_add_sync(kAllLanes, above);
                   if (lane_id() == 0 && above) atomicAdd(&s.searches[s.search_of_tile[first]].above, above);
               },
               settle_two);
}

// The histogram of the third digit. In this step and those after it a CTA has a group of tiles, a lane one of them.
__global__ void __launch_bounds__(kThreads) digit_kernel(const Select c, const Scratch s) {
    __shared__ u32 histogram[512], shared[kThreads / kWarp];
    __shared__ u32 flag;
    const Lane own(s);
    Search& search = s.searches[own.group.search];
    const u32 prefix = search.prefix >> digit_shift(1), size = digit_size(2);
    clear(histogram, size);
    __syncthreads();
    const auto count = [&](bool valid, u32 key) {
        if (valid && key >> digit_shift(1) == prefix) atomicAdd(&histogram[key & (size - 1)], 1u);
    };
    if (own.is_noted()) own.each_note(s, search.lo, [&](u32 key, u32) { count(true, key); });
    own.each_full_tile(search, [&](const Tile& tile, u32) {
        tile_keys(c, s, tile, [&](u32 valid, const u32 (&key)[4], u32) {
            for (u32 e = 0; e < 4; ++e) count(valid >> e & 1, key[e]);
        });
    });
    __syncthreads();
    u32* const target = histogram_of(s, own.group.search);
    for (u32 d = threadIdx.x; d < size; d += kThreads)
        if (histogram[d]) atomicAdd(&target[d], histogram[d]);
    if (!is_last(search, (u32)own.group.num, &flag)) return;
    const i64 wanted = search.wanted;
    find_from_top(target, size, wanted, shared, [&](u32 d, i64 above, u32 num) {
        search.prefix |= d, search.wanted = wanted - above, search.equal = num;
    });
}

// How many keys equal to the last one lie before every tile: in its group, and before that. Not needed where all of them are taken.
__global__ void __launch_bounds__(kThreads) equal_kernel(const Select c, const Scratch s) {
    __shared__ u32 shared[kThreads / kWarp];
    __shared__ u32 flag;
    const Lane own(s);
    Search& search = s.searches[own.group.search];
    if (search.equal == search.wanted) return;
    const u32 last = search.prefix;
    u32 num = 0, total;
    if (own.is_noted()) own.each_note(s, search.lo, [&](u32 key, u32) { num += key == last; });
    own.each_full_tile(search, [&](const Tile& tile, u32 lane) {
        u32 equal = 0;
        tile_keys(c, s, tile, [&](u32 valid, const u32 (&key)[4], u32) {
            for (u32 e = 0; e < 4; ++e) equal += (valid >> e & 1) && key[e] == last;
        });
        equal = __reduce_add_sync(kAllLanes, equal);
        if (lane_id() == lane) num = equal;
    });
    const u32 before = scan_cta(num, shared, total);
    if (own.has_tile()) s.num_equal[own.t] = before;
    if (threadIdx.x == 0) s.equal_before[blockIdx.x] = total;
    if (!is_last(search, (u32)own.group.num, &flag)) return;
    const u32 num_groups = ((u32)search.num_tiles + kThreads - 1) / kThreads;
    u32 sum = 0;
    for (u32 start = 0; start < num_groups; start += kThreads) {
        const u32 i = start + threadIdx.x;
        u32* const group = s.equal_before + search.first_group + i;
        const u32 in_order = scan_cta(i < num_groups ? load_fresh(group) : 0, shared, total);
        if (i < num_groups) *group = sum + in_order;
        sum += total;
    }
}

__global__ void __launch_bounds__(kThreads) finish_kernel(const Select c, const Scratch s) {
    const Lane own(s);
    const Search search = s.searches[own.group.search];
    const bool is_all = search.equal == search.wanted;
    const u32 last = search.prefix;
    const i64 before = is_all || !own.has_tile() ? 0 : (i64)s.equal_before[blockIdx.x] + s.num_equal[own.t];
    if (own.is_noted() && own.num) {
        const Tile tile = tile_of(search, own.t);
        i64 left = search.wanted - before;
        own.each_note(s, search.lo, [&](u32 key, u32 at) {
            if (key > last || (key == last && left-- > 0)) c.chosen[tile.start + at] = 1;
        });
    }
    own.each_full_tile(search, [&](const Tile& tile, u32 lane) {
        i64 left = search.wanted - (i64)__shfl_sync(kAllLanes, (u32)before, lane);        // fewer than 2^32 in a segment
        tile_keys(c, s, tile, [&](u32 valid, const u32 (&key)[4], u32 at) {
            u32 equal = 0, total;
#pragma unroll
            for (u32 e = 0; e < 4; ++e) equal |= (u32)((valid >> e & 1) && key[e] == last) << e;
            i64 mine = left - before_fours(equal, total);
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const bool is_taken = equal >> e & 1 ? mine-- > 0 : (valid >> e & 1) && in_bracket(search, key[e]) && key[e] > last;
                if (is_taken) c.chosen[tile.start + at + e] = 1;
            }
            left -= total;
        });
    });
}

// What no search decides: bytes of a range, a CTA for each.
struct Fill {
    i64 start, stop, value;
};

__global__ void __launch_bounds__(kThreads) fill_bytes_kernel(u8* bytes, const Fill* fills) {
    const Fill fill = fills[blockIdx.x];
    for (i64 i = fill.start + threadIdx.x; i < fill.stop; i += kThreads) bytes[i] = (u8)fill.value;
}

}  // namespace scape

#endif  // SCAPE_SELECT_CUH
