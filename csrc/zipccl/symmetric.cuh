// Frames that ranks of one host read from or write into each other's memory (torch symmetric memory): the device side.
//
// A message is what every rank sends every other one in one step: a frame in a slot of the receiver's memory (or, where it pulls, of the
// sender's). A slot has room for the row as it is. If its frame overflows, the sender puts the raw row behind the frame's header instead;
// the receiver sees that by the header. So nobody asks a host, and nothing is sent again.
//
// Two words for each pair of ranks, in the symmetric memory of the one who waits: the number of the last message that arrived from a peer,
// and of the last one that a peer is done with. Numbers only grow, so nothing is ever reset. A wait has a limit: a peer that died must
// not keep this GPU for ever. What follows is a trap, since all that comes later would be computed from garbage.
#ifndef ZIPCCL_SYMMETRIC_CUH
#define ZIPCCL_SYMMETRIC_CUH

#include "decode.cuh"

namespace zipscape {

constexpr u32 kMaxRanks = 64;
constexpr u32 kWordStride = 16;                            // u32s from one rank's word to the next: no two in one sector
enum { kPeerTimeout = 32 };                                // beside frame.cuh's kinds of corruption

// ---- memory that other GPUs see

#ifdef ZIPSCAPE_EMULATE
__device__ __forceinline__ u32 load_acquire(const u32* p) { return *(const volatile u32*)p; }
__device__ __forceinline__ void store_release(u32* p, u32 value) { *(volatile u32*)p = value; }
__device__ __forceinline__ void fence_all() {}
__device__ __forceinline__ u64 now_ns() {
    static u64 time = 0;
    return time += 1000;
}
__device__ __forceinline__ void give_up() {}
#else
__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(u32* p, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ __forceinline__ void fence_all() { __threadfence_system(); }
__device__ __forceinline__ u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}
__device__ __forceinline__ void give_up() { __trap(); }
#endif

// ---- telling and waiting

// One CTA, a thread for each rank. In this order, each where its number is not 0: tells all, this rank too, that it has read message `done`;
// waits for message `wanted` of all (`words`: this rank's own ones) but `except`; notes in `raw` which rows came raw.
struct Turn {
    u32 num_ranks, except, done, wanted;
    u32* ranks_words[kMaxRanks];
    const u32* words;
    const u8* frames[kMaxRanks];                           // 0: nothing is to be noted
    u32* raw;                                              // [num_ranks]
    u32* errors;
    u64 timeout_ns;
};

__device__ __forceinline__ void take_turn(const Turn& t) {
    const u32 r = threadIdx.x;
    if (r >= t.num_ranks) return;
    if (t.done) store_release(t.ranks_words[r], t.done);
    if (!t.wanted || r == t.except) return;
    const u64 start = now_ns();
    while ((int)(load_acquire(t.words + r * kWordStride) - t.wanted) < 0) {
        if (now_ns() - start < t.timeout_ns) continue;
        atomicOr(t.errors, kPeerTimeout);
        give_up();
        return;
    }
    if (t.frames[r]) t.raw[r] = load_acquire((const u32*)(t.frames[r] + kStatusOffset)) / kOverflowBit & 1;
}

// ---- sending

// Grid: (any number of CTAs, rows). Row i goes to one peer: its frame is made and, if somebody else moves it, moved. Tells the peer; puts
// the raw row into the slot before that if the frame overflowed.
struct Announcement {
    u32 message;
    i64 raw_bytes;
    const u8* headers[kMaxRanks];                          // of the frame, at a place where this rank's kernels wrote it
    const u8* rows[kMaxRanks];
    u8* slots[kMaxRanks];
    u32* words[kMaxRanks];                                 // the peer's
    u32* counters;                                         // [rows], zero before and after
};

__device__ __forceinline__ void copy_bytes(u8* to, const u8* from, i64 num_bytes) {
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    const i64 wide = is_aligned(from, 16) ? num_bytes / 16 : 0;
    for (i64 i = first; i < wide; i += step) ((uint4*)to)[i] = ((const uint4*)from)[i];
    for (i64 i = wide * 8 + first; i < num_bytes / 2; i += step) ((u16*)to)[i] = ((const u16*)from)[i];
}

__device__ __forceinline__ void announce(const Announcement& a) {
    __shared__ bool is_last;
    const u32 row = blockIdx.y;
    if ((((const u32*)a.headers[row])[kStatusOffset / 4] & kOverflowBit) == 0) {
        if (blockIdx.x || threadIdx.x) return;
        fence_all();
        store_release(a.words[row], a.message);
        return;
    }
    copy_bytes(a.slots[row] + kHeaderBytes, a.rows[row], a.raw_bytes);
    fence_all();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(a.counters + row, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last || threadIdx.x) return;
    a.counters[row] = 0;
    fence_all();
    store_release(a.words[row], a.message);
}

// ---- receiving

// `call` as for decode and decode_reduce, but for `frames` and `frame_stride`, which are not read.
struct Reception {
    Call call;
    const u8* frames[kMaxRanks];
    const u32* raw;                                        // [rows] not 0: the row lies raw behind its header
};

struct PeerFrames {
    const Reception* r;
    __device__ __forceinline__ const u8* frame(i64 row) const { return r->frames[row]; }
    __device__ __forceinline__ bool is_raw(i64 row) const { return r->raw[row] != 0; }
};

// Grid: (groups of kWarps blocks, rows without the skipped one).
template <class L, u32 kWarps>
__device__ __forceinline__ void receive_blocks(const Reception& r) {
    typedef typename L::Format F;
    constexpr u32 kRawBytes = kBlockElems * F::kItem;
    const Call& c = r.call;
    const i64 row = row_of(c, blockIdx.y);
    const u8* frame = r.frames[row];
    u8* out_row = c.out + row * c.row_stride;
    if (!r.raw[row]) {
        decode_blocks_of<L, kWarps>(c, frame, out_row);
        return;
    }
    const i64 block = (i64)blockIdx.x * kWarps + warp_id();
    const u32 present = present_of(present_elems(c.g, (u32)(block / 32)), block % 32);
    u8* out = out_row + block * kRawBytes;
    const bool wide = present == kBlockElems && is_aligned(out, 16);
    if (present)
#pragma unroll
        for (u32 i = 0; i < F::kWords / 4; i++)            // the slot has room for whole blocks
            store_part<F>(out, present, wide, i, *(const uint4*)(raw_block<F>(frame, block) + part_offset<F>(i)));
}

}  // namespace zipscape

#endif  // ZIPCCL_SYMMETRIC_CUH
