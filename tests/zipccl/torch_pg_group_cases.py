"""Cases run on every rank by test_torch_pg.py: groups of backend "zipccl" come, differ and go."""
import contextlib
import gc
import itertools
import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import ds_zipccl
from ds_zipccl.backend import torch_session
from ds_zipccl.errors import CollectiveError
from tests.helpers.bits import assert_same_bits, gaussian
from tests.zipccl.torch_pg_helpers import AG, ALL_GATHER, ZIPPED, count, init_process_group
from zipscape.errors import ConfigError, HandshakeError

assert init_process_group               # used by tests/helpers/ranks.py
BF16 = torch.bfloat16


def rounds(world=2):
    """Over NCCL each makes two to four communicators, of half a second each."""
    return (20 if world == 2 else 4) if torch.get_default_device().type == "cpu" else 6


def gather_is_right(group, seed=0):
    """A zipped gather on ``group``, seen from a member."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    out = torch.empty(world, 3000, dtype=BF16)
    ALL_GATHER(out.view(-1), gaussian(3000, seed=seed + rank), group=group)
    for peer in range(world):
        assert_same_bits(out[peer], gaussian(3000, seed=seed + peer), f"row {peer} of {world}")


def case_subgroups(rank, world):
    """A pair, a group of one, and groups without this rank; the world goes on beside them."""
    for round_ in range(2):
        before = count(AG)
        pair, alone, others = dist.new_group([0, world - 1]), dist.new_group([0]), dist.new_group(list(range(1, world)))
        members = {"pair": rank in (0, world - 1), "alone": rank == 0, "others": rank > 0}
        for (name, member), group in zip(members.items(), (pair, alone, others), strict=True):
            if member:
                assert dist.get_backend(group) == "zipccl"
                gather_is_right(group, seed=100 * round_)
            else:
                assert group is dist.GroupMember.NON_GROUP_MEMBER, name
                out = torch.zeros(1, dtype=BF16)
                assert ALL_GATHER(out, out, group=group) is None        # torch warns and does nothing
            gather_is_right(None)
        others_size = world - 1
        assert count(AG) == before + 3 + members["pair"] + (members["others"] and others_size > 1)
        for member, group in zip(members.values(), (pair, alone, others), strict=True):
            if member:
                dist.destroy_process_group(group)


def case_subgroups_of_every_rank(rank, world):
    mine, groups = dist.new_subgroups(group_size=1)
    gather_is_right(mine)
    assert len(groups) == world
    by_enumeration, _ = dist.new_subgroups_by_enumeration([list(range(world))])
    gather_is_right(by_enumeration)


def case_device_mesh(rank, world):
    """1D and 2D; a dimension of one rank too."""
    device = torch.get_default_device().type
    shapes = [(world,), (1, world), (world, 1)] + ([(2, world // 2)] if world > 2 and world % 2 == 0 else [])
    for shape in shapes:
        mesh = init_device_mesh(device, shape, mesh_dim_names=tuple("ab"[:len(shape)]))
        for name in mesh.mesh_dim_names:
            group = mesh.get_group(name)
            assert dist.get_backend(group) == "zipccl"
            gather_is_right(group)
        gather_is_right(mesh[mesh.mesh_dim_names[-1]].get_group())


def case_dtensor(rank, world):
    """Redistribution between placements: functional collectives under the hood."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh(torch.get_default_device().type, (world,))
    whole = gaussian(world * 64 * 96, seed=5).view(world * 64, 96)
    zipped = count(AG)
    for dim in (0, 1):
        sharded = distribute_tensor(whole, mesh, [Shard(dim)])
        assert_same_bits(sharded.full_tensor(), whole, f"full tensor from dim {dim}")
        assert_same_bits(sharded.redistribute(mesh, [Shard(1 - dim)]).full_tensor(), whole, f"dim {dim} to {1 - dim}")
        assert_same_bits(sharded.redistribute(mesh, [Replicate()]).to_local(), whole, "replicated")
    assert count(AG) > zipped


def case_configure_comes_too_late(rank, world):
    with pytest.raises(ConfigError, match="too late"):
        ds_zipccl.configure(min_bytes=0)


def case_a_dropped_handle_is_completed_by_destroy(rank, world):
    group = dist.new_group()
    out, data = torch.empty(world, 3000, dtype=BF16), gaussian(3000, seed=rank)
    ALL_GATHER(out.view(-1), data, group=group, async_op=True)
    dist.destroy_process_group(group)
    assert_same_bits(out[rank], data, "own row")


def case_abort_is_prompt(rank, world):
    """A call that the other ranks never make: its rank is free at once, where the group would wait for its timeout."""
    group = dist.new_group(timeout=timedelta(seconds=120))
    gather_is_right(group)
    start = time.monotonic()
    out = torch.empty(world * 3000, dtype=BF16)
    work = ALL_GATHER(out, gaussian(3000, seed=rank), group=group, async_op=True) if rank == 0 else None
    c10d._abort_process_group(group)
    for _ in range(2):
        with pytest.raises(CollectiveError, match="aborted") if work else contextlib.nullcontext():
            work and work.wait()
    assert time.monotonic() - start < 40
    gather_is_right(None)


def _footprint() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def case_groups_come_and_go(rank, world):
    """C92: 20 times created, used, destroyed with calls in flight: in seconds, and nothing stays behind."""
    footprints, start = [], time.monotonic()
    for round_ in range(rounds()):
        group = dist.new_group()
        gather_is_right(group, seed=round_)
        ALL_GATHER(torch.empty(world * 3000, dtype=BF16), gaussian(3000, seed=rank), group=group, async_op=True)
        dist.destroy_process_group(group)
        del group
        if round_ in (2, rounds() - 1):
            footprints.append(_footprint())
    assert time.monotonic() - start < 60
    assert footprints[1][0] <= footprints[0][0] + 2 and footprints[1][1] <= footprints[0][1] + 4, footprints


@contextlib.contextmanager
def worlds(rank, world):
    """Ends the present world, gives a function that makes new ones, each with a store of its own, and leaves one behind."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    number = itertools.count()

    def make(backend="zipccl", timeout_s=60, absent=None):
        path = os.path.join(folder[0], f"store{next(number)}")
        if rank == absent:
            return
        store = dist.FileStore(path, world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))

    dist.destroy_process_group()
    torch_session._configured = None
    try:
        yield make
    finally:
        torch_session._configured = None
        os.environ.pop("ZIPCCL_CONFIG", None)
        if not dist.is_initialized():
            c10d._world.group_count = 0                 # torch's names follow the attempts, and a rank may have made fewer
            ds_zipccl.configure(**ZIPPED)
            make()


def case_worlds_come_and_go(rank, world):
    """C92; and a later world's group of an old name has other members."""
    with worlds(rank, world) as make:
        footprints = []
        for round_ in range(rounds(world)):
            ds_zipccl.configure(**ZIPPED)
            make()
            members = [0, 1 + round_ % (world - 1)]
            group = dist.new_group(members)
            if rank in members:
                gather_is_right(group, seed=round_)
            gather_is_right(None, seed=round_)
            dist.destroy_process_group()
            assert torch_session._current is None and count(AG) == 1 + (rank in members)
            del group
            if round_ in (2, rounds(world) - 1):
                footprints.append(_footprint())
        assert footprints[1][0] <= footprints[0][0] + 2 and footprints[1][1] <= footprints[0][1] + 4, footprints


def case_a_zipccl_group_in_a_native_world(rank, world):
    with worlds(rank, world) as make:
        ds_zipccl.configure(**ZIPPED)
        make("nccl" if torch.get_default_device().type == "cuda" else "gloo")
        group = dist.new_group(backend="zipccl")
        assert dist.get_backend() != "zipccl" and dist.get_backend(group) == "zipccl"
        gather_is_right(group)
        assert count(AG) == 1
        dist.destroy_process_group()
        assert torch_session._current is None


def case_settings_come_from_the_environment(rank, world):
    """And choosing the backend switches it on; "enabled": false makes everything native."""
    with worlds(rank, world) as make:
        for section, zipped in (({"collectives": "always", "min_bytes": 1 << 30}, 0), ({"collectives": "always", "min_bytes": 5000}, 1),
                                ({"enabled": False, "collectives": "always", "min_bytes": 5000}, 0)):
            os.environ["ZIPCCL_CONFIG"] = json.dumps(section)
            make()
            gather_is_right(None)
            dist.destroy_process_group()
            assert count(AG) == zipped, section


def case_ranks_must_agree(rank, world):
    """Settings that differ, a wrong section on one rank, and a rank that never comes: the same error on all, soon, and nothing stays."""
    with worlds(rank, world) as make:
        for section, message in (({"min_bytes": 1000 + rank}, "config_hash differs"),
                                 ({"min_bytes": -1} if rank == 1 else {}, "min_bytes = -1"),
                                 ("no such file" if rank == 1 else {}, "rank 1 reported an error")):
            os.environ["ZIPCCL_CONFIG"] = section if isinstance(section, str) else json.dumps(section)
            with pytest.raises(HandshakeError, match=message) as caught:
                make()
            assert torch_session._current is None and not dist.is_initialized()
            os.environ["ZIPCCL_CONFIG"] = json.dumps(ZIPPED)
            make()
            texts = [None] * world
            dist.all_gather_object(texts, str(caught.value))
            assert len(set(texts)) == 1, texts
            dist.destroy_process_group()
        with pytest.raises(HandshakeError, match="rank 1 did not answer") if rank != 1 else contextlib.nullcontext():
            make(timeout_s=1, absent=1)


def case_rank_0_logs_a_line_per_optimizer_step(rank, world):
    with worlds(rank, world) as make:
        path = [tempfile.mktemp() if rank == 0 else None]
        ds_zipccl.configure(**ZIPPED)
        make()
        dist.broadcast_object_list(path, src=0)
        dist.destroy_process_group()
        ds_zipccl.configure(log=path[0], **ZIPPED)
        make()
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for step in range(3):
            gather_is_right(None, seed=step)
            parameter.sum().backward()
            optimizer.step()
        dist.destroy_process_group()
        optimizer.step()
        if rank == 0:
            rows = [json.loads(line) for line in Path(path[0]).read_text().splitlines()]
            assert [row["step"] for row in rows] == [1, 2, 3]
            assert all(row["ops"][AG]["calls_zipped"] == 1 for row in rows)
