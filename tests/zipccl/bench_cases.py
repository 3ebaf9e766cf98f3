"""Cases run on every rank by test_cli_bench_collectives.py."""
import itertools
from types import SimpleNamespace
from unittest import mock

import torch

from ds_zipccl.cli import bench_collectives
from ds_zipccl.cli.bench_collectives import count_wrong, make_call
from ds_zipccl.collectives.registry import specs


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
