"""Cases run on every rank by test_torch_pg.py: what is built on torch's process groups, on a zipccl world and on a native group."""
import hashlib
import tempfile

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_zipccl
from ds_zipccl.collectives.registry import specs
from tests.helpers.bits import assert_same_bits, gaussian
from tests.helpers.ranks import LeftOut
from tests.zipccl.torch_pg_helpers import AG, count, init_process_group, native_group

assert init_process_group               # used by tests/helpers/ranks.py
BF16, WIDTH = torch.bfloat16, 96
GATHERS = ("all_gather_single", "all_gather_tensor")


class Net(nn.Module):
    """Odd-sized layers, one of which gets no gradient in the backward pass of every other step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(33, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 33)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().pow(2).mean()


def sha(tensors) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(model, dtype, steps=4, optimizer=None) -> list[str]:
    """Exact losses, one per step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator("cpu").manual_seed(7 + dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 33, generator=generator, device="cpu").to(torch.get_default_device(), dtype))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def _ddp(group, dtype, **settings):
    model = DistributedDataParallel(Net().to(dtype), process_group=group, **settings)
    return train(model, dtype), sha(model.parameters())


def case_ddp_equals_native(rank, world):
    """BF16 gradients are zipped where all_reduce can be; 2 ranks: equal bits. Beyond, native's order differs, so the parameters of all
    ranks must be the same and the first loss native's."""
    for dtype in (BF16, torch.float32):
        for settings in ({}, {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True}, {"static_graph": True}):
            before = count("all_reduce")
            zipped, native = _ddp(None, dtype, **settings), _ddp(native_group(), dtype, **settings)
            if world == 2 or dtype != BF16:
                assert zipped == native, f"{dtype} {settings}"
            assert zipped[0][0] == native[0][0]
            _assert_same_on_all_ranks(zipped[1])
            if dtype == BF16 and "all_reduce" in specs():
                assert count("all_reduce") > before, f"nothing was zipped: {ds_zipccl.statistics()['all_reduce']}"


def _assert_same_on_all_ranks(text):
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1


def case_ddp_no_sync_and_unused_parameters(rank, world):
    results = []
    for group in (None, native_group()):
        model = DistributedDataParallel(Net().to(BF16), process_group=group, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.no_sync():
            model(torch.ones(2, 33, dtype=BF16)).backward()
        results.append((train(model, BF16, optimizer=optimizer), sha(model.parameters())))
    assert world > 2 or results[0] == results[1]


def _fsdp(mesh, reduce_dtype):
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    losses = train(model, torch.float32)
    return losses, sha(p.full_tensor() for p in model.parameters()), model


def _native_mesh():
    return DeviceMesh.from_group(native_group(), torch.get_default_device().type)


def case_fsdp2_equals_native(rank, world):
    """BF16 parameter gathers are zipped and exact at any world size; so are BF16 gradients at 2 ranks."""
    for reduce_dtype in (torch.float32, BF16):
        before = count(AG)
        mine = _fsdp(init_device_mesh(torch.get_default_device().type, (world,)), reduce_dtype)
        assert count(AG) > before, f"nothing was zipped: {ds_zipccl.statistics()[AG]}"
        native = _fsdp(_native_mesh(), reduce_dtype)
        if world == 2 or reduce_dtype != BF16:
            assert mine[:2] == native[:2], f"{reduce_dtype}"


def case_hybrid_sharding(rank, world):
    """FSDP2 on a 2D mesh: gathers on one dimension, all_reduce on the other."""
    mesh = init_device_mesh(torch.get_default_device().type, (1, world), mesh_dim_names=("replicate", "shard"))
    assert _fsdp(mesh, torch.float32)[:2] == _fsdp(_native_mesh(), torch.float32)[:2]


def case_distributed_checkpoint(rank, world):
    """DCP: what a zipccl world saved is loaded bit by bit, also into a model on native groups."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    model = _fsdp(init_device_mesh(torch.get_default_device().type, (world,)), torch.float32)[2]
    checkpoint.save(model.state_dict(), checkpoint_id=folder[0])
    expected = sha(p.full_tensor() for p in model.parameters())
    for mesh in (init_device_mesh(torch.get_default_device().type, (world,)), _native_mesh()):
        torch.manual_seed(1)
        fresh = Net()
        for parameter in fresh.parameters():
            nn.init.zeros_(parameter)
        for layer in fresh.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(fresh, mesh=mesh)
        state = fresh.state_dict()
        checkpoint.load(state, checkpoint_id=folder[0])
        fresh.load_state_dict(state)
        assert sha(p.full_tensor() for p in fresh.parameters()) == expected


def _all_gather(x, group):
    gather = next(getattr(functional, name) for name in GATHERS if hasattr(functional, name))
    return gather(x, 0, group)


def _compiled(group):
    """Loss and gradient of a function with an exchange in the middle, compiled and eager."""
    name = group.group_name

    def step(x, weight):
        hidden = torch.tanh(x @ weight)
        exchanged = functional.all_to_all_single_autograd(hidden, None, None, name)
        return (_all_gather(exchanged.detach(), name).sum() + (exchanged * exchanged).sum()).float()

    results = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        weight = gaussian(64 * 128, seed=3).view(64, 128).requires_grad_()
        rows = 64 * dist.get_world_size()
        loss = function(gaussian(rows * 64, seed=dist.get_rank()).view(rows, 64), weight)
        loss.backward()
        assert weight.grad is not None and bool(weight.grad.any()), "silently zero"
        results += [loss.detach(), weight.grad]
    return results


def case_compiled_functional_collectives(rank, world):
    """C52: torch.compile of a model that exchanges activations: equal to eager, gradients not lost; and equal to native."""
    before = count(AG)
    mine, native = _compiled(dist.group.WORLD), _compiled(native_group())
    for got, want in zip(mine, native, strict=True):
        assert_same_bits(got, want, "zipccl and native")
    assert_same_bits(mine[0], mine[2], "loss, eager and compiled")
    assert_same_bits(mine[1], mine[3], "gradient, eager and compiled")
    assert count(AG) == before + 2


def case_compiled_in_place_collectives(rank, world):
    """C52: dist.* calls that fill a caller's buffer, with the group left out and given: same values as eager."""
    def step(x, group=None):
        out = torch.empty(world * x.numel(), dtype=x.dtype, device=x.device)
        dist.all_to_all_single(exchanged := torch.empty_like(x), x, group=group)
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, exchanged, group=group)
        dist.all_reduce(exchanged, group=group)
        return out.float().sum() + exchanged.float().sum()

    x = gaussian(world * 4096, seed=rank)
    for group in (None, dist.group.WORLD):
        torch._dynamo.reset()
        assert_same_bits(torch.compile(step, backend="aot_eager")(x, group), step(x, group), f"group {group}")


def case_compiled_ddp(rank, world):
    """torch.compile around DDP: equal to eager."""
    torch._dynamo.reset()
    eager = DistributedDataParallel(Net().to(BF16))
    model = torch.compile(DistributedDataParallel(Net().to(BF16)), backend="aot_eager")
    assert train(eager, BF16) == train(model, BF16)


def case_the_deepspeed_front_leaves_our_groups_alone(rank, world):
    """Never both fronts on one call: under DeepSpeed a zipccl world compresses by itself, and the section's front says so."""
    try:
        import deepspeed
    except ImportError:
        raise LeftOut("deepspeed is not installed") from None
    from ds_zipccl.backend import deepspeed_comm, deepspeed_hooks
    results = []
    for section in (None, {"enabled": True, "collectives": "always", "min_bytes": 0}):
        config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, "steps_per_print": 10**9}
        model = Net()
        before = count(AG)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                          config=config | ({"zipccl": section} if section else {}))
        generator = torch.Generator("cpu").manual_seed(7 + rank)
        losses = []
        for _ in range(3):
            loss = engine(torch.randn(4, 33, generator=generator, device="cpu").to(engine.device, BF16))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
        results.append((losses, sha(model.parameters())))
        assert count(AG) > before, "the group compressed nothing"
        if section:
            row = deepspeed_comm.live_runtime().stats.snapshot()[AG]
            assert row["calls_zipped"] == 0 and set(row["native_reasons"]) == {"zips_itself"}, row
        engine.destroy()
        deepspeed_hooks.deactivate()
    assert results[0] == results[1]
