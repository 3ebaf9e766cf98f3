"""Residuals in host memory: they pass through the device piece by piece, in two pinned-memory transfers that run beside the arithmetic.

A piece is copied in, takes up its gradients, gives what is sent, and is copied back. Two buffers on the device take turns: while one is
worked on, the other is written back and filled. The arithmetic and its order per element are those of a residual on the device, and so are
the bits.
"""
import torch

from ds_scape.kernels.ops import Kernels

#: Elements of a piece: 64 MiB in fp32.
PIECE = 1 << 24


def host_residual(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [numel] in host memory, page-locked where ``device`` is a GPU."""
    return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


class Passage:
    """Takes pieces of one host tensor through a device. Not thread-safe; the results are ready for the current stream."""

    def __init__(self, device: torch.device, piece: int = PIECE):
        self.device, self.piece = device, piece
        self._buffers = {}
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._written = [None, None]

    def __deepcopy__(self, memo):
        return Passage(self.device, self.piece)

    def pieces(self, host: torch.Tensor):
        """Yields (start, the piece on the device), one after another; what the caller does to it is in ``host`` when the loop has ended."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))        # whatever used the buffers' memory before
        starts = list(range(0, host.numel(), self.piece))
        arriving = self._fetch(host, starts[0], 0) if starts else None
        for i, start in enumerate(starts):
            part, arrived = arriving
            if i + 1 < len(starts):
                arriving = self._fetch(host, starts[i + 1], (i + 1) % 2)
            if arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(arrived)
            yield start, part
            self._write_back(host, start, part, i % 2)
        if self._copies is not None:
            self._copies.synchronize()              # the host may read it, and the next pass begins with a copy from it

    def _buffer(self, which: int, dtype: torch.dtype) -> torch.Tensor:
        if (which, dtype) not in self._buffers:
            self._buffers[which, dtype] = torch.empty(self.piece, dtype=dtype, device=self.device)
        return self._buffers[which, dtype]

    def _fetch(self, host, start, which):
        source = host[start:start + self.piece]
        part = self._buffer(which, host.dtype)[:source.numel()]
        if self._copies is None:
            return part.copy_(source), None
        # A stream runs in order: the buffer was written back before by the same stream.
        with torch.cuda.stream(self._copies):
            part.copy_(source, non_blocking=True)
        return part, self._copies.record_event()

    def _write_back(self, host, start, part, which):
        target = host[start:start + part.numel()]
        if self._copies is None:
            target.copy_(part)
            return
        self._copies.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self._copies):
            target.copy_(part, non_blocking=True)


@torch.no_grad()
def enter(host: torch.Tensor, passage: Passage, fresh: torch.Tensor | None, factor: float, index: torch.Tensor | None, wire: torch.dtype,
          own: slice, keep_before: bool, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """accumulate() and take() on a host residual in one pass.

    fresh: [n] on the device, None: nothing enters. index: int64 [k] ascending positions of what is sent; None: everything. own: the rank's
    partition. Returns (values [k] in the wire dtype, the own partition before anything was taken if ``keep_before``, and after it), all on
    the device.
    """
    num = host.numel() if index is None else len(index)
    values = torch.empty(num, dtype=wire, device=passage.device)
    before, after = (torch.empty(own.stop - own.start, dtype=host.dtype, device=passage.device) if keep else None
                     for keep in (keep_before, True))
    edges = list(range(0, host.numel(), passage.piece)) + [host.numel()]
    cuts = edges if index is None else torch.searchsorted(index, torch.tensor(edges, device=index.device)).tolist()
    for i, (start, part) in enumerate(passage.pieces(host)):
        stop = start + part.numel()
        gradient, lo, hi = None if fresh is None else fresh[start:stop], cuts[i], cuts[i + 1]
        if keep_before:
            kernels.enter(part, gradient, factor)
            _copy_overlap(before, part, start, own)
            gradient = None
        kernels.enter(part, gradient, factor, None if index is None else index[lo:hi], values[lo:hi], first=start)
        _copy_overlap(after, part, start, own)
    return values, before, after


def _copy_overlap(target: torch.Tensor | None, part: torch.Tensor, start: int, own: slice) -> None:
    lo, hi = max(start, own.start), min(start + part.numel(), own.stop)
    if target is not None and lo < hi:
        target[lo - own.start:hi - own.start] = part[lo - start:hi - start]
