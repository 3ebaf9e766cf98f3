"""Cases run on every rank by test_cli_bench_collectives.py."""
import itertools
from types import SimpleNamespace
from unittest import mock

import torch

from ds_zipccl.cli import bench_collectives
from ds_zipccl.cli.bench_collectives import count_wrong, make_call
from ds_zipccl.cli.collective_rivals import RIVALS, rivals
from ds_zipccl.collectives.registry import specs
from tests.helpers.ranks import needs_a_gpu_each
from tests.zipccl.collective_helpers import AG, RS, runtime
from tests.zipccl.one_sided_stand_in import ONE_SIDED, stand_ins

#: On GPUs copies over torch's symmetric memory are left to the benchmark, which verifies them.
TESTED = [name for name in RIVALS if name != "raw" or not ONE_SIDED]


def call_of(op, size, in_place=False):
    return make_call(specs()[op], size, torch.bfloat16, torch.get_default_device(), in_place)


def case_count_wrong(rank, world):
    for spec in specs().values():
        call = call_of(spec.name, 1 << 16)

        def right(call=call, spec=spec):
            spec.native(call).wait()

        def flipped(call=call, right=right):
            right()
            call.outputs[-1].view(-1).view(torch.int16)[7] ^= 1

        assert count_wrong(spec, call, right) == 0, spec.name
        assert count_wrong(spec, call, flipped) == 1, spec.name
        if not any(o.data_ptr() == i.data_ptr() for o in call.outputs for i in call.inputs):
            assert count_wrong(spec, call, lambda: None) > 1000, f"{spec.name}: an output that is never written was not seen"


def case_times_are_of_one_call_at_2(rank, world):
    """On a clock that ticks at each look, twice as slowly on rank 0: the slowest rank's, whatever is timed."""
    call = call_of(AG, 1 << 10)
    clock = itertools.count(step=6 - 3 * rank)
    with mock.patch.object(bench_collectives, "time", SimpleNamespace(perf_counter=lambda: next(clock))):
        times = bench_collectives._times({"one": lambda: None, "other": lambda: None}, call, 4, 3)
    assert times == {"one": [2e6] * 4, "other": [2e6] * 4}


def case_turns_fit_into_their_time_at_2(rank, world):
    """A warm turn of both paths sees the clock tick 3 times, 18 seconds on the slower rank: 8 of them are 144. Never fewer than 5, nor more
    than were asked for."""
    call = call_of(AG, 1 << 10)
    for seconds, turns in ((150, 8), (10, 5), (1e9, 20)):
        clock = itertools.count(step=6 - 3 * rank)
        with mock.patch.object(bench_collectives, "time", SimpleNamespace(perf_counter=lambda clock=clock: next(clock))):
            times = bench_collectives._times({"one": lambda: None, "other": lambda: None}, call, 20, 1, seconds)
        assert {path: len(seen) for path, seen in times.items()} == {"one": turns, "other": turns}, seconds


def gaussians(call, seed):
    for t in call.inputs:
        t.normal_(0, 0.02, generator=torch.Generator(t.device).manual_seed(seed))


def case_rivals_have_native_bits_at_2(rank, world):
    """Sums behind an exchange."""
    with runtime() as live:
        for in_place in (False, True):
            call = call_of(RS, 3 << 20, in_place)
            gaussians(call, rank)
            (path, rival), = rivals(TESTED, call, in_place, live, specs()[RS].raw_bytes(call)).items()
            rival.prepare()
            assert path == "all-to-all + sum" and count_wrong(specs()[RS], call, rival.run) == 0


@needs_a_gpu_each
def case_frames_made_before_have_native_bits_at_2(rank, world):
    """In several parts, on a CPU over a stand-in; frames that are not those of the data are seen."""
    with stand_ins() as opened, runtime() as live:
        for in_place in (False, True):
            call = call_of(AG, 3 << 20, in_place)
            raw_bytes = specs()[AG].raw_bytes(call)
            (path, rival), = rivals(TESTED, call, in_place, live, raw_bytes).items()
            gaussians(call, rank)
            rival.prepare()
            assert path == "frames made before" and count_wrong(specs()[AG], call, rival.run) == 0
            assert 1.40 < raw_bytes / rival.wire_bytes < 1.42 and (ONE_SIDED or opened[-1].num_calls > 3)
            gaussians(call, 7 + rank)
            assert count_wrong(specs()[AG], call, rival.run) > 100_000
