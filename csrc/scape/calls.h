// The arguments of SCAPE's kernels, the same for C++ and CUDA; ds_scape/kernels/c_structs.py has them field by field. What they mean:
// ds_scape/kernels/ops.py. Tensors are contiguous and aligned to their elements.
#ifndef SCAPE_CALLS_H
#define SCAPE_CALLS_H

#include <stdint.h>

#include "rule.h"

namespace scape {

enum Dtype : int32_t { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

// ops.enter; no gradient, index, values or square: null.
struct Enter {
    float* residual;
    const void* gradient;
    const int64_t* index;  // ascending
    void* values;
    float* square;
    int64_t num, num_index, first, own_start, own_num;
    int32_t gradient_dtype, values_dtype;
    float factor, beta2, rest2;
};

// ops.select; square: null where rank_by holds scores.
struct Select {
    const float* rank_by;
    const float* square;
    const int32_t* last_sync;
    uint8_t* chosen;
    int64_t num;
    int32_t step, max_age;
};

// ops.owner_step; index: null for all, decay: null for none.
struct Owner {
    float* weight;
    float* momentum;
    int32_t* last_sync;
    const float* mean;
    const int64_t* index;
    const float* kept;
    const float* taken;
    const float* moved;
    const float* gradient_moved;
    const float* decay;
    void* out;
    int64_t num, num_tables, num_decay;
    int32_t step, catch_up, out_dtype;
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
