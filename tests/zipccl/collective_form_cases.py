"""Cases run on every rank by test_collectives.py: list forms, broadcast, futures; shapes, strides and dtypes of all collectives."""
import pytest
import torch
import torch.distributed as dist

from ds_zipccl.collectives import broadcast, transport
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.errors import FrameError
from tests.helpers.bits import assert_same_bits, gaussian, random_bits, specials
from tests.zipccl.collective_helpers import (
    AG,
    RS,
    SEES_DAMAGE,
    Guarded,
    assert_same_sum,
    begin,
    carry_out,
    everyones_sum,
    gathered,
    launch,
    rank_order_sum,
    runtime,
    spoiled,
)

ROWS = 60                               # goes into world sizes up to 5
SIZES = (0, 1, 1025, 3000, 33000)
MAKERS = (gaussian, specials, random_bits)


def case_all_gather_list_bits(rank, world):
    """Tensors that are parts of one buffer, in order and in reverse, that are not, of several shapes; canaries beside them."""
    with runtime() as live:
        for size in SIZES:
            for make in MAKERS:
                data = make(max(1, size), seed=17 * size + rank)[:size]
                expected = gathered(data, world).view(world, -1) if size else torch.empty(world, 0, dtype=data.dtype)
                guards = [Guarded(size) for _ in range(world)]
                buffers = [torch.full((world, size), 3.0, dtype=data.dtype).unbind(0) for _ in range(2)]
                for outs in (buffers[0], buffers[1][::-1], tuple(g.tensor for g in guards)):
                    carry_out(live, "all_gather", outs, data)
                    for r in range(world):
                        assert_same_bits(outs[r], expected[r], f"{make.__name__} {size} from {r}")
                for guard in guards:
                    guard.check()
        data = gaussian(2500, seed=rank).view(5, 500)
        outs = tuple(torch.empty(shape, dtype=data.dtype) for shape in ((5, 500), (2500,), (2, 1250), (10, 5, 50), (1, 2500))[:world])
        assert carry_out(live, "all_gather", outs, data)
        for out, wanted in zip(outs, gathered(data.view(-1), world).view(world, -1), strict=True):
            assert_same_bits(out.view(-1), wanted, "shapes")
        row = live.stats.snapshot()["all_gather"]
        assert row["calls_zipped"] > 0 and row["overflows"] > 0


def case_all_gather_list_in_place(rank, world):
    """C28: the input is one of the list's tensors."""
    with runtime() as live:
        outs = tuple(random_bits(3000, seed=5 + r) for r in range(world))
        outs[rank].copy_(specials(3000, seed=rank))
        expected = gathered(outs[rank], world).view(world, -1)
        assert carry_out(live, "all_gather", outs, outs[rank])
        for out, wanted in zip(outs, expected, strict=True):
            assert_same_bits(out, wanted, "in place")


def case_reduce_scatter_list_bits(rank, world):
    with runtime() as live:
        for size in SIZES[1:]:
            for make in MAKERS:
                data = make(world * size, seed=31 * size + rank)
                expected, native = rank_order_sum(data, rank, world), world == 2
                backwards = torch.stack(data.split(size)[::-1]).unbind(0)[::-1]
                for pieces in (data.split(size), backwards, tuple(t.clone() for t in data.split(size))):
                    guarded = Guarded(size)
                    ours = carry_out(live, "reduce_scatter", guarded.tensor, pieces)
                    guarded.check()
                    if ours or native:
                        assert_same_sum(guarded.tensor, expected, ours, f"{make.__name__} {size}")
        row = live.stats.snapshot()["reduce_scatter"]
        assert row["calls_zipped"] > 0 and row["overflows"] > 0


def case_lists_of_other_sizes_go_native(rank, world):
    with runtime() as live:
        data, outs = gaussian(3000, seed=rank), tuple(torch.empty(3000 + (r == 1), dtype=torch.bfloat16) for r in range(world))
        assert launch(live, "all_gather", outs, data) is None
        assert launch(live, "all_gather", outs[:1], data) is None
        assert launch(live, "all_gather", (), data) is None
        assert launch(live, "reduce_scatter", data, outs) is None
        assert launch(live, "reduce_scatter", data, tuple(torch.empty(3000) for _ in range(world))) is None
        reasons = {op: live.stats.snapshot()[op]["native_reasons"] for op in ("all_gather", "reduce_scatter")}
        assert reasons == {"all_gather": {"shape": 3}, "reduce_scatter": {"shape": 1, "dtype": 1}}, reasons


def case_broadcast_bits(rank, world):
    with runtime() as live:
        for size in SIZES:
            for make in MAKERS:
                for root in range(world):
                    wanted = make(max(1, size), seed=17 * size + root)[:size]
                    out = Guarded(size)
                    if rank == root:
                        out.tensor.copy_(wanted)
                    carry_out(live, "broadcast", out.tensor, out.tensor, root=root)
                    assert_same_bits(out.tensor, wanted, f"{make.__name__} {size} from {root}")
                    out.check()
        row = live.stats.snapshot()["broadcast"]
        assert row["calls_zipped"] > 0 and row["overflows"] > 0
        sent = live.stats.snapshot()["broadcast"]["raw_bytes"]
        assert sent == sum(3 * 2 * size for size in SIZES), sent                 # each rank is root once for each size and maker


def case_broadcasts_in_flight_from_several_roots(rank, world):
    """Out-of-order waits, some overflow, one handle dropped."""
    with runtime() as live:
        tensors, works, wanted = [], [], []
        for i in range(2 * world):
            root, size = i % world, 2000 * (i + 1)
            wanted.append(random_bits(size, seed=i) if i % 3 == 1 else gaussian(size, seed=i))
            tensors.append(wanted[i].clone() if rank == root else torch.zeros_like(wanted[i]))
            work = launch(live, "broadcast", tensors[i], tensors[i], root=root)
            works.append(None if i == 1 else work)
        del work
        for i in (range(2 * world) if rank % 2 else reversed(range(2 * world))):
            if works[i] is not None:
                works[i].wait()
        live.settle(dist.group.WORLD)
        for i in range(2 * world):
            assert_same_bits(tensors[i], wanted[i], f"call {i}")
        assert live.stats.snapshot()["broadcast"]["overflows"] == len([i for i in range(2 * world) if i % 3 == 1])


def case_strides_of_all_collectives(rank, world):
    """C25: transposed, sliced and channels-last inputs and outputs equal native; nothing beside a sliced output is written. NCCL refuses
    them."""
    with runtime() as live:
        if torch.get_default_device().type == "cuda":
            data = gaussian(world * 4096, seed=rank).view(64, -1).t()
            for op in ("all_reduce", "broadcast"):
                assert launch(live, op, data, data, root=0 if op == "broadcast" else None) is None
                assert live.stats.snapshot()[op]["native_reasons"] == {"layout": 1}
            return
        for op, spec in specs().items():
            for view in (_transposed, _sliced, _channels_last):
                plain, native = _whole_rows(spec), _whole_rows(spec)
                spec.native(native).wait()
                wholes = {}
                strided = {id(t): view(t, wholes) for t in (*plain.inputs, *plain.outputs)}
                output, data = (tuple(strided[id(t)] for t in side) if isinstance(side, tuple) else strided[id(side)]
                                for side in (plain.output, plain.input))
                assert carry_out(live, op, output, data, root=plain.root), op
                for got, wanted in zip(output if isinstance(output, tuple) else (output,), native.outputs, strict=True):
                    assert_same_bits(got.contiguous().view(-1), wanted.view(-1), f"{op} {view.__name__}")
                for whole, inside in wholes.values():
                    assert bool((whole[~inside] == 3.0).all()), f"{op}: written beside the output"


def _whole_rows(spec) -> Call:
    call = spec.make_call(dist.group.WORLD, ROWS * 51, torch.bfloat16, torch.get_default_device())
    if spec.name == "all_reduce":                       # one element short of equal parts
        data = torch.cat([call.input, call.input[:1]])
        return Call(call.op, data, data, call.group)
    return call


def _transposed(t, wholes):
    return t.view(ROWS, -1).t().contiguous().t()


def _channels_last(t, wholes):
    return t.view(ROWS, 3, -1, 17).to(memory_format=torch.channels_last)


def _sliced(t, wholes):
    rows = t.view(ROWS, -1)
    whole = torch.full((ROWS, rows.shape[1] + 10), 3.0, dtype=t.dtype)
    inside = torch.zeros(whole.shape, dtype=torch.bool)
    inside[:, 4:-6] = True
    whole[:, 4:-6] = rows
    wholes[len(wholes)] = whole, inside
    return whole[:, 4:-6]


def case_shapes_of_tensors(rank, world):
    """C58: 0-D to 5-D."""
    with runtime() as live:
        for shape in ((), (1,), (8192,), (2, 4096), (2, 4, 16, 8, 8)):
            data = gaussian(torch.Size(shape).numel(), seed=rank).view(shape)
            for op in ("all_reduce", "broadcast"):
                out = data.clone()
                ours = carry_out(live, op, out, out, root=0 if op == "broadcast" else None)
                assert ours == (data.numel() == 8192), (op, shape)
                wanted = everyones_sum(data.view(-1), world) if op == "all_reduce" else gathered(data.view(-1), world)[:data.numel()]
                if ours or op == "broadcast":
                    assert_same_bits(out.view(-1), wanted, f"{op} {shape}")
            if shape:
                out = torch.empty((world * shape[0], *shape[1:]), dtype=data.dtype)
                carry_out(live, AG, out, data)
                assert_same_bits(out.view(-1), gathered(data.view(-1), world), f"{AG} {shape}")


def case_operations_and_dtypes_that_go_native(rank, world):
    """C29: counted with the reason, and what native makes of them."""
    with runtime() as live:
        op = dist.ReduceOp
        for dtype, reason in ((torch.float32, "dtype"), (torch.float16, "dtype"), (torch.int64, "dtype"), (torch.bfloat16, "reduce_op")):
            for reduce_op in (op.MAX, op.MIN, op.PRODUCT, dist._make_nccl_premul_sum(0.5)):
                for name in ("all_reduce", RS, "reduce_scatter"):
                    data = torch.ones(world * 2048, dtype=dtype)
                    output = data if name == "all_reduce" else torch.empty(2048, dtype=dtype)
                    given = data.split(2048) if name == "reduce_scatter" else data
                    assert launch(live, name, output, given, reduce_op=reduce_op) is None
                    assert live.stats.snapshot()[name]["native_reasons"][reason] > 0


def case_futures(rank, world):
    """get_future: the value is the list of outputs; callbacks run; a call that failed fails its future."""
    with runtime() as live:
        for op, spec in specs().items():
            call = spec.make_call(dist.group.WORLD, 3000, torch.bfloat16, torch.get_default_device())
            twin = spec.make_call(dist.group.WORLD, 3000, torch.bfloat16, torch.get_default_device())
            work, ours = begin(live, call)
            assert ours
            future = work.get_future()
            chained = future.then(lambda done: [t.clone() for t in done.value()])
            del work
            spec.native(twin).wait()
            for got, copied, wanted in zip(future.wait(), chained.wait(), twin.outputs, strict=True):
                assert_same_bits(got, wanted, op)
                assert_same_bits(copied, wanted, op)
        data = gaussian(world * 2000, seed=rank)
        works = [launch(live, "all_reduce", t, t) for t in (data.clone(), data.clone(), data.clone())]
        for future in [work.get_future() for work in works]:
            assert_same_bits(future.wait()[0], everyones_sum(data, world), "in flight")


def case_failed_call_fails_its_future(rank, world):
    original = transport.broadcast_bytes

    def corrupting(data, root, group):
        return spoiled(original(data, root, group), lambda: rank == 1 and data.fill_(7))

    for integrity, words in SEES_DAMAGE:
        with runtime(integrity=integrity) as live:
            broadcast.broadcast_bytes = corrupting
            try:
                data = gaussian(4000, seed=0)
                future = launch(live, "broadcast", data, data, root=0).get_future()
                if rank == 1:
                    with pytest.raises(FrameError, match=words):
                        future.wait()
                else:
                    future.wait()
            finally:
                broadcast.broadcast_bytes = original
            carry_out(live, "broadcast", data, data, root=0)
            assert_same_bits(data, gaussian(4000, seed=0), f"the call after, integrity {integrity}")
