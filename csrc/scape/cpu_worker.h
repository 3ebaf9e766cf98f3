// What a worker does with its residual: fresh gradients enter, what is sent leaves; and the loops that convert between float types.
#pragma once

#include <algorithm>
#include <cstdint>

#include "calls.h"
#include "zipccl/cpu_dtypes.h"

namespace scape {

#define SCAPE_INLINE inline __attribute__((always_inline))

SCAPE_INLINE int64_t size_of(int32_t dtype) { return dtype == kFp32 ? 4 : 2; }

// Elements that are worked on at a time: what is read of them stays in the first cache.
enum { kBlock = 2048 };

template <class D>
SCAPE_INLINE void read_as(const void* from, int64_t num, float* to) {
    const auto* source = static_cast<const typename D::Bits*>(from);
    for (int64_t i = 0; i < num; ++i) to[i] = D::to_float(source[i]);
}

// Floats of `num` elements of any type; `space` holds them where they have to be converted.
SCAPE_INLINE const float* as_floats(const void* from, int64_t start, int64_t num, int32_t dtype, float* space) {
    if (dtype == kFp32) return static_cast<const float*>(from) + start;
    const uint16_t* source = static_cast<const uint16_t*>(from) + start;
    dtype == kBf16 ? read_as<zipccl::Bf16>(source, num, space) : read_as<zipccl::Fp16>(source, num, space);
    return space;
}

template <class D>
SCAPE_INLINE void write_as(const float* from, int64_t num, void* to) {
    auto* target = static_cast<typename D::Bits*>(to);
    for (int64_t i = 0; i < num; ++i) target[i] = D::from_float(from[i]);
}

// Rounds to nearest even.
SCAPE_INLINE void from_floats(const float* from, int64_t num, void* to, int64_t start, int32_t dtype) {
    if (dtype == kFp32) {
        std::copy(from, from + num, static_cast<float*>(to) + start);
    } else {
        uint16_t* target = static_cast<uint16_t*>(to) + start;
        dtype == kBf16 ? write_as<zipccl::Bf16>(from, num, target) : write_as<zipccl::Fp16>(from, num, target);
    }
}

template <class D, class Index>
SCAPE_INLINE void take_at(float* residual, const Index* index, int64_t num, int64_t first, void* values) {
    auto* out = static_cast<typename D::Bits*>(values);
    for (int64_t i = 0; i < num; ++i) {
        float& r = residual[index[i] - first];
        const auto value = D::from_float(r);
        out[i] = value;
        r = minus(r, D::to_float(value));
    }
}

template <class D>
SCAPE_INLINE void take_all(float* residual, int64_t num, void* values) {
    auto* out = static_cast<typename D::Bits*>(values);
    for (int64_t i = 0; i < num; ++i) {
        const auto value = D::from_float(residual[i]);
        out[i] = value;
        residual[i] = minus(residual[i], D::to_float(value));
    }
}

// FP32 as it is, NaN payloads included.
struct Exact {
    using Bits = float;
    static SCAPE_INLINE float to_float(float value) { return value; }
    static SCAPE_INLINE float from_float(float value) { return value; }
};

// Index: uint32_t or int64_t.
template <class Index>
SCAPE_INLINE void enter_piece(const Enter& c, int64_t begin, int64_t end) {
    float space[kBlock];
    const Index* const index = static_cast<const Index*>(c.index);
    const Index* const stop = index + c.num_index;
    const Index* at = index ? std::lower_bound(index, stop, c.first + begin) : nullptr;
    for (int64_t start = begin; start < end; start += kBlock) {
        const int64_t num = std::min<int64_t>(kBlock, end - start);
        float* const residual = c.residual + start;
        if (c.gradient) {
            const float* fresh = as_floats(c.gradient, start, num, c.gradient_dtype, space);
            if (c.factor != 1.0f) {
                for (int64_t i = 0; i < num; ++i) space[i] = times(fresh[i], c.factor);
                fresh = space;
            }
            for (int64_t i = 0; i < num; ++i) residual[i] = plus(residual[i], fresh[i]);
            if (c.square) {
                const int64_t lo = std::max(start, c.own_start), hi = std::min(start + num, c.own_start + c.own_num);
                float* const square = c.square - c.own_start;
                for (int64_t i = lo; i < hi; ++i) square[i] = tracked_square(square[i], fresh[i - start], c.beta2, c.rest2);
            }
        }
        if (c.values && c.index) {
            const Index* const from = at;
            while (at < stop && *at < c.first + start + num) ++at;
            const int64_t k = from - index;
            switch (c.values_dtype) {
                case kBf16: take_at<zipccl::Bf16>(residual, from, at - from, c.first + start, static_cast<uint16_t*>(c.values) + k); break;
                case kFp16: take_at<zipccl::Fp16>(residual, from, at - from, c.first + start, static_cast<uint16_t*>(c.values) + k); break;
                default: take_at<Exact>(residual, from, at - from, c.first + start, static_cast<float*>(c.values) + k);
            }
        } else if (c.values) {
            switch (c.values_dtype) {
                case kBf16: take_all<zipccl::Bf16>(residual, num, static_cast<uint16_t*>(c.values) + start); break;
                case kFp16: take_all<zipccl::Fp16>(residual, num, static_cast<uint16_t*>(c.values) + start); break;
                default: take_all<Exact>(residual, num, static_cast<float*>(c.values) + start);
            }
        }
    }
}

// q of the elements [begin, end), from a gradient of their own.
SCAPE_INLINE void track_piece(const Enter& c, int64_t begin, int64_t end) {
    float space[kBlock];
    for (int64_t start = begin; start < end; start += kBlock) {
        const int64_t num = std::min<int64_t>(kBlock, end - start);
        const float* fresh = as_floats(c.gradient, start, num, c.gradient_dtype, space);
        if (c.factor != 1.0f) {
            for (int64_t i = 0; i < num; ++i) space[i] = times(fresh[i], c.factor);
            fresh = space;
        }
        for (int64_t i = 0; i < num; ++i) c.square[start + i] = tracked_square(c.square[start + i], fresh[i], c.beta2, c.rest2);
    }
}

}  // namespace scape
