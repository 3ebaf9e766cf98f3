"""Streams without a GPU: notes which stream touches which memory, and finds what is touched by two of them in no order.

Everything runs at once as ever on a CPU; the order is only kept in books (vector clocks). Seen is what is called from Python with a tensor,
``data_ptr`` and ``tolist`` too; not what autograd's backward does. Memory is never given back, as no stream gets another's on a GPU.
"""
import contextlib
import types

import torch
from torch.overrides import TorchFunctionMode

READS = {"__get__", "__getitem__", "__iter__", "__len__", "dim", "double", "element_size", "float", "item", "long", "numel", "size", "to",
         "tolist", "unbind", "view"}


class Stream:
    def __init__(self, recorder, name: str):
        self.recorder, self.name, self.clock = recorder, name, {name: 0}

    def wait_stream(self, other: "Stream") -> None:
        _merge(self.clock, other.clock)

    def synchronize(self) -> None:
        _merge(self.recorder.host, self.clock)


def _merge(clock: dict, other: dict) -> None:
    for name, time in other.items():
        clock[name] = max(clock.get(name, 0), time)


class Recorder(TorchFunctionMode):
    """``module`` stands for torch.cuda. ``races``: (function, stream, the stream that had touched the same memory)."""

    def __init__(self):
        super().__init__()
        self.host, self.races, self._touched, self._kept, self._num = {}, [], {}, [], 0
        self.current = Stream(self, "default")
        self.module = types.SimpleNamespace(Stream=self._make, stream=self._within, current_stream=lambda device: self.current)

    def _make(self, device) -> Stream:
        self._num += 1
        return Stream(self, f"s{self._num}")

    @contextlib.contextmanager
    def _within(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, given = getattr(function, "__name__", str(function)), list(_tensors((args, kwargs or {})))
        writes = name.rstrip("_") != name and not name.startswith("__") or name == "data_ptr" or "out" in (kwargs or {})
        for tensor in given:
            self._touch(tensor, name, writes or name not in READS)
        result = function(*args, **(kwargs or {}))
        known = {_memory(tensor) for tensor in given}
        for tensor in _tensors(result):
            if _memory(tensor) not in known:
                self._touch(tensor, name, True)
        if name in ("tolist", "item"):
            self.current.synchronize()              # the host waits for this stream, and for no other
        return result

    def _touch(self, tensor, name: str, writes: bool) -> None:
        me = self.current
        _merge(me.clock, self.host)                 # what the host has waited for is done
        me.clock[me.name] += 1
        memory = _memory(tensor)
        if memory not in self._touched:
            self._kept.append(tensor.untyped_storage())
        book = self._touched.setdefault(memory, {"reads": {}, "writes": {}})
        others = (*book["writes"].items(), *(book["reads"].items() if writes else ()))
        self.races += [(name, me.name, other) for other, time in others if other != me.name and me.clock.get(other, 0) < time]
        book["writes" if writes else "reads"][me.name] = me.clock[me.name]


def _memory(tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(given):
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, dict):
        yield from _tensors(list(given.values()))
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _tensors(one)
