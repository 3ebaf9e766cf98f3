"""Cases run on every rank by test_collectives.py (tests/helpers/ranks.py): bits, aliasing, reasons, bytes."""

import torch
import torch.distributed as dist

from ds_zipccl.collectives import all_gather, switch, transport
from ds_zipccl.collectives import launch as launching
from ds_zipccl.collectives.cost import Curve
from ds_zipccl.collectives.registry import specs
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.helpers.bits import assert_same_bits, gaussian, random_bits, specials
from tests.zipccl.collective_helpers import (
    AG,
    RS,
    SIZES,
    Guarded,
    assert_same_sum,
    begin,
    carry_out,
    gathered,
    launch,
    native_reduce_scatter,
    payloads_by_torch,
    rank_order_sum,
    runtime,
)


def case_all_gather_bits(rank, world):
    with runtime() as live:
        for size in SIZES:
            for make in (gaussian, specials, random_bits):
                data = make(size, seed=17 * size + rank)
                out = Guarded(world * size)
                carry_out(live, AG, out.tensor, data)
                assert_same_bits(out.tensor, gathered(data, world), f"{make.__name__} {size}")
                out.check()
        assert live.stats.snapshot()[AG]["calls_zipped"] > 0


def case_all_gather_in_place(rank, world):
    """C28: the input is a slice of the output; sync and async."""
    with runtime() as live:
        for size in SIZES:
            data = specials(size, seed=size + rank)
            out = random_bits(world * size, seed=5)
            out.view(world, size)[rank].copy_(data)
            carry_out(live, AG, out, out.view(world, size)[rank])
            assert_same_bits(out, gathered(data, world), f"in place {size}")


def case_reduce_scatter_bits(rank, world):
    with runtime() as live:
        for size in SIZES:
            for make in (gaussian, specials, random_bits):
                data = make(world * size, seed=31 * size + rank)
                guarded = Guarded(size)
                out = guarded.tensor
                ours = carry_out(live, RS, out, data)
                guarded.check()
                expected = rank_order_sum(data, rank, world)
                if ours or world == 2:                  # beyond, the native order is another
                    assert_same_sum(out, expected, ours, f"{make.__name__} {size}")
                if world == 2 and make is gaussian:
                    assert_same_bits(out, native_reduce_scatter(data, world), f"native {size}")


def case_reduce_scatter_special_values_as_native_at_2(rank, world):
    """-0 + -0, denormal sums, Inf - Inf, NaN payloads: equal to native at 2 ranks, NaNs canonical (C29, C32)."""
    with runtime() as live:
        data = specials(2 * 5000, seed=rank + 7)
        data.view(2, 5000)[:, ::7] = -0.0
        out = torch.empty(5000, dtype=data.dtype)
        carry_out(live, RS, out, data)
        expected = native_reduce_scatter(data, world)
        assert torch.equal(out.isnan(), expected.isnan())
        assert set(out[out.isnan()].view(torch.int16).tolist()) <= {0x7FC0}
        clean = ~out.isnan()
        assert_same_bits(out[clean], expected[clean], "special values")
        assert bool((out[clean].view(torch.int16) == -32768).any()), "no -0 in the result: the case tests nothing"


def case_reduce_scatter_in_place_with_garbage_padding(rank, world):
    """C27: output is the rank's slice of the input, the input's padding is uninitialised."""
    with runtime() as live:
        size, real = 5000, 4321
        data = gaussian(world * size, seed=rank)
        for r in range(world):
            data.view(world, size)[r, real:] = random_bits(size - real, seed=rank + 100)
        expected = rank_order_sum(data, rank, world)
        out = data.view(world, size)[rank]
        carry_out(live, RS, out, data)
        assert_same_bits(out[:real].clone(), expected[:real], "real elements")


def case_exactly_summable_inputs_equal_native(rank, world, group=None, size=3000):
    with runtime() as live:
        for op, spec in specs().items():
            ours, theirs = (spec.make_call(group or dist.group.WORLD, size, torch.bfloat16, torch.get_default_device()) for _ in range(2))
            work, zipped = begin(live, ours)
            work.wait()
            spec.native(theirs).wait()
            assert zipped, op
            for got, expected in zip(ours.outputs, theirs.outputs, strict=True):
                assert_same_bits(got, expected, op)
            row = live.stats.snapshot()[op]
            assert (row["raw_bytes"], row["wire_bytes"]) == (spec.raw_bytes(ours), spec.wire_bytes(ours)), op


def six_and_seven_ranks(rank, world):
    """C71: sizes that no number of ranks divides, and ranks that no size is a multiple of."""
    six = dist.new_group(list(range(6)))
    for group in (dist.group.WORLD, six)[:2 if rank < 6 else 1]:
        case_exactly_summable_inputs_equal_native(rank, world, group, 3001)


def case_averages(rank, world):
    """AVG (C29, C31): the rank-order sum / world size, one rounding: compressed, sent again, uncompressed, and in parts. Values near the
    largest stay finite."""
    avg, size, power_of_two = dist.ReduceOp.AVG, 40000, world & world - 1 == 0

    def expected_of(data):
        if power_of_two:                        # inputs are divided, exactly but for denormals
            return rank_order_sum(data * (1 / world), rank, world)
        rows = gathered(data, world).view(world, world, -1)[:, rank]
        out = torch.empty_like(rows[0])
        sum_in_order(rows, out, world)
        exact = rows.double().sum(0) / world
        fits = exact.abs() < torch.finfo(out.dtype).max
        slack = rows.double().abs().sum(0) * 2.0**-23 + 1e-40          # half a BF16 step, and the accumulator's own rounding
        assert bool(((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + slack)[fits].all())
        return out

    for settings in ({}, {"max_workspace_bytes": 1 << 20}):
        with runtime(**settings) as live:
            for name, make in ((RS, gaussian), ("all_reduce", gaussian), *[(RS, specials), ("all_reduce", specials)] * 2):
                data = make(world * (size if make is gaussian else size // 8), seed=3 + rank)
                data[7::50] = torch.finfo(torch.bfloat16).max * (1 if rank % 2 else 0.75)
                kept, expected = data.clone(), expected_of(data)
                expected = expected if name == RS else gathered(expected, world)
                out = torch.empty_like(expected) if name == RS else data
                work = launch(live, name, out, data, reduce_op=avg)
                if work is None:                # what does not compress keeps its arithmetic beyond two ranks; here sums are native's
                    assert world == 2 or name != RS and settings, name
                    continue
                work.wait()
                assert_same_bits(out, expected, f"{name} {make.__name__} {settings}")
                assert bool(out[7::50].isfinite().all()) and (name != RS or torch.equal(data.view(torch.int16), kept.view(torch.int16)))
            assert live.stats.snapshot()[RS]["calls_zipped"] >= 2 and live.stats.snapshot()[RS]["overflows"] >= 1


def case_native_reasons_are_counted(rank, world):
    with runtime(min_bytes=4096, max_workspace_bytes=1 << 20) as live:
        def reason_of(op, out, data, **kwargs):
            before = live.stats.snapshot().get(op, {"native_reasons": {}})["native_reasons"]
            assert launch(live, op, out, data, **kwargs) is None
            after = live.stats.snapshot()[op]["native_reasons"]
            return [reason for reason in after if after[reason] != before.get(reason, 0)]

        bf16 = dict(dtype=torch.bfloat16)
        assert reason_of(AG, torch.empty(world * 4096), torch.empty(4096)) == ["dtype"]
        assert reason_of(AG, torch.empty(world * 8, **bf16), torch.empty(8, **bf16)) == ["min_bytes"]
        assert reason_of(AG, torch.empty(world * 850, **bf16), torch.empty(850, **bf16)) == (["no_gain"] if world > 2 else ["min_bytes"])
        assert reason_of(AG, torch.empty(1, **bf16).expand(world * 4096), torch.empty(4096, **bf16)) == ["layout"]
        assert reason_of(AG, torch.empty(world * 4096 + 1, **bf16), torch.empty(4096, **bf16)) == ["shape"]
        large = torch.empty(1 << 20, **bf16)
        assert reason_of("broadcast", large, large, root=0) == ["max_workspace_bytes"]          # cannot be cut
        assert reason_of(RS, torch.empty(4096, **bf16), torch.empty(world * 4096, **bf16), reduce_op=dist.ReduceOp.MAX) == ["reduce_op"]
        assert reason_of(AG, torch.empty(0, **bf16), torch.empty(0, **bf16)) == ["min_bytes"]


def case_adaptive_agrees_on_all_ranks(rank, world):
    with runtime(collectives="adaptive") as live:
        for op in (AG, RS):
            for size in (2000, 300000):
                data = gaussian(size if op == AG else world * size, seed=rank)
                out = torch.empty(world * size if op == AG else size, dtype=data.dtype)
                work = launch(live, op, out, data)
                choices = [None] * world
                dist.all_gather_object(choices, work is None)
                assert len(set(choices)) == 1, f"{op} {size}: {choices}"
                if work is not None:
                    work.wait()
                    assert_same_bits(out, gathered(data, world) if op == AG else rank_order_sum(data, rank, world), op)
        if world > 2:
            assert live.stats.snapshot()[RS]["native_reasons"] == {"deterministic_reduce": 2}


def case_probes_cost_what_repeated_calls_cost(rank, world):
    """What a call of a kind needs is made for the first probe of a size alone, else making it would count as the cost of zipping."""
    made, original = [], launching.Flight.__init__

    def counting(self, *args):
        made.append(self)
        original(self, *args)

    launching.Flight.__init__ = counting
    try:
        for op in (AG, RS, "all_to_all_single"):
            with runtime(collectives="adaptive", deterministic_reduce=False) as live:
                made.clear()
                data = gaussian(300000 if op == AG else 300000 * world, seed=rank)
                out = torch.empty(300000 if op == RS else 300000 * world, dtype=data.dtype)
                for _ in range(3):                      # an all-to-all asks first, the next one measures
                    work = launch(live, op, out, data)
                    if work is not None:
                        work.wait()
                trials = [flight for flight in made if flight.launch.trial]
                num_sizes = len(switch.PROBE_SIZES[data.device.type])
                assert num_sizes <= len(trials) <= num_sizes + len(switch.LARGER_SIZES[data.device.type]), (op, len(trials))
                held = [flight for stack in live.workspace._idle.values() for flight in stack if not isinstance(flight, torch.Tensor)]
                assert not any(flight.launch.trial for flight in held)
    finally:
        launching.Flight.__init__ = original


def case_ranks_that_measure_differently_decide_alike(rank, world):
    """Forced disagreement: every rank sees other times at every probe; costs, decisions and the calls that measure again agree."""
    original, probes = switch._timed_us, []
    random = torch.Generator("cpu").manual_seed(rank)

    def noisy(*args):
        probes.append(original(*args))
        return 1e4 * float(torch.rand(1, generator=random, device="cpu"))

    switch._timed_us = noisy
    try:
        with runtime(collectives="adaptive", reprobe_calls=4, deterministic_reduce=False) as live:
            seen = []
            for turn in range(9):
                for op in (AG, RS):
                    call = specs()[op].make_call(dist.group.WORLD, 20000 * (1 + turn % 3), torch.bfloat16, torch.get_default_device())
                    ours = carry_out(live, op, call.output, call.input)
                    seen.append((op, ours, len(probes), live.state(dist.group.WORLD, call.device).measured(op, torch.bfloat16).costs))
            everyones = [None] * world
            dist.all_gather_object(everyones, seen)
            assert all(other == seen for other in everyones), "ranks disagree"
            costs = [c for op, _, _, c in seen if op == AG]
            assert len(set(costs)) == 3, "costs are measured at the first call and every fourth"
            assert [i for i in range(1, 9) if costs[i] != costs[i - 1]] == [3, 7]
    finally:
        switch._timed_us = original


def case_calls_are_measured_alone_and_back_to_back(rank, world):
    """As on a GPU: bursts of the sizes whose calls are short, a larger size where the largest is; all ranks decide alike what is short."""
    kept = {name: getattr(switch, name) for name in ("PROBE_SIZES", "LARGER_SIZES", "BURST_CALLS", "SHORT_US", "_timed_us")}
    both, seen, sizes, slow = ("cpu", "cuda"), [], (1 << 16, 1 << 18), {}
    switch.PROBE_SIZES, switch.LARGER_SIZES = dict.fromkeys(both, sizes), dict.fromkeys(both, (1 << 20,))
    switch.BURST_CALLS, switch.SHORT_US = dict.fromkeys(both, 3), 100.0

    def made_up(run, device, start, num_calls=1):
        kept["_timed_us"](run, device, start, num_calls)
        seen.append(num_calls)
        return {1: 99.0 if rank == slow["rank"] else 50.0, 3: 20.0}[num_calls] + slow["by"]

    switch._timed_us = made_up
    try:
        for who, over, num_sizes in ((0, 0, 3), (world - 1, 2, 2)):           # then one rank is too slow, for all
            slow.update(rank=who, by=over)
            with runtime(collectives="adaptive", deterministic_reduce=False) as live:
                seen.clear()
                data = gaussian(30000, seed=rank)
                carry_out(live, AG, torch.empty(30000 * world, dtype=data.dtype), data)
                state = live.state(dist.group.WORLD, data.device)
                costs = state.measured(AG, torch.bfloat16).costs
                short = num_sizes == 3
                assert costs.native == Curve((*sizes, 1 << 20)[:num_sizes], (99.0 + over,) * num_sizes), costs
                assert costs.burst.native.times_us == ((20.0,) if short else (99.0 + over,)) * num_sizes, costs
                singles, bursts = (2 * (1 + rounds[data.device.type]) for rounds in (switch.PROBE_ROUNDS, switch.BURST_ROUNDS))
                assert [seen.count(n) for n in (1, 3)] == [num_sizes * singles, num_sizes * bursts * short]
                assert list(state.new_times()) == [f"{AG} bfloat16"] and not state.new_times()
    finally:
        for name, value in kept.items():
            setattr(switch, name, value)


def case_subgroups(rank, world):
    """A group of some ranks beside the world: own side channel, own capacities; ranks outside take no part."""
    group = dist.new_group([0, world - 1])
    with runtime() as live:
        for round_ in range(2):
            if rank in (0, world - 1):
                data = gaussian(3000, seed=round_ + rank)
                out, native = torch.empty(6000, dtype=data.dtype), torch.empty(6000, dtype=data.dtype)
                launch(live, AG, out, data, group=group).wait()
                transport.native_all_gather(native, data, group).wait()
                assert_same_bits(out, native, "subgroup")
            data = gaussian(2000, seed=round_ + rank)
            out = torch.empty(world * 2000, dtype=data.dtype)
            carry_out(live, AG, out, data)
            assert_same_bits(out, gathered(data, world), "world after subgroup")


def case_wire_bytes_are_what_is_sent(rank, world):
    with payloads_by_torch(), runtime() as live:
        size = 100000
        data, out = gaussian(size, seed=rank), torch.empty(world * size, dtype=torch.bfloat16)
        sent = []
        original = transport.all_gather_bytes
        all_gather.all_gather_bytes = lambda o, own, group: (sent.append(own.numel()), original(o, own, group))[1]
        try:
            carry_out(live, AG, out, data)
        finally:
            all_gather.all_gather_bytes = original
        row = live.stats.snapshot()[AG]
        assert row["wire_bytes"] == (sent[0] + 4) * (world - 1)
        assert row["raw_bytes"] == 2 * size * (world - 1)
        assert row["ratio"] > 1.35
