"""The memory that is printed at the start, against what torch's allocator sees."""
import functools
import itertools
from unittest import mock

import pytest
import torch

from ds_scape.sync import mask as masks
from ds_scape.sync.traffic import held_bytes, transient_bytes
from ds_scape.update import norms
from tests.scape.flow_helpers import Problem

SHAPES = [[(700, 300), (400, 500)], [(3000,)], [(10, 10)]]
PIECE = 1 << 14


class Echo:
    """Collectives of rank 0 whose peers send what it sends, and masks of their own: real buffers, no threads that the profiler would
    stumble over."""

    def __init__(self, world_size):
        self.world_size, self.masks = world_size, None

    def all_gather_into_tensor(self, out, own, **kwargs):
        out.view(self.world_size, -1).copy_(self.masks if own.dtype == torch.uint8 else own.expand(self.world_size, -1))
        return mock.Mock()

    def make_masks(self, flow):
        messages = []
        for rank in range(self.world_size):
            flats = [flat.layout for flat in flow.flats if not flat.layout.is_full]
            scores = [torch.rand(flat.partition_numel) for flat in flats]
            chosen = [masks.select(x, x > 2, flat.segments[rank]) for x, flat in zip(scores, flats, strict=True)]
            messages.append(flow.codec.encode(chosen, rank))
        self.masks = torch.stack(messages)

    def all_to_all_single(self, out, own, **kwargs):
        out.view(self.world_size, -1).copy_(own[:out.numel() // self.world_size].expand(self.world_size, -1))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("density", [0.1, 0.01])
def test_a_step_stays_below_what_is_said(world_size, offload, density):
    problem = Problem(world_size, dtype=torch.bfloat16, shapes=SHAPES, densities=(density,) * 3, offload=offload, piece=PIECE)
    echo = Echo(world_size)
    flow = problem.flow(echo, 0)
    echo.make_masks(flow)
    for step in range(1, 4):
        gradient = problem.gradient(0, step)
        with mock.patch.object(norms, "CHUNK", 1 << 12):        # 64 KiB in place of 64 MiB
            peak = peak_bytes(functools.partial(flow.step, gradient, max_norm=1e-6))
        bound = transient_bytes(flow.layout, dense=step == 1, offloaded=offload) + 16 * (1 << 12) + 8 * len(flow.flats[0].decay)
        bound += 0 if step == 1 else held_bytes(flow.layout)["positions"]
        if offload:                                             # and pieces of gradients in fp32
            bound += flow.flats[0].passage.num_bytes(4) + 2 * 4 * PIECE
        numel = sum(flat.copies.numel() for flat in flow.flats)
        assert 0.4 * bound < peak < bound, f"step {step}: {peak / numel:.2f} bytes per weight, {bound / numel:.2f} allowed"


def peak_bytes(function) -> int:
    """The most that torch's CPU allocator held at a time beyond what it held before."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        function()
    events = sorted((event for event in profile.kineto_results.events() if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))
