// Block operations (cpu_block.h) without SIMD: what the vector versions must equal, and what other architectures run.
#pragma once

#include <cstddef>

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

    // Calls f(element) for the zeros of `codes` in scan order.
    template <class F>
    static ZIPCCL_INLINE void for_each_zero(const uint8_t* codes, const F& f) {
        uint64_t zeros[kBlockLanes / 2];  // a bit for each element of two lanes, in scan order
        for (int lane = 0; lane < kBlockLanes; ++lane) {
            uint64_t bits = 0;
            for (int j = 0; j < 4; ++j) {
                const uint64_t eight = load<uint64_t>(codes + element_at(lane, 0, 4 * j));
                const uint64_t flags = ~(eight + 0x7F7F7F7F7F7F7F7F) >> 7 & 0x0101010101010101;
                // Flag 2 w + half -> bit 4 half + w: of the 64 products of two bits no two fall on one place.
                const uint64_t pairs = flags * 0x0110022004400880 >> 56;
                bits |= (pairs & 15) << 4 * j | pairs >> 4 << (16 + 4 * j);
            }
            zeros[lane / 2] = lane % 2 ? zeros[lane / 2] | bits << 32 : bits;
        }
        for (int i = 0; i < kBlockLanes / 2; ++i)
            for (uint64_t left = zeros[i]; left != 0; left &= left - 1) {
                const int place = __builtin_ctzll(left);
                f(element_at(2 * i + place / 32, place / 16 % 2, place % 16));
            }
    }

    static uint32_t encode_codes(const uint8_t* exponents, uint32_t lo, uint32_t mode, uint8_t* packed,
                                 uint8_t* escapes) {
        uint8_t codes[kBlockElems];
        uint32_t count = 0;
        const uint8_t base = static_cast<uint8_t>(lo), width = static_cast<uint8_t>(7 - mode);
        const uint8_t zero_code = mode == kZeroMode ? kZeroCode : 0;
        for (int e = 0; e < kBlockElems; ++e) {  // bytes and masks only: compilers vectorise that everywhere
            const uint8_t distance = static_cast<uint8_t>(exponents[e] - base);  // wraps below the window
            const uint8_t inside = distance <= width ? 255 : 0, zero = exponents[e] == 0 ? 255 : 0;
            codes[e] = static_cast<uint8_t>((distance & inside) | (zero_code & zero));
        }
        for_each_zero(codes, [&](int e) { escapes[count++] = exponents[e]; });
        pack(codes, packed);
        return count;
    }

    static uint32_t decode_codes(const uint8_t* packed, uint32_t lo, uint32_t mode, const uint8_t* escapes,
                                 uint8_t* exponents) {
        uint8_t codes[kBlockElems];
        unpack(packed, codes);
        uint32_t count = 0;
        const uint8_t base = static_cast<uint8_t>(lo), zero_code = mode == kZeroMode ? kZeroCode : 255;
        for (int e = 0; e < kBlockElems; ++e) {
            const uint8_t other = codes[e] == zero_code ? 0 : 255;
            exponents[e] = static_cast<uint8_t>((base + codes[e]) & other);
        }
        for_each_zero(codes, [&](int e) { exponents[e] = escapes[count++]; });
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

    static constexpr std::nullptr_t copy_uncached = nullptr, drain = nullptr;
};

}  // namespace zipccl
