"""Handles of zipped calls: a call in flight, and the Work the caller holds."""
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_zipccl.codec.format import OVERFLOW_BIT
from ds_zipccl.collectives import streams
from zipscape.errors import ZipScapeError


class Pending:
    """A zipped call in flight on one group. Owned by the group's queue; ``settle`` and ``finish`` are one thread's at a time.

    Life: launched -> settled (the status words are known; what overflowed has been sent again) -> finished (output
    filled, or failed for good: ``failure`` is then what every wait raises).
    """
    flight = count = None                       # see ``of_flight``
    number = 0                                  # among the calls of its group
    two_phases = settled = finished = False
    failure: BaseException | None = None
    handle = None                               # weak reference to the caller's Work
    num_looks = 0                               # of the watch, while nobody settled it
    _seen: list[int] | None = None
    _queued = None                              # GPU: the stream on which something was queued last for this call

    def __init__(self, *, words: torch.Tensor, status_work: dist.Work, payload_work: dist.Work, finish, on_words, release,
                 outputs: tuple[torch.Tensor, ...] = (), two_phases: bool = False, streams_of=None):
        """``on_words``, ``finish``, ``two_phases``: see ``launch.Flight``. ``release``: gives the buffers back. ``streams_of``: the
        group's state, whose GPU streams ``status_stream`` (on which status words are waited for) and ``resend_stream`` are used."""
        self._words, self._status_work, self._payload_work = words, status_work, payload_work
        self._streams_of, self.two_phases = streams_of, two_phases
        self._finish, self._on_words, self._release = finish, on_words, release
        self.outputs = outputs
        self._look = getattr(words, "at_once", None)         # the words without waiting for anything, or None

    @staticmethod
    def of_flight(flight, state, count: int | None = None) -> "Pending":
        """Of a launch.Flight. ``count``: of the exchange, where ``GroupState.finish_at_once`` may be asked."""
        self = object.__new__(_OfFlight)            # without __init__, which takes as long as all of this
        self._words = self._status_work = flight.words
        self._payload_work, self._streams_of, self.outputs = flight, state, flight.outputs
        if flight.two_phases:
            self.two_phases = True
        if count is not None:
            self.flight, self.count = flight, count
        return self

    def end_at_once(self, stream: int) -> None:
        """Settled and finished, on this stream. Who is about to ask for its words must not ask those of the flight's next call."""
        self._queued, self.settled, self.finished, self._seen, self.flight = stream, True, True, [], None

    def await_words(self) -> list[int]:
        """The ranks' status words: waits for encode plus one small message, never for the payload. Any number of threads at once."""
        if self._seen is None:
            self._seen = self._look and self._look()
        if self._seen is None:
            # On a stream of its own, so that the host waits for the words alone and not for payloads queued before them.
            with streams.On(self._streams_of and self._streams_of.status_stream):
                self._status_work.wait()
                self._seen = self._words.tolist()
        return self._seen

    def has_words(self) -> bool:
        """``await_words`` would not wait."""
        return self._seen is not None or self._status_work.is_completed()

    def may_queue_more(self) -> bool:
        """Of one that ``has_words``: whether ``settle`` may have something to send: again, or an all_reduce's sums."""
        return self.two_phases or any([word & OVERFLOW_BIT for word in self.await_words()])

    def look(self, words: list[int]) -> None:
        """Has the call's classes know what it needed, before it is settled: of one without two phases."""

    def settle(self) -> None:
        """After ``await_words`` (an all_reduce: and its first phase), sends again what overflowed.

        On a GPU on a stream that waits for nothing of the caller's, who may have made his wait for what other ranks send only after this.
        That the words are here means that the stream of the launch has passed it.
        """
        if self.settled:
            return
        words = self.await_words()
        self.settled = True
        try:
            if self.two_phases or any([word & OVERFLOW_BIT for word in words]):
                with streams.On(self._streams_of and self._streams_of.resend_stream):
                    self._on_words(words)
                    self._mark()
            else:
                self._on_words(words)
        except ZipScapeError as error:              # of this call alone: its waits raise it, not the call that settles it
            self.failure = error
        except BaseException as error:
            self.failure = error
            raise

    def finish(self) -> None:
        """Fills the output (on a GPU: queues it on the current stream) and releases the buffers.

        A call that fails (corrupt frame, broken connection) is finished too: it must not fail again in later calls. Its
        buffers are dropped, not reused: a transfer may still write to them.
        """
        if self.finished:
            return
        try:
            if not self.settled:
                self.settle()
            if self.failure is not None:            # the resend failed when another call settled this one
                raise self.failure
            self._payload_work.wait()
            if self._queued is not None:
                self.join()
            self._finish()
            self._mark()
            self._release()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.finished = True
            self._finish = self._release = self._on_words = self.flight = None     # drop the tensors they hold

    def fail(self, failure: BaseException) -> None:
        """Nothing of the call is touched any more; its waits raise ``failure``."""
        if not self.finished:
            self.failure, self.settled, self.finished = failure, True, True

    def _mark(self) -> None:
        self._queued = streams.current(self._words.device)

    def join(self) -> None:
        """Makes the current stream wait for the output: a resend, or a finish by polling or by the next call, may have
        been queued on another stream than the waiting one."""
        if self._queued is not None:
            streams.join(self._words.device, self._queued)

    @property
    def ready(self) -> bool:
        """``finish`` would not block the host (but for an all_reduce's second phase)."""
        return self.finished or (self._status_work.is_completed() and self._payload_work.is_completed())

    @property
    def abandoned(self) -> bool:
        """The caller dropped his handle without waiting."""
        return self.handle is not None and self.handle() is None


class _OfFlight(Pending):
    """What a flight does is asked of it when it is needed: of most calls that are known, never."""

    def _look(self) -> list[int] | None:
        return self._words.at_once()

    def _finish(self) -> None:
        self._payload_work.finish()

    def _on_words(self, words: list[int]) -> None:
        self._payload_work.on_words(words)

    def _release(self) -> None:
        self._payload_work.release()

    def look(self, words: list[int]) -> None:
        self._payload_work.look(words)


class Waiter:
    """What ``ZipWork`` does, for who waits for a call himself and hands it to nobody: an object of torch's class takes longer to make than
    all else that a known call leaves to be written down."""

    @classmethod
    def of(cls, pending: Pending, state) -> "Waiter":
        self = cls()
        self._pending, self._state = pending, state
        pending.handle = weakref.ref(self)
        return self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        pending = self._pending
        if not pending.finished:
            if pending.flight is not None and self._state.finish_at_once(pending):
                return True
            self._state.complete(pending)
        if pending.failure is not None:
            raise pending.failure
        pending.join()
        return True


class ZipWork(Waiter, dist.Work):
    """The handle of an asynchronous zipped call.

    ``wait()`` returns when the output is ready to be used on the current stream (CPU: filled). It may block the host
    for the encode of all ranks and one 4-byte message; on a GPU never for the payload, but for an all_reduce's first phase. Handles may
    be waited for in any order, on any rank, with anything else in between. The handle keeps input, output and scratch alive until then; a
    dropped handle is completed by the next call on the group. ``get_future()``: completed by a thread of the group's.
    """

    def is_completed(self) -> bool:
        if not self._pending.finished and self._pending.ready:
            self.wait()
        return self._pending.finished

    def is_success(self) -> bool:
        return self._pending.failure is None

    def exception(self):
        return self._pending.failure

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """A future whose value is the list of output tensors; it fails as ``wait()`` would. On a GPU it is complete when the output's
        filling is queued, as torch's own: who waits for it joins the stream."""
        return self._state.completer.future(self, list(self._pending.outputs))


class DoneWork(dist.Work):
    """The handle of a call that was carried out before it returned."""

    def __init__(self, outputs: tuple[torch.Tensor, ...] = ()):
        super().__init__()
        self._outputs = outputs
        self._queued = streams.current(outputs[0].device) if outputs else None          # GPU: the stream that fills the outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._queued is not None:
            streams.join(self._outputs[0].device, self._queued)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        device = self._outputs[0].device if self._outputs else torch.device("cpu")
        future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        self.wait()                     # the future marks the point on this stream
        future.set_result(list(self._outputs))
        return future
