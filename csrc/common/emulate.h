// CUDA on a CPU, for tests: every CUDA thread is a fiber, a CTA's fibers take turns, CTAs run one after the other. Warp functions and
// barriers are meeting points: a fiber that arrives hands over to the next one until all have arrived. Checks logic, hardly races.
#ifndef ZIPSCAPE_EMULATE_H
#define ZIPSCAPE_EMULATE_H

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__
#define __grid_constant__

static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {

constexpr unsigned kWarpLanes = 32;
constexpr size_t kStackBytes = 64 << 10;

struct Meeting {          // of a warp or a CTA
    unsigned arrived = 0, round = 0;
};

struct Copy {              // under way
    void* to;
    const void* from;
    unsigned num_bytes, batch;
};

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool begun = false, done = false;
    std::vector<char> stack;
    std::vector<Copy> copies;
    unsigned batch = 0;
};

static std::vector<Fiber> fibers;
static std::vector<Meeting> warp_meetings;
static Meeting cta_meeting;
static unsigned words[1024 / kWarpLanes][2][kWarpLanes];      // what each lane brings to a meeting, for even and odd rounds
static jmp_buf scheduler;
static unsigned current;
static std::function<void()> body;

inline void yield() {
    if (_setjmp(fibers[current].at) == 0) _longjmp(scheduler, 1);
}

inline void meet(Meeting& meeting, unsigned size) {
    const unsigned round = meeting.round;
    if (++meeting.arrived == size) {
        meeting.arrived = 0;
        meeting.round++;
        return;
    }
    while (meeting.round == round) yield();
}

inline unsigned lane() { return threadIdx.x % kWarpLanes; }
inline unsigned warp() { return threadIdx.x / kWarpLanes; }

// Brings `value`, returns all lanes' values; valid until this lane's next-but-one meeting.
inline const unsigned* exchange(unsigned value) {
    Meeting& meeting = warp_meetings[warp()];
    unsigned(&slot)[kWarpLanes] = words[warp()][meeting.round % 2];
    slot[lane()] = value;
    meet(meeting, kWarpLanes);
    return slot;
}

inline void run_fiber() {
    body();
    fibers[current].done = true;
    _longjmp(scheduler, 1);
}

// The current fiber until it waits. False: it has ended.
inline bool run_on() {
    Fiber& fiber = fibers[current];
    if (fiber.done) return false;
    threadIdx = dim3(current);
    if (_setjmp(scheduler) == 0) {
        if (fiber.begun) _longjmp(fiber.at, 1);
        fiber.begun = true;
        setcontext(&fiber.start);
    }
    return true;
}

// A warp runs as far as it can before the next one: code that does not wait where it must for later warps gives wrong results.
inline void run_cta(unsigned num_threads) {
    warp_meetings.assign(num_threads / kWarpLanes, Meeting());
    cta_meeting = Meeting();
    if (fibers.size() < num_threads) fibers.resize(num_threads);
    for (unsigned t = 0; t < num_threads; t++) {
        Fiber& fiber = fibers[t];
        fiber.begun = fiber.done = false;
        fiber.copies.clear();
        fiber.stack.resize(kStackBytes);
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.data();
        fiber.start.uc_stack.ss_size = fiber.stack.size();
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, run_fiber, 0);
    }
    for (bool any = true; any;) {
        any = false;
        for (unsigned w = 0; w < warp_meetings.size(); w++)
            for (unsigned round = ~0u; round != warp_meetings[w].round;) {
                round = warp_meetings[w].round;
                for (current = w * kWarpLanes; current < (w + 1) * kWarpLanes; current++) any = run_on() || any;
            }
    }
}

inline void launch(dim3 grid, unsigned num_threads, const std::function<void()>& kernel) {
    body = kernel;
    gridDim = grid;
    blockDim = dim3(num_threads);
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) {
            blockIdx = dim3(x, y);
            run_cta(num_threads);
        }
}

// A copy may be done as soon as it is asked for or as late as the wait for its batch: here the one or the other, so that code that overwrites
// what is still read, or reads what is not awaited, gives wrong results.
inline void copy_async(void* to, const void* from, unsigned num_bytes) {
    static unsigned toss = 1;
    toss = toss * 1664525 + 1013904223;
    if (toss >> 31) memcpy(to, from, num_bytes);
    else fibers[current].copies.push_back({to, from, num_bytes, fibers[current].batch});
}

inline void commit_copies() { fibers[current].batch++; }

inline void wait_copies(unsigned num_left) {
    Fiber& fiber = fibers[current];
    std::vector<Copy> left;
    for (const Copy& copy : fiber.copies) {
        if ((int)(fiber.batch - copy.batch) > (int)num_left) memcpy(copy.to, copy.from, copy.num_bytes);
        else left.push_back(copy);
    }
    fiber.copies.swap(left);
}

inline unsigned pairwise(unsigned a, unsigned b, unsigned (*op)(unsigned, unsigned)) {
    return (op(a & 0xffff, b & 0xffff) & 0xffff) | op(a >> 16, b >> 16) << 16;
}

inline float half_to_float(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}

inline uint16_t float_to_half(float value) {
    const _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return std::isnan(value) ? 0x7fff : bits;          // what cvt gives
}

inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return std::isnan(value) ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulate

inline unsigned __shfl_sync(unsigned, unsigned value, unsigned from) { return emulate::exchange(value)[from % 32]; }
inline unsigned __shfl_up_sync(unsigned, unsigned value, unsigned distance) {
    const unsigned* all = emulate::exchange(value);
    return emulate::lane() < distance ? value : all[emulate::lane() - distance];
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    const unsigned* all = emulate::exchange(value);
    unsigned sum = 0;
    for (unsigned i = 0; i < 32; i++) sum += all[i];
    return sum;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const unsigned* all = emulate::exchange(value);
    unsigned best = 0;
    for (unsigned i = 0; i < 32; i++) best = all[i] > best ? all[i] : best;
    return best;
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    const unsigned* all = emulate::exchange(predicate != 0);
    unsigned mask = 0;
    for (unsigned i = 0; i < 32; i++) mask |= all[i] << i;
    return mask;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline void __syncwarp() { emulate::exchange(0); }
inline void __syncthreads() { emulate::meet(emulate::cta_meeting, blockDim.x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = a | (uint64_t)b << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((uint64_t)high << 32 | low) << (by & 31) >> 32);
}
inline unsigned __vminu2(unsigned a, unsigned b) {
    return emulate::pairwise(a, b, [](unsigned x, unsigned y) { return x < y ? x : y; });
}
inline unsigned __vadd2(unsigned a, unsigned b) {
    return emulate::pairwise(a, b, [](unsigned x, unsigned y) { return x + y; });
}
inline unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned c) { return __vminu2(__vadd2(a, b), c); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 0xff) * (b >> i & 0xff);
    return c;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned atomicAdd(unsigned* p, unsigned v) { const unsigned old = *p; *p += v; return old; }
inline unsigned atomicAnd(unsigned* p, unsigned v) { const unsigned old = *p; *p &= v; return old; }
inline unsigned atomicOr(unsigned* p, unsigned v) { const unsigned old = *p; *p |= v; return old; }

#endif  // ZIPSCAPE_EMULATE_H
