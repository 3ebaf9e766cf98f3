// Masks as messages: bits, lowest first, or per block of 65,536 elements its number of ones and their 16-bit offsets. In memory they pass
// through 64-bit words, element i being bit i % 64 of word i / 64.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "common/cpu_threads.h"

namespace scape {

enum : int64_t { kIndexBlock = 1 << 16, kWords = kIndexBlock / 64 };
enum { kCorrupt = 1, kTooMany = 2 };

using Words = std::unique_ptr<uint64_t[]>;

struct Range {
    int64_t start, stop;
};

// The bits [start, stop) of the words that a piece of work has, begin .. end - 1 in elements.
inline void fill(uint64_t* words, int64_t begin, int64_t end, Range range, bool value) {
    const int64_t start = std::max(begin, range.start), stop = std::min(end, range.stop);
    for (int64_t i = start; i < stop;) {
        const int64_t next = std::min(stop, (i / 64 + 1) * 64);
        const uint64_t mask = (next - i == 64 ? ~0ull : (1ull << (next - i)) - 1) << (i % 64);
        value ? words[i / 64] |= mask : words[i / 64] &= ~mask;
        i = next;
    }
}

// Bytes that are 0 or 1 -> words; elements begin .. end - 1, begin a multiple of 64.
inline void words_of_bytes(const uint8_t* mask, int64_t begin, int64_t end, uint64_t* words) {
    for (int64_t start = begin; start < end; start += 64) {
        uint8_t padded[64] = {};
        const uint8_t* from = mask + start;
        if (end - start < 64) from = static_cast<uint8_t*>(std::memcpy(padded, from, static_cast<size_t>(end - start)));
        uint64_t word = 0;
        for (int i = 0; i < 8; ++i) {
            uint64_t eight;
            std::memcpy(&eight, from + 8 * i, 8);
            word |= (eight * 0x0102040810204080ull >> 56) << 8 * i;  // byte j's lowest bit ends up at bit 56 + j
        }
        words[start / 64] = word;
    }
}

inline int64_t ones(const uint64_t* words, int64_t num) {
    int64_t total = 0;
    for (int64_t i = 0; i < num; ++i) total += __builtin_popcountll(words[i]);
    return total;
}

// ops.pack_mask. `message` has room for the encoding; returns 0 or kTooMany.
inline int64_t pack_mask(const uint8_t* mask, int64_t numel, const Range* dense, int64_t num_dense, bool as_bits, int64_t max_ones,
                         uint8_t* message, int32_t num_threads) {
    const int64_t num_blocks = (numel + kIndexBlock - 1) / kIndexBlock;
    const Words words(new uint64_t[num_blocks * kWords]);
    std::vector<int64_t> before(num_blocks + 1);
    struct None {};
    zipscape::parallel_for<None>(num_blocks, numel, num_threads, [&](None&, int64_t block) {
        const int64_t begin = block * kIndexBlock, end = std::min(numel, begin + kIndexBlock);
        words_of_bytes(mask, begin, end, words.get());
        for (int64_t i = 0; i < num_dense; ++i) fill(words.get(), begin, end, dense[i], false);
        if (as_bits)
            std::memcpy(message + begin / 8, words.get() + begin / 64, static_cast<size_t>((end - begin + 7) / 8));
        else
            before[block + 1] = ones(words.get() + begin / 64, (end - begin + 63) / 64);
    });
    if (as_bits) return 0;
    for (int64_t block = 0; block < num_blocks; ++block) {
        const uint32_t count = static_cast<uint32_t>(before[block + 1]);
        std::memcpy(message + 4 * block, &count, 4);
        before[block + 1] += before[block];
    }
    if (before[num_blocks] > max_ones) return kTooMany;
    uint8_t* const offsets = message + 4 * num_blocks;
    zipscape::parallel_for<None>(num_blocks, numel / 8 + 2 * before[num_blocks], num_threads, [&](None&, int64_t block) {
        uint8_t* out = offsets + 2 * before[block];
        const int64_t num = (std::min(numel - block * kIndexBlock, +kIndexBlock) + 63) / 64;
        for (int64_t i = 0; i < num; ++i)
            for (uint64_t word = words[block * kWords + i]; word; word &= word - 1, out += 2) {
                const uint16_t offset = static_cast<uint16_t>(64 * i + __builtin_ctzll(word));
                std::memcpy(out, &offset, 2);
            }
    });
    std::memset(offsets + 2 * before[num_blocks], 0, static_cast<size_t>(2 * (max_ones - before[num_blocks])));
    return 0;
}

// Words of a message, or null where its counts contradict its size.
inline Words words_of_message(const uint8_t* message, int64_t num_bytes, int64_t numel, bool as_bits, int32_t num_threads) {
    const int64_t num_blocks = (numel + kIndexBlock - 1) / kIndexBlock;
    Words words(new uint64_t[num_blocks * kWords]);
    struct None {};
    std::vector<int64_t> before(num_blocks + 1);
    if (!as_bits) {
        for (int64_t block = 0; block < num_blocks; ++block) {
            int32_t count;
            std::memcpy(&count, message + 4 * block, 4);
            if (count < 0) return nullptr;
            before[block + 1] = before[block] + count;
        }
        if (4 * num_blocks + 2 * before[num_blocks] > num_bytes) return nullptr;
    }
    zipscape::parallel_for<None>(num_blocks, num_blocks * kIndexBlock / 8, num_threads, [&](None&, int64_t block) {
        uint64_t* const own = words.get() + block * kWords;
        const int64_t size = std::min(numel - block * kIndexBlock, +kIndexBlock);
        std::memset(own, 0, kIndexBlock / 8);
        if (as_bits) {
            std::memcpy(own, message + block * (kIndexBlock / 8), static_cast<size_t>((size + 7) / 8));
            return;
        }
        const uint8_t* from = message + 4 * num_blocks + 2 * before[block];
        for (int64_t i = before[block]; i < before[block + 1]; ++i, from += 2) {
            uint16_t offset;
            std::memcpy(&offset, from, 2);
            own[offset / 64] |= 1ull << offset % 64;
        }
    });
    return words;
}

// ops.unpack_mask. positions[i]: room for counts[i] of part i; found[i]: how many ones it has; written only where that is the same.
// Returns 0 or kCorrupt. Index: uint32_t or int64_t.
template <class Index>
int64_t unpack_mask(const uint8_t* message, int64_t num_bytes, int64_t numel, const Range* dense, int64_t num_dense, bool as_bits,
                           const int64_t* sizes, int64_t num_parts, const int64_t* counts, void* const* positions, int64_t* found,
                           int32_t num_threads) {
    const Words words = words_of_message(message, num_bytes, numel, as_bits, num_threads);
    if (!words) return kCorrupt;
    for (int64_t i = 0; i < num_dense; ++i) fill(words.get(), 0, numel, dense[i], true);
    struct None {};
    for (int64_t part = 0, start = 0; part < num_parts; start += sizes[part++]) {
        const int64_t stop = start + sizes[part], first = start / 64, num_words = (stop + 63) / 64 - first;
        const int64_t num_pieces = (num_words + kWords - 1) / kWords;
        std::vector<int64_t> before(num_pieces + 1);
        // The words of a part, without what belongs to its neighbours.
        const auto word_at = [&](int64_t i) {
            uint64_t word = words[first + i];
            const int64_t begin = 64 * (first + i);
            if (begin < start) word &= ~0ull << (start - begin);
            if (stop - begin < 64) word &= (1ull << (stop - begin)) - 1;
            return word;
        };
        const auto over_pieces = [&](const auto& work) {
            zipscape::parallel_for<None>(num_pieces, 8 * counts[part] + 8 * num_words, num_threads, [&](None&, int64_t piece) {
                work(piece, piece * kWords, std::min(num_words, (piece + 1) * kWords));
            });
        };
        over_pieces([&](int64_t piece, int64_t begin, int64_t end) {
            int64_t total = 0;
            for (int64_t i = begin; i < end; ++i) total += __builtin_popcountll(word_at(i));
            before[piece + 1] = total;
        });
        for (int64_t piece = 0; piece < num_pieces; ++piece) before[piece + 1] += before[piece];
        found[part] = before[num_pieces];
        if (found[part] != counts[part]) continue;
        over_pieces([&](int64_t piece, int64_t begin, int64_t end) {
            Index* out = static_cast<Index*>(positions[part]) + before[piece];
            for (int64_t i = begin; i < end; ++i)
                for (uint64_t word = word_at(i); word; word &= word - 1)
                    *out++ = static_cast<Index>(64 * (first + i) + __builtin_ctzll(word) - start);
        });
    }
    return 0;
}

}  // namespace scape
