"""Cases run on every rank by test_collectives.py: every collective through deepspeed.comm, in place of its own communication object's."""
import contextlib
import gc
import os
import weakref

import deepspeed
import deepspeed.comm as ds
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from deepspeed.moe.sharded_moe import _AllToAll

from ds_zipccl.backend import deepspeed_comm
from ds_zipccl.collectives.registry import specs
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.helpers.bits import assert_same_bits, gaussian
from tests.zipccl.collective_helpers import A2A, runtime

CALLS = {                                                           # as DeepSpeed's code spells them
    "all_gather_into_tensor": lambda c, **kw: ds.all_gather_into_tensor(c.output, c.input, **kw),
    "all_gather": lambda c, **kw: ds.all_gather(list(c.output), c.input, **kw),
    "reduce_scatter_tensor": lambda c, **kw: ds.reduce_scatter_tensor(c.output, c.input, **kw),
    "reduce_scatter": lambda c, **kw: ds.reduce_scatter(c.output, list(c.input), **kw),
    "all_reduce": lambda c, **kw: ds.all_reduce(c.output, **kw),
    "broadcast": lambda c, **kw: ds.broadcast(c.output, dist.get_global_rank(kw.get("group") or dist.group.WORLD, c.root), **kw),
    "all_to_all_single": lambda c, **kw: ds.all_to_all_single(c.output, c.input, **kw),
    "all_to_all": lambda c, **kw: ds.all_to_all(list(c.output), list(c.input), **kw),
}


@contextlib.contextmanager
def under_deepspeed(**settings):
    with runtime(**settings) as live:
        deepspeed.init_distributed(dist.get_backend(), verbose=False)
        deepspeed_comm.install(live)
        try:
            yield live
        finally:
            deepspeed_comm.uninstall()


def zipped(live, op) -> int:
    return live.stats.snapshot().get(op, {"calls_zipped": 0})["calls_zipped"]


def case_every_collective_of_deepspeed(rank, world):
    """Sync and async, on the world and on a group of two ranks; C59: DeepSpeed's own arguments are taken."""
    last_two = dist.new_group([world - 2, world - 1])
    with under_deepspeed() as live:
        for op, spec in specs().items():
            for group in (dist.group.WORLD, last_two):
                if dist.get_rank(group) < 0:
                    continue
                for async_op in (False, True):
                    ours, theirs = (spec.make_call(group, 3000, torch.bfloat16, torch.get_default_device()) for _ in range(2))
                    before = zipped(live, op)
                    work = CALLS[op](ours, group=group, async_op=async_op, prof=True, log_name=op, debug="here")
                    if async_op:
                        work.wait()
                    spec.native(theirs).wait()
                    assert zipped(live, op) == before + 1 and (work is None) == (not async_op), op
                    for got, wanted in zip(ours.outputs, theirs.outputs, strict=True):
                        assert_same_bits(got, wanted, op)


def case_uneven_all_to_all_of_deepspeed(rank, world):
    """Split sizes count rows of dim 0, by position and by name."""
    with under_deepspeed() as live:
        send, receive = [20 + 10 * peer for peer in range(world)], [20 + 10 * rank] * world
        data = gaussian(sum(send) * 128, seed=rank).view(-1, 8, 16)
        outs = [torch.empty(sum(receive), 8, 16, dtype=data.dtype) for _ in range(3)]
        ds.all_to_all_single(outs[0], data, receive, send)
        ds.all_to_all_single(output=outs[1], tensor=data, output_split_sizes=receive, input_split_sizes=send, async_op=True).wait()
        dist.all_to_all_single(outs[2], data, receive, send)
        for out in outs[:2]:
            assert_same_bits(out, outs[2])
        assert zipped(live, A2A) == 2


def case_moe_exchange_under_autograd(rank, world):
    """C26: DeepSpeed's MoE exchange forward and backward; the gradient of a sum is expanded."""
    with under_deepspeed() as live:
        data = gaussian(world * 4 * 512, seed=rank).view(world, 4, 512).requires_grad_()
        out = _AllToAll.apply(dist.group.WORLD, data)
        expected = torch.empty_like(data)
        dist.all_to_all_single(expected, data.detach())
        assert_same_bits(out.detach(), expected.detach(), "forward")
        (out.sum() * (rank + 1)).backward()
        wanted = torch.stack([torch.full((4, 512), float(peer + 1), dtype=data.dtype) for peer in range(world)])
        assert_same_bits(data.grad, wanted, "backward")
        assert zipped(live, A2A) == 2


def case_gradients_pass_by_in_place_calls(rank, world):
    """Tensors that need gradients, as parameters at initialization do."""
    with under_deepspeed() as live:
        parameter = torch.nn.Parameter(gaussian(world * 3000, seed=rank))
        ds.broadcast(parameter.data, 0)
        assert_same_bits(parameter.detach(), gaussian(world * 3000, seed=0), "broadcast")
        with torch.no_grad():
            ds.all_reduce(parameter)
        assert torch.equal(parameter.detach(), (gaussian(world * 3000, seed=0).float() * world).bfloat16())
        assert zipped(live, "all_reduce") == 1 and zipped(live, "broadcast") == 1


def case_wrong_root_fails_as_native(rank, world):
    group = dist.new_group([0, 1])
    with under_deepspeed() as live:
        if rank < 2 and world > 2:
            data = gaussian(3000, seed=rank)
            with pytest.raises(ValueError, match="not part of group|Global rank"):
                ds.broadcast(data, world - 1, group=group)
            assert live.stats.snapshot()["broadcast"]["native_reasons"] == {"shape": 1}


def case_ranks_outside_take_no_part(rank, world):
    group = dist.new_group([0, 1])
    with under_deepspeed() as live:
        if world > 2 and rank == 2:
            for op, spec in specs().items():
                call = spec.make_call(dist.group.WORLD, 3000, torch.bfloat16, torch.get_default_device())
                if op != "broadcast":
                    CALLS[op](call, group=group)
                    assert live.stats.snapshot()[op]["native_reasons"] == {"not_in_group": 1}, op


def case_functional_collectives_pass_by(rank, world):
    """C35: they do not go through DeepSpeed's object; equal to native along every dimension, while ours are in flight too."""
    with under_deepspeed() as live:
        data = gaussian(world * 64 * 64, seed=rank).view(world * 64, 64)
        out = torch.empty(world * data.numel(), dtype=data.dtype)
        work = ds.all_gather_into_tensor(out, data.view(-1), async_op=True)
        small = torch.arange(world * 60, dtype=torch.float32).remainder(7).bfloat16().expand(world * 60, -1).contiguous()
        for dim in (0, 1):
            got = functional.wait_tensor(functional.reduce_scatter_tensor(small, "sum", dim, dist.group.WORLD))
            assert_same_bits(got.contiguous(), small.chunk(world, dim)[rank].mul(world).contiguous(), f"dim {dim}")
        gathered = functional.wait_tensor(functional.all_gather_tensor(data, 0, dist.group.WORLD))
        work.wait()
        assert_same_bits(out, gathered.view(-1), "both gathers")
        assert zipped(live, "reduce_scatter_tensor") == 0 and zipped(live, "all_gather_into_tensor") == 1


def case_native_reasons_of_deepspeed_calls(rank, world):
    """What is not eligible is native, equal, and counted with its reason; DeepSpeed's reduce operations are understood."""
    with under_deepspeed(min_bytes=4096) as live:
        for dtype, op, reason in ((torch.float32, ds.ReduceOp.SUM, "dtype"), (torch.bfloat16, ds.ReduceOp.MAX, "reduce_op"),
                                  (torch.bfloat16, ds.ReduceOp.SUM, "")):
            data = torch.arange(world * 3000, dtype=torch.float32).remainder(7).to(dtype) + rank
            native = data.clone()
            dist.all_reduce(native, op=dist.ReduceOp.MAX if op == ds.ReduceOp.MAX else dist.ReduceOp.SUM)
            ds.all_reduce(data, op=op)
            assert_same_bits(data, native, reason)
            row = live.stats.snapshot()["all_reduce"]
            assert row["native_reasons"].get(reason, 0) == 1 if reason else row["calls_zipped"] == 1, row
        ds.all_reduce(torch.ones(5, dtype=torch.bfloat16))
        ds.broadcast(torch.zeros(5000, dtype=torch.uint8), 0)
        assert live.stats.snapshot()["all_reduce"]["native_reasons"]["min_bytes"] == 1
        assert live.stats.snapshot()["broadcast"]["native_reasons"] == {"dtype": 1}


def case_point_to_point_beside_an_all_reduce(rank, world):
    """One rank waits for the all_reduce before it sends, the other receives before it waits: the second phase needs both."""
    with under_deepspeed() as live:
        group = dist.new_group(list(range(world)))
        data = gaussian(1 << 16, seed=rank)
        expected = data.clone()
        work = ds.all_reduce(data, group=group, async_op=True)
        message = torch.full((4,), float(rank))
        if rank == 0:
            for peer in range(1, world):
                ds.recv(message, peer)
                assert message[0] == peer
            work.wait()
        else:
            work.wait()
            ds.send(message, 0)
        parts = [torch.empty_like(expected) for _ in range(world)]
        dist.all_gather(parts, expected)
        total = torch.empty_like(expected)
        sum_in_order(parts, total)
        assert_same_bits(data, total, "sum")
        assert zipped(live, "all_reduce") == 1


def case_groups_destroyed_by_torchs_own_function(rank, world):
    """Past DeepSpeed and us: nothing of them stays."""
    device, footprints = torch.get_default_device(), []
    with under_deepspeed() as live:
        for seed in range(6):
            group = dist.new_group(list(range(world)))
            data, out = gaussian(3000, seed=seed + rank), torch.empty(world * 3000, dtype=torch.bfloat16)
            ds.all_gather_into_tensor(out, data, group=group)
            ds.all_gather_into_tensor(out[:2 * world], data[:2], group=group)           # native, and remembered
            assert_same_bits(out.view(world, -1)[rank][9:], data[9:], "own row")
            state = weakref.ref(live.state(group, device))
            dist.barrier(group)
            dist.destroy_process_group(group)
            del group
            gc.collect()
            assert state() is None or state().group is None
            footprints.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        assert zipped(live, "all_gather_into_tensor") == 6
        dist.barrier()
    assert footprints[-1][0] <= footprints[2][0] + 2 and footprints[-1][1] <= footprints[2][1] + 4, footprints
