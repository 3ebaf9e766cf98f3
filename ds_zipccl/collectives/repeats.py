"""Calls like an earlier one, of which nothing has changed since: launched without the decision made anew.

A host that was busy elsewhere reads what it runs from memory, not from its caches, and a GPU that is idle waits for that: what takes 6 us
in a loop took 95 there, before the first kernel was queued. So ``again`` is one function that compares what decides, without calling
others, and one call of C that queues everything; what can wait is done after that, beside the GPU's work. ``launch`` is for those where
more has to be done first.
"""
import time
import weakref
from collections.abc import Callable

import torch

from ds_zipccl.collectives import nccl_direct, streams, transport
from ds_zipccl.collectives.capacity import CALM_AFTER, LAG
from ds_zipccl.collectives.cost import ONE_SIDED, ZIPPED
from ds_zipccl.collectives.flight import Flight
from ds_zipccl.collectives.launch import Kind
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.switch import MAX_SIZES
from ds_zipccl.collectives.symmetric import SymmetricWork
from ds_zipccl.collectives.work import Pending, Waiter, ZipWork
from ds_zipccl.kernels.launch_calls import NOT_SO, refused
from zipscape import environment

MAX_KNOWN = 4096
#: So many calls of ``again`` may be in flight before one is settled ahead of its ``wait()``.
FEW = 8
#: Whether there are calls for ``Repeats.again``.
AGAIN = environment.is_on("ZIPCCL_AGAIN")


class Repeat:
    """A zipped call of one dense tensor to another, on a GPU. ``kind``: None: of a probe. ``states``: of its group. ``always``: the switch
    is not asked. ``capacity``: None: of a collective that has more than one class, or other things to do before its launch. ``box``,
    ``one_sided``: for ``again``, over the group or over symmetric memory; neither: for ``launch`` alone."""
    __slots__ = ("kind", "state", "group", "states", "index", "numel", "dtype", "reduce_op", "root", "always", "shapes", "firsts", "name",
                 "capacity", "stream", "room", "flight_key", "box", "backend", "rooms", "workspace", "count", "pairwise", "op", "choice",
                 "num_changes", "one_sided")

    def __init__(self, call: Call, kind: Kind | None, state, states: dict, group: weakref.ref):
        data, out = call.input, call.output
        self.kind, self.state, self.states, self.group, self.op = kind, state, states, group, call.op
        self.index, self.numel, self.dtype = data.get_device(), out.numel(), out.dtype
        self.reduce_op, self.root, self.shapes = call.reduce_op, call.root, kind and kind.shapes
        self.firsts = self.shapes and tuple([shape[0] for shape in self.shapes])        # what is split, of tensors without gaps
        self.capacity = self.name = self.box = self.backend = self.one_sided = self.choice = None
        self.num_changes = -1                                           # of the switch's mind, when ``choice`` was found to hold

    def over_group(self, call: Call, flight: Flight, one_way: bool = True) -> "Repeat":
        kind, launch = self.kind, self.kind.launch
        self.always, self.pairwise = launch.trial or launch.choice == "always" and one_way, kind.spec.pairwise
        self.flight_key, (_, self.stream, _) = flight.key, flight.key
        if not (flight.two_phases or self.pairwise or launch.trial):
            (self.room,) = flight.key[2]
            (*name, _), = kind.classes
            self.name = tuple(name)
            self.capacity = self.state.capacities[self.name]
        # A probe's classes are not its group's.
        self.rooms, self.workspace = () if launch.trial else flight.rooms, launch.workspace
        self.count = launch.stats and launch.stats.zipped_count(self.op, flight.raw_bytes, flight.wire_bytes)
        self.box = self.state.side.ring_box() if AGAIN and flight.repeats_whole else None
        # Nothing else here keeps the group's communicators alive, and this goes with the group.
        self.backend = None if self.box is None else transport.direct(call.group, call.device)
        return self

    def over_memory(self, known, always: bool, stats, raw_bytes: int) -> "Repeat":
        self.one_sided, self.stream, self.always = known, known.stream, always
        self.count = stats and stats.zipped_count(self.op, raw_bytes, known.sent_bytes, one_sided=True)
        return self


class Repeats:
    """Those of one Runtime. ``num_again``: calls that ``again`` has launched."""

    def __init__(self, look_calls: int):
        self._known: dict[tuple, Repeat] = {}
        self._look_calls, self.num_again = look_calls, 0

    def again(self, call: Call, known: Repeat | None = None, handle: type[Waiter] = ZipWork) -> Waiter | None:
        """Launches the call, and counts it, where nothing but to queue it is to be done; None: ask ``launch``, nothing has happened.
        ``known``: from ``known_as`` for such a call; by default the one that was remembered. ``handle``: what to make of it."""
        data, out = call.input, call.output
        try:
            known = known or self._known.get((call.op, data.numel(), data.dtype, id(call.group)))
        except AttributeError:                                          # lists
            return None
        if (known is None or known.box is None and known.one_sided is None or out.numel() != known.numel or out.dtype is not known.dtype
                or call.reduce_op is not known.reduce_op or call.root != known.root or call.input_splits or call.output_splits
                or data.get_device() != known.index or out.get_device() != known.index or len(known.states) != 1
                or not data.is_contiguous() or not out.is_contiguous() or streams.of_device(known.index) != known.stream
                or known.firsts is not None and known.firsts != (out.size(0), data.size(0))):
            return None
        if known.one_sided is not None:
            return self._again_one_sided(known, out, data)
        state, kind, box = known.state, known.kind, known.box
        in_flight = state.in_flight
        for pending in in_flight:
            if pending.flight is None or pending.handle() is None or len(in_flight) >= FEW:
                state.advance()
                break
        measured = None
        if not known.always:
            choice, look = kind.choice, self._look_calls
            if choice is None:
                return None
            measured = choice.measured
            if choice is not known.choice or measured.num_changes != known.num_changes:         # as ``Choice.holds``
                if choice.way != ZIPPED or measured.costs is not choice.costs or not known.pairwise and (
                        choice.spill != known.room or choice.room != known.name or measured.ways.get(choice.size) != ZIPPED
                        or len(measured.ways) >= MAX_SIZES):
                    return None
                known.choice, known.num_changes = choice, measured.num_changes
            if look and (measured.num_calls + 1) % look == 0:
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
        flight.launched_at = flight.looked_at                           # payload_watch.py: not the last call's
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
        return self._launched(known, call, flight, measured, reading, count, handle)

    def _launched(self, known: Repeat, call: Call, flight: Flight, measured, reading, count: int, handle) -> Waiter:
        """Everything is queued; what follows from that."""
        state = known.state
        flight.repeated(call, reading)
        for capacity, _ in () if known.pairwise else known.rooms:       # pairs' own ``prepare`` has done it
            flight.needs = capacity.launched(),
        if measured is not None:
            measured.num_calls += 1                                     # as ``count`` does
            if measured.num_calls >= measured.quiet_until:
                measured.forget_native()
        if known.name is not None:
            state.capacities[known.name] = state.capacities.pop(known.name)         # the one used last
        pending = Pending.of_flight(flight, state, count)
        state.add(pending)
        work = handle.of(pending, state)
        self.num_again += 1
        flight.launched_at = time.monotonic()
        if known.count is not None:
            known.count.num_calls += 1
        for capacity, _ in known.rooms:
            if len(capacity.under_way) >= LAG:
                capacity.look_ahead()
        return work

    def _again_one_sided(self, known: Repeat, out: torch.Tensor, data: torch.Tensor) -> SymmetricWork | None:
        if known.state.in_flight or not known.one_sided.transport.is_open:
            return None
        choice = None
        if not known.always:
            choice = known.kind.choice
            if choice is None or choice.way != ONE_SIDED or not choice.stands(self._look_calls):
                return None
        work = known.one_sided.launch(out, data)
        if work is None:
            return None
        if choice is not None:
            choice.measured.count()
        self.num_again += 1
        if known.count is not None:
            known.count.num_calls += 1
        return work

    def launch(self, call: Call) -> tuple[Kind | None, Flight | None]:
        """(its kind, the flight, begun); without a flight: it goes zipped, and is to be launched as a call of this kind; without a kind:
        it is to be decided anew. In the order of ``Runtime.run``, since ranks may not find the same here."""
        data, out = call.input, call.output
        try:
            known = self._known.get((call.op, data.numel(), data.dtype, id(call.group)))
        except AttributeError:                                          # lists
            return None, None
        if known is None or known.one_sided is not None:
            return None, None
        if (call.group is not known.group() or out.numel() != known.numel or out.dtype is not known.dtype
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
            if choice is None or getattr(choice, "way", ZIPPED) != ZIPPED or not choice.holds(self._look_calls):
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

    def remember(self, call: Call, kind: Kind, flight: Flight, states: dict, is_choice: bool = False) -> None:
        """After such a call was launched. ``states``: of the call's group, by device type. ``is_choice``: between ways, however zipped."""
        if _may_be_known(call, kind) and flight.key is not None:
            self._keep(call, kind, kind.state, states).over_group(call, flight, not is_choice)

    def remember_one_sided(self, call: Call, kind: Kind, states: dict, router, stats) -> None:
        """The same of a call over symmetric memory. ``router``: one_sided.Router."""
        if not AGAIN or not _may_be_known(call, kind):
            return
        before = self._known.get(_key(call))
        if before is not None and before.one_sided is not None and before.group() is call.group:
            if before.one_sided.transport.is_open and before.stream == streams.current(call.device):
                return                              # it was something else that kept the call from being known
        found = router.known(call, kind.state)
        if found is not None:
            self._keep(call, kind, kind.state, states).over_memory(found, router.wanted, stats, kind.spec.raw_bytes(call))

    def one_sided(self, call: Call, state, router) -> Callable[[], SymmetricWork | None] | None:
        """Makes such a call, a probe, again."""
        is_list = isinstance(call.input, tuple) or isinstance(call.output, tuple)
        found = None if is_list or not AGAIN else router.known(call, state)
        if found is None:
            return None
        known = Repeat(call, None, state, {"": state}, weakref.ref(call.group)).over_memory(found, True, None, 0)
        return lambda: self.again(call, known)

    def _keep(self, call: Call, kind: Kind, state, states: dict) -> Repeat:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        key, known = _key(call), self._known
        group = weakref.ref(call.group, lambda ended: known.pop(key, None) if _is_of(known.get(key), ended) else None)
        known[key] = Repeat(call, kind, state, states, group)
        return known[key]

    @staticmethod
    def known_as(call: Call, kind: Kind, flight: Flight, states: dict) -> Repeat | None:
        """For who remembers it himself."""
        if not _may_be_known(call, kind) or flight.key is None:
            return None
        return Repeat(call, kind, kind.state, states, weakref.ref(call.group)).over_group(call, flight)

    def forget(self, state) -> None:
        """Those of a group that ends."""
        for key in [key for key, known in self._known.items() if known.state is state]:
            del self._known[key]


def _key(call: Call) -> tuple:
    return call.op, call.input.numel(), call.input.dtype, id(call.group)


def _may_be_known(call: Call, kind: Kind) -> bool:
    return kind.on_gpu and not isinstance(call.input, tuple) and not isinstance(call.output, tuple)


def _is_of(known: Repeat | None, group: weakref.ref) -> bool:
    return known is not None and known.group is group
