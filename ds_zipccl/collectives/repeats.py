"""Calls like an earlier one, of which nothing has changed since: launched without the decision made anew.

A host that was busy elsewhere reads what it runs from memory, not from its caches: what takes 8 us in a loop took 24 to 100 there, before
the first kernel was queued. So this is one function, which compares what decides, and all that can wait is done when everything is queued.
"""
import weakref

from ds_zipccl.collectives import streams
from ds_zipccl.collectives.cost import ZIPPED
from ds_zipccl.collectives.flight import Flight
from ds_zipccl.collectives.launch import Kind
from ds_zipccl.collectives.registry import Call

MAX_KNOWN = 4096


class Repeat:
    """A zipped call of one dense tensor to another, on a GPU. ``states``: of its group. ``capacity``: None: of a collective that has more
    than one class, or other things to do before its launch."""
    __slots__ = ("kind", "state", "group", "states", "index", "numel", "dtype", "reduce_op", "root", "always", "shapes", "name", "capacity",
                 "stream", "room", "flight_key")

    def __init__(self, call: Call, kind: Kind, flight: Flight, states: dict):
        data, out = call.input, call.output
        self.kind, self.state, self.states, self.group = kind, kind.state, states, weakref.ref(call.group)
        self.index, self.numel, self.dtype = data.get_device(), out.numel(), out.dtype
        self.reduce_op, self.root, self.always = call.reduce_op, call.root, kind.launch.choice == "always"
        self.shapes, self.capacity = kind.shapes, None
        if not flight.two_phases and not kind.spec.pairwise:
            self.flight_key, (_, self.stream, (self.room,)) = flight.key, flight.key
            (*name, _), = kind.classes
            self.name = tuple(name)
            self.capacity = self.state.capacities[self.name]


class Repeats:
    """Those of one Runtime."""

    def __init__(self, reprobe_calls: int):
        self._known: dict[tuple, Repeat] = {}
        self._reprobe_calls = reprobe_calls

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
        self._known[call.op, call.input.numel(), call.input.dtype, id(call.group)] = Repeat(call, kind, flight, states)

    def forget(self, state) -> None:
        """Those of a group that ends."""
        self._known = {key: known for key, known in self._known.items() if known.state is not state}
