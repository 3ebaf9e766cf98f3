// Frames that ranks of one host write into each other's memory (torch symmetric memory): the device side.
//
// A message is what every rank sends every other one in one step: a frame in a slot of the receiver's memory. A slot has room for the row as
// it is. If its frame overflows, the sender puts the raw row behind the frame's header; the receiver sees that by the header. So nobody asks
// a host, and nothing is sent again. A row that has no frame comes in the same way.
//
// Words for each pair of ranks, in the symmetric memory of the one who waits: the number of the last message that arrived from a peer, one
// word for each lane (messages of different lanes overtake each other), and of the last one that a peer is done with. Numbers only grow, so
// nothing is ever reset. A wait has a limit: a peer that died must not keep this GPU for ever. What follows is a trap, since all that comes
// later would be computed from garbage.
#ifndef ZIPCCL_SYMMETRIC_CUH
#define ZIPCCL_SYMMETRIC_CUH

#include "decode.cuh"

namespace zipscape {

constexpr u32 kMaxRanks = 64;
constexpr u32 kWordStride = 8;                             // u64s from one rank's word to the next: no two in one sector
enum { kPush0, kPush1, kChain, kNumLanes };                // what a message is moved on: copies in turns, or one thing after the other
enum { kPeerTimeout = 32 };                                // beside frame.cuh's kinds of corruption

// ---- memory that other GPUs see

#ifdef ZIPSCAPE_EMULATE
__device__ __forceinline__ u32 load_acquire(const u32* p) { return *(const volatile u32*)p; }
__device__ __forceinline__ u64 load_acquire(const u64* p) { return *(const volatile u64*)p; }
__device__ __forceinline__ void store_release(u64* p, u64 value) { *(volatile u64*)p = value; }
__device__ __forceinline__ void fence_all() {}
__device__ __forceinline__ u64 now_ns() {
    static u64 time = 0;
    return time += 1000;
}
__device__ __forceinline__ void give_up() {}
__device__ __forceinline__ void pause() {}
#else
__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
__device__ __forceinline__ u64 load_acquire(const u64* p) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(u64* p, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
__device__ __forceinline__ void fence_all() { __threadfence_system(); }
__device__ __forceinline__ u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}
__device__ __forceinline__ void give_up() { __trap(); }
__device__ __forceinline__ void pause() { __nanosleep(20); }
#endif

// ---- telling and waiting

__device__ __host__ __forceinline__ u64* arrived_word(u8* memory, u32 lane, u32 from) {
    return (u64*)memory + (lane * kMaxRanks + from) * kWordStride;
}
__device__ __host__ __forceinline__ u64* read_word(u8* memory, u32 by) { return (u64*)memory + (kNumLanes * kMaxRanks + by) * kWordStride; }
constexpr u32 kWordsBytes = (kNumLanes + 1) * kMaxRanks * kWordStride * sizeof(u64);

// What a rank does at the end of sending a message, then at the start of receiving one; each where its number is not 0. Grid: (any number
// of CTAs, peers or 1 where nothing is sent).
struct Turn {
    u32 rank, num_ranks;
    u8* memory[kMaxRanks];                                 // the ranks' symmetric memory

    // Tells peers that message `sent` is in the slot at `slot` of their memory; if its frame overflowed, puts the raw row there before that.
    // Frame and row for rank r are r strides further; `frames`: where they were made.
    u64 sent;
    u32 sent_lane, as_it_is;                               // as_it_is: there is no frame, and the raw row lies there already
    i64 slot, raw_bytes, frame_stride, row_stride;
    const u8 *frames, *rows;
    u32* counters;                                         // [peers], zero before and after
    u32* overflows;                                        // [peers], of host memory: how many frames overflowed

    u64 done;                                              // tells all, this rank too, that it has read this message
    u64 read;                                              // waits until all, this rank too, have read this message
    u64 wanted;                                            // waits until this message of each peer has arrived; notes in `raw` which rows are raw
    u32 wanted_lane;
    const u8* arrivals;                                    // rank r's frame is r strides further
    i64 arrival_stride;
    u32* raw;                                              // [num_ranks]
    u32* errors;
    u64 timeout_ns;
};

__device__ __forceinline__ void wait_until(const Turn& t, const u64* word, u64 message) {
    const u64 start = now_ns();
    while (load_acquire(word) < message) {
        if (now_ns() - start < t.timeout_ns) {
            pause();
            continue;
        }
        atomicOr(t.errors, kPeerTimeout);
        give_up();
        return;
    }
}

// `wide` times 16 bytes, aligned to as many, `kAhead` of them on their way. Thread `first` of `step`.
template <u32 kAhead, class Number>
__device__ __forceinline__ void copy_wide(u8* to, const u8* from, Number wide, Number first, Number step) {
    for (Number i = first; i < wide; i += kAhead * step) {
        uint4 v[kAhead];
#pragma unroll
        for (u32 k = 0; k < kAhead; k++)
            if (i + k * step < wide) v[k] = ((const uint4*)from)[i + k * step];
#pragma unroll
        for (u32 k = 0; k < kAhead; k++)
            if (i + k * step < wide) ((uint4*)to)[i + k * step] = v[k];
    }
}

// 16 bytes at a time where both are aligned: whole numbers of elements, of at least two bytes. Thread `first` of `step`.
__device__ __forceinline__ void copy_bytes(u8* to, const u8* from, i64 num_bytes, i64 first, i64 step) {
    const i64 wide = is_aligned(from, 16) && is_aligned(to, 16) ? num_bytes / 16 : 0;
    copy_wide<4>(to, from, wide, first, step);
    for (i64 i = wide * 8 + first; i < num_bytes / 2; i += step) ((u16*)to)[i] = ((const u16*)from)[i];
}

__device__ __forceinline__ void copy_bytes(u8* to, const u8* from, i64 num_bytes) {            // the x CTAs of the grid
    copy_bytes(to, from, num_bytes, (i64)blockIdx.x * blockDim.x + threadIdx.x, (i64)gridDim.x * blockDim.x);
}

__device__ __forceinline__ void announce(const Turn& t) {
    __shared__ bool is_last;
    const u32 i = blockIdx.y, peer = (t.rank + 1 + i) % t.num_ranks;
    u8* slot = t.memory[peer] + t.slot;
    u64* word = arrived_word(t.memory[peer], t.sent_lane, t.rank);
    const u8* frame = t.frames + peer * t.frame_stride;
    if (t.as_it_is || (((const u32*)frame)[kStatusOffset / 4] & kOverflowBit) == 0) {
        if (blockIdx.x || threadIdx.x) return;
        if (t.as_it_is) *(volatile u32*)(slot + kStatusOffset) = kOverflowBit;
        fence_all();
        store_release(word, t.sent);
        return;
    }
    copy_bytes(slot + kHeaderBytes, t.rows + peer * t.row_stride, t.raw_bytes);
    fence_all();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(t.counters + i, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last || threadIdx.x) return;
    t.counters[i] = 0;
    *(volatile u32*)(t.overflows + i) += 1;
    fence_all();
    store_release(word, t.sent);
}

__device__ __forceinline__ void take_turn(const Turn& t) {
    const u32 r = threadIdx.x;
    if (t.sent) announce(t);
    if (blockIdx.x || blockIdx.y || r >= t.num_ranks) return;
    if (t.done) store_release(read_word(t.memory[r], t.rank), t.done);
    if (t.read) wait_until(t, read_word(t.memory[t.rank], r), t.read);
    if (!t.wanted || r == t.rank) return;
    wait_until(t, arrived_word(t.memory[t.rank], t.wanted_lane, r), t.wanted);
    t.raw[r] = load_acquire((const u32*)(t.arrivals + r * t.arrival_stride + kStatusOffset)) / kOverflowBit & 1;
}

// ---- receiving

// `call` as for decode and decode_reduce.
struct Reception {
    Call call;
    const u32* raw;                                        // [rows] not 0: the row lies raw behind its header
};

struct PeerFrames {
    const Reception* r;
    __device__ __forceinline__ const u8* frame(i64 row) const { return r->call.frames + row * r->call.frame_stride; }
    __device__ __forceinline__ bool is_raw(i64 row) const { return r->raw[row] != 0; }
};

// kWarps blocks of a row, the group-th: decoded to `out_row`, or as they are.
template <class L, u32 kWarps>
__device__ __forceinline__ void receive_group(const Call& c, const u8* frame, bool is_raw, u8* out_row, u32 group) {
    typedef typename L::Format F;
    constexpr u32 kRawBytes = kBlockElems * F::kItem;
    if (!is_raw) {
        decode_blocks_of<L, kWarps>(c, frame, out_row, group);
        return;
    }
    const i64 block = (i64)group * kWarps + warp_id();
    const u32 present = present_of(present_elems(c.g, (u32)(block / 32)), block % 32);
    u8* out = out_row + block * kRawBytes;
    const bool wide = present == kBlockElems && is_aligned(out, 16);
    if (present)
#pragma unroll
        for (u32 i = 0; i < F::kWords / 4; i++)            // the slot has room for whole blocks
            store_part<F>(out, present, wide, i, *(const uint4*)(raw_block<F>(frame, block) + part_offset<F>(i)));
}

// Grid: (groups of kWarps blocks, rows without the skipped one).
template <class L, u32 kWarps>
__device__ __forceinline__ void receive_blocks(const Reception& r) {
    const Call& c = r.call;
    const i64 row = row_of(c, blockIdx.y);
    receive_group<L, kWarps>(c, PeerFrames{&r}.frame(row), r.raw[row] != 0, c.out + row * c.row_stride, blockIdx.x);
}

}  // namespace zipscape

#endif  // ZIPCCL_SYMMETRIC_CUH
