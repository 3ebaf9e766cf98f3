// Block operations (cpu_block.h) for AVX2.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "cpu_scalar.h"

#define ZIPCCL_AVX2 __attribute__((target("avx2,bmi,bmi2,f16c,popcnt")))
#define ZIPCCL_AVX2_INLINE ZIPCCL_AVX2 inline __attribute__((always_inline))

namespace zipccl {

class Avx2 {
    enum { kFewEscapes = 5 };

    static ZIPCCL_AVX2_INLINE __m256i both(char b0, char b1, char b2, char b3, char b4, char b5, char b6, char b7,
                                           char b8, char b9, char b10, char b11, char b12, char b13, char b14,
                                           char b15) {
        return _mm256_broadcastsi128_si256(
            _mm_setr_epi8(b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15));
    }
    static ZIPCCL_AVX2_INLINE __m256i load32(const uint8_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    static ZIPCCL_AVX2_INLINE void store32(uint8_t* p, __m256i v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
    }
    static ZIPCCL_AVX2_INLINE void store16(uint8_t* p, __m128i v) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v);
    }

    static ZIPCCL_AVX2_INLINE uint32_t add_u32(__m256i v) {
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1))));
    }

    // In element order a quarter of a lane is a0 a1 b0 b1 c0 c1 d0 d1 (letter w, digit h). With a0 b0 in a u16, a1 b1 in the next
    // one, likewise c and d, shifts of u16 bring codes to the words' halves and back.
    //
    // Adds the codes of quarter j of eight lanes, four a register, to words of lanes 0 1 4 5 2 3 6 7.
    static ZIPCCL_AVX2_INLINE void add_quarter(int j, __m256i codes0, __m256i codes1, __m256i (&words)[3]) {
        const __m256i order = both(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
        const __m256i first = _mm256_shuffle_epi8(codes0, order), second = _mm256_shuffle_epi8(codes1, order);
        const __m256i ab = _mm256_unpacklo_epi64(first, second), cd = _mm256_unpackhi_epi64(first, second);
        add_pair(words, 4 * j, ab, 0);
        add_pair(words, 4 * j + 1, ab, 8);
        add_pair(words, 4 * j + 2, cd, 0);
        add_pair(words, 4 * j + 3, cd, 8);
    }
    // The codes of pair `p`, at bit `at` of each u16, to their place.
    static ZIPCCL_AVX2_INLINE void add_pair(__m256i (&words)[3], int p, __m256i codes, int at) {
        if (p == 15) {
            for (int k = 0; k < 3; ++k)
                words[k] = _mm256_or_si256(words[k], _mm256_and_si256(move(codes, 15 - at - k), _mm256_set1_epi16(-0x8000)));
            return;
        }
        const int to = 3 * (p / 3);
        words[p % 3] = _mm256_or_si256(words[p % 3], _mm256_and_si256(move(codes, to - at), _mm256_set1_epi16(7 << to)));
    }
    static ZIPCCL_AVX2_INLINE __m256i move(__m256i v, int up) {
        return up >= 0 ? _mm256_slli_epi16(v, up) : _mm256_srli_epi16(v, -up);
    }
    // Brings such words into the order of the lanes, first of all.
    static ZIPCCL_AVX2_INLINE void store_words(__m256i (&words)[3], uint8_t* packed, int lane) {
        for (int k = 0; k < 3; ++k) {
            words[k] = _mm256_permute4x64_epi64(words[k], 0xD8);
            store32(packed + 128 * k + 4 * lane, words[k]);
        }
    }

    // The codes 0 of eight lanes' words: a u32 a lane, bits in scan order.
    static ZIPCCL_AVX2_INLINE __m256i find_zeros(const __m256i* words) {
        __m256i used = _mm256_and_si256(_mm256_or_si256(_mm256_or_si256(words[0], words[1]), words[2]), _mm256_set1_epi16(-0x8000));
        for (int k = 0; k < 3; ++k) {
            const __m256i any = _mm256_or_si256(_mm256_or_si256(words[k], _mm256_srli_epi16(words[k], 1)), _mm256_srli_epi16(words[k], 2));
            used = _mm256_or_si256(used, _mm256_slli_epi16(_mm256_and_si256(any, _mm256_set1_epi16(0x1249)), k));
        }
        return _mm256_xor_si256(used, _mm256_set1_epi32(-1));
    }

    // The codes of pair `p` of eight lanes' words, moved to bit `at` of each u16.
    static ZIPCCL_AVX2_INLINE __m256i pair_of(const __m256i (&words)[4], int p, int at) {
        const int from = p == 15 ? 0 : 3 * (p / 3);
        return _mm256_and_si256(move(words[p == 15 ? 3 : p % 3], at - from), _mm256_set1_epi16(7 << at));
    }
    // The fourth: pair 15.
    static ZIPCCL_AVX2_INLINE void load_words(const uint8_t* packed, int lane, __m256i (&words)[4]) {
        for (int k = 0; k < 3; ++k) words[k] = load32(packed + 128 * k + 4 * lane);
        const __m256i bit1 = _mm256_and_si256(_mm256_srli_epi16(words[1], 14), _mm256_set1_epi16(2));
        const __m256i bit2 = _mm256_and_si256(_mm256_srli_epi16(words[2], 13), _mm256_set1_epi16(4));
        words[3] = _mm256_or_si256(_mm256_srli_epi16(words[0], 15), _mm256_or_si256(bit1, bit2));
    }
    // Codes of quarter j of eight lanes in element order, four lanes a register.
    static ZIPCCL_AVX2_INLINE void quarter_of(const __m256i (&words)[4], int j, __m256i* codes0, __m256i* codes1) {
        const __m256i order = both(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        const __m256i ab = _mm256_or_si256(pair_of(words, 4 * j, 0), pair_of(words, 4 * j + 1, 8));
        const __m256i cd = _mm256_or_si256(pair_of(words, 4 * j + 2, 0), pair_of(words, 4 * j + 3, 8));
        const __m256i low = _mm256_shuffle_epi8(_mm256_unpacklo_epi16(ab, cd), order);             // lanes 0 1 and 4 5
        const __m256i high = _mm256_shuffle_epi8(_mm256_unpackhi_epi16(ab, cd), order);            // lanes 2 3 and 6 7
        *codes0 = _mm256_permute2x128_si256(low, high, 0x20);
        *codes1 = _mm256_permute2x128_si256(low, high, 0x31);
    }

    static ZIPCCL_AVX2_INLINE __m256i code(__m256i exponents, __m256i base, __m256i width, __m256i zero_code) {
        const __m256i distance = _mm256_sub_epi8(exponents, base);
        const __m256i inside = _mm256_cmpeq_epi8(_mm256_min_epu8(distance, width), distance);
        const __m256i zeros = _mm256_and_si256(_mm256_cmpeq_epi8(exponents, _mm256_setzero_si256()), zero_code);
        return _mm256_or_si256(_mm256_and_si256(distance, inside), zeros);
    }

  public:
    enum { kFetchBlocksAhead = 2 };

    static ZIPCCL_AVX2 Statistics statistics(const uint8_t* exponents) {
        const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi8(1), low = _mm256_set1_epi16(255);
        __m256i nonzero = zero, sum = zero, squares = zero;
        for (int e = 0; e < kBlockElems; e += 32) {
            const __m256i value = load32(exponents + e);
            const __m256i even = _mm256_and_si256(value, low), odd = _mm256_srli_epi16(value, 8);
            nonzero = _mm256_add_epi8(nonzero, _mm256_min_epu8(value, one));
            sum = _mm256_add_epi32(sum, _mm256_sad_epu8(value, zero));
            squares = _mm256_add_epi32(
                squares, _mm256_add_epi32(_mm256_madd_epi16(even, even), _mm256_madd_epi16(odd, odd)));
        }
        return {add_u32(_mm256_sad_epu8(nonzero, zero)), add_u32(sum), add_u32(squares)};
    }

    // Escapes of two lanes are few: so many steps are taken whether they exist or not, and so the branch behind them is nearly
    // always the same.
    static ZIPCCL_AVX2 uint32_t encode_codes(const uint8_t* exponents, uint32_t lo, uint32_t mode, uint8_t* packed,
                                             uint8_t* escapes) {
        static constexpr Scalar::PairTable kPlaces = Scalar::pair_table();
        const __m256i base = _mm256_set1_epi8(static_cast<char>(lo)),
                      width = _mm256_set1_epi8(static_cast<char>(7 - mode));
        const __m256i zero_code = _mm256_set1_epi8(mode == kZeroMode ? kZeroCode : 0);
        alignas(32) uint64_t escaped[kBlockLanes / 2];
        for (int lane = 0; lane < kBlockLanes; lane += 8) {
            __m256i words[3] = {};
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const uint8_t* const from = exponents + 256 * j + 8 * lane;
                add_quarter(j, code(load32(from), base, width, zero_code), code(load32(from + 32), base, width, zero_code), words);
            }
            store_words(words, packed, lane);
            store32(reinterpret_cast<uint8_t*>(escaped + lane / 2), find_zeros(words));
        }
        uint8_t* next = escapes;
        for (int i = 0; i < kBlockLanes / 2; ++i) {
            const uint8_t* const two = exponents + 16 * i;
            uint64_t left = escaped[i];
            const int count = __builtin_popcountll(left);
            for (int n = 0; n < kFewEscapes; ++n, left &= left - 1) next[n] = two[kPlaces.at[_tzcnt_u64(left)]];
            for (int n = kFewEscapes; n < count; ++n, left &= left - 1) next[n] = two[kPlaces.at[_tzcnt_u64(left)]];
            next += count;
        }
        return static_cast<uint32_t>(next - escapes);
    }

    static ZIPCCL_AVX2 uint32_t decode_codes(const uint8_t* packed, uint32_t lo, uint32_t mode, const uint8_t* escapes,
                                             uint8_t* exponents) {
        static constexpr Scalar::PairTable kPlaces = Scalar::pair_table();
        const __m256i base = _mm256_set1_epi8(static_cast<char>(lo));
        const __m256i zero_code = _mm256_set1_epi8(mode == kZeroMode ? kZeroCode : -1);
        alignas(32) uint64_t escaped[kBlockLanes / 2];
        for (int lane = 0; lane < kBlockLanes; lane += 8) {
            __m256i words[4];
            load_words(packed, lane, words);
            store32(reinterpret_cast<uint8_t*>(escaped + lane / 2), find_zeros(words));
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                __m256i codes[2];
                quarter_of(words, j, &codes[0], &codes[1]);
                for (int i = 0; i < 2; ++i)
                    store32(exponents + 256 * j + 8 * lane + 32 * i,
                            _mm256_andnot_si256(_mm256_cmpeq_epi8(codes[i], zero_code), _mm256_add_epi8(codes[i], base)));
            }
        }
        const uint8_t* next = escapes;
        for (int i = 0; i < kBlockLanes / 2; ++i) {
            uint8_t* const two = exponents + 16 * i;
            uint64_t left = escaped[i];
            const int count = __builtin_popcountll(left);
            uint8_t& last = two[kPlaces.at[63]];  // where steps without an escape go, too
            const uint8_t kept = left >> 63 ? next[count - 1] : last;
            for (int n = 0; n < kFewEscapes; ++n, left &= left - 1) two[kPlaces.at[_tzcnt_u64(left)]] = next[n];
            for (int n = kFewEscapes; n < count; ++n, left &= left - 1) two[kPlaces.at[_tzcnt_u64(left)]] = next[n];
            last = kept;
            next += count;
        }
        return static_cast<uint32_t>(next - escapes);
    }

    static ZIPCCL_AVX2 void pack(const uint8_t* values, uint8_t* packed) {
        const __m256i bits = _mm256_set1_epi8(7);
        for (int lane = 0; lane < kBlockLanes; lane += 8) {
            __m256i words[3] = {};
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const uint8_t* const from = values + 256 * j + 8 * lane;
                add_quarter(j, _mm256_and_si256(load32(from), bits), _mm256_and_si256(load32(from + 32), bits), words);
            }
            store_words(words, packed, lane);
        }
    }

    static ZIPCCL_AVX2 void unpack(const uint8_t* packed, uint8_t* values) {
        for (int lane = 0; lane < kBlockLanes; lane += 8) {
            __m256i words[4];
            load_words(packed, lane, words);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                __m256i codes[2];
                quarter_of(words, j, &codes[0], &codes[1]);
                for (int i = 0; i < 2; ++i) store32(values + 256 * j + 8 * lane + 32 * i, codes[i]);
            }
        }
    }

    template <class D>
    static ZIPCCL_AVX2 void split(const uint8_t* x, uint8_t* exponents, uint8_t* planes, uint8_t* extra) {
        split_block<D>(x, exponents, planes, extra);
    }
    template <class D>
    static ZIPCCL_AVX2 void join(const uint8_t* exponents, const uint8_t* planes, const uint8_t* extra, uint8_t* x) {
        join_block<D>(exponents, planes, extra, x);
    }
    template <class D>
    static ZIPCCL_AVX2 void accumulate(const uint8_t* x, float* sum, bool first) {
        if constexpr (std::is_same_v<D, Fp16>) {
            for (int e = 0; e < kBlockElems; e += 8) {
                const __m256 value = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 2 * e)));
                _mm256_storeu_ps(sum + e, first ? value : _mm256_add_ps(_mm256_loadu_ps(sum + e), value));
            }
        } else {
            accumulate_block<D>(x, sum, first);
        }
    }
    template <class D>
    static ZIPCCL_AVX2 void round(const float* sum, uint8_t* out) {
        if constexpr (std::is_same_v<D, Fp16>) {
            const __m128i quiet_nan = _mm_set1_epi16(0x7E00);
            for (int e = 0; e < kBlockElems; e += 8) {
                const __m256 value = _mm256_loadu_ps(sum + e);
                const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
                const __m128i nans = _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
                store16(out + 2 * e,
                        _mm_blendv_epi8(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT), quiet_nan, nans));
            }
        } else {
            round_block<D>(sum, out);
        }
    }

    static ZIPCCL_AVX2 void copy_uncached(const uint8_t* from, uint8_t* to, int64_t bytes) {
        if (reinterpret_cast<uintptr_t>(to) % 32 != 0) {
            std::memcpy(to, from, bytes);
            return;
        }
        for (int64_t i = 0; i < bytes; i += 32)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), load32(from + i));
    }
    static void drain() { _mm_sfence(); }

    static bool supported() {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
               __builtin_cpu_supports("f16c") && __builtin_cpu_supports("popcnt");
    }
};

}  // namespace zipccl

#endif  // __x86_64__
