// Splits a call's work over threads. Threads live for one call, so nothing is there to be lost by a fork.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <new>
#include <thread>
#include <vector>

namespace zipccl {

enum { kMinBytesPerThread = 1 << 20 };  // starting a thread costs as much as coding half of this

// Runs work(state, item) for items 0..num_items-1, each once, on up to `num_threads` threads with one `State` each.
// Throws std::bad_alloc when memory ran out anywhere; a thread that cannot be started is done without.
template <class State, class Work>
void parallel_for(int64_t num_items, int64_t total_bytes, int num_threads, const Work& work) {
    const int64_t useful = std::min<int64_t>(num_items, total_bytes / kMinBytesPerThread);
    const int64_t count = std::max<int64_t>(1, std::min<int64_t>(num_threads, useful));
    std::atomic<int64_t> next{0};
    std::atomic<bool> out_of_memory{false};
    std::vector<State> states(static_cast<size_t>(count));
    const auto body = [&](State* state) {
        try {
            for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) work(*state, item);
        } catch (const std::bad_alloc&) {
            out_of_memory = true;
            next = num_items;
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(count));
    try {
        while (static_cast<int64_t>(threads.size()) + 1 < count)
            threads.emplace_back(body, &states[threads.size() + 1]);
    } catch (const std::exception&) {  // no thread or no memory for it
    }
    body(&states[0]);
    for (std::thread& thread : threads) thread.join();
    if (out_of_memory) throw std::bad_alloc();
}

}  // namespace zipccl
