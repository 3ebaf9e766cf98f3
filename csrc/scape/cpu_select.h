// Exactly k per segment, without a tensor of scores: keys (rule.h) are computed where they are looked at. Digit by digit, from the top, the
// histogram of the keys that are still in question says which digit the k-th largest has. A segment that fits into a cache is read once, by
// one thread; a larger one by all of them. A sample of the keys says between which first digits the last one lies, so that one pass over
// everything chooses what is above, drops what is below and notes down the few in between; where the sample was wrong, everything is
// counted. Equal keys: by lowest index.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "common/cpu_threads.h"
#include "cpu_worker.h"

namespace scape {

enum : int64_t {
    kPiece = 1 << 18,       // elements of a piece of work, and of a segment that is selected at once
    kMaxNoted = kPiece / 8  // keys that a piece notes down; where more are left they are computed again
};

template <class Last>
SCAPE_INLINE void keys_with(const Select& c, const Last* last, int64_t start, int64_t num, uint32_t* keys) {
    const float* const rank_by = c.rank_by + start;
    if (c.square) {
        const float* const square = c.square + start;
        for (int64_t i = 0; i < num; ++i)
            keys[i] = sort_key(residual_score(rank_by[i], square[i]), age_at(last, i, sizeof(Last), c.step) >= c.max_age);
    } else {
        for (int64_t i = 0; i < num; ++i) keys[i] = sort_key(rank_by[i], age_at(last, i, sizeof(Last), c.step) >= c.max_age);
    }
}

SCAPE_INLINE void keys_of(const Select& c, int64_t start, int64_t num, uint32_t* keys) {
    c.last_bytes == 4 ? keys_with(c, static_cast<const int32_t*>(c.last_sync) + start, start, num, keys)
                      : keys_with(c, static_cast<const int16_t*>(c.last_sync) + start, start, num, keys);
}

// Adds the first digits of the keys to `histogram`.
SCAPE_INLINE void count_keys(const Select& c, int64_t start, int64_t num, uint32_t* histogram) {
    uint32_t keys[kBlock];
    for (int64_t done = 0; done < num; done += kBlock) {
        const int64_t now = std::min<int64_t>(kBlock, num - done);
        keys_of(c, start + done, now, keys);
        for (int64_t i = 0; i < now; ++i) ++histogram[keys[i] >> digit_shift(0)];
    }
}

// The same for a sample: one line of 64 elements in 16, at changing places.
enum : int64_t { kLine = 64, kSampleStep = 16, kSampleFrom = 1 << 13 };
SCAPE_INLINE void sample_keys(const Select& c, int64_t start, int64_t num, uint32_t* histogram) {
    uint32_t keys[kLine];
    for (int64_t line = 0, at = 0; at < num; ++line, at = (line * kSampleStep + line % kSampleStep) * kLine) {
        const int64_t now = std::min<int64_t>(kLine, num - at);
        keys_of(c, start + at, now, keys);
        for (int64_t i = 0; i < now; ++i) ++histogram[keys[i] >> digit_shift(0)];
    }
}

struct Noted {
    uint32_t key;
    uint32_t at;  // in elements from the piece's start
};

// First digits between which the last key that is chosen lies.
struct Bracket {
    uint32_t lo, hi;

    bool has(uint32_t key) const { return (key >> digit_shift(0)) - lo <= hi - lo; }
};

// The bracket from a histogram of first digits: of everything, or of a sample (a share of 1 / step), then with room for chance.
template <class Histogram>
Bracket bracket_of(const Histogram& histogram, int64_t wanted, int64_t step) {
    int64_t low_rank = wanted, high_rank = wanted;
    if (step > 1) {
        const double share = static_cast<double>(wanted) / static_cast<double>(step), slack = 5 * __builtin_sqrt(share) + 8;
        low_rank = static_cast<int64_t>(share + slack), high_rank = std::max<int64_t>(1, static_cast<int64_t>(share - slack));
    }
    Bracket bracket{0, digit_size(0) - 1};
    int64_t sum = 0;
    for (uint32_t d = digit_size(0); d--;) {
        const int64_t before = sum;
        sum += histogram[d];
        if (before < high_rank && sum >= high_rank) bracket.hi = d;
        if (sum >= low_rank) {
            bracket.lo = d;
            break;
        }
    }
    return bracket;
}

// chosen = 1 where the first digit is above the bracket, 0 elsewhere; notes the keys inside, at most `room`. Returns how many there are, and
// adds the number of those above.
SCAPE_INLINE int64_t choose_above(const Select& c, int64_t start, int64_t num, Bracket bracket, Noted* noted, int64_t room, int64_t* above) {
    uint32_t keys[kBlock];
    uint8_t inside[kBlock + 8], is_above[kBlock + 8];
    int64_t found = 0;
    for (int64_t done = 0; done < num; done += kBlock) {
        const int64_t now = std::min<int64_t>(kBlock, num - done);
        keys_of(c, start + done, now, keys);
        for (int64_t i = 0; i < now; ++i) {
            is_above[i] = keys[i] >> digit_shift(0) > bracket.hi;
            inside[i] = bracket.has(keys[i]);
        }
        std::memset(inside + now, 0, 8);
        std::memset(is_above + now, 0, 8);
        std::memcpy(c.chosen + start + done, is_above, static_cast<size_t>(now));
        for (int64_t i = 0; i < now; i += 8) {
            uint64_t eight, eight_above;
            std::memcpy(&eight, inside + i, 8);
            std::memcpy(&eight_above, is_above + i, 8);
            *above += static_cast<int64_t>(eight_above * 0x0101010101010101ull >> 56);
            for (; eight; eight &= eight - 1, ++found) {
                const int64_t at = i + __builtin_ctzll(eight) / 8;
                if (found < room) noted[found] = Noted{keys[at], static_cast<uint32_t>(done + at)};
            }
        }
    }
    return found;
}

// The keys inside the bracket, in order, into `kept`. Returns how many there are, and adds the number of those above.
SCAPE_INLINE int64_t keep_inside(const uint32_t* keys, int64_t num, Bracket bracket, uint32_t* kept, int64_t* above) {
    uint8_t inside[kBlock + 8];
    int64_t found = 0;
    for (int64_t done = 0; done < num; done += kBlock) {
        const int64_t now = std::min<int64_t>(kBlock, num - done);
        uint32_t larger = 0;
        for (int64_t i = 0; i < now; ++i) {
            larger += keys[done + i] >> digit_shift(0) > bracket.hi;
            inside[i] = bracket.has(keys[done + i]);
        }
        *above += larger;
        std::memset(inside + now, 0, 8);
        for (int64_t i = 0; i < now; i += 8) {
            uint64_t eight;
            std::memcpy(&eight, inside + i, 8);
            for (; eight; eight &= eight - 1) kept[found++] = keys[done + i + __builtin_ctzll(eight) / 8];
        }
    }
    return found;
}

// chosen = 1 where keys are above `last`, and for the first `wanted` that are equal to it; else 0.
SCAPE_INLINE void choose_from(const uint32_t* keys, int64_t num, uint32_t last, int64_t wanted, uint8_t* chosen) {
    for (int64_t start = 0; start < num; start += kBlock) {
        const int64_t end = std::min<int64_t>(num, start + kBlock);
        uint32_t equal = 0;
        for (int64_t i = start; i < end; ++i) {
            chosen[i] = keys[i] > last;
            equal += keys[i] == last;
        }
        for (int64_t i = start; equal && wanted && i < end; ++i)
            if (keys[i] == last) chosen[i] = 1, --wanted, --equal;
    }
}

// What the best instruction set does; a table of it for each (cpu_ops.cpp).
struct SelectOps {
    void (*keys_of)(const Select&, int64_t, int64_t, uint32_t*);
    void (*count_keys)(const Select&, int64_t, int64_t, uint32_t*);
    void (*sample_keys)(const Select&, int64_t, int64_t, uint32_t*);
    int64_t (*choose_above)(const Select&, int64_t, int64_t, Bracket, Noted*, int64_t, int64_t*);
    int64_t (*keep_inside)(const uint32_t*, int64_t, Bracket, uint32_t*, int64_t*);
    void (*choose_from)(const uint32_t*, int64_t, uint32_t, int64_t, uint8_t*);
};

// A segment of up to kPiece elements. space: twice as many.
inline void select_at_once(const Select& c, const SelectOps& ops, int64_t start, int64_t num, int64_t wanted, uint32_t* space) {
    uint32_t* const keys = space;
    uint32_t* const left = space + num;
    ops.keys_of(c, start, num, keys);
    const uint32_t* from = keys;
    int64_t num_left = num, left_wanted = wanted;
    uint32_t last = 0;
    if (num >= kSampleFrom) {
        uint32_t histogram[8192] = {};
        for (int64_t line = 0; (line + 1) * kSampleStep <= num; ++line)
            ++histogram[keys[line * kSampleStep + line * 5 % kSampleStep] >> digit_shift(0)];
        int64_t above = 0;
        const int64_t inside = ops.keep_inside(keys, num, bracket_of(histogram, wanted, kSampleStep), left, &above);
        if (above < wanted && above + inside >= wanted) from = left, num_left = inside, left_wanted = wanted - above;
    }
    wanted = left_wanted;
    for (const int shift : {21, 10, 0}) {
        uint32_t histogram[2048] = {};
        const uint32_t mask = shift ? 2047 : 1023;
        for (int64_t i = 0; i < num_left; ++i) ++histogram[from[i] >> shift & mask];
        uint32_t digit = mask;
        for (; histogram[digit] < wanted; --digit) wanted -= histogram[digit];
        last |= digit << shift;
        int64_t kept = 0;
        for (int64_t i = 0; i < num_left; ++i) {
            const uint32_t key = from[i];
            left[kept] = key;
            kept += (key >> shift & mask) == digit;
        }
        from = left, num_left = kept;
    }
    ops.choose_from(keys, num, last, wanted, c.chosen + start);
}

// A segment whose coordinates have to be chosen, and how far that is: the keys in question are those with the digits of `prefix`, `wanted`
// of them are to be taken.
struct Search {
    int64_t start, stop, count;
    int64_t wanted = 0;
    uint32_t prefix = 0;
    Bracket bracket{0, 0};
    bool is_open = true;                                 // the first digit is not settled
    std::unique_ptr<std::atomic<uint32_t>[]> histogram{};  // of the digit that is looked at
    std::unique_ptr<std::atomic<int64_t>> above{};       // keys above the bracket

    void clear(int digit) {
        for (uint32_t d = 0; d < digit_size(digit); ++d) histogram[d].store(0, std::memory_order_relaxed);
    }

    // Takes the digit of the last one that is wanted out of the histogram; clears it. False where there is none.
    bool settle(int digit) {
        int64_t left = wanted;
        uint32_t d = digit_size(digit);
        while (left > 0 && d--) {
            const int64_t count_of = histogram[d].load(std::memory_order_relaxed);
            if (count_of >= left) {
                prefix |= d << digit_shift(digit);
                wanted = left;
                clear(digit);
                return true;
            }
            left -= count_of;
        }
        clear(digit);
        return false;
    }
};

// Up to kPiece elements of a segment.
struct Piece {
    int64_t search, start, num;
    std::vector<Noted> noted{};
    bool is_noted = false;
    int64_t num_equal = 0, take = 0;  // keys equal to the last one, and how many of them are taken
};

// Calls visit(key, position from the piece's start) for every key of the piece inside the bracket, in order of positions.
template <class Visit>
void each_inside(const Select& c, const SelectOps& ops, const Piece& piece, Bracket bracket, const Visit& visit) {
    if (piece.is_noted) {
        for (const Noted& noted : piece.noted) visit(noted.key, noted.at);
        return;
    }
    uint32_t keys[kBlock];
    for (int64_t done = 0; done < piece.num; done += kBlock) {
        const int64_t now = std::min<int64_t>(kBlock, piece.num - done);
        ops.keys_of(c, piece.start + done, now, keys);
        for (int64_t i = 0; i < now; ++i)
            if (bracket.has(keys[i])) visit(keys[i], done + i);
    }
}

// What a thread works with.
struct Space {
    std::unique_ptr<uint32_t[]> histogram;
    std::unique_ptr<Noted[]> noted;

    // Has count(histogram) count one piece, then adds that to the segment's.
    template <class Count>
    void collect(Search& search, int digit, const Count& count) {
        if (!histogram) histogram.reset(new uint32_t[digit_size(0)]);
        std::memset(histogram.get(), 0, 4 * digit_size(digit));
        count(histogram.get());
        for (uint32_t d = 0; d < digit_size(digit); ++d)
            if (histogram[d]) search.histogram[d].fetch_add(histogram[d], std::memory_order_relaxed);
    }
};
// ops.select. segments: num_segments times (start, stop, count).
inline void select(const Select& c, const SelectOps& ops, const int64_t* segments, int64_t num_segments, int32_t num_threads) {
    std::vector<Search> searches;
    std::vector<Piece> pieces;
    std::vector<const int64_t*> small;
    int64_t covered = 0, num_searched = 0, num_small = 0;
    for (int64_t s = 0; s < num_segments; ++s) {
        const int64_t start = segments[3 * s], stop = segments[3 * s + 1], count = segments[3 * s + 2];
        std::memset(c.chosen + covered, 0, static_cast<size_t>(start - covered));
        covered = stop;
        if (!count || count == stop - start) {
            std::memset(c.chosen + start, count != 0, static_cast<size_t>(stop - start));
            continue;
        }
        if (stop - start <= kPiece) {
            small.push_back(segments + 3 * s);
            num_small += stop - start;
            continue;
        }
        Search search{start, stop, count};
        search.histogram.reset(new std::atomic<uint32_t>[digit_size(0)]());
        search.above.reset(new std::atomic<int64_t>(0));
        for (int64_t at = start; at < stop; at += kPiece)
            pieces.push_back(Piece{static_cast<int64_t>(searches.size()), at, std::min<int64_t>(kPiece, stop - at), {}});
        searches.push_back(std::move(search));
        num_searched += stop - start;
    }
    std::memset(c.chosen + covered, 0, static_cast<size_t>(c.num - covered));

    zipscape::parallel_for<std::unique_ptr<uint32_t[]>>(
        static_cast<int64_t>(small.size()), 12 * num_small, num_threads, [&](std::unique_ptr<uint32_t[]>& space, int64_t i) {
            if (!space) space.reset(new uint32_t[2 * kPiece]);
            select_at_once(c, ops, small[i][0], small[i][1] - small[i][0], small[i][2], space.get());
        });
    if (pieces.empty()) return;

    const auto over_pieces = [&](int64_t bytes, const auto& work) {
        zipscape::parallel_for<Space>(static_cast<int64_t>(pieces.size()), bytes, num_threads, [&](Space& space, int64_t i) {
            work(space, pieces[i], searches[pieces[i].search]);
        });
    };
    // The first digit: by a sample, and for those where that was wrong by counting.
    for (const bool sampled : {true, false}) {
        over_pieces(12 * num_searched / (sampled ? +kSampleStep : 1), [&](Space& space, Piece& piece, Search& search) {
            if (!search.is_open) return;
            space.collect(search, 0, [&](uint32_t* histogram) {
                (sampled ? ops.sample_keys : ops.count_keys)(c, piece.start, piece.num, histogram);
            });
        });
        for (Search& search : searches) {
            if (!search.is_open) continue;
            search.bracket = bracket_of(search.histogram, search.count, sampled ? +kSampleStep : 1);
            search.clear(0);
            *search.above = 0;
        }
        over_pieces(12 * num_searched, [&](Space& space, Piece& piece, Search& search) {
            if (!search.is_open) return;
            if (!space.noted) space.noted.reset(new Noted[kMaxNoted]);
            int64_t above = 0;
            const int64_t found = ops.choose_above(c, piece.start, piece.num, search.bracket, space.noted.get(), kMaxNoted, &above);
            *search.above += above;
            piece.is_noted = found <= kMaxNoted;
            if (piece.is_noted) piece.noted.assign(space.noted.get(), space.noted.get() + found);
            space.collect(search, 0, [&](uint32_t* histogram) {
                each_inside(c, ops, piece, search.bracket, [&](uint32_t key, int64_t) { ++histogram[key >> digit_shift(0)]; });
            });
        });
        bool any = false;
        for (Search& search : searches) {
            if (!search.is_open) continue;
            search.wanted = search.count - *search.above;
            search.is_open = !search.settle(0);
            any |= search.is_open;
        }
        if (!any) break;
    }
    for (int digit = 1; digit < kDigits; ++digit) {
        over_pieces(num_searched, [&](Space& space, Piece& piece, Search& search) {
            const int shift = digit_shift(digit), settled = digit_shift(digit - 1);
            space.collect(search, digit, [&](uint32_t* histogram) {
                each_inside(c, ops, piece, search.bracket, [&](uint32_t key, int64_t) {
                    if (key >> settled == search.prefix >> settled) ++histogram[key >> shift & (digit_size(digit) - 1)];
                });
            });
        });
        for (Search& search : searches) search.settle(digit);
    }
    over_pieces(num_searched, [&](Space&, Piece& piece, Search& search) {
        each_inside(c, ops, piece, search.bracket, [&](uint32_t key, int64_t) { piece.num_equal += key == search.prefix; });
    });
    for (Piece& piece : pieces) {
        Search& search = searches[piece.search];
        piece.take = std::min(search.wanted, piece.num_equal);
        search.wanted -= piece.take;
    }
    over_pieces(num_searched, [&](Space&, Piece& piece, Search& search) {
        int64_t left = piece.take;
        each_inside(c, ops, piece, search.bracket, [&](uint32_t key, int64_t at) {
            if (key > search.prefix || (key == search.prefix && left-- > 0)) c.chosen[piece.start + at] = 1;
        });
    });
}

}  // namespace scape
