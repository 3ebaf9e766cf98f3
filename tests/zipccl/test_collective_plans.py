"""The pure parts of the collectives: what an all-to-all sends where, for any number of ranks (C43), and what every spec says of itself."""
import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ds_zipccl.backend import policy
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import layout
from ds_zipccl.collectives import pairs, parts, runtime, streams, transport, views
from ds_zipccl.collectives.capacity import Capacity
from ds_zipccl.collectives.check import check
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import rank_order

assert runtime                          # importing it registers the collectives
SPECS = list(specs().values())
BF = torch.bfloat16


class FakeGroup:
    """Of ``size`` ranks, seen from one of them."""

    def __init__(self, rank, size):
        self.rank, self.size = (lambda: rank), (lambda: size)


def numel_of(sender: int, receiver: int, world: int) -> int:
    """Nothing, too little for a frame, one of few sizes or one of many."""
    kind = (sender * 7 + receiver * 3) % 5
    return (0, 5, 4096, 4096, 3000 + (sender * world + receiver) % 1000)[kind]


def room_of(numel: int) -> tuple:
    capacity = Capacity.of(numel, 2, 0.0)
    return capacity, capacity.next_call()


def layout_of(numel: int, spill: int):
    return layout(BY_TORCH[BF], numel, spill_per_tile=spill)


def plan_of(rank: int, world: int, outgoing: bool) -> pairs.Side:
    numels = [numel_of(rank, peer, world) if outgoing else numel_of(peer, rank, world) for peer in range(world)]
    return pairs.plan(numels, rank, 2, [room_of(n) if peer != rank and n >= 1000 else None for peer, n in enumerate(numels)], layout_of)


@pytest.mark.parametrize("world, ranks", [(2, 2), (3, 3), (64, 64), (257, 257), (1024, 6)])
def test_both_ends_of_every_pair_plan_the_same_and_pieces_tile_the_buffer(world, ranks):
    """C43: disjoint and complete, also beyond 256 ranks. Of 1024 ranks, six that are spread over them."""
    chosen = [round(i * (world - 1) / (ranks - 1)) for i in range(ranks)]
    sent = {rank: plan_of(rank, world, True) for rank in chosen}
    received = {rank: plan_of(rank, world, False) for rank in chosen}
    for i in chosen:
        for j in chosen:
            there, here = sent[i].pieces[j], received[j].pieces[i]
            assert (there.numel, there.num_bytes, there.codec) == (here.numel, here.num_bytes, here.codec), (i, j)
        for side in (sent[i], received[i]):
            assert len(side.pieces) == world and side.pieces[i].num_bytes == 0 and side.pieces[i].codec is None
            end = 0
            for start, piece in zip(side.offsets(), side.pieces, strict=True):
                assert start == end
                end += piece.num_bytes
            assert end == side.wire_bytes
            in_runs = [peer for run in side.runs for peer in run.peers]
            assert in_runs == [peer for peer, piece in enumerate(side.pieces) if piece.codec is not None]
            assert all(side.pieces[peer].codec == run.codec for run in side.runs for peer in run.peers)
            assert side.frame_bytes == sum(side.pieces[peer].num_bytes for peer in in_runs)
            assert [sum(side.word_counts), min(side.word_counts)] == [len(in_runs), 0]


def test_equal_pieces_are_two_runs_around_the_own():
    side = pairs.plan([4096] * 8, 3, 2, [room_of(4096) if peer != 3 else None for peer in range(8)], layout_of)
    assert [(run.first, run.count) for run in side.runs] == [(0, 3), (4, 4)]


def test_a_piece_whose_class_gave_up_or_grew_too_large_goes_raw():
    gave_up, huge = Capacity.of(4096, 2, 0.0), Capacity.of(4096, 2, 0.0)
    gave_up.calls_left_out, huge.spill_per_tile = 3, 5000
    classes = [None, gave_up, huge, Capacity.of(4096, 2, 0.0)]
    side = pairs.plan([4096] * 4, 0, 2, [c and (c, c.next_call()) for c in classes], layout_of)
    assert [piece.codec is None for piece in side.pieces] == [True, True, True, False]
    assert [piece.num_bytes for piece in side.pieces[:3]] == [0, 8192, 8192]
    assert gave_up.calls_left_out == 2


def test_the_rule_for_pieces_is_that_of_whole_tensors():
    config = ZipcclConfig(min_bytes=1 << 20, max_workspace_bytes=1 << 24)
    reasons = {n: pairs.reason_for_raw(n, BF, 4 * n, config) for n in (0, 131071, 131072, 1 << 20, (1 << 20) + 1)}
    assert list(reasons.values()) == ["min_bytes", "min_bytes", None, None, "max_workspace_bytes"]
    assert pairs.reason_for_raw(850, BF, 3400, ZipcclConfig(min_bytes=0)) == "no_gain"


def test_parts_that_adjoin_are_found_and_others_are_not():
    buffer, other = torch.arange(40, dtype=torch.uint8), torch.arange(40, dtype=torch.uint8)
    parts = list(buffer[5:35].split(10))
    whole = transport.adjoining([parts[0], other[:0], *parts[1:]])
    assert whole.data_ptr() == parts[0].data_ptr() and torch.equal(whole, buffer[5:35])
    assert transport.adjoining([other[:0], buffer[:0]]).numel() == 0
    assert transport.adjoining([parts[0], other[15:25]]) is None, "offsets adjoin, in another buffer"
    assert transport.adjoining([parts[1], parts[0]]) is None and transport.adjoining([parts[0], parts[2]]) is None
    rows = views.as_rows(parts)
    assert rows.shape == (3, 10) and rows.data_ptr() == parts[0].data_ptr() and torch.equal(rows.view(-1), whole)
    assert views.as_rows([parts[0], other[15:25]]) is None and views.as_rows([parts[0], parts[2]]) is None
    assert views.as_rows([buffer[:10], buffer[10:19]]) is None


def test_bus_factors_are_those_of_nccl_tests():
    eight = {spec.name: spec.bus_factor(8) for spec in SPECS}
    ring, twice = 7 / 8, 2 * 7 / 8
    assert eight == {"all_gather_into_tensor": ring, "all_gather": ring, "reduce_scatter_tensor": ring, "reduce_scatter": ring,
                     "all_reduce": twice, "all_to_all_single": ring, "all_to_all": ring, "broadcast": 1.0}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_every_spec_says_what_it_sends(spec, world):
    numel = 1 << 17
    for rank in range(world):
        call = spec.make_call(FakeGroup(rank, world), numel, BF, "cpu")
        assert spec.shapes_match(call)
        assert spec.row_numel(call) == numel and abs(spec.whole_numel(call) - numel * (1 if spec.rooted else world)) <= 1
        raw, wire = spec.raw_bytes(call), spec.wire_bytes(call)
        if spec.rooted:
            assert (raw > 0) == (wire > 0) == (rank == call.root)
        else:
            assert abs(raw - 2 * numel * (world - 1) * (2 if spec.name == "all_reduce" else 1)) <= 4
        assert not raw or 1.33 < raw / wire < 1.52


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_inputs_are_repeatable_and_sums_exact_in_any_order(spec):
    world = 8
    calls = [[spec.make_call(FakeGroup(rank, world), 3000, BF, "cpu") for rank in range(world)] for _ in range(2)]
    inputs = [[torch.cat([t.view(-1) for t in call.inputs]) for call in made] for made in calls]
    assert all(torch.equal(a, b) for a, b in zip(*inputs, strict=True))
    assert len({tuple(t[:50].tolist()) for t in inputs[0]}) == world, "ranks have the same data"
    if spec.reduces:
        forwards, backwards = (sum(order).bfloat16() for order in (inputs[0], inputs[0][::-1]))
        exact = torch.stack(inputs[0]).double().sum(0)
        assert torch.equal(forwards.double(), exact) and torch.equal(backwards.double(), exact)


def test_calls_have_splits_and_roots():
    data = torch.empty(6, dtype=BF)
    single = specs()["all_to_all_single"]

    def fits(**fields):
        return single.shapes_match(Call(single.name, data, data, FakeGroup(0, 2), **fields))

    assert fits() and fits(input_splits=(3, 3)) and fits(input_splits=(2, 4), output_splits=(2, 4))
    assert not fits(input_splits=(2, 4)), "the own piece has two sizes"
    assert not any(fits(input_splits=bad) for bad in ((3,), (3, 2), (4, -1, 3), (7, -1)))
    broadcast = specs()["broadcast"]
    assert [broadcast.shapes_match(Call("broadcast", data, data, FakeGroup(0, 2), root=root)) for root in (0, 1, 2, -1, None)] \
        == [True, True, False, False, False]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 10, 16])
def test_averages_of_large_values_are_finite_and_one_rounding_from_exact(world):
    """C31: also where the sum itself would not fit into fp32."""
    largest = torch.finfo(torch.bfloat16).max
    generator = torch.Generator().manual_seed(world)
    rows = (torch.randn(world, 5000, generator=generator) * 10.0 ** torch.randint(-38, 38, (world, 5000), generator=generator)).bfloat16()
    rows[:, ::3] = largest
    rows[-1, ::6] = -largest
    out = torch.empty(5000, dtype=torch.bfloat16)
    rank_order.sum_in_order(rows, out, world)
    exact = rows.double().sum(0) / world
    slack = rows.double().abs().sum(0) * 2.0**-23 + 1e-40
    assert bool(out.isfinite().all()) and bool(((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + slack).all())
    if world == 1:
        assert torch.equal(out.view(torch.int16), rows[0].view(torch.int16))


def fake_call(spec, rank, world, row_numel, device):
    """With tensors that have sizes and places, and no memory."""
    with FakeTensorMode():
        output, data = spec.make_tensors(rank, world, row_numel, BF, torch.device("cpu"))
        if device != "cpu":
            made = {id(t): torch.empty(t.shape, dtype=BF, device=device) for side in (output, data) for t in (
                side if isinstance(side, tuple) else (side,))}
            output, data = (tuple(made[id(t)] for t in side) if isinstance(side, tuple) else made[id(side)] for side in (output, data))
    return Call(spec.name, output, data, FakeGroup(rank, world), root=world - 1 if spec.rooted else None)


@pytest.mark.parametrize("spec", list(specs(internal=True).values()), ids=lambda spec: spec.name)
def test_more_than_2_to_the_31_elements(spec):
    """Sizes, bytes and parts of calls that no test machine can hold."""
    rank, world, row = 1, 3, (1 << 31) + 4097
    call = fake_call(spec, rank, world, row, "cpu")
    config = ZipcclConfig(enabled=True, collectives="always", min_bytes=0, max_workspace_bytes=1 << 40)
    assert policy.reason_for_native(config, spec, call) is None
    assert spec.row_numel(call) > 1 << 31 and spec.whole_numel(call) >= spec.row_numel(call)
    sent = rank == call.root or not spec.rooted
    assert 1.25 * spec.wire_bytes(call) < spec.raw_bytes(call) or not sent and spec.raw_bytes(call) == spec.wire_bytes(call) == 0
    if spec.cut is None:
        return
    small = ZipcclConfig(enabled=True, collectives="always", min_bytes=0, max_workspace_bytes=1 << 32)
    pieces = parts.cut(spec, call, small)
    assert len(pieces) > 10
    for side, whole in (("outputs", call.outputs), ("inputs", call.inputs)):
        places = sorted((t.untyped_storage()._cdata, t.storage_offset(), t.numel())
                        for piece in pieces for t in getattr(piece, side) if t.numel())
        assert sum(numel for _, _, numel in places) == sum(t.numel() for t in whole)
        for (storage, start, numel), (other, after, _) in itertools.pairwise(places):
            assert storage != other or start + numel == after, "parts overlap, or leave something out"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_calls_that_a_cuda_graph_captures_go_native(spec, monkeypatch):
    call, config = fake_call(spec, 0, 2, 4096, "cuda"), ZipcclConfig(enabled=True, collectives="always", min_bytes=0)
    for capturing, reason in ((False, None), (True, "graph_capture")):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)            # noqa: B023
        assert policy.reason_for_native(config, spec, call) == reason
    monkeypatch.setattr(streams, "is_capturing", lambda: True)
    check(spec, call, None)                     # with integrity: asks nobody
