// Sums of three and more rows of 16-bit types at level 1: a warp a block, and no warp waits for another. What a warp decodes it has copied to
// shared memory itself, two rows ahead; a row's escapes one row ahead, once the tile's headers have told where they are.
//
// A row has a slot, which holds the block's codes, the tile's block headers and the remainders; or the own row as it is. Decoded, a lane's part of
// the row goes through shared memory once more, where escapes find their places.
//
// Instructions are what a row costs: memory alone would take less time (benchmarks/sum_floor.py), and the units for shifts and logic were busy for
// 70 % of it on an H200. So what the compiler would work out anew for every row is kept in registers.
//
// (Tried there, and slower: two blocks a warp, which takes a sixth fewer instructions but has 16 warps on a multiprocessor for 24; pairs of BF16
// taken apart by tensor cores; rows asked of L2 before their turn, but for the very first ones; only those headers that a block needs.)
#ifndef ZIPCCL_REDUCE_ROWS_CUH
#define ZIPCCL_REDUCE_ROWS_CUH

#include "decode.cuh"

namespace zipscape {

constexpr u32 kHeadsAt = kCodeBytes, kPlanesAt = kHeadsAt + 128, kExtraAt = kPlanesAt + kBlockElems;
constexpr u32 kNearEscapes = 128;            // bytes of a row's escapes that are fetched early; a block with more looks each one up
constexpr u32 kDecodedAt = 2 * kNearEscapes, kSlotsAt = kDecodedAt + 2 * kBlockElems;             // in a RowRoom

// Shared memory of a warp. `near` comes first: a corrupt frame may have bytes behind it read.
template <class F>
struct RowRoom { u8 near[2][kNearEscapes], decoded[2 * kBlockElems], slots[3][2 * kBlockElems]; };

// What a tile's headers say of a block: its own one, and the escapes of the blocks before it; and whether its own are in RowRoom::near.
struct RowHead { u32 word, before; bool is_near; };

// The value stays in a register: the compiler, which sees through all but a shuffle, would work it out anew for every row.
template <class T>
__device__ __forceinline__ void keep_in_register(T& value) {
#ifndef ZIPSCAPE_EMULATE
    value = __shfl_sync(kAllLanes, value, lane_id());
#endif
}

// a * 2^shift + b by the multiplier: the units for shifts and logic are the busy ones.
template <u32 kShift>
__device__ __forceinline__ u32 shift_add(u32 a, u32 b) {
#ifdef ZIPSCAPE_EMULATE
    return (a << kShift) + b;
#else
    u32 sum;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "n"(1u << kShift), "r"(b));
    return sum;
#endif
}

// scan_inclusive with half its instructions: a shuffle says itself which lanes have none below.
__device__ __forceinline__ u32 scan_row(u32 value) {
#ifdef ZIPSCAPE_EMULATE
    return scan_inclusive(value);
#else
#pragma unroll
    for (u32 distance = 1; distance < kWarp; distance *= 2)
        asm volatile("{\n\t.reg .u32 below;\n\t.reg .pred p;\n\tshfl.sync.up.b32 below|p, %0, %1, 0, -1;\n\t@p add.u32 %0, %0, below;\n\t}"
                     : "+r"(value) : "r"(distance));
    return value;
#endif
}

// escape_mask with fewer of the instructions that are the busy ones: a field is not zero if its upper bit is set, or if 3 added to the others is
// above 3.
__device__ __forceinline__ u32 escapes_of(const u32 (&w)[3]) {
    constexpr u32 kOthers = 0x36db36db, kUpper = 0x49244924;
    u32 coded[3];
#pragma unroll
    for (u32 k = 0; k < 3; k++) coded[k] = (shift_add<0>(w[k] & kOthers, kOthers) | w[k]) & kUpper;
    return ~(coded[0] >> 2 | coded[1] >> 1 | coded[2] | ((w[0] | w[1] | w[2]) & 0x80008000u));
}

// BF16 without zeros: three instructions a pair. The window's base comes with the remainders; a code is masked where it is and moved by a
// multiplication, from words that are shifted right once for those that lie too high.
struct PlainRow {
    u32 down[3], last, odd, half;

    __device__ __forceinline__ PlainRow(const u32 (&codes)[3], u32 lo)
        : down{codes[0] >> 5, codes[1] >> 5, codes[2] >> 5}, last(get_code(codes, 15, 7)), odd((lo & 1) * (0x80 * kBytes)),
          half((lo >> 1) * kBytes) {}

    __device__ __forceinline__ void unpack_quarter(const Stored<Bf16>& s, u32 j, u32 (&x)[4]) const {
        const u32 low[2] = {(s.planes[j].x & 0x7f * kBytes) | odd, (s.planes[j].y & 0x7f * kBytes) | odd};
        const u32 high[2] = {(s.planes[j].x & 0x80 * kBytes) | half, (s.planes[j].y & 0x80 * kBytes) | half};
#pragma unroll
        for (u32 w = 0; w < 4; w++) {
            const u32 p = 4 * j + w, k = p % 3, bit = 3 * (p / 3), base = __byte_perm(low[w / 2], high[w / 2], w & 1 ? 0x7362 : 0x5140);
            if (p == 15) x[w] = last + base;
            else if (bit == 0) x[w] = shift_add<7>(s.codes[k] & 7 * kBoth, base);
            else if (bit == 3) x[w] = shift_add<4>(s.codes[k] & 7 * kBoth << 3, base);
            else if (bit == 6) x[w] = shift_add<1>(s.codes[k] & 7 * kBoth << 6, base);
            else if (bit == 9) x[w] = shift_add<3>(down[k] & 7 * kBoth << 4, base);
            else x[w] = shift_add<0>(down[k] & 7 * kBoth << 7, base);
        }
    }
};

// The lane's part of a decoded row, escapes excepted, to `mine`; its quarter j is at mine ^ 16 j.
template <class F>
__device__ __forceinline__ void unpack_row(const Stored<F>& s, Window w, SharedAddress mine) {
    const auto unpack_by = [&](const auto& unpack) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 x[4];
            unpack(j, x);
            store_shared(mine ^ 16 * j, make_uint4(x[0], x[1], x[2], x[3]));
        }
    };
    if (w.mode != 0) {
        unpack_by([&](u32 j, u32 (&x)[4]) { unpack_quarter<F, true>(s, w.lo, j, x); });
    } else if constexpr (F::kMantissa == 7) {
        const PlainRow row(s.codes, w.lo);
        unpack_by([&](u32 j, u32 (&x)[4]) { row.unpack_quarter(s, j, x); });
    } else {
        unpack_by([&](u32 j, u32 (&x)[4]) { unpack_quarter<F, false>(s, w.lo, j, x); });
    }
}

// Makes exponent e of what unpack_row left as lo: of the lane's element of bit `bit` of an escape mask. minus_lo: -lo << kMantissa.
template <class F>
__device__ __forceinline__ void set_exponent(SharedAddress mine, u32 bit, u32 e, u32 minus_lo) {
    const u32 v = shift_add<F::kMantissa>(e & F::kExponentMask, minus_lo);
    add_shared(mine ^ (4 * bit & 0x3c), bit & 16 ? v << 16 : v);
}

// Escapes that are not near, each looked up. `at`: of the tile's escapes, the number of those up to the lane's last one. Returns kinds of corruption.
template <class F>
__device__ __forceinline__ u32 set_far_exponents(const Call& c, const Tile& t, u32 tile_index, const u8* frame, u32 mask, u32 at, u32 minus_lo,
                                                 SharedAddress mine) {
    const u8* tile = frame + t.offset;
    const u32 spill_offset = ((const u32*)tile)[1], group = tile_index / (u32)c.g.group_tiles;
    u32 errors = 0;
#pragma unroll 1
    while (mask) {
        const u32 bit = highest_bit(mask);
        mask ^= 1u << bit;
        at--;
        const u64 spilled = (u64)spill_offset + (at - t.escapes_capacity);
        u32 e = 0;
        if (at < t.escapes_capacity) e = (tile + t.escapes_offset)[at];
        else if (spilled < pool_size(c.g, group)) e = (frame + c.g.pools_offset + group * c.g.pool_bytes)[spilled];
        else errors = kBadSpill;
        set_exponent<F>(mine, bit, e, minus_lo);
    }
    return errors;
}

// Asks L2 for what a block has in the first two frames, 11 lines of 128 bytes each, while the call before this one ends. A warp; not for the last
// tile, which may be partial.
template <class F>
__device__ __forceinline__ void fetch_first_frames(const Call& c, const Tile& t, u32 tile_index, u32 b) {
    constexpr u32 kPlaneLines = kBlockElems / 128, kLines = kPlaneLines + kCodeBytes / 128;
    const u32 frame = lane_id() / kLines, line = lane_id() % kLines, row = frame + (frame >= (u32)c.skip);
    if (frame >= 2 || row >= (u32)c.num_rows || tile_index + 1 >= (u32)c.g.num_tiles) return;
    const u32 at = line < kPlaneLines ? t.planes_offset + b * kBlockElems + 128 * line : t.codes_offset + b * kCodeBytes + 128 * (line - kPlaneLines);
    fetch_line_to_l2(c.frames + (i64)row * c.frame_stride + t.offset + at);
}

// Grid: groups of kWarps blocks; kCtas of them fit on a multiprocessor. Row `skip` comes from x, the others from `frames`, added in row order.
//
// The first CTAs, which start when those of the call before this one end, have their first rows on the way when that call is done.
template <class F, u32 kWarps, u32 kCtas>
__device__ __forceinline__ void reduce_rows(const Call& c) {
    static_assert(F::kItem == 2 && sizeof(RowRoom<F>) % 128 == 0, "a lane has 64 bytes of a row, and by_4 tells the lane");
    static_assert(kExtraAt + F::kExtra * kCodeBytes <= sizeof(RowRoom<F>::slots) / 3, "a slot holds a block as it is stored, too");
    constexpr u32 kRawBytes = kBlockElems * F::kItem, kHeadLanes = kCodeBytes / 16, kRowSlot = sizeof(RowRoom<F>::slots) / 3;
    __shared__ __align__(256) RowRoom<F> rooms[kWarps];
    const u32 lane = lane_id(), block = blockIdx.x * kWarps + warp_id(), tile_index = block / 32, b = block % 32;
    const u32 num_rows = (u32)c.num_rows, skip = (u32)c.skip;
    const Tile t = find_tile(c.g, tile_index);
    if (blockIdx.x < kCtas * (u32)c.look_ahead) fetch_first_frames<F>(c, t, tile_index, b);
    begin_in_turn();
    const u32 present = present_of(present_elems(c.g, tile_index), b);
    if (present == 0) return;                              // a whole warp
    const u8* own = c.x + (i64)block * kRawBytes;
    const bool wide_own = present == kBlockElems && is_aligned(own, 16);
    // By 4, 8 and 16 bytes a lane, the block's header, in a room that starts with it; the lane's decoded elements: 64 bytes side by side, turned so
    // that the 16 bytes of 8 lanes meet every bank once.
    const SharedAddress room = shared_address(&rooms[warp_id()]);
    SharedAddress by_4 = room + 4 * lane, by_8 = room + 8 * lane, by_16 = room + 16 * lane, head_in = room + kHeadsAt + 4 * b;
    SharedAddress mine = room + kDecodedAt + (64 * lane + (8 * lane & 0x30));
    // The first 24 lanes fetch codes, the others the tile's headers; from there to the lane's remainders, and to its word of the first slots.
    const u32 at = lane < kHeadLanes ? t.codes_offset + b * kCodeBytes + 16 * lane : kTileHeaderBytes + 16 * (lane - kHeadLanes);
    u32 to_planes = t.planes_offset + b * kBlockElems + 16 * lane - at, to_slots = t.escapes_offset + 4 * lane - at;
    u32 others = lane < b ? 0xffff : 0, seldom = b == 0 || b == t.num_blocks - 1, errors = 0;
    const u8* front = c.frames + t.offset + at;            // of the row that is looked at or started

    const auto is_frame = [&](u32 row) { return row < num_rows && row != skip; };
    const auto start = [&](u32 row, bool on, u32 slot) {
        if (row == skip) {
            if (wide_own)
#pragma unroll
                for (u32 i = 0; i < 4; i++) copy_16_async(by_16 + slot + 512 * i, own + part_offset<F>(i));
            return;
        }
        const u8* planes = front + (i64)(int)to_planes;
        copy_16_async(by_16 + slot, front, on);
        copy_16_async(by_16 + slot + kPlanesAt, planes, on);
        copy_16_async(by_16 + slot + kPlanesAt + 512, planes + 512, on);
        if (F::kExtra) copy_16_async(by_16 + slot + kExtraAt, front + (t.extra_offset - t.codes_offset), on && lane < kHeadLanes);
    };
    // The headers are there; the escapes are on their way to `near` afterwards.
    const auto look = [&](bool on, u32 slot, u32 near) {
        const u32 word = load_shared_u32(head_in + slot), all = load_shared_u32(by_4 + slot + kHeadsAt);
        const u32 before = __reduce_add_sync(kAllLanes, all >> 16 & others), first = before & 3, bytes = first + (word >> 16);
        const bool is_near = bytes <= kNearEscapes && before + (word >> 16) <= t.escapes_capacity;
        copy_4_async(by_4 + near, front + (i64)(int)(to_slots + (before - first)), on && is_near && (by_4 & 0x7c) < bytes);
        return RowHead{word, before, is_near};
    };

    u32 slot = kSlotsAt, slot_1 = slot + kRowSlot, slot_2 = slot_1 + kRowSlot, near = 0;
    bool on_0 = is_frame(0), on_1 = is_frame(1);           // whether these rows, from the current one on, are frames
    start(0, on_0, slot);
    front += c.frame_stride;
    start(1, on_1, slot_1);
    front -= c.frame_stride;
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    RowHead next = look(on_0, slot, near);
    front += c.frame_stride;
    commit_copies();
    keep_in_register(by_4), keep_in_register(by_8), keep_in_register(by_16), keep_in_register(mine);
    if (!F::kExtra)                                        // FP16: no registers are left
        keep_in_register(head_in), keep_in_register(to_planes), keep_in_register(others), keep_in_register(to_slots);
    float sum[32];                                         // -0 + x is x, also in bits (but for NaNs, which become canonical)
#pragma unroll
    for (u32 k = 0; k < 32; k++) sum[k] = -0.0f;
#pragma unroll 1
    for (u32 row = 0; row < num_rows; row++) {
        wait_copies<0>();                                  // this row, its escapes, the next row; and all lanes are done with the row before
        __syncwarp();
        const RowHead head = next;
        const bool on_2 = is_frame(row + 2);
        next = look(on_1, slot_1, near ^ kNearEscapes);
        front += c.frame_stride;
        start(row + 2, on_2, slot_2);
        commit_copies();
        if (on_0) {
            Stored<F> s;
#pragma unroll
            for (u32 k = 0; k < 3; k++) s.codes[k] = load_shared_u32(by_4 + slot + 128 * k);
            if constexpr (F::kExtra)
#pragma unroll
                for (u32 k = 0; k < 3; k++) s.extra[k] = load_shared_u32(by_4 + slot + kExtraAt + 128 * k);
#pragma unroll
            for (u32 j = 0; j < 4; j++) s.planes[j] = load_shared_uint2(by_8 + slot + kPlanesAt + 256 * j);
            const Window w = {head.word & 0xff, head.word >> 8 & 0xff};
            const u32 of_block = head.word >> 16, minus_lo = (0u - w.lo) << F::kMantissa;
            unpack_row<F>(s, w, mine);
            u32 mask = escapes_of(s.codes);
            const u32 inclusive = scan_row(__popc(mask));
            errors = shift_add<8>(inclusive ^ of_block, errors);            // adds 0 in the last lane, or the header lies
            if (seldom || !head.is_near) {
                const u8* frame = c.frames + (i64)row * c.frame_stride;
                if (b == 0) {                              // the windows of all blocks of the tile
                    const u32 all = lane_id() < t.num_blocks ? load_shared_u32(by_4 + slot + kHeadsAt) : 0;
                    if ((all >> 8 & 0xff) > kZeroMode || (all & 0xff) > F::kTopLo) errors |= kBadWindow;
                    if (block == 0) errors |= check_header(c, frame);
                }
                if (b == t.num_blocks - 1 && *(const u32*)(frame + t.offset) != head.before + of_block) errors |= kBadTileCount;
                if (!head.is_near) {
                    errors |= set_far_exponents<F>(c, t, tile_index, frame, mask, head.before + inclusive, minus_lo, mine);
                    mask = 0;
                }
            }
            SharedAddress escape = (by_4 & ~(SharedAddress)0x7c) + near + (head.before & 3) + inclusive;
#pragma unroll 1
            while (mask) {
                const u32 bit = highest_bit(mask);
                mask ^= 1u << bit;
                set_exponent<F>(mine, bit, load_shared_u8(--escape), minus_lo);
            }
        } else if (wide_own) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) store_shared(mine ^ 16 * i, load_shared_uint4(by_16 + slot + 512 * i));
        } else {
#pragma unroll 1
            for (u32 i = 0; i < kLaneElems; i++) {
                const u32 e = octet(i / 8) + i % 8;
                store_shared(mine ^ 2 * i, (u16)(e < present ? raw_bits<F>(own + e * F::kItem) : 0));
            }
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            float f[8];
            to_floats<F>(load_shared_uint4(mine ^ 16 * j), f);
#pragma unroll
            for (u32 k = 0; k < 8; k++) sum[8 * j + k] += f[k];
        }
        const u32 used = slot;
        slot = slot_1, slot_1 = slot_2, slot_2 = used, near ^= kNearEscapes, on_0 = on_1, on_1 = on_2;
    }
    u8* out = c.out + (i64)block * kRawBytes;
    const bool wide = present == kBlockElems && is_aligned(out, 16);
#pragma unroll
    for (u32 j = 0; j < 4; j++) store_part<F>(out, present, wide, j, round_floats<F>(sum + 8 * j));
    errors = (errors & 0xff) | (errors >> 8 && lane_id() == kWarp - 1 ? kBadBlockCount : 0);
    if (errors) atomicOr(c.status, errors);
}

}  // namespace zipscape

#endif  // ZIPCCL_REDUCE_ROWS_CUH
