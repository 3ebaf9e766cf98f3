"""DeepSpeed's methods are left out of a known native call where they do nothing but call torch's functions, and there alone."""
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_zipccl.backend import deepspeed_comm
from ds_zipccl.collectives.native_launch import LAUNCHES
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.switch import NO_CHOICE, Measured
from ds_zipccl.config import ZipcclConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")


def backend(base=TorchBackend):
    """DeepSpeed's communication object, ours already, without its set-up."""
    cdb = object.__new__(deepspeed_comm._zipped_class(base))
    cdb.all_gather_function, cdb.reduce_scatter_function = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    return cdb


@pytest.fixture
def cdb(monkeypatch):
    """Rank 1 of 4, alone, with the settings of a process that zips nothing but BF16."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    monkeypatch.setattr(deepspeed_comm.deepspeed_comm, "cdb", backend())
    live = Runtime(ZipcclConfig(enabled=True), {"cpu": "reference"})
    monkeypatch.setattr(live, "state", lambda *_: None)
    deepspeed_comm.install(live)
    pairs = Call("all_to_all_single", torch.zeros(8), torch.zeros(8), dist.group.WORLD)         # known on a GPU alone, by the switch
    live.native_calls.remember(pairs, "native_is_faster", 0, Measured(NO_CHOICE))
    live.native_calls.show(dist.group.WORLD)
    yield deepspeed_comm.deepspeed_comm.cdb
    dist.destroy_process_group()


def spied(monkeypatch) -> list[str]:
    """Calls of DeepSpeed's own methods, from now on."""
    seen = []
    for name in LAUNCHES:
        original = getattr(TorchBackend, name)

        def method(self, *args, name=name, original=original, **kwargs):
            seen.append(name)
            return original(self, *args, **kwargs)
        monkeypatch.setattr(TorchBackend, name, functools.wraps(original)(method))
    return seen


def calls(cdb, async_op: bool) -> dict:
    whole, part = torch.zeros(8), torch.ones(2)
    return {"all_gather_into_tensor": lambda: cdb.all_gather_into_tensor(whole, part, async_op=async_op),
            "reduce_scatter_tensor": lambda: cdb.reduce_scatter_tensor(part, whole, group=dist.group.WORLD, async_op=async_op),
            "all_to_all_single": lambda: cdb.all_to_all_single(whole, whole.clone(), async_op=async_op),
            "all_reduce": lambda: cdb.all_reduce(whole, async_op=async_op),
            "broadcast": lambda: cdb.broadcast(whole, 2, async_op=async_op)}


@pytest.mark.parametrize("async_op", [False, True])
def test_known_calls_pass_by_them(cdb, async_op, monkeypatch):
    assert cdb.zipccl_direct
    seen = spied(monkeypatch)
    for name, call in calls(cdb, async_op).items():
        for _ in range(3):
            assert isinstance(call(), dist.Work if async_op else type(None))
        assert seen == [name] * (name != "all_to_all_single")                   # the first, which was decided
        seen.clear()
    rows = cdb.zipccl.stats.snapshot()
    assert {op: sum(row["native_reasons"].values()) for op, row in rows.items()} == dict.fromkeys(LAUNCHES, 3)


def test_only_who_gets_a_handle_asks_for_one(cdb, monkeypatch):
    asked, waited, whole, part = [], [], torch.zeros(8), torch.ones(2)

    def run(runtime, call, native=None, waits=False):
        asked.append(waits)
        return SimpleNamespace(wait=lambda: waited.append(call.op))

    monkeypatch.setattr(deepspeed_comm.front, "run", run)
    cdb.all_gather_into_tensor(whole, part)
    assert cdb.all_gather_into_tensor(whole, part, async_op=True) is not None
    with deepspeed_comm.waiting_later() as works:
        cdb.reduce_scatter_tensor(part, whole)
        cdb.all_gather_into_tensor(whole, part)
    cdb.reduce_scatter_tensor(part, whole)
    assert asked == [True, False, False, True, True] and len(works) == 1
    assert waited == ["all_gather_into_tensor"] * 2 + ["reduce_scatter_tensor"]


def test_reductions_of_deepspeeds_own_kind(cdb):
    """DeepSpeed names operations itself."""
    from deepspeed.comm.reduce_op import ReduceOp
    tensor, given = torch.ones(8), []
    for _ in range(2):
        cdb.all_reduce(tensor)
    known = cdb.zipccl_known("all_reduce", tensor, None)
    launch, known.launch = known.launch, lambda *args: given.append(args[4]) or launch(*args)
    for op in (ReduceOp.MAX, ReduceOp.SUM, dist.ReduceOp.MIN):
        cdb.all_reduce(tensor, op=op)
    assert given == [dist.ReduceOp.MAX, dist.ReduceOp.SUM, dist.ReduceOp.MIN]


def test_switches_and_lists_are_deepspeeds(cdb, monkeypatch):
    call = calls(cdb, False)["broadcast"]
    call(), call()
    seen = spied(monkeypatch)
    monkeypatch.setattr(deepspeed_comm.deepspeed_torch, "DS_COMM_BROADCAST_OFF", True)
    assert call().wait() is None and seen == ["broadcast"]                      # DeepSpeed's Noop


@pytest.mark.parametrize("op", LAUNCHES)
def test_without_permission_all_go_through_them(cdb, op, monkeypatch):
    cdb.zipccl_direct = False
    call = calls(cdb, True)[op]
    assert isinstance(call(), dist.Work)
    seen = spied(monkeypatch)
    assert isinstance(call(), dist.Work) and seen == [op]


def test_permission_needs_deepspeeds_own_methods(monkeypatch):
    class Other(TorchBackend):
        pass

    assert deepspeed_comm._only_calls_torch(backend()) and not deepspeed_comm._only_calls_torch(backend(Other))
    for name in ("all_gather_function", "reduce_scatter_function"):
        cdb = backend()
        setattr(cdb, name, dist.all_reduce)
        assert not deepspeed_comm._only_calls_torch(cdb)
    for where, name in ((deepspeed_comm.mori, "is_enabled"), (torch.backends.mps, "is_available")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, lambda: True)
            assert not deepspeed_comm._only_calls_torch(backend())
    assert deepspeed_comm._only_calls_torch(backend())
    spied(monkeypatch)
    assert not deepspeed_comm._only_calls_torch(backend())


def test_nothing_of_it_stays_behind(cdb):
    deepspeed_comm._restore(cdb)
    assert type(cdb) is TorchBackend and not {name for name in vars(cdb) if name.startswith("zipccl")}
