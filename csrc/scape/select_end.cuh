// The end of a selection (select.cuh): digit, equal and finish.
#ifndef SCAPE_SELECT_END_CUH
#define SCAPE_SELECT_END_CUH

#include "select.cuh"

namespace scape {

// What a CTA does with the tiles of a group, a lane with one of them: counts the third digit,
__device__ __forceinline__ void count_third(const Lane& own, const Select& c, const Scratch& s, const Search& search, u32 prefix, u32 size,
                                            u32* histogram) {
    const auto count = [&](bool valid, u32 key) {
        if (valid && key - prefix < size) atomicAdd(&histogram[key - prefix], 1u);
    };
    if (own.is_noted()) own.each_note(c, s, search, [&](u32 key, u32) { count(true, key); });
    own.each_full_tile(search, [&](const Tile& tile, u32) {
        tile_keys(c, s, tile, [&](u32 valid, const u32 (&key)[4], u32) {
            for (u32 e = 0; e < 4; ++e) count(valid >> e & 1, key[e]);
        });
    });
}

// how many keys of the lane's tile equal the last one,
__device__ __forceinline__ u32 num_equal_to(u32 last, const Lane& own, const Select& c, const Scratch& s, const Search& search) {
    u32 num = 0;
    if (own.is_noted()) own.each_note(c, s, search, [&](u32 key, u32) { num += key == last; });
    own.each_full_tile(search, [&](const Tile& tile, u32 lane) {
        u32 equal = 0;
        tile_keys(c, s, tile, [&](u32 valid, const u32 (&key)[4], u32) {
            for (u32 e = 0; e < 4; ++e) equal += (valid >> e & 1) && key[e] == last;
        });
        equal = __reduce_add_sync(kAllLanes, equal);
        if (lane_id() == lane) num = equal;
    });
    return num;
}

// and chooses. left: of the equal ones, how many are to be chosen from the lane's tile on; fewer than 2^32 in a segment.
__device__ __forceinline__ void choose_noted(u32 last, i64 left, const Lane& own, const Select& c, const Scratch& s, const Search& search) {
    if (own.is_noted() && own.num) {
        const Tile tile = tile_of(search, own.t);
        i64 mine = left;
        own.each_note(c, s, search, [&](u32 key, u32 at) {
            if (key > last || (key == last && mine-- > 0)) c.chosen[tile.start + at] = 1;
        });
    }
    const u32 few = left < 0 ? 0 : left > (i64)~0u ? ~0u : (u32)left;
    own.each_full_tile(search, [&](const Tile& tile, u32 lane) {
        i64 rest = (i64)__shfl_sync(kAllLanes, few, lane);
        tile_keys(c, s, tile, [&](u32 valid, const u32 (&key)[4], u32 at) {
            u32 equal = 0, total;
#pragma unroll
            for (u32 e = 0; e < 4; ++e) equal |= (u32)((valid >> e & 1) && key[e] == last) << e;
            i64 mine = rest - before_fours(equal, total);
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const bool is_taken = equal >> e & 1 ? mine-- > 0 : (valid >> e & 1) && in_bracket(search, key[e]) && key[e] > last;
                if (is_taken) c.chosen[tile.start + at + e] = 1;
            }
            rest -= total;
        });
    });
}

// The histogram of the third digit.
__global__ void __launch_bounds__(kThreads) digit_kernel(const Select c, const Scratch s, Hint* hints, bool had_hints) {
    __shared__ u32 histogram[1 << (kThirdBits + kMaxCoarse)], shared[kThreads / kWarp];
    __shared__ u32 flag;
    begin_in_turn();
    const Lane own(s, s.groups[blockIdx.x]);
    Search& search = s.searches[own.group.search];
    const u32 prefix = search.prefix, size = 1u << search.third_bits();
    clear(histogram, size);
    __syncthreads();
    count_third(own, c, s, search, prefix, size, histogram);
    __syncthreads();
    u32* const target = histogram_of(s, own.group.search);
    for (u32 d = threadIdx.x; d < size; d += kThreads)
        if (histogram[d]) atomicAdd(&target[d], histogram[d]);
    if (!is_last(search, (u32)own.group.num, &flag)) return;
    const i64 wanted = search.wanted;
    FromTop<kThreads>(target, shared).find(wanted, [&](u32 d, i64 above, u32 num) {
        search.prefix = prefix + d, search.wanted = wanted - above, search.equal = num;
        if (hints) hints[own.group.search].keep(prefix + d, had_hints);
    });
}

// How many keys equal to the last one lie before every tile: in its group, and before that. Not needed where all of them are taken.
__global__ void __launch_bounds__(kThreads) equal_kernel(const Select c, const Scratch s) {
    __shared__ u32 shared[kThreads / kWarp];
    __shared__ u32 flag;
    begin_in_turn();
    const Lane own(s, s.groups[blockIdx.x]);
    Search& search = s.searches[own.group.search];
    if (search.equal == search.wanted) return;
    u32 total;
    const u32 before = scan_cta(num_equal_to(search.prefix, own, c, s, search), shared, total);
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
    begin_in_turn();
    const Lane own(s, s.groups[blockIdx.x]);
    const Search search = s.searches[own.group.search];
    const bool is_all = search.equal == search.wanted;
    const i64 before = is_all || !own.has_tile() ? 0 : (i64)s.equal_before[blockIdx.x] + s.num_equal[own.t];
    choose_noted(search.prefix, search.wanted - before, own, c, s, search);
}

}  // namespace scape

#endif  // SCAPE_SELECT_END_CUH
