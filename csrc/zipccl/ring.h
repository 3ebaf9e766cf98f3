// Where messages go in a buffer that all ranks have alike: one behind the other, and round again.
#ifndef ZIPCCL_RING_H
#define ZIPCCL_RING_H

#include <deque>
#include <utility>

namespace zipscape {

constexpr long long kRegionAlign = 128;

// Regions in `room` bytes from `first` on, one behind the other and round again. Ranks that ask for the same sizes get the same answers.
struct Ring {
    long long first, room, at, num_messages;
    std::deque<std::pair<long long, long long>> taken;             // (start, as if the memory had no end; message), oldest first

    // The next message's number and offset, and the last message that had a part of its region (0: none had).
    void take(long long num_bytes, long long& number, long long& offset, long long& before) {
        num_bytes = (num_bytes + kRegionAlign - 1) / kRegionAlign * kRegionAlign;
        long long place = at % room;
        if (place + num_bytes > room) at += room - place, place = 0;
        taken.emplace_back(at, number = ++num_messages);
        at += num_bytes;
        for (before = 0; taken.front().first < at - room; taken.pop_front()) before = taken.front().second;
        offset = first + place;
    }
};

}  // namespace zipscape

#endif  // ZIPCCL_RING_H
