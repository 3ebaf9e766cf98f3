// Exactly k per segment, without a tensor of scores, all segments at once: keys (rule.h) are computed where they are looked at.
//
//   prepare   what the searches begin with
//   sample    counts the first digits of every 4th or 16th line of a segment, of all of a small one. From them: a few values of the first
//             digit between which the k-th largest key must lie, or, from a sample, very likely does: the bracket. Where the caller has
//             kept the k-th keys of the last time (hints), the bracket is made around these in its place
//   choose    one pass over everything: chosen above the bracket, not below it, which an approximation of most keys tells; keys inside
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

// The key of the last coordinate that was chosen, and how far, in first digits, the next step's may be from it.
struct Hint {
    u32 key, reach;

    static constexpr u32 kMost = kBracket / 2 - 1;
    __device__ __forceinline__ void keep(u32 next, bool is_known) {
        const u32 a = next >> kLowBits, b = key >> kLowBits, moved = is_known ? a < b ? b - a : a - b : 2;
        const u32 less = is_known && reach > 1 ? reach - 1 : 1, more = moved + 1 > less ? moved + 1 : less;
        key = next, reach = more < kMost ? more : kMost;
    }
};

// What no search decides: bytes of a range.
struct Fill {
    i64 start, stop, value;
};

// A CTA for each search and each fill. hints: of all searches, or none.
__global__ void __launch_bounds__(kThreads) prepare_kernel(u8* bytes, const Scratch s, const Search* searches, const Hint* hints,
                                                           const Fill* fills) {
    const i64 number = blockIdx.x;
    begin_in_turn();
    if (number >= s.num_searches) {
        const Fill fill = fills[number - s.num_searches];
        for (i64 i = fill.start + threadIdx.x; i < fill.stop; i += kThreads) bytes[i] = (u8)fill.value;
        return;
    }
    if (number == 0 && threadIdx.x == 0) *s.tiles_again() = 0;
    u32* const histogram = histogram_of(s, number);
    for (u32 d = 4 * threadIdx.x; d < digit_size(0); d += 4 * kThreads) *(uint4*)(histogram + d) = make_uint4(0, 0, 0, 0);
    if (threadIdx.x) return;
    Search search = searches[number];
    if (hints) {
        const Hint hint = hints[number];
        const u32 digit = hint.key >> kLowBits, last = digit_size(0) - 1, reach = hint.reach < Hint::kMost ? hint.reach : Hint::kMost;
        search.lo = digit < reach ? 0 : digit - reach;
        search.hi = last - digit < reach ? last : digit + reach;
    }
    s.searches[number] = search;
}

// About the keys of eight of a search's sampled lines: `line` is the first's number. The few elements before the search's first one may be
// counted with it.
constexpr u32 kLines = 8;
template <class K, class Visit>
__device__ __forceinline__ void sampled_keys(const Select& c, const Search& search, i64 line, u32 log_each, const Visit& visit) {
    u32 r[kLines], q[kLines], last[kLines];
    const u32 step = kTileLines >> log_each;            // from line to line in a tile; other ones than in the tile before
    const auto place = [&](u32 j) {
        const i64 tile = (line + j) >> log_each;
        const u32 own = ((u32)(line + j) & ((1u << log_each) - 1)) * step + ((u32)tile & (step - 1));
        return search.start + tile * kTileElems + own * kWarp + lane_id();
    };
    const AboutKeys<K> about(c);
#pragma unroll
    for (u32 j = 0; j < kLines; ++j) {
        const i64 at = place(j);
        r[j] = q[j] = last[j] = 0;
        if (at >= search.end) continue;
        r[j] = bits_of(c.rank_by[at]);
        if (K::kSquare) q[j] = bits_of(c.square[at]);
        if (K::kLast) last[j] = load_last(c.last_sync, at, K::kLast);
    }
#pragma unroll
    for (u32 j = 0; j < kLines; ++j) visit(j, place(j) < search.end, about.key(r[j], q[j], last[j], 0));
}

// A histogram of 8,192 counts, added up from the top by a CTA of kNum threads. Made by all of them.
template <u32 kNum>
struct FromTop {
    static constexpr u32 kPer = 8192 / kNum;
    u32 counts[kPer];           // this thread's, upwards
    u32 above;                  // sum of those above them

    __device__ __forceinline__ FromTop(const u32* histogram, u32* shared) {
        const u32* const own = histogram + first();
        u32 sum = 0, total;
#pragma unroll
        for (u32 j = 0; j < kPer; j += 4) {
            const uint4 four = load_fresh_four(own + j);
            counts[j] = four.x, counts[j + 1] = four.y, counts[j + 2] = four.z, counts[j + 3] = four.w;
        }
#pragma unroll
        for (u32 j = 0; j < kPer; ++j) sum += counts[j];
        above = scan_cta(sum, shared, total);
    }
    __device__ __forceinline__ static u32 first() { return 8192 - (threadIdx.x + 1) * kPer; }

    // found(d, sum of the counts above d, count of d) is called, by one thread, for the largest d at which the sum with d reaches
    // `rank` >= 1; never, if there are not so many.
    template <class Found>
    __device__ __forceinline__ void find(i64 rank, const Found& found) const {
        i64 sum = above;
#pragma unroll
        for (u32 j = kPer; j-- > 0;) {
            if (sum < rank && sum + counts[j] >= rank) found(first() + j, sum, counts[j]);
            sum += counts[j];
        }
    }
};

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
    const FromTop<kSelectThreads> sums(histogram, shared);
    sums.find(low_rank, [&](u32 d, i64, u32) { ends[0] = d; });
    sums.find(high_rank, [&](u32 d, i64, u32) { ends[1] = d; });
    clear(histogram, digit_size(0));
    if (threadIdx.x == 0) {
        search.lo = ends[0], search.hi = ends[1];
        const u32 most = kBracket << kMaxCoarse;
        if (search.hi - search.lo >= most) search.hi = search.lo + most - 1;            // found wrong, most likely
        search.coarse = 0;
        while (search.hi - search.lo >= kBracket << search.coarse) ++search.coarse;
        search.above = 0;
    }
}

template <class K>
__global__ void __launch_bounds__(kSelectThreads, 2) sample_kernel(const Select c, const Scratch s, bool again) {
    __shared__ u32 histogram[8192];
    const auto count = [&](bool valid, u32 key) {
        if (valid) atomicAdd(&histogram[key >> kLowBits], 1u);
    };
    over_tiles(s, histogram, again,
               [&](i64 t, i64 stop, const Search& search) {
                   const u32 log_each = log_sampled(search);
                   if (1u << log_each < kTileLines) {
                       const i64 first = (t - search.first_tile) << log_each, end = (stop - search.first_tile) << log_each;
                       for (i64 line = first + warp_id() * kLines; line < end; line += kSelectWarps * kLines)
                           sampled_keys<K>(c, search, line, log_each, [&](u32 j, bool valid, u32 key) {
                               count(valid && line + j < end, key);
                           });
                       return digit_size(0);
                   }
                   for (i64 tile = t + warp_id(); tile < stop; tile += kSelectWarps)
                       tile_keys(c, s, tile_of(search, tile), [&](u32 valid, const u32 (&key)[4], u32) {
                           for (u32 e = 0; e < 4; ++e) count(valid >> e & 1, key[e]);
                       });
                   return digit_size(0);
               },
               set_bracket);
}

// The first two digits, from the counts inside the bracket.
__device__ __forceinline__ void settle_two(Search& search, u32* histogram, bool again) {
    __shared__ u32 shared[kSelectWarps];
    const i64 wanted = search.count - (i64)load_fresh(&search.above);
    if (threadIdx.x == 0 && !again) search.again = 1;           // the second time all are exact, and others still look at it
    const FromTop<kSelectThreads> sums(histogram, shared);          // in which all wait for one another
    if (wanted > 0)
        sums.find(wanted, [&](u32 d, i64 above, u32) {
            if (!again) search.again = 0;
            search.prefix = search.lowest() + (d << search.third_bits()), search.wanted = wanted - above;
        });
    clear(histogram, digit_size(0));
}

// Adds who is chosen for sure to the bytes of `num_above`, and returns whose keys have to be looked at (bit e; not chosen so far).
template <class K>
__device__ __forceinline__ u32 clear_ones(const AboutKeys<K>& about, const Four& four, u32 lo, u32 hi, u32& bytes) {
    u32 open = 0;
    bytes = 0;
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
        const u32 key = about.key(four.r[e], four.q[e], four.last[K::kLast == 2 ? e / 2 : e], K::kLast == 2 ? e % 2 : 0);
        bytes |= key > hi ? 1u << 8 * e : 0;
        open |= key <= hi && key >= lo ? 1u << e : 0;
    }
    return open;
}

template <class K>
__global__ void __launch_bounds__(kSelectThreads, 2) choose_kernel(const Select c, const Scratch s, bool again) {
    constexpr u32 kFours = kTileElems / kAtOnce;
    __shared__ u32 histogram[8192];                     // of first two digits inside the bracket
    __shared__ u8 unclear[kSelectWarps][kTileElems];    // places of a tile's elements whose keys are needed, without their highest bit
    static_assert(kBracket << (kLowBits - kThirdBits) == 8192 && kTileElems == 512 && kFours == 4, "");
    const AboutKeys<K> about(c);
    over_tiles(s, histogram, again,
               [&](i64 first, i64 stop, const Search& search) {
                   const u32 lowest = search.lowest(), third_bits = search.third_bits(), from = first_in_doubt(search);
                   const u32 top = last_in_doubt(search), lo = search.lo, hi = search.hi;
                   const bool is_coarse = search.coarse > 0;
                   const SharedPlace own = shared_place(unclear[warp_id()]);
                   u32 above = 0;
                   for (i64 t = first + warp_id(); t < stop; t += kSelectWarps) {
                       const Tile tile = tile_of(search, t);
                       const bool is_whole = s.by_fours && tile.skip == 0 && tile.num == kTileElems;
                       Four fours[kFours];
                       if (is_whole) {
#pragma unroll
                           for (u32 j = 0; j < kFours; ++j) fours[j].load_as<K>(c, tile.start + j * kAtOnce + 4 * lane_id());
                       } else {
#pragma unroll
                           for (u32 j = 0; j < kFours; ++j) fours[j].load_some(c, tile, j * kAtOnce + 4 * lane_id(), K::kSquare, K::kLast);
                       }
                       u32 q = 0;
#pragma unroll
                       for (u32 j = 0; K::kSquare && j < kFours; ++j) q |= fours[j].q[0] | fours[j].q[1] | fours[j].q[2] | fours[j].q[3];
                       // With a negative q about_root() is not to be trusted: denormal ones count as 0.
                       const u32 low = (int)q < 0 ? 0 : from, high = (int)q < 0 ? ~0u : top;
                       u32 open = 0, num_above = 0;        // the latter in four bytes
#pragma unroll
                       for (u32 j = 0; j < kFours; ++j) {
                           u32 bytes, mine = clear_ones<K>(about, fours[j], low, high, bytes);
                           u8* const chosen = c.chosen + tile.start + j * kAtOnce + 4 * lane_id();
                           if (is_whole) {
                               *(u32*)chosen = bytes;
                           } else {
                               mine &= fours[j].valid;
#pragma unroll
                               for (u32 e = 0; e < 4; ++e) {
                                   if (fours[j].valid >> e & 1)
                                       chosen[e] = (u8)(bytes >> 8 * e);
                                   else
                                       bytes &= ~(0xffu << 8 * e);
                               }
                           }
                           open |= mine << 4 * j, num_above += bytes;
                       }
                       above += num_above * 0x01010101u >> 24;
                       u32 num = 0;
                       if (__ballot_sync(kAllLanes, open != 0)) {
                           u32 counts = 0, start = 0, middle = 0;
#pragma unroll
                           for (u32 j = 0; j < kFours; ++j) counts |= (u32)__popc(open >> 4 * j & 15) << 8 * j;
                           const u32 inclusive = scan_inclusive(counts), sums = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
                           const u32 before = inclusive - counts;
#pragma unroll
                           for (u32 j = 0; j < kFours; ++j) {
                               SharedPlace to = own + start + (before >> 8 * j & 0xff);
                               start += sums >> 8 * j & 0xff;
                               if (j == 1) middle = start;
#pragma unroll
                               for (u32 e = 0; e < 4; ++e)
                                   if (open >> (4 * j + e) & 1) store_place(to++, (j * kAtOnce + 4 * lane_id() + e) & 0xff);
                           }
                           __syncwarp();
                           u32* const notes = s.notes + t * kMaxNotes;
#pragma unroll 1
                           for (u32 k = lane_id(); k < start + lane_id(); k += kWarp) {
                               const bool has = k < start;
                               u32 place = 0, key = 0;
                               if (has) {
                                   place = load_place(own + k) | (k >= middle ? 256u : 0);
                                   key = key_at<K>(c, tile.start + place);
                                   if (key >> kLowBits > hi) c.chosen[tile.start + place] = 1, ++above;
                               }
                               const bool is_inside = has && key >> kLowBits >= lo && key >> kLowBits <= hi;
                               const u32 inside = __ballot_sync(kAllLanes, is_inside);
                               if (is_inside) {
                                   const u32 n = num + __popc(inside & ((1u << lane_id()) - 1));
                                   if (n < kMaxNotes) notes[n] = place << kNoteBits | (is_coarse ? 0 : key - lowest);
                                   atomicAdd(&histogram[(key - lowest) >> third_bits], 1u);
                               }
                               num += __popc(inside);
                           }
                           __syncwarp();
                       }
                       if (lane_id() == 0) s.num_notes[t] = num;
                   }
                   above = __reduce_add_sync(kAllLanes, above);
                   if (lane_id() == 0 && above) atomicAdd(&s.searches[s.search_of_tile[first]].above, above);
                   return (hi - lo + 1) << (kLowBits - third_bits);
               },
               [&](Search& search, u32* counts) {
                   settle_two(search, counts, again);
                   if (threadIdx.x == 0 && !again && search.again) atomicAdd(s.tiles_again(), (u32)search.num_tiles);
               });
}

}  // namespace scape

#endif  // SCAPE_SELECT_CUH
