"""Calls like an earlier one, of which nothing has changed since: launched without the decision made anew.

A host that was busy elsewhere reads the code it runs from memory, not from its caches: what takes 6 us in a loop took 24 there, before the
first kernel was queued. So what decides is compared, and all bookkeeping is done when everything is queued.
"""
import weakref

import torch

from ds_zipccl.collectives import streams
from ds_zipccl.collectives.cost import ZIPPED
from ds_zipccl.collectives.flight import Flight
from ds_zipccl.collectives.launch import Kind
from ds_zipccl.collectives.registry import Call

MAX_KNOWN = 4096


class Repeat:
    """A zipped call of one dense tensor to another, on a GPU, of a collective with one capacity class."""
    __slots__ = ("kind", "state", "_group", "_states", "_index", "_dtypes", "_stream", "_class", "_capacity", "_room", "_flight_key",
                 "_always")

    def __init__(self, call: Call, kind: Kind, flight: Flight, states: dict):
        self.kind, self.state, self._states = kind, kind.state, states
        self._group, self._index, self._dtypes = weakref.ref(call.group), call.input.get_device(), (call.input.dtype, call.output.dtype)
        self._flight_key, self._always = flight.key, kind.launch.choice == "always"
        _, self._stream, (self._room,) = flight.key
        (op, *rest, _), = kind.classes
        self._class = op, *rest
        self._capacity = self.state.capacities[self._class]

    def launch(self, call: Call, reprobe_calls: int) -> Flight | None:
        """The flight, begun; None: it is to be decided anew, and nothing was done."""
        data, out, state, kind, capacity = call.input, call.output, self.state, self.kind, self._capacity
        index = self._index
        if (call.group is not self._group() or data.get_device() != index or out.get_device() != index
                or (data.dtype, out.dtype) != self._dtypes or len(self._states) != 1
                or not data.is_contiguous() or not out.is_contiguous() or streams.is_capturing()
                or streams.current(data.device) != self._stream
                or not self._always and (kind.choice is None or getattr(kind.choice, "way", ZIPPED) != ZIPPED)):
            return None
        if state.in_flight:
            state.advance()
        classes = state.capacities
        if classes.get(self._class) is not capacity:
            return None
        classes[self._class] = classes.pop(self._class)                 # the one used last
        kind.launch.up_to_date(capacity)
        if capacity.calls_left_out or capacity.spill_per_tile != self._room:
            return None
        workspace = kind.launch.workspace
        flight = workspace.take_flight(self._flight_key)
        if flight is None:
            return None
        if not self._always and not kind.choice.holds(reprobe_calls):           # the last question: it counts the call
            workspace.give_flight(self._flight_key, flight)
            return None
        flight.begin(call)
        flight.needs = capacity.launched(),
        return flight


class Repeats:
    """Those of one Runtime."""

    def __init__(self, reprobe_calls: int):
        self._known: dict[tuple, Repeat] = {}
        self._reprobe_calls = reprobe_calls

    def launch(self, call: Call) -> tuple[Flight, Kind] | None:
        """None: it is to be decided anew."""
        known = self._known.get(_key(call)) if self._known else None
        flight = known and known.launch(call, self._reprobe_calls)
        return flight and (flight, known.kind)

    def remember(self, call: Call, kind: Kind, flight: Flight, states: dict) -> None:
        """After such a call was launched. ``states``: of the call's group, by device type."""
        if not kind.on_gpu or flight.recipe is None or flight.key is None or flight.two_phases or kind.spec.pairwise:
            return
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[_key(call)] = Repeat(call, kind, flight, states)

    def forget(self, state=None) -> None:
        """All, or a group's."""
        self._known = {} if state is None else {key: known for key, known in self._known.items() if known.state is not state}


def _key(call: Call) -> tuple | None:
    data, out = call.input, call.output
    if not isinstance(data, torch.Tensor) or not isinstance(out, torch.Tensor) or call.input_splits or call.output_splits:
        return None
    return call.op, id(call.group), data.numel(), out.numel(), data.dtype, call.reduce_op, call.root
