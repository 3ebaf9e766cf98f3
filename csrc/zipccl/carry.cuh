// Messages that kernels carry (symmetric.cuh has the protocol), instead of copy engines with kernels around them: some CTAs write the frame
// into the peers' slots, piece by piece, and others decode what peers write here as it comes. The host launches both as one kernel, or, where
// a call has several messages, each on its own stream; what else it would queue, waits, words, this rank's own row, is done inside.
//
// A message has one or several frames, of parts of one call. A piece is a tile, or what all tiles of a frame need: the header and the pools
// (or, of a raw row, the word that says so). Each has a word of its own in the memory of the one who waits, so nobody counts. Senders come
// first in the grid and wait for nobody; receivers are as few as keep up with the links, so that what they wait for, and others' kernels,
// find room beside them.
#ifndef ZIPCCL_CARRY_CUH
#define ZIPCCL_CARRY_CUH

#include "symmetric.cuh"

namespace zipscape {

constexpr u32 kCarryWarps = 4;
constexpr u32 kMaxFrames = 5;                              // of a message: as many as kernels take arguments for
constexpr u32 kMaxPieces = 4096 + kMaxFrames;
constexpr u32 kPieceWords = 4112;                          // of a lane and rank
static_assert(kMaxPieces <= kPieceWords, "a word for each");

// Behind the words of whole messages. symmetric_plan.py repeats it.
__device__ __forceinline__ u64* piece_word(const Turn& t, u32 of, u32 lane, u32 from, u32 piece) {
    return (u64*)(t.memory[of] + kWordsBytes) + (lane * t.num_ranks + from) * kPieceWords + piece;
}
inline i64 words_bytes(i64 num_ranks) { return kWordsBytes + kNumLanes * num_ranks * kPieceWords * (i64)sizeof(u64); }

struct OwnCopy {
    u8* to;
    const u8* from;
    i64 num_bytes;
};

// One frame of a message to each peer, and of one from each. `call` as for decode and decode_reduce. The first of its pieces is what all its
// tiles need. The frames and rows for rank r are r strides further.
struct CarriedFrame {
    Call call;
    const u8 *frames, *rows;
    i64 frame_stride, row_stride, raw_bytes, slot;         // slot: in the peers' memory
    i64 as_it_is;                                          // there is no frame
    OwnCopy own;                                           // of receivers
    i64 first_piece;
};

// Grid: `num_senders` CTAs, or none, that send message t.sent, then those, or none, that receive message t.wanted, if both the same one.
struct Carried {
    Turn t;
    u32 num_frames, num_pieces, num_senders;
    u32 num_groups;                                        // of a tile that a receiver decodes one after the other: a power of two
    u32 *tickets, *num_ended;                              // of the lane's senders, of receivers: zero before and after
    CarriedFrame frames[kMaxFrames];
};
static_assert(sizeof(Carried) <= 4096, "arguments of a kernel");

// The frame that a piece belongs to.
__device__ __forceinline__ u32 frame_of(const Carried& m, u32 piece) {
    u32 i = 0;
    while (i + 1 < m.num_frames && piece >= m.frames[i + 1].first_piece) i++;
    return i;
}

// All threads of the CTA; `to` is aligned to 16 bytes.
__device__ __forceinline__ void copy_piece(u8* to, const u8* from, i64 num_bytes) {
    const u32 wide = (u32)(num_bytes / 16), step = blockDim.x;
    if (is_aligned(from, 16)) {
        copy_wide<8>(to, from, wide, threadIdx.x, step);
    } else {
        for (u32 i = threadIdx.x; i < wide; i += step) {
            const u16* p = (const u16*)(from + 16 * (i64)i);
            u32 w[4];
#pragma unroll
            for (u32 k = 0; k < 4; k++) w[k] = p[2 * k] | (u32)p[2 * k + 1] << 16;
            ((uint4*)to)[i] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
    for (u32 i = wide * 8 + threadIdx.x; i < num_bytes / 2; i += step) ((u16*)to)[i] = ((const u16*)from)[i];
}

// Piece `piece` of the message to `peer`.
__device__ __forceinline__ void send_piece(const Carried& m, u32 piece, u32 peer) {
    const Turn& t = m.t;
    const CarriedFrame& f = m.frames[frame_of(m, piece)];
    const ZipcclGeometry& g = f.call.g;
    const u8 *frame = f.frames + peer * f.frame_stride, *row = f.rows + peer * f.row_stride;
    u8* slot = t.memory[peer] + f.slot;
    const bool is_raw = f.as_it_is || (((const u32*)frame)[kStatusOffset / 4] & kOverflowBit);
    const i64 raw_tile = 32 * kBlockElems * g.itemsize, tile = (i64)piece - f.first_piece - 1;
    i64 to = 0, from = 0, num_bytes = 0;
    if (tile >= 0 && is_raw) {
        from = tile * raw_tile, to = kHeaderBytes + from, num_bytes = f.raw_bytes - from;
    } else if (tile >= 0) {
        to = from = g.tiles_offset + tile * g.tile_bytes, num_bytes = g.pools_offset - from;
    } else if (is_raw) {
        if (threadIdx.x == 0) {
            *(volatile u32*)(slot + kStatusOffset) = kOverflowBit;
            if (!f.as_it_is) atomicAdd(t.overflows + (peer + t.num_ranks - 1 - t.rank) % t.num_ranks, 1);
        }
    } else {
        if (threadIdx.x < kHeaderBytes / 4) ((u32*)slot)[threadIdx.x] = ((const u32*)frame)[threadIdx.x];
        to = from = g.pools_offset, num_bytes = g.frame_bytes - from;
    }
    const i64 most = is_raw ? raw_tile : g.tile_bytes;
    if (tile >= 0 && num_bytes > most) num_bytes = most;
    copy_piece(slot + to, (is_raw ? row : frame) + from, num_bytes);
    __syncthreads();
    if (threadIdx.x) return;
    fence_all();                                           // what the others of the CTA wrote, too
    store_release(piece_word(t, peer, t.sent_lane, t.rank, piece), t.sent);
}

// Piece by piece, in turns to all peers. Who has time takes the next one: it is enough that one of the senders runs.
__device__ __forceinline__ void send_pieces(const Carried& m) {
    __shared__ u32 tickets[2];
    const u32 num_peers = m.t.num_ranks - 1, num_jobs = m.num_pieces * num_peers;
    if (threadIdx.x == 0) tickets[0] = atomicAdd(m.tickets, 1);
    __syncthreads();
    u32 job;
#pragma unroll 1
    for (u32 turn = 0; (job = tickets[turn % 2]) < num_jobs; turn++) {
        if (threadIdx.x == 0) tickets[(turn + 1) % 2] = atomicAdd(m.tickets, 1);           // seen behind the piece's barrier
        send_piece(m, job / num_peers, (m.t.rank + 1 + job % num_peers) % m.t.num_ranks);
    }
    if (threadIdx.x == 0 && job == num_jobs + m.num_senders - 1) *m.tickets = 0;           // the last of all
}

__device__ __forceinline__ void await_piece(const Turn& t, u32 from, u32 piece) {
    wait_until(t, piece_word(t, t.rank, t.wanted_lane, from, piece), t.wanted);
}

struct CarriedFrames {
    const Call* call;
    const u32* raw;                                        // [rows]
    __device__ __forceinline__ const u8* frame(i64 row) const { return call->frames + row * call->frame_stride; }
    __device__ __forceinline__ bool is_raw(i64 row) const { return raw[row] != 0; }
};

enum { kGather, kSumOfTwo, kSumOfMany };

// The receivers: first this rank's own rows, for nothing else is there yet; then groups of kCarryWarps blocks, all peers' of a tile
// before the next tile's. The last of them tells everybody that the message is read.
template <class L, u32 kRows, u32 kWhat>
__device__ __forceinline__ void receive_pieces(const Carried& m) {
    constexpr u32 kGroups = 32 / kCarryWarps;              // of a tile
    __shared__ Call c;                                     // the frame's that is being decoded: what registers had no room for
    __shared__ u32 raw[kMaxRanks];
    __shared__ bool is_last;
    const Turn& t = m.t;
    const u32 first = blockIdx.x - m.num_senders, num_ctas = gridDim.x - m.num_senders, r = threadIdx.x;
    const bool is_peer = r < t.num_ranks && r != t.rank;
#pragma unroll 1
    for (u32 i = 0; i < m.num_frames; i++) {
        const OwnCopy& own = m.frames[i].own;
        copy_bytes(own.to, own.from, own.num_bytes, (i64)first * blockDim.x + r, (i64)num_ctas * blockDim.x);
    }
    const u32 num_peers = kWhat == kGather ? t.num_ranks - 1 : 1;
    const u32 num_parts = kGroups / m.num_groups;          // of a tile
    const u32 num_jobs = (m.num_pieces - m.num_frames) * num_parts * num_peers;
    u32 current = kMaxFrames, tiles_end = 0, tiles_before = 0;
#pragma unroll 1
    for (u32 job = first; job < num_jobs; job += num_ctas) {
        const u32 place = job / (num_parts * num_peers);   // of the tile, in the message
        __syncthreads();                                   // what is in shared memory of the group before is used up
        if (place >= tiles_end) {
            if (current == kMaxFrames) current = 0;
            for (;; current++) {
                tiles_before = (u32)m.frames[current].first_piece - current;
                tiles_end = tiles_before + (u32)m.frames[current].call.g.num_tiles;
                if (place < tiles_end) break;
            }
            const Call& now = m.frames[current].call;
            for (u32 i = r; i < sizeof(Call) / sizeof(u64); i += blockDim.x) ((u64*)&c)[i] = ((const u64*)&now)[i];
            if (is_peer) {
                await_piece(t, r, (u32)m.frames[current].first_piece);
                raw[r] = load_acquire((const u32*)(now.frames + r * now.frame_stride + kStatusOffset)) / kOverflowBit & 1;
            }
        }
        const u32 piece = place + current + 1, nth = job / num_parts % num_peers, row = nth + (nth >= t.rank);
        if (kWhat == kGather ? r == 0 : is_peer) await_piece(t, kWhat == kGather ? row : r, piece);
        const u32 group = (place - tiles_before) * kGroups + job % num_parts * m.num_groups;
#pragma unroll 1
        for (u32 i = 0; i < m.num_groups; i++) {
            __syncthreads();
            if constexpr (kWhat == kGather)
                receive_group<L, kCarryWarps>(c, c.frames + row * c.frame_stride, raw[row] != 0, c.out + row * c.row_stride, group + i);
            else decode_reduce_blocks<L, kCarryWarps, kRows, kWhat == kSumOfTwo>(c, CarriedFrames{&c, raw}, group + i);
        }
    }
    __syncthreads();
    if (r == 0) {
        fence_all();
        is_last = atomicAdd(m.num_ended, 1) == num_ctas - 1;
        if (is_last) *m.num_ended = 0;
        fence_all();
    }
    __syncthreads();
    if (is_last && r < t.num_ranks) store_release(read_word(t.memory[r], t.rank), t.wanted);
}

template <class L, u32 kRows, u32 kWhat>
__device__ __forceinline__ void carry(const Carried& m) {
    if (blockIdx.x < m.num_senders) send_pieces(m);
    else receive_pieces<L, kRows, kWhat>(m);
}

}  // namespace zipscape

#endif  // ZIPCCL_CARRY_CUH
