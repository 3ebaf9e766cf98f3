"""A group's symmetric memory without a GPU: opened by all ranks or by none, and when the memory that a call uses goes back."""
import threading
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import layout
from ds_zipccl.collectives import one_sided, streams, symmetric
from ds_zipccl.collectives.one_sided import OneSided, exchange
from ds_zipccl.errors import KernelError

BF16 = torch.bfloat16


def current_device_is(monkeypatch, number) -> None:
    """Both functions that are asked."""
    monkeypatch.setattr(torch.cuda, "current_device", number)
    monkeypatch.setattr(streams, "current_device", number)


class Ranks:
    """Two ranks' OneSided, opened at once, with stand-ins for what GPUs say."""

    def __init__(self, monkeypatch):
        self.here, self.places, self.kernels, self.no_memory, self.fails = threading.local(), [], [{}, {}], [False] * 2, [False] * 2
        self.asked, self.transports = [], []
        both = [{"host": "a", "uuid": str(rank), "peers": {str(1 - rank): True}} for rank in range(2)]
        self.places = both

        def asked(what, answers):
            def answer(*_):
                self.asked.append(what)
                return answers[self.here.rank]
            return answer

        def reserve(device, num_bytes):
            if self.no_memory[self.here.rank]:
                raise RuntimeError("out of memory")
            return "memory"

        def open_transport(group, device, memory, store, name, timeout):
            if self.fails[self.here.rank]:
                raise PermissionError("pidfd_getfd")
            transport = SimpleNamespace(ended=None, num_overflows=0)
            transport.close, transport.abort = (lambda how=how: setattr(transport, "ended", how) for how in ("closed", "aborted"))
            self.transports.append(transport)
            return transport

        monkeypatch.setattr(symmetric, "place_of", asked("place", self.places))
        monkeypatch.setattr(symmetric, "kernels_of", asked("kernels", self.kernels))
        monkeypatch.setattr(symmetric, "reserve", reserve)
        monkeypatch.setattr(symmetric, "open_transport", open_transport)
        monkeypatch.setattr(one_sided, "group_timeout", lambda group, device: None)
        store = dist.HashStore()
        self.groups = [OneSided(torch.device("cpu"), store, 1) for _ in range(2)]

    def open(self) -> list:
        """Why each rank's group has none."""
        def one(rank):
            self.here.rank = rank
            self.groups[rank].open(SimpleNamespace(rank=lambda: rank, size=lambda: 2, group_name="some"))

        self.asked.clear()
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert self.groups[0].why_not == self.groups[1].why_not
        return [group.transport is not None for group in self.groups], self.groups[0].why_not


def test_opened_by_all_or_none(monkeypatch):
    ranks = Ranks(monkeypatch)
    assert ranks.open() == ([True, True], None) and sorted(ranks.asked) == ["kernels"] * 2 + ["place"] * 2
    for group in ranks.groups:
        group.close()
    assert ranks.open() == ([True, True], None) and not ranks.asked and len(ranks.transports) == 4
    assert ranks.open() == ([True, True], None) and len(ranks.transports) == 4              # they are


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_none_does(monkeypatch, rank):
    ranks = Ranks(monkeypatch)
    ranks.places[rank]["host"] = "b"
    assert ranks.open() == ([False, False], "hosts") and ranks.asked == ["place"] * 2        # nothing is compiled for that
    assert ranks.open() == ([False, False], "hosts") and ranks.asked == []                   # nor asked again
    ranks = Ranks(monkeypatch)
    ranks.kernels[rank]["error"] = "no nvcc"
    assert ranks.open() == ([False, False], "not_built")
    ranks = Ranks(monkeypatch)
    ranks.fails[rank] = True
    assert ranks.open() == ([False, False], "not_opened") and [t.ended for t in ranks.transports] == ["aborted"]


def test_memory_that_is_missing_is_asked_for_again(monkeypatch):
    ranks = Ranks(monkeypatch)
    ranks.no_memory[1] = True
    assert ranks.open() == ([False, False], "no_memory") and not ranks.transports
    assert ranks.open() == ([False, False], "no_memory")
    ranks.no_memory[1] = False
    assert ranks.open() == ([True, True], None)


def test_memory_that_others_may_need_is_left_to_them(monkeypatch):
    """Where the transport is only tried: 3 bytes besides its own on every rank."""
    ranks, free = Ranks(monkeypatch), [4, 3]
    monkeypatch.setattr(one_sided, "free_bytes", lambda device: free[ranks.here.rank])
    for group in ranks.groups:
        group._left_free = 3
    assert ranks.open() == ([False, False], "no_memory") and not ranks.transports
    free[1] = 4
    assert ranks.open() == ([True, True], None)


def test_what_may_be_missing_is_taken_before_others_wait_for_it(monkeypatch):
    """Who runs out of memory while peers exchange theirs would leave them there until their limit. So all is allocated in ``reserve``."""
    import torch.distributed._symmetric_memory as symmetric_memory

    from ds_zipccl.kernels import impl_cuda, symmetric_calls

    class Met(Exception):
        pass

    def none_left(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def rendezvous(memory, name):
        raise Met

    zeros, memory = torch.zeros, torch.empty(1 << 20, dtype=torch.uint8)
    calls = SimpleNamespace(scratch_bytes=100, overflows_bytes=16)
    monkeypatch.setattr(symmetric_calls, "load", lambda: calls)
    monkeypatch.setattr(impl_cuda, "load", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(symmetric_memory, "empty", lambda *_, **__: memory)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(symmetric, "words_bytes", lambda world_size: 1 << 19)
    monkeypatch.setattr(symmetric, "known_group", lambda group, store, name: (name, group))
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))
    memory.fill_(7)
    reserved = symmetric.reserve(torch.device("cpu"), 1 << 20)
    assert reserved.memory is memory and not memory[:1 << 19].any() and bool((memory[1 << 19:] == 7).all())
    assert (reserved.scratch.nbytes, reserved.overflows.nbytes) == (100, 16) and reserved.overflows.dtype == torch.int32
    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, none_left)
    with pytest.raises(Met):
        symmetric.open_transport(None, torch.device("cpu"), reserved, None, "name", None)
    with pytest.raises(RuntimeError, match="out of memory"):
        symmetric.reserve(torch.device("cpu"), 1 << 20)


def test_many_ranks_do_not_ask_each_other():
    group = OneSided(torch.device("cpu"), None, 1)
    group.open(SimpleNamespace(rank=lambda: 1, size=lambda: symmetric.MAX_RANKS + 1, group_name="some"))
    assert group.why_not == "too_many_ranks"


def test_who_waits_after_the_end_need_not():
    """The switch may give the memory back while a handle of an earlier call is about."""
    ended = []
    engine = SimpleNamespace(is_done=lambda call: True, close=lambda: ended.append(1), join=lambda call, stream: 1 / 0)
    transport = symmetric.SymmetricTransport(engine, None, 0, torch.device("cpu"), 2, 0, torch.zeros(1), "memory")
    work = symmetric.SymmetricWork.of(transport, 1, torch.empty(1), 0)
    transport.abort()
    assert ended and work.is_completed() and work.wait()


def test_a_lost_context_does_not_keep_a_group_from_ending(monkeypatch):
    """A wait for a peer that found its limit leaves one: whatever asks CUDA is refused."""
    monkeypatch.setattr(symmetric, "_NEVER_FREED", kept := [])

    def refused(*_):
        raise KernelError("cudaError 719")

    engine = SimpleNamespace(is_done=refused, close=lambda: 1 / 0)
    transport = symmetric.SymmetricTransport(engine, None, 0, torch.device("cpu"), 2, 0, torch.zeros(1), "memory")
    transport.num_calls = 1
    transport.abort()
    assert kept[0][:3] == (transport, engine, "memory") and transport.is_open


def test_memory_goes_back_when_somebody_waits(monkeypatch):
    """Not only when the GPU is done, which the host may be far ahead of; what frames are made from stays until then."""
    current_device_is(monkeypatch, lambda: None)
    done, joined = [0], []
    engine = SimpleNamespace(run=lambda exchange: None, is_done=lambda call: call <= done[-1],
                             join=lambda call, stream: joined.append(call))
    transport = symmetric.SymmetricTransport(engine, lambda stream, words: 0, 0, torch.device("cpu"), 2, 1 << 24, torch.zeros(1), "memory")

    def gather():
        data, frame, out = torch.empty(5000, dtype=BF16), torch.empty(8000, dtype=torch.uint8), torch.empty(2, 5000, dtype=BF16)
        rows = [symmetric.Row(data[a:b], out[:, a:b], layout(BY_TORCH[BF16], b - a), frame) for a, b in ((0, 3000), (3000, 5000))]
        return transport.gather_rows(rows), [weakref.ref(t.untyped_storage()) for t in (out, data, frame)]

    alive = lambda refs: [ref() is not None for ref in refs]          # noqa: E731
    work, first = gather()
    work.wait()
    del work
    assert joined == [1] and alive(first) == [False, True, True]
    done.append(1)
    second, *_ = [gather()[1] for _ in range(symmetric.KEPT_UNASKED)]
    assert alive(first) == [False] * 3 and alive(second) == [True] * 3
    kept = [gather()[1] for _ in range(symmetric.MAX_KEPT)]
    assert joined[1:] == [4] and alive(second) == [False] * 3 and all(alive(refs) == [True] * 3 for refs in kept)
    done.append(22)                             # kept's are 6 to 37
    kept += [gather()[1] for _ in range(2 * symmetric.KEPT_UNASKED)]
    assert [alive(refs) for refs in kept] == [[False] * 3] * 17 + [[True] * 3] * (len(kept) - 17) and len(joined) == 2


def test_who_only_joins_a_call_keeps_none_of_its_memory(monkeypatch):
    """As the frame cache does with its last gather, which may be of the largest parameter there is."""
    current_device_is(monkeypatch, lambda: None)
    joined = []
    engine = SimpleNamespace(run=lambda exchange: None, is_done=lambda call: False, join=lambda call, stream: joined.append(call))
    transport = symmetric.SymmetricTransport(engine, lambda stream, words: 0, 0, torch.device("cpu"), 2, 1 << 24, torch.zeros(1), "memory")
    data, out = torch.empty(5000, dtype=BF16), torch.empty(2, 5000, dtype=BF16)
    work, alive = transport.gather_rows([symmetric.Row(data, out, layout(BY_TORCH[BF16], 5000))]), weakref.ref(out.untyped_storage())
    join = work.join
    work.wait()
    del work, out
    assert alive() is None
    join()
    assert joined == [1, 1]


def test_who_waits_while_another_device_is_current_waits_on_the_right_one(monkeypatch):
    """CUDA takes a default stream for that of the current device."""
    current, joined = [1], []

    @contextmanager
    def on(device):
        current.append(device.index)
        yield
        current.pop()

    current_device_is(monkeypatch, lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", on)
    engine = SimpleNamespace(join=lambda call, stream: joined.append(current[-1]))
    transport = symmetric.SymmetricTransport(engine, None, 0, torch.device("cpu"), 2, 0, torch.zeros(1), "memory")
    symmetric.SymmetricWork.of(transport, 1, torch.empty(1), 0).wait()
    assert joined == [transport.device.index] and current == [1]


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
