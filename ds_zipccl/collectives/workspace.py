"""Reusable byte buffers for frames: no allocation in steady state, never more idle than a bound."""
import threading

import torch

from ds_zipccl.collectives import streams

PAGE_BYTES = 1 << 16


class Buffer:
    """``data``: uint8, as many bytes as were asked for, with unspecified contents."""
    __slots__ = ("data", "whole", "taken_on")

    def __init__(self, whole: torch.Tensor, taken_on: int | None, num_bytes: int):
        self.data, self.whole, self.taken_on = whole[:num_bytes], whole, taken_on


class Workspace:
    """A free list of uint8 buffers per device and stream. ``take`` and ``give`` may be called from different threads.

    A buffer is the caller's from ``take`` to ``give``; one that is never given back is freed with its last user. On a GPU it is given
    back when all work on it is queued on the then current stream, and handed out again to who works on that stream, so nobody has to wait
    for anything; one that ends on another stream than it was taken on goes back to torch's allocator.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._free: dict[tuple, list[torch.Tensor]] = {}
        self.held_bytes = 0

    def take(self, num_bytes: int, device: torch.device) -> Buffer:
        rounded = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        stream = streams.current(device)
        with self._lock:
            stack = self._free.get((device, stream, rounded))
            whole = stack.pop() if stack else None
            if whole is not None:
                self.held_bytes -= rounded
                if not stack:
                    del self._free[device, stream, rounded]
        if whole is None:
            whole = torch.empty(rounded, dtype=torch.uint8, device=device)
        return Buffer(whole, stream, num_bytes)

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back. Sizes that were not in use for longest make room when the bound is reached: sizes change
        with the capacities, and old ones must not keep new ones out."""
        whole, device = buffer.whole, buffer.whole.device
        stream = streams.current(device)
        if stream != buffer.taken_on:           # finished by another thread or on another stream: who takes would never find it there
            streams.keep(whole)
            return
        key, num_bytes = (device, stream, whole.numel()), whole.numel()
        with self._lock:
            if num_bytes > self._max_bytes:
                return
            stack = self._free[key] = self._free.pop(key, [])            # to the end: used last
            while self.held_bytes + num_bytes > self._max_bytes:
                self._drop_oldest()
            stack.append(whole)
            self._free[key] = stack
            self.held_bytes += num_bytes

    def _drop_oldest(self) -> None:
        key = next(key for key, stack in self._free.items() if stack)
        self._free[key].pop(0)
        self.held_bytes -= key[2]
        if not self._free[key]:
            del self._free[key]

    def clear(self) -> None:
        with self._lock:
            self._free.clear()
            self.held_bytes = 0
