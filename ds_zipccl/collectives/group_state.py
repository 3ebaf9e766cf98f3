"""What is remembered per process group: calls in flight, capacities, the switch's decisions, the side channels."""
import functools
import logging
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from ds_zipccl.collectives import gloo_exit, streams, switch
from ds_zipccl.collectives.capacity import Capacity
from ds_zipccl.collectives.completer import PATIENCE_S, RESEND_PATIENCE_S, WATCH, Completer
from ds_zipccl.collectives.cost import ONE_SIDED
from ds_zipccl.collectives.transport import SideChannel
from ds_zipccl.collectives.windows import Windows
from ds_zipccl.collectives.work import Pending
from ds_zipccl.errors import CollectiveError
from ds_zipccl.kernels import rank_order
from zipscape.errors import ZipScapeError, describe

log = logging.getLogger("ds_zipccl")

MAX_CLASSES = 1024          # of capacity: sizes that are new in every call must not fill the memory
MAX_UNSETTLED = 16          # calls in flight
#: Of the watch, until what overflowed is sent again.
RESEND_LOOKS = {"cpu": 2, "cuda": int(RESEND_PATIENCE_S / PATIENCE_S)}


class GroupState:
    """State of one group and device type on this rank. All ranks of the group build it at the same call, because eligibility is decided
    from shapes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        # Who destroys a group without a word to us, as torch's own function under DeepSpeed does, shall be rid of it and of the channels.
        self._group, self._name = weakref.ref(group, self._when_gone(weakref.ref(self))), group.group_name
        self.side = SideChannel(group, device)
        self.completer = Completer(device)
        self._device, self._index = device, device.index
        self.capacities: dict[tuple, Capacity] = {}
        self._pair_capacities: dict[tuple, Capacity] = {}
        self.windows = Windows()
        self._measured: dict[tuple, switch.Measured] = {}
        self._told: dict[tuple, object] = {}            # of the costs there: which ``new_times`` has had
        self.num_asked, self.answers = 0, None          # all-to-alls before the switch knows pieces that could be zipped
        self._is_connected = self._ended = False
        self.in_flight: list[Pending] = []         # in launch order; changed here alone
        self.num_calls = 0                         # that were zipped on any rank: every rank counts alike
        self.when_busy: Callable[[], None] | None = None            # called once a call is in flight
        self._lock = threading.RLock()              # nobody holds it while he waits for another rank's launch
        WATCH.add(self)
        if device.type == "cpu":
            gloo_exit.wait_at_exit()

    @staticmethod
    def _when_gone(this):
        return lambda _: (state := this()) is not None and state.abort("its group was destroyed")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: it is gone."""
        return self._group()

    @functools.cached_property
    def bulk(self) -> SideChannel:
        """For resends and what else must not mix with other calls on the group. On a CPU made when first needed, in launch order."""
        return SideChannel(self.group, self._device, "bulk")

    def connect(self) -> None:
        """Before the first zipped call (CPU: in which pairs of ranks have channels to themselves), all ranks at the same point: on a GPU,
        whatever a resend would use for the first time is used now.

        NCCL connects two ranks, and CUDA loads a kernel, when first asked to, and either may wait for all that the device has to do. A
        payload there may wait for a rank that has not launched it, because it waits for this rank's part of a resend.
        """
        if not self._is_connected:
            self.settle()                           # CPU: calls before the first all-to-all, which may use ``bulk`` too
            self.side.connect()
            self.bulk.connect()
            self._is_connected = True
            if self._device.type == "cuda":
                rank_order.load_kernels(self._device)

    @functools.cached_property
    def status_stream(self) -> torch.cuda.Stream | None:
        """On which status words are exchanged, and the host waits for them; None on a CPU."""
        return torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None

    @functools.cached_property
    def decode_stream(self) -> torch.cuda.Stream | None:
        """On which payloads are waited for and decoded before anybody waits for the call; None on a CPU."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @functools.cached_property
    def payload_stream(self) -> torch.cuda.Stream | None:
        """Of payloads that are not torch's to launch; None on a CPU."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @functools.cached_property
    def resend_stream(self) -> torch.cuda.Stream | None:
        """On which what a settled call needs is queued, in launch order on every rank; None on a CPU. Of high priority, so in no queue of
        the hardware with payloads and what waits for them."""
        return torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None

    def capacity(self, op: str, dtype: torch.dtype, row_numel: int, first_spill: float) -> Capacity:
        """The capacity class of such calls; a new one starts with the share ``first_spill`` of a tile's raw bytes. The least
        recently used class is forgotten when there are too many, the same one on every rank."""
        key = op, dtype, row_numel
        capacity = self.capacities.pop(key, None) or Capacity.of(row_numel, dtype.itemsize, first_spill)
        self.capacities[key] = capacity
        if len(self.capacities) > MAX_CLASSES:
            self._forget_class(next(iter(self.capacities)))
        return capacity

    def likely_spill(self, op: str, dtype: torch.dtype, row_numel: int, first_spill: float) -> int:
        """Sub-pool bytes per tile of such calls, without a trace in the classes: ranks may ask differently often."""
        capacity = self.capacities.get((op, dtype, row_numel)) or Capacity.of(row_numel, dtype.itemsize, first_spill)
        return capacity.spill_per_tile

    def forget_rooms(self, op: str, dtype: torch.dtype) -> None:
        """Such calls start anew, with the room of new classes: all ranks at the same call."""
        for key in [key for key in self.capacities if key[:2] == (op, dtype)]:
            self._forget_class(key)

    def forget_idle_rooms(self, op: str, dtype: torch.dtype) -> None:
        """The same of those classes that have more room than a new one, and had no call since this was asked last."""
        for key in [key for key, capacity in self.capacities.items() if key[:2] == (op, dtype) and capacity.is_idle()]:
            self._forget_class(key)

    def _forget_class(self, key: tuple) -> None:
        self.capacities.pop(key).is_forgotten = True

    def pair_capacity(self, op: str, peer: int, outgoing: bool, dtype: torch.dtype, numel: int, first_spill: float) -> Capacity:
        """The class of what goes to or comes from ``peer``; sizes of one power of two share it, since uneven ones change with every call.
        Both ends of the pair keep the same: they see the same words. Never forgotten: there are few, and the ends could not agree
        which."""
        key = op, peer, outgoing, dtype, numel.bit_length()
        capacity = self._pair_capacities.get(key)
        if capacity is None:
            capacity = self._pair_capacities[key] = Capacity.of(numel, dtype.itemsize, first_spill)
        return capacity

    def measured(self, op: str, dtype: torch.dtype) -> switch.Measured:
        """What the switch knows of such calls."""
        measured = self._measured.get((op, dtype))
        if measured is None:
            measured = self._measured[op, dtype] = switch.Measured()
        return measured

    def goes_one_sided(self) -> bool:
        """Whether the switch found that faster for any of the group's calls."""
        return any(m.costs is not None and m.costs.one_sided is not None for m in self._measured.values())

    def switch_report(self) -> dict[str, int | None]:
        """{"op dtype": bytes from which on such calls are zipped, None: never}, of what was measured; where symmetric memory is in use also
        {"op dtype one-sided": bytes from which on they take it}."""
        report = {}
        for (op, dtype), measured in self._measured.items():
            name, costs = f"{op} {str(dtype).removeprefix('torch.')}", measured.costs
            if costs is not None:
                report[name] = costs.zipped_from()
                if costs.one_sided is not None:
                    report[f"{name} one-sided"] = costs.first(ONE_SIDED)
        return report

    def new_times(self) -> dict[str, dict]:
        """{"op dtype": ``Costs.as_dict``} of what was measured since the last call of this."""
        news = {(op, dtype): m.costs for (op, dtype), m in self._measured.items()
                if m.costs not in (None, switch.NO_CHOICE) and m.costs is not self._told.get((op, dtype))}
        self._told |= news
        return {f"{op} {str(dtype).removeprefix('torch.')}": costs.as_dict() for (op, dtype), costs in news.items()}

    def count_call(self) -> int:
        """Of one that other ranks may have zipped; the number of those before."""
        self.num_calls += 1
        return self.num_calls - 1

    def add(self, pending: Pending) -> None:
        pending.number = self.count_call()
        with self._lock:
            self.in_flight.append(pending)
        if self.when_busy is not None:
            self.when_busy()
        WATCH.wake()

    def advance(self) -> None:
        """Before the next call of the group, zipped or native. Settles what has its status words and is not sent again, and waits for words
        only where it must: for a call that is not to be followed by another before it is settled, or whose handle was dropped (it is
        completed here, since nobody else will), or where too many were launched behind it.

        What overflowed is sent again at points of the program alone, the same on every rank that runs it, whenever words come: in these
        cases and in waits. Streams share the hardware's queues: where one rank has a resend before the next payload and another one behind
        it, each may stand behind what waits for the other.
        """
        if not self.in_flight:
            return
        unsettled = [pending for pending in self.in_flight if not pending.settled]
        oldest = self.num_calls - MAX_UNSETTLED
        must = max([0, *[i for i, pending in enumerate(unsettled, 1)
                         if pending.number < oldest or pending.two_phases or pending.abandoned]])
        try:
            for i, pending in enumerate(unsettled):
                if i >= must and (not pending.has_words() or pending.may_queue_more()):
                    break
                self._settle(pending)
            for pending in [pending for pending in self.in_flight if pending.settled and pending.abandoned]:
                self._finish_for_nobody(pending)
        finally:
            self._forget_finished()

    def settle(self) -> None:
        """Settles every call in flight: before this rank's host waits for other ranks in something that does not pass through here, and
        before the second channel is used in another way."""
        if not self.in_flight:
            return
        try:
            for pending in tuple(self.in_flight):
                self._settle(pending)
                if pending.abandoned:
                    self._finish_for_nobody(pending)
        finally:
            self._forget_finished()

    def bring_up_to_date(self, capacity: Capacity) -> None:
        """Takes account of what calls of this class needed; waits for the words of those that its next call must not go without. A class
        may be a pair of ranks' own affair: so nothing is sent again here, which other ranks would do elsewhere."""
        while (need := capacity.overdue()) is not None:
            for pending in () if need.is_known() else tuple(self.in_flight):
                if pending.two_phases:
                    self._settle(pending)
                elif not pending.settled:
                    words = pending.await_words()
                    with self._lock:
                        if not pending.settled:
                            pending.look(words)
                if need.is_known():
                    break
            capacity.take_account()

    def _settle(self, pending: Pending) -> None:
        """The calls launched before it must be settled."""
        pending.await_words()
        with self._lock:
            pending.settle()

    def _finish_for_nobody(self, pending: Pending) -> None:
        """A failure belongs to the call's own handle, which is gone; the call that settles it must go on, as on the other ranks."""
        try:
            with self._lock:
                pending.finish()
        except ZipScapeError:
            log.exception("a call whose handle was dropped failed")

    def complete(self, pending: Pending) -> None:
        """Settles the calls launched before ``pending``, strictly in launch order, and finishes it."""
        try:
            for earlier in tuple(self.in_flight):
                if pending.finished:            # by another thread
                    return
                if not earlier.settled:
                    self._settle(earlier)
                if earlier is pending:
                    break
            with self._lock:
                pending.finish()
        finally:
            self._forget_finished()

    def finish_at_once(self, pending: Pending) -> bool:
        """``complete`` for a call of ``Repeats.again``, where the words of all ranks are there, no frame overflowed, and the current stream
        is the one it was launched on; False: it is as it was."""
        flight = pending.flight
        if streams.of_device(self._index) != flight.stream:
            return False
        with self._lock:
            if pending.settled:
                return False
            in_flight = self.in_flight
            for earlier in in_flight:
                if earlier is pending:
                    break
                if not earlier.settled:
                    return False
            if not flight.finish_at_once(pending.count):
                return False
            pending.end_at_once(flight.stream)
            self.in_flight = [] if len(in_flight) == 1 else [other for other in in_flight if other is not pending]
        return True

    def push_on(self) -> bool:
        """Has the group's thread settle what has had its status words since the last look, and nobody has settled; on a GPU what sends
        something then only after more looks. Returns whether there are calls that are not settled. Never waits."""
        pending = next((pending for pending in tuple(self.in_flight) if not pending.settled), None)
        if pending is None:
            return False
        if pending.num_looks == 0 or pending.has_words():
            pending.num_looks += 1
            resends = pending.num_looks == RESEND_LOOKS[self._device.type]
            if resends or pending.num_looks == 2:
                self.completer.run(functools.partial(self._settle_what_has_words, resends))
        return True

    def _settle_what_has_words(self, resends: bool) -> None:
        try:
            for pending in tuple(self.in_flight):
                if not pending.has_words() or not (resends or pending.settled) and pending.may_queue_more():
                    break
                self._settle(pending)
        except Exception:                       # whoever waits for the call gets it too
            log.debug("a call in flight could not be settled", exc_info=True)

    def close(self) -> None:
        """Completes every call in flight and ends the side channel, whatever fails; then raises the first failure."""
        if self._ended:
            return
        self._ended, failures = True, []
        with self._lock:
            for pending in self.in_flight:
                try:
                    pending.finish()
                except Exception as error:
                    failures.append(error)
            self.in_flight.clear()
        self.completer.close()              # not under the lock: its thread may need it to get through its last call
        self.side.close()
        if "bulk" in self.__dict__:
            self.bulk.close()
        if failures:
            raise failures[0]

    def abort(self, why: str) -> None:
        """Ends the side channels on this rank alone and at once. The calls in flight fail; nothing of theirs is touched any more."""
        if self._ended:
            return
        self._ended = True
        failure = CollectiveError(describe("a zipped call cannot be completed", got=why, where=f"group {self._name}"))
        for pending in tuple(self.in_flight):          # not under the lock, which who waits for a payload has
            pending.fail(failure)
        self.in_flight = []
        self.completer.close(wait=False)
        self.side.abort()
        if "bulk" in self.__dict__:
            self.bulk.abort()

    def _forget_finished(self) -> None:
        with self._lock:
            self.in_flight = [pending for pending in self.in_flight if not pending.finished]
