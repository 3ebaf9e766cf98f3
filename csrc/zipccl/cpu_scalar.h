// Block operations (cpu_block.h) without SIMD: what the vector versions must equal, and what other architectures run.
#pragma once

#include "cpu_block.h"

namespace zipccl {

struct Scalar {
    enum { kFetchBlocksAhead = 0 };

    // Position of an element in scan order: lane, half, pair.
    static ZIPCCL_INLINE int element_at(int lane, int half, int pair) {
        return 256 * (pair / 4) + 8 * lane + 2 * (pair % 4) + half;
    }

    static Statistics statistics(const uint8_t* exponents) {
        Statistics all{0, 0, 0};
        for (int e = 0; e < kBlockElems; ++e) {
            const uint32_t value = exponents[e];
            all.num_nonzero += value != 0;
            all.sum += value;
            all.sum_squares += value * value;
        }
        return all;
    }

    static ZIPCCL_INLINE uint32_t code_of(uint32_t exponent, uint32_t lo, uint32_t mode) {
        if (mode == kZeroMode && exponent == 0) return kZeroCode;
        const uint32_t distance = exponent - lo;  // wraps below the window
        return distance <= 7 - mode ? distance : 0;
    }

    static uint32_t encode_codes(const uint8_t* exponents, uint32_t lo, uint32_t mode, uint8_t* packed,
                                 uint8_t* escapes) {
        uint8_t codes[kBlockElems];
        uint32_t count = 0;
        for (int e = 0; e < kBlockElems; ++e) codes[e] = static_cast<uint8_t>(code_of(exponents[e], lo, mode));
        for (int lane = 0; lane < kBlockLanes; ++lane)
            for (int half = 0; half < 2; ++half)
                for (int pair = 0; pair < 16; ++pair) {
                    const int e = element_at(lane, half, pair);
                    escapes[count] = exponents[e];
                    count += codes[e] == 0;
                }
        pack(codes, packed);
        return count;
    }

    static uint32_t decode_codes(const uint8_t* packed, uint32_t lo, uint32_t mode, const uint8_t* escapes,
                                 uint8_t* exponents) {
        uint8_t codes[kBlockElems];
        unpack(packed, codes);
        uint32_t count = 0;
        for (int lane = 0; lane < kBlockLanes; ++lane)
            for (int half = 0; half < 2; ++half)
                for (int pair = 0; pair < 16; ++pair) {
                    const int e = element_at(lane, half, pair);
                    const uint32_t code = codes[e];
                    if (code == 0)
                        exponents[e] = escapes[count++];
                    else
                        exponents[e] = static_cast<uint8_t>(mode == kZeroMode && code == kZeroCode ? 0 : lo + code);
                }
        return count;
    }

    static void pack(const uint8_t* values, uint8_t* packed) {
        for (int lane = 0; lane < kBlockLanes; ++lane)
            for (int k = 0; k < 3; ++k) {
                uint32_t word = 0;
                for (int half = 0; half < 2; ++half) {
                    for (int m = 0; m < 5; ++m)
                        word |= (values[element_at(lane, half, 3 * m + k)] & 7u) << (3 * m + 16 * half);
                    word |= (values[element_at(lane, half, 15)] >> k & 1u) << (15 + 16 * half);
                }
                store(packed + 128 * k + 4 * lane, word);
            }
    }

    static void unpack(const uint8_t* packed, uint8_t* values) {
        for (int lane = 0; lane < kBlockLanes; ++lane) {
            uint32_t last[2] = {0, 0};
            for (int k = 0; k < 3; ++k) {
                const uint32_t word = load<uint32_t>(packed + 128 * k + 4 * lane);
                for (int half = 0; half < 2; ++half) {
                    for (int m = 0; m < 5; ++m)
                        values[element_at(lane, half, 3 * m + k)] = word >> (3 * m + 16 * half) & 7;
                    last[half] |= (word >> (15 + 16 * half) & 1) << k;
                }
            }
            for (int half = 0; half < 2; ++half) values[element_at(lane, half, 15)] = static_cast<uint8_t>(last[half]);
        }
    }

    template <class D>
    static void split(const uint8_t* x, uint8_t* exponents, uint8_t* planes, uint8_t* extra) {
        split_block<D>(x, exponents, planes, extra);
    }
    template <class D>
    static void join(const uint8_t* exponents, const uint8_t* planes, const uint8_t* extra, uint8_t* x) {
        join_block<D>(exponents, planes, extra, x);
    }
    template <class D>
    static void accumulate(const uint8_t* x, float* sum, bool first) {
        accumulate_block<D>(x, sum, first);
    }
    template <class D>
    static void round(const float* sum, uint8_t* out) {
        round_block<D>(sum, out);
    }
};

}  // namespace zipccl
