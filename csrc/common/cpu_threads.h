// Splits a call's work over threads.
//
// They are the OpenMP threads that torch runs its own operators on, where it has them: those are often still awake from
// the operator before, so that they start at once; threads of our own would share the cores with them while they spin,
// some milliseconds after every operator. Else, and in a forked process (which has lost them), threads that live for one
// call.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <thread>
#include <vector>

extern "C" {
// What a compiler calls for "omp parallel" and for its thread number; null where no OpenMP is loaded. torch loads its
// own one globally.
__attribute__((weak)) void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
__attribute__((weak)) int omp_get_thread_num();
}

namespace zipscape {

enum { kMinBytesPerThread = 512 << 10 };  // waking a sleeping thread costs about as much as coding this

static std::atomic<bool> forked{false};
__attribute__((constructor)) static void watch_forks() {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

// Calls body(i) for i = 0.. on `count` threads at once, or on fewer where they cannot be had; 0 is always among them.
template <class Body>
void on_threads(int64_t count, const Body& body) {
    if (count == 1) {
        body(0);
    } else if (GOMP_parallel && omp_get_thread_num && !forked) {
        // A new thread has its maker's rounding and denormal modes; these may have others, so they borrow the caller's.
        struct Call {
            const Body& body;
            std::fenv_t modes;
        } call{body, {}};
        std::fegetenv(&call.modes);
        const auto run = [](void* data) {
            const Call& call = *static_cast<const Call*>(data);
            std::fenv_t own;
            std::fegetenv(&own);
            std::fesetenv(&call.modes);
            call.body(omp_get_thread_num());
            std::fesetenv(&own);
        };
        GOMP_parallel(run, &call, static_cast<unsigned>(count), 0);
    } else {
        std::vector<std::thread> threads;
        threads.reserve(static_cast<size_t>(count));
        try {
            while (static_cast<int64_t>(threads.size()) + 1 < count) threads.emplace_back(body, threads.size() + 1);
        } catch (const std::exception&) {  // no thread or no memory for it
        }
        body(0);
        for (std::thread& thread : threads) thread.join();
    }
}

// Runs work(state, item) for items 0..num_items-1, each once, on up to `num_threads` threads with one `State` each.
// Every thread has a range of its own, the same one in every call of that size, and then takes what others have left.
// Throws std::bad_alloc when memory ran out anywhere.
template <class State, class Work>
void parallel_for(int64_t num_items, int64_t total_bytes, int64_t num_threads, const Work& work) {
    const int64_t useful = std::min(num_items, total_bytes / kMinBytesPerThread);
    const int64_t count = std::max<int64_t>(1, std::min(num_threads, useful));
    struct alignas(64) Share {
        std::atomic<int64_t> next;
        int64_t end;
        State state;
    };
    std::vector<Share> shares(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        shares[i].next = num_items * i / count;
        shares[i].end = num_items * (i + 1) / count;
    }
    std::atomic<bool> out_of_memory{false};
    on_threads(count, [&](int64_t self) {
        if (self >= count) return;
        try {
            for (int64_t i = 0; i < count; ++i) {
                Share& share = shares[(self + i) % count];
                for (int64_t item; !out_of_memory && (item = share.next.fetch_add(1)) < share.end;)
                    work(shares[self].state, item);
            }
        } catch (const std::bad_alloc&) {
            out_of_memory = true;
        }
    });
    if (out_of_memory) throw std::bad_alloc();
}

}  // namespace zipscape
