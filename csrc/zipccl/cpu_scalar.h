// Block operations (cpu_block.h) without instructions that only some machines have: what the others must equal, and what other
// architectures run.
#pragma once

#include <cstddef>

#include "cpu_block.h"

namespace zipccl {

// Vectors of 16 bytes, which compilers have on every architecture.
typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));
typedef uint32_t U32x4 __attribute__((vector_size(16)));
#if defined(__clang__)
#define ZIPCCL_SHUFFLE(T, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ZIPCCL_SHUFFLE(T, a, b, ...) __builtin_shuffle(a, b, T{__VA_ARGS__})
#endif

struct Scalar {
    enum { kFetchBlocksAhead = 2 };

    static Statistics statistics(const uint8_t* exponents) {
        Statistics all{0, 0, 0};
        for (int first = 0; first < kBlockElems; first += 128) {  // so few that narrow sums do
            uint8_t num_nonzero = 0;
            uint16_t sum = 0;
            for (int e = first; e < first + 128; ++e) {
                const int16_t value = exponents[e];
                num_nonzero = static_cast<uint8_t>(num_nonzero + (value != 0));
                sum = static_cast<uint16_t>(sum + value);
                all.sum_squares += static_cast<uint32_t>(value * value);
            }
            all.num_nonzero += num_nonzero;
            all.sum += sum;
        }
        return all;
    }

    // Where the elements of two lanes are, from the first one's first, in scan order; the last one twice, so that 64 is a place, too.
    struct PairTable {
        uint16_t at[65];
    };
    static constexpr PairTable pair_table() {
        PairTable table{};
        for (int n = 0; n < 65; ++n) {
            const int i = n < 64 ? n : 63;
            table.at[n] = static_cast<uint16_t>(256 * (i % 16 / 4) + 8 * (i / 32) + 2 * (i % 4) + i / 16 % 2);
        }
        return table;
    }

    // The codes 0 of packed codes: a bit for each element of two lanes, in scan order.
    static ZIPCCL_INLINE void find_zeros(const uint8_t* packed, uint64_t* zeros) {
        uint32_t lanes[kBlockLanes];
        for (int lane = 0; lane < kBlockLanes; ++lane) {
            const uint32_t w0 = load<uint32_t>(packed + 4 * lane), w1 = load<uint32_t>(packed + 128 + 4 * lane),
                           w2 = load<uint32_t>(packed + 256 + 4 * lane), first = 0x12491249;
            lanes[lane] = ~(((w0 | w0 >> 1 | w0 >> 2) & first) | ((w1 | w1 >> 1 | w1 >> 2) & first) << 1 |
                            ((w2 | w2 >> 1 | w2 >> 2) & first) << 2 | ((w0 | w1 | w2) & 0x80008000));
        }
        std::memcpy(zeros, lanes, sizeof(lanes));
    }
    // Without an instruction for it the compiler's own is a call of a function.
    static ZIPCCL_INLINE int count_bits(uint64_t n) {
        n -= n >> 1 & 0x5555555555555555;
        n = (n & 0x3333333333333333) + (n >> 2 & 0x3333333333333333);
        return static_cast<int>(((n + (n >> 4)) & 0x0F0F0F0F0F0F0F0F) * 0x0101010101010101 >> 56);
    }
    // So many steps are taken for the escapes of two lanes whether they exist or not: they are few, and so the branch behind
    // the steps is nearly always the same.
    enum { kFewEscapes = 5 };
    static ZIPCCL_INLINE int first_of(uint64_t left) { return __builtin_ctzll(left | 1ull << 63); }

    static uint32_t encode_codes(const uint8_t* exponents, uint32_t lo, uint32_t mode, uint8_t* packed,
                                 uint8_t* escapes) {
        static constexpr PairTable kPlaces = pair_table();
        alignas(64) uint8_t codes[kBlockElems];
        uint64_t zeros[kBlockLanes / 2];
        const uint8_t base = static_cast<uint8_t>(lo), width = static_cast<uint8_t>(7 - mode);
        const uint8_t zero_code = mode == kZeroMode ? kZeroCode : 0;
        for (int e = 0; e < kBlockElems; ++e) {  // bytes and masks only: compilers vectorise that everywhere
            const uint8_t distance = static_cast<uint8_t>(exponents[e] - base);  // wraps below the window
            const uint8_t inside = distance <= width ? 255 : 0, zero = exponents[e] == 0 ? 255 : 0;
            codes[e] = static_cast<uint8_t>((distance & inside) | (zero_code & zero));
        }
        pack(codes, packed);
        find_zeros(packed, zeros);
        uint8_t* next = escapes;
        for (int i = 0; i < kBlockLanes / 2; ++i) {
            const uint8_t* const two = exponents + 16 * i;
            uint64_t left = zeros[i];
            const int count = count_bits(left);
            for (int n = 0; n < kFewEscapes; ++n, left &= left - 1) next[n] = two[kPlaces.at[first_of(left)]];
            for (int n = kFewEscapes; n < count; ++n, left &= left - 1) next[n] = two[kPlaces.at[first_of(left)]];
            next += count;
        }
        return static_cast<uint32_t>(next - escapes);
    }

    static uint32_t decode_codes(const uint8_t* packed, uint32_t lo, uint32_t mode, const uint8_t* escapes,
                                 uint8_t* exponents) {
        static constexpr PairTable kPlaces = pair_table();
        uint64_t zeros[kBlockLanes / 2];
        unpack_and_add(packed, static_cast<uint8_t>(lo), exponents);
        if (mode == kZeroMode)
            for (int e = 0; e < kBlockElems; ++e) {
                const uint8_t other = exponents[e] == static_cast<uint8_t>(lo + kZeroCode) ? 0 : 255;
                exponents[e] = static_cast<uint8_t>(exponents[e] & other);
            }
        find_zeros(packed, zeros);
        const uint8_t* next = escapes;
        for (int i = 0; i < kBlockLanes / 2; ++i) {
            uint8_t* const two = exponents + 16 * i;
            uint64_t left = zeros[i];
            const int count = count_bits(left);
            uint8_t& last = two[kPlaces.at[63]];  // where steps without an escape go, too
            const uint8_t kept = left >> 63 ? next[count - 1] : last;
            for (int n = 0; n < kFewEscapes; ++n, left &= left - 1) two[kPlaces.at[first_of(left)]] = next[n];
            for (int n = kFewEscapes; n < count; ++n, left &= left - 1) two[kPlaces.at[first_of(left)]] = next[n];
            last = kept;
            next += count;
        }
        return static_cast<uint32_t>(next - escapes);
    }

    // A lane's values of quarter j are a u64, four pairs of bytes. Those of one half, 16 bits from pair to pair, move to the words' halves,
    // 16 bits from word to word, by shifts of all of them: what else a shift brings along ends above the third word, below bit 60, where
    // pair 15's value comes to lie.
    static ZIPCCL_INLINE uint64_t pack_half(uint64_t q0, uint64_t q1, uint64_t q2, uint64_t q3) {
        const uint64_t t = q0 | q0 >> 45 | q1 << 19 | q1 >> 26 | q2 << 38 | q2 >> 7 | q3 << 12;
        return (t & 0x7FFF7FFF7FFF) | (t >> 45 & 1ull << 15) | (t >> 30 & 1ull << 31) | (t >> 15 & 1ull << 47);
    }

    static void pack(const uint8_t* __restrict values, uint8_t* __restrict packed) {
        const uint64_t bits = 0x0007000700070007;
        for (int lane = 0; lane < kBlockLanes; ++lane) {  // of plain u64, for compilers to vectorise
            const uint8_t* const from = values + 8 * lane;
            const uint64_t q0 = load<uint64_t>(from), q1 = load<uint64_t>(from + 256), q2 = load<uint64_t>(from + 512),
                           q3 = load<uint64_t>(from + 768);
            const uint64_t low = pack_half(q0 & bits, q1 & bits, q2 & bits, q3 & bits);
            const uint64_t high = pack_half(q0 >> 8 & bits, q1 >> 8 & bits, q2 >> 8 & bits, q3 >> 8 & bits);
            store(packed + 4 * lane, static_cast<uint32_t>((low & 0xFFFF) | high << 16));
            store(packed + 128 + 4 * lane, static_cast<uint32_t>((low >> 16 & 0xFFFF) | (high & 0xFFFF0000)));
            store(packed + 256 + 4 * lane, static_cast<uint32_t>(low >> 32 | (high >> 16 & 0xFFFF0000)));
        }
    }

    static void unpack(const uint8_t* packed, uint8_t* values) { unpack_and_add(packed, 0, values); }

    // Each value plus `add`, modulo 256. Four lanes at once; letters stand for w, digits for h, so a byte of lane 0 is a0 to d1.
    static ZIPCCL_INLINE void unpack_and_add(const uint8_t* packed, uint8_t add, uint8_t* values) {
        const U8x16 addends = U8x16{} + add;
        for (int lane = 0; lane < kBlockLanes; lane += 4) {
            U16x8 words[4];  // a u16 is a half of a lane's word; the fourth is pair 15
            for (int k = 0; k < 3; ++k) words[k] = load<U16x8>(packed + 128 * k + 4 * lane);
            words[3] = words[0] >> 15 | (words[1] >> 14 & 2) | (words[2] >> 13 & 4);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const U16x8 ab = code_of(words, 4 * j, 0) | code_of(words, 4 * j + 1, 8);  // lane 0: a0 b0, a1 b1; lane 1 ...
                const U16x8 cd = code_of(words, 4 * j + 2, 0) | code_of(words, 4 * j + 3, 8);
                const U32x4 first = reinterpret_cast<U32x4>(ZIPCCL_SHUFFLE(U16x8, ab, cd, 0, 8, 1, 9, 2, 10, 3, 11));
                const U32x4 second = reinterpret_cast<U32x4>(ZIPCCL_SHUFFLE(U16x8, ab, cd, 4, 12, 5, 13, 6, 14, 7, 15));
                const U8x16 half0 = reinterpret_cast<U8x16>(ZIPCCL_SHUFFLE(U32x4, first, second, 0, 2, 4, 6));  // a0 b0 c0 d0 of each
                const U8x16 half1 = reinterpret_cast<U8x16>(ZIPCCL_SHUFFLE(U32x4, first, second, 1, 3, 5, 7));
                uint8_t* const to = values + 256 * j + 8 * lane;
                store(to, ZIPCCL_SHUFFLE(U8x16, half0, half1, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) + addends);
                store(to + 16, ZIPCCL_SHUFFLE(U8x16, half0, half1, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31) + addends);
            }
        }
    }
    // The codes of pair `p`, moved to bit `at`, 0 or 8.
    static ZIPCCL_INLINE U16x8 code_of(const U16x8 (&words)[4], int p, int at) {
        const int from = p == 15 ? 0 : 3 * (p / 3);
        const U16x8 word = words[p == 15 ? 3 : p % 3];
        return (from >= at ? word >> (from - at) : word << (at - from)) & static_cast<uint16_t>(7 << at);
    }

    template <class D>
    static void split(const uint8_t* x, uint8_t* exponents, uint8_t* planes, uint8_t* extra) {
        split_block<D>(x, exponents, planes, extra);
    }
    template <class D>
    static void join(const uint8_t* exponents, const uint8_t* planes, const uint8_t* extra, uint8_t* x) {
        if constexpr (std::is_same_v<D, Bf16>) {
            for (int e = 0; e < kBlockElems; ++e) {
                const uint8_t even = static_cast<uint8_t>((exponents[e] | 0xFE) + 1);  // 255 or 0: a shift of bytes by 7 takes
                x[2 * e] = static_cast<uint8_t>((0x80 & ~even) | (planes[e] & 0x7F));  // seven additions without newer instructions
                x[2 * e + 1] = static_cast<uint8_t>((planes[e] & 0x80) | exponents[e] >> 1);
            }
        } else {
            join_block<D>(exponents, planes, extra, x);
        }
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
