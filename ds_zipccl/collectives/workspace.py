"""Reusable frame buffers, and whole calls with theirs: no allocation in steady state, never more idle than a bound."""
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
    """Free lists of uint8 buffers per device and stream, and of idle flights (launch.Flight) per kind of call. Methods may be called from
    different threads.

    A buffer is the caller's from ``take`` to ``give``; one that is never given back is freed with its last user. On a GPU it is given
    back when all work on it is queued on the then current stream, and handed out again to who works on that stream, so nobody has to wait
    for anything; one that ends on another stream than it was taken on goes back to torch's allocator.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._idle: dict[tuple, list] = {}         # what was used last is at the end
        self.held_bytes = 0

    def take(self, num_bytes: int, device: torch.device) -> Buffer:
        rounded = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        stream = streams.current(device)
        whole = self._pop((device, stream, rounded), rounded)
        if whole is None:
            with torch.inference_mode(False):       # who takes it next may be in another mode
                whole = torch.empty(rounded, dtype=torch.uint8, device=device)
        return Buffer(whole, stream, num_bytes)

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back."""
        whole, device = buffer.whole, buffer.whole.device
        stream = streams.current(device)
        if stream != buffer.taken_on:           # finished by another thread or on another stream: who takes would never find it there
            streams.keep(whole)
            return
        self._push((device, stream, whole.numel()), whole, whole.numel())

    def take_flight(self, key: tuple):
        """An idle flight of this kind, or None. What it holds is the caller's until ``give_flight``."""
        with self._lock:
            stack = self._idle.get(key)
            if not stack:
                return None
            flight = stack.pop()
            self.held_bytes -= flight.num_bytes
            if not stack:
                del self._idle[key]
            return flight

    def give_flight(self, key: tuple, flight) -> None:
        """Its ``num_bytes``, the same for all of the kind, count as idle from now on."""
        self._push(key, flight, flight.num_bytes)

    def _pop(self, key: tuple, num_bytes: int):
        with self._lock:
            stack = self._idle.get(key)
            if not stack:
                return None
            item = stack.pop()
            self.held_bytes -= num_bytes
            if not stack:
                del self._idle[key]
            return item

    def _push(self, key: tuple, item, num_bytes: int) -> None:
        """What was not in use for longest makes room when the bound is reached: sizes change with the capacities, and old ones must not
        keep new ones out."""
        with self._lock:
            if num_bytes > self._max_bytes:
                return
            stack = self._idle.pop(key, None) or []
            while self.held_bytes + num_bytes > self._max_bytes and self._idle:
                self._drop_oldest()
            while self.held_bytes + num_bytes > self._max_bytes:            # its own kind alone is left
                self.held_bytes -= _bytes_of(stack.pop(0))
            stack.append(item)
            self._idle[key] = stack                                         # at the end: used last
            self.held_bytes += num_bytes

    def _drop_oldest(self) -> None:
        key = next(key for key, stack in self._idle.items() if stack)
        self.held_bytes -= _bytes_of(self._idle[key].pop(0))
        if not self._idle[key]:
            del self._idle[key]

    def drop(self, unwanted) -> None:
        """Frees the idle flights for which ``unwanted(flight)``: their group ends."""
        with self._lock:
            for key, stack in list(self._idle.items()):
                gone = [item for item in stack if not isinstance(item, torch.Tensor) and unwanted(item)]
                self.held_bytes -= sum(map(_bytes_of, gone))
                stack[:] = [item for item in stack if not any(item is other for other in gone)]
                if not stack:
                    del self._idle[key]

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()
            self.held_bytes = 0


def _bytes_of(item) -> int:
    return item.numel() if isinstance(item, torch.Tensor) else item.num_bytes
