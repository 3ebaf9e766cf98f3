"""Reusable byte buffers for frames: no allocation in steady state, never more idle than a bound."""
import threading

import torch

PAGE_BYTES = 1 << 16


class Workspace:
    """A free list of uint8 buffers per device. ``take`` and ``give`` may be called from different threads.

    A buffer is the caller's from ``take`` to ``give``. On a GPU it is given back when all work on it is queued on the then current
    stream; whoever takes it next waits for that point on his own current stream.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._free: dict[tuple, list[tuple[torch.Tensor, torch.cuda.Event | None]]] = {}
        self.held_bytes = 0

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 buffer [num_bytes] with unspecified contents."""
        rounded = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            stack = self._free.get((device, rounded))
            buffer, released = stack.pop() if stack else (None, None)
            if buffer is not None:
                self.held_bytes -= rounded
                if not stack:
                    del self._free[device, rounded]
        if released is not None:
            torch.cuda.current_stream(device).wait_event(released)
        if buffer is not None:
            return buffer[:num_bytes]
        return torch.empty(rounded, dtype=torch.uint8, device=device)[:num_bytes]

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back. Sizes that were not in use for longest make room when the bound is reached: sizes change
        with the capacities, and old ones must not keep new ones out."""
        whole = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
        released = None
        if buffer.is_cuda:
            stream = torch.cuda.current_stream(buffer.device)
            released = stream.record_event()
            whole.record_stream(stream)         # whenever it is dropped: it may have been allocated on another stream
        key, num_bytes = (whole.device, whole.numel()), whole.numel()
        with self._lock:
            if num_bytes > self._max_bytes:
                return
            stack = self._free[key] = self._free.pop(key, [])            # to the end: used last
            while self.held_bytes + num_bytes > self._max_bytes:
                self._drop_oldest()
            stack.append((whole, released))
            self._free[key] = stack
            self.held_bytes += num_bytes

    def _drop_oldest(self) -> None:
        key = next(key for key, stack in self._free.items() if stack)
        self._free[key].pop(0)
        self.held_bytes -= key[1]
        if not self._free[key]:
            del self._free[key]

    def clear(self) -> None:
        with self._lock:
            self._free.clear()
            self.held_bytes = 0
