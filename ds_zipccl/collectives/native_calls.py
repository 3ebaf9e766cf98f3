"""Calls that are known to go native: a look instead of the whole decision, so that what gains nothing costs next to nothing."""
import weakref
from dataclasses import dataclass

import torch

from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.switch import Measured
from ds_zipccl.stats import NativeCount, Stats

MAX_KNOWN = 4096
#: Reasons that follow from what ``signature`` holds, the settings and the switch's costs.
LASTING = frozenset({"world_size_1", "never", "dtype", "device", "reduce_op", "shape", "min_bytes", "no_gain", "native_is_faster",
                     "deterministic_reduce"})


@dataclass(slots=True)
class Known:
    """``measured``, ``costs``: what the switch's answer came from, None where it was not asked."""
    count: NativeCount
    raw_bytes: int
    is_on_gpu: bool
    measured: Measured | None
    costs: object


def signature(call: Call) -> tuple | None:
    """All that a lasting decision depends on; None for forms with lists (``list_signature``) and with splits, whose sizes seldom come
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


class NativeCalls:
    """What one Runtime knows. Forgets everything when there is too much."""

    def __init__(self, stats: Stats):
        self._stats = stats                         # counts them
        self._known: dict[tuple, Known] = {}

    def find(self, key: tuple | None, reprobe_calls: int) -> Known | None:
        """The entry, if its call goes native still; counts it for the switch. None: decide anew (which counts it)."""
        known = self._known.get(key)
        if known is None or known.measured is None:
            return known
        measured = known.measured
        if known.costs is not measured.costs or measured.is_due_next(reprobe_calls):
            del self._known[key]
            return None
        measured.num_calls += 1
        return known

    def remember(self, key: tuple | None, reason: str, raw_bytes: int, measured: Measured | None, is_on_gpu: bool = False) -> None:
        if key is None or reason not in LASTING:
            return
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        count, costs = self._stats.native_count(key[0], reason), measured.costs if measured else None
        self._known[key] = Known(count, raw_bytes, is_on_gpu, measured, costs)

    def forget(self) -> None:
        """Groups end, and others get their places in memory."""
        self._known.clear()
