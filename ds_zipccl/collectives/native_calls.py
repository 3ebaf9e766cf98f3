"""Calls that are known to go native: one look before the launch, all counting after it.

A host that was busy elsewhere reads what it runs from memory, not from its caches, and a GPU that waits for the launch waits for that too:
what takes 2 us in a loop took 12 to 25 there. So a call of one tensor is looked up by what every look at a tensor costs anyway, a group's
calls are shown only while a look is all that is needed (none of ours is in flight on it), and what is found is true: what changes a
decision (costs that are due, costs measured anew) empties the group's table.
"""
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_zipccl.collectives.native_launch import launch_of
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.switch import Measured
from ds_zipccl.stats import NativeCount, Stats

MAX_KNOWN = 4096                    # of a group
#: Reasons that follow from what keys hold, the settings and the switch's costs. Not "device", which the output may be to blame for.
LASTING = frozenset({"world_size_1", "never", "dtype", "reduce_op", "min_bytes", "no_gain", "native_is_faster", "deterministic_reduce",
                     "step_trial", "steps_are_not_faster"})
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
#: Of these, what holds of any reduction: the others are asked for only where it could be zipped.
OF_ANY_REDUCTION = frozenset({"world_size_1", "never", "dtype"})


@dataclass(slots=True)
class Known:
    """``raw_bytes``: what this rank sends, where there are roots as the root. ``rank``: its own where there are, else None. ``measured``:
    what the switch's answer came from, None where it was not asked. ``count_other(raw_bytes)``: counts reductions that cannot be zipped
    whatever their costs; None: like all. ``launch``: see native_launch.LAUNCHES."""
    count: NativeCount
    raw_bytes: int
    rank: int | None
    measured: Measured | None
    count_other: Callable[[int], None] | None
    launch: Callable

    def add(self, reduce_op=None, root: int | None = None) -> None:
        """Counts such a call, for the switch too; to be called after its launch."""
        raw_bytes = self.raw_bytes if self.rank is None or self.rank == root else 0
        if reduce_op is not None and reduce_op is not SUM and self.count_other is not None and reduce_op != SUM and reduce_op != AVG:
            self.count_other(raw_bytes)
            return
        count, measured = self.count, self.measured
        count.num_calls += 1
        count.num_bytes += raw_bytes
        if measured is not None:
            measured.num_calls += 1
            if measured.num_calls >= measured.quiet_until:
                measured.forget_native()


def signature(call: Call) -> tuple | None:
    """All that calls of one kind have in common; None for forms with lists (``list_signature``) and with splits, whose sizes seldom come
    again. Does not keep the group alive."""
    out, data = call.output, call.input
    if not isinstance(out, torch.Tensor) or not isinstance(data, torch.Tensor) or call.input_splits or call.output_splits:
        return None
    return (call.op, weakref.ref(call.group), call.reduce_op, call.root, data.numel(), data.dtype, data.device, out.numel(),
            out.dtype, out.device, data.layout)


def list_signature(call: Call) -> tuple | None:
    """The same of a form with lists of strided tensors, one for each rank; None for other calls."""
    out, data, size = call.output, call.input, call.world_size
    out_is_list, data_is_list = isinstance(out, tuple), isinstance(data, tuple)
    if not (out_is_list or data_is_list) or out_is_list and len(out) != size or data_is_list and len(data) != size:
        return None
    out, data = out if out_is_list else (out,), data if data_is_list else (data,)
    dtype, device = data[0].dtype, data[0].device
    for t in (*out, *data):
        if t.dtype != dtype or t.device != device or t.layout != torch.strided:
            return None
    return (call.op, weakref.ref(call.group), call.reduce_op, call.root, dtype, device,
            tuple([t.numel() for t in out]), tuple([t.numel() for t in data]))


def key_of(call: Call) -> tuple | None:
    """By which calls of a group are known; None: such a call is not. Of a call with one tensor its input is enough: all ranks' are equal,
    and with an output that does not fit it goes native too. Of lists all counts: their sizes may differ."""
    if isinstance(call.output, tuple) or isinstance(call.input, tuple):
        return list_signature(call)
    if call.input_splits or call.output_splits:
        return None
    return call.op, call.input.numel(), call.input.dtype, call.input.is_cuda


class NativeCalls:
    """What one Runtime knows, by group. Groups are not kept alive."""

    def __init__(self, stats: Stats, look_calls: int = 0):
        self._stats, self._look_calls = stats, look_calls
        self.shown: dict[int, dict[tuple, Known]] = {}              # by id of the group, while nothing is in flight on it
        self._tables: dict[int, tuple[weakref.ref, dict]] = {}      # also of groups that are not shown

    def find(self, op: str, data, group: dist.ProcessGroup | None) -> Known | None:
        """Of a call of ``op`` with the tensor ``data`` as its input, and without splits: it is to go native, whatever else it holds. Then
        launch it, and ``add`` it afterwards. None: ask ``Runtime.run``. ``group`` None: the world."""
        table = self.shown.get(id(c10d._world.default_pg if group is None else group))
        try:
            return None if table is None else table.get((op, data.numel(), data.dtype, data.is_cuda))
        except AttributeError:                                      # no tensor: the native call says so
            return None

    def find_any(self, call: Call) -> Known | None:
        """Of any call, also while calls are in flight on its group."""
        table, key = self._table(call.group), key_of(call)
        if not table or key is None:
            return None
        return table.get(key) or (table.get((*key, call.reduce_op)) if call.reduce_op is not None else None)

    def remember(self, call: Call, reason: str, raw_bytes: int, measured: Measured | None) -> None:
        """``raw_bytes``: of a call with a root, as if this rank were it."""
        key = key_of(call)
        if key is None or reason not in LASTING or measured is not None and measured.is_due_next(self._look_calls):
            return
        table = self._table(call.group)
        if table is None:
            number = id(call.group)
            self._tables[number] = weakref.ref(call.group, functools.partial(self._when_gone, number)), (table := {})
        if len(table) >= MAX_KNOWN:
            table.clear()
        if measured is not None:
            measured.remember_native(table, self._look_calls)
        if reason == "reduce_op":                       # others of this size may be zipped
            key = *key, call.reduce_op
        others = reason in OF_ANY_REDUCTION or reason == "reduce_op" or call.reduce_op is None
        table[key] = Known(self._stats.native_count(call.op, reason), raw_bytes, None if call.root is None else call.rank, measured,
                           None if others else functools.partial(self._stats.native, call.op, "reduce_op"), launch_of(call))

    def show(self, group: dist.ProcessGroup) -> None:
        """No call is in flight on it."""
        table = self._table(group)
        if table is not None:
            self.shown[id(group)] = table

    def hide(self, number: int) -> None:
        """A call is in flight on the group with this id."""
        self.shown.pop(number, None)

    def hiding(self, group: dist.ProcessGroup) -> Callable[[], object]:
        """``hide`` for who does it in every call."""
        return functools.partial(self.shown.pop, id(group), None)

    def forget(self, group: dist.ProcessGroup | None = None) -> None:
        """All, or of a group that ends."""
        for number in list(self._tables) if group is None else [id(group)]:
            self._when_gone(number)

    def _table(self, group: dist.ProcessGroup) -> dict | None:
        reference, table = self._tables.get(id(group), (None, None))
        return table if reference is not None and reference() is group else None

    def _when_gone(self, number: int, _=None) -> None:
        self.shown.pop(number, None)
        self._tables.pop(number, None)
