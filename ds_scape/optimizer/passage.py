"""The way of residuals in host memory through a device: piece by piece, through a few buffers, beside everything else that the device does.

A piece is copied in, is worked on, and is copied back. The copies in both directions run on streams of their own, so that they and the
arithmetic go on at the same time, and nothing waits on the host: the last pieces are still being written back when the next forward pass
runs. Whoever reads or writes the host tensor otherwise calls settle() first.
"""
from collections import deque

import torch

from ds_scape.config import Offload

#: Elements of a piece: 64 MiB in fp32.
PIECE = 1 << 24


def host_residual(numel: int, dtype: torch.dtype, device: torch.device, pin_memory: bool = True) -> torch.Tensor:
    """Zeros [numel] in host memory, page-locked where ``device`` is a GPU (copies from other memory make the host wait)."""
    return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=pin_memory and device.type == "cuda")


def passage_for(settings: Offload, device: torch.device, largest: int) -> "Passage | None":
    """The way that these settings ask for, for residuals of up to ``largest`` elements; None where they stay on the device."""
    return Passage(device, max(1, min(PIECE, largest)), settings.buffers) if settings.residual == "cpu" else None


class Passage:
    """Takes pieces of host tensors through a device. Not thread-safe. All on one current stream: what uses the pieces is queued there."""

    def __init__(self, device: torch.device, piece: int = PIECE, num_buffers: int = 2, streams=None):
        """num_buffers: pieces on the device at a time, >= 2. streams: for tests."""
        self.device, self.piece, self.num_buffers = device, piece, num_buffers
        self._streams = streams or (_GpuStreams(device) if device.type == "cuda" else _Immediate())
        self._buffers, self._is_free = {}, [None] * num_buffers     # is_free: events; a buffer's last piece was copied back
        self._turn = 0
        self._written = {}                  # address of a host tensor -> event: all of its pieces were copied back
        self._begun = None                  # (address of a host tensor, its first pieces, on their way)

    def num_bytes(self, element_size: int) -> int:
        """What the buffers take on the device."""
        return self.num_buffers * self.piece * element_size

    def __deepcopy__(self, memo):
        return Passage(self.device, self.piece, self.num_buffers)

    def begin(self, host: torch.Tensor) -> None:
        """Lets the first pieces come in already, if they do not. pieces() is to follow, or settle()."""
        if self._begun is None:
            self._begun = host.data_ptr(), deque(self._fetch(host, start) for start in self._starts(host)[:self.num_buffers])

    def pieces(self, host: torch.Tensor):
        """Yields (start, the piece on the device), one after another. What is done to it on the current stream will be in ``host``."""
        if self._begun is None or self._begun[0] != host.data_ptr():
            self._begun = None
            self.begin(host)
        (_, arriving), self._begun = self._begun, None
        written = None
        for i, start in enumerate(self._starts(host)):
            which, part, arrived = arriving.popleft()
            self._streams.wait("work", arrived)
            yield start, part
            self._streams.wait("out", self._streams.mark("work"))
            self._streams.copy("out", host[start:start + part.numel()], part)
            written = self._is_free[which] = self._streams.mark("out")
            following = self._starts(host)[i + self.num_buffers:i + self.num_buffers + 1]
            arriving.extend(self._fetch(host, further) for further in following)
        self._written[host.data_ptr()] = written

    def settle(self) -> None:
        """The host waits until its tensors are whole, and may read and write them."""
        for event in self._written.values():
            self._streams.finish(event)
        self._written, self._begun = {}, None           # what has come in already may be outdated by the time it is used

    def _starts(self, host) -> range:
        return range(0, host.numel(), self.piece)

    def _fetch(self, host, start):
        which, self._turn = self._turn, (self._turn + 1) % self.num_buffers
        source = host[start:start + self.piece]
        part = self._buffer(which, host.dtype)[:source.numel()]
        self._streams.wait("in", self._is_free[which])
        self._streams.wait("in", self._written.get(host.data_ptr()))
        self._streams.copy("in", part, source)
        return which, part, self._streams.mark("in")

    def _buffer(self, which: int, dtype: torch.dtype) -> torch.Tensor:
        if (which, dtype) not in self._buffers:
            self._buffers[which, dtype] = torch.empty(self.piece, dtype=dtype, device=self.device)
            self._streams.wait("in", self._streams.mark("work"))    # whatever used this memory before
        return self._buffers[which, dtype]


class _Immediate:
    """Without streams: copies are done when they are asked for."""

    def copy(self, side: str, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self, side: str):
        """An event: everything given to this side so far."""

    def wait(self, side: str, event) -> None:
        """Whatever is given to this side from now on comes after the event (None: nothing to wait for)."""

    def finish(self, event) -> None:
        """The host waits for the event (None: for nothing)."""


class _GpuStreams:
    """Sides "in" and "out" are streams of their own, so that both directions of the link are used at once; "work" is the current one."""

    def __init__(self, device: torch.device):
        self._device, self._own = device, {side: torch.cuda.Stream(device) for side in ("in", "out")}

    def _stream(self, side):
        return self._own.get(side) or torch.cuda.current_stream(self._device)

    def copy(self, side, target, source):
        with torch.cuda.stream(self._own[side]):
            target.copy_(source, non_blocking=True)

    def mark(self, side):
        return self._stream(side).record_event()

    def wait(self, side, event):
        if event is not None:
            self._stream(side).wait_event(event)

    def finish(self, event):
        if event is not None:
            event.synchronize()
