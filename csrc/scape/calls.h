// The arguments of SCAPE's kernels, the same for C++ and CUDA; ds_scape/kernels/c_structs.py has them field by field. What they mean:
// ds_scape/kernels/ops.py. Tensors are contiguous and aligned to their elements.
#ifndef SCAPE_CALLS_H
#define SCAPE_CALLS_H

#include <stdint.h>

#include "rule.h"

namespace scape {

enum Dtype : int32_t { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

// Positions, ascending: of 4 bytes, without a sign, or of 8.
SCAPE_RULE int64_t position_at(const void* index, int64_t i, int32_t bytes) {
    return bytes == 4 ? ((const uint32_t*)index)[i] : ((const int64_t*)index)[i];
}

// Steps since the last synchronisation, which is kept in 4 bytes, or in 2 as what is left of it.
SCAPE_RULE int32_t age_at(const void* last_sync, int64_t i, int32_t bytes, int32_t step) {
    return bytes == 4 ? step - ((const int32_t*)last_sync)[i] : (uint16_t)(step - ((const int16_t*)last_sync)[i]);
}

// ops.enter; no gradient, index, values or square: null. starts: for CUDA, where a gradient enters and an index has any: room for a number
// for every tile of 4,096 elements, and one.
struct Enter {
    float* residual;
    const void* gradient;
    const void* index;
    void* values;
    float* square;
    int64_t* starts;
    int64_t num, num_index, first, own_start, own_num;
    int32_t gradient_dtype, values_dtype, index_bytes;
    float factor, beta2, rest2;
};

// ops.select; square: null where rank_by holds scores.
struct Select {
    const float* rank_by;
    const float* square;
    const void* last_sync;
    uint8_t* chosen;
    int64_t num;
    int32_t step, max_age, last_bytes;
};

// ops.owner_step; index: null for all, decay: null for none. lasts_by_place: last_sync is of the coordinates at index alone.
struct Owner {
    float* weight;
    float* momentum;
    void* last_sync;
    const float* mean;
    const void* index;
    const float* kept;
    const float* taken;
    const float* moved;
    const float* gradient_moved;
    const float* decay;
    void* out;
    int64_t num, num_tables, num_decay;
    int32_t step, catch_up, out_dtype, index_bytes, last_bytes, lasts_by_place;
    Numbers numbers;
};

// ops.dense_step.
struct Dense {
    float* weight;
    float* momentum;
    const float* gradient;
    int64_t num;
    float kept, taken, decay, correction;
    Numbers numbers;
};

}  // namespace scape

#endif  // SCAPE_CALLS_H
