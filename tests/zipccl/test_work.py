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

DONE = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


@pytest.fixture
def state(monkeypatch):
    monkeypatch.setattr(group_state, "SideChannel", lambda group, device: SimpleNamespace(close=lambda: None))
    return GroupState(SimpleNamespace(group_name="g"), torch.device("cpu"))


class Streams:
    """The module ``streams`` with a record of what every stream waits for."""

    def __init__(self, monkeypatch):
        self.current, self.waits = "main", []
        monkeypatch.setattr(streams, "current", lambda device: self.current)
        monkeypatch.setattr(streams, "join", lambda device, other: self.waits.append((self.current, other)))


def make(state, word=0, resend=lambda: None, finish=lambda: None):
    """A call of one rank in flight, with a status word that claims to be on a GPU."""
    words = SimpleNamespace(tolist=lambda: [word], is_cuda=True, device="cuda")
    overflows = bool(word & OVERFLOW_BIT)
    pending = Pending(words=words, status_work=DONE, payload_work=DONE, release=lambda: None,
                      on_words=lambda words: resend() if overflows else None, finish=lambda: None if overflows else finish())
    state.add(pending)
    return ZipWork(pending, state)


def test_wait_joins_the_stream_on_which_the_next_call_sent_again(state, monkeypatch):
    record = Streams(monkeypatch)
    work = make(state, word=OVERFLOW_BIT)
    record.current = "of the next call"
    state.settle()
    record.current = "of the waiter"
    work.wait()
    assert ("of the waiter", "of the next call") in record.waits


def test_every_wait_joins_the_stream_on_which_polling_finished(state, monkeypatch):
    record = Streams(monkeypatch)
    work = make(state)
    record.current = "of the poller"
    assert work.is_completed()
    for record.current in ("first", "second"):
        work.wait()
    assert {("first", "of the poller"), ("second", "of the poller")} <= set(record.waits)


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
    group = SimpleNamespace(group_name="g")
    on_cpu, on_gpu, again = (live.state(group, torch.device(name)) for name in ("cpu", "cuda:0", "cpu"))
    assert on_cpu is again and on_cpu is not on_gpu
    live.close(group)
    assert sorted(closed) == ["cpu", "cuda"]
