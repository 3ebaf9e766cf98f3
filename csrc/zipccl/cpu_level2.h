// Level 2 (docs/format.md, section 9): the window rule, and the two block operations that are different from level 1's.
//
// What is done to every byte are plain loops, which the compiler vectorises for each instruction set. A lane's 32 fields of 2 bits are one
// u64, so that a machine with BMI2 takes them apart in one instruction.
#pragma once

#include "cpu_avx2.h"
#include "cpu_avx512.h"
#include "cpu_block.h"
#include "cpu_scalar.h"

namespace zipccl {

constexpr uint32_t kCode2Bytes = 256, kStreamBytes = 1792, kTopLo2 = 250, kTopMode2 = 5;
enum { kClassB = 1, kZeroSecond = 2, kZeroFirst = 4 };  // bits of a block mode

// For a block of which `num_present` elements exist.
inline uint32_t window_base2(const Statistics& s, int64_t num_present, uint32_t* mode) {
    const uint32_t n = s.num_nonzero, sum = s.sum;
    const int64_t zeros = 1024 * (num_present - n);
    *mode = zeros > 170 * num_present ? kZeroFirst : zeros > 26 * num_present ? kZeroSecond : 0;
    const bool spread = uint64_t{n} * s.sum_squares > uint64_t{sum} * sum + 3 * n * n;
    const uint32_t off = (spread ? 31 : 33) * n;
    if (n == 0 || 32 * sum < off) return 0;
    const uint32_t base = (32 * sum - off) / (32 * n), rest = (32 * sum - off) % (32 * n);
    const uint32_t down = !spread && rest < 13 * n ? 2 : 1;
    if (down == 2) *mode |= kClassB;
    return base < down ? 0 : base - down < kTopLo2 ? base - down : kTopLo2;
}

namespace level2 {

// The exponents of a block's codes.
struct Window {
    uint8_t first[3], second[3];
    uint32_t lo, lowest;

    Window(uint32_t lo_, uint32_t mode) : lo(lo_), lowest(lo_ + (mode >= kZeroSecond)) {
        static constexpr uint8_t kFirst[3][3] = {{2, 3, 4}, {3, 4, 5}, {0, 3, 4}};
        static constexpr uint8_t kSecond[3][3] = {{0, 1, 5}, {0, 1, 2}, {1, 2, 5}};
        const int row = mode >= kZeroFirst ? 2 : mode & kClassB;
        for (int i = 0; i < 3; ++i) {
            first[i] = static_cast<uint8_t>(lo + kFirst[row][i]);
            second[i] = static_cast<uint8_t>(lo + kSecond[row][i]);
        }
        if (mode >= kZeroFirst)
            first[0] = 0;
        else if (mode >= kZeroSecond)
            second[0] = 0;
    }

    uint32_t nibble_of(uint32_t e) const {
        const uint32_t below = e - lowest + 9, above = e - lo - 6;
        return e == 0 ? 1 : below < 9 ? below + 2 : above < 5 ? above + 11 : 0;
    }
    uint32_t exponent_of(uint32_t nibble) const {
        return nibble == 1 ? 0 : nibble < 11 ? lowest - 11 + nibble : lo - 5 + nibble;
    }
};

constexpr uint64_t kFields = 0x5555555555555555;

ZIPCCL_INLINE uint64_t zero_fields(uint64_t f) {
    return ~(f | f >> 1) & kFields;
}

// The bits of `v` under `mask` side by side from bit 0, and back.
struct PlainBits {
    static ZIPCCL_INLINE uint64_t extract(uint64_t v, uint64_t mask) {
        uint64_t out = 0;
        for (int at = 0; mask; mask &= mask - 1) out |= (v >> __builtin_ctzll(mask) & 1) << at++;
        return out;
    }
    static ZIPCCL_INLINE uint64_t deposit(uint64_t v, uint64_t mask) {
        uint64_t out = 0;
        for (; mask; mask &= mask - 1, v >>= 1) out |= (v & 1) << __builtin_ctzll(mask);
        return out;
    }
};

#if defined(__x86_64__)
struct Bmi2Bits {  // in assembler: an intrinsic would bind the templates below to one instruction set
    static ZIPCCL_INLINE uint64_t extract(uint64_t v, uint64_t mask) {
        uint64_t out;
        asm("pext %2, %1, %0" : "=r"(out) : "r"(v), "r"(mask));
        return out;
    }
    static ZIPCCL_INLINE uint64_t deposit(uint64_t v, uint64_t mask) {
        uint64_t out;
        asm("pdep %2, %1, %0" : "=r"(out) : "r"(v), "r"(mask));
        return out;
    }
};
#endif

// Bits one behind the other; up to 8 bytes are written past the last one.
struct BitWriter {
    uint8_t* to;
    uint64_t word = 0;
    uint32_t fill = 0;  // of `word`, below 64

    ZIPCCL_INLINE void put(uint64_t bits, uint32_t count) {
        word |= bits << fill;
        if (fill + count < 64) {
            fill += count;
            return;
        }
        store(to, word);
        to += 8;
        word = fill ? bits >> (64 - fill) : 0;
        fill = fill + count - 64;
    }
    // Zeros up to a multiple of `unit` bits.
    ZIPCCL_INLINE void align(uint32_t unit) { put(0, (unit - fill % unit) % unit); }
    ZIPCCL_INLINE uint8_t* end() {
        align(8);
        store(to, word);
        return to + fill / 8;
    }
};

// A word of four bytes (w, h) = (0, 0), (0, 1), (1, 0), (1, 1), as they lie in memory, to bytes w + 2 h, and back.
ZIPCCL_INLINE uint32_t swap_middle(uint32_t v) {
    return (v & 0xFF0000FF) | (v >> 8 & 0xFF00) | (v << 8 & 0xFF0000);
}

// Where the element of bit 8 (w + 2 h) + 2 j + k is, from its lane's first.
ZIPCCL_INLINE uint32_t element_of_bit(uint32_t b) {
    return 256 * (b >> 1 & 3) + 4 * (b & 1) + 2 * (b >> 3 & 1) + (b >> 4);
}

// The elements without first and second code of a lane, of whose fields `none` has none of the first.
ZIPCCL_INLINE uint32_t rest_of(uint64_t none, uint64_t second) {
    const uint64_t rest = none & zero_fields(second);
    return static_cast<uint32_t>(rest) | static_cast<uint32_t>(rest >> 32) << 1;
}

template <class Bits>
ZIPCCL_INLINE uint32_t encode(const uint8_t* exponents, uint32_t lo, uint32_t mode, uint8_t* packed, uint8_t* stream) {
    const Window w(lo, mode);
    const uint8_t f0 = w.first[0], f1 = w.first[1], f2 = w.first[2], s0 = w.second[0], s1 = w.second[1], s2 = w.second[2];
    // Byte 8 lane + 4 k + w + 2 h: the fields j.
    alignas(64) uint8_t first[kCode2Bytes] = {}, second[kCode2Bytes] = {};
    for (int j = 0; j < 4; ++j)
        for (uint32_t i = 0; i < kCode2Bytes; ++i) {
            const uint8_t e = exponents[256 * j + i];
            const uint8_t f = (e == f0 ? 1 : 0) | (e == f1 ? 2 : 0) | (e == f2 ? 3 : 0);
            const uint8_t s = (e == s0 ? 1 : 0) | (e == s1 ? 2 : 0) | (e == s2 ? 3 : 0);
            first[i] = static_cast<uint8_t>(first[i] | f << 2 * j);
            second[i] = static_cast<uint8_t>(second[i] | s << 2 * j);
        }
    for (uint32_t i = 0; i < kCode2Bytes; i += 4) {
        store(first + i, swap_middle(load<uint32_t>(first + i)));
        store(second + i, swap_middle(load<uint32_t>(second + i)));
    }
    for (int lane = 0; lane < kBlockLanes; ++lane)
        for (int k = 0; k < 2; ++k) store(packed + 128 * k + 4 * lane, load<uint32_t>(first + 8 * lane + 4 * k));

    BitWriter bits{stream};
    uint32_t rest[kBlockLanes];
    for (int lane = 0; lane < kBlockLanes; ++lane) {
        const uint64_t none = zero_fields(load<uint64_t>(first + 8 * lane)), s = load<uint64_t>(second + 8 * lane);
        bits.put(Bits::extract(s, none * 3), 2 * static_cast<uint32_t>(__builtin_popcountll(none)));
        rest[lane] = rest_of(none, s);
    }
    bits.align(4);
    uint8_t raws[kBlockElems];
    uint32_t num_raws = 0;
    for (int lane = 0; lane < kBlockLanes; ++lane)
        for (uint32_t left = rest[lane]; left; left &= left - 1) {
            const uint8_t e = exponents[8 * lane + element_of_bit(static_cast<uint32_t>(__builtin_ctz(left)))];
            const uint32_t nibble = w.nibble_of(e);
            bits.put(nibble, 4);
            raws[num_raws] = e;
            num_raws += nibble == 0;
        }
    uint8_t* end = bits.end();
    std::memcpy(end, raws, num_raws);
    end += num_raws;
    store<uint32_t>(end, 0);
    return static_cast<uint32_t>(end - stream + 3) / 4 * 4;
}

template <class Bits>
ZIPCCL_INLINE uint32_t decode(const uint8_t* packed, uint32_t lo, uint32_t mode, const uint8_t* stream, uint8_t* exponents) {
    const Window w(lo, mode);
    alignas(64) uint8_t first[kCode2Bytes], second[kCode2Bytes];
    for (int lane = 0; lane < kBlockLanes; ++lane)
        for (int k = 0; k < 2; ++k) store(first + 8 * lane + 4 * k, load<uint32_t>(packed + 128 * k + 4 * lane));
    uint32_t rest[kBlockLanes], at = 0, num_nibbles = 0;  // at: in bits, then in nibbles
    for (int lane = 0; lane < kBlockLanes; ++lane) {
        const uint64_t none = zero_fields(load<uint64_t>(first + 8 * lane));
        const uint8_t* from = stream + at / 8;
        const uint64_t fields = load<uint64_t>(from) >> at % 8 | static_cast<uint64_t>(from[8]) << 1 << (63 - at % 8);
        const uint64_t s = Bits::deposit(fields, none * 3);
        store(second + 8 * lane, s);
        rest[lane] = rest_of(none, s);
        at += 2 * static_cast<uint32_t>(__builtin_popcountll(none));
        num_nibbles += static_cast<uint32_t>(__builtin_popcount(rest[lane]));
    }
    for (uint32_t i = 0; i < kCode2Bytes; i += 4) {
        store(first + i, swap_middle(load<uint32_t>(first + i)));
        store(second + i, swap_middle(load<uint32_t>(second + i)));
    }
    const uint8_t f0 = w.first[0], f1 = w.first[1], f2 = w.first[2], s0 = w.second[0], s1 = w.second[1], s2 = w.second[2];
    for (int j = 0; j < 4; ++j)
        for (uint32_t i = 0; i < kCode2Bytes; ++i) {
            const uint8_t f = first[i] >> 2 * j & 3, s = second[i] >> 2 * j & 3;
            const uint8_t one = f == 1 ? f0 : f == 2 ? f1 : f2, two = s == 1 ? s0 : s == 2 ? s1 : s2;
            exponents[256 * j + i] = f ? one : two;
        }
    at = (at + 3) / 4;
    const uint8_t* raw = stream + (at + num_nibbles + 1) / 2;
    for (int lane = 0; lane < kBlockLanes; ++lane)
        for (uint32_t left = rest[lane]; left; left &= left - 1, ++at) {
            const uint32_t nibble = stream[at / 2] >> 4 * (at % 2) & 15;
            const uint32_t e = nibble ? w.exponent_of(nibble) : *raw;
            raw += nibble == 0;
            exponents[8 * lane + element_of_bit(static_cast<uint32_t>(__builtin_ctz(left)))] = static_cast<uint8_t>(e);
        }
    return static_cast<uint32_t>(raw - stream + 3) / 4 * 4;
}

}  // namespace level2

struct Scalar2 {
    static uint32_t encode_codes(const uint8_t* exponents, uint32_t lo, uint32_t mode, uint8_t* packed, uint8_t* stream) {
        return level2::encode<level2::PlainBits>(exponents, lo, mode, packed, stream);
    }
    static uint32_t decode_codes(const uint8_t* packed, uint32_t lo, uint32_t mode, const uint8_t* stream, uint8_t* exponents) {
        return level2::decode<level2::PlainBits>(packed, lo, mode, stream, exponents);
    }
};

#if defined(__x86_64__)
#define ZIPCCL_LEVEL2(name, target)                                                                                                 \
    struct name {                                                                                                                   \
        static target uint32_t encode_codes(const uint8_t* exponents, uint32_t lo, uint32_t mode, uint8_t* packed, uint8_t* stream) { \
            return level2::encode<level2::Bmi2Bits>(exponents, lo, mode, packed, stream);                                           \
        }                                                                                                                           \
        static target uint32_t decode_codes(const uint8_t* packed, uint32_t lo, uint32_t mode, const uint8_t* stream,               \
                                            uint8_t* exponents) {                                                                   \
            return level2::decode<level2::Bmi2Bits>(packed, lo, mode, stream, exponents);                                           \
        }                                                                                                                           \
    };
ZIPCCL_LEVEL2(Avx2Level2, ZIPCCL_AVX2)
ZIPCCL_LEVEL2(Avx512Level2, ZIPCCL_AVX512)
#undef ZIPCCL_LEVEL2
#endif

// As level 1's, but `packed` is kCode2Bytes of first codes, and in place of escapes there is a stream. Up to kEscapeSlack bytes behind it may
// be written; decode_codes may read kStreamBytes and kEscapeSlack more, and returns the bytes that the stream must have.
template <class Isa, class Codes>
constexpr BlockOps kLevel2Ops{Isa::kFetchBlocksAhead,
                              Isa::template split<Bf16>,
                              Isa::template join<Bf16>,
                              Isa::statistics,
                              Codes::encode_codes,
                              Codes::decode_codes,
                              Isa::pack,
                              Isa::unpack,
                              Isa::template accumulate<Bf16>,
                              Isa::template round<Bf16>,
                              Isa::copy_uncached,
                              Isa::drain};

}  // namespace zipccl
