"""The way of residuals and ages in host memory through a device: piece by piece, through a few buffers, beside all else that it does.

A piece is copied in, is worked on, and is copied back. The copies in both directions run on streams of their own, so that they and the
arithmetic go on at the same time, and nothing waits on the host: the last pieces are still being written back when the next forward pass
runs. Whoever reads or writes the host tensor otherwise calls settle() first.
"""
from collections import deque

import torch

from ds_scape.config import Offload

#: Elements of a piece: 64 MiB in fp32.
PIECE = 1 << 24


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device, pin_memory: bool = True) -> torch.Tensor:
    """[numel] in host memory, page-locked where ``device`` is a GPU (copies from other memory make the host wait)."""
    return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=pin_memory and device.type == "cuda")


def passage_for(settings: Offload, device: torch.device, numel: int) -> "Passage | None":
    """The way that these settings ask for, for residuals of ``numel`` elements in all; None where they stay on the device."""
    return Passage(device, piece_for(numel), settings.buffers) if settings.residual == "cpu" else None


def piece_for(numel: int, piece: int = PIECE) -> int:
    """Elements of a piece where there are ``numel`` in all: of a small model a quarter, so that buffers and all else that a step needs stay
    below what they may take together. Of a tiny one there is room for all, with ages: a coordinate of every partition has to fit."""
    return min(piece, max(-(-numel // 4), min(2 * numel, 1 << 12)))


def exchanged_for(numel: int, ranks: int, value_bytes: int) -> int:
    """Coordinates that a step without masks exchanges at a time, where there are ``numel`` in all: what is sent and what comes, or the mean
    and the weights of the own ones, take a quarter of a byte for each of all."""
    return numel // (4 * max(2 * value_bytes, -(-8 // ranks)))


def summed_for(numel: int) -> int:
    """Coordinates of which an owner makes the mean at a time, where there are ``numel`` in all."""
    return min(1 << 22, -(-numel // 64))


class Passage:
    """Takes pieces of host tensors through a device. Not thread-safe. All on one current stream: what uses the pieces is queued there.

    A *piece* is a list of views of host tensors, which lie one after another in a buffer: those of the largest elements first, together no
    more bytes than ``piece`` of these elements have.
    """

    def __init__(self, device: torch.device, piece: int = PIECE, num_buffers: int = 2, streams=None):
        """num_buffers: pieces on the device at a time, >= 2. streams: for tests."""
        self.device, self.piece, self.num_buffers = device, piece, num_buffers
        self._streams = streams or (_GpuStreams(device) if device.type == "cuda" else _Immediate())
        self._buffers, self._turn, self.num_settled = {}, 0, 0
        self._written = None                # event: all that was worked on is copied back, and its buffers are free
        self._begun = None                  # (where the first pieces are in host memory, they themselves, on their way)

    def num_bytes(self, element_size: int) -> int:
        """What the buffers take on the device."""
        return self.num_buffers * self.piece * element_size

    def __deepcopy__(self, memo):
        return Passage(self.device, self.piece, self.num_buffers)

    @property
    def has_begun(self) -> bool:
        """Whether pieces are on their way that pass_through() was not asked for yet."""
        return self._begun is not None

    def begin(self, pieces: list[list[torch.Tensor]]) -> None:
        """Lets the first pieces come in already. pass_through() of the same is to follow, or settle()."""
        self._begun = self._places(pieces), deque(self._fetch(piece) for piece in pieces[:self.num_buffers])

    def pass_through(self, pieces: list[list[torch.Tensor]], write_back: bool = True, targets: list[list[torch.Tensor]] | None = None):
        """Yields every piece as it lies on the device, one after another. What the current stream does to it will be in host memory: in
        the same, or in ``targets``. write_back: False: it will not."""
        if self._begun is None or self._begun[0] != self._places(pieces):
            self.begin(pieces)
        (_, arriving), self._begun = self._begun, None
        for i, piece in enumerate(pieces):
            parts, arrived = arriving.popleft()
            self._streams.wait("work", arrived)
            yield parts
            self._streams.wait("out", self._streams.mark("work"))
            for host, part in zip(targets[i] if targets else piece, parts, strict=True) if write_back else ():
                self._streams.copy("out", host, part)
            self._written = self._streams.mark("out")
            arriving.extend(self._fetch(further) for further in pieces[i + self.num_buffers:i + self.num_buffers + 1])

    def settle(self) -> None:
        """The host waits until its tensors are whole, and may read and write them."""
        self._streams.finish(self._written)
        self.num_settled += 1
        self._written = self._begun = None              # what has come in already may be outdated by the time it is used

    def _places(self, pieces) -> list:
        return [[(host.data_ptr(), host.numel()) for host in piece] for piece in pieces[:self.num_buffers]]

    def _fetch(self, piece):
        which, self._turn = self._turn, (self._turn + 1) % self.num_buffers
        sizes = [host.nbytes for host in piece]
        buffer = self._buffer(which, piece[0].dtype).view(torch.uint8)[:sum(sizes)]
        parts = [part.view(host.dtype) for host, part in zip(piece, buffer.split(sizes), strict=True)]
        self._streams.wait("in", self._written)
        for host, part in zip(piece, parts, strict=True):
            self._streams.copy("in", part, host)
        return parts, self._streams.mark("in")

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
