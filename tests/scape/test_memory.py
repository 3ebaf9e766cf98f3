"""The memory that is printed at the start, against what torch's allocator sees."""
import bisect
import itertools
import random
from unittest import mock

import pytest
import torch

from ds_scape.cli import estimate
from ds_scape.kernels import impl_reference
from ds_scape.optimizer import flow as flow_module
from ds_scape.optimizer import memory, passage, workspace
from ds_scape.sync import mask as masks
from ds_scape.sync import sparse_reduce
from tests.scape.flow_helpers import Problem

SHAPES = [[(700, 300), (400, 500)], [(3000,)], [(10, 10)]]
#: Elements, in place of 64 and 4 MiB.
PIECE, CHUNK = 1 << 14, 1 << 10


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
            messages.append(flow.codec.encode(torch.cat(chosen), rank))
        self.masks = torch.stack(messages)

    def all_to_all_single(self, out, own, **kwargs):
        out.view(self.world_size, -1).copy_(own[:out.numel() // self.world_size].expand(self.world_size, -1))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("density", [0.1, 0.01])
def test_a_step_stays_below_what_is_said(world_size, offload, density):
    """Also close to it: something as long as a partition, in bytes, would be more than is left. (Found by this: residuals or masks of the
    own partition that are not in the gradients' memory, positions of 8 bytes, masks kept after they were unpacked, a step without masks
    that goes in one piece.)"""
    flow, steps = peaks(world_size, offload, density, may_overwrite=True)
    layout, own = flow.layout, sum(flat.layout.partition_numel for flat in flow.flats)
    whole = memory.whole_step_bytes(layout, offloaded=offload, chunk=CHUNK, piece=PIECE) + memory.kept_bytes(layout)["masks"]
    whole += 2 * 4 * PIECE if offload else 0                    # from the first step on
    masked = memory.masked_step_bytes(layout, offloaded=offload, chunk=CHUNK)
    for step, peak, bound in ((1, steps[0], whole), (2, steps[1], masked), (3, steps[2], masked)):
        assert bound - 0.9 * own < peak < bound + small_bytes(flow), f"step {step}: {peak} bytes, {bound} said, {own} in a partition"


def test_gradients_that_are_still_needed_are_left_alone():
    """Their memory is used only if the caller says so; then what is said is more."""
    flow, steps = peaks(4, True, 0.1, may_overwrite=False)
    lent, kept = (memory.masked_step_bytes(flow.layout, offloaded=True, chunk=CHUNK, lent=lent) for lent in (True, False))
    assert lent + small_bytes(flow) < max(steps[1:]) < kept + small_bytes(flow)


def test_nothing_is_handed_out_twice():
    """Lent in any order and pieces, neighbours joined; taken, released, at any alignment."""
    choice, blocks = random.Random(3), [torch.zeros(size, dtype=torch.uint8) for size in (5000, 70_000, 1)]
    for _ in range(200):
        space, cuts = workspace.Workspace(torch.device("cpu"), blocks), []
        for block in blocks:
            ends = sorted({0, len(block), *(choice.randrange(len(block) + 1) for _ in range(3))})
            cuts += [(block, start, stop) for start, stop in itertools.pairwise(ends)]
        choice.shuffle(cuts)
        lent = cuts[:choice.randrange(len(cuts) + 1)]
        for cut in lent:
            space.lend(*cut)
        for block in blocks:
            block.zero_()
        taken, mark = [], space.mark()
        for number in range(1, 40):
            numel, dtype = choice.choice(((3000, torch.bfloat16), (7, torch.bool), (500, torch.float32), (0, torch.float32)))
            tensor = space.empty(numel, dtype, is_tight=number % 3 == 0)
            assert tensor.numel() == numel and tensor.dtype == dtype
            tensor.fill_(number % 2)
            taken.append(tensor)
            assert all(bool((tensor == i % 2).all()) for i, tensor in enumerate(taken, 1))
        for block, start, stop in (cut for cut in cuts if not any(cut[0] is of[0] and cut[1:] == of[1:] for of in lent)):
            assert not block[start:stop].any(), "memory that was not lent"
        space.release(mark)
        assert space.mark() == mark
    whole = workspace.Workspace(torch.device("cpu"), blocks)
    whole.lend(blocks[1], 30_000, 70_000)
    whole.lend(blocks[1], 0, 30_000)
    assert whole.empty(70_000, torch.uint8).data_ptr() == blocks[1].data_ptr()


def test_where_the_designs_bound_holds():
    """With offload, beyond dense ZeRO 1 with Adam, and with AdamS: as docs/scape.md says."""

    def holds(world_size, density, beside_adams=False):
        layout = estimate.layout_of(8_000_000_000, world_size, density)
        kept = memory.kept_bytes(layout)
        most = memory.buffer_bytes(layout) + kept["ages"] + kept["masks"] + kept["q"] * beside_adams + max(
            memory.masked_step_bytes(layout, offloaded=True), memory.whole_step_bytes(layout, offloaded=True))
        return most <= memory.design_bytes(layout)

    for density, first, beside_adams in ((0.1, 5, 14), (0.01, 8, 23), (0.0001, 9, 25)):
        assert [holds(w, density) for w in (2, 4, first - 1, first, 64)] == [False, False, False, True, True]
        assert [holds(w, density, True) for w in (beside_adams - 1, beside_adams, 64)] == [False, True, True]
    assert all(holds(w, density) for w in (9, 16, 64) for density in (0.0001, 0.001, 0.03, 0.1, 0.3, 0.5))
    assert holds(4, 0.15) and holds(4, 0.2) and not any(holds(2, density) for density in (0.1, 0.4, 0.9))


@pytest.mark.parametrize("world_size", [4, 5, 8, 64])
@pytest.mark.parametrize("density", [0.1, 0.01])
def test_the_formula_of_the_text(world_size, density):
    """From 4 ranks on, bf16, one large matrix; with offload."""
    n = 4 << 30
    layout = estimate.layout_of(n, world_size, density)
    k = sum(layout.splits(False))
    masks = min(n / 8, 2 * k + n / 16384)
    kept, expected = memory.kept_bytes(layout), 2 * n / world_size + masks * (1 + 1 / world_size)
    assert kept["ages"] + kept["masks"] == pytest.approx(expected, rel=1e-3)
    assert memory.masked_step_bytes(layout, offloaded=True) == pytest.approx(max(4 * k + n / 8 / world_size, 6 * k - masks), rel=1e-3)
    assert memory.whole_step_bytes(layout, offloaded=True) <= 2 * 2 * passage.PIECE


def peaks(world_size, offload, density, may_overwrite):
    """(flow, the most that each of three steps held beyond what was held before it)."""
    problem = Problem(world_size, dtype=torch.bfloat16, shapes=SHAPES, densities=(density,) * 3, offload=offload, piece=PIECE)
    gradients, echo = [problem.gradient(0, step) for step in range(1, 4)], Echo(world_size)
    with mock.patch.object(flow_module, "PIECE", PIECE), mock.patch.object(impl_reference, "LANES", CHUNK), mock.patch.object(
            sparse_reduce, "ON_CPU", 1 << 8):
        flow = problem.flow(echo, 0)
        echo.make_masks(flow)
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            for gradient in gradients:
                with torch.autograd.profiler.record_function("a step"):
                    flow.step(gradient, max_norm=1e-6, may_overwrite=may_overwrite)
    events = sorted(profile.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    times, totals = [time for time, _ in changes], list(itertools.accumulate(num for _, num in changes))
    found = []
    for event in events:
        if event.name() == "a step":
            first, last = (bisect.bisect_left(times, event.start_ns() + duration) for duration in (0, event.duration_ns()))
            found.append(max(totals[first:last]) - (totals[first - 1] if first else 0))
    return flow, found


def small_bytes(flow) -> int:
    """Tables by age, the decay's as doubles twice, and a page."""
    return sum(20 * len(flat.decay) + 16 * (flat.max_age + 1) for flat in flow.flats) + 4096
