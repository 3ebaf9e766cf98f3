"""Cases run on every rank by test_flow.py: real collectives against the simulation of all workers, bit for bit after every step."""
import functools
import random
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from ds_scape.optimizer import ranking, spans, workspace
from ds_scape.optimizer.ahead import Ahead
from ds_scape.sync import sparse_reduce
from ds_scape.update import adams
from ds_scape.update.scape_rule import step_bound
from tests.helpers.bits import assert_same_bits
from tests.helpers.ranks import needs_peers
from tests.scape.flow_helpers import Problem, compare, run
from tests.scape.test_passage import UnrulyStreams
from zipscape.errors import ZipScapeError

STEPS = 46          # max_age is 40 at density 0.1: overdue coordinates come up


def _equal_to_simulation(rank, world_size, steps=STEPS, **settings):
    step_settings = {key: settings.pop(key) for key in ("max_norm", "loss_scale") if key in settings}
    return run(Problem(world_size, **settings), steps, dist, rank, **step_settings)


def case_fp32(rank, world_size):
    flow, _ = _equal_to_simulation(rank, world_size)
    never = sum(int((flat.last_sync <= 1).sum()) for flat in flow.flats)
    assert never < sum(flat.layout.partition_numel for flat in flow.flats) / 2


def case_bf16(rank, world_size):
    _equal_to_simulation(rank, world_size, dtype=torch.bfloat16)


def case_bf16_with_exact_values(rank, world_size):
    _equal_to_simulation(rank, world_size, dtype=torch.bfloat16, values_dtype="fp32")


def case_fp16_with_loss_scale_and_clipping(rank, world_size):
    _equal_to_simulation(rank, world_size, 25, dtype=torch.float16, loss_scale=8.0, max_norm=0.004)


def case_dense_warmup_then_index_masks(rank, world_size):
    flow, _ = _equal_to_simulation(rank, world_size, 30, densities=(0.02, 1.0, 0.02), dense_warmup_steps=7)
    assert flow.codec.encoding == "indices"


def case_offload(rank, world_size):
    """Pieces of 100 elements, which divide neither buffers nor partitions; one piece for all; the literal reading, which ranks early;
    ages that stay where the weights are, as under optimizer offload."""
    _equal_to_simulation(rank, world_size, 20, dtype=torch.bfloat16, offload=True, max_norm=0.004)
    _equal_to_simulation(rank, world_size, 8, offload=True, piece=1 << 20, densities=(0.02, 1.0, 0.02), dense_warmup_steps=3)
    with mock.patch.object(sparse_reduce, "SIGNED", 0):                     # positions are found as in partitions of 2^31 elements
        _equal_to_simulation(rank, world_size, 8, offload=True, mask_statistic="first_moment", catch_up=False)
    flow, _ = _equal_to_simulation(rank, world_size, 8, offload=True, elsewhere=True)
    flow.flush()
    assert flow._ages_pass == (flow.flats[0].copies.device.type != "cpu")
    assert not any(flat.ages(8).any() or flat.residual.any() for flat in flow.flats)


def case_offload_for_long_enough_that_coordinates_are_overdue(rank, world_size):
    """In every way to rank: as the residuals pass or once more, by the kernels or without room for them, in slices, or as they pass again
    and again; where there is room for the masks as they are found, and where there is not."""
    for piece, dtype, slice_ in ((100, torch.float32, 64), (60, torch.bfloat16, 40), (50, torch.bfloat16, 48)):
        with mock.patch.object(ranking, "SLICE", slice_), mock.patch.object(
                ranking, "TILE_BYTES", 1 << 20 if slice_ == 40 else ranking.TILE_BYTES), mock.patch.object(
                ranking, "is_too_large", functools.partial(is_cut, ranking.is_too_large) if slice_ == 48 else ranking.is_too_large), (
                mock.patch.object(ranking, "_fits", return_value=slice_ == 40)) as fits:
            flow, _ = _equal_to_simulation(rank, world_size, 26, densities=(0.2, 0.2, 0.1), offload=True, kernels="best", piece=piece,
                                            dtype=dtype)
        assert fits.called
        assert flow.flats[0].stored_last_sync.device.type == "cpu" and max(int(flat.ages(26).max()) for flat in flow.flats) > 20


def is_cut(is_too_large, group, has_room, size):
    return is_too_large(group, lambda *sizes: False, size)


class NotesOnAGpu:
    """The kernels of a flow, whose selection writes into as much beside what it chooses as it does on a GPU."""

    def __init__(self, kernels):
        self._kernels = kernels

    def __getattr__(self, name):
        return getattr(self._kernels, name)

    def select(self, *args):
        chosen, empty = args[6:8]
        self._kernels.select(*args)
        empty(chosen.numel() * 83 // 512 + 1, torch.int32).fill_(-1)        # after the choice: it lies in nothing of the choice's
        return chosen


def case_offload_by_kernels_that_note_things_down(rank, world_size):
    """What they note lies in the gradients' memory, beside what they choose. (Found on GPUs: memory that was given back twice was both.)"""
    shapes = [[(37, 11), (11,), (300, 9), (5, 50), (60, 9), (1, 3)], [(64,), (7,)], [(90, 40), (11, 50)]]
    for piece, dtype in ((1000, torch.bfloat16), (400, torch.float32)):
        problem = Problem(world_size, dtype=dtype, offload=True, shapes=shapes, piece=piece)
        flow, simulation = problem.flow(dist, rank), problem.simulation()
        flow.kernels = NotesOnAGpu(flow.kernels)
        for step in range(1, 5):
            gradients = [problem.gradient(worker, step) for worker in range(world_size)]
            simulation.step([[g.clone() for g in own] for own in gradients])
            fresh, whole = workspace.joined(gradients[rank], dtype)[::-1]
            torch._foreach_copy_(fresh, gradients[rank])
            flow.step(fresh, may_overwrite=True)
            compare(flow, simulation, f"step {step}:")
            whole.zero_()


def case_offload_where_own_residuals_are_ranked_as_they_pass(rank, world_size):
    """There is room for it from 2 ranks on: with masks as they are found, and only in bits. Tensors of several pieces, pieces of several
    buffers; streams that run late; a step without masks in between."""
    shapes = [[(25, 20)] * 6 + [(11,), (5, 50), (1, 3)], [(64,), (7,)], [(20, 20)] * 9 + [(11, 30)]]
    for seed, (piece, tile, kind) in enumerate(((1000, 332, "_Bits"), (250, 332, "_Whole"), (100, 900, "_Bits"))):
        problem = Problem(world_size, dtype=torch.bfloat16, offload={"ahead": True} if piece == 250 else True, shapes=shapes, piece=piece,
                          densities=(0.05, 0.05, 0.03), seed=seed, dense_warmup_steps=2)
        flow, simulation, found = problem.flow(dist, rank), problem.simulation(), []
        flow.kernels, flow.flats[0].passage._streams = NotesOnAGpu(flow.kernels), UnrulyStreams(10 * rank + seed)
        with mock.patch.object(ranking, "SEGMENT_BYTES", 64), mock.patch.object(ranking, "TILE_BYTES", tile), mock.patch.object(
                ranking, "as_they_pass", functools.partial(_noting, found, ranking.as_they_pass)):
            for step in range(1, 24 if piece == 1000 else 8):
                gradients = [problem.gradient(worker, step) for worker in range(world_size)]
                simulation.step([[g.clone() for g in own] for own in gradients])
                fresh = workspace.joined(gradients[rank], torch.bfloat16)[1]
                torch._foreach_copy_(fresh, gradients[rank])
                flow.prefetch()
                flow.step(fresh, may_overwrite=True)
                if step % 2:
                    compare(flow, simulation, f"step {step}:")
        assert len(found) == (0 if world_size > 3 else step - 2) and all((kind is not None) == (world_size > 1) for kind in found)
        assert world_size != 2 or set(found) == {kind}


def _noting(found, of, *given):
    result = of(*given)
    found.append(result and type(result._masks).__name__)
    return result


def case_offload_on_streams_that_run_late(rank, world_size):
    """Residuals and ages pass, some of them twice a step, in any order that the waits allow; looked at now and then, and flushed."""
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        problem = Problem(world_size, dtype=dtype, offload=True, dense_warmup_steps=2, kernels="best")
        flow, simulation = problem.flow(dist, rank), problem.simulation()
        flow.flats[0].passage._streams = UnrulyStreams(10 * rank + seed)
        for step in range(1, 16):
            gradients = [problem.gradient(worker, step) for worker in range(world_size)]
            simulation.step([[g.clone() for g in own] for own in gradients])
            if step % 3:
                flow.prefetch()
            flow.step(gradients[rank], may_overwrite=True)
            if step % 5 == 0:
                compare(flow, simulation, f"step {step}:")
        flow.flush()
        assert not any(flat.ages(flow.num_steps).any() for flat in reversed(flow.flats))
        assert not any(flat.residual.any() for flat in flow.flats)


def case_offload_ahead(rank, world_size):
    """Gradients that are complete one after another, in another order on every rank, some of them never said to be: what passes at once is
    right, but in steps that are clipped or skipped, or where a gradient comes twice, or residuals were looked at meanwhile."""
    problem = Problem(world_size, dtype=torch.bfloat16, offload={"ahead": True}, dense_warmup_steps=2, kernels="best")
    flow, simulation, choice, passed = problem.flow(dist, rank), problem.simulation(), random.Random(rank), {}
    assert (flow._ahead is not None) == (world_size > 1)
    if rank % 2:
        flow.flats[0].passage._streams = UnrulyStreams(10 * rank)
    for step in range(1, 22):
        settings = {"loss_scale": 4.0, "max_norm": 0.001 if step in (9, 10, 17) else 0.0}
        gradients = [problem.gradient(worker, step) for worker in range(world_size)]
        if step == 13:
            gradients[-1][0][3] = float("nan")
        expected = simulation.step([[g.clone() for g in own] for own in gradients], **settings)
        fresh = [g.clone() for g in gradients[rank]]
        places = [(i, slot.offset, slot.offset + slot.numel) for i, slots in enumerate(problem.slots) for slot in slots]
        for i, start, stop in places:
            fresh[i][start:stop] = 7.0
        flow.prefetch()
        for i, start, stop in choice.sample(places, len(places)):
            fresh[i][start:stop] = gradients[rank][i][start:stop]
            if choice.random() < 0.97 or step in (6, 15, 20):
                flow.gradient_is_complete(fresh, i, start, stop, 4.0)
        for i, start, stop in places[:1] if step in (6, 15) else ():
            fresh[i][start:stop] = 7.0
            flow.gradient_is_complete(fresh, i, start, stop, 4.0)
            fresh[i][start:stop] = gradients[rank][i][start:stop]
        if step == 19:
            assert all(flat.residual.isfinite().all() for flat in flow.flats)
        if flow._ahead and flow._ahead.is_running:
            passed[step] = flow._ahead._run.num_passed
        with mock.patch.object(Ahead, "finish", autospec=True, side_effect=Ahead.finish) as finish:
            result = flow.step(fresh, may_overwrite=True, **settings)
        passed[step] = passed.get(step, 0) if finish.called else 0
        assert result.applied == expected[0]
        compare(flow, simulation, f"step {step}:")
    if world_size > 1:
        assert not any(passed[step] for step in (6, 9, 10, 11, 13, 15, 17, 18, 19)) and sum(n > 0 for n in passed.values()) >= 5
        assert passed[20] == len(flow._ahead._early), passed
    for settings in ({"mask_statistic": "first_moment", "catch_up": False}, {"elsewhere": True}):       # own ones after it
        flow, _ = _equal_to_simulation(rank, world_size, 5, dtype=torch.bfloat16, offload={"ahead": True}, kernels="best", **settings)
        assert world_size == 1 or not flow._ahead.is_whole or "elsewhere" in settings and flow._device.type != "cpu"


def case_steps_without_masks_go_in_pieces(rank, world_size):
    """Pieces of 37 elements or less, which divide neither buffers nor partitions: equal to the simulation, and as many bytes as in one."""
    for settings in ({"dtype": torch.bfloat16}, {"offload": True, "piece": 37}, {"mask_statistic": "first_moment"}):
        counter, problem = Counting(), Problem(world_size, dense_warmup_steps=4, **settings)
        with mock.patch.object(spans, "PIECE", 37):
            flow, _ = run(problem, 7, counter if world_size > 1 else None, rank)
        if world_size == 1:
            continue
        partition = sum(flat.layout.partition_numel for flat in flow.flats)
        exchanged = [num for name, num in counter.sent if name == "all_to_all_single"]
        ages = 2 if flow.flats[0].passage else 0            # they pass with the residuals, in the same memory
        num_pieces = -(-partition // (37 * 4 // (4 * world_size + ages)))
        assert len(exchanged) == 4 * num_pieces + 3
        assert sum(exchanged[:num_pieces]) == 2 * partition * (world_size - 1)
        before = [flat.residual.abs().sum() for flat in flow.flats]
        flow.flush()
        assert sum(before) > 0 and not any(flat.residual.any() for flat in flow.flats)


def case_literal_reading(rank, world_size):
    _equal_to_simulation(rank, world_size, 30, mask_statistic="first_moment", catch_up=False)


def case_bits_and_indices_are_equal(rank, world_size):
    results = [_equal_to_simulation(rank, world_size, 12, mask_encoding=encoding)[0] for encoding in ("bits", "indices")]
    for a, b in zip(results[0].flats, results[1].flats, strict=True):
        assert_same_bits(a.copies, b.copies, "copies")


def case_kernels_change_nothing(rank, world_size):
    """Everything a rank holds, with the reference and with the best kernels, each against the simulation as well."""
    for settings in ({"dtype": torch.bfloat16, "max_norm": 0.004, "mask_encoding": "indices"}, {"offload": True, "mask_encoding": "bits"},
                     {"mask_statistic": "first_moment", "dense_warmup_steps": 3}):
        flows = [_equal_to_simulation(rank, world_size, 12, kernels=kernels, **settings)[0] for kernels in ("reference", "best")]
        assert [flow.kernels.names["cpu"] for flow in flows] == ["reference", "cpu"]
        for a, b in zip(flows[0].flats, flows[1].flats, strict=True):
            for name in ("copies", "weight", "momentum", "square", "residual", "last_sync"):
                assert_same_bits(getattr(b, name), getattr(a, name), name)
        assert torch.equal(flows[0]._mask_message, flows[1]._mask_message)
        for flow in flows:
            flow.flush()
        for a, b in zip(flows[0].flats, flows[1].flats, strict=True):
            assert_same_bits(b.copies, a.copies, "after flush()")


def case_density_one_is_dense_adams(rank, world_size):
    """fp64: to 1e-12. fp32: the mean's rounding in rank order is shared, so the bits are equal. bf16 copies: the masters' rounding."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        problem = Problem(world_size, dtype=dtype, densities=(1.0, 1.0, 1.0), values_dtype="fp32")
        flow = problem.flow(dist, rank)
        state = torch.float64 if dtype == torch.float64 else torch.float32
        weights = [b.to(state) for b in problem.buffers]
        momenta = [torch.zeros_like(w) for w in weights]
        for step in range(1, 31):
            gradients = [problem.gradient(worker, step) for worker in range(world_size)]
            for f, group in enumerate(problem.groups):
                mean = gradients[0][f].to(state)
                for other in gradients[1:]:
                    mean = mean + other[f].to(state)
                adams.dense_step(weights[f], momenta[f], mean / world_size, lr=group["lr"], betas=group["betas"], eps=group["eps"],
                                 weight_decay=group["weight_decay"])
            assert flow.step(gradients[rank]).dense
        for flat, weight in zip(flow.flats, weights, strict=True):
            if dtype == torch.float64:
                assert float((flat.copies - weight).abs().max()) < 1e-12
            else:
                assert_same_bits(flat.copies, weight.to(dtype), f"{dtype}")


def case_all_zero_gradients(rank, world_size):
    flow = Problem(world_size).flow(dist, rank)
    before = [flat.copies.clone() for flat in flow.flats]
    for flat in flow.flats:
        flat.group["weight_decay"] = 0.0
    for _ in range(50):
        assert flow.step([torch.zeros_like(flat.copies) for flat in flow.flats]).applied
    for flat, old in zip(flow.flats, before, strict=True):
        assert_same_bits(flat.copies, old, "weights that had no gradient")


def case_nothing_to_do(rank, world_size):
    """C109: groups without elements, alone and beside others: nothing divided by zero, nothing sent but the norms and the padding."""
    for shapes in ([[(0, 4)], [(0,)], [(0, 1), (0,)]], [[(0, 4)], [(64,)], [(90, 4)]]):
        flow, _ = run(Problem(world_size, shapes=shapes), 6, dist, rank)
        assert all(torch.isfinite(flat.copies).all() for flat in flow.flats)


def case_skipped_step_changes_nothing(rank, world_size):
    """NaN and infinity on one rank: every rank skips, names it, and goes on as if the step had not been."""
    problem = Problem(world_size, dtype=torch.bfloat16)
    flow, simulation = problem.flow(dist, rank), problem.simulation()
    for step in range(1, 9):
        gradients = [problem.gradient(worker, step) for worker in range(world_size)]
        if step in (1, 4, 5):
            bad = world_size - 1 if step == 4 else 0
            broken = [g.clone() for g in gradients[rank]]
            if rank == bad:
                broken[0][3] = float("nan") if step == 4 else float("-inf")
            result = flow.step(broken)
            assert not result.applied and result.nonfinite_ranks == (bad,), result
        simulation.step([[g.clone() for g in own] for own in gradients])
        assert flow.step(gradients[rank]).applied
        compare(flow, simulation, f"step {step}:")


def case_masks_are_equal_on_all_ranks(rank, world_size):
    """C110: masks come from what the owner holds and are gathered, not recomputed; a checksum every so many steps finds any difference."""
    flow, _ = _equal_to_simulation(rank, world_size, 12, check_masks_every=2)
    if world_size == 1:
        return
    if rank == 0:
        flow._peek_positions().of[0][0][0] += 1
    else:
        flow._peek_positions()
    try:
        flow.step([torch.zeros_like(flat.copies) for flat in flow.flats])
    except ZipScapeError as error:
        assert "masks differ" in str(error)
    else:
        raise AssertionError("a wrong mask went unseen")


def case_lives_on_one_rank_only_and_trains(rank, world_size):
    """A tensor whose gradient exists on a rank that does not own it: max_age brings it to its owner, and one step stays in its bound."""
    problem = Problem(world_size, densities=(0.1, 0.1, 0.1))
    flow = problem.flow(dist, rank)
    flat = flow.flats[2]
    flat.group["weight_decay"] = 0.0
    start, previous, largest = flat.copies.clone(), flat.copies.clone(), 0.0
    for step in range(1, 101):
        gradient = problem.gradient(rank, step)
        gradient[2] = torch.zeros_like(flat.copies)
        if rank == world_size - 1:
            gradient[2][:flat.layout.partition_numel // 2] = 1e-3           # owned by rank 0
        flow.step(gradient)
        largest = max(largest, float((flat.copies - previous).abs().max()))
        previous = flat.copies.clone()
    moved = (flat.copies - start)[:flat.layout.partition_numel // 2]
    used = moved[:min(len(moved), 360)]
    assert bool((used != 0).all()), f"{int((used == 0).sum())} coordinates never trained"
    assert largest <= flat.group["lr"] * step_bound(flat.age_tables, 0.95) * (1 + 1e-5)


def case_bytes_are_the_formulas(rank, world_size):
    """What is sent follows from shapes alone; counted beneath the transport."""
    problem = Problem(world_size, dtype=torch.bfloat16)
    counter = Counting()
    flow = problem.flow(counter, rank)
    for step in range(1, 4):
        counter.sent.clear()
        flow.step(problem.gradient(rank, step))
        dense = step == 1
        splits = flow.layout.splits(dense)
        values = sum(splits) - splits[rank]
        expected = [("all_gather_into_tensor", 16 * (world_size - 1)), ("all_to_all_single", 2 * values),
                    ("all_gather_into_tensor", 2 * max(splits) * (world_size - 1)),
                    ("all_gather_into_tensor", flow.codec.num_bytes * (world_size - 1))]
        assert counter.sent == (expected if world_size > 1 else []), (step, counter.sent, expected)
    sparse, dense = flow.layout.splits(False), flow.layout.splits(True)
    assert sum(sparse) < 0.25 * sum(dense)


@needs_peers
def case_the_mask_is_gathered_behind_the_next_step(rank, world_size):
    """step() returns on rank 0 before any other rank has begun to send its next mask; nothing else may be under way then."""
    flow, store = Problem(world_size).flow(dist, rank), dist.distributed_c10d._get_default_store()
    run_steps = [Problem(world_size).gradient(rank, step) for step in (1, 2, 3)]
    flow.step(run_steps[0])
    send = flow._send_mask

    def late(message):
        if rank:
            store.wait([f"returned {world_size} {flow.num_steps}"], timedelta(seconds=60))
        send(message)

    flow._send_mask = late
    for gradient in run_steps[1:]:
        flow.step(gradient)
        if rank == 0:
            store.set(f"returned {world_size} {flow.num_steps}", "yes")
            assert flow._positions is None and flow._arriving is not None
    assert len(flow._peek_positions().of[0][0])


def case_a_step_waits_for_the_device_once(rank, world_size):
    """What makes the host wait for a GPU, counted by the names it has in Python: the norm's numbers, and the mask's (in the kernels, one
    wait per rank). Under offload also where the pieces cut the positions."""
    names = ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")
    for offload, signed, expected in ((False, 1 << 31, {"tolist": 1}), (True, 1 << 31, {"tolist": 2}), (True, 0, {"tolist": 2})):
        problem = Problem(world_size, dtype=torch.bfloat16, offload=offload, kernels="best")
        flow, seen = problem.flow(dist, rank), Counter()
        start_mask = functools.partial(quietly, flow._start_mask, seen)
        for step in range(1, 5):
            gradient = problem.gradient(rank, step)
            if step < 3:
                flow.step(gradient)
                continue
            flow._peek_positions()
            seen.clear()
            with ExitStack() as stack:
                for name in names:
                    stack.enter_context(mock.patch.object(torch.Tensor, name, counted(getattr(torch.Tensor, name), seen, name)))
                stack.enter_context(mock.patch.object(flow, "_start_mask", start_mask))
                stack.enter_context(mock.patch.object(sparse_reduce, "SIGNED", signed))
                flow.step(gradient, max_norm=0.004)
            seen.pop("numpy", None)                         # a CPU's square roots, where what passes is ranked
            assert seen == expected, seen


def counted(method, seen, name):

    def call(*args, **kwargs):
        seen[name] += 1
        return method(*args, **kwargs)

    return call


def quietly(function, seen, *args):
    """The CPU's kernels look at tensors as arrays; that is no wait for a device."""
    before = seen.copy()
    function(*args)
    seen.clear()
    seen.update(before)


class Counting:
    """torch.distributed with a list of what was called and how many bytes this rank sent to others."""

    def __init__(self):
        self.sent = []

    def all_gather_into_tensor(self, out, own, **kwargs):
        self.sent.append(("all_gather_into_tensor", own.numel() * own.element_size() * (dist.get_world_size() - 1)))
        return dist.all_gather_into_tensor(out, own, **kwargs)

    def all_to_all_single(self, out, own, *, input_split_sizes, **kwargs):
        num = sum(n for rank, n in enumerate(input_split_sizes) if rank != dist.get_rank())
        self.sent.append(("all_to_all_single", num * own.element_size()))
        return dist.all_to_all_single(out, own, input_split_sizes=input_split_sizes, **kwargs)
