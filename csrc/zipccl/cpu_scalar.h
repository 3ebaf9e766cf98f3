// Block operations (cpu_block.h) without SIMD: what the vector versions must equal, and what other architectures run.
#pragma once

#include <cstddef>

#include "cpu_block.h"

namespace zipccl {

struct Scalar {
    enum { kFetchBlocksAhead = 0 };

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

    // Where the elements of two lanes are, from the first one's first, in scan order.
    struct PairTable {
        uint16_t at[64];
    };
    static constexpr PairTable pair_table() {
        PairTable table{};
        for (int i = 0; i < 64; ++i)
            table.at[i] = static_cast<uint16_t>(256 * (i % 16 / 4) + 8 * (i / 32) + 2 * (i % 4) + i / 16 % 2);
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
            const int count = __builtin_popcountll(left);
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
        unpack_and_add(packed, lo * 0x01010101, exponents);
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
            const int count = __builtin_popcountll(left);
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

    // Each value plus the byte of `add` in its place; no sum may be above 255.
    static ZIPCCL_INLINE void unpack_and_add(const uint8_t* __restrict packed, uint32_t add, uint8_t* __restrict values) {
        for (int lane = 0; lane < kBlockLanes; ++lane) {
            const uint32_t words[3] = {load<uint32_t>(packed + 4 * lane), load<uint32_t>(packed + 128 + 4 * lane),
                                       load<uint32_t>(packed + 256 + 4 * lane)};
            const uint32_t last = (words[0] >> 15 & 0x00010001) | (words[1] >> 14 & 0x00020002) | (words[2] >> 13 & 0x00040004);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {  // two pairs
                const int p = 2 * i, q = p + 1;
                const uint32_t a = words[p % 3] >> 3 * (p / 3) & 0x00070007;
                const uint32_t b = q == 15 ? last : words[q % 3] >> 3 * (q / 3) & 0x00070007;
                const uint32_t two = ((a | a >> 8) & 0xFFFF) | ((b << 8 | b << 16) & 0xFFFF0000);
                store(values + 256 * (i / 2) + 8 * lane + 4 * (i % 2), two + add);
            }
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
