"""Cases run on every rank by test_collectives.py: ``transport: symmetric_memory``. One-sided on GPUs of one host; on CPUs the same calls go
over the process group, counted with the reason. ``transport: adaptive``: with times that are made up; without GPUs over a stand-in."""
import random

import torch
import torch.distributed as dist

from ds_zipccl.collectives import switch
from ds_zipccl.collectives.registry import Call
from tests.helpers.bits import assert_same_bits, gaussian, random_bits
from tests.helpers.ranks import needs_a_gpu_each, needs_stand_ins
from tests.zipccl.collective_helpers import A2A, AG, RS, begin, gathered, rank_order_sum
from tests.zipccl.collective_helpers import runtime as plain_runtime
from tests.zipccl.collective_repeat_cases import forget_something, repeats_as_on_a_gpu
from tests.zipccl.one_sided_stand_in import LARGE, MIDDLE, ONE_SIDED, SLOW, SMALL, adaptive, stand_ins

BF16 = torch.bfloat16


def runtime(**settings):
    return plain_runtime(**{"split_lists": "all_or_none", **settings})


def exchange(op, rank, world, row, seed, make=gaussian, reduce_op=None):
    """(a call with new tensors, what its output must become)."""
    data = make(row if op == AG else world * row, seed=seed + rank)
    data = torch.where(data.isfinite(), data, torch.ones_like(data))
    if op == AG:
        return Call(op, torch.empty(world * row, dtype=BF16), data, dist.group.WORLD), gathered(data, world)
    if op == A2A:
        return Call(op, torch.empty_like(data), data, dist.group.WORLD), gathered(data, world).view(world, world, row)[:, rank].reshape(-1)
    summed = rank_order_sum(data / world if reduce_op else data, rank, world)
    return Call(op, torch.empty(row, dtype=BF16), data, dist.group.WORLD, reduce_op), summed


def check_counts(live, op, num_calls, why="device"):
    seen = live.stats.snapshot()[op]
    assert seen["calls_one_sided"] == (num_calls if ONE_SIDED else 0), seen
    assert seen["not_one_sided"] == ({} if ONE_SIDED else {why: num_calls}), seen
    assert seen["calls_zipped"] == num_calls


@needs_a_gpu_each
def case_calls_of_many_sizes(rank, world):
    with runtime(transport="symmetric_memory") as live:
        for op in (AG, RS, A2A):
            for i, row in enumerate((3001, 33000, 1_000_003)):
                call, result = exchange(op, rank, world, row, 100 * i)
                work, ours = begin(live, call)
                assert ours, (op, row, live.stats.snapshot())
                work.wait()
                assert_same_bits(call.output, result, (op, row))
            check_counts(live, op, 3)


@needs_a_gpu_each
def case_data_that_does_not_compress(rank, world):
    """Of one rank alone: its frames overflow."""
    with runtime(transport="symmetric_memory") as live:
        for op in (AG, RS, A2A):
            call, result = exchange(op, rank, world, 70_001, 5, random_bits if rank == 1 else gaussian)
            begin(live, call)[0].wait()
            assert_same_bits(call.output, result, op)
        if ONE_SIDED:
            torch.cuda.synchronize()
            counters, gauges = live.stats.sections["one_sided"]()
            assert counters == {"overflows": 3 * (world - 1) if rank == 1 else 0} and gauges == {"num_groups": 1}


def case_many_in_flight(rank, world):
    """Waited for in another order than launched, one never; their tensors are dropped meanwhile."""
    with runtime(transport="symmetric_memory") as live:
        pairs = [exchange((AG, RS, A2A)[i % 3], rank, world, 5000 + 3000 * i, 10 * i) for i in range(12)]
        flying = [(begin(live, call)[0], call.output, result) for call, result in pairs]
        del pairs
        for i in (5, 0, 11, 1, 10, 2, 9, 3, 8, 4, 7):
            flying[i][0].wait()
            assert_same_bits(flying[i][1], flying[i][2], i)


@needs_a_gpu_each
def case_averages(rank, world):
    with runtime(transport="symmetric_memory") as live:
        call, result = exchange(RS, rank, world, 40_000, 3, reduce_op=dist.ReduceOp.AVG)
        begin(live, call)[0].wait()
        if world == 2:                          # halves are exact; other averages are rounded once, as collective_form_cases has it
            assert_same_bits(call.output, result, "average")
            check_counts(live, RS, 1)


def case_what_goes_over_the_process_group(rank, world):
    with runtime(transport="symmetric_memory") as live:
        data, rows = gaussian(4000, seed=rank), [torch.empty(4000, dtype=BF16) for _ in range(world)]
        begin(live, Call("all_gather", tuple(rows), data, dist.group.WORLD))[0].wait()
        assert_same_bits(torch.cat(rows), gathered(data, world), "list")
        assert live.stats.snapshot()["all_gather"]["not_one_sided"] == {"collective": 1}
        data = gaussian(world * 4000, seed=rank)
        splits = (4000,) * world
        call = Call(A2A, torch.empty_like(data), data, dist.group.WORLD, input_splits=splits, output_splits=splits)
        begin(live, call)[0].wait()
        assert live.stats.snapshot()[A2A]["not_one_sided"] == {"splits" if ONE_SIDED else "device": 1}


def case_the_runtime_asks_once_what_is_eligible(rank, world):
    """Calls of a kind that went one-sided before are not looked at again; the group's end is the transport's."""
    asked, taken = [], []
    with runtime(transport="symmetric_memory") as live:
        router = live._one_sided
        router.run = lambda spec, call, state: (taken.append(call.op), spec.native(call))[1]
        router.close = lambda state: taken.append("closed")
        router.known = lambda call, state: None             # else a GPU makes the later ones by one call of C, past this router
        for i in range(3):
            call, result = exchange(AG, rank, world, 50_000, 7 * i)
            work = live.run(call, lambda: asked.append(1))
            work.wait()
            assert_same_bits(call.output, result, i)
        seen = len(asked), list(taken), live.stats.snapshot()
        assert seen == (1, [AG] * 3, {}), seen
    assert taken[3:] == ["closed"]


def case_a_group_after_another(rank, world):
    """Each with its own memory; the first one's is given back."""
    for turn in range(2):
        group = dist.new_group(list(range(world)))
        with runtime(transport="symmetric_memory") as live:
            data, out = gaussian(60_000, seed=10 * turn + rank), torch.empty(world * 60_000, dtype=BF16)
            begin(live, Call(AG, out, data, group))[0].wait()
            assert_same_bits(out, gathered(data, world), turn)
            live.close(group)
        dist.destroy_process_group(group)


def ways_taken(live, op, rank, world, sizes, seed=0) -> list[str]:
    """Of calls of so many bytes, one after another; the results must be right."""
    ways = []
    for i, size in enumerate(sizes):
        before = live.stats.snapshot().get(op, {"calls_zipped": 0, "calls_one_sided": 0})
        call, result = exchange(op, rank, world, size // 2 // world, seed + 100 * i)
        begin(live, call)[0].wait()
        if op != RS or world == 2 or live.stats.snapshot()[op]["calls_zipped"] > before["calls_zipped"]:
            assert_same_bits(call.output, result, (op, size))           # native sums are in an order of their own
        after = live.stats.snapshot()[op]
        ways.append("one-sided" if after["calls_one_sided"] > before["calls_one_sided"] else
                    "zipped" if after["calls_zipped"] > before["calls_zipped"] else "native")
    everyones = [None] * world
    dist.all_gather_object(everyones, ways)
    assert all(other == ways for other in everyones), everyones
    return ways


def each_in_turn(size, _):
    return {SMALL: (100, 200, 300), MIDDLE: (300, 200, 250), LARGE: (1200, 800, 400)}[size]


@needs_a_gpu_each
def case_the_switch_picks_each_of_three_ways(rank, world):
    with adaptive(each_in_turn) as live:
        for op in (AG, RS, A2A):
            ways_taken(live, op, rank, world, [SMALL] * 2 * (op == A2A))            # the first asks who could zip, the second measures
            assert ways_taken(live, op, rank, world, [SMALL, MIDDLE, LARGE] * 2) == ["native", "zipped", "one-sided"] * 2, op
            name = "pair" if op == A2A else op
            report = live._switch_report()[1][dist.group.WORLD.group_name]
            assert report[f"{name} bfloat16"] == MIDDLE and MIDDLE < report[f"{name} bfloat16 one-sided"] <= LARGE, report
        assert live.stats.sections["one_sided"]()[1] == {"num_groups": 1}
        assert ONE_SIDED or len(live.opened) == 1, "one transport for all collectives"
        rows = live.stats.snapshot()
        assert [(rows[op]["calls_one_sided"], rows[op]["not_one_sided"]) for op in (AG, RS, A2A)] == [(2, {})] * 3


@needs_a_gpu_each
def case_without_a_gain_no_memory_is_kept(rank, world):
    """And a call costs what it costs where there is no such transport."""
    with adaptive(lambda size, _: (100, 90, 89)) as live:
        assert ways_taken(live, AG, rank, world, [SMALL, LARGE, SMALL]) == ["zipped"] * 3
        assert live.stats.sections["one_sided"]()[1] == {"num_groups": 0}
        assert live.state(dist.group.WORLD, torch.get_default_device()).measured(AG, BF16).costs.one_sided is None
        assert ONE_SIDED or [stand_in.is_open for stand_in in live.opened] == [False]
        assert not any("one-sided" in name for name in live._switch_report()[1][dist.group.WORLD.group_name])


@needs_a_gpu_each
def case_measuring_again_changes_the_way(rank, world):
    """All ranks at the same call; the memory goes when the last collective has no use for it, and comes back."""
    def times(size, num_measured):
        return [(100, SLOW, 50), (100, SLOW, 50), (100, 50, SLOW), (100, SLOW, 50), (100, SLOW, SLOW), (100, SLOW, SLOW)][num_measured]

    with adaptive(times, reprobe_calls=3) as live:
        assert ways_taken(live, AG, rank, world, [LARGE] * 2) == ["one-sided"] * 2
        assert ways_taken(live, RS, rank, world, [LARGE] * 2) == ["one-sided"] * 2
        assert ways_taken(live, AG, rank, world, [LARGE] * 3) == ["zipped"] * 3             # the third of six measures
        assert live.stats.sections["one_sided"]()[1] == {"num_groups": 1}
        assert ways_taken(live, AG, rank, world, [LARGE] * 3) == ["one-sided"] * 3          # the sixth
        assert ways_taken(live, AG, rank, world, [LARGE]) == ["native"]
        assert live.stats.sections["one_sided"]()[1] == {"num_groups": 1}
        assert ways_taken(live, RS, rank, world, [LARGE]) == ["native"]
        assert live.stats.sections["one_sided"]()[1] == {"num_groups": 0}


@needs_a_gpu_each
def case_ranks_that_see_other_times_go_the_same_ways(rank, world):
    random = torch.Generator("cpu").manual_seed(rank)
    with adaptive(lambda size, _: (1e4 * torch.rand(3, generator=random, device="cpu")).tolist(), reprobe_calls=2) as live:
        seen = [way for turn in range(4) for op in (AG, A2A) for way in ways_taken(live, op, rank, world, [SMALL, LARGE] * 2, 1000 * turn)]
        assert {"native", "zipped", "one-sided"} == set(seen), "too few turns: this shows nothing"


@needs_a_gpu_each
def case_memory_bounds_what_is_measured(rank, world):
    """Of the rank that has the least, for all."""
    original = switch.free_bytes
    try:
        for free, num_sizes in ((1 << 40, 3), (8 * LARGE - 1, 2), (0, 2)):
            switch.free_bytes = lambda device, free=free: free if rank == world - 1 else 1 << 40
            with adaptive(lambda size, _: (100, 90, 10)) as live:
                call, result = exchange(AG, rank, world, 40_000, 3)
                begin(live, call)[0].wait()
                assert_same_bits(call.output, result, free)
                costs = live.state(dist.group.WORLD, call.device).measured(AG, BF16).costs
                assert len(costs.native.sizes) == len(costs.one_sided.sizes) == num_sizes
    finally:
        switch.free_bytes = original


@needs_stand_ins
def case_wrong_results_rule_it_out(rank, world):
    """Of one rank alone, for all; it would be faster."""
    def spoil(out):
        if rank == 1:
            out.view(torch.int16)[out.numel() // 3] ^= 1

    with adaptive(lambda size, _: (100, 90, 10), spoil=spoil) as live:
        for op in (AG, RS):
            assert ways_taken(live, op, rank, world, [LARGE] * 3) == ["zipped"] * 3
            assert live.state(dist.group.WORLD, torch.get_default_device()).measured(op, BF16).costs.one_sided is None
        assert not any(stand_in.is_open for stand_in in live.opened)


@needs_stand_ins
def case_a_group_that_cannot_is_measured_without(rank, world):
    """Counted once, though many calls follow."""
    with adaptive(lambda size, _: (100, 90, 10), why_not="hosts") as live:
        assert ways_taken(live, AG, rank, world, [LARGE] * 4) == ["zipped"] * 4
        row = live.stats.snapshot()[AG]
        assert row["not_one_sided"] == {"hosts": 1} and "one_sided" not in live.stats.sections


@needs_a_gpu_each
def case_what_must_be_zipped_goes_the_faster_way(rank, world):
    """``always`` measures only where there are two ways, and never goes native; so it may sum beyond two ranks, too."""
    with adaptive(lambda size, _: (1, 90, 10) if size == LARGE else (1, 10, 90), collectives="always", deterministic_reduce=True) as live:
        for op in (AG, RS):
            assert ways_taken(live, op, rank, world, [SMALL, LARGE]) == ["zipped", "one-sided"], op
    if not ONE_SIDED:
        with adaptive(lambda size, _: 1 / 0, why_not="hosts", collectives="always") as live:
            assert ways_taken(live, AG, rank, world, [SMALL, LARGE]) == ["zipped"] * 2


@needs_a_gpu_each
def case_what_stays_with_the_group_is_repeated(rank, world):
    """As where there is one way alone: launched like the call before, counted, until something else is measured; by ranks that forget at
    different times too."""
    zipped, away, native = (100, 50, 90), (100, 90, 50), (10, 50, 50)
    own = random.Random(rank)
    for choice, order in (("always", (zipped, away, zipped)), ("adaptive", (zipped, away, zipped, native, zipped))):
        with (adaptive(lambda size, num_measured, order=order: order[num_measured], collectives=choice, reprobe_calls=8) as live,
              repeats_as_on_a_gpu(live) as hits):
            for turn, times in enumerate(order):
                begun, again = len(hits), live.repeats.num_again
                for i in range(8 if turn else 7):
                    call, result = exchange(AG, rank, world, MIDDLE // 2 // world, 10 * i)
                    begin(live, call)[0].wait()
                    assert_same_bits(call.output, result, (choice, turn, i))
                    if rank and own.random() < 0.2:
                        forget_something(live, own)
                num_hits, again = len(hits) - begun, live.repeats.num_again - again
                assert num_hits + again >= 5 * (rank == 0) if times is zipped else num_hits == 0, (choice, turn, num_hits, again)
            row = live.stats.snapshot()[AG]
            assert (row["calls_one_sided"], row["calls_zipped"] + row["calls_native"]) == (8, 8 * len(order) - 1), row
            assert row["calls_native"] == (8 if native in order else 0)


@needs_a_gpu_each
def case_timing_chooses_no_arithmetic(rank, world):
    with adaptive(lambda size, _: (100, 50, 10), deterministic_reduce=True) as live:
        taken = ways_taken(live, RS, rank, world, [LARGE] * 2)
        assert taken == (["one-sided"] * 2 if world == 2 else ["native"] * 2), taken


def case_lists_on_one_rank_alone(rank, world):
    """As torch allows, also from the call on after which all would go one-sided: no rank can see them on another one, so nobody goes."""
    def exchanges(live):
        for i in range(6):
            call, result = exchange(A2A, rank, world, LARGE // 2 // world, 7 * i)
            if rank == 1 and i >= 3:
                pieces = (call.input.numel() // world,) * world
                call = Call(A2A, call.output, call.input, call.group, input_splits=pieces, output_splits=pieces)
            begin(live, call)[0].wait()
            assert_same_bits(call.output, result, i)
        return live.stats.snapshot()[A2A]

    with adaptive(lambda size, _: (100, 50, 10), split_lists="any") as live:
        seen = exchanges(live)
        assert live.state(dist.group.WORLD, torch.get_default_device()).measured("pair", BF16).costs.one_sided is None
        assert (seen["calls_one_sided"], seen["not_one_sided"]) == (0, {"splits": 1}), seen
    with stand_ins() as opened, runtime(transport="symmetric_memory", split_lists="any") as live:
        seen = exchanges(live)
        assert (seen["calls_one_sided"], seen["not_one_sided"]) == (0, {"splits": 6}) and not opened, seen


@needs_a_gpu_each
def case_lists_on_all_ranks_or_none(rank, world):
    """As was promised: those without go one-sided, and the others do not."""
    with adaptive(lambda size, _: (100, 50, 10)) as live:
        ways_taken(live, A2A, rank, world, [SMALL] * 2)
        for i in range(4):
            before = live.stats.snapshot()[A2A]["calls_one_sided"]
            call, result = exchange(A2A, rank, world, LARGE // 2 // world, 7 * i)
            pieces = (call.input.numel() // world,) * world if i % 2 else None
            call = Call(A2A, call.output, call.input, call.group, input_splits=pieces, output_splits=pieces)
            begin(live, call)[0].wait()
            assert_same_bits(call.output, result, i)
            assert live.stats.snapshot()[A2A]["calls_one_sided"] == before + (i % 2 == 0), i
