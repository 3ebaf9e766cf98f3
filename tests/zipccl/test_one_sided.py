"""Which calls go one-sided, and what becomes of them, with a transport that notes what it is asked for. Its own results: test_symmetric.py;
whole calls on GPUs: collective_one_sided_cases.py."""
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import layout
from ds_zipccl.collectives import one_sided, symmetric
from ds_zipccl.collectives.one_sided import REASONS, OneSided, Router, exchange, memory_bytes, reason_against
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime  # noqa: F401  registers the collectives
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.errors import KernelError
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
    config = ZipcclConfig(enabled=True, transport="symmetric_memory", **{"split_lists": "all_or_none", **settings})
    return reason_against(config, kernels, specs()[c.op], c)


def test_who_goes_where():
    assert [why(call(op)) for op in (AG, RS, A2A)] == [None] * 3
    others = [name for name in specs() if name not in (AG, RS, A2A)]
    assert others and {why(call(name)) for name in others} == {"collective"}
    assert why(call(AG), kernels="triton") == "device" and why(call(AG), kernels=None) == "device"
    assert why(call(AG), integrity="checksum") == "integrity" and why(call(AG), window="sigma") == "window"
    assert why(call(A2A, input_splits=(1, 2), output_splits=(1, 2))) == "splits"
    assert why(call(A2A), split_lists="any") == "splits" and why(call(RS), split_lists="any") is None
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

    def _take(self, out, data):
        self.calls.append((tuple(out.shape), data.clone()))
        return SimpleNamespace(sent_bytes=70, wait=lambda: True) if self.fits else None

    all_gather = reduce_scatter = all_to_all = _take

    def close(self):
        self.ended = "closed"

    def abort(self):
        self.ended = "aborted"


@pytest.fixture
def opens(monkeypatch):
    """What groups' transports are when they are opened, the next one last: a transport, or why not."""
    opens = []

    def open_(self, group):
        assert self._store == "store" and self._num_bytes == 1 << 30
        answer = opens.pop()
        self.transport, self.why_not = (None, answer) if isinstance(answer, str) else (answer, None)

    monkeypatch.setattr(OneSided, "open", open_)
    monkeypatch.setattr(one_sided, "reason_by_kind", lambda config, kernels, name, call: None)
    return opens


def router(transport="symmetric_memory") -> tuple[Router, Stats]:
    stats = Stats()
    return Router(ZipcclConfig(transport=transport), {"cpu": "cuda"}, stats), stats


class State:
    """``wins``: whether the switch found one-sided faster for anything."""
    side = SimpleNamespace(store="store")

    def __init__(self):
        self.settled, self.wins = 0, True

    def settle(self):
        self.settled += 1

    def goes_one_sided(self):
        return self.wins


GATHER = Call(AG, torch.empty(8, dtype=BF16), torch.empty(4, dtype=BF16), Group())


def test_calls_are_launched_flat_and_counted(opens):
    (live, stats), transport, first = router(), Transport(), State()
    opens.append(transport)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(BF16)
    assert live.run(specs()[AG], Call(AG, torch.empty(8, 6, dtype=BF16), x, Group()), first).sent_bytes == 70
    live.run(specs()[RS], Call(RS, torch.empty(2, 6, dtype=BF16), x, Group(), dist.ReduceOp.AVG), first)
    (shape, data), (_, halves) = transport.calls
    assert shape == (48,) and torch.equal(data, x.view(-1)) and torch.equal(halves, x.view(-1) / 2)
    row = stats.snapshot()[AG]
    assert (row["calls_zipped"], row["calls_one_sided"], row["raw_bytes"], row["wire_bytes"]) == (1, 1, 48, 70)
    assert row["not_one_sided"] == {} and row["calls_native"] == 0 and first.settled == 2


def test_a_group_without_the_transport_is_counted_with_its_reason(opens):
    (live, stats), first = router(), State()
    opens += ["hosts", "hosts"]
    assert live.run(specs()[AG], GATHER, first) is None and live.run(specs()[AG], GATHER, first) is None
    opens.append(Transport(fits=False))
    assert live.run(specs()[AG], GATHER, State()) is None
    row = stats.snapshot()[AG]
    assert row["not_one_sided"] == {"hosts": 2, "small_memory": 1} and row["calls_zipped"] == row["calls_one_sided"] == 0


def test_who_has_no_memory_is_asked_again_when_it_is_measured_again_alone(opens):
    """To ask all ranks in every call would make their hosts wait for each other there."""
    (live, _), state = router(), State()
    opens += ["no_memory"] * 3
    for _ in range(3):
        assert live.run(specs()[AG], GATHER, state) is None and live.for_rows(GATHER, state) == (None, "no_memory")
    assert len(opens) == 2
    assert live.prober(specs()[AG], GATHER, state) is None and len(opens) == 1
    assert live.for_rows(GATHER, state, again=True) == (None, "no_memory") and opens == []


def test_groups_end_on_their_own(opens):
    """Overflows of a group that is gone stay counted."""
    (live, stats), states, transports = router(), [State(), State()], [Transport(), Transport()]
    for state, transport in zip(states, transports, strict=True):
        opens.append(transport)
        live.run(specs()[AG], GATHER, state)
    assert stats.sections["one_sided"]() == ({"overflows": 6}, {"num_groups": 2})
    live.close(states[0])
    live.abort(states[0])
    assert transports[0].ended == "closed" and transports[1].ended is None
    live.abort(states[1])
    assert transports[1].ended == "aborted" and stats.sections["one_sided"]() == ({"overflows": 6}, {"num_groups": 0})


def test_memory_is_kept_while_the_switch_uses_it(opens):
    (live, stats), state, transports = router("adaptive"), State(), [Transport(), Transport()]
    assert "one_sided" not in stats.sections
    opens += reversed(transports)
    test = Call(AG, torch.empty(8, dtype=BF16), torch.arange(4).to(BF16), Group())
    assert live.prober(specs()[AG], GATHER, state)(test) and torch.equal(transports[0].calls[0][1], test.input)
    live.keep_what_wins(state)
    assert transports[0].ended is None and not stats.snapshot(), "test calls are not counted"
    state.wins = False
    live.keep_what_wins(state)
    assert transports[0].ended == "closed" and stats.sections["one_sided"]() == ({"overflows": 3}, {"num_groups": 0})
    live.keep_what_wins(state)
    assert live.prober(specs()[RS], GATHER, state) and transports[1].ended is None          # measured again: opened again


def test_lists_are_measured_as_one_exchange(opens):
    (live, _), transport = router("adaptive"), Transport()
    opens.append(transport)
    data, out = torch.arange(8).to(BF16), torch.empty(8, dtype=BF16)
    call = Call("all_to_all", out.split(4), data.split(4), Group())
    assert live.prober(specs()["all_to_all"], call, State())(call)
    assert torch.equal(transport.calls[0][1], data) and transport.calls[0][0] == (8,)


def test_a_group_that_cannot_is_no_error(opens):
    (live, stats), state = router("adaptive"), State()
    opens += ["no_peer_access", "no_peer_access"]
    assert live.prober(specs()[AG], GATHER, state) is None and live.prober(specs()[RS], GATHER, state) is None
    assert [stats.snapshot()[op]["not_one_sided"] for op in (AG, RS)] == [{"no_peer_access": 1}] * 2


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
            self.transports.append(Transport())
            return self.transports[-1]

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


def test_many_ranks_do_not_ask_each_other():
    group = OneSided(torch.device("cpu"), None, 1)
    group.open(Group(symmetric.MAX_RANKS + 1))
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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
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

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
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
