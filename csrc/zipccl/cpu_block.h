// What an instruction set and an element type offer to the rest: the operations on one block, as a table of functions.
#pragma once

#include "cpu_dtypes.h"

namespace zipccl {

enum { kWindowMode = 0, kZeroMode = 1, kZeroCode = 7 };
enum { kEscapeSlack = 64 };  // bytes a block operation may touch after the escapes it wrote or read

// Of a block's non-zero exponents: their number, their sum and the sum of their squares.
struct Statistics {
    uint32_t num_nonzero, sum, sum_squares;
};

// Arrays `exponents`, `extra` and `values` are kBlockElems bytes in element order, `packed` is kCodeBytes, `planes` one
// or more times kBlockElems, `x` the block's elements, `sum` kBlockElems floats. No alignment is assumed of `x`,
// `packed`, `planes` and `escapes`.
struct BlockOps {
    // How far ahead the input is asked for: fast operations outrun what the machine fetches by itself.
    int fetch_blocks_ahead;
    // Elements -> exponents, byte planes and (types with an extra 3-bit plane) its values.
    void (*split)(const uint8_t* x, uint8_t* exponents, uint8_t* planes, uint8_t* extra);
    void (*join)(const uint8_t* exponents, const uint8_t* planes, const uint8_t* extra, uint8_t* x);
    Statistics (*statistics)(const uint8_t* exponents);
    // Packs the codes and writes the escaped exponents in scan order (and up to kEscapeSlack bytes more). Returns their
    // number.
    uint32_t (*encode_codes)(const uint8_t* exponents, uint32_t lo, uint32_t mode, uint8_t* packed, uint8_t* escapes);
    // Exponents from packed codes, taking escapes in scan order. Returns the number of escape codes; reads that many
    // escapes, and up to kEscapeSlack bytes more.
    uint32_t (*decode_codes)(const uint8_t* packed, uint32_t lo, uint32_t mode, const uint8_t* escapes,
                             uint8_t* exponents);
    // 3-bit values (higher bits are ignored) in the codes' packing.
    void (*pack)(const uint8_t* values, uint8_t* packed);
    void (*unpack)(const uint8_t* packed, uint8_t* values);
    // sum = x if `first`, else sum += x, in fp32.
    void (*accumulate)(const uint8_t* x, float* sum, bool first);
    // One rounding to nearest even; every NaN becomes the type's canonical quiet NaN.
    void (*round)(const float* sum, uint8_t* out);
    // Copies a multiple of 64 bytes past the caches: a line that is written whole need not be read first, which takes a
    // third off the memory traffic of a copy. `drain` makes the bytes visible to other threads. Null: not to be had.
    void (*copy_uncached)(const uint8_t* from, uint8_t* to, int64_t bytes);
    void (*drain)();
};

template <class D, class Isa>
constexpr BlockOps kBlockOps{Isa::kFetchBlocksAhead,
                             Isa::template split<D>,
                             Isa::template join<D>,
                             Isa::statistics,
                             Isa::encode_codes,
                             Isa::decode_codes,
                             Isa::pack,
                             Isa::unpack,
                             Isa::template accumulate<D>,
                             Isa::template round<D>,
                             Isa::copy_uncached,
                             Isa::drain};

}  // namespace zipccl
