"""payload_watch.py: payloads that torch's watchdog does not know are named when they are late, once, and no others are."""
import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ds_zipccl.collectives import payload_watch
from ds_zipccl.collectives.payload_watch import PayloadWatch


class Flight:
    """What the watch asks of one. ``answers``: of its event, one after another; the last one for ever."""
    device, timeout_s, where = torch.device("cuda:0"), 600.0, "all_gather_into_tensor, group 7, rank 1 of 2"

    def __init__(self, launched_at: float, *answers):
        self.launched_at, self.looked_at, self._answers, self.num_asked = launched_at, 0.0, list(answers), 0

    @property
    def filled(self):
        self.num_asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        answer = answer(self) if callable(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(passed=answer)


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(payload_watch, "LOOK_S", 0.01)
    made = []

    def make(*flights, end_process=lambda: None, threads=False):
        found = PayloadWatch(end_process)
        made.append(found)
        found._thread = None if threads else threading.current_thread()         # there already
        for flight in flights:
            found.add(flight)
        return found

    yield make
    for each in made:
        each._ended.set()


def test_a_late_payload_is_named_once(watch):
    flight = Flight(1000.0, False)
    w = watch(flight)
    assert w.late(1600.0) == [] and flight.num_asked == 0               # not before its time
    (message,) = w.late(1601.0)
    assert all(word in message for word in ("all_gather_into_tensor, group 7, rank 1 of 2", "601 s", "600 s"))
    assert w.late(9000.0) == []


def test_the_thread_has_ended_when_the_program_goes_on(watch):
    begun = threading.Event()

    def slowly(flight):
        begun.set()
        time.sleep(0.3)
        return True

    flight = Flight(time.monotonic() - 1000, slowly)
    w = watch(flight, threads=True)
    assert begun.wait(10)
    w.end()
    assert not w._thread.is_alive()


def test_what_has_ended_is_asked_once_and_its_next_call_again(watch):
    flight = Flight(1000.0, True, False)
    w = watch(flight)
    assert w.late(1700.0) == [] and w.late(9000.0) == [] and flight.num_asked == 1
    flight.launched_at = 9001.0
    assert w.late(9100.0) == [] and len(w.late(9700.0)) == 1


def test_a_flight_that_never_went_so_is_not_asked(watch):
    flight = Flight(0.0, False)
    assert watch(flight).late(9000.0) == [] and flight.num_asked == 0


def test_a_call_that_begins_while_its_flight_is_looked_at_is_not_late(watch):
    def begins(flight):
        flight.launched_at = 1650.0
        return False

    assert watch(Flight(1000.0, begins)).late(1700.0) == []


def test_a_lost_device_is_not_ours_to_report(watch):
    assert watch(Flight(1000.0, RuntimeError("CUDA error"))).late(1700.0) == []


def test_flights_are_not_kept(watch):
    w = watch(Flight(1000.0, False))
    gc.collect()
    assert w.late(1700.0) == []


@pytest.mark.parametrize("setting, ends", [(None, True), ("3", True), ("1", True), ("0", False), ("2", False)])
def test_the_process_ends_as_torch_would_end_it(watch, monkeypatch, setting, ends):
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    if setting is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", setting)
    said, ended, messages = threading.Event(), threading.Event(), []
    monkeypatch.setattr(payload_watch.log, "critical", lambda message: (messages.append(message), said.set()))
    flight = Flight(1e-9, False)                # long ago
    w = watch(flight, end_process=ended.set, threads=True)
    assert said.wait(30) and "a compressed payload did not come" in messages[0]
    assert ended.wait(30 if ends else 0.2) == ends
    w.end()
