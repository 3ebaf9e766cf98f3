// SCAPE's CUDA kernels: C launchers (ds_scape/kernels/impl_cuda.py calls them, ds_scape/kernels/ops.py says what they do).
//
// Launchers queue on `stream` and return a cudaError_t; they neither allocate nor wait. Structs are read on the host before they return;
// all other pointers are of device memory.
#include "mask.cuh"
#include "norm.cuh"
#include "select_end.cuh"
#include "worker.cuh"

using namespace scape;

static bool is_aligned(const void* p, u32 bytes) { return (uintptr_t)p % bytes == 0; }

template <int kGradient>
static int enter_of(const Enter& c, cudaStream_t stream) {
    const i64 grid = ceil_div(c.num, kTile);
    if (is_aligned(c.residual, 16) && is_aligned(c.gradient, kGradient == kFp32 ? 16 : 8))
        SCAPE_LAUNCH((enter_kernel<kGradient, true>), grid, kThreads, stream, c);
    else
        SCAPE_LAUNCH((enter_kernel<kGradient, false>), grid, kThreads, stream, c);
    return last_error();
}

template <class T, int kIndex>
static int scatter_of(void* target, const void* index, const void* values, i64 num, cudaStream_t stream) {
    const i64 grid = ceil_div(num, kThreads * kStepPer);
    SCAPE_LAUNCH((scatter_kernel<T, kIndex>), grid, kThreads, stream, (T*)target, index, (const T*)values, num);
    return last_error();
}

template <bool kDecay, u32 kPer>
static int owner_of(const Owner& c, cudaStream_t stream) {
    const i64 grid = ceil_div(c.num, kThreads * kPer);
    if (c.last_bytes == 4)
        SCAPE_LAUNCH((owner_kernel<kDecay, kPer, 4>), grid, kThreads, stream, c);
    else
        SCAPE_LAUNCH((owner_kernel<kDecay, kPer, 2>), grid, kThreads, stream, c);
    return last_error();
}

template <bool kDecay>
static int owner_of_all(const Owner& c, cudaStream_t stream) {
    const u64 out_bytes = c.out_dtype == kFp32 ? 4 : 2;
    if (((u64)c.weight | (u64)c.momentum | (u64)c.mean) % 16 || (u64)c.last_sync % (4 * c.last_bytes) || (u64)c.out % (4 * out_bytes))
        return owner_of<kDecay, kStepPer>(c, stream);
    const i64 grid = ceil_div(c.num, kThreads * 4);
    if (c.last_bytes == 4)
        SCAPE_LAUNCH((owner_fours_kernel<kDecay, 4>), grid, kThreads, stream, c);
    else
        SCAPE_LAUNCH((owner_fours_kernel<kDecay, 2>), grid, kThreads, stream, c);
    return last_error();
}

template <class K>
static void choose_as(const Select& c, const Scratch& s, i64 grid, bool has_hints, cudaStream_t stream) {
    for (int again = 0; again < 2; ++again) {
        if (again || !has_hints) SCAPE_LAUNCH_NEXT(sample_kernel<K>, grid, kSelectThreads, stream, c, s, again != 0);
        SCAPE_LAUNCH_NEXT(choose_kernel<K>, grid, kSelectThreads, stream, c, s, again != 0);
    }
}

extern "C" {

// Sizes of Enter, Select, Owner, Dense, Group, Search, Scratch, Range and Fill, to be compared with the caller's.
int scape_cuda_struct_size(int number) {
    const int sizes[] = {sizeof(Enter), sizeof(Select), sizeof(Owner), sizeof(Dense), sizeof(Group), sizeof(Search), sizeof(Scratch),
                         sizeof(Range), sizeof(Fill)};
    return sizes[number];
}

int scape_cuda_enter(const Enter* c, cudaStream_t stream) {
    if (!c->num || (!c->gradient && !c->values)) return 0;
    if (!c->gradient && c->index) {
        if (c->num_index) SCAPE_LAUNCH(take_kernel, ceil_div(c->num_index, kThreads), kThreads, stream, *c);
        return last_error();
    }
    if (!c->gradient) return enter_of<-1>(*c, stream);
    if (c->starts) SCAPE_LAUNCH(starts_kernel, ceil_div(c->num_index, kThreads), kThreads, stream, *c);
    return c->gradient_dtype == kFp32   ? enter_of<kFp32>(*c, stream)
           : c->gradient_dtype == kBf16 ? enter_of<kBf16>(*c, stream)
                                        : enter_of<kFp16>(*c, stream);
}

int scape_cuda_track_square(const Enter* c, cudaStream_t stream) {
    if (!c->num) return 0;
    const i64 grid = ceil_div(c->num, kThreads * kStepPer);
    if (c->gradient_dtype == kFp32)
        SCAPE_LAUNCH(track_kernel<kFp32>, grid, kThreads, stream, *c);
    else if (c->gradient_dtype == kBf16)
        SCAPE_LAUNCH(track_kernel<kBf16>, grid, kThreads, stream, *c);
    else
        SCAPE_LAUNCH(track_kernel<kFp16>, grid, kThreads, stream, *c);
    return last_error();
}

int scape_cuda_scatter(void* target, const void* index, int index_bytes, const void* values, i64 num, int itemsize, cudaStream_t stream) {
    if (!num) return 0;
    const auto work = itemsize == 2 ? (index_bytes == 4 ? scatter_of<u16, 4> : scatter_of<u16, 8>)
                                    : (index_bytes == 4 ? scatter_of<u32, 4> : scatter_of<u32, 8>);
    return work(target, index, values, num, stream);
}

int scape_cuda_take_ages(void* last_sync, int last_bytes, const void* index, int index_bytes, i64 first, i64 num, int step, void* out,
                         cudaStream_t stream) {
    if (!num) return 0;
    const i64 grid = ceil_div(num, kThreads);
    if (last_bytes == 4)
        SCAPE_LAUNCH(take_ages_kernel<4>, grid, kThreads, stream, last_sync, index, index_bytes, first, num, step, out);
    else
        SCAPE_LAUNCH(take_ages_kernel<2>, grid, kThreads, stream, last_sync, index, index_bytes, first, num, step, out);
    return last_error();
}

int scape_cuda_mark_overdue(float* rank_by, const void* last_sync, int last_bytes, i64 num, int step, int max_age, cudaStream_t stream) {
    if (!num) return 0;
    const i64 grid = ceil_div(num, kThreads * kStepPer);
    if (last_bytes == 4)
        SCAPE_LAUNCH(mark_overdue_kernel<4>, grid, kThreads, stream, rank_by, last_sync, num, step, max_age);
    else
        SCAPE_LAUNCH(mark_overdue_kernel<2>, grid, kThreads, stream, rank_by, last_sync, num, step, max_age);
    return last_error();
}

int scape_cuda_owner_step(const Owner* c, cudaStream_t stream) {
    if (!c->num) return 0;
    if (c->index) return c->decay ? owner_of<true, 1>(*c, stream) : owner_of<false, 1>(*c, stream);
    return c->decay ? owner_of_all<true>(*c, stream) : owner_of_all<false>(*c, stream);
}

int scape_cuda_dense_step(const Dense* c, cudaStream_t stream) {
    if (!c->num) return 0;
    const i64 grid = ceil_div(c->num, kThreads * kStepPer);
    if (c->correction != 1.0f)
        SCAPE_LAUNCH(dense_kernel<true>, grid, kThreads, stream, *c);
    else
        SCAPE_LAUNCH(dense_kernel<false>, grid, kThreads, stream, *c);
    return last_error();
}

// lanes: 2^19 doubles; the sum is the first one.
int scape_cuda_sum_of_squares(const void* x, i64 num, int dtype, double* lanes, cudaStream_t stream) {
    const i64 grid = kLanes / kLanesPer / kThreads;
    const bool by_eights = is_aligned(x, 16);
    if (dtype == kFp32)
        SCAPE_LAUNCH(lanes_kernel<kFp32>, grid, kThreads, stream, x, num, by_eights, lanes);
    else if (dtype == kBf16)
        SCAPE_LAUNCH(lanes_kernel<kBf16>, grid, kThreads, stream, x, num, by_eights, lanes);
    else
        SCAPE_LAUNCH(lanes_kernel<kFp16>, grid, kThreads, stream, x, num, by_eights, lanes);
    u32 left = kLanes;
    for (; left >= kHalved; left /= kHalved)
        SCAPE_LAUNCH(halve_kernel<kHalved>, ceil_div(left / kHalved, kThreads), kThreads, stream, lanes, left / kHalved);
    static_assert(kLanes == 8 * kHalved * kHalved * kHalved * kHalved, "");
    SCAPE_LAUNCH(halve_kernel<8>, 1, kThreads, stream, lanes, 1u);
    return last_error();
}

// searches: as they begin, to be copied to those of `scratch`. hints: what this writes for the next time, or none; has_hints: what the last
// time wrote. fills: the parts of c->chosen that no search decides. ctas: as many as the device can have at once, two on a multiprocessor.
int scape_cuda_select(const Select* c, const Scratch* scratch, const Search* searches, i64 num_searches, Hint* hints, int has_hints,
                      const Fill* fills, i64 num_fills, int ctas, cudaStream_t stream) {
    Scratch s = *scratch;
    s.by_fours = is_aligned(c->rank_by, 16) && is_aligned(c->square, 16) && is_aligned(c->last_sync, 4 * c->last_bytes) &&
                 is_aligned(c->chosen, 4);
    s.num_searches = num_searches;
    if (num_searches + num_fills)
        SCAPE_LAUNCH(prepare_kernel, num_searches + num_fills, kThreads, stream, c->chosen, s, searches, has_hints ? hints : nullptr,
                     fills);
    if (!num_searches) return last_error();
    const i64 grid = s.num_tiles < (i64)ctas * kSelectWarps ? ceil_div(s.num_tiles, kSelectWarps) : ctas;
    const bool by_sign = c->last_sync == c->rank_by && c->last_bytes == 4 && c->step == -1 && c->max_age == 0;
    if (by_sign)
        c->square ? choose_as<Kind<true, 0>>(*c, s, grid, has_hints, stream) : choose_as<Kind<false, 0>>(*c, s, grid, has_hints, stream);
    else if (c->last_bytes == 2)
        c->square ? choose_as<Kind<true, 2>>(*c, s, grid, has_hints, stream) : choose_as<Kind<false, 2>>(*c, s, grid, has_hints, stream);
    else
        c->square ? choose_as<Kind<true, 4>>(*c, s, grid, has_hints, stream) : choose_as<Kind<false, 4>>(*c, s, grid, has_hints, stream);
    SCAPE_LAUNCH_NEXT(digit_kernel, s.num_groups, kThreads, stream, *c, s, hints, has_hints != 0);
    SCAPE_LAUNCH_NEXT(equal_kernel, s.num_groups, kThreads, stream, *c, s);
    SCAPE_LAUNCH_NEXT(finish_kernel, s.num_groups, kThreads, stream, *c, s);
    return last_error();
}

// bool [numel] -> words without the coordinates of `dense`. words: ceil(numel / 32).
int scape_cuda_words_of_mask(const u8* mask, i64 numel, u32* words, const Range* dense, i64 num_dense, cudaStream_t stream) {
    if (!numel) return 0;
    const i64 grid = ceil_div(numel, kThreads * kWarp);
    if (is_aligned(mask, 16))
        SCAPE_LAUNCH(words_kernel<true>, grid, kThreads, stream, mask, numel, words);
    else
        SCAPE_LAUNCH(words_kernel<false>, grid, kThreads, stream, mask, numel, words);
    if (num_dense) SCAPE_LAUNCH(fill_kernel, num_dense, kThreads, stream, words, dense, 0);
    return last_error();
}

// Words -> the index encoding. blocks: its runs; before: num_blocks + 1 words of 8 bytes. message: zeros, 4-byte aligned.
int scape_cuda_indices_of_words(const u32* words, const Run* blocks, i64 num_blocks, i64 max_ones, i64* before, u8* message,
                                cudaStream_t stream) {
    if (!num_blocks) return 0;
    SCAPE_LAUNCH(count_kernel, num_blocks, kThreads, stream, words, blocks, (u32*)message);
    SCAPE_LAUNCH(before_kernel, 1, kThreads, stream, (const u16*)message, num_blocks, max_ones, before);
    SCAPE_LAUNCH(offsets_kernel, num_blocks, kThreads, stream, words, blocks, before, max_ones, (u16*)(message + 4 * num_blocks));
    return last_error();
}

// The index encoding (at an even address) -> words, 2,048 for every block; before[num_blocks] becomes -1 where it contradicts itself.
int scape_cuda_words_of_indices(const u8* message, i64 num_blocks, i64 room, i64* before, u32* words, cudaStream_t stream) {
    if (!num_blocks) return 0;
    SCAPE_LAUNCH(before_kernel, 1, kThreads, stream, (const u16*)message, num_blocks, room, before);
    SCAPE_LAUNCH(bits_kernel, num_blocks, kThreads, stream, (const u16*)(message + 4 * num_blocks), before, words);
    return last_error();
}

// Sets the ranges in the words, then writes the positions of all ones of all runs, one run after another, counted from bases[run].
// counts: num_runs words of 4 bytes; before: num_runs + 1 words of 8; position_bytes: 4 or 8.
int scape_cuda_positions(u32* words, const Range* dense, i64 num_dense, const Run* runs, const i64* bases, i64 num_runs, u32* counts,
                         i64* before, i64 room, void* positions, int position_bytes, cudaStream_t stream) {
    if (!num_runs) return 0;
    if (num_dense) SCAPE_LAUNCH(fill_kernel, num_dense, kThreads, stream, words, dense, 1);
    SCAPE_LAUNCH(count_kernel, num_runs, kThreads, stream, words, runs, counts);
    SCAPE_LAUNCH(before_kernel, 1, kThreads, stream, (const u16*)counts, num_runs, (i64)1 << 62, before);
    if (position_bytes == 4)
        SCAPE_LAUNCH(positions_kernel<u32>, num_runs, kThreads, stream, words, runs, bases, before, room, (u32*)positions);
    else
        SCAPE_LAUNCH(positions_kernel<i64>, num_runs, kThreads, stream, words, runs, bases, before, room, (i64*)positions);
    return last_error();
}

}  // extern "C"
