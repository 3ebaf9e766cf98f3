// Encode: a CTA codes a tile, a warp two neighbouring blocks of it. Nothing is decided by the order of execution: escapes are placed by prefix
// sums, inside a tile through shared memory, between tiles (only where a tile spills) by adding up the counts of the group's earlier tiles.
//
// Counts come first: a warp tells its own before it stores anything, the last one the tile's, so that whoever waits for them (the row's end,
// tiles that spill) waits as little as possible; the warps meet when their codes and remainders are on the way.
//
// Counts travel between CTAs as single words that carry their own "sent" mark, so nothing needs a fence (which would wait for all stores of
// a multiprocessor), an atomic, a memset or a second kernel.
//
// (Tried on an H200, and slower: fewer CTAs that take tile after tile, the next one's data on the way early; bulk copies to shared memory
// instead of loads to registers; a row's end by whichever tile is last instead of a CTA that waits.)
#ifndef ZIPCCL_ENCODE_CUH
#define ZIPCCL_ENCODE_CUH

#include "finish.cuh"
#include "level2.cuh"
#include "load.cuh"

namespace zipscape {

constexpr u32 kEncodeWarps = 16;                           // two blocks each
constexpr u32 kEncodeCtas = 2;                             // that must fit on a multiprocessor, of 2-byte elements: limits the registers

// The spill of the group's tiles before `tile`. All threads of the CTA.
__device__ __forceinline__ u32 earlier_spills(const Call& c, const u64* tiles, u32 tag, u32 first, u32 tile) {
    __shared__ u32 sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    for (u32 t = first + threadIdx.x; t < tile; t += blockDim.x) {
        const u32 spill = spill_of(receive(tiles + t, tag), (u32)c.g.escapes_capacity);         // an earlier tile is never the last one
        if (spill) atomicAdd(&sum, spill);
    }
    __syncthreads();
    return sum;
}

// Raw data of two neighbouring blocks, the first of which is number `block` of its row, as far as they exist: `elems` elements. `scratch`: see
// load_single.
template <class F>
__device__ __forceinline__ void load_pair(const Call& c, i64 block, u32 elems, u8* scratch, u32 (&x)[2][F::kWords]) {
    constexpr u32 kRawBytes = kBlockElems * F::kItem;
    const u8* src = c.x + row_of(c, blockIdx.y) * c.row_stride + block * kRawBytes;
    if (is_aligned(src, 16) && elems >= 2 * kBlockElems) {
        load_aligned<F>(src, x[0]);
        load_aligned<F>(src + kRawBytes, x[1]);
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        const bool inside = block + k > 0 && (block + k + 1) * kBlockElems < c.g.numel;
        if (inside) load_shifted<F>(src + k * kRawBytes, x[k]);
        else load_single<F>(src + k * kRawBytes, present_of(elems, k), scratch, x[k]);
    }
}

// Asks L2 for tile `tile` of the CTA's row. One thread; not for the last tile, which may be partial, and nothing beyond it.
template <class F>
__device__ __forceinline__ void fetch_tile(const Call& c, u32 tile) {
    constexpr u32 kRawBytes = 32 * kBlockElems * F::kItem;
    if (tile + 1 >= (u32)c.g.num_tiles) return;
    const u8* src = c.x + row_of(c, blockIdx.y) * c.row_stride + (i64)tile * kRawBytes;
    if (is_aligned(src, 16)) fetch_to_l2(src, kRawBytes);
}

// What is asked of L2 while the call before this one ends: by every CTA of those that fit at once its tile. They start when CTAs of that call are
// done. But where all of a call fit at once, some find room as soon as that call has begun: so the first ones ask for the last tiles, for all of few.
template <class F>
__device__ __forceinline__ void fetch_first_tiles(const Call& c) {
    constexpr u32 kEarlyCtas = 7, kFewTiles = 66;          // at 16 MiB 257 CTAs leave room for 7 on an H200
    const u32 end = (u32)c.g.num_tiles, at_once = kEncodeCtas * (u32)c.look_ahead, early_tiles = end <= kFewTiles ? kFewTiles : 28;
    const u32 i = threadIdx.x * kEarlyCtas + blockIdx.x;
    const bool fits = end <= at_once, is_early = fits && blockIdx.x < kEarlyCtas;
    if (blockIdx.y == 0 && is_early && i < early_tiles && i < end) fetch_tile<F>(c, end - 1 - i);
    if (threadIdx.x == 0 && blockIdx.y == 0 && blockIdx.x < at_once && !(fits && (is_early || end <= blockIdx.x + early_tiles)))
        fetch_tile<F>(c, blockIdx.x);
}

// ---- what the levels do differently

// How a warp codes a pair of blocks at a level, and what a lane keeps of it until the tile's slots are shared out. kWarps of a CTA, which
// needs kShared bytes; `b`: the pair's first block, `elems`: its elements, maybe none. In this order: load, encode, store, put. kFetch: whether
// it pays to ask L2 for tiles before their turn.
template <class F>
struct EncodeLevel1 {
    typedef F Format;
    static constexpr u32 kWarps = kEncodeWarps, kShared = 32 * kBlockStage<F>;
    static constexpr bool kFetch = F::kItem == 2;
    static constexpr u32 kGathered = 160;                  // as many escapes of a pair are put side by side; as a rule there are 50
    u8* stage;
    u32 x[2][F::kWords], words[2][3], masks[2], at[2], counts, total;              // at: the places in the pair behind this lane's escapes

    __device__ __forceinline__ void load(const Call& c, u32 tile_index, u32 b, u32 elems, u8* shared) {
        stage = shared + b * kBlockStage<F> + lane_id() * kLaneStage<F>;
        if (elems) load_pair<F>(c, (i64)tile_index * 32 + b, elems, stage, x);
    }

    // Fills `heads` but for the numbers of escapes and returns these, of the second block in the upper half. Both blocks at once, so that
    // one's latencies hide behind the other's. The exponents are left at `stage`.
    __device__ __forceinline__ u32 encode(const Call& c, u8*, const Tile&, u32, u32 elems, u8*, u32 (&heads)[2]) {
        masks[0] = masks[1] = 0;
        if (elems) {
            const Sums s0 = stage_exponents<F>(x[0], stage), s1 = stage_exponents<F>(x[1], stage + kBlockStage<F>);
            const u32 sum0 = __reduce_add_sync(kAllLanes, s0.sum), squares0 = __reduce_add_sync(kAllLanes, s0.squares);
            const u32 sum1 = __reduce_add_sync(kAllLanes, s1.sum), squares1 = __reduce_add_sync(kAllLanes, s1.squares);
            const bool zeros = __any_sync(kAllLanes, ((s0.zeros | s1.zeros) & 0x80 * kBytes) != 0);
            if (!zeros && elems >= 2 * kBlockElems && (int)c.g.window_lo < 0) {            // as a rule
                const Window w0 = full_window<F>(sum0, squares0), w1 = full_window<F>(sum1, squares1);
                pack_codes<F>(x[0], w0, words[0]);
                pack_codes<F>(x[1], w1, words[1]);
                masks[0] = escape_mask(words[0]), masks[1] = escape_mask(words[1]);
                heads[0] = w0.lo, heads[1] = w1.lo;
            } else {
#pragma unroll
                for (u32 k = 0; k < 2; k++) {
                    const u32 present = present_of(elems, k);
                    if (!present) break;
                    const u32 count = __reduce_add_sync(kAllLanes, count_nonzero<4>(stage + k * kBlockStage<F>));
                    const Window w = any_window<F>(k ? sum1 : sum0, k ? squares1 : squares0, count, present, (int)c.g.window_lo);
                    if (present < kBlockElems) fill_absent<F>(present, w.lo, x[k]);
                    pack_codes<F>(x[k], w, words[k]);
                    masks[k] = escape_mask(words[k]);
                    heads[k] = w.lo | w.mode << 8;
                }
            }
        }
        counts = __popc(masks[0]) | __popc(masks[1]) << 16;
        const u32 both = __reduce_add_sync(kAllLanes, counts);
        at[1] = both & 0xffff, total = at[1] + (both >> 16);
        return both;
    }

    // All but the escapes to the frame. These are gathered in shared memory, so that little is left to do when their places are known.
    __device__ __forceinline__ void store(u8* tile, const Tile& t, u32 b, u32 elems) {
        u8 *codes = tile + t.codes_offset + b * kCodeBytes, *extra = tile + t.extra_offset + b * kCodeBytes;
        u8* planes = tile + t.planes_offset + b * (kBlockElems * F::kPlanes);
        if (elems) {
            store_codes(codes, words[0]);
            store_remainders<F>(x[0], extra, planes);
        }
        if (elems > kBlockElems) {
            store_codes(codes + kCodeBytes, words[1]);
            store_remainders<F>(x[1], extra + kCodeBytes, planes + kBlockElems * F::kPlanes);
        }
        const u32 inclusive = scan_inclusive(counts);
        at[0] = inclusive & 0xffff, at[1] += inclusive >> 16;
        if (total <= kGathered) {
            u8* to = gathered();
            each_escape([&](u32 i, u8 e) { to[i] = e; });
            __syncwarp();
        }
    }

    // The escapes from place `before` of the tile on, beyond the slots to `pool` (0: nowhere).
    __device__ __forceinline__ void put(u32, u32, const u8*, u32 before, u8* slots, u32 capacity, u8* pool) const {
        const auto put_one = [&](u32 i, u8 e) {
            if (before + i < capacity) slots[before + i] = e;
            else if (pool) pool[before + i - capacity] = e;
        };
        if (total > kGathered) {
            each_escape(put_one);
            return;
        }
        const u8* from = gathered();
#pragma unroll 1
        for (u32 i = lane_id(); i < total; i += kWarp) put_one(i, from[i]);
    }

private:
    __device__ __forceinline__ static u8* gathered() {
        __shared__ u8 room[kWarps][kGathered];
        return room[warp_id()];
    }

    // put_one(place in the pair, exponent) for this lane's escapes, from the last to the first.
    template <class PutOne>
    __device__ __forceinline__ void each_escape(PutOne put_one) const {
        const SharedAddress shared = shared_address(stage);
        u32 mask0 = masks[0], mask1 = masks[1], at0 = at[0], at1 = at[1];
        while (mask0 | mask1) {            // one of each block in a turn; no branch for a block that has none left
            const u32 bit0 = highest_bit(mask0), bit1 = highest_bit(mask1);
            const u8 e0 = load_shared_u8(shared + stage_of_bit(bit0)), e1 = load_shared_u8(shared + kBlockStage<F> + stage_of_bit(bit1));
            at0--, at1--;
            if (mask0) put_one(at0, e0);
            if (mask1) put_one(at1, e1);
            mask0 &= ~(1u << (bit0 & 31)), mask1 &= ~(1u << (bit1 & 31));
        }
    }
};

// What is between the raw data and the stream of a block: first codes to `codes`, remainders to `planes`.
template <bool kZeros>
__device__ __forceinline__ Fields store_block2(const u32 (&x)[16], Window w, u8* codes, u8* planes) {
    const Fields f = code_fields<kZeros>(x, w);
#pragma unroll
    for (u32 k = 0; k < 2; k++) *(u32*)(codes + 128 * k + 4 * lane_id()) = f.first[k];
    store_remainders<Bf16>(x, 0, planes);
    return f;
}

// BF16. Shared memory: the exponents of every warp's pair, then the streams of all blocks.
#ifndef ZIPCCL_ENCODE2_WARPS
#define ZIPCCL_ENCODE2_WARPS 8
#endif
struct EncodeLevel2 {
    typedef Bf16 Format;
    static constexpr u32 kWarps = ZIPCCL_ENCODE2_WARPS, kShared = kWarps * 2 * kBlockElems + 32 * kStreamBytes;
    static constexpr bool kFetch = false;
    u32 x[2][16];

    __device__ __forceinline__ static u8* stream(u8* shared, u32 b) { return shared + kWarps * 2 * kBlockElems + b * kStreamBytes; }

    __device__ __forceinline__ void load(const Call& c, u32 tile_index, u32 b, u32 elems, u8* shared) {
        u8* scratch = stream(shared, b) + lane_id() * kLaneStage<Bf16>;
        if (elems) load_pair<Bf16>(c, (i64)tile_index * 32 + b, elems, scratch, x);
        __syncwarp();                                      // the room for the stream is free again
    }

    // As EncodeLevel1's, with bytes of streams for escapes. Codes and remainders are stored on the way.
    __device__ __forceinline__ u32 encode(const Call& c, u8* tile, const Tile& t, u32 b, u32 elems, u8* shared, u32 (&heads)[2]) {
        if (!elems) return 0;
        u8 *stage = shared + warp_id() * (2 * kBlockElems) + 4 * lane_id(), *out = stream(shared, b);
        u8 *codes = tile + t.codes_offset + b * kCode2Bytes, *planes = tile + t.planes_offset + b * kBlockElems;
        const Sums s0 = stage_exponents2(x[0], stage), s1 = stage_exponents2(x[1], stage + kBlockElems);
        const u32 sum0 = __reduce_add_sync(kAllLanes, s0.sum), squares0 = __reduce_add_sync(kAllLanes, s0.squares);
        const u32 sum1 = __reduce_add_sync(kAllLanes, s1.sum), squares1 = __reduce_add_sync(kAllLanes, s1.squares);
        const bool zeros = __any_sync(kAllLanes, ((s0.zeros | s1.zeros) & 0x80 * kBytes) != 0);
        u32 bytes[2] = {0, 0};
        if (!zeros && elems >= 2 * kBlockElems) {          // as a rule
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                const Window w = window2<true>(k ? sum1 : sum0, k ? squares1 : squares0, kBlockElems, kBlockElems);
                const Fields f = store_block2<false>(x[k], w, codes + k * kCode2Bytes, planes + k * kBlockElems);
                bytes[k] = write_stream(f, w, stage + k * kBlockElems, (u32*)(out + k * kStreamBytes));
                heads[k] = w.lo | w.mode << 8;
            }
        } else {
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                const u32 present = present_of(elems, k);
                if (!present) break;
                const u32 count = __reduce_add_sync(kAllLanes, count_nonzero<128>(stage + k * kBlockElems));
                const Window w = window2<false>(k ? sum1 : sum0, k ? squares1 : squares0, count, present);
                if (present < kBlockElems) fill_absent<Bf16>(present, w.lo + 2, x[k]);
                u8 *my_codes = codes + k * kCode2Bytes, *my_planes = planes + k * kBlockElems;
                const Fields f = w.mode & (kZeroFirst | kZeroSecond) ? store_block2<true>(x[k], w, my_codes, my_planes)
                                                                     : store_block2<false>(x[k], w, my_codes, my_planes);
                bytes[k] = write_stream(f, w, stage + k * kBlockElems, (u32*)(out + k * kStreamBytes));
                heads[k] = w.lo | w.mode << 8;
            }
        }
        __syncwarp();                                      // put reads what other lanes wrote
        return bytes[0] | bytes[1] << 16;
    }

    __device__ __forceinline__ void store(u8*, const Tile&, u32, u32) {}               // encode has

    // `head`: the header of the lane's block of the tile.
    __device__ __forceinline__ void put(u32 b, u32 head, u8* shared, u32 before, u8* slots, u32 capacity, u8* pool) const {
        const u32 *streams = (const u32*)stream(shared, b), first = before / 4;
        const u32 count = (__shfl_sync(kAllLanes, head, b) >> 16) / 4, both = count + (__shfl_sync(kAllLanes, head, b + 1) >> 16) / 4;
#pragma unroll 1
        for (u32 i = lane_id(); i < both; i += kWarp) {
            const u32 at = first + i, v = streams[i < count ? i : i - count + kStreamBytes / 4];
            if (at < capacity / 4) ((u32*)slots)[at] = v;
            else if (pool) ((u32*)pool)[at - capacity / 4] = v;
        }
    }
};

// Grid: (tiles and the row's end, rows without the skipped one).
//
// To keep memory busy while the call before this one ends, and while CTAs compute or wait for others' counts, the first CTAs ask L2 for their
// tiles before they wait for that call, and every CTA, once its own loads are under way, for the tile as many tiles further on as there are
// multiprocessors. BF16 on an H200 (132 of them), per cent of the copy floor without and with both: 16 MiB 80, 82; 256 MiB 94.8, 95.2; where
// tiles spill 74, 80 (10 % zeros) and 84, 88 (Student t). Twice as far was slower.
template <class L>
__device__ __forceinline__ void encode_tile(const Call& c) {
    constexpr u32 kPairs = 16 / L::kWarps;                 // of a warp
    ZIPSCAPE_DYNAMIC_SHARED(shared);
    __shared__ u32 heads[32];                              // block headers
    __shared__ u32 tally;                                  // the warps' counts so far; the upper byte: how many warps
    __shared__ __align__(8) u64 counted;                   // barrier: `heads` is complete
    const u32 look_ahead = (u32)c.look_ahead;
    if constexpr (L::kFetch) fetch_first_tiles<typename L::Format>(c);
    begin_in_turn();
    const u32 lane = lane_id(), warp = warp_id(), tile_index = blockIdx.x;
    u8* frame = c.frames + row_of(c, blockIdx.y) * c.frame_stride;
    const u32 tag = (u32)load_message(c.workspace) + 1;    // needed late: nobody waits for it here
    if (tile_index == (u32)c.g.num_tiles) {
        finish_row(c, frame, tag);
        return;
    }
    const Tile t = find_tile(c.g, tile_index);
    u8* tile = frame + t.offset;
    const u32 tile_elems = present_elems(c.g, tile_index);
    const Workspace ws = find_workspace(c, blockIdx.y);
    const auto pair_block = [&](u32 i) { return 2 * (warp + i * L::kWarps); };
    const auto pair_elems = [&](u32 i) { return tile_elems - min(tile_elems, pair_block(i) * kBlockElems); };
    L pair;
    u32 count = 0;
#pragma unroll 1
    for (u32 i = 0; i < kPairs; i++) {
        const u32 b = pair_block(i);
        pair.load(c, tile_index, b, pair_elems(i), shared);
        if (i == 0) {                                      // while the data are on their way
            if (threadIdx.x == 0) tally = 0, barrier_init(&counted, L::kWarps);
            __syncthreads();
            if constexpr (L::kFetch)
                if (threadIdx.x == 0) fetch_tile<typename L::Format>(c, tile_index + look_ahead);
        }
        u32 my_heads[2] = {0, 0};
        const u32 counts = pair.encode(c, tile, t, b, pair_elems(i), shared, my_heads);
        if (lane == 0) heads[b] = my_heads[0] | counts << 16, heads[b + 1] = my_heads[1] | (counts & 0xffff0000u);
        count += (counts & 0xffff) + (counts >> 16);
    }
    if (lane == 0) {
        const u32 before = atomicAdd(&tally, count | 1u << 24);
        if (before >> 24 == L::kWarps - 1) send(ws.tiles + tile_index, tag, (before & 0xffffff) + count);
        barrier_arrive(&counted);
    }
    pair.store(tile, t, pair_block(kPairs - 1), pair_elems(kPairs - 1));
    barrier_wait(&counted);

    const u32 head = heads[lane], total = __reduce_add_sync(kAllLanes, head >> 16), capacity = t.escapes_capacity;
    u8 *slots = tile + t.escapes_offset, *pool = 0;        // pool: where the spill goes, if it fits
    u32 spill_offset = 0;
    if (total > capacity) {
        const u32 group = tile_index / (u32)c.g.group_tiles;
        spill_offset = earlier_spills(c, ws.tiles, tag, group * (u32)c.g.group_tiles, tile_index);
        if ((u64)spill_offset + (total - capacity) <= pool_size(c.g, group))
            pool = frame + c.g.pools_offset + group * c.g.pool_bytes + spill_offset;
    }
#pragma unroll 1
    for (u32 i = 0; i < kPairs; i++) {                     // each behind what earlier blocks of the tile put into the slots
        const u32 b = pair_block(i);
        pair.put(b, head, shared, __reduce_add_sync(kAllLanes, lane < b ? head >> 16 : 0), slots, capacity, pool);
    }
#pragma unroll 1
    for (u32 i = total + threadIdx.x; i < capacity; i += L::kWarps * kWarp) slots[i] = 0;
    if (warp == 0 && lane < t.num_blocks) ((u32*)(tile + kTileHeaderBytes))[lane] = head;
    if (warp == 0 && lane < 4) ((u32*)tile)[lane] = lane == 0 ? total : lane == 1 ? spill_offset : 0;
}

}  // namespace zipscape

#endif  // ZIPCCL_ENCODE_CUH
