"""Threads that complete calls: one per group, for futures and for calls that nobody settles; one per process that looks for these.

A call may need this rank's host after its launch (to send again what overflowed, for an all_reduce's second phase), while the host waits
for something else: another group's call, a native one, a message, a file. Ranks that wait in different orders would then wait for each
other for ever. So calls whose status words have come and that nobody settles for PATIENCE_S are settled by their group's thread. On a GPU
what they send has its place among all that it is told to do, which should be the same on all ranks (docs/architecture.md): there it is sent
by the thread only after RESEND_PATIENCE_S, when the host is stuck rather than late.
"""
import atexit
import itertools
import queue
import threading
import time
import weakref

import torch

PATIENCE_S = 0.02
RESEND_PATIENCE_S = 10.0
ENDING_S = 1.0              # as long the end of the program waits for the thread that looks


class Completer:
    """A group's thread, which starts with its first task. Torch's DDP asks for a future per bucket and goes on with its backward pass."""

    def __init__(self, device: torch.device):
        self._device = device
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed, self._lock = False, threading.Lock()

    def future(self, work, value: list[torch.Tensor]) -> torch.futures.Future:
        """A future that gets ``value`` when ``work.wait()`` has returned, or what it raised."""
        future = torch.futures.Future(devices=[self._device] if self._device.type == "cuda" else None)

        def complete():
            try:
                work.wait()
                future.set_result(value)
            except BaseException as error:
                future.set_exception(error)

        self.run(complete)
        return future

    def run(self, task) -> None:
        """Has the thread call ``task()``, which does not raise, on a stream of the thread's own; after ``close`` calls it here."""
        with self._lock:
            if not self._closed:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="zipccl group", daemon=True)
                    self._thread.start()
                self._queue.put(task)
                return
        task()

    def _run(self) -> None:
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):         # set_result marks the point on this stream that waiters join
            while (task := self._queue.get()) is not None:
                task()
                del task

    def close(self, wait: bool = True) -> None:
        """Ends the thread after the tasks it has."""
        with self._lock:
            self._closed = True
            if self._thread is None:
                return
            self._queue.put(None)
        if wait:
            self._thread.join()


class Watch:
    """Asks every group state that has calls in flight, once in PATIENCE_S, to ``push_on``. Sleeps while there are none."""

    def __init__(self):
        self._states = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._awake, self._ended = threading.Event(), False
        self._is_awake = False                  # the same as ``_awake``, for who asks in every call
        self._thread: threading.Thread | None = None

    def add(self, state) -> None:
        """``state.push_on()``: whether it has calls that are not settled."""
        self._states[next(self._numbers)] = state

    def wake(self) -> None:
        """After a call was launched."""
        if not self._is_awake:
            self._is_awake = True
            self._awake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="zipccl watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            self._awake.wait()
            time.sleep(PATIENCE_S)
            if not self._any_busy():
                self._awake.clear()
                self._is_awake = False
                if self._any_busy():            # launched just before
                    self.wake()

    def _any_busy(self) -> bool:
        busy = False
        for reference in self._states.valuerefs():
            state = reference()
            if state is not None:
                busy = state.push_on() or busy
        return busy

    def end(self) -> None:
        """Calls that are in flight when the program ends are not touched any more: what they need may be gone."""
        self._ended = True
        self._states.clear()
        self._awake.set()
        if self._thread is not None:            # in C++ while Python ends, it would end the process by an abort
            self._thread.join(ENDING_S)


WATCH = Watch()
atexit.register(WATCH.end)
