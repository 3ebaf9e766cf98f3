// Exactly k per segment, without a tensor of scores, all segments at once: keys (rule.h) are computed where they are looked at.
//
//   sample    counts the first digits of every 16th line of a large segment, of all of a small one
//   bracket   a few values of the first digit between which the k-th largest key must lie, or, from a sample, very likely does
//   choose    one pass over everything: chosen above the bracket, not below it; keys inside are noted down and their first digits counted
//   settle    the first digit, if the bracket was right; where it was not, the four steps are done again without sampling
//   count     the second and the third digit, over what was noted
//   rank      equal keys by lowest index
//   finish    chosen or not, for what was noted
#ifndef SCAPE_SELECT_CUH
#define SCAPE_SELECT_CUH

#include "select_tiles.cuh"

namespace scape {

// Takes part of the searches that have to be done again only, or of all.
__device__ __forceinline__ bool is_skipped(const Search& search, bool again) { return again && !search.again; }

// The keys of every 16th line of a search's elements, another one in every tile, eight lines at a time.
template <class Visit>
__device__ __forceinline__ void sampled_keys(const Select& c, const Search& search, i64 start, i64 line, const Visit& visit) {
    constexpr u32 kAhead = 8, kLines = kTileElems / kWarp / kSampleStep;        // sampled lines of a tile
    float r[kAhead], q[kAhead];
    int age[kAhead];
#pragma unroll
    for (u32 j = 0; j < kAhead; ++j) {
        const i64 tile = (line + j) / kLines, place = tile % kSampleStep + (line + j) % kLines * kSampleStep;
        const i64 at = tile * kTileElems + place * kWarp + lane_id();
        r[j] = q[j] = 0.0f, age[j] = -1;
        if (at >= search.numel) continue;
        r[j] = c.rank_by[start + at];
        age[j] = age_at(c.last_sync, start + at, c.last_bytes, c.step);
        if (c.square) q[j] = c.square[start + at];
    }
#pragma unroll
    for (u32 j = 0; j < kAhead; ++j)
        visit(age[j] >= 0, sort_key(c.square ? residual_score(r[j], q[j]) : r[j], age[j] >= c.max_age));
}

__global__ void __launch_bounds__(kSelectThreads, 2) sample_kernel(const Select c, const Scratch s, bool again) {
    __shared__ u32 histogram[8192];
    constexpr u32 kLines = kTileElems / kWarp / kSampleStep, kTiles = 8 / kLines;
    const auto count = [&](bool valid, u32 key) {
        if (valid) atomicAdd(&histogram[key >> kLowBits], 1u);
    };
    over_tiles(s, histogram, 8192, [&](const Search& search) { return is_skipped(search, again); },
               [&](i64 t, i64 stop, const Search& search) {
                   if (is_sampled(search)) {
                       const i64 start = s.tiles[search.first_tile].start, first = t - search.first_tile;
                       for (i64 tile = warp_id() * kTiles; tile < stop - t; tile += kSelectWarps * kTiles) {
                           const i64 left = stop - t - tile;
                           u32 j = 0;
                           sampled_keys(c, search, start, (first + tile) * kLines, [&](bool valid, u32 key) {
                               count(valid && (i64)(j++ / kLines) < left, key);
                           });
                       }
                       return;
                   }
                   for (i64 tile = t + warp_id(); tile < stop; tile += kSelectWarps)
                       tile_keys(c, s.tiles[tile], [&](bool valid, u32 key, u32) { count(valid, key); });
               },
               [](int) {});
}

// Sums of a histogram from the top: `found(d, sum of the counts above d, count of d)` is called, by one thread, for the largest d at which
// the sum with d reaches `rank` >= 1. Never called if there are not so many.
template <class Found>
__device__ __forceinline__ void find_from_top(const u32* histogram, u32 size, i64 rank, u32* shared, const Found& found) {
    const u32 per = size / kSelectThreads, top = size - threadIdx.x * per;     // this thread: top - per .. top - 1
    u32 own = 0, total;
    for (u32 j = 1; j <= per; ++j) own += histogram[top - j];
    i64 above = scan_cta(own, shared, total);
    if (above >= rank || above + own < rank) return;
    for (u32 j = 1; j <= per; ++j) {
        const u32 count = histogram[top - j];
        if (above + count >= rank) {
            found(top - j, above, count);
            return;
        }
        above += count;
    }
}

// A CTA for each search, after sample_kernel.
__global__ void __launch_bounds__(kSelectThreads) bracket_kernel(const Scratch s, bool again) {
    __shared__ u32 shared[kSelectWarps];
    __shared__ u32 ends[2];
    Search& search = s.searches[blockIdx.x];
    if (is_skipped(search, again)) return;
    u32* const histogram = s.histograms + (i64)blockIdx.x * digit_size(0);
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
    __syncthreads();
    for (u32 d = threadIdx.x; d < digit_size(0); d += kSelectThreads) histogram[d] = 0;
    if (threadIdx.x == 0) {
        search.lo = ends[0], search.hi = ends[1];
        if (search.hi - search.lo >= kBracket) search.hi = search.lo + kBracket - 1;     // found wrong, most likely
        search.above = 0;
    }
}

__global__ void __launch_bounds__(kSelectThreads, 2) choose_kernel(const Select c, const Scratch s, bool again) {
    __shared__ u32 histogram[kSelectThreads];       // of first digits inside the bracket
    __shared__ u32 above;
    if (threadIdx.x == 0) above = 0;
    over_tiles(s, histogram, kBracket, [&](const Search& search) { return is_skipped(search, again); },
               [&](i64 first, i64 stop, const Search& search) {
                   for (i64 t = first + warp_id(); t < stop; t += kSelectWarps) {
                       const Tile tile = s.tiles[t];
                       u32 num = 0, chosen_above = 0;
                       tile_keys(c, tile, [&](bool valid, u32 key, u32 at) {
                           const u32 digit = key >> kLowBits, place = digit - search.lo;
                           const bool is_above = valid && digit > search.hi, is_inside = valid && in_bracket(search, key);
                           if (valid) c.chosen[tile.start + at] = is_above;
                           chosen_above += is_above;
                           const u32 inside = __ballot_sync(kAllLanes, is_inside);
                           if (is_inside) {
                               const u32 i = num + __popc(inside & ((1u << lane_id()) - 1));
                               if (i < kMaxNotes) s.notes[t * kMaxNotes + i] = at << 22 | place << kLowBits | (key & kLowMask);
                               atomicAdd(&histogram[place], 1u);
                           }
                           num += __popc(inside);
                       });
                       chosen_above = __reduce_add_sync(kAllLanes, chosen_above);
                       if (lane_id() == 0) {
                           s.num_notes[t] = num;
                           if (chosen_above) atomicAdd(&above, chosen_above);
                       }
                   }
               },
               [&](int number) {
                   if (threadIdx.x == 0 && above) atomicAdd(&s.searches[number].above, above), above = 0;
               });
}

// The first digit, after choose_kernel.
__global__ void __launch_bounds__(kSelectThreads) settle_first_kernel(const Scratch s, bool again) {
    Search& search = s.searches[blockIdx.x];
    if (threadIdx.x != 0 || is_skipped(search, again)) return;
    u32* const histogram = s.histograms + (i64)blockIdx.x * digit_size(0);
    i64 wanted = search.count - search.above;
    search.again = 1;
    if (wanted > 0)
        for (u32 place = search.hi - search.lo + 1; place--;) {
            if (histogram[place] >= wanted) {
                search.again = 0;
                search.prefix = (search.lo + place) << kLowBits, search.wanted = wanted;
                break;
            }
            wanted -= histogram[place];
        }
    for (u32 place = 0; place < kBracket; ++place) histogram[place] = 0;
}

// The histogram of the second or third digit (1, 2). In the later steps every lane has a tile.
__global__ void __launch_bounds__(kThreads) digit_kernel(const Select c, const Scratch s, int digit) {
    const Lane own(s, (i64)blockIdx.x * kThreads + threadIdx.x);
    const int shift = digit_shift(digit), settled = digit_shift(digit - 1);
    const u32 size = digit_size(digit);
    const auto histogram_of = [&](const Search& search) { return s.histograms + (&search - s.searches) * (i64)digit_size(0); };
    if (own.is_noted()) {
        u32* const histogram = histogram_of(*own.search);
        const u32 prefix = own.search->prefix;
        own.each_note(s, [&](u32 key, u32) {
            if (key >> settled == prefix >> settled) atomicAdd(&histogram[key >> shift & (size - 1)], 1u);
        });
    }
    each_full_tile(s, own, [&](const Tile& tile, const Search& search, u32) {
        u32* const histogram = s.histograms + (i64)tile.search * digit_size(0);
        tile_keys(c, tile, [&](bool valid, u32 key, u32) {
            const bool asked = valid && key >> settled == search.prefix >> settled;
            const u32 mine = key >> shift & (size - 1), askers = __ballot_sync(kAllLanes, asked);
            if (!askers) return;
            // Most often all are the same: then one lane counts for all.
            const u32 leader = (u32)__ffs((int)askers) - 1, common = __shfl_sync(kAllLanes, mine, leader);
            const u32 same = __ballot_sync(kAllLanes, asked && mine == common);
            if (lane_id() == leader) atomicAdd(&histogram[common], (u32)__popc(same));
            if (asked && mine != common) atomicAdd(&histogram[mine], 1u);
        });
    });
}

__global__ void __launch_bounds__(kSelectThreads) settle_kernel(const Scratch s, int digit) {
    __shared__ u32 shared[kSelectWarps];
    Search& search = s.searches[blockIdx.x];
    u32* const histogram = s.histograms + (i64)blockIdx.x * digit_size(0);
    const i64 wanted = search.wanted;
    __syncthreads();
    find_from_top(histogram, digit_size(digit), wanted, shared, [&](u32 d, i64 above, u32 count) {
        search.prefix |= d << digit_shift(digit), search.wanted = wanted - above, search.equal = count;
    });
    __syncthreads();
    for (u32 d = threadIdx.x; d < digit_size(digit); d += kSelectThreads) histogram[d] = 0;
}

// How many keys of every tile are the last one; not needed where all of them are taken.
__global__ void __launch_bounds__(kThreads) equal_kernel(const Select c, const Scratch s) {
    Lane own(s, (i64)blockIdx.x * kThreads + threadIdx.x);
    if (own.search->equal == own.search->wanted) own.num = 0;
    u32 num = 0;
    if (own.is_noted()) {
        const u32 last = own.search->prefix;
        own.each_note(s, [&](u32 key, u32) { num += key == last; });
    }
    each_full_tile(s, own, [&](const Tile& tile, const Search& search, u32 lane) {
        u32 equal = 0;
        tile_keys(c, tile, [&](bool valid, u32 key, u32) { equal += __popc(__ballot_sync(kAllLanes, valid && key == search.prefix)); });
        if (lane_id() == lane) num = equal;
    });
    if (own.t < s.num_tiles) s.num_equal[own.t] = num;
}

// Turns them into how many there are in the tiles before; a CTA for each search.
__global__ void __launch_bounds__(kSelectThreads) rank_kernel(const Scratch s) {
    __shared__ u32 shared[kSelectWarps];
    const Search& search = s.searches[blockIdx.x];
    if (search.equal == search.wanted) return;
    u32 sum = 0;
    for (i64 start = 0; start < search.num_tiles; start += kSelectThreads) {
        const i64 i = start + threadIdx.x;
        u32* const own = s.num_equal + search.first_tile + i;
        u32 total;
        const u32 before = scan_cta(i < search.num_tiles ? *own : 0, shared, total);
        if (i < search.num_tiles) *own = sum + before;
        sum += total;
    }
}

__global__ void __launch_bounds__(kThreads) finish_kernel(const Select c, const Scratch s) {
    const Lane own(s, (i64)blockIdx.x * kThreads + threadIdx.x);
    if (own.is_noted()) {
        const u32 last = own.search->prefix;
        i64 left = own.search->wanted;
        if (own.num && own.search->equal != left) left -= s.num_equal[own.t];       // of the tiles before
        own.each_note(s, [&](u32 key, u32 at) {
            if (key > last || (key == last && left-- > 0)) c.chosen[own.tile.start + at] = 1;
        });
    }
    each_full_tile(s, own, [&](const Tile& tile, const Search& search, u32 lane) {
        const bool all = search.equal == search.wanted;
        u32 before = all ? 0 : s.num_equal[own.t - lane_id() + lane];
        tile_keys(c, tile, [&](bool valid, u32 key, u32 at) {
            const u32 equal = __ballot_sync(kAllLanes, valid && key == search.prefix);
            const u32 rank = before + __popc(equal & ((1u << lane_id()) - 1));
            if (valid && in_bracket(search, key) && (key > search.prefix || (key == search.prefix && (all || rank < search.wanted))))
                c.chosen[tile.start + at] = 1;
            before += __popc(equal);
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
