// Exactly k per segment, without a tensor of scores, all segments at once: keys (rule.h) are computed where they are looked at.
//
//   sample    counts the first digits of every 4th or 16th line of a segment, of all of a small one. From them: a few values of the first
//             digit between which the k-th largest key must lie, or, from a sample, very likely does: the bracket
//   choose    one pass over everything: chosen above the bracket, not below it, which an approximation of most scores tells; keys inside
//             are noted down, and their first two digits counted. From them: these digits of the k-th, if the bracket was right; where it
//             was not, both steps are done again without sampling
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

// The keys of eight of a search's sampled lines: `line` is the first's number. The few elements before the search's first one may be
// counted with it.
constexpr u32 kLines = 8;
template <class Visit>
__device__ __forceinline__ void sampled_keys(const Select& c, const Search& search, i64 line, u32 log_each, const Visit& visit) {
    u32 r[kLines], q[kLines], last[kLines];
    const u32 step = kTileLines >> log_each;            // from line to line in a tile; other ones than in the tile before
    const auto place = [&](u32 j) {
        const i64 tile = (line + j) >> log_each;
        const u32 own = ((u32)(line + j) & ((1u << log_each) - 1)) * step + ((u32)tile & (step - 1));
        return search.start + tile * kTileElems + own * kWarp + lane_id();
    };
#pragma unroll
    for (u32 j = 0; j < kLines; ++j) {
        const i64 at = place(j);
        r[j] = q[j] = last[j] = 0;
        if (at >= search.end) continue;
        r[j] = bits_of(c.rank_by[at]);
        if (c.square) q[j] = bits_of(c.square[at]);
    }
    const auto load_lasts = [&](int bytes) {
#pragma unroll
        for (u32 j = 0; j < kLines; ++j)
            if (place(j) < search.end) last[j] = load_last(c.last_sync, place(j), bytes);
    };
    if (c.last_bytes == 4)
        load_lasts(4);
    else
        load_lasts(2);
#pragma unroll
    for (u32 j = 0; j < kLines; ++j)
        visit(j, place(j) < search.end, key_of(c, r[j], q[j], age_of(last[j], c.last_bytes, c.step) >= c.max_age));
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
    const u32 step = kTileLines >> log_sampled(search);
    if (step > 1) {
        // The rank in the sample, give or take what chance makes of it in all but one of some thousand samples.
        const float share = (float)search.count / step, slack = 3.5f * root(share) + 4.0f;
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
                   const u32 log_each = log_sampled(search);
                   if (1u << log_each < kTileLines) {
                       const i64 first = (t - search.first_tile) << log_each, end = (stop - search.first_tile) << log_each;
                       for (i64 line = first + warp_id() * kLines; line < end; line += kSelectWarps * kLines)
                           sampled_keys(c, search, line, log_each, [&](u32 j, bool valid, u32 key) {
                               count(valid && line + j < end, key);
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
    const u32 lo = search.lo << (kLowBits - kThirdBits);
    if (threadIdx.x == 0) search.again = 1;
    __syncthreads();
    if (wanted > 0)
        find_from_top(histogram, digit_size(0), wanted, shared, [&](u32 d, i64 above, u32) {
            search.again = 0;
            search.prefix = (lo + d) << kThirdBits, search.wanted = wanted - above;
        });
    clear(histogram, digit_size(0));
}

// Chosen or not, where an approximation of the score is clear: adds who is chosen to the bytes of `num_above`, and returns whose keys are
// needed (bit e; not chosen so far).
__device__ __forceinline__ u32 clear_ones(const Select& c, const Scratch& s, const Tile& tile, const Limits& limits, const Four& four,
                                          u32 at, u32& num_above) {
    u32 bytes = 0, open = 0;
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
        const float r = with_bits(four.r[e] & 0x7FFFFFFFu);
        const u32 q = four.q[e] | (u32)((int)four.q[e] >> 31);          // negative ones, whose root is NaN, become NaN
        const float score = c.square ? r * about_inverse(about_root(with_bits(q)) + kScoreEps) : r;
        const bool is_overdue = four.is_overdue(c, e);
        const bool is_above = score > (is_overdue ? limits.overdue_above : limits.above);
        const bool is_below = score < (is_overdue ? limits.overdue_below : limits.below);
        bytes |= is_above ? 1u << 8 * e : 0;
        open |= is_above || is_below ? 0 : 1u << e;
    }
    if (four.valid == 15 && s.by_fours) {
        *(u32*)(c.chosen + tile.start + at) = bytes;
        num_above += bytes;
        return open;
    }
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
        if (!(four.valid >> e & 1)) continue;
        c.chosen[tile.start + at + e] = (u8)(bytes >> 8 * e);
        num_above += bytes & 1u << 8 * e;
    }
    return open & four.valid;
}

__global__ void __launch_bounds__(kSelectThreads, 2) choose_kernel(const Select c, const Scratch s, bool again) {
    __shared__ u32 histogram[8192];                                     // of first two digits inside the bracket
    __shared__ u8 unclear[kSelectWarps][kAhead * kAtOnce];              // places of a warp's elements whose keys are needed
    static_assert(kBracket << (kLowBits - kThirdBits) == 8192 && kAhead == 2 && kAhead * kAtOnce <= 256 && kTileElems <= 512, "");
    over_tiles(s, histogram, [&](const Search& search) { return is_skipped(search, again); },
               [&](i64 first, i64 stop, const Search& search) {
                   const Limits limits(search);
                   const u32 lo = search.lo << (kLowBits - kThirdBits);
                   const SharedPlace own = shared_place(unclear[warp_id()]);
                   u32 above = 0;
                   for (i64 t = first + warp_id(); t < stop; t += kSelectWarps) {
                       const Tile tile = tile_of(search, t);
                       if (t + kSelectWarps < stop) fetch_tile(c, s, tile_of(search, t + kSelectWarps));
                       u32* const notes = s.notes + t * kMaxNotes;
                       u32 num = 0, num_above = 0;         // the latter in four bytes
                       tile_fours(c, s, tile, [&](const Four(&fours)[kAhead], u32 at) {
                           u32 open[kAhead], counts = 0;
#pragma unroll
                           for (u32 j = 0; j < kAhead; ++j) {
                               open[j] = clear_ones(c, s, tile, limits, fours[j], at + j * kAtOnce, num_above);
                               counts |= (u32)__popc(open[j]) << 16 * j;
                           }
                           const u32 inclusive = scan_inclusive(counts), sums = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
                           const u32 total = (sums & 0xffff) + (sums >> 16), before = inclusive - counts;
#pragma unroll
                           for (u32 j = 0; j < kAhead; ++j) {
                               SharedPlace to = own + (j ? (sums & 0xffff) + (before >> 16) : before & 0xffff);
#pragma unroll
                               for (u32 e = 0; e < 4; ++e)
                                   if (open[j] >> e & 1) store_place(to++, j * kAtOnce + 4 * lane_id() + e);
                           }
                           __syncwarp();
                           for (u32 k = lane_id(); k < total + lane_id(); k += kWarp) {
                               const bool has = k < total;
                               const u32 place = at - 4 * lane_id() + (has ? load_place(own + k) : 0);
                               u32 key = 0;
                               if (has) {
                                   const i64 x = tile.start + place;
                                   const u32 last = load_last(c.last_sync, x, c.last_bytes), q = c.square ? bits_of(c.square[x]) : 0;
                                   key = key_of(c, bits_of(c.rank_by[x]), q, age_of(last, c.last_bytes, c.step) >= c.max_age);
                                   if (key >> kLowBits > search.hi) c.chosen[x] = 1, ++above;
                               }
                               const bool is_inside = has && in_bracket(search, key);
                               const u32 inside = __ballot_sync(kAllLanes, is_inside);
                               if (is_inside) {
                                   const u32 n = num + __popc(inside & ((1u << lane_id()) - 1));
                                   const u32 digit = (key >> kLowBits) - search.lo;
                                   if (n < kMaxNotes) notes[n] = place << 23 | digit << kLowBits | (key & kLowMask);
                                   atomicAdd(&histogram[(key >> kThirdBits) - lo], 1u);
                               }
                               num += __popc(inside);
                           }
                           __syncwarp();
                       });
                       above += num_above * 0x01010101u >> 24;
                       if (lane_id() == 0) s.num_notes[t] = num;
                   }
                   above = __reduce_add_sync(kAllLanes, above);
                   if (lane_id() == 0 && above) atomicAdd(&s.searches[s.search_of_tile[first]].above, above);
               },
               settle_two);
}

// The histogram of the third digit. In this step and those after it a CTA has a group of tiles, a lane one of them.
__global__ void __launch_bounds__(kThreads) digit_kernel(const Select c, const Scratch s) {
    __shared__ u32 histogram[kThirdSize], shared[kThreads / kWarp];
    __shared__ u32 flag;
    const Lane own(s);
    Search& search = s.searches[own.group.search];
    const u32 prefix = search.prefix >> kThirdBits, size = kThirdSize;
    clear(histogram, size);
    __syncthreads();
    const auto count = [&](bool valid, u32 key) {
        if (valid && key >> kThirdBits == prefix) atomicAdd(&histogram[key & (size - 1)], 1u);
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
