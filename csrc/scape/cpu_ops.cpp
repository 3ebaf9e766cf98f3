// The CPU kernels' C interface (ds_scape/kernels/impl_cpu.py calls it; ds_scape/kernels/ops.py says what the functions do). Nothing here
// depends on torch; pointers are the host's, tensors are contiguous and aligned to their elements.
//
// The loops are plain; every instruction set gets its own copy of them, vectorised by the compiler, and one is chosen by the caller.
#include <new>

#include "cpu_mask.h"
#include "cpu_owner.h"
#include "cpu_select.h"

using namespace scape;
using zipscape::parallel_for;

namespace {

struct Ops {
    void (*enter)(const Enter&, int64_t, int64_t);
    void (*track)(const Enter&, int64_t, int64_t);
    void (*owner)(const Owner&, int64_t, int64_t);
    void (*dense)(const Dense&, int64_t, int64_t);
    SelectOps select;
};

#define SCAPE_ISA(name, target)                                                                                                          \
    struct name {                                                                                                                        \
        target static void enter(const Enter& c, int64_t begin, int64_t end) {                                                            \
            c.index_bytes == 4 ? enter_piece<uint32_t>(c, begin, end) : enter_piece<int64_t>(c, begin, end);                              \
        }                                                                                                                                \
        target static void track(const Enter& c, int64_t begin, int64_t end) { track_piece(c, begin, end); }                             \
        target static void owner(const Owner& c, int64_t begin, int64_t end) {                                                           \
            c.decay ? owner_piece<true>(c, begin, end) : owner_piece<false>(c, begin, end);                                              \
        }                                                                                                                                \
        target static void dense(const Dense& c, int64_t begin, int64_t end) {                                                           \
            c.correction != 1.0f ? dense_piece<true>(c, begin, end) : dense_piece<false>(c, begin, end);                                 \
        }                                                                                                                                \
        target static void keys(const Select& c, int64_t start, int64_t num, uint32_t* out) { keys_of(c, start, num, out); }             \
        target static void count(const Select& c, int64_t start, int64_t num, uint32_t* out) { count_keys(c, start, num, out); }         \
        target static void sample(const Select& c, int64_t start, int64_t num, uint32_t* out) { sample_keys(c, start, num, out); }       \
        target static int64_t above(const Select& c, int64_t start, int64_t num, Bracket bracket, Noted* noted, int64_t room, int64_t* sum) { \
            return choose_above(c, start, num, bracket, noted, room, sum);                                                               \
        }                                                                                                                                \
        target static int64_t inside(const uint32_t* keys, int64_t num, Bracket bracket, uint32_t* kept, int64_t* sum) {                 \
            return keep_inside(keys, num, bracket, kept, sum);                                                                           \
        }                                                                                                                                \
        target static void choose(const uint32_t* keys, int64_t num, uint32_t last, int64_t wanted, uint8_t* chosen) {                   \
            choose_from(keys, num, last, wanted, chosen);                                                                                \
        }                                                                                                                                \
        static constexpr Ops kOps{enter, track, owner, dense, {keys, count, sample, above, inside, choose}};                                             \
    };

enum Isa : int32_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

SCAPE_ISA(Baseline, )
#if defined(__x86_64__)
SCAPE_ISA(Avx2, __attribute__((target("avx2,bmi,bmi2,popcnt"))))
SCAPE_ISA(Avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,bmi,bmi2,popcnt,prefer-vector-width=512"))))
#endif

bool supported(int32_t isa) {
#if defined(__x86_64__)
    if (isa == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    if (isa == kAvx512)
        return supported(kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
    return isa == kScalar;
}

// Of an instruction set that the machine has (the caller asked).
const Ops& ops_of([[maybe_unused]] int32_t isa) {
#if defined(__x86_64__)
    if (isa == kAvx2) return Avx2::kOps;
    if (isa == kAvx512) return Avx512::kOps;
#endif
    return Baseline::kOps;
}

enum : int64_t { kChunk = 1 << 16 };
struct None {};

// work(begin, end) over pieces of 0 .. num - 1, on several threads where `bytes` are worth it.
template <class Work>
void in_chunks(int64_t num, int64_t chunk, int64_t bytes, int32_t num_threads, const Work& work) {
    parallel_for<None>((num + chunk - 1) / chunk, bytes, num_threads,
                       [&](None&, int64_t i) { work(i * chunk, std::min(num, (i + 1) * chunk)); });
}

enum { kOutOfMemory = -1 };

template <class Work>
int64_t guarded(const Work& work) try {
    return work();
} catch (const std::bad_alloc&) {
    return kOutOfMemory;
}

template <class T, class Index>
void scatter(T* target, const Index* index, const T* values, int64_t num, int32_t num_threads) {
    in_chunks(num, kChunk, 16 * num, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) target[index[i]] = values[i];
    });
}

}  // namespace

// All return 0, or -1: out of memory; or a positive number where it is said below.
extern "C" {

// Whether this machine runs instruction set `isa`: 0 what every machine has, 1 AVX2, 2 AVX-512.
int32_t scape_cpu_supports(int32_t isa) {
    return supported(isa);
}

// Sizes of Enter, Select, Owner and Dense, to be compared with the caller's.
int32_t scape_cpu_struct_size(int32_t number) {
    const size_t sizes[] = {sizeof(Enter), sizeof(Select), sizeof(Owner), sizeof(Dense)};
    return static_cast<int32_t>(sizes[number]);
}

int64_t scape_cpu_enter(const Enter* c, int32_t num_threads, int32_t isa) {
    return guarded([&] {
        const Ops& ops = ops_of(isa);
        if (!c->gradient && !c->values) return 0;
        if (!c->gradient && c->index)           // nothing but what is taken
            in_chunks(c->num_index, kChunk / 8, 40 * c->num_index, num_threads, [&](int64_t begin, int64_t end) {
                Enter part = *c;
                part.index = static_cast<const char*>(c->index) + begin * c->index_bytes, part.num_index = end - begin;
                part.values = static_cast<char*>(c->values) + begin * size_of(c->values_dtype);
                const auto place = [&](int64_t i) { return position_at(c->index, i, c->index_bytes) - c->first; };
                ops.enter(part, place(begin), place(end - 1) + 1);
            });
        else
            in_chunks(c->num, kChunk, 12 * c->num, num_threads, [&](int64_t begin, int64_t end) { ops.enter(*c, begin, end); });
        return 0;
    });
}

// ops.track_square: fields gradient, gradient_dtype, square, num, factor, beta2 and rest2.
int64_t scape_cpu_track_square(const Enter* c, int32_t num_threads, int32_t isa) {
    return guarded([&] {
        in_chunks(c->num, kChunk, 12 * c->num, num_threads, [&](int64_t begin, int64_t end) { ops_of(isa).track(*c, begin, end); });
        return 0;
    });
}

int64_t scape_cpu_scatter(void* target, const void* index, int32_t index_bytes, const void* values, int64_t num, int32_t itemsize,
                          int32_t num_threads) {
    return guarded([&] {
        const auto by = [&](const auto* positions) {
            itemsize == 2 ? scatter(static_cast<uint16_t*>(target), positions, static_cast<const uint16_t*>(values), num, num_threads)
                          : scatter(static_cast<uint32_t*>(target), positions, static_cast<const uint32_t*>(values), num, num_threads);
        };
        index_bytes == 4 ? by(static_cast<const uint32_t*>(index)) : by(static_cast<const int64_t*>(index));
        return 0;
    });
}

int64_t scape_cpu_take_ages(void* last_sync, int32_t last_bytes, const void* index, int32_t index_bytes, int64_t first, int64_t num,
                            int32_t step, void* out, int32_t num_threads) {
    return guarded([&] {
        in_chunks(num, kChunk, 16 * num, num_threads, [&](int64_t begin, int64_t end) {
            const auto by = [&](auto* last, const auto* positions) {
                take_ages(last, positions, first, step, static_cast<decltype(last)>(out), begin, end);
            };
            const auto of = [&](auto* last) {
                index_bytes == 4 ? by(last, static_cast<const uint32_t*>(index)) : by(last, static_cast<const int64_t*>(index));
            };
            last_bytes == 4 ? of(static_cast<int32_t*>(last_sync)) : of(static_cast<int16_t*>(last_sync));
        });
        return 0;
    });
}

int64_t scape_cpu_mark_overdue(float* rank_by, const void* last_sync, int32_t last_bytes, int64_t num, int32_t step, int32_t max_age,
                               int32_t num_threads) {
    return guarded([&] {
        in_chunks(num, kChunk, 12 * num, num_threads, [&](int64_t begin, int64_t end) {
            last_bytes == 4 ? mark_overdue(rank_by, static_cast<const int32_t*>(last_sync), step, max_age, begin, end)
                            : mark_overdue(rank_by, static_cast<const int16_t*>(last_sync), step, max_age, begin, end);
        });
        return 0;
    });
}

int64_t scape_cpu_select(const Select* c, const int64_t* segments, int64_t num_segments, int32_t num_threads, int32_t isa) {
    return guarded([&] {
        select(*c, ops_of(isa).select, segments, num_segments, num_threads);
        return 0;
    });
}

int64_t scape_cpu_owner_step(const Owner* c, int32_t num_threads, int32_t isa) {
    return guarded([&] {
        in_chunks(c->num, kChunk / 8, 36 * c->num, num_threads, [&](int64_t begin, int64_t end) { ops_of(isa).owner(*c, begin, end); });
        return 0;
    });
}

int64_t scape_cpu_dense_step(const Dense* c, int32_t num_threads, int32_t isa) {
    return guarded([&] {
        in_chunks(c->num, kChunk, 20 * c->num, num_threads, [&](int64_t begin, int64_t end) { ops_of(isa).dense(*c, begin, end); });
        return 0;
    });
}

// ops.pack_mask; dense: num_dense times (start, stop). 2: more ones than max_ones.
int64_t scape_cpu_pack_mask(const uint8_t* mask, int64_t numel, const int64_t* dense, int64_t num_dense, int32_t as_bits, int64_t max_ones,
                            uint8_t* message, int32_t num_threads) {
    return guarded([&] {
        return pack_mask(mask, numel, reinterpret_cast<const Range*>(dense), num_dense, as_bits, max_ones, message, num_threads);
    });
}

// ops.unpack_mask; position_bytes: 4 or 8. 1: the message contradicts itself.
int64_t scape_cpu_unpack_mask(const uint8_t* message, int64_t num_bytes, int64_t numel, const int64_t* dense, int64_t num_dense,
                              int32_t as_bits, const int64_t* sizes, int64_t num_parts, const int64_t* counts, void* const* positions,
                              int32_t position_bytes, int64_t* found, int32_t num_threads) {
    return guarded([&] {
        return (position_bytes == 4 ? unpack_mask<uint32_t> : unpack_mask<int64_t>)(
            message, num_bytes, numel, reinterpret_cast<const Range*>(dense), num_dense, as_bits, sizes, num_parts, counts, positions, found,
            num_threads);
    });
}

}  // extern "C"
