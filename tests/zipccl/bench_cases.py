"""Cases run on every rank by test_cli_bench_collectives.py."""
import itertools
from types import SimpleNamespace
from unittest import mock

import torch

from ds_zipccl.cli import bench_collectives
from ds_zipccl.cli.bench_collectives import count_wrong, make_call
from ds_zipccl.cli.collective_rivals import rivals
from ds_zipccl.collectives.registry import specs
from tests.zipccl.collective_helpers import runtime
from tests.zipccl.one_sided_stand_in import stand_ins


def case_count_wrong(rank, world):
    for spec in specs().values():
        call = make_call(spec, 1 << 16, torch.bfloat16, torch.device("cpu"), False)

        def right(call=call, spec=spec):
            spec.native(call).wait()

        def flipped(call=call, right=right):
            right()
            call.outputs[-1].view(-1).view(torch.int16)[7] ^= 1

        assert count_wrong(spec, call, right) == 0, spec.name
        assert count_wrong(spec, call, flipped) == 1, spec.name
        if not any(o.data_ptr() == i.data_ptr() for o in call.outputs for i in call.inputs):
            assert count_wrong(spec, call, lambda: None) > 1000, f"{spec.name}: an output that is never written was not seen"


def case_times_are_of_one_call(rank, world):
    """On a clock that ticks at each look, twice as slowly on rank 0: the slowest rank's, whatever is timed."""
    call = make_call(specs()["all_gather_into_tensor"], 1 << 10, torch.bfloat16, torch.device("cpu"), False)
    clock = itertools.count(step=6 - 3 * rank)
    with mock.patch.object(bench_collectives, "time", SimpleNamespace(perf_counter=lambda: next(clock))):
        times = bench_collectives._times({"one": lambda: None, "other": lambda: None}, call, 4, 3)
    assert times == {"one": [2e6] * 4, "other": [2e6] * 4}


def case_turns_fit_into_their_time(rank, world):
    """A warm turn of both paths sees the clock tick 3 times, 18 seconds on the slower rank: 8 of them are 144. Never fewer than 5, nor more
    than were asked for."""
    call = make_call(specs()["all_gather_into_tensor"], 1 << 10, torch.bfloat16, torch.device("cpu"), False)
    for seconds, turns in ((150, 8), (10, 5), (1e9, 20)):
        clock = itertools.count(step=6 - 3 * rank)
        with mock.patch.object(bench_collectives, "time", SimpleNamespace(perf_counter=lambda clock=clock: next(clock))):
            times = bench_collectives._times({"one": lambda: None, "other": lambda: None}, call, 20, 1, seconds)
        assert {path: len(seen) for path, seen in times.items()} == {"one": turns, "other": turns}, seconds


def case_rivals_have_native_bits(rank, world):
    """Sums behind an exchange, and frames that were made before over a stand-in, in several parts; frames that are not those of the data
    are seen."""
    with stand_ins() as opened, runtime() as live:
        for op, path in (("reduce_scatter_tensor", "all-to-all + sum"), ("all_gather_into_tensor", "frames made before")):
            spec = specs()[op]
            for in_place in (False, True):
                call = make_call(spec, 3 << 20, torch.bfloat16, torch.device("cpu"), in_place)
                found = rivals(["sum", "raw", "frames"], call, in_place, live, spec.raw_bytes(call))
                assert list(found) == [path]
                rival = found[path]
                for t in call.inputs:
                    t.normal_(0, 0.02, generator=torch.Generator().manual_seed(rank))
                rival.prepare()
                assert count_wrong(spec, call, rival.run) == 0
                if op == "all_gather_into_tensor":
                    assert opened[-1].num_calls > 3 and 1.40 < spec.raw_bytes(call) / rival.wire_bytes < 1.42
                    for t in call.inputs:
                        t.normal_(0, 0.02, generator=torch.Generator().manual_seed(7 + rank))
                    assert count_wrong(spec, call, rival.run) > 100_000
