"""A call in flight: what its waits do on a GPU with several streams (shown with streams that only keep a record), and
what is remembered per group."""
from types import SimpleNamespace

import pytest
import torch

from ds_zipccl.codec.format import OVERFLOW_BIT
from ds_zipccl.collectives import group_state, runtime, streams
from ds_zipccl.collectives.group_state import GroupState
from ds_zipccl.collectives.work import Pending, ZipWork
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.errors import CollectiveError

DONE = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


class Group:
    group_name = "g"


@pytest.fixture
def state(monkeypatch):
    monkeypatch.setattr(group_state, "SideChannel", lambda group, device: SimpleNamespace(close=lambda: None, abort=lambda: None))
    monkeypatch.setattr(group_state, "WATCH", SimpleNamespace(add=lambda state: None, wake=lambda: None))
    group = Group()
    yield GroupState(group, torch.device("cpu"))


class Streams:
    """The module ``streams`` with a record of what every stream waits for."""

    def __init__(self, monkeypatch):
        self.current, self.waits = "main", []
        monkeypatch.setattr(streams, "current", lambda device: self.current)
        monkeypatch.setattr(streams, "join", lambda device, other: self.waits.append((self.current, other)))


def make(state, word=0, resend=lambda: None, finish=lambda: None, status_work=DONE):
    """A call of one rank in flight, with a status word that claims to be on a GPU."""
    words = SimpleNamespace(tolist=lambda: [word], is_cuda=True, device="cuda")
    overflows = bool(word & OVERFLOW_BIT)
    pending = Pending(words=words, status_work=status_work, payload_work=DONE, release=lambda: None, streams_of=state,
                      on_words=lambda words: resend() if overflows else None, finish=lambda: None if overflows else finish())
    work = ZipWork.of(pending, state)
    state.add(pending)
    return work


def test_wait_joins_the_stream_on_which_the_next_call_sent_again(state, monkeypatch):
    record = Streams(monkeypatch)
    work = make(state, word=OVERFLOW_BIT)
    record.current = "of the next call"
    state.settle()
    record.current = "of the waiter"
    work.wait()
    assert ("of the waiter", "of the next call") in record.waits


def test_before_the_next_call_nothing_is_sent_again(state, monkeypatch):
    """Though its words are here: on another rank they may not be, and what is queued should have one order on all. Calls behind it stay,
    too; where too many are in flight, all ranks send again at that call."""
    Streams(monkeypatch)
    done = []
    first, overflowed = make(state), make(state, word=OVERFLOW_BIT, resend=lambda: done.append(0))
    behind = [make(state) for _ in range(group_state.MAX_UNSETTLED - 1)]
    state.advance()
    assert first._pending.settled and not any(work._pending.settled for work in (overflowed, *behind)) and done == []
    behind.append(make(state))
    state.advance()
    assert done == [0] and all(work._pending.settled for work in behind)
    overflowed.wait()
    assert done == [0]


def test_every_wait_joins_the_stream_on_which_polling_finished(state, monkeypatch):
    record = Streams(monkeypatch)
    work = make(state)
    record.current = "of the poller"
    assert work.is_completed()
    for record.current in ("first", "second"):
        work.wait()
    assert {("first", "of the poller"), ("second", "of the poller")} <= set(record.waits)


def test_what_overflowed_goes_again_on_a_stream_of_the_groups(state, monkeypatch):
    """Not on the caller's, who may have made it wait for what another rank sends after this."""
    record = Streams(monkeypatch)
    monkeypatch.setattr(group_state.GroupState, "resend_stream", "of the group")

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, record.current = record.current, self.stream or record.current

        def __exit__(self, *exc):
            record.current = self.before

    monkeypatch.setattr(streams, "On", On)
    sent_on = []
    overflowed = make(state, word=OVERFLOW_BIT, resend=lambda: sent_on.append(record.current))
    make(state).wait()
    overflowed.wait()
    assert sent_on == ["of the group"] and ("main", "of the group") in record.waits


def settle_in_thread(state):
    """One look of the watch's, and what the group's thread then does."""
    busy = state.push_on()
    state.completer.close()
    return busy


def test_what_nobody_settles_is_settled_by_the_groups_thread(state, monkeypatch):
    """At the second look, so that who waits in time never meets the thread, but what overflowed after more on a GPU; in order; and only
    where the status words have come."""
    Streams(monkeypatch)
    monkeypatch.setitem(group_state.RESEND_LOOKS, "cpu", 9)
    done = []
    late = SimpleNamespace(wait=lambda: pytest.fail("waited for words that are not here"), is_completed=lambda: False)
    plain = make(state)
    works = [make(state, word=OVERFLOW_BIT, resend=lambda i=i: done.append(i)) for i in range(2)] + [make(state, status_work=late)]
    assert settle_in_thread(state) and not plain._pending.settled
    assert settle_in_thread(state) and plain._pending.settled and not works[0]._pending.settled
    for look in range(1, 9 + 1):
        assert done == [] and settle_in_thread(state), look
    assert done == [0, 1]
    for _ in range(3):
        assert settle_in_thread(state)              # the third call is still to be settled, and nobody can
    assert not any(work._pending.finished for work in works)        # whoever waits fills the output, on his own stream
    works[1].wait()
    assert works[1].is_completed() and done == [0, 1]


def test_a_failure_in_the_groups_thread_is_the_calls_own(state, monkeypatch):
    Streams(monkeypatch)

    def broken():
        raise RuntimeError("link down")

    work = make(state, word=OVERFLOW_BIT, resend=broken)
    for _ in range(3):
        settle_in_thread(state)
    assert not state.push_on()
    with pytest.raises(RuntimeError, match="link down"):
        work.wait()


def test_resend_that_fails_fails_its_waits(state, monkeypatch):
    Streams(monkeypatch)

    def broken():
        raise RuntimeError("link down")

    work = make(state, word=OVERFLOW_BIT, resend=broken)
    with pytest.raises(RuntimeError, match="link down"):
        state.settle()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="link down"):
            work.wait()
    assert not work.is_success() and str(work.exception()) == "link down"


def test_close_completes_the_others_when_one_fails(state, monkeypatch):
    Streams(monkeypatch)
    closed, finished = [], []

    def broken():
        raise RuntimeError("corrupt")

    state.side.close = lambda: closed.append(True)
    works = [make(state, finish=broken), make(state, finish=lambda: finished.append(True))]
    with pytest.raises(RuntimeError, match="corrupt"):
        state.close()
    assert closed and finished and works[1].is_completed()


def test_capacity_classes_are_bounded_and_the_recent_ones_stay(state):
    def capacity(row_numel):
        return state.capacity("all_gather_into_tensor", torch.bfloat16, row_numel, 64)

    kept = capacity(-1)
    for size in range(3 * group_state.MAX_CLASSES):
        capacity(size)
        assert capacity(-1) is kept
    assert len(state.capacities) == group_state.MAX_CLASSES


def test_a_group_has_a_state_per_device_type(monkeypatch):
    closed = []
    monkeypatch.setattr(group_state, "SideChannel",
                        lambda group, device: SimpleNamespace(close=lambda: closed.append(device.type)))
    live = runtime.Runtime(ZipcclConfig(enabled=True), {})
    group = Group()
    on_cpu, on_gpu, again = (live.state(group, torch.device(name)) for name in ("cpu", "cuda:0", "cpu"))
    assert on_cpu is again and on_cpu is not on_gpu
    live.close(group)
    assert sorted(closed) == ["cpu", "cuda"]


def test_a_group_that_was_destroyed_behind_our_back_is_dropped(monkeypatch):
    """Its channels end when it goes, or when another one takes its name; what was in flight on it fails at once."""
    Streams(monkeypatch)
    ended = []

    class Channel:
        def __init__(self, group, device):
            self.number = group.number

        def abort(self):
            ended.append(self.number)

    monkeypatch.setattr(group_state, "SideChannel", Channel)
    live = runtime.Runtime(ZipcclConfig(enabled=True), {})
    groups = [Group() for _ in range(3)]
    for number, group in enumerate(groups):
        group.number = number
    first = live.state(groups[0], torch.device("cpu"))
    work = make(first)
    second = live.state(groups[1], torch.device("cpu"))
    assert ended == [0] and second.group is groups[1]
    for _ in range(2):
        with pytest.raises(CollectiveError, match="another group has its name"):
            work.wait()
    groups[2].group_name = "h"
    del group, groups[1]
    assert ended == [0, 1] and second.group is None
    live.state(groups[1], torch.device("cpu"))
    assert [len(states) for states in live._groups.values()] == [0, 1]
    live.close(groups[0])


def test_a_call_that_ended_at_once_asks_nobody_for_its_words(state):
    """The thread that settles calls may have just looked at it; its flight has the words of another call by then."""
    def asked(*_):
        raise AssertionError("asked for the words of another call")

    words = SimpleNamespace(tolist=asked, at_once=asked, is_cuda=True, device="cuda")
    pending = Pending(words=words, status_work=SimpleNamespace(wait=asked, is_completed=asked), payload_work=DONE, release=None,
                      on_words=asked, finish=asked)
    pending.end_at_once(7)
    state.add(pending)
    assert pending.has_words()
    state._settle(pending)
    assert pending.settled and pending.finished
