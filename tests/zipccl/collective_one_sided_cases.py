"""Cases run on every rank by test_collectives.py: ``transport: symmetric_memory``. One-sided on GPUs of one host; on CPUs the same calls go
over the process group, counted with the reason."""
import torch
import torch.distributed as dist

from ds_zipccl.collectives.registry import Call
from tests.helpers.bits import assert_same_bits, gaussian, random_bits
from tests.helpers.ranks import DEVICE
from tests.zipccl.collective_helpers import A2A, AG, RS, begin, gathered, rank_order_sum, runtime

BF16 = torch.bfloat16
ONE_SIDED = DEVICE == "cuda"


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
        router.run = lambda spec, call, state, stats: (taken.append(call.op), spec.native(call))[1]
        router.close = lambda state: taken.append("closed")
        for i in range(3):
            call, result = exchange(AG, rank, world, 50_000, 7 * i)
            work = live.run(call, lambda: asked.append(1))
            work.wait()
            assert_same_bits(call.output, result, i)
        assert len(asked) == 1 and taken == [AG] * 3 and not live.stats.snapshot()
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
