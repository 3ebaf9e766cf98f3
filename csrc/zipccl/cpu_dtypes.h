// The element types: how one splits into exponent and remainder, and how the decode-and-reduce sum reads and rounds it.
// A new type is a new struct here and a line in cpu_codec.cpp. The loops over a block are plain, so that the compiler
// vectorises a copy of them for every instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "geometry.h"

#define ZIPCCL_INLINE inline __attribute__((always_inline))

namespace zipccl {

template <class T>
ZIPCCL_INLINE T load(const void* p) {  // any alignment
    T value;
    std::memcpy(&value, p, sizeof(T));
    return value;
}

template <class T>
ZIPCCL_INLINE void store(void* p, T value) {
    std::memcpy(p, &value, sizeof(T));
}

ZIPCCL_INLINE float as_float(uint32_t bits) {
    return load<float>(&bits);
}
ZIPCCL_INLINE uint32_t as_bits(float value) {
    return load<uint32_t>(&value);
}

template <class BitsType, int kExponentBitsOf, int kMantissaBitsOf, int kBytePlanesOf, bool kExtraPlaneOf>
struct FloatLayout {
    using Bits = BitsType;
    static constexpr int kExponentBits = kExponentBitsOf;
    static constexpr int kMantissaBits = kMantissaBitsOf;
    static constexpr int kBytePlanes = kBytePlanesOf;
    static constexpr bool kExtraPlane = kExtraPlaneOf;
    static constexpr int kTopLo = (1 << kExponentBits) - 8;  // largest window base
    static constexpr uint32_t kMantissaMask = (1u << kMantissaBits) - 1;

    static ZIPCCL_INLINE uint32_t exponent(uint32_t bits) {
        return bits >> kMantissaBits & ((1u << kExponentBits) - 1);
    }
    static ZIPCCL_INLINE uint32_t remainder(uint32_t bits) {
        return bits >> (kExponentBits + kMantissaBits) << kMantissaBits | (bits & kMantissaMask);
    }
    static ZIPCCL_INLINE Bits join(uint32_t exponent, uint32_t remainder) {
        return static_cast<Bits>(remainder >> kMantissaBits << (kExponentBits + kMantissaBits) |
                                 exponent << kMantissaBits | (remainder & kMantissaMask));
    }
};

struct Bf16 : FloatLayout<uint16_t, 8, 7, 1, false> {
    static ZIPCCL_INLINE float to_float(uint16_t bits) { return as_float(static_cast<uint32_t>(bits) << 16); }
    static ZIPCCL_INLINE uint16_t from_float(float value) {
        uint32_t bits = as_bits(value);
        uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
};

// FP16 converts in integers and in float operations that are exact or round once and see no FP32 denormals: the
// process's flush-to-zero setting does not matter. Selections are masks, which every compiler vectorises.
struct Fp16 : FloatLayout<uint16_t, 5, 10, 1, true> {
    static ZIPCCL_INLINE uint32_t mask(bool condition) { return 0u - static_cast<uint32_t>(condition); }
    static ZIPCCL_INLINE uint32_t select(bool condition, uint32_t yes, uint32_t no) {
        return no ^ ((yes ^ no) & mask(condition));
    }

    static ZIPCCL_INLINE float to_float(uint16_t bits) {
        const uint32_t sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7FFFu) << 13;
        const uint32_t denormal = as_bits(as_float(magnitude + (113u << 23)) - as_float(113u << 23));
        const uint32_t special = (112u << 23) & mask(magnitude >= 31u << 23);  // Inf and NaN
        return as_float(select(magnitude < 1u << 23, denormal, magnitude + (112u << 23) + special) | sign);
    }
    static ZIPCCL_INLINE uint16_t from_float(float value) {
        const uint32_t sign = as_bits(value) >> 16 & 0x8000u, magnitude = as_bits(value) & 0x7FFFFFFFu;
        const uint32_t normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
        const uint32_t denormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);  // one unit of 0.5 is 2^-24
        const uint32_t finite = select(magnitude < 113u << 23, denormal, normal);
        const uint32_t rounded = select(magnitude >= 143u << 23, 0x7C00, finite) | sign;
        return static_cast<uint16_t>(select(magnitude > 0x7F800000u, 0x7E00, rounded));
    }
};

struct Fp32 : FloatLayout<uint32_t, 8, 23, 3, false> {
    static ZIPCCL_INLINE float to_float(uint32_t bits) { return as_float(bits); }
    static ZIPCCL_INLINE uint32_t from_float(float value) {
        const uint32_t bits = as_bits(value);
        return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : bits;
    }
};

// The loops over a block (cpu_block.h says what they do). Byte by byte where a type's two bytes allow it: a register holds twice
// as many bytes as elements.
template <class D>
ZIPCCL_INLINE void split_block(const uint8_t* x, uint8_t* exponents, uint8_t* planes, uint8_t* extra) {
    if (std::is_same_v<D, Bf16>) {
        for (int e = 0; e < kBlockElems; ++e) {
            const uint8_t low = x[2 * e], high = x[2 * e + 1];
            exponents[e] = static_cast<uint8_t>(high << 1 | low >> 7);
            planes[e] = static_cast<uint8_t>((high & 0x80) | (low & 0x7F));
        }
        return;
    }
    for (int e = 0; e < kBlockElems; ++e) {
        const uint32_t bits = load<typename D::Bits>(x + e * sizeof(typename D::Bits));
        const uint32_t remainder = D::remainder(bits);
        exponents[e] = static_cast<uint8_t>(D::exponent(bits));
        planes[e] = static_cast<uint8_t>(remainder);
        if (D::kBytePlanes > 1) planes[e + kBlockElems] = static_cast<uint8_t>(remainder >> 8);
        if (D::kBytePlanes > 2) planes[e + 2 * kBlockElems] = static_cast<uint8_t>(remainder >> 16);
        if (D::kExtraPlane) extra[e] = static_cast<uint8_t>(remainder >> 8);
    }
}

template <class D>
ZIPCCL_INLINE void join_block(const uint8_t* exponents, const uint8_t* planes, const uint8_t* extra, uint8_t* x) {
    if (std::is_same_v<D, Bf16>) {
        for (int e = 0; e < kBlockElems; ++e) {
            const uint8_t exponent = exponents[e], remainder = planes[e];
            x[2 * e] = static_cast<uint8_t>(exponent << 7 | (remainder & 0x7F));
            x[2 * e + 1] = static_cast<uint8_t>((remainder & 0x80) | exponent >> 1);
        }
        return;
    }
    for (int e = 0; e < kBlockElems; ++e) {
        uint32_t remainder = planes[e];
        if (D::kBytePlanes > 1) remainder |= static_cast<uint32_t>(planes[e + kBlockElems]) << 8;
        if (D::kBytePlanes > 2) remainder |= static_cast<uint32_t>(planes[e + 2 * kBlockElems]) << 16;
        if (D::kExtraPlane) remainder |= static_cast<uint32_t>(extra[e]) << 8;
        store(x + e * sizeof(typename D::Bits), D::join(exponents[e], remainder));
    }
}

template <class D>
ZIPCCL_INLINE void accumulate_block(const uint8_t* x, float* sum, bool first) {
    if (first) {
        for (int e = 0; e < kBlockElems; ++e)
            sum[e] = D::to_float(load<typename D::Bits>(x + e * sizeof(typename D::Bits)));
    } else {
        for (int e = 0; e < kBlockElems; ++e)
            sum[e] += D::to_float(load<typename D::Bits>(x + e * sizeof(typename D::Bits)));
    }
}

template <class D>
ZIPCCL_INLINE void round_block(const float* sum, uint8_t* out) {
    for (int e = 0; e < kBlockElems; ++e) store(out + e * sizeof(typename D::Bits), D::from_float(sum[e]));
}

}  // namespace zipccl
