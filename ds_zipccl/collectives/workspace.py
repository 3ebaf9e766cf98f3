"""Reusable byte buffers for frames: no allocation in steady state, never more held than a bound."""
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
        if released is not None:
            torch.cuda.current_stream(device).wait_event(released)
        if buffer is not None:
            return buffer[:num_bytes]
        return torch.empty(rounded, dtype=torch.uint8, device=device)[:num_bytes]

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back; keeps it unless that would hold more than the bound."""
        whole = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
        released = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
        with self._lock:
            if self.held_bytes + whole.numel() <= self._max_bytes:
                self.held_bytes += whole.numel()
                self._free.setdefault((whole.device, whole.numel()), []).append((whole, released))

    def clear(self) -> None:
        with self._lock:
            self._free.clear()
            self.held_bytes = 0
