"""Which calls go one-sided, and what becomes of them, with a transport that notes what it is asked for. Its own results: test_symmetric.py;
whole calls on GPUs: collective_one_sided_cases.py."""
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ds_zipccl.collectives import one_sided, symmetric
from ds_zipccl.collectives.one_sided import REASONS, Router, exchange, memory_bytes, reason_against
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime  # noqa: F401  registers the collectives
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.stats import Stats

AG, RS, A2A = "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"
BF16 = torch.bfloat16


class Group:
    """Two ranks or more, of which this is one."""
    group_name = "some"

    def __init__(self, world_size=2):
        self._size = world_size

    def rank(self):
        return 1

    def size(self):
        return self._size


class OnGpu:
    """A tensor as far as a decision looks at it."""

    def __init__(self, numel, dtype=BF16):
        self._numel, self.dtype, self.device = numel, dtype, torch.device("cuda", 0)

    def numel(self):
        return self._numel


def call(op, numel=1 << 20, world_size=2, **fields) -> Call:
    out = numel // world_size if op == RS else numel * world_size if op == AG else numel
    return Call(op, OnGpu(out), OnGpu(numel), Group(world_size), **fields)


def why(c: Call, kernels="cuda", **settings):
    config = ZipcclConfig(enabled=True, transport="symmetric_memory", **settings)
    return reason_against(config, kernels, specs()[c.op], c)


def test_who_goes_where():
    assert [why(call(op)) for op in (AG, RS, A2A)] == [None] * 3
    others = [name for name in specs() if name not in (AG, RS, A2A)]
    assert others and {why(call(name)) for name in others} == {"collective"}
    assert why(call(AG), kernels="triton") == "device" and why(call(AG), kernels=None) == "device"
    assert why(call(AG), integrity="checksum") == "integrity" and why(call(AG), window="sigma") == "window"
    assert why(call(A2A, input_splits=(1, 2), output_splits=(1, 2))) == "splits"
    assert why(call(A2A, numel=1000)) == "min_bytes" and why(call(A2A, numel=1000), min_bytes=0) == "no_gain"
    assert why(call(A2A, numel=1 << 30), max_workspace_bytes=1 << 20) is None            # it is carried out in parts
    assert why(call(RS, reduce_op=dist.ReduceOp.AVG)) is None and why(call(AG), level=2) is None
    assert why(call(RS, world_size=4)) == "deterministic_reduce" and why(call(AG, world_size=4)) is None
    assert why(call(RS, world_size=4), deterministic_reduce=False) is None
    assert why(call(RS, world_size=4), collectives={"reduce_scatter": "always"}) is None
    assert why(call(RS, world_size=3, reduce_op=dist.ReduceOp.AVG), collectives="always") == "average"
    assert {"collective", "device", "integrity", "window", "splits", "average", "deterministic_reduce", "small_memory"} == set(REASONS)


def test_memory_is_bounded_by_the_workspace():
    assert memory_bytes(ZipcclConfig()) == 1 << 30 and memory_bytes(ZipcclConfig(max_workspace_bytes=1 << 24)) == 1 << 24


class Transport:
    """Notes calls."""

    def __init__(self, fits=True):
        self.calls, self.fits, self.num_overflows, self.ended = [], fits, 3, None

    def take(self, name, out, data):
        self.calls.append((name, tuple(out.shape), data.clone()))
        return SimpleNamespace(sent_bytes=70) if self.fits else None

    def close(self):
        self.ended = "closed"

    def abort(self):
        self.ended = "aborted"


@pytest.fixture
def made(monkeypatch):
    """(router, stats, what OneSided makes, by the order of groups)."""
    made, stats = [], Stats()

    class OneSided(one_sided.OneSided):
        def __init__(self, group, device, store, num_bytes):
            self.transport, self.why_not = made[-1] if isinstance(made[-1], tuple) else (made[-1], None)
            assert store == "store" and num_bytes == 1 << 30

    monkeypatch.setattr(one_sided, "OneSided", OneSided)
    monkeypatch.setattr(one_sided, "reason_against", lambda config, kernels, spec, call: None)
    monkeypatch.setattr(one_sided, "_LAUNCH", {op: (lambda t, out, data, op=op: t.take(op, out, data)) for op in (AG, RS, A2A)})
    return Router(ZipcclConfig(transport="symmetric_memory"), {"cpu": "cuda"}, stats), stats, made


def state():
    return SimpleNamespace(side=SimpleNamespace(store="store"))


def test_calls_are_launched_flat_and_counted(made):
    router, stats, transports = made
    transports.append(Transport())
    first, x = state(), torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(BF16)
    assert router.run(specs()[AG], Call(AG, torch.empty(8, 6, dtype=BF16), x, Group()), first, stats).sent_bytes == 70
    router.run(specs()[RS], Call(RS, torch.empty(2, 6, dtype=BF16), x, Group(), dist.ReduceOp.AVG), first, stats)
    (_, shape, data), (_, _, halves) = transports[0].calls
    assert shape == (48,) and torch.equal(data, x.view(-1)) and torch.equal(halves, x.view(-1) / 2)
    row = stats.snapshot()[AG]
    assert (row["calls_zipped"], row["calls_one_sided"], row["raw_bytes"], row["wire_bytes"]) == (1, 1, 48, 70)
    assert row["not_one_sided"] == {} and row["calls_native"] == 0


def test_a_group_without_the_transport_is_counted_with_its_reason(made):
    router, stats, transports = made
    transports.append((None, "hosts"))
    c, first = Call(AG, torch.empty(8, dtype=BF16), torch.empty(4, dtype=BF16), Group()), state()
    assert router.run(specs()[AG], c, first, stats) is None and router.run(specs()[AG], c, first, stats) is None
    transports.append(Transport(fits=False))
    assert router.run(specs()[AG], c, state(), stats) is None
    row = stats.snapshot()[AG]
    assert row["not_one_sided"] == {"hosts": 2, "small_memory": 1} and row["calls_zipped"] == row["calls_one_sided"] == 0


def test_groups_end_on_their_own(made):
    """Overflows of a group that is gone stay counted."""
    router, stats, transports = made
    c, states = Call(AG, torch.empty(8, dtype=BF16), torch.empty(4, dtype=BF16), Group()), [state(), state()]
    for s in states:
        transports.append(Transport())
        router.run(specs()[AG], c, s, stats)
    assert stats.sections["one_sided"]() == ({"overflows": 6}, {"num_groups": 2})
    router.close(states[0])
    router.abort(states[0])
    assert transports[0].ended == "closed" and transports[1].ended is None
    router.abort(states[1])
    assert transports[1].ended == "aborted" and stats.sections["one_sided"]() == ({"overflows": 6}, {"num_groups": 0})


def test_every_rank_sees_all_records():
    store, seen = dist.HashStore(), [None] * 3
    threads = [threading.Thread(target=lambda r=r: seen.__setitem__(r, exchange(store, r, 3, {"uuid": str(r)}))) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [[{"uuid": "0"}, {"uuid": "1"}, {"uuid": "2"}]] * 3


def test_torch_finds_a_group_by_its_name():
    """Its rank, size and store; what symmetric memory makes of them needs GPUs."""
    store, unknown = dist.HashStore(), dist.ProcessGroup(dist.HashStore(), 1, 3)
    name, group = symmetric.known_group(unknown, store, "zipccl/some/7")
    found = c10d._resolve_process_group(name)
    assert found is group is not unknown and (name, found.rank(), found.size()) == ("zipccl/some/7", 1, 3)
    store.set("a", "b")
    assert found.get_group_store().get("a") == b"b"
    del group, found
    with pytest.raises(RuntimeError):
        c10d._resolve_process_group(name)


def test_a_group_that_torch_knows_is_taken_itself(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        name, group = symmetric.known_group(dist.group.WORLD, None, "unused")
        assert group is dist.group.WORLD and name == dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()
