"""Calls like an earlier one, of which nothing has changed since: launched without the decision made anew.

A host that was busy elsewhere reads what it runs from memory, not from its caches, and a GPU that is idle waits for that: what takes 6 us
in a loop took 95 there, before the first kernel was queued. So ``again`` is one function that compares what decides, without calling
others, and one call of C that queues everything; what can wait is done after that, beside the GPU's work. ``launch`` is for those where
more has to be done first.
"""
import os
import time
import weakref

from ds_zipccl.collectives import nccl_direct, streams, transport
from ds_zipccl.collectives.capacity import CALM_AFTER, LAG
from ds_zipccl.collectives.cost import ZIPPED
from ds_zipccl.collectives.flight import Flight
from ds_zipccl.collectives.launch import Kind
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.work import Pending, ZipWork
from ds_zipccl.kernels.launch_calls import NOT_SO, refused

MAX_KNOWN = 4096
#: Whether there are calls for ``Repeats.again``.
AGAIN = os.environ.get("ZIPCCL_AGAIN", "0") not in ("", "0")


class Repeat:
    """A zipped call of one dense tensor to another, on a GPU. ``states``: of its group. ``capacity``: None: of a collective that has more
    than one class, or other things to do before its launch. ``box``: None: not for ``again``."""
    __slots__ = ("kind", "state", "group", "states", "index", "numel", "dtype", "reduce_op", "root", "always", "shapes", "name", "capacity",
                 "stream", "room", "flight_key", "box", "backend", "rooms", "workspace", "stats", "pairwise", "op")

    def __init__(self, call: Call, kind: Kind, flight: Flight, states: dict, group: weakref.ref):
        data, out = call.input, call.output
        self.kind, self.state, self.states, self.group = kind, kind.state, states, group
        self.index, self.numel, self.dtype = data.get_device(), out.numel(), out.dtype
        self.reduce_op, self.root, self.always = call.reduce_op, call.root, kind.launch.choice == "always"
        self.shapes, self.capacity, self.name, self.pairwise = kind.shapes, None, None, kind.spec.pairwise
        self.flight_key, (_, self.stream, _) = flight.key, flight.key
        if not flight.two_phases and not self.pairwise:
            (self.room,) = flight.key[2]
            (*name, _), = kind.classes
            self.name = tuple(name)
            self.capacity = self.state.capacities[self.name]
        self.rooms, self.workspace, self.stats, self.op = flight.rooms, kind.launch.workspace, kind.launch.stats, call.op
        self.box = self.state.side.ring_box() if AGAIN and flight.repeats_whole else None
        # Nothing else here keeps the group's communicators alive, and this goes with the group.
        self.backend = None if self.box is None else transport.direct(call.group, call.device)


class Repeats:
    """Those of one Runtime. ``num_again``: calls that ``again`` has launched."""

    def __init__(self, reprobe_calls: int):
        self._known: dict[tuple, Repeat] = {}
        self._reprobe_calls, self.num_again = reprobe_calls, 0

    def again(self, call: Call) -> ZipWork | None:
        """Launches the call, and counts it, where nothing but to queue it is to be done; None: ask ``launch``, nothing has happened."""
        data, out = call.input, call.output
        try:
            known = self._known.get((call.op, data.numel(), data.dtype, id(call.group)))
        except AttributeError:                                          # lists
            return None
        if (known is None or known.box is None or out.numel() != known.numel or out.dtype is not known.dtype
                or call.reduce_op is not known.reduce_op or call.root != known.root or call.input_splits or call.output_splits
                or data.get_device() != known.index or out.get_device() != known.index or len(known.states) != 1
                or not data.is_contiguous() or not out.is_contiguous() or streams.of_device(known.index) != known.stream
                or known.shapes is not None and known.shapes != (out.shape, data.shape)):
            return None
        state, kind, box = known.state, known.kind, known.box
        if state.in_flight:
            state.advance()
        measured = None
        if not known.always:
            choice = kind.choice
            if choice is None or choice.way != ZIPPED:
                return None
            measured, reprobe = choice.measured, self._reprobe_calls
            if measured.costs is not choice.costs or reprobe and (measured.num_calls + 1) % reprobe == 0:
                return None
            if not known.pairwise and (choice.spill != known.room or choice.room != known.name or measured.ways.get(choice.size) != ZIPPED):
                return None
        for capacity, room in known.rooms:
            if (capacity.calls_left_out or capacity.spill_per_tile != room or capacity.is_forgotten
                    or (capacity.num_calm < CALM_AFTER or len(capacity.under_way) >= LAG) and not capacity.look_ahead()):
                return None
        count = box.next_exchange()
        communicator = nccl_direct.handle(known.backend) if count >= 0 else 0
        flight = known.workspace.take_flight(known.flight_key) if communicator else None
        if flight is None:
            return None
        if flight.ended is not None:
            flight.join_ended()
        repeat = flight.repeat
        if repeat is None:
            repeat = flight.ready_to_repeat(box)
        code = NOT_SO if repeat is None else repeat.fire(repeat.address, communicator, data.data_ptr(), out.data_ptr(), count)
        if code == NOT_SO:
            known.workspace.give_flight(known.flight_key, flight)
            return None
        reading = box.begun(count, known.stream)
        if code:
            refused(code)
        return self._launched(known, call, flight, measured, reading, count)

    def _launched(self, known: Repeat, call: Call, flight: Flight, measured, reading, count: int) -> ZipWork:
        """Everything is queued; what follows from that."""
        state = known.state
        flight.repeated(call, reading)
        for capacity, _ in () if known.pairwise else known.rooms:       # pairs' own ``prepare`` has done it
            flight.needs = capacity.launched(),
        if measured is not None:
            measured.count()
        if known.name is not None:
            state.capacities[known.name] = state.capacities.pop(known.name)         # the one used last
        pending = Pending.of_flight(flight, state, count)
        state.add(pending)
        work = ZipWork(pending, state)
        self.num_again += 1
        flight.launched_at = time.monotonic()
        if known.stats is not None:
            known.stats.zipped(known.op, flight.raw_bytes, flight.wire_bytes)
        for capacity, _ in known.rooms:
            capacity.look_ahead()
        return work

    def launch(self, call: Call) -> tuple[Kind | None, Flight | None]:
        """(its kind, the flight, begun); without a flight: it goes zipped, and is to be launched as a call of this kind; without a kind:
        it is to be decided anew. In the order of ``Runtime.run``, since ranks may not find the same here."""
        data, out = call.input, call.output
        try:
            known = self._known.get((call.op, data.numel(), data.dtype, id(call.group)))
        except AttributeError:                                          # lists
            return None, None
        if (known is None or call.group is not known.group() or out.numel() != known.numel or out.dtype is not known.dtype
                or call.reduce_op is not known.reduce_op or call.root != known.root or call.input_splits or call.output_splits
                or data.get_device() != known.index or out.get_device() != known.index or len(known.states) != 1
                or not data.is_contiguous() or not out.is_contiguous() or streams.is_capturing()
                or known.shapes is not None and known.shapes != (out.shape, data.shape)):
            return None, None
        state, kind = known.state, known.kind
        if state.in_flight:
            state.advance()
        if not known.always:
            choice = kind.choice
            if choice is None or getattr(choice, "way", ZIPPED) != ZIPPED or not choice.holds(self._reprobe_calls):
                return None, None
        classes, capacity, launch = state.capacities, known.capacity, kind.launch
        if capacity is None:
            return kind, None
        if classes.get(known.name) is not capacity or streams.current(data.device) != known.stream:
            return kind, None
        classes[known.name] = classes.pop(known.name)                   # the one used last
        if capacity.overdue() is not None:
            launch.up_to_date(capacity)
        if capacity.calls_left_out or capacity.spill_per_tile != known.room:
            return kind, None
        flight = launch.workspace.take_flight(known.flight_key)
        if flight is not None:
            flight.begin(call)
            flight.needs = capacity.launched(),
        return kind, flight

    def remember(self, call: Call, kind: Kind, flight: Flight, states: dict) -> None:
        """After such a call was launched. ``states``: of the call's group, by device type."""
        if not kind.on_gpu or flight.key is None or isinstance(call.input, tuple) or isinstance(call.output, tuple):
            return
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        key, known = (call.op, call.input.numel(), call.input.dtype, id(call.group)), self._known
        group = weakref.ref(call.group, lambda ended: known.pop(key, None) if _is_of(known.get(key), ended) else None)
        known[key] = Repeat(call, kind, flight, states, group)

    def forget(self, state) -> None:
        """Those of a group that ends."""
        for key in [key for key, known in self._known.items() if known.state is state]:
            del self._known[key]


def _is_of(known: Repeat | None, group: weakref.ref) -> bool:
    return known is not None and known.group is group
