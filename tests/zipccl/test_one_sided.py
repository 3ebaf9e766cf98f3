"""Which calls go one-sided, and what becomes of them, with a transport that notes what it is asked for. Its own results: test_symmetric.py;
how it is opened: test_symmetric_memory.py; whole calls on GPUs: collective_one_sided_cases.py."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.collectives import one_sided
from ds_zipccl.collectives.one_sided import REASONS, OneSided, Router, memory_bytes, reason_against
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime  # noqa: F401  registers the collectives
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.stats import Stats
from tests.helpers.ranks import assert_ok, case_names

MEMORY = "tests.zipccl.one_sided_memory_cases"
AG, RS, A2A = "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"
BF16 = torch.bfloat16


class Group:
    """Two ranks or more, of which this is one."""
    def __init__(self, world_size=2, name="some"):
        self._size, self.group_name = world_size, name

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
        self.name = group.group_name

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
    """Overflows of a group that is gone stay counted, its memory does not."""
    (live, stats), states, transports = router(), [State(), State()], [Transport(), Transport()]
    assert stats.sections["symmetric_memory"]() == ({}, {})
    for state, transport, name in zip(states, transports, ("first", "second"), strict=True):
        opens.append(transport)
        live.run(specs()[AG], replace(GATHER, group=Group(name=name)), state)
    assert stats.sections["one_sided"]() == ({"overflows": 6}, {"num_groups": 2})
    assert stats.sections["symmetric_memory"]() == ({}, {"first": 1 << 30, "second": 1 << 30})
    live.close(states[0])
    live.abort(states[0])
    assert transports[0].ended == "closed" and transports[1].ended is None
    assert stats.sections["symmetric_memory"]() == ({}, {"second": 1 << 30})
    live.abort(states[1])
    assert stats.sections["symmetric_memory"]() == ({}, {})
    assert transports[1].ended == "aborted" and stats.sections["one_sided"]() == ({"overflows": 6}, {"num_groups": 0})


def test_memory_is_kept_while_the_switch_uses_it(opens):
    (live, stats), state, transports = router("adaptive"), State(), [Transport(), Transport()]
    assert not {"one_sided", "symmetric_memory"} & set(stats.sections)
    opens += reversed(transports)
    test = Call(AG, torch.empty(8, dtype=BF16), torch.arange(4).to(BF16), Group())
    assert live.prober(specs()[AG], GATHER, state)(test) and torch.equal(transports[0].calls[0][1], test.input)
    live.keep_what_wins(state)
    assert transports[0].ended is None and not stats.snapshot(), "test calls are not counted"
    assert stats.sections["symmetric_memory"]() == ({}, {"some": 1 << 30})
    state.wins = False
    live.keep_what_wins(state)
    assert stats.sections["symmetric_memory"]() == ({}, {})
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


@pytest.mark.parametrize("case", case_names(MEMORY))
@pytest.mark.parametrize("world_size", [2, 3])
def test_memory(world_size, case):
    assert_ok(MEMORY, case_names(MEMORY), world_size, case)
