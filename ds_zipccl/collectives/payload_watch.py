"""Finds payloads that never end. Torch's watchdog knows nothing of those that NCCL was given without it (nccl_direct.py), and a host that
waits for its GPU asks for no status word: where a rank is stuck, all others would wait for it for ever. So a thread looks, and after the
group's own timeout does what torch's watchdog does: it says so, and ends the process, unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 or 2.
"""
import atexit
import ctypes
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable

import torch

from zipscape.errors import describe

log = logging.getLogger("ds_zipccl")

LOOK_S = 5.0                # how often
ENDING_S = 1.0              # as long the end of the program waits for the thread
_RELAXED = 2                # CU_STREAM_CAPTURE_MODE_RELAXED: what this thread asks must not end another's capture of a graph


class PayloadWatch:
    """``end_process``: what to do after a late payload was named."""

    def __init__(self, end_process: Callable[[], None]):
        self._end_process, self._lock, self._ended = end_process, threading.Lock(), threading.Event()
        self._flights, self._thread = weakref.WeakSet(), None

    def add(self, flight) -> None:
        """Of calls whose payload is launched without torch. It has ``launched_at`` (``time.monotonic`` of its last one), ``filled``,
        ``timeout_s`` and ``where``. Once for each."""
        with self._lock:
            self._flights.add(flight)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="zipccl payloads", daemon=True)
                self._thread.start()

    def late(self, now: float) -> list[str]:
        """What to say of payloads that have not ended in time; each once."""
        with self._lock:
            flights = list(self._flights)
        found = []
        for flight in flights:
            launched_at, seconds = flight.launched_at, now - flight.launched_at
            if seconds <= flight.timeout_s or flight.looked_at == launched_at:
                continue
            flight.looked_at = launched_at
            if not _has_ended(flight) and flight.launched_at == launched_at:            # else it began another call meanwhile
                found.append(describe("a compressed payload did not come", got=f"nothing in {seconds:.0f} s", where=flight.where,
                                      expected=f"within the group's timeout, {flight.timeout_s:g} s",
                                      todo="look for the rank that stopped: the others wait for it"))
        return found

    def _run(self) -> None:
        _allow_captures()
        while not self._ended.wait(LOOK_S):
            messages = self.late(time.monotonic())
            for message in messages:
                log.critical(message)
            if messages and os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") not in ("0", "2"):
                self._end_process()

    def end(self) -> None:
        self._ended.set()
        if self._thread is not None:            # in C++ while Python ends, it would end the process by an abort
            self._thread.join(ENDING_S)


def _has_ended(flight) -> bool:
    try:
        torch.cuda.set_device(flight.device)            # of this thread
        return flight.filled.passed
    except RuntimeError:                                # the device is lost, or the program ends: others say so
        return True


def _allow_captures() -> None:
    try:
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    except (OSError, AttributeError):                   # no CUDA, nothing captured
        pass


def _end_process() -> None:
    logging.shutdown()
    os.kill(os.getpid(), signal.SIGABRT)


WATCH = PayloadWatch(_end_process)
atexit.register(WATCH.end)
