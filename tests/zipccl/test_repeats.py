"""Known calls on a GPU, launched by one call of C (collectives/repeats.py), shown on a CPU as in test_stream_order.py, which has the order
in which streams wait: which calls go so, what becomes of them, and when they go the long way."""
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.backend import front
from ds_zipccl.codec.format import OVERFLOW_BIT, SPILL_SHIFT
from ds_zipccl.collectives import capacity, flight, group_state, nccl_direct, one_sided, payload_watch, streams
from ds_zipccl.collectives.cost import Costs, Curve
from ds_zipccl.collectives.one_sided import Router
from ds_zipccl.collectives.registry import specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.work import Waiter, ZipWork
from ds_zipccl.config import ZipcclConfig
from tests.zipccl.stream_stand_in import (
    AGAIN,
    GPU,
    ROW,
    WORLD,
    Group,
    begin,
    call_of,
    end,
)


@pytest.fixture
def many(gpu, live, monkeypatch):
    """Launches so many calls on stream 7, after three that made them known; how many ``again`` launched, and how many ended at once."""
    ended, at_once = [], group_state.GroupState.finish_at_once
    monkeypatch.setattr(group_state.GroupState, "finish_at_once",
                        lambda state, pending: (ended.append(at_once(state, pending)), ended[-1])[1])

    def run(op, *waits, stream=7, make=lambda call: call):
        for _ in range(3):
            end(gpu, begin(gpu, live, op, 7), 7)
        before = live.repeats.num_again
        ended.clear()
        gpu.current = stream
        works = [live.run(make(call_of(op, live.group))) for _ in waits]
        for i in waits:
            end(gpu, works[i], stream)
        return live.repeats.num_again - before, sum(ended)

    return run


ONE_CALL = pytest.mark.parametrize("gpu", ["prepared, words by encode, payload too, again"], indirect=True)


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
def test_known_calls_are_one_call_of_c_and_end_by_another(gpu, live, many, op):
    assert many(op, 0) == (1, 1) and many(op, 0, 1, 2)[0] == 1, "there is one flight"
    assert many(op, 0, 1, 2) == (3, 3)
    assert many(op, 2, 0, 1) == (3, 0), "what was settled for another one's sake"
    before = len(gpu.log)
    work = begin(gpu, live, op, 7)
    (between,) = (i for i in gpu.all("between") if i >= before)
    others = {i for i in gpu.all("payload", "decode", "words", "copy") if i >= before} - gpu.all("words")
    assert others and others.isdisjoint(gpu.before(between))
    end(gpu, work, 9)
    assert others <= gpu.before(max(gpu.all("read")))
    made = {item for stack in live.workspace._idle.values() for item in stack if isinstance(item, flight.Flight)}
    gpu.current = 7
    for _ in range(3):
        live.run(call_of(op, live.group))                               # nobody keeps the handle
    end(gpu, live.run(call_of(op, live.group)), 7)
    state = live.state(live.group, GPU)
    assert not state.in_flight and made == {item for stack in live.workspace._idle.values() for item in stack
                                            if isinstance(item, flight.Flight)}, "flights are not given back"
    row = live.stats.snapshot()[op]
    assert row["calls_zipped"] == 27 > live.repeats.num_again > 20 and row["raw_bytes"] == 27 * 2 * ROW
    for capacity_of, _ in next(iter(live.repeats._known.values())).rooms:
        assert len(capacity_of.under_way) < 8 and capacity_of.num_calm > 8


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
def test_what_ends_at_once_leaves_the_others_in_flight(gpu, live, many, op):
    many(op, 0, 1, 2)
    assert many(op, 0, 1, 2) == (3, 3)
    works, state = [begin(gpu, live, op, 7) for _ in range(3)], live.state(live.group, GPU)
    for i, work in enumerate(works, 1):
        end(gpu, work, 7)
        assert state.in_flight == [other._pending for other in works[i:]]


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
def test_who_waits_at_once_gets_no_work_of_torchs(gpu, live, many, op):
    many(op, 0)
    before, state = live.repeats.num_again, live.state(live.group, GPU)

    def run(**how):
        return front.run(live, call_of(op, live.group), **how)

    end(gpu, work := run(waits=True), 7)
    assert type(work) is Waiter and not state.in_flight and live.repeats.num_again == before + 1
    end(gpu, work := run(), 7)
    assert type(work) is ZipWork and isinstance(work, dist.Work)
    run(waits=True)                                                     # nobody keeps it
    end(gpu, run(waits=True), 7)
    assert not state.in_flight
    gpu.word = OVERFLOW_BIT | 200 << SPILL_SHIFT
    end(gpu, run(waits=True), 7)
    assert live.stats.snapshot()[op]["overflows"] == 1 and live.repeats.num_again == before + 5


@ONE_CALL
def test_a_call_after_a_long_time_is_not_late(gpu, live, many, monkeypatch):
    """Whoever looks when its kernels are queued, and nothing else is known of it yet, must not take it for the flight's last one."""
    assert many("reduce_scatter_tensor", 0) == (1, 1)
    watch, taken, late, begun = payload_watch.PayloadWatch(None), live.workspace.take_flight, [], gpu.box.begun

    def take(key):
        watch._flights.add(found := taken(key))
        return found

    monkeypatch.setattr(live.workspace, "take_flight", take)
    monkeypatch.setattr(payload_watch, "_has_ended", lambda flight: False)
    monkeypatch.setattr(gpu.box, "begun", lambda *args: (late.append(watch.late(time.monotonic() + 1e6)), begun(*args))[1])
    end(gpu, begin(gpu, live, "reduce_scatter_tensor", 7), 7)
    assert late == [[]] and len(watch.late(time.monotonic() + 1e6)) == 1, "one that never ends is"


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
def test_an_overflow_of_a_known_call_is_sent_again(gpu, live, many, op):
    many(op, 0)
    before, first, gpu.word = live.repeats.num_again, len(gpu.log), OVERFLOW_BIT | 200 << SPILL_SHIFT
    work = begin(gpu, live, op, 7)
    assert live.repeats.num_again == before + 1
    end(gpu, work, 7)
    resends = {i for i in gpu.all("resend") if i >= first}
    assert resends and resends <= gpu.before(max(gpu.all("read"))) and live.stats.snapshot()[op]["overflows"] == 1
    gpu.word, before = 0, live.repeats.num_again
    for _ in range(9):
        end(gpu, begin(gpu, live, op, 7), 7)
    assert live.repeats.num_again < before + 9, "another room, once the overflow counts"
    many(op, 0, 1)
    assert many(op, 0, 1) == (2, 2)


WAYS = {
    "the stream is captured": lambda gpu, patch, live: setattr(gpu, "captures", 1),
    "the ring is full": lambda gpu, patch, live: setattr(gpu.box, "_room_for_all", gpu.box._count),
    "the mailbox has ended": lambda gpu, patch, live: setattr(gpu.box, "_ended", "why"),
    "torch gives no communicator away": lambda gpu, patch, live: patch.setattr(nccl_direct, "handle", lambda backend: 0),
    "another device is current": lambda gpu, patch, live: patch.setattr(streams, "current_device", lambda: 1),
    "there are tensors on the CPU too": lambda gpu, patch, live: live._groups["g"].update(cpu=None),
    "the room is another": lambda gpu, patch, live: [setattr(c, "spill_per_tile", 999) for c, _ in _known(live).rooms],
    "the class is forgotten": lambda gpu, patch, live: [setattr(c, "is_forgotten", True) for c, _ in _known(live).rooms],
    "a call must be taken account of": lambda gpu, patch, live: [c.under_way.extend([capacity.Need()] * 8) for c, _ in _known(live).rooms],
    "it has just overflowed": lambda gpu, patch, live: [setattr(c, "num_calm", 0) for c, _ in _known(live).rooms],
    "the idle flight is gone": lambda gpu, patch, live: live.workspace.clear(),
}


def _known(live):
    return next(iter(live.repeats._known.values()))


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
@pytest.mark.parametrize("why", WAYS)
def test_what_is_not_as_it_was_goes_the_long_way(gpu, live, many, monkeypatch, op, why):
    assert many(op, 0) == (1, 1)
    before, held = live.repeats.num_again, len(live.workspace._idle)
    with monkeypatch.context() as patch:
        WAYS[why](gpu, patch, live)
        gpu.current = 7
        assert live.again(call_of(op, live.group)) is None and live.repeats.num_again == before
    assert len(live.workspace._idle) == held or "idle" in why
    gpu.captures = 0


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
def test_tensors_that_share_memory_go_the_long_way(gpu, live, many, op):
    def shared(call):
        whole = torch.empty(2 * WORLD * ROW, dtype=torch.bfloat16, device=GPU)
        a, b = call.output.numel(), call.input.numel()
        return replace(call, output=torch.ops.aten.slice(whole, 0, 0, a), input=torch.ops.aten.slice(whole, 0, ROW // 2, ROW // 2 + b))

    num_prepared = gpu.num_prepared
    assert many(op, 0, make=shared) == (0, 0) and gpu.num_prepared > num_prepared
    assert many(op, 0, stream=9) == (0, 0) and many(op, 0, stream=7) == (1, 1)


class KnownTransport:
    """As a transport that is open: counts calls, and those that were known."""

    def __init__(self):
        self.is_open, self.num_calls, self.num_known, self.refuses = True, 0, 0, False

    def _run(self, out, data):
        self.num_calls += 1
        return SimpleNamespace(sent_bytes=70, wait=lambda: True)

    all_gather = reduce_scatter = all_to_all = _run

    def known(self, name, out, data):
        def launch(out, data):
            self.num_known += not self.refuses
            return None if self.refuses else self._run(out, data)

        return SimpleNamespace(transport=self, stream=7, launch=launch, sent_bytes=70)


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
@pytest.mark.parametrize("measured", [False, True])
def test_known_one_sided_calls(gpu, live, monkeypatch, op, measured):
    transport = KnownTransport()
    monkeypatch.setattr(Router, "_opened", lambda *_, **__: SimpleNamespace(transport=transport, why_not=None))
    monkeypatch.setattr(Router, "reason_against", lambda *_: None)
    live = Runtime(ZipcclConfig(enabled=True, collectives="adaptive", min_bytes=0,
                                transport="adaptive" if measured else "symmetric_memory"), {"cuda": "told"})
    group, gpu.current = Group(gpu), 7
    costs = live.state(group, GPU).measured("pair" if "all_to_all" in op else op, torch.bfloat16)
    lines = [Curve((1, 2), (10 * t, 20 * t)) for t in (3.0, 2.0, 1.0)]
    costs.costs = Costs(lines[0], lines[1], 1.41, lines[2])

    def run(known, make=lambda call: call):
        before, calls = transport.num_known, transport.num_calls
        live.run(make(call_of(op, group)))
        assert transport.num_known - before == known and transport.num_calls == calls + 1

    for known in (0, 0, 1, 1) if measured else (0, 1, 1, 1):
        run(known)
    assert live.stats.snapshot()[op] | {"ratio": 0} == {
        **live.stats.snapshot()[op], "calls_zipped": 4, "calls_one_sided": 4, "raw_bytes": 4 * 2 * ROW, "wire_bytes": 280, "ratio": 0}
    assert costs.num_calls == 4 * measured
    gpu.current = 9
    run(0)
    gpu.current, transport.refuses = 7, True
    run(0)
    transport.refuses = False
    run(1)
    live.state(group, GPU).in_flight.append(SimpleNamespace(settled=True, finished=False, two_phases=False, abandoned=False,
                                                            has_words=lambda: True, await_words=list, settle=lambda: None))
    run(0)
    live.state(group, GPU).in_flight.clear()
    run(1)
    if op == "reduce_scatter_tensor":
        run(0, lambda call: replace(call, reduce_op=dist.ReduceOp.AVG))
        run(1)
    transport.is_open = False
    run(0)
    transport.is_open = True
    if measured:
        costs.costs = replace(costs.costs, ratio=1.4)
        run(0)
        run(1)
    live.repeats.forget(live.state(group, GPU))
    run(0)


@ONE_CALL
def test_probes_of_one_sided_calls_go_as_known_ones(gpu, live, monkeypatch):
    transport = KnownTransport()
    monkeypatch.setattr(Router, "_opened", lambda *_, **__: SimpleNamespace(transport=transport, why_not=None))
    live = Runtime(ZipcclConfig(enabled=True, min_bytes=0, transport="adaptive", split_lists="all_or_none"), {"cuda": "cuda"})
    group, gpu.current = Group(gpu), 7
    for op in AGAIN:
        test = call_of(op, group)
        probe = live.router.prober(specs()[op], test, live.state(group, GPU))
        before = transport.num_known
        assert [probe(test) for _ in range(3)] == [True] * 3 and transport.num_known == before + 2 and not live.stats.snapshot()
    lists = call_of("all_to_all", group)
    monkeypatch.setattr(one_sided, "_whole", lambda tensors: torch.cat(list(tensors)))
    probe = live.router.prober(specs()["all_to_all"], lists, live.state(group, GPU))
    assert [probe(lists) for _ in range(2)] == [True] * 2 and transport.num_known == 6


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
def test_probes_of_zipped_calls_go_as_known_ones(gpu, live, op):
    """... and leave no trace."""
    group, kinds, gpu.current = live.group, {}, 7
    test, state = call_of(op, group), live.state(group, GPU)
    assert all(live._run_to_end(specs()[op], test, state, kinds) for _ in range(4))
    assert live.repeats.num_again == 3 and not live.stats.snapshot() and not state.capacities and not state.in_flight
    assert not live.repeats._known
