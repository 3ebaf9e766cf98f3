// Block operations (cpu_block.h) for AVX-512 with byte permutes, compress and products: Ice Lake, Zen 4 and later.
//
// A lane's 16 pairs of one half make 16 bytes in scan order: a 128-bit part of a register, "row" t = 2 lane + half.
// Loads are in element order, where the same bytes lie 4 by 4 in the block's four quarters (j): a 4 x 4 transpose of
// u32 leads there and back.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "cpu_block.h"

#define ZIPCCL_AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vnni,avx2,bmi,bmi2,popcnt")))
#define ZIPCCL_AVX512_INLINE ZIPCCL_AVX512 inline __attribute__((always_inline))

namespace zipccl {

// Indices of byte permutes.
namespace avx512 {

struct ByteTable {
    alignas(64) uint8_t at[64];
};

constexpr ByteTable gather_table() {  // 8 lanes of one quarter -> u32 r of part q is row 4 r + q
    ByteTable table{};
    for (int i = 0; i < 64; ++i) {
        const int row = 4 * (i / 4 % 4) + i / 16;
        table.at[i] = static_cast<uint8_t>(8 * (row / 2) + 2 * (i % 4) + row % 2);
    }
    return table;
}
constexpr ByteTable scatter_table() {  // its inverse
    ByteTable table{}, gather = gather_table();
    for (int i = 0; i < 64; ++i) table.at[gather.at[i]] = static_cast<uint8_t>(i);
    return table;
}
// Rows 4 r .. 4 r + 3 of 8 lanes' words, given as bytes k0 k1 | k2 k3: both u64 of a part get the row's half of every
// word.
constexpr ByteTable word_table(int r) {
    ByteTable table{};
    for (int i = 0; i < 64; ++i) {
        const int row = 4 * r + i / 16;
        table.at[i] = static_cast<uint8_t>(32 * (i % 8 / 2) + 4 * (row / 2) + 2 * (row % 2) + i % 2);
    }
    return table;
}
constexpr ByteTable shift_table() {  // where a pair's code starts in such a u64
    ByteTable table{};
    for (int i = 0; i < 64; ++i) {
        const int pair = i % 16;
        table.at[i] = static_cast<uint8_t>(pair < 15 ? 16 * (pair % 3) + 3 * (pair / 3) : 48);
    }
    return table;
}
constexpr ByteTable kGather = gather_table(), kScatter = scatter_table(), kShift = shift_table();
constexpr ByteTable kWords[4] = {word_table(0), word_table(1), word_table(2), word_table(3)};

}  // namespace avx512

class Avx512 {
    struct Quad {
        __m512i r[4];
    };
    static ZIPCCL_AVX512_INLINE __m512i table(const avx512::ByteTable& bytes) { return _mm512_load_si512(bytes.at); }

    static ZIPCCL_AVX512_INLINE Quad transpose(const Quad& in) {  // 4 x 4 u32 in every 128-bit part; its own inverse
        const __m512i a0 = _mm512_unpacklo_epi32(in.r[0], in.r[1]), a1 = _mm512_unpackhi_epi32(in.r[0], in.r[1]);
        const __m512i b0 = _mm512_unpacklo_epi32(in.r[2], in.r[3]), b1 = _mm512_unpackhi_epi32(in.r[2], in.r[3]);
        return {{_mm512_unpacklo_epi64(a0, b0), _mm512_unpackhi_epi64(a0, b0), _mm512_unpacklo_epi64(a1, b1),
                 _mm512_unpackhi_epi64(a1, b1)}};
    }

    // Eight lanes from `lane` on: element order in memory <-> scan order, 16 rows.
    static ZIPCCL_AVX512_INLINE Quad load_scan(const uint8_t* values, int lane) {
        Quad quarters;
        for (int j = 0; j < 4; ++j)
            quarters.r[j] =
                _mm512_permutexvar_epi8(table(avx512::kGather), _mm512_loadu_si512(values + 256 * j + 8 * lane));
        return transpose(quarters);
    }
    static ZIPCCL_AVX512_INLINE void store_scan(const Quad& rows, uint8_t* values, int lane) {
        const Quad quarters = transpose(rows);
        for (int j = 0; j < 4; ++j)
            _mm512_storeu_si512(values + 256 * j + 8 * lane,
                                _mm512_permutexvar_epi8(table(avx512::kScatter), quarters.r[j]));
    }

    // Rows of codes -> u32 k < 3 of each part: the row's half of word k without pair 15; u32 3: pair 15's code at
    // bit 4.
    static ZIPCCL_AVX512_INLINE __m512i squeeze(__m512i codes) {
        const __m512i low = _mm512_shuffle_epi8(
            codes, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, -1, -1, -1, -1)));
        const __m512i high = _mm512_shuffle_epi8(
            codes,
            _mm512_broadcast_i32x4(_mm_setr_epi8(-1, 12, -1, -1, -1, 13, -1, -1, -1, 14, -1, -1, 15, -1, -1, -1)));
        const __m512i six = _mm512_maddubs_epi16(low, _mm512_set1_epi16(0x0801));
        return _mm512_or_si512(_mm512_madd_epi16(six, _mm512_set1_epi32(0x00400001)), _mm512_slli_epi32(high, 4));
    }

    static ZIPCCL_AVX512_INLINE void store_words(const Quad& codes, uint8_t* packed, int lane) {
        __m512i lanes[2];  // four lanes each, in order; u32 k of a part is word k
        for (int i = 0; i < 2; ++i) {
            const __m512i a = squeeze(codes.r[2 * i]), b = squeeze(codes.r[2 * i + 1]);
            lanes[i] = _mm512_or_si512(_mm512_shuffle_i32x4(a, b, 0x88),
                                       _mm512_slli_epi32(_mm512_shuffle_i32x4(a, b, 0xDD), 16));
        }
        const __m512i even = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        const __m512i words01 = _mm512_permutex2var_epi32(lanes[0], even, lanes[1]);
        const __m512i words23 =
            _mm512_permutex2var_epi32(lanes[0], _mm512_add_epi32(even, _mm512_set1_epi32(2)), lanes[1]);
        const __m512i last = _mm512_shuffle_i64x2(words23, words23, 0xEE);
        const __m512i top = _mm512_set1_epi32(static_cast<int>(0x80008000));
        const __m512i shift01 = _mm512_setr_epi32(11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 10, 10, 10);
        const __m512i out01 = _mm512_or_si512(words01, _mm512_and_si512(_mm512_sllv_epi32(last, shift01), top));
        const __m512i out2 = _mm512_or_si512(words23, _mm512_and_si512(_mm512_slli_epi32(last, 9), top));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + 4 * lane), _mm512_castsi512_si256(out01));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + 128 + 4 * lane), _mm512_extracti64x4_epi64(out01, 1));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + 256 + 4 * lane), _mm512_castsi512_si256(out2));
    }

    static ZIPCCL_AVX512_INLINE Quad load_words(const uint8_t* packed, int lane) {
        const __m256i w0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + 4 * lane));
        const __m256i w1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + 128 + 4 * lane));
        const __m256i w2 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + 256 + 4 * lane));
        const __m256i bit0 = _mm256_and_si256(_mm256_srli_epi32(w0, 15), _mm256_set1_epi32(0x00010001));
        const __m256i bit1 = _mm256_and_si256(_mm256_srli_epi32(w1, 14), _mm256_set1_epi32(0x00020002));
        const __m256i bit2 = _mm256_and_si256(_mm256_srli_epi32(w2, 13), _mm256_set1_epi32(0x00040004));
        const __m256i w3 = _mm256_or_si256(_mm256_or_si256(bit0, bit1), bit2);
        const __m512i words01 = _mm512_inserti64x4(_mm512_castsi256_si512(w0), w1, 1);
        const __m512i words23 = _mm512_inserti64x4(_mm512_castsi256_si512(w2), w3, 1);
        Quad codes;
        for (int r = 0; r < 4; ++r) {
            const __m512i halves = _mm512_permutex2var_epi8(words01, table(avx512::kWords[r]), words23);
            codes.r[r] =
                _mm512_and_si512(_mm512_multishift_epi64_epi8(table(avx512::kShift), halves), _mm512_set1_epi8(7));
        }
        return codes;
    }

  public:
    enum { kFetchBlocksAhead = 2 };  // up to 1.5 times as fast where the input is in no cache

    static ZIPCCL_AVX512 Statistics statistics(const uint8_t* exponents) {
        const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi8(1), top = _mm512_set1_epi8(-128);
        __m512i nonzero = zero, sum = zero, squares = zero;
        for (int e = 0; e < kBlockElems; e += 64) {
            const __m512i value = _mm512_loadu_si512(exponents + e);
            nonzero = _mm512_add_epi8(nonzero, _mm512_min_epu8(value, one));
            sum = _mm512_add_epi64(sum, _mm512_sad_epu8(value, zero));
            // One factor is read as signed, so (value - 128)^2 is what can be added up; of a zero it is 128 * -128.
            const __m512i distance = _mm512_abs_epi8(_mm512_xor_si512(value, top));
            squares = _mm512_dpbusd_epi32(squares, distance, distance);
        }
        const uint64_t both = static_cast<uint64_t>(_mm512_reduce_add_epi64(
            _mm512_or_si512(sum, _mm512_slli_epi64(_mm512_sad_epu8(nonzero, zero), 32))));
        const uint32_t n = static_cast<uint32_t>(both >> 32), total = static_cast<uint32_t>(both);
        const uint32_t distances = static_cast<uint32_t>(_mm512_reduce_add_epi32(squares));
        return {n, total, distances + 256 * total - 16384 * n + 16384 * (kBlockElems - n)};
    }

    static ZIPCCL_AVX512 uint32_t encode_codes(const uint8_t* exponents, uint32_t lo, uint32_t mode, uint8_t* packed,
                                               uint8_t* escapes) {
        const __m512i base = _mm512_set1_epi8(static_cast<char>(lo)),
                      width = _mm512_set1_epi8(static_cast<char>(7 - mode));
        const __mmask64 zero_mode = mode == kZeroMode ? ~0ull : 0;
        uint8_t* next = escapes;
        for (int lane = 0; lane < kBlockLanes; lane += 8) {
            const Quad rows = load_scan(exponents, lane);
            Quad codes;
            for (int r = 0; r < 4; ++r) {
                const __m512i distance = _mm512_sub_epi8(rows.r[r], base);
                const __m512i inside = _mm512_maskz_mov_epi8(_mm512_cmple_epu8_mask(distance, width), distance);
                codes.r[r] = _mm512_mask_mov_epi8(inside, _mm512_mask_testn_epi8_mask(zero_mode, rows.r[r], rows.r[r]),
                                                  _mm512_set1_epi8(kZeroCode));
                const __mmask64 escaped = _mm512_testn_epi8_mask(codes.r[r], codes.r[r]);
                _mm512_storeu_si512(next, _mm512_maskz_compress_epi8(escaped, rows.r[r]));
                next += __builtin_popcountll(escaped);
            }
            store_words(codes, packed, lane);
        }
        return static_cast<uint32_t>(next - escapes);
    }

    static ZIPCCL_AVX512 uint32_t decode_codes(const uint8_t* packed, uint32_t lo, uint32_t mode,
                                               const uint8_t* escapes, uint8_t* exponents) {
        const __m512i base = _mm512_set1_epi8(static_cast<char>(lo)), zero_code = _mm512_set1_epi8(kZeroCode);
        const __mmask64 zero_mode = mode == kZeroMode ? ~0ull : 0;
        const uint8_t* next = escapes;
        for (int lane = 0; lane < kBlockLanes; lane += 8) {
            const Quad codes = load_words(packed, lane);
            Quad rows;
            for (int r = 0; r < 4; ++r) {
                const __mmask64 escaped = _mm512_testn_epi8_mask(codes.r[r], codes.r[r]);
                const __mmask64 zero = _mm512_mask_cmpeq_epi8_mask(zero_mode, codes.r[r], zero_code);
                const __m512i inside = _mm512_maskz_add_epi8(~zero, codes.r[r], base);
                rows.r[r] = _mm512_mask_expand_epi8(inside, escaped, _mm512_loadu_si512(next));
                next += __builtin_popcountll(escaped);
            }
            store_scan(rows, exponents, lane);
        }
        return static_cast<uint32_t>(next - escapes);
    }

    static ZIPCCL_AVX512 void pack(const uint8_t* values, uint8_t* packed) {
        for (int lane = 0; lane < kBlockLanes; lane += 8) {
            Quad rows = load_scan(values, lane);
            for (int r = 0; r < 4; ++r) rows.r[r] = _mm512_and_si512(rows.r[r], _mm512_set1_epi8(7));
            store_words(rows, packed, lane);
        }
    }

    static ZIPCCL_AVX512 void unpack(const uint8_t* packed, uint8_t* values) {
        for (int lane = 0; lane < kBlockLanes; lane += 8) store_scan(load_words(packed, lane), values, lane);
    }

    template <class D>
    static ZIPCCL_AVX512 void split(const uint8_t* x, uint8_t* exponents, uint8_t* planes, uint8_t* extra) {
        split_block<D>(x, exponents, planes, extra);
    }
    template <class D>
    static ZIPCCL_AVX512 void join(const uint8_t* exponents, const uint8_t* planes, const uint8_t* extra, uint8_t* x) {
        join_block<D>(exponents, planes, extra, x);
    }
    template <class D>
    static ZIPCCL_AVX512 void accumulate(const uint8_t* x, float* sum, bool first) {
        if constexpr (std::is_same_v<D, Fp16>) {
            for (int e = 0; e < kBlockElems; e += 16) {
                const __m512 value = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 2 * e)));
                _mm512_storeu_ps(sum + e, first ? value : _mm512_add_ps(_mm512_loadu_ps(sum + e), value));
            }
        } else {
            accumulate_block<D>(x, sum, first);
        }
    }
    template <class D>
    static ZIPCCL_AVX512 void round(const float* sum, uint8_t* out) {
        if constexpr (std::is_same_v<D, Fp16>) {
            const __m256i quiet_nan = _mm256_set1_epi16(0x7E00);
            for (int e = 0; e < kBlockElems; e += 16) {
                const __m512 value = _mm512_loadu_ps(sum + e);
                const __m256i rounded = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
                const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * e),
                                    _mm256_mask_mov_epi16(rounded, nan, quiet_nan));
            }
        } else {
            round_block<D>(sum, out);
        }
    }

    static ZIPCCL_AVX512 void copy_uncached(const uint8_t* from, uint8_t* to, int64_t bytes) {
        if (reinterpret_cast<uintptr_t>(to) % 64 != 0) {
            std::memcpy(to, from, bytes);
            return;
        }
        for (int64_t i = 0; i < bytes; i += 64)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
    }
    static void drain() { _mm_sfence(); }

    static bool supported() {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2");
    }
};

}  // namespace zipccl

#endif  // __x86_64__
