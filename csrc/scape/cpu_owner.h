// The owner's step over the coordinates that were synchronised, and the dense step.
#pragma once

#include "cpu_worker.h"

namespace scape {

enum { kOwnerBlock = 256 };  // coordinates that are gathered, moved and put back together

// Ages at these places (null: side by side), at least 1; then they are up to date.
template <class Last>
SCAPE_INLINE void ages_at(Last* last_sync, int32_t step, const int64_t* places, int64_t num, int32_t* ages) {
    for (int64_t i = 0; i < num; ++i) {
        const int64_t at = places ? places[i] : i;
        ages[i] = age_at(last_sync, at, sizeof(Last), step - 1) + 1;
        last_sync[at] = static_cast<Last>(step);
    }
}

// ops.take_ages, for the coordinates begin .. end - 1 of `out`.
template <class Last, class Index>
inline void take_ages(Last* last_sync, const Index* index, int64_t first, int32_t step, Last* out, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        Last& last = last_sync[index ? index[i] - first : i];
        out[i] = last;
        last = static_cast<Last>(step);
    }
}

// ops.mark_overdue
template <class Last>
inline void mark_overdue(float* rank_by, const Last* last_sync, int32_t step, int32_t max_age, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
        rank_by[i] = with_bits(sort_key(rank_by[i], age_at(last_sync, i, sizeof(Last), step) >= max_age));
}

template <bool kDecay>
SCAPE_INLINE void owner_piece(const Owner& c, int64_t begin, int64_t end) {
    float w[kOwnerBlock], m[kOwnerBlock], decay[kOwnerBlock];
    float kept[kOwnerBlock], taken[kOwnerBlock], moved[kOwnerBlock], gradient_moved[kOwnerBlock], steps[kOwnerBlock];
    int32_t ages[kOwnerBlock], counted[kOwnerBlock];
    int64_t places[kOwnerBlock];
    const int32_t oldest = static_cast<int32_t>(c.num_tables - 1), last_decay = static_cast<int32_t>(c.num_decay - 1);
    for (int64_t start = begin; start < end; start += kOwnerBlock) {
        const int64_t num = std::min<int64_t>(kOwnerBlock, end - start);
        for (int64_t i = 0; i < num; ++i) places[i] = c.index ? position_at(c.index, start + i, c.index_bytes) : start + i;
        for (int64_t i = 0; i < num; ++i) {
            w[i] = c.weight[places[i]];
            m[i] = c.momentum[places[i]];
        }
        const int64_t* const lasts = c.lasts_by_place ? nullptr : places;
        const int64_t first = c.lasts_by_place ? start : 0;
        c.last_bytes == 4 ? ages_at(static_cast<int32_t*>(c.last_sync) + first, c.step, lasts, num, ages)
                          : ages_at(static_cast<int16_t*>(c.last_sync) + first, c.step, lasts, num, ages);
        int32_t others = 0;
        for (int64_t i = 0; i < num; ++i) {
            counted[i] = c.catch_up ? std::min(ages[i], oldest) : 1;
            others += ages[i] != ages[0];
        }
        if (!others) {          // as in every step without masks
            const auto all = [num](float* values, float value) { std::fill(values, values + num, value); };
            all(kept, c.kept[counted[0]]), all(taken, c.taken[counted[0]]), all(moved, c.moved[counted[0]]);
            all(gradient_moved, c.gradient_moved[counted[0]]), all(steps, static_cast<float>(counted[0]));
            if (kDecay) all(decay, c.decay[std::min(ages[0], last_decay)]);
        }
        for (int64_t i = 0; others && i < num; ++i) {
            kept[i] = c.kept[counted[i]];
            taken[i] = c.taken[counted[i]];
            moved[i] = c.moved[counted[i]];
            gradient_moved[i] = c.gradient_moved[counted[i]];
            steps[i] = static_cast<float>(counted[i]);
        }
        if (kDecay)
            for (int64_t i = 0; others && i < num; ++i) decay[i] = c.decay[std::min(ages[i], last_decay)];
        const float* const mean = c.mean + start;
        for (int64_t i = 0; i < num; ++i)
            catch_up<kDecay>(w[i], m[i], mean[i], Coefficients{kept[i], taken[i], moved[i], gradient_moved[i], steps[i]},
                             kDecay ? decay[i] : 1.0f, c.numbers);
        for (int64_t i = 0; i < num; ++i) {
            c.weight[places[i]] = w[i];
            c.momentum[places[i]] = m[i];
        }
        from_floats(w, num, c.out, start, c.out_dtype);
    }
}

template <bool kCorrected>
SCAPE_INLINE void dense_piece(const Dense& c, int64_t begin, int64_t end) {
    float* __restrict__ const weight = c.weight;
    float* __restrict__ const momentum = c.momentum;
    for (int64_t i = begin; i < end; ++i)
        dense_step<kCorrected>(weight[i], momentum[i], c.gradient[i], c.kept, c.taken, c.decay, c.correction, c.numbers);
}

}  // namespace scape
