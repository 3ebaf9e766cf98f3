"""``window: sigma``: the given window of this rank's frames, one for each class of calls on a group.

A window is its rank's own affair: readers take any (docs/format.md, section 5), so nothing about it is agreed.
"""
from collections import OrderedDict

import torch

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.window import measured_lo

MAX_CLASSES = 1024          # sizes that are new in every call must not fill the memory


class Windows:
    """The windows measured so far on one group; the least recently used class is forgotten when there are too many."""

    def __init__(self):
        self._by_class: OrderedDict[tuple, int] = OrderedDict()

    def of(self, key: tuple, rows: torch.Tensor) -> int:
        """Window base for ``rows``, measured (one number read on the host) where the class ``key`` has none; -1, each block's mean, where
        nothing can be measured. That is not kept."""
        lo = self._by_class.get(key, -1)
        if lo == -1:
            lo = self._by_class[key] = measured_lo(rows)
        self._by_class.move_to_end(key)
        if len(self._by_class) > MAX_CLASSES:
            self._by_class.popitem(last=False)
        return lo

    def forget(self, keys) -> None:
        """To be measured anew: after an overflow."""
        for key in keys:
            self._by_class.pop(key, None)


class LaunchWindows:
    """Those of one call. ``op``: its name; ``by_power_of_two``: sizes change with every call, so those of one power of two are a class."""

    def __init__(self, windows: Windows, op: str, by_power_of_two: bool):
        self._windows, self._op, self._by_power_of_two, self._used = windows, op, by_power_of_two, set()

    def codec(self, codec: Codec, rows: torch.Tensor, phase: str = "") -> Codec:
        """``codec`` with the window that ``rows`` [n, numel] are given. ``phase``: of the call, where several have windows of their own."""
        numel = rows.shape[1]
        key = (self._op, rows.dtype, numel.bit_length()) if self._by_power_of_two else (self._op, rows.dtype, numel, phase)
        self._used.add(key)
        return codec.giving(self._windows.of(key, rows))

    def forget(self) -> None:
        self._windows.forget(self._used)
