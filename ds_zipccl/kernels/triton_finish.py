"""What encode's programs in Triton tell each other, and the end of a group of tiles, which has a program of its own, so that it runs beside
the last tiles and not after them (csrc/zipccl/finish.cuh)."""
import triton
import triton.language as tl

from ds_zipccl.kernels.triton_block import GROUP_TILES, u32_at


@triton.jit
def num_groups_of(num_tiles):
    return (num_tiles + GROUP_TILES - 1) // GROUP_TILES


@triton.jit
def words_of_row(words, index, num_tiles):
    """The words of grid row ``index``: of its tiles, then of its groups (one if there is none). The first of all is the last call's tag."""
    return words + (1 + index.to(tl.int64) * (num_tiles + tl.maximum(num_groups_of(num_tiles), 1)))


@triton.jit
def send(to, tag, value):
    tl.atomic_xchg(to, (tag.to(tl.uint64) << 32 | value.to(tl.uint64)).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def receive(words, exists, tag):
    """The numbers that ``words`` tell, once they all do; 0 for those that do not exist."""
    found = tl.load(words, mask=exists, other=0, volatile=True)
    while tl.max((exists & ((found >> 32).to(tl.uint32) != tag)).to(tl.int32), 0) > 0:
        found = tl.load(words, mask=exists, other=0, volatile=True)
    return tl.where(exists, found & 0xFFFFFFFF, 0).to(tl.int32)


@triton.jit
def spill_of(num, capacity):
    return tl.maximum(num - capacity, 0)


@triton.jit
def worst_of_words(words, end, tag, need, overflow, spill_need):
    """The worst of some fields of a status word and of those that words 0 .. end - 1 tell."""
    first = 0
    while first < end:
        i = first + tl.arange(0, 128)
        word = receive(words + i, i < end, tag)
        need = tl.maximum(need, tl.max(word & 0xFFFF, 0))
        overflow = tl.maximum(overflow, tl.max((word >> 16) & 1, 0))
        spill_need = tl.maximum(spill_need, tl.max(word >> 17, 0))
        first += 128
    return need, overflow, spill_need


@triton.jit
def end_group(frame, words, status, tag, g, index, num_rows, num_tiles, last_blocks, capacity, last_capacity, pools_offset, pool_bytes,
              last_pool_bytes, h0, h1, h2, h3, h4, L: tl.constexpr):
    """Group ``g`` of grid row ``index``: the rest of its sub-pool; the row's last one also ends the row, the last row's the call."""
    num_groups = num_groups_of(num_tiles)
    ends = tl.maximum(num_groups, 1)
    of_row = words_of_row(words, index, num_tiles)
    t = g * GROUP_TILES + tl.arange(0, GROUP_TILES)
    num = receive(of_row + t, t < num_tiles, tag)
    last = t == num_tiles - 1
    need = tl.max(tl.where(last, (num + last_blocks - 1) // last_blocks, (num + 31) >> 5), 0)
    spill = tl.where(t < num_tiles, spill_of(num, tl.where(last, last_capacity, capacity)), 0)
    total = tl.sum(spill, 0)
    size = tl.where(num_groups == 0, 0, tl.where(g == num_groups - 1, last_pool_bytes, pool_bytes))
    at = tl.cast(0, tl.int32)
    if total > 0:
        upto = tl.cumsum(spill, 0)
        at = tl.max(tl.where((upto <= size) & (spill > 0), upto, 0), 0)                      # end of the last spill that fits
    pool = tl.multiple_of(frame + (pools_offset + g.to(tl.int64) * pool_bytes), 16)
    whole, few = (at + 15) // 16 * 16, tl.arange(0, 16)
    tl.store(pool + at + few, tl.zeros((16,), tl.uint8), mask=at + few < whole)
    lanes, four = 16 * tl.arange(0, L)[:, None], tl.arange(0, 4)[None, :]
    while whole < size:                                    # a sub-pool is a multiple of 128 bytes
        places = (pool + whole).to(tl.pointer_type(tl.int32)) + (lanes // 4 + four)
        tl.store(places, tl.zeros((L, 4), tl.int32), mask=whole + lanes + 0 * four < size)
        whole += 16 * L
    unit = 4 * tl.maximum(tl.minimum(num_tiles - g * GROUP_TILES, GROUP_TILES), 1)
    overflow, spill_need = (total > size).to(tl.int32), (total + unit - 1) // unit
    if g == ends - 1:
        need, overflow, spill_need = worst_of_words(of_row + num_tiles, g, tag, need, overflow, spill_need)
        i = tl.arange(0, 32)
        word = tl.where(i == 0, h0, tl.where(i == 1, h1, tl.where(i == 2, h2, tl.where(i == 3, h3, tl.where(i == 4, h4, 0)))))
        tl.store(u32_at(frame, 0) + i, tl.where(i == 5, need | overflow << 16 | spill_need << 17, word).to(tl.uint32))
    if (g == ends - 1) & (index == num_rows - 1):
        other = tl.cast(0, tl.int32)
        while other < index:
            of_other = words_of_row(words, other, num_tiles) + num_tiles
            need, overflow, spill_need = worst_of_words(of_other, ends, tag, need, overflow, spill_need)
            other += 1
        tl.store(status, need | overflow << 16 | spill_need << 17)
        tl.store(words, tag.to(tl.int64))                  # every program has read it, or it could not have told anything
    else:
        send(of_row + (num_tiles + g), tag, need | overflow << 16 | spill_need << 17)
