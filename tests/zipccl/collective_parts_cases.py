"""Cases run on every rank by test_collectives.py: reduce-scatters of uneven pieces, and calls that are carried out in parts."""
import contextlib

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.collectives import parts, reduce_scatter_uneven
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.helpers.bits import assert_same_bits, gaussian, random_bits, specials
from tests.zipccl.collective_helpers import (
    AG,
    RS,
    Guarded,
    assert_same_sum,
    flip,
    gathered,
    launch,
    native_reduce_scatter,
    runtime,
    spoiled,
)

UNEVEN, TILE = "reduce_scatter_uneven", 32 * 1024
SPEC = specs(internal=True)[UNEVEN]
MAKERS = (gaussian, specials, random_bits)


def layouts(world):
    """Sizes per owner: one owner, the first, the last; equal; tiny among large; mixed; many tiles."""
    yield [0] * (world - 1) + [5000]
    yield [40000] + [0] * (world - 1)
    yield [3000] * world
    yield [7, 0, 33000, 1, 2048][:world] if world > 2 else [33000, 7]
    yield [1000 * (r + 1) + r for r in range(world)]
    yield [2 * TILE + 5] + [TILE] * (world - 1)


def expected_sum(pieces, rank, world):
    """The documented sum, from every rank's pieces."""
    start = sum(p.numel() for p in pieces[:rank])
    everything = gathered(torch.cat(pieces), world).view(world, -1)[:, start:start + pieces[rank].numel()]
    out = torch.empty(pieces[rank].numel(), dtype=pieces[0].dtype)
    if out.numel():
        sum_in_order(everything, out)
    return out


def carry(live, spec, output, pieces, **fields):
    call = Call(spec.name, output, tuple(pieces), dist.group.WORLD, **fields)
    assert spec.shapes_match(call)
    work = live.run(call, None)
    (spec.native(call) if work is None else work).wait()
    return work is not None


def run(live, output, pieces, **fields):
    """As the seam calls it. Returns whether it was ours."""
    return carry(live, SPEC, output, pieces, **fields)


def case_uneven_bits(rank, world):
    """Also where the pieces lie one after another, are all apart, and where the output is the own piece."""
    with runtime() as live:
        for sizes in layouts(world):
            for make in MAKERS:
                data = make(sum(sizes), seed=7 * sum(sizes) + rank)
                expected = expected_sum(data.split(sizes), rank, world)
                guarded, apart = Guarded(sizes[rank]), [t.clone() for t in data.split(sizes)]
                ours = run(live, guarded.tensor, data.split(sizes))
                assert_same_sum(guarded.tensor, expected, ours, f"{make.__name__} {sizes}")
                guarded.check()
                ours = run(live, apart[rank], apart)
                assert_same_sum(apart[rank], expected, ours, f"{make.__name__} {sizes} in place")
                for r in range(world):
                    assert r == rank or torch.equal(apart[r].view(torch.int16), data.split(sizes)[r].view(torch.int16)), "an input changed"
        row = live.stats.snapshot()[UNEVEN]
        assert row["calls_zipped"] > 20 and row["overflows"] > 0
        assert world > 2 or row["calls_native"] > 0             # random bits: not zipped for a while, and not counted in bytes


def case_uneven_bytes_are_those_that_are_sent(rank, world):
    sent, original = [], reduce_scatter_uneven.exchange_bytes

    def counting(received, pieces, group):
        sent.append(sum(piece.numel() for r, piece in enumerate(pieces) if r != rank))
        return original(received, pieces, group)

    with runtime() as live:
        reduce_scatter_uneven.exchange_bytes = counting
        try:
            for sizes in layouts(world):
                before, data = live.stats.snapshot().get(UNEVEN, {"wire_bytes": 0, "raw_bytes": 0}), gaussian(sum(sizes), seed=rank)
                call = Call(UNEVEN, torch.empty(sizes[rank], dtype=data.dtype), data.split(sizes), dist.group.WORLD)
                assert run(live, call.output, call.inputs)
                row = live.stats.snapshot()[UNEVEN]
                assert row["raw_bytes"] - before["raw_bytes"] == 2 * (sum(sizes) - sizes[rank]) == SPEC.raw_bytes(call)
                assert row["wire_bytes"] - before["wire_bytes"] == sent[-1] + 4 * (world - 1) == SPEC.wire_bytes(call), sizes
        finally:
            reduce_scatter_uneven.exchange_bytes = original
        assert len(sent) == 6


def uneven_bytes_of_a_pair(rank, world):
    """Where two ranks exchange by an all-gather or a broadcast (``PAIRS_GATHER``): who owns everything sends nothing, and rows that are
    padded are no more than a tenth longer."""
    def call(sizes):
        data = gaussian(sum(sizes), seed=rank)
        return Call(UNEVEN, torch.empty(sizes[rank], dtype=data.dtype), data.split(sizes), dist.group.WORLD)

    padded = SPEC.wire_bytes(call([40000] * 2))
    with runtime() as live:
        for sizes, is_padded in (([40000, 0], False), ([0, 40000], False), ([40000, 38000], True), ([40000, 30000], False)):
            before, ours = live.stats.snapshot().get(UNEVEN, {"wire_bytes": 0})["wire_bytes"], call(sizes)
            assert run(live, ours.output, ours.inputs)
            sent = live.stats.snapshot()[UNEVEN]["wire_bytes"] - before
            assert sent == (padded if is_padded else SPEC.wire_bytes(ours)), sizes
            assert sizes[1 - rank] or sent == 4


def case_uneven_native_is_the_same_on_exactly_summable_inputs(rank, world):
    ours, theirs = (SPEC.make_call(dist.group.WORLD, 3000, torch.bfloat16, torch.get_default_device()) for _ in range(2))
    with runtime() as live:
        assert run(live, ours.output, ours.inputs)
    SPEC.native(theirs).wait()
    assert_same_bits(ours.output, theirs.output, UNEVEN)


def case_uneven_under_adaptive(rank, world):
    """The switch measures it against an all_reduce; what it leaves native counts no bytes, which the all_reduce's own row does."""
    with runtime(collectives="adaptive", deterministic_reduce=False) as live:
        sent_zipped = 0
        for sizes in ([300000] * world, [600000] + [0] * (world - 1)):
            data = gaussian(sum(sizes), seed=rank)
            out = torch.empty(sizes[rank], dtype=data.dtype)
            answers = [None] * world
            dist.all_gather_object(answers, run(live, out, data.split(sizes)))
            assert len(set(answers)) == 1, answers
            sent_zipped += 2 * (sum(sizes) - sizes[rank]) if answers[0] else 0
        row = live.stats.snapshot()[UNEVEN]
        assert row["calls_zipped"] + row["calls_native"] == 2 and row["raw_bytes"] == sent_zipped
        assert live.state(dist.group.WORLD, data.device).measured(UNEVEN, torch.bfloat16).costs is not None


def case_to_one_owner_at_2(rank, world):
    """Of two ranks one owns everything: the same sums, measured and counted by itself; what is measured goes one way only."""
    spec = reduce_scatter_uneven.TO_OWNER
    test = spec.make_call(dist.group.WORLD, 3000, torch.bfloat16, torch.get_default_device())
    assert spec.whole_numel(test) == 6000 and [t.numel() for t in test.inputs] == [6000, 0] and test.output.numel() == 6000 * (rank == 0)
    with runtime() as live, runtime(collectives="adaptive", deterministic_reduce=False) as choosing:
        for owner in range(world):
            sizes = [40_000 * (r == owner) for r in range(world)]
            for make in MAKERS:
                data = make(40_000, seed=3 * owner + rank)
                pieces, out = data.split(sizes), torch.empty(sizes[rank], dtype=data.dtype)
                assert reduce_scatter_uneven.spec_for(pieces) is spec
                ours = carry(live, spec, out, pieces)
                assert_same_sum(out, expected_sum(pieces, rank, world), ours, f"{make.__name__} to rank {owner}")
            carry(choosing, spec, out, pieces)
        row = live.stats.snapshot()[spec.name]
        assert row["calls_zipped"] >= 4 and row["overflows"] > 0 and UNEVEN not in live.stats.snapshot()
        measured = choosing.state(dist.group.WORLD, torch.get_default_device())
        assert measured.measured(spec.name, torch.bfloat16).costs is not None
        assert measured.measured(UNEVEN, torch.bfloat16).costs is None
    full = torch.ones(3)
    assert reduce_scatter_uneven.spec_for((full, full)) is reduce_scatter_uneven.spec_for((full, full[:0], full)) is SPEC


def case_uneven_finds_damage_on_the_way(rank, world):
    """The comparison can fail: a bit of a frame, and with checksums the rank it came from."""
    original = reduce_scatter_uneven.exchange_bytes

    def flipping(received, sent, group):
        return spoiled(original(received, sent, group), lambda: flip(received[(rank + 1) % world], -128 - 900, 0x80))

    sizes = [4096] * world
    data, out = gaussian(sum(sizes), seed=rank), torch.empty(4096, dtype=torch.bfloat16)
    expected = expected_sum(data.split(sizes), rank, world)
    reduce_scatter_uneven.exchange_bytes = flipping
    try:
        for integrity in ("off", "checksum"):
            with runtime(integrity=integrity) as live:
                if integrity == "off":
                    with contextlib.suppress(FrameError):
                        run(live, out, data.split(sizes))
                        assert not torch.equal(out, expected), "a flipped bit went unseen"
                else:
                    with pytest.raises(FrameError, match=f"rank {(rank + 1) % world}"):
                        run(live, out, data.split(sizes))
    finally:
        reduce_scatter_uneven.exchange_bytes = original


def parts_of(live, call):
    return parts.cut(specs(internal=True)[call.op], call, live.config)


def case_gathers_in_parts(rank, world):
    """Above the workspace's bound, which one call's frames would exceed: in place and not, tensor and list, some parts overflow."""
    numel = 9 * TILE + 77
    with runtime(max_workspace_bytes=world << 19) as live:
        for turn, make in enumerate(MAKERS):
            data = make(numel, seed=rank + turn)
            data[:TILE] = gaussian(TILE, seed=rank)                 # the first part never overflows
            expected = gathered(data, world)
            out = torch.full((world * numel,), 3.0, dtype=data.dtype)
            assert len(parts_of(live, Call(AG, out, data, dist.group.WORLD))) >= 4
            launch(live, AG, out, data).wait()
            assert_same_bits(out, expected, f"{make.__name__}")
            out.fill_(3.0)
            own = out.view(world, -1)[rank]
            own.copy_(data)
            launch(live, AG, out, own).wait()
            assert_same_bits(out, expected, f"{make.__name__} in place")
            guards = [Guarded(numel) for _ in range(world)]
            launch(live, "all_gather", tuple(g.tensor for g in guards), data).wait()
            for r, guard in enumerate(guards):
                assert_same_bits(guard.tensor, expected.view(world, -1)[r], f"{make.__name__} list")
                guard.check()
        rows = live.stats.snapshot()
        assert rows[AG]["calls_zipped"] + rows[AG]["calls_native"] == 6 and rows[AG]["calls_zipped"] >= 4, rows[AG]
        assert rows[AG]["raw_bytes"] == 6 * 2 * numel * (world - 1) and rows[AG]["overflows"] > 0
        assert rows["all_gather"]["calls_zipped"] + rows["all_gather"]["calls_native"] == 3
        assert live.workspace.held_bytes <= world << 19


def case_reductions_in_parts(rank, world):
    numel = 9 * TILE + 77
    with runtime(max_workspace_bytes=world << 19) as live:
        for turn, make in enumerate((gaussian, random_bits, specials)):
            data = make(world * numel, seed=rank + 5 * turn)
            expected = expected_sum(data.split(numel), rank, world)
            out = torch.empty(numel, dtype=data.dtype)
            assert len(parts_of(live, Call(RS, out, data, dist.group.WORLD))) >= 4
            launch(live, RS, out, data.clone()).wait()
            assert_same_bits(out, expected, make.__name__)
            pieces = tuple(t.clone() for t in data.split(numel))
            launch(live, "reduce_scatter", pieces[rank], pieces).wait()
            assert_same_bits(pieces[rank], expected, f"{make.__name__} list, in place")
            if world == 2 and make is gaussian:
                assert_same_bits(out, native_reduce_scatter(data, world), "native")
        rows = live.stats.snapshot()
        assert rows[RS]["calls_zipped"] + rows[RS]["calls_native"] == 3 and rows[RS]["calls_zipped"] > 0, rows
    with runtime(max_workspace_bytes=world << 19) as live:
        for sizes in ([numel] + [0] * (world - 1), [numel - r * TILE for r in range(world)], [5] * (world - 1) + [numel]):
            data = gaussian(sum(sizes), seed=rank)
            expected = expected_sum(data.split(sizes), rank, world)
            out = Guarded(sizes[rank])
            assert run(live, out.tensor, data.split(sizes))
            assert_same_bits(out.tensor, expected, f"{sizes}")
            out.check()
        assert live.stats.snapshot()[UNEVEN]["calls_zipped"] == 3


def case_parts_in_flight(rank, world):
    """Handles waited for in reverse, one dropped, other calls between; what does not fit in parts goes native."""
    numel = 6 * TILE
    with runtime(max_workspace_bytes=world << 19) as live:
        outs, works, wanted = [], [], []
        for i in range(4):
            data = gaussian(numel if i % 2 else 5000, seed=10 * i + rank)
            wanted.append(gathered(data, world))
            outs.append(torch.empty_like(wanted[i]))
            works.append(launch(live, AG, outs[i], data))
        works[1] = None
        for i in (3, 2, 0):
            works[i].wait()
            assert works[i].is_completed() and works[i].is_success() and works[i].exception() is None
        live.settle(dist.group.WORLD)
        for i in range(4):
            assert_same_bits(outs[i], wanted[i], f"call {i}")
        out = torch.empty(world * numel, dtype=torch.bfloat16)
        future = launch(live, AG, out, data[:1].expand(numel).contiguous()).get_future()
        assert future.wait()[0] is out
        if out.is_cuda:
            return                              # NCCL refuses other strides
        strided = torch.empty(numel, world, dtype=torch.bfloat16).t()
        data = gaussian(numel, seed=rank)
        launch(live, AG, strided, data).wait()
        assert_same_bits(strided.contiguous().view(-1), gathered(data, world), "strided")
