"""The one-sided transport without a GPU: emulated ranks in one process take turns, one step each; results against the inputs' bits and
the rank-order sum. Races, and what links do, need GPUs."""
import ctypes
import itertools
from types import SimpleNamespace

import pytest
import torch

from ds_zipccl.codec.dtypes import TABLE
from ds_zipccl.codec.format import SPILL_MASK, SPILL_SHIFT, TILE_ELEMS, layout
from ds_zipccl.collectives import symmetric
from ds_zipccl.collectives.symmetric import MAX_RANKS, RECEIVERS_PER_MULTIPROCESSOR, SymmetricTransport, why_not
from ds_zipccl.collectives.symmetric_plan import NUM_IN_RING, Row, in_turn, part_sizes, plan, slot_bytes, words_bytes
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.zipccl.symmetric_ranks import (
    CARRIED,
    FIRST,
    LARGEST,
    InTurn,
    Ranks,
    gaussians,
    random_bits,
    same_bits,
)

LANES = pytest.mark.parametrize("num_lanes", [1, 2, CARRIED + 1, CARRIED + 2],
                                ids=["1_lane", "2_lanes", "carried", "carried_2_lanes"])


def check_all(ranks: Ranks, n: int, dtype, makers, seed: int) -> None:
    """The three collectives; ``makers[r]`` makes rank r's data."""
    world = ranks.world_size
    pieces = [makers[r](seed + r, (n,), dtype) for r in range(world)]
    for rank, out in enumerate(ranks.all_gather(pieces)):
        for r in range(world):
            assert same_bits(out[r], pieces[r]), (rank, r)
    rows = [makers[r](seed + 50 + r, (world, n), dtype) for r in range(world)]
    for rank, out in enumerate(ranks.all_to_all(rows)):
        for r in range(world):
            assert same_bits(out[r], rows[r][rank]), (rank, r)
    for rank, out in enumerate(ranks.reduce_scatter(rows)):
        expected = torch.empty_like(out)
        sum_in_order([rows[r][rank] for r in range(world)], expected)
        assert same_bits(out, expected), rank
    assert not ranks.errors.any()


@LANES
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_results_are_exact(libraries, num_lanes, world_size):
    """Calls of many sizes over one ring, so that regions are used again and again at other offsets; data changes with every call. 7 tiles
    are 5 parts: more than are ever on their way."""
    ranks = Ranks(libraries, world_size, NUM_IN_RING * 12 * world_size * TILE_ELEMS, num_lanes)
    for i, n in enumerate((1, 1024, 40001, 7 * TILE_ELEMS + 77, 2)):
        check_all(ranks, n, torch.bfloat16, [gaussians] * world_size, 100 * i)
    message = ranks.engines[0].take(128)[0]
    assert message >= 2 * NUM_IN_RING and not ranks.overflows.any()


@LANES
@pytest.mark.parametrize("dtype", TABLE[1:], ids=lambda row: row.name)
def test_other_dtypes(libraries, num_lanes, dtype):
    ranks = Ranks(libraries, 2, NUM_IN_RING * 20 * TILE_ELEMS, num_lanes)
    check_all(ranks, 40001, dtype.torch_dtype, [gaussians] * 2, 7)


@LANES
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_overflows_comes_raw(libraries, num_lanes, world_size):
    """Of one rank, of all, and none again: without a word to any host; counted."""
    ranks = Ranks(libraries, world_size, NUM_IN_RING * 12 * world_size * TILE_ELEMS, num_lanes)
    for i, (makers, num) in enumerate((([random_bits] + [gaussians] * (world_size - 1), [1] + [0] * (world_size - 1)),
                                       ([random_bits] * world_size, [2] + [1] * (world_size - 1)),
                                       ([gaussians] * world_size, [2] + [1] * (world_size - 1)))):
        check_all(ranks, 5003, torch.bfloat16, makers, 1000 * i)
        assert ranks.overflows.sum(1).tolist() == [calls * 3 * (world_size - 1) for calls in num]


@LANES
def test_some_parts_overflow(libraries, num_lanes):
    """Of a call in parts: parts are told apart by the receiver alone."""
    ranks = Ranks(libraries, 2, NUM_IN_RING * 24 * TILE_ELEMS, num_lanes)

    def mixed(seed, shape, dtype):
        data = gaussians(seed, shape, dtype)
        data[..., 2 * TILE_ELEMS:3 * TILE_ELEMS] = random_bits(seed, (*shape[:-1], TILE_ELEMS), dtype)
        return data

    check_all(ranks, 5 * TILE_ELEMS + 9, torch.bfloat16, [mixed, gaussians], 3)


@LANES
def test_what_slots_do_not_hold_comes_too(libraries, num_lanes):
    """Escapes of a tile that are in its group's pool, at the frame's end."""
    ranks = Ranks(libraries, 2, NUM_IN_RING * 12 * TILE_ELEMS, num_lanes)

    def spilling(seed, shape, dtype):
        data = gaussians(seed, shape, dtype)
        data[..., :60] *= 2.0 ** torch.arange(-75, -15)
        return data

    check_all(ranks, 2 * TILE_ELEMS - 9, torch.bfloat16, [spilling] * 2, 3)
    pieces = [spilling(3 + r, (2 * TILE_ELEMS - 9,), torch.bfloat16) for r in range(2)]
    assert all(same_bits(out[r], pieces[r]) for out in ranks.all_gather(pieces) for r in range(2))
    assert int(ranks.status) >> SPILL_SHIFT & SPILL_MASK and not ranks.overflows.any()


@pytest.mark.parametrize("num_lanes", [1, CARRIED + 1, CARRIED + 2])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_little_memory(libraries, num_lanes, world_size):
    """Where regions are used again within a call, and messages have several parts each; of one rank some overflow."""
    ranks = Ranks(libraries, world_size, NUM_IN_RING * 7 * (1 if world_size == 2 else 3) * TILE_ELEMS, num_lanes)

    def mixed(seed, shape, dtype):
        data = gaussians(seed, shape, dtype)
        data[..., 3 * TILE_ELEMS:4 * TILE_ELEMS] = random_bits(seed, (*shape[:-1], TILE_ELEMS), dtype)
        return data

    check_all(ranks, 15 * TILE_ELEMS - 9, torch.bfloat16, [gaussians, mixed, gaussians][:world_size], 3)
    assert ranks.engines[0].take(128)[0] > 3 * 4           # several messages a call


def made_frames(ranks: Ranks, data: list[torch.Tensor], cut):
    """(what they are in, their addresses), of each rank's parts."""
    frames = [[torch.zeros(g.frame_bytes + 144, dtype=torch.uint8) for g in cut.geometries] for _ in data]
    made = [[-(-f.data_ptr() // 16) * 16 for f in mine] for mine in frames]
    for x, mine in zip(data, made, strict=True):
        for g, start, frame in zip(cut.geometries, cut.starts, mine, strict=True):
            ranks.codec.encode(g, x.data_ptr() + 2 * start, 0, frame, 0, 1, -1, ranks.status.data_ptr(), ranks.workspace.data_ptr(), 0)
    return frames, made


@pytest.mark.parametrize("num_lanes", [2, CARRIED + 1, CARRIED + 2])
@pytest.mark.parametrize("num_tiles", [1, 5])
def test_frames_made_beforehand(libraries, num_tiles, num_lanes):
    ranks, n = Ranks(libraries, 3, NUM_IN_RING * 24 * TILE_ELEMS, num_lanes), (num_tiles - 1) * TILE_ELEMS + 1011
    data = [gaussians(r, (n,), torch.bfloat16) for r in range(3)]
    cut = ranks.plan(torch.bfloat16, n, True)
    _keep, made = made_frames(ranks, data, cut)
    for _ in range(3):                                     # they are not used up
        for out in ranks.all_gather(data, made):
            assert all(same_bits(out[r], data[r]) for r in range(3))
    assert not ranks.errors.any()


KINDS = ("frame", "made on the way", "as it is")


@pytest.mark.parametrize("num_lanes", [1, 2, CARRIED + 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_with_and_without_frames(libraries, num_lanes, world_size, monkeypatch):
    """Many in a call, each somewhere else, with frames that exist, are made on the way, or are none; of one rank what has a frame does not
    compress. A lone one too."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    ranks = Ranks(libraries, world_size, NUM_IN_RING * 8 * world_size * TILE_ELEMS, num_lanes)
    transports = [SymmetricTransport(InTurn(), lambda stream, words: ranks.workspace.data_ptr(), r, torch.device("cpu"), world_size,
                                     ranks.room, ranks.overflows[r], None) for r in range(world_size)]
    cases = [(kind, n, makers) for n in (5003, 1, TILE_ELEMS + 77) for kind in KINDS for makers in (
        [gaussians] * world_size, [gaussians] * (world_size - 1) + [random_bits])] + [("as it is", 100_001, [random_bits] * world_size)]
    num_raw = 0
    for round_, chosen in enumerate((cases, cases[::-1], *([case] for case in cases[:6]))):
        data = [[makers[r](1000 * round_ + 10 * i + r, (n,), torch.bfloat16) for i, (_, n, makers) in enumerate(chosen)]
                for r in range(world_size)]
        outs = [[torch.full((world_size, n + 9), 3, dtype=torch.bfloat16)[:, 4:n + 4] for _, n, _ in chosen] for _ in data]
        for r, transport in enumerate(transports):
            transport.num_lanes, rows = num_lanes % CARRIED, []
            transport.carried_made_bytes = 1 << 30 if num_lanes > CARRIED else 0
            for (kind, n, _), x, out in zip(chosen, data[r], outs[r], strict=True):
                g = layout(TABLE[0], n, spill_per_tile=64)
                frame = None
                if kind == "frame":
                    frame = torch.zeros(g.frame_bytes + 16, dtype=torch.uint8)
                    frame = frame[-frame.data_ptr() % 16:]
                    ranks.codec.encode(g, x.data_ptr(), 0, frame.data_ptr(), 0, 1, -1, ranks.status.data_ptr(),
                                       ranks.workspace.data_ptr(), 0)
                rows.append(Row(x, out, g, frame, kind == "as it is"))
            arranged = transport.arrange(tuple(row.kind for row in rows)) if round_ % 2 else None
            assert transport.gather_rows(rows, arranged).sent_bytes == (world_size - 1) * sum(
                2 * row.data.numel() if row.as_it_is else row.geometry.frame_bytes for row in rows)
        ranks.run([transport.engine.calls[-1] for transport in transports])
        for r in range(world_size):
            for case, out, *everyones in zip(chosen, outs[r], *data, strict=True):
                assert all(same_bits(out[q], everyones[q]) for q in range(world_size)), (round_, case, r)
                assert bool((out.as_strided((world_size, out.stride(0)), out.stride(), out.storage_offset() - 4)[:, :4] == 3).all())
        num_raw += (world_size - 1) * sum(makers[-1] is random_bits and kind != "as it is" and n > 1 for kind, n, makers in chosen)
    assert ranks.overflows.sum(1).tolist() == [0] * (world_size - 1) + [num_raw] and not ranks.errors.any()
    assert transports[0].arrange(((layout(TABLE[0], 16 * TILE_ELEMS), False, False),)) is None


@pytest.mark.parametrize("num_lanes, num_tiles, num_queued",
                         [(2, 1, 22), (CARRIED + 2, 1, 11), (2, 7, 84), (CARRIED + 2, 7, 15)])
def test_calls_of_cuda_per_call(libraries, num_lanes, num_tiles, num_queued):
    """Of both ranks: the host's time is that of these, beside encode's launches. Where kernels carry, small parts are one message. Then
    a GPU needs one less each, for what sends and what receives is one kernel, and a rank one less where no row is at an odd address."""
    ranks = Ranks(libraries, 2, NUM_IN_RING * 40 * TILE_ELEMS, num_lanes)
    data, library = [gaussians(r, (num_tiles * TILE_ELEMS,), torch.bfloat16) for r in range(2)], ranks.calls.library
    library.zipccl_symmetric_num_queued.restype = ctypes.c_int64
    before = library.zipccl_symmetric_num_queued()
    ranks.all_gather(data)
    between = library.zipccl_symmetric_num_queued()
    assert between - before == num_queued
    _keep, made = made_frames(ranks, data, ranks.plan(torch.bfloat16, num_tiles * TILE_ELEMS, True))
    ranks.all_gather(data, made)
    num_fewer = 2 * (5 - 2) * 2 if num_tiles == 7 and num_lanes == 2 else 0            # lanes wait once, not for each part's encode
    assert library.zipccl_symmetric_num_queued() - between == num_queued - num_fewer


def test_receivers_of_all_groups_leave_room(monkeypatch):
    """Those of a device share it, as long as they are about; the number is each rank's own."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    opened = [SymmetricTransport(InTurn(), lambda stream, words: 0, 0, torch.device("cpu"), 2, 1 << 24, torch.zeros(1), None)
              for _ in range(3)]

    def num_receivers():
        for transport in opened:
            transport.num_receivers = 100
            transport.all_gather(torch.zeros(2000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.bfloat16))
        return [transport.engine.calls[-1].num_receivers for transport in opened]

    before = len(opened[0]._open_here) - 3                  # other tests'
    assert num_receivers() == [100 // (3 + before)] * 3
    opened.pop()._end()
    assert num_receivers() == [100 // (2 + before)] * 2 and before >= 0


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("is_sum, num_ranks, num_fitting", [(0, 2, 8), (0, 8, 8), (1, 2, 8), (1, 3, 5)])
def test_receivers_take_half_of_a_multiprocessor_at_most(libraries, item, is_sum, num_ranks, num_fitting):
    """Of 2-byte elements so many of a kernel fit on one, of larger ones fewer (their launch bounds)."""
    num_fitting = num_fitting * 2 // item
    for num_multiprocessors in (1, 7, 132):
        wanted = RECEIVERS_PER_MULTIPROCESSOR * num_multiprocessors
        num = libraries[1].library.zipccl_symmetric_num_receivers(*map(ctypes.c_int64, (wanted, item, is_sum, num_ranks)))
        assert 0 < 2 * num <= num_fitting * num_multiprocessors
        assert num_fitting < 8 or num == wanted
        none = libraries[1].library.zipccl_symmetric_num_receivers(*map(ctypes.c_int64, (0, item, is_sum, num_ranks)))
        assert none == 0, "what only sends"


@pytest.mark.parametrize("shared_kib, per_multiprocessor", [(228, 4), (164, 4), (100, 2), (30, 1)])
def test_receivers_take_half_of_the_shared_memory_at_most(monkeypatch, shared_kib, per_multiprocessor):
    gpu = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=shared_kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert symmetric._receivers_of(torch.device("cuda", 0)) == per_multiprocessor * 132


def test_rows_are_in_turn_smallest_at_the_ends():
    assert in_turn([5, 1, 4, 2, 3]) == [1, 4, 0, 2, 3] and in_turn([7]) == [0]
    for sizes in ([3] * 6, [9, 1], list(range(11))):
        assert sorted(in_turn(sizes)) == list(range(len(sizes)))


def test_calls_on_two_streams_claim_regions_each(libraries):
    """A region that one stream waited for is not free for another one: before a call each stream has waited for what its region needs."""
    ranks = Ranks(libraries, 2, NUM_IN_RING * 4 * TILE_ELEMS, 1)
    twin = ranks.calls.open(0, [0, 0], ranks.words_bytes + ranks.room, 0, 0, 0, 0, ranks.codec.library.zipccl_cuda_encode)
    x, needed = [gaussians(r, (3000,), torch.bfloat16) for r in range(2)], 0
    g = layout(TABLE[0], 3000)
    for call in range(300):
        ranks.stream = call % 2 + 1
        ranks.all_gather(x)
        needed = max(needed, twin.take(slot_bytes(g) + -(-g.frame_bytes // 128) * 128)[2])
        assert needed <= ranks.engines[0].claimed(ranks.stream) <= call
    assert needed > 50


@LANES
def test_a_peer_that_does_not_send_is_reported(libraries, num_lanes):
    """The wait ends, and says so: on a GPU it traps."""
    ranks = Ranks(libraries, 2, NUM_IN_RING * 12 * TILE_ELEMS, num_lanes)
    x, out = gaussians(1, (100,), torch.bfloat16), torch.zeros(2, 100, dtype=torch.bfloat16)
    ranks.engines[0].run(ranks.exchange(ranks.plan(torch.bfloat16, 100, True), x.data_ptr(), 0, out.data_ptr(), 200))
    assert int(ranks.errors[0]) & 32


@pytest.mark.parametrize("number", [(1 << 31) + 5, (1 << 32) - 1])
@pytest.mark.parametrize("num_before", [0, 3])
def test_numbers_of_messages_do_not_begin_again(libraries, num_before, number):
    """A lane may be unused for as long as a job lasts: nothing that was there before is taken for what is awaited."""
    ranks, x = Ranks(libraries, 2, NUM_IN_RING * 12 * TILE_ELEMS, 1), [gaussians(r, (100,), torch.bfloat16) for r in range(2)]
    for engine in ranks.engines:
        words = (ctypes.c_int64 * 500).from_address(engine._handle.value)
        at = next(i for i in range(497) if words[i:i + 2] == [ranks.words_bytes, ranks.room])
        words[at + 3] = number                             # of the last message (ring.h)
    for _ in range(num_before):
        assert all(same_bits(out[r], x[r]) for out in ranks.all_gather(x) for r in range(2)) and not ranks.errors.any()
    out = torch.zeros(2, 100, dtype=torch.bfloat16)
    ranks.engines[0].run(ranks.exchange(ranks.plan(torch.bfloat16, 100, True), x[0].data_ptr(), 0, out.data_ptr(), 200))
    assert int(ranks.errors[0]) & 32, "rank 1 has not sent"


@pytest.mark.parametrize("sizes", [(128, 256, 128), (1000, 128, 128, 700), (300,)])
def test_ring_names_the_last_message_that_had_the_region(libraries, sizes):
    calls, taken, claimed = libraries[1], {}, 0
    first, room = words_bytes(2), 2048
    engine = calls.open(0, [0, 0], first + room + 100, 0, 0, 0, 0, libraries[0].library.zipccl_cuda_encode)
    for i, size in zip(range(200), itertools.cycle(sizes), strict=False):
        message, offset, before = engine.take(size)
        assert message == i + 1 and offset % 128 == 0 and first <= offset and offset + size <= first + room
        claimed = max(claimed, before)                     # by this message or an earlier one
        overlapping = [m for m, (low, high) in taken.items() if low < offset + size and offset < high and m > claimed]
        assert not overlapping, "a region is given away while an older message, not named, has it"
        taken[message] = offset, offset + size
        assert before < message
    assert claimed > 150


def record(host="a", uuid="0", seen=()) -> dict:
    return {"host": host, "uuid": uuid, "peers": dict(seen)}


def test_who_can_use_it():
    """The same answer on every rank, from all ranks' records."""
    both = [record(uuid="0", seen=[("1", True)]), record(uuid="1", seen=[("0", True)])]
    assert why_not(both) is None
    assert why_not([both[0], record("b", "1", [("0", True)])]) == "hosts"
    assert why_not([both[0], record(uuid="1", seen=[("0", False)])]) == "no_peer_access"
    assert why_not([both[0], record(uuid="1")]) == "no_peer_access"                   # CUDA_VISIBLE_DEVICES hides the other one
    assert why_not([record(uuid="0"), record(uuid="0")]) == "same_gpu"
    assert why_not([{}, {"error": "no nvcc"}]) == "not_built" and why_not([{}, {}]) is None
    assert why_not([{"no_memory": "out of memory"}, {}]) == "no_memory" and why_not([{"not_opened": "EPERM"}, {}]) == "not_opened"


def test_how_many_ranks_have_room(libraries):
    assert libraries[1].max_ranks == MAX_RANKS
    assert all(libraries[1].words_bytes(n) == words_bytes(n) and words_bytes(n) % 128 == 0 for n in (2, 3, MAX_RANKS))


def test_parts_cover_rows_with_whole_tiles():
    for num_tiles in range(1, 200):
        for first, largest in ((1, 1), (1, 2), (2, 16), (8, 8)):
            sizes = part_sizes(num_tiles, first, largest)
            assert sum(sizes) == num_tiles and min(sizes) > 0 and max(sizes) <= largest
    assert part_sizes(128, 8, 64) == [8, 16, 80 // 2, 80 // 2, 16, 8] and part_sizes(16, 8, 64) == [16]
    for n in (1, TILE_ELEMS, 10 * TILE_ELEMS + 3):
        for same in (False, True):
            cut = plan(torch.bfloat16, n, 3, same, 64, 1 << 24, FIRST, LARGEST)
            assert all(start % TILE_ELEMS == 0 for start in cut.starts) and sum(g.numel for g in cut.geometries) == n
            assert all(NUM_IN_RING * (p.num_slots * p.slot_bytes + p.num_frames * p.frame_stride) <= 1 << 24 for p in cut.parts)
    assert plan(torch.bfloat16, TILE_ELEMS, 2, False, 64, 1 << 17) is None
    for numel in (1, 1000, TILE_ELEMS + 1):
        g = layout(TABLE[0], numel)
        assert slot_bytes(g) >= max(g.frame_bytes, 128 + -(-numel // 1024) * 2048)
