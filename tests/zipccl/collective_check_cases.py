"""Cases run on every rank by test_collectives.py: ranks that do not make the same call, where ``integrity`` asks them before each."""
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.collectives import check
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.errors import CollectiveError
from tests.helpers.bits import assert_same_bits, gaussian
from tests.zipccl.collective_helpers import A2A, AG, RS, begin, carry_out, gathered, launch, runtime


def refused(live, rank, world, op, output, data, **fields) -> str:
    """The error of the call, the same on every rank; the group goes on after it."""
    with pytest.raises(CollectiveError) as error:
        launch(live, op, output, data, **fields)
    texts = [None] * world
    dist.all_gather_object(texts, str(error.value))
    assert len(set(texts)) == 1, texts
    small = gaussian(2000, seed=rank)
    out = torch.empty(world * 2000, dtype=small.dtype)
    carry_out(live, AG, out, small)
    assert_same_bits(out, gathered(small, world), "the call after")
    return texts[0]


def case_other_sizes_are_named(rank, world):
    """C41: more on the last rank, zipped and native sizes and dtypes."""
    last = world - 1
    for integrity in ("checksum", "roundtrip"):
        with runtime(integrity=integrity) as live:
            for size in (4, 4000):
                for dtype in (torch.bfloat16, torch.int64):
                    numel = size + (rank == last)
                    data = torch.ones(numel, dtype=dtype)
                    text = refused(live, rank, world, AG, torch.empty(world * numel, dtype=dtype), data)
                    assert f"rank {last} has {size + 1} elements for rank 0, which takes {size}" in text, text
                    for op in ("all_reduce", "broadcast"):
                        text = refused(live, rank, world, op, data, data, root=0 if op == "broadcast" else None)
                        assert f"rank 0 has {size} elements for rank {last}, which takes {size + 1}" in text and op in text, text
                    text = refused(live, rank, world, RS, torch.empty(numel, dtype=dtype), torch.ones(world * numel, dtype=dtype))
                    assert f"rank 0 has {size} elements for rank {last}, which takes {size + 1}" in text, text


def case_splits_that_do_not_fit_are_named(rank, world):
    """C38: rank 0 sends the last rank less than that takes."""
    with runtime(integrity="checksum") as live:
        sizes_in, sizes_out = [3000] * world, [3000] * world
        if rank == 0:
            sizes_in[-1] = 2000
        data = gaussian(sum(sizes_in), seed=rank)
        text = refused(live, rank, world, A2A, torch.empty(sum(sizes_out), dtype=data.dtype), data, input_splits=tuple(sizes_in),
                       output_splits=tuple(sizes_out))
        assert f"rank 0 has 2000 elements for rank {world - 1}, which takes 3000" in text and "; and" not in text, text
        text = refused(live, rank, world, A2A, torch.empty_like(data), data, input_splits=(1,) * (world + (rank == 0)))
        assert "elements for rank" in text


def case_other_calls_are_named(rank, world):
    with runtime(integrity="checksum") as live:
        data = gaussian(3000, seed=rank)
        text = refused(live, rank, world, "broadcast" if rank == 1 else "all_reduce", data, data, root=0 if rank == 1 else None)
        assert "rank 0: all_reduce" in text and "rank 1: broadcast" in text, text
        text = refused(live, rank, world, "broadcast", data, data, root=rank % 2)
        assert "rank 0: root 0" in text and "rank 1: root 1" in text, text
        mixed = data.to(torch.float16) if rank == 1 else data
        text = refused(live, rank, world, "broadcast", mixed, mixed, root=0)
        assert "rank 0: torch.bfloat16" in text and "rank 1: torch.float16" in text, text
        ops = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
        assert "reduce operation" in refused(live, rank, world, "all_reduce", data, data, reduce_op=ops)


def case_right_calls_pass(rank, world):
    """Every collective, with its frames sealed or proven; lists of other sizes that native takes are not refused."""
    for integrity in ("checksum", "roundtrip"):
        with runtime(integrity=integrity) as live:
            for op, spec in specs().items():
                ours, theirs = (spec.make_call(dist.group.WORLD, 3000, torch.bfloat16, torch.get_default_device()) for _ in range(2))
                work, zipped = begin(live, ours)
                work.wait()
                spec.native(theirs).wait()
                assert zipped
                for got, wanted in zip(ours.outputs, theirs.outputs, strict=True):
                    assert_same_bits(got, wanted, op)
            outs = tuple(torch.empty(3000 + r, dtype=torch.bfloat16) for r in range(world))
            assert launch(live, "all_gather", outs, gaussian(3000 + rank, seed=rank)) is None
            matrix = [[3000 + 100 * i + j for j in range(world)] for i in range(world)]
            data = gaussian(sum(matrix[rank]), seed=rank)
            call = Call(A2A, torch.empty(sum(row[rank] for row in matrix), dtype=data.dtype), data, dist.group.WORLD,
                        input_splits=tuple(matrix[rank]), output_splits=tuple(row[rank] for row in matrix))
            work, zipped = begin(live, call)
            work.wait()
            assert zipped
            everything = [None] * world
            dist.all_gather_object(everything, [piece.cpu() for piece in data.split(matrix[rank])])
            assert_same_bits(call.output.cpu(), torch.cat([everything[peer][rank] for peer in range(world)]), "uneven")


def case_operations_are_compared_by_value(rank, world):
    """Torch hands out a new object for every call; its text holds an address."""
    with runtime(integrity="checksum") as live:
        for _ in range(3):
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM
            carry_out(live, "all_reduce", *[gaussian(30000, seed=rank)] * 2, reduce_op=options.reduceOp)
        assert live.stats.snapshot()["all_reduce"]["calls_zipped"] == 3


def with_nans(op, spec, dtype, numel, sends_one):
    """A call whose outputs hold NaNs, and with ``sends_one`` its input, amid infinities. Of a broadcast rank 1 is the root."""
    call = spec.make_call(dist.group.WORLD, numel, dtype, torch.get_default_device())
    if op == "broadcast":
        call = dataclasses.replace(call, root=1)
    elif call.output is not call.input:
        for t in call.outputs:
            t.fill_(float("nan"))
    if sends_one:
        call.inputs[0].view(-1)[:5] = float("inf")
        call.inputs[-1].view(-1)[-3] = float("nan")
    elif op == "broadcast" and call.rank != 1:
        call.input.fill_(float("nan"))
    return call


def case_nans_are_named_on_all_ranks(rank, world):
    """C50: in what rank 1 sends, zipped or native; what is received into is no matter, nor is Inf. The group goes on."""
    with runtime(nan_check="error") as live:
        for op, spec in specs().items():
            for dtype, numel, zipped in ((torch.bfloat16, 3000, True), (torch.bfloat16, 40, False), (torch.float32, 900, False)):
                call = with_nans(op, spec, dtype, numel, False)
                work, ours = begin(live, call)
                work.wait()
                assert ours == zipped and not any(bool(t.isnan().any()) for t in call.outputs), (op, dtype, numel)
                call = with_nans(op, spec, dtype, numel, rank == 1)
                text = refused(live, rank, world, op, call.output, call.input, root=call.root)
                at = sum(t.numel() for t in call.inputs) - 3
                assert f"NaNs in what ranks are about to send. Got: 1 on rank 1, the first at element {at}. " in text, text
                assert f"of {op}, {dtype}" in text and "on rank 0" not in text, text
        matrix = [[(3000, 0, 500)[(i + j) % 3] for j in range(world)] for i in range(world)]
        data = gaussian(sum(matrix[rank]), seed=rank)
        data[-1:] = float("nan") if rank == 0 else 1.0
        out = torch.empty(sum(row[rank] for row in matrix), dtype=data.dtype)
        assert f"1 on rank 0, the first at element {sum(matrix[0]) - 1}" in refused(
            live, rank, world, A2A, out, data, input_splits=tuple(matrix[rank]), output_splits=tuple(row[rank] for row in matrix))
        everywhere = torch.full((3000,), float("nan"), dtype=torch.float64)
        text = refused(live, rank, world, "all_reduce", everywhere, everywhere)
        assert all(f"3000 on rank {r}" in text for r in range(world)) and "float64" in text, text
        integers = torch.ones(3000, dtype=torch.int64)
        assert launch(live, "all_reduce", integers, integers) is None
        short = mock.Mock(side_effect=[torch.OutOfMemoryError("none left"), (0, 0)])           # the others do not wait for it
        with mock.patch.object(check, "_nans", short if rank == 1 else check._nans):
            text = refused(live, rank, world, "all_reduce", everywhere, everywhere)
        assert "ranks could not look for NaNs. Got: rank 1. Where: the input of all_reduce" in text, text


def case_nans_pass_where_nobody_looks(rank, world):
    """The default; a rank's own is not looked at where a call has no other rank."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    data = torch.full((3000,), float("nan"), dtype=torch.bfloat16)
    with runtime() as live:
        begin(live, Call(AG, torch.empty(world * 3000, dtype=data.dtype), data, dist.group.WORLD))[0].wait()
    with runtime(nan_check="error") as live:
        begin(live, Call(AG, torch.empty_like(data), data, alone))[0].wait()
        text = refused(live, rank, world, AG, torch.empty(world * 3000, dtype=torch.float8_e5m2), data.to(torch.float8_e5m2))
        assert "float8_e5m2" in text, text
