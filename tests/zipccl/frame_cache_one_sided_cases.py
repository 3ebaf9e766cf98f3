"""Cases run on every rank by test_frame_cache.py: kept frames over symmetric memory; without GPUs over a stand-in (one_sided_stand_in.py),
whose gathers notice what is written before somebody has waited for them."""
import functools
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ds_zipccl.collectives import frame_cache, one_sided
from ds_zipccl.collectives.cost import Curve
from ds_zipccl.collectives.symmetric_plan import words_bytes
from tests.helpers.bits import assert_same_bits
from tests.helpers.ranks import needs_a_gpu_each, needs_stand_ins
from tests.zipccl import frame_cache_cases
from tests.zipccl.frame_cache_cases import NUMEL, World, data_of, device
from tests.zipccl.one_sided_stand_in import LARGE, MIDDLE, ONE_SIDED, SLOW, SMALL, measured_at_three_sizes, stand_ins

AG = "all_gather_into_tensor"


def one_sided_only(case):
    """The case where every gather goes one-sided."""

    @needs_a_gpu_each
    @functools.wraps(case)
    def run(rank, world_size):
        frame_cache_cases.SETTINGS = {"transport": "symmetric_memory"}
        try:
            with stand_ins() as opened:
                case(rank, world_size)
                assert ONE_SIDED or sum(stand_in.num_gathers for stand_in in opened) > 0
        finally:
            frame_cache_cases.SETTINGS = {}

    return run


case_one_encode_for_many_gathers = one_sided_only(frame_cache_cases.case_one_encode_for_many_gathers)
case_overflow_on_one_rank = one_sided_only(frame_cache_cases.case_overflow_on_one_rank)
case_no_memory_on_one_rank = one_sided_only(frame_cache_cases.case_no_memory_on_one_rank)
case_slots_out_of_use_lose_their_frames = one_sided_only(frame_cache_cases.case_slots_out_of_use_lose_their_frames)
case_announced_writes_of_one_rank = one_sided_only(frame_cache_cases.case_announced_writes_of_one_rank)
case_unannounced_writes_of_one_rank = one_sided_only(frame_cache_cases.case_unannounced_writes_of_one_rank)
case_unannounced_writes_found_later = one_sided_only(frame_cache_cases.case_unannounced_writes_found_later)


@needs_stand_ins
@one_sided_only
def case_each_stream_waits_once_for_a_write(rank, world_size):
    """A stream that has waited for the last write, or made it, need not again; encode waits for what compared frames, and for the last
    gather. Streams are what ``Mark`` makes of them."""
    now, log = [1], []

    class Mark:
        def __init__(self, device):
            self.stream = None

        def set(self):
            self.stream = now[0]
            log.append((self, "set", now[0]))

        def join(self):
            if self.stream not in (None, now[0]):
                log.append((self, "join", now[0]))

    kept, frame_cache.streams = frame_cache.streams, SimpleNamespace(Mark=Mark, current=lambda device: now[0])
    try:
        world = World(world_size)
        written, read = world.cache._written, world.cache.read

        def waits(mark):
            found = [stream for m, what, stream in log if m is mark and what == "join"]
            log.clear()
            return found

        world.gather()
        world.gather()
        assert waits(written) == []                         # the stream that writes
        for stream in (2, 2, 3, 2, 3, 1):
            now[0] = stream
            world.gather()
        assert waits(written) == [2, 3]
        world.cache.changed_here(world.cache.slots[:1])
        now[0] = 3
        world.gather()                                      # encodes there
        world.gather()
        assert waits(written) == [3]
        now[0] = 2
        world.gather()
        assert waits(written) == [2]
        world.forward, world.cache.comparisons.on_host = world.forward + 1, False             # compares, as on a GPU
        world.gather()
        now[0] = 1
        world.cache.changed_here(world.cache.slots[:1])
        world.gather()
        assert waits(read) == [1]
        world.close()
    finally:
        frame_cache.streams = kept


@one_sided_only
def case_layouts_that_change_are_sent_as_they_are_then(rank, world_size):
    """What is known of slots that are gathered together is that of their present layouts."""
    world = World(world_size)
    world.gather()
    before = world.cache._ways.rows(world.cache.slots)[0]
    for seed, spread in ((40, 2.0), (41, 0.0), (42, 9.0), (43, 0.0)):
        world.write(1, lambda r, seed=seed, spread=spread: data_of(r, seed=seed, spread=spread))
        world.cache.changed([world.cache.slots[1]])
        world.gather()
        world.gather()
        assert world.cache._ways.rows(world.cache.slots)[0] == [slot.kind() for slot in world.cache.slots]
        if spread == 9.0:
            assert world.cache._ways.rows(world.cache.slots)[0][1] != before[1]
    world.close()


@one_sided_only
def case_a_write_of_one_rank_that_does_not_fit_is_no_error(rank, world_size):
    """Its data travel, in this gather and in later ones, and fit again one day."""
    world = World(world_size)
    world.gather()
    for seed, spread in ((30, 9.0), (31, 9.0), (32, 0.0)):
        world.write(1, lambda r, seed=seed, spread=spread: data_of(r, seed=seed, spread=spread), on=0)
        if rank == 0:
            world.cache.changed_here([world.cache.slots[1]])
        for _ in range(2):
            world.forward += 1
            world.gather()
    assert world.stats.repairs == (5 if rank == 0 else 0) and world.stats.one_sided == world.stats.gathers == 7, world.stats
    world.close()


@one_sided_only
def case_many_shapes(rank, world_size):
    """Frames, small shards without, and one that there is no memory for, in one gather; counted."""
    numels = (40_000, 33, 70_001, 1, 40_000)
    world = World(world_size, numels)
    world.stats.max_bytes = 180_000                 # the last one's frame is beyond
    for step in range(3):
        for i, n in enumerate(numels):
            world.write(i, lambda r, i=i, n=n, step=step: data_of(r, n, 10 * step + i))
        world.cache.changed(world.cache.slots)
        world.gather()
        world.cache.refresh()
    assert [slot.reason for slot in world.cache.slots] == [None, "no_gain", None, "no_gain", "max_cache_bytes"]
    stats, row = world.stats, world.runtime.stats.snapshot()[AG]
    assert (stats.gathers, stats.one_sided, stats.shards) == (3, 3, 6), stats
    assert row["calls_one_sided"] == row["calls_zipped"] == 3 and row["wire_bytes"] == stats.wire_bytes
    sent = sum(2 * s.numel if s.reason == "no_gain" else s.frame_bytes() for s in world.cache.slots)
    assert stats.wire_bytes == 3 * (world_size - 1) * sent
    world.close()


@one_sided_only
def case_frames_are_made_anew_behind_what_sends_them(rank, world_size):
    """Shards come to lie elsewhere, with other data, while a gather is in flight: frames are written again by a refresh, or by one rank's
    repair, only behind it."""
    world = World(world_size)
    world.gather()
    for turn in range(6):
        outs, expected = world.outs(), [e.clone() for e in world.expected]
        gather = world.cache.gather(world.cache.slots, lambda outs=outs: outs)
        for i, slot in enumerate(world.cache.slots):
            on = None if turn % 2 else 0
            world.shards[i] = world.shards[i].clone()
            world.write(i, lambda r, i=i, turn=turn: data_of(r, seed=100 + 10 * turn + i), on=on)
            slot.source = lambda shard=world.shards[i]: shard
        if turn % 2:
            world.cache.changed(world.cache.slots)
            world.cache.refresh()
        elif rank == 0:
            world.cache.changed_here(world.cache.slots)
        world.gather()
        gather.wait()
        for out, whole in zip(outs, expected, strict=True):
            assert_same_bits(out, whole, turn)
    world.close()


@one_sided_only
def case_dropped_handles_and_the_end(rank, world_size):
    """Nobody waits for some gathers, and the caches end, and give their memory back, while they are in flight."""
    world = World(world_size)
    for _ in range(5):
        world.gather()
        world.cache.gather(world.cache.slots, world.outs)
        world.cache.gather(world.cache.slots[:1], lambda: world.outs()[:1])
    last, outs = None, world.outs()
    last = world.cache.gather(world.cache.slots, lambda: outs)
    world.cache.free()
    world.close()
    last.wait()
    for out, whole in zip(outs, world.expected, strict=True):
        assert_same_bits(out, whole, "ended")


@one_sided_only
def case_frames_are_of_level_1(rank, world_size):
    world = World(world_size, level=2)
    world.gather()
    assert {slot.codec.geometry.level for slot in world.cache.slots} == {1}
    world.close()


def known_of(world, num_gathers: int = 1) -> int:
    """How many of so many gathers were launched like an earlier one."""
    before = world.num_known
    for _ in range(num_gathers):
        world.gather()
    return world.num_known - before


@one_sided_only
def case_gathers_like_an_earlier_one(rank, world_size):
    """... are launched by one call of C, until a frame, its place, or what it is made of is not what it was: on this rank, or on all."""
    numels = (5000, 33, 70_001)
    world = World(world_size, numels)
    assert known_of(world, 5) == 3
    known = world.cache.known(world.cache.slots)

    def write(seed, on=None, spread=0.0):
        for i, n in enumerate(numels):
            world.write(i, lambda r, i=i, n=n: data_of(r, n, seed + i, spread if i == 2 else 0.0), on=on)

    write(100)
    world.cache.changed(world.cache.slots)
    world.cache.refresh()
    assert known_of(world, 3) == 3 and world.cache.known(world.cache.slots) is known           # the first reads the ranks' words
    write(200, on=1)
    if rank == 1:
        world.cache.changed_here(world.cache.slots)
    assert known_of(world) == (rank != 1) and known_of(world, 2) == 2 and world.stats.unknown_writes == 0
    world.forward += 1
    # A GPU compares all at once.
    assert known_of(world) == ONE_SIDED and known_of(world, 2) == 2 and world.cache.known(world.cache.slots) is known
    if not ONE_SIDED:
        write(300, on=0)
        world.forward += rank == 0
        assert known_of(world) == (rank != 0) and world.stats.unknown_writes == 2 * (rank == 0)        # a writer nobody knows
        if rank == 0:
            world.shards[0].data = world.shards[0].clone()          # reload_states moves shards so
            world.cache.changed_here(world.cache.slots[:1])
        assert known_of(world) == (rank != 0) and known_of(world, 2) == 2         # rows are elsewhere, and were described anew
        if rank == 0:
            before = world.shards[0].data
            world.shards[0].data = before.clone()                   # ... and nobody says so
            before.zero_()
        assert known_of(world) == (rank != 0) and known_of(world) == 1
    world.cache.free()
    assert known_of(world, 3) == 1
    write(400, spread=2.0)
    world.cache.changed(world.cache.slots)
    assert known_of(world, 4) == 2                                  # other layouts
    if not ONE_SIDED:
        world.write(2, lambda r: data_of(r, numels[2], 500), on=0)
        if rank == 0:
            world.shards[2].add_(0)                                 # seen at once, by its version
        assert known_of(world) == (rank != 0) and known_of(world) == 1
    row, stats = world.runtime.stats.snapshot()[AG], world.stats
    assert row["calls_one_sided"] == row["calls_zipped"] == stats.gathers == stats.one_sided and row["wire_bytes"] == stats.wire_bytes
    assert stats.shards == 2 * stats.gathers and stats.bypassed == {"no_gain": stats.gathers} and row["raw_bytes"] == stats.raw_bytes
    if not ONE_SIDED:
        world.cache._ways.transport.is_open = False
        assert world.cache.known(world.cache.slots).launch(world.outs) is None
    world.close()
    assert known._rows is None and not known._places                # holds no memory


@one_sided_only
def case_what_a_known_gather_takes_is_in_use(rank, world_size):
    """Frames that nothing else has sent since they were made are made again, and not given up."""
    world = World(world_size)
    for step in range(6):
        for i in range(2):
            world.write(i, lambda r, i=i, step=step: data_of(r, seed=10 * step + i))
        world.cache.changed(world.cache.slots)
        world.cache.refresh()
        assert known_of(world) == (step > 1) and all(slot.reason is None for slot in world.cache.slots), step
    assert world.stats.encodes == 12 and world.stats.bypassed == {}
    world.close()


@one_sided_only
def case_copies_are_not_known(rank, world_size):
    """A shard that has to be copied first: nobody may send the last copy again."""
    world = World(world_size, (NUMEL,))
    for slot in world.cache.slots:
        slot.source = lambda shard=world.shards[0]: shard.clone().requires_grad_()
    assert known_of(world, 3) == 0
    world.close()


def case_why_not(rank, world_size):
    """Over the process group, counted, with frames all the same."""
    frame_cache_cases.SETTINGS = {"transport": "symmetric_memory"}
    try:
        if not ONE_SIDED:
            with stand_ins(why_not="hosts"):
                world = World(world_size, level=2)
                world.gather()
                world.gather()
                row = world.runtime.stats.snapshot()[AG]
                assert row["not_one_sided"] == {"hosts": 2} and row["calls_zipped"] == 2 and row["calls_one_sided"] == 0, row
                assert {slot.codec.geometry.level for slot in world.cache.slots} == {2}
                world.close()
            with stand_ins() as opened:
                world = World(world_size)
                world.gather()
                opened[0].room = 2 * frame_cache_cases.NUMEL - 1
                world.cache._ways.forget()                      # a real one's room stays as it is
                world.gather()
                row = world.runtime.stats.snapshot()[AG]
                assert (row["not_one_sided"], row["calls_one_sided"], row["calls_zipped"]) == ({"small_memory": 1}, 1, 2), row
                world.close()
        with stand_ins() as opened:
            world = World(world_size, integrity="checksum")
            world.gather()
            assert world.runtime.stats.snapshot()[AG]["not_one_sided"] == {"integrity": 1} and not opened
            world.close()
    finally:
        frame_cache_cases.SETTINGS = {}


def ways(world, num_gathers: int) -> list[str]:
    """Of gathers, one after another; the same on every rank."""
    taken = []
    for _ in range(num_gathers):
        before = world.stats.one_sided
        gather = world.gather()
        taken.append("native" if gather is None else "one-sided" if world.stats.one_sided > before else "zipped")
    everyones = [None] * world.world_size
    dist.all_gather_object(everyones, taken)
    assert all(other == taken for other in everyones), everyones
    return taken


def each_in_turn(size, _):
    return {SMALL: (100, 200, 300), MIDDLE: (300, 200, 250), LARGE: (1200, 800, 400)}[size]


@needs_a_gpu_each
def case_the_switch_picks_each_of_three_ways(rank, world_size):
    """By size; slots of level 2 only become one-sided ones when they are encoded again. What comes again is known from the third gather
    on; over the group where C can launch the kernels."""
    settings = {"collectives": "adaptive", "transport": "adaptive", "level": 2}
    with measured_at_three_sizes(each_in_turn), stand_ins() as opened:
        for whole, way in ((SMALL, "native"), (MIDDLE, "zipped"), (LARGE, "one-sided")):
            world = World(world_size, (whole // 2 // world_size,), **settings)
            seen, is_known = (ways(world, 4), world.num_known), way == "one-sided" or way == "zipped" and world.cache._launcher is not None
            assert seen == ([way] * 4, 2 * is_known), (whole, seen)
            costs = world.runtime.state(dist.group.WORLD, device()).measured("cached_all_gather", torch.bfloat16).costs
            assert costs.one_sided is not None
            assert world.cache.slots[0].codec is None or world.cache.slots[0].codec.geometry.level == 1
            world.close()
        assert ONE_SIDED or len(opened) == 3 and not any(stand_in.is_open for stand_in in opened)


@needs_a_gpu_each
def case_measured_again(rank, world_size):
    """The way changes for all ranks at once, the memory goes, and comes back; level 2 frames stay with the process group until then."""
    def times(size, num_measured):
        return [(100, 50, SLOW), (100, SLOW, 50), (100, 50, SLOW)][num_measured]

    settings = {"collectives": "adaptive", "transport": "adaptive", "level": 2, "reprobe_calls": 6}
    with measured_at_three_sizes(times), stand_ins():
        world = World(world_size, (LARGE // 2 // world_size,), **settings)
        slot = world.cache.slots[0]
        assert ways(world, 2) == ["zipped"] * 2 and slot.codec.geometry.level == 2         # the first asks twice
        assert world.runtime.stats.sections["one_sided"]()[1] == {"num_groups": 0}
        assert ways(world, 2) == ["zipped"] * 2
        assert ways(world, 1) == ["native"] and slot.codec.geometry.level == 2                     # one-sided, if it were of level 1
        world.cache.changed(world.cache.slots)
        world.cache.refresh()
        assert ways(world, 1) == ["one-sided"] and slot.codec.geometry.level == 1
        assert world.runtime.stats.sections["one_sided"]()[1] == {"num_groups": 1}
        world.close()


@needs_stand_ins
def case_wrong_results_rule_it_out(rank, world_size):
    def spoil(out):
        if rank == 1:
            out[-1].view(torch.int16)[out.shape[1] // 3] ^= 1

    with measured_at_three_sizes(lambda size, _: (100, 90, 10)), stand_ins(spoil=spoil):
        world = World(world_size, (LARGE // 2 // world_size,), collectives="adaptive", transport="adaptive")
        assert ways(world, 2) == ["zipped"] * 2
        world.close()


@needs_a_gpu_each
def case_what_must_be_zipped_goes_the_faster_way(rank, world_size):
    with measured_at_three_sizes(lambda size, _: (1, 90, 10)), stand_ins():
        world = World(world_size, (LARGE // 2 // world_size,), transport="adaptive")
        assert ways(world, 2) == ["one-sided"] * 2
        costs = world.runtime.state(dist.group.WORLD, device()).measured("cached_all_gather", torch.bfloat16)
        costs.costs = replace(costs.costs, zipped=Curve((SMALL, LARGE), (1.0, 1.0)))
        assert ways(world, 1) == ["zipped"]
        world.close()


def case_large_shards_are_cut(rank, world_size):
    """Into ranges that fit, each with a frame."""
    kept = one_sided.memory_bytes
    one_sided.memory_bytes = lambda config: words_bytes(world_size) + 8 * ((world_size if world_size > 2 else 1) * 132_000 + 100_000)
    try:
        for transport, num_ranges in (("process_group", 1), ("symmetric_memory", 4)):
            world = World(world_size, (1,), transport=transport)
            found = one_sided.ranges_of_row(world.runtime.config, torch.bfloat16, 7 * 32768 + 5, world_size)
            assert len(found) == num_ranges and found[0][0] == 0 and found[-1][1] == 7 * 32768 + 5, found
            assert all(a[1] == b[0] and b[0] % 32768 == 0 for a, b in zip(found, found[1:], strict=False))
            world.close()
    finally:
        one_sided.memory_bytes = kept
