// Block operations (cpu_block.h) for AVX2. cpu_avx512.h explains the way from element order to scan order.
// Here a register holds one lane: its half 0 in the low 128 bits, half 1 in the high ones.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "cpu_block.h"

#define ZIPCCL_AVX2 __attribute__((target("avx2,bmi,bmi2,f16c,popcnt")))
#define ZIPCCL_AVX2_INLINE ZIPCCL_AVX2 inline __attribute__((always_inline))

namespace zipccl {

class Avx2 {
    struct Quad {
        __m256i r[4];
    };
    // Exponents of a block in scan order: a decoder's with a lane every kRowBytes, and room behind it for writes that count
    // for nothing.
    enum { kRowBytes = 64, kFewEscapes = 5 };
    struct Rows {
        alignas(64) uint8_t bytes[kBlockLanes * kRowBytes];
        uint32_t escaped[kBlockLanes];
    };

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

    static ZIPCCL_AVX2_INLINE Quad transpose(const Quad& in) {  // 4 x 4 u32 in both 128-bit parts; its own inverse
        const __m256i a0 = _mm256_unpacklo_epi32(in.r[0], in.r[1]), a1 = _mm256_unpackhi_epi32(in.r[0], in.r[1]);
        const __m256i b0 = _mm256_unpacklo_epi32(in.r[2], in.r[3]), b1 = _mm256_unpackhi_epi32(in.r[2], in.r[3]);
        return {{_mm256_unpacklo_epi64(a0, b0), _mm256_unpackhi_epi64(a0, b0), _mm256_unpacklo_epi64(a1, b1),
                 _mm256_unpackhi_epi64(a1, b1)}};
    }

    // Four lanes from `lane` on, one a register: element order in memory <-> scan order.
    static ZIPCCL_AVX2_INLINE Quad load_scan(const uint8_t* values, int lane) {
        const __m256i halves = both(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        Quad quarters;
        for (int j = 0; j < 4; ++j)
            quarters.r[j] =
                _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(load32(values + 256 * j + 8 * lane), halves),
                                            _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
        return transpose(quarters);
    }
    static ZIPCCL_AVX2_INLINE void store_scan(const Quad& lanes, uint8_t* values, int lane) {
        const __m256i elements = both(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        const Quad quarters = transpose(lanes);
        for (int j = 0; j < 4; ++j) {
            const __m256i rows = _mm256_permutevar8x32_epi32(quarters.r[j], _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            store32(values + 256 * j + 8 * lane, _mm256_shuffle_epi8(rows, elements));
        }
    }

    // A lane's codes -> u32 k < 3 of each part: the half of word k without pair 15; u32 3: pair 15's code at bit 4.
    static ZIPCCL_AVX2_INLINE __m256i squeeze(__m256i codes) {
        const __m256i low = _mm256_shuffle_epi8(codes, both(0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, -1, -1, -1, -1));
        const __m256i high =
            _mm256_shuffle_epi8(codes, both(-1, 12, -1, -1, -1, 13, -1, -1, -1, 14, -1, -1, 15, -1, -1, -1));
        const __m256i six = _mm256_maddubs_epi16(low, _mm256_set1_epi16(0x0801));
        return _mm256_or_si256(_mm256_madd_epi16(six, _mm256_set1_epi32(0x00400001)), _mm256_slli_epi32(high, 4));
    }

    static ZIPCCL_AVX2_INLINE void store_words(const Quad& codes, uint8_t* packed, int lane) {
        __m256i lanes[2];  // lanes 0 1 and 2 3; u32 k of a part is word k
        for (int i = 0; i < 2; ++i) {
            const __m256i a = squeeze(codes.r[2 * i]), b = squeeze(codes.r[2 * i + 1]);
            lanes[i] = _mm256_or_si256(_mm256_permute2x128_si256(a, b, 0x20),
                                       _mm256_slli_epi32(_mm256_permute2x128_si256(a, b, 0x31), 16));
        }
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256i words01 = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi32(lanes[0], lanes[1]), order);
        const __m256i words23 = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi32(lanes[0], lanes[1]), order);
        const __m256i last = _mm256_permute2x128_si256(words23, words23, 0x11);
        const __m256i top = _mm256_set1_epi32(static_cast<int>(0x80008000));
        const __m256i shift01 = _mm256_setr_epi32(11, 11, 11, 11, 10, 10, 10, 10);
        const __m256i out01 = _mm256_or_si256(words01, _mm256_and_si256(_mm256_sllv_epi32(last, shift01), top));
        const __m256i out2 = _mm256_or_si256(words23, _mm256_and_si256(_mm256_slli_epi32(last, 9), top));
        store16(packed + 4 * lane, _mm256_castsi256_si128(out01));
        store16(packed + 128 + 4 * lane, _mm256_extracti128_si256(out01, 1));
        store16(packed + 256 + 4 * lane, _mm256_castsi256_si128(out2));
    }

    // The inverse of squeeze, for words given with pair 15's code at bit 0 of u32 3.
    static ZIPCCL_AVX2_INLINE __m256i spread(__m256i words) {
        const __m256i six =
            _mm256_or_si256(_mm256_and_si256(words, _mm256_set1_epi32(0x3F)),
                            _mm256_and_si256(_mm256_slli_epi32(words, 10), _mm256_set1_epi32(0x3F0000)));
        const __m256i low = _mm256_or_si256(_mm256_and_si256(six, _mm256_set1_epi32(0x00070007)),
                                            _mm256_and_si256(_mm256_slli_epi32(six, 5), _mm256_set1_epi32(0x07000700)));
        const __m256i high = _mm256_and_si256(_mm256_srli_epi32(words, 12), _mm256_set1_epi32(7));
        return _mm256_or_si256(
            _mm256_shuffle_epi8(low, both(0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11, -1, -1, -1, 12)),
            _mm256_shuffle_epi8(high, both(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, -1)));
    }

    // Codes of eight lanes from `lane` on, one a register.
    static ZIPCCL_AVX2_INLINE void load_words(const uint8_t* packed, int lane, Quad* low, Quad* high) {
        Quad words;
        for (int k = 0; k < 3; ++k) words.r[k] = load32(packed + 128 * k + 4 * lane);
        const __m256i bit0 = _mm256_and_si256(_mm256_srli_epi32(words.r[0], 15), _mm256_set1_epi32(0x00010001));
        const __m256i bit1 = _mm256_and_si256(_mm256_srli_epi32(words.r[1], 14), _mm256_set1_epi32(0x00020002));
        const __m256i bit2 = _mm256_and_si256(_mm256_srli_epi32(words.r[2], 13), _mm256_set1_epi32(0x00040004));
        words.r[3] = _mm256_or_si256(_mm256_or_si256(bit0, bit1), bit2);
        const Quad lanes = transpose(words);  // lanes i and i + 4 in the parts of register i
        for (int i = 0; i < 4; ++i) {
            const __m256i half0 = spread(_mm256_and_si256(lanes.r[i], _mm256_set1_epi32(0xFFFF)));
            const __m256i half1 = spread(_mm256_srli_epi32(lanes.r[i], 16));
            low->r[i] = _mm256_permute2x128_si256(half0, half1, 0x20);
            high->r[i] = _mm256_permute2x128_si256(half0, half1, 0x31);
        }
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
    // always the same. (A decoder takes four steps a lane.)
    static ZIPCCL_AVX2 uint32_t encode_codes(const uint8_t* exponents, uint32_t lo, uint32_t mode, uint8_t* packed,
                                             uint8_t* escapes) {
        const __m256i base = _mm256_set1_epi8(static_cast<char>(lo)),
                      width = _mm256_set1_epi8(static_cast<char>(7 - mode));
        const __m256i zero = _mm256_setzero_si256(), zero_code = _mm256_set1_epi8(mode == kZeroMode ? kZeroCode : 0);
        Rows rows;
        for (int lane = 0; lane < kBlockLanes; lane += 4) {
            const Quad scan = load_scan(exponents, lane);
            Quad codes;
            for (int i = 0; i < 4; ++i) {
                const __m256i distance = _mm256_sub_epi8(scan.r[i], base);
                const __m256i inside = _mm256_cmpeq_epi8(_mm256_min_epu8(distance, width), distance);
                const __m256i zeros = _mm256_and_si256(_mm256_cmpeq_epi8(scan.r[i], zero), zero_code);
                codes.r[i] = _mm256_or_si256(_mm256_and_si256(distance, inside), zeros);
                rows.escaped[lane + i] =
                    static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(codes.r[i], zero)));
                store32(rows.bytes + 32 * (lane + i), scan.r[i]);
            }
            store_words(codes, packed, lane);
        }
        uint8_t* next = escapes;
        for (int i = 0; i < kBlockLanes / 2; ++i) {
            const uint8_t* two = rows.bytes + 64 * i;
            uint64_t left = load<uint64_t>(rows.escaped + 2 * i);
            const int count = __builtin_popcountll(left);
            for (int n = 0; n < kFewEscapes; ++n, left &= left - 1) next[n] = two[_tzcnt_u64(left) & 63];
            for (int n = kFewEscapes; n < count; ++n, left &= left - 1) next[n] = two[_tzcnt_u64(left)];
            next += count;
        }
        return static_cast<uint32_t>(next - escapes);
    }

    static ZIPCCL_AVX2 uint32_t decode_codes(const uint8_t* packed, uint32_t lo, uint32_t mode, const uint8_t* escapes,
                                             uint8_t* exponents) {
        const __m256i base = _mm256_set1_epi8(static_cast<char>(lo)), zero = _mm256_setzero_si256();
        const __m256i zero_code = _mm256_set1_epi8(mode == kZeroMode ? kZeroCode : -1);
        Rows rows;
        for (int lane = 0; lane < kBlockLanes; lane += 8) {
            Quad codes[2];
            load_words(packed, lane, &codes[0], &codes[1]);
            for (int i = 0; i < 8; ++i) {
                const __m256i code = codes[i / 4].r[i % 4];
                rows.escaped[lane + i] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, zero)));
                store32(rows.bytes + kRowBytes * (lane + i),
                        _mm256_andnot_si256(_mm256_cmpeq_epi8(code, zero_code), _mm256_add_epi8(code, base)));
            }
        }
        const uint8_t* next = escapes;
        for (int lane = 0; lane < kBlockLanes; ++lane) {
            uint8_t* row = rows.bytes + kRowBytes * lane;
            uint32_t left = rows.escaped[lane];
            const int count = __builtin_popcount(left);
            for (int i = 0; i < 4; ++i, left &= left - 1) row[_tzcnt_u32(left)] = next[i];  // 32: behind the lane
            for (int i = 4; i < count; ++i, left &= left - 1) row[_tzcnt_u32(left)] = next[i];
            next += count;
        }
        for (int lane = 0; lane < kBlockLanes; lane += 4) {
            Quad scan;
            for (int i = 0; i < 4; ++i) scan.r[i] = load32(rows.bytes + kRowBytes * (lane + i));
            store_scan(scan, exponents, lane);
        }
        return static_cast<uint32_t>(next - escapes);
    }

    static ZIPCCL_AVX2 void pack(const uint8_t* values, uint8_t* packed) {
        for (int lane = 0; lane < kBlockLanes; lane += 4) {
            Quad scan = load_scan(values, lane);
            for (int i = 0; i < 4; ++i) scan.r[i] = _mm256_and_si256(scan.r[i], _mm256_set1_epi8(7));
            store_words(scan, packed, lane);
        }
    }

    static ZIPCCL_AVX2 void unpack(const uint8_t* packed, uint8_t* values) {
        for (int lane = 0; lane < kBlockLanes; lane += 8) {
            Quad low, high;
            load_words(packed, lane, &low, &high);
            store_scan(low, values, lane);
            store_scan(high, values, lane + 4);
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
