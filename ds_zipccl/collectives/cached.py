"""All-gather of frames that are already made: nothing is encoded and nothing is agreed when it is launched.

For data that is gathered several times between two changes, as ZeRO-3's parameters are. Several pieces travel together, each as its
frame or as it is; which, and in which layout, every rank knows beforehand (frame_cache.py). Over the process group they are one row, so a
gather is one transfer and a decode; one-sided each is a message, decoded as it comes.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.format import align
from ds_zipccl.collectives import streams
from ds_zipccl.collectives.transport import all_gather_bytes
from ds_zipccl.collectives.workspace import Workspace
from ds_zipccl.kernels import launch_calls


@dataclass(frozen=True)
class Piece:
    """This rank's part [n] of one gathered tensor, contiguous, with its ``frame`` (uint8 [codec.frame_bytes]), or without: then it travels
    as it is. Number, order, sizes, dtypes and codecs of the pieces of a gather must be the same on every rank."""
    data: torch.Tensor
    frame: torch.Tensor | None = None
    codec: Codec | None = None

    @property
    def wire(self) -> torch.Tensor:
        """What is sent, uint8."""
        return self.data.view(torch.uint8) if self.frame is None else self.frame


def row_bytes(num_framed: int, num_raw: int) -> int:
    """Size of one rank's row with so many bytes in frames and outside of frames."""
    return align(num_framed + num_raw)


#: Returns the tensors to be filled [world size, n], one per piece in the order given; their rows are contiguous and may lie apart. Called
#: once, when they are needed.
MakeOuts = Callable[[], list[torch.Tensor]]


class PieceGather:
    """A gather in flight over the process group. Launched by the constructor on the current stream; ``wait`` must be called once, on any
    stream: it fills the outputs, row r with rank r's pieces."""

    def __init__(self, pieces: list[Piece], make_outs: MakeOuts, group: dist.ProcessGroup, workspace: Workspace):
        """``pieces`` may be changed as soon as the current stream has passed this point: they are copied into the row."""
        self._pieces, self._make_outs, self._workspace, self._rank = pieces, make_outs, workspace, group.rank()
        in_row, sizes, self._offsets = _arranged(pieces)
        self.row_bytes = align(sum(sizes))
        self._buffer = workspace.take(group.size() * self.row_bytes, pieces[0].data.device)
        self._rows = self._buffer.data.view(group.size(), self.row_bytes)
        own = self._rows[self._rank]
        torch.cat([piece.wire for piece in in_row], out=own[:sum(sizes)])
        self._work = all_gather_bytes(self._rows.view(-1), own, group)

    def wait(self) -> None:
        """On a GPU queued on the current stream. Raises FrameError for a frame that is corrupt or overflowed."""
        self._work.wait()
        for piece, out in zip(self._pieces, self._make_outs(), strict=True):
            offset = self._offsets[id(piece)]
            received = self._rows[:, offset:offset + piece.wire.numel()]
            if piece.codec is None:
                out.view(torch.uint8).copy_(received)
            else:
                piece.codec.decode(received, out, skip=self._rank)
                out[self._rank].copy_(piece.data)
        self._workspace.give(self._buffer)
        self._pieces = self._buffer = self._rows = self._work = self._make_outs = None


def _arranged(pieces: list[Piece]) -> tuple[list[Piece], list[int], dict[int, int]]:
    """(pieces in the order of a row, their sizes there, where each begins, by id). Frames first: they are multiples of 128 bytes, so every
    frame starts where kernels read it without a copy."""
    in_row = sorted(pieces, key=lambda piece: piece.frame is None)
    sizes = [piece.wire.numel() for piece in in_row]
    return in_row, sizes, {id(piece): sum(sizes[:i]) for i, piece in enumerate(in_row)}


class KnownPieces:
    """A PieceGather like an earlier one, of pieces that stay where they are: what it queues but the transfer is one call of torch's at its
    launch, and one of C that decodes all. ``stream``: on which such gathers are launched."""
    is_open = True

    def __init__(self, launcher, pieces: list[Piece], outs: list[torch.Tensor], outputs: list[torch.Tensor], group: dist.ProcessGroup,
                 workspace: Workspace):
        """``outs``: the pieces', parts of ``outputs``, which are dense; the next ones will be others of the same sizes. ``launcher``: of
        kernels that C can launch (kernels/ops.py)."""
        in_row, sizes, offsets = _arranged(pieces)
        self.row_bytes, begins, parts = align(sum(sizes)), [whole.data_ptr() for whole in outputs], []
        self._device, self._group, self._workspace, self._num = pieces[0].data.device, group, workspace, sum(sizes)
        for piece, out in zip(pieces, outs, strict=True):
            if out.numel():
                at = next(at for at, whole in enumerate(outputs) if begins[at] <= out.data_ptr() < begins[at] + whole.nbytes)
                parts.append(launch_calls.Piece(piece.codec and piece.codec.geometry, offsets[id(piece)], piece.wire.numel(), at,
                                                out.data_ptr() - begins[at], out.stride(0) * out.element_size()))
        self.fill = launcher.launch_calls.filling(parts, self.row_bytes, group.size(), launcher.error_word(self._device.index or 0)).queue
        self._wires, self.stream = [piece.wire for piece in in_row], streams.current(self._device)
        for piece in in_row:
            streams.keep(piece.wire)                # once for a stream is enough

    def launch(self, make_outputs: Callable[[], list[torch.Tensor]]) -> "KnownPieceGather | None":
        """None: another device is current, or the stream is captured; nothing has happened."""
        if self._device.type == "cuda" and (streams.current_device() != self._device.index or streams.is_capturing()):
            return None
        first, size = self._group.rank() * self.row_bytes, self.row_bytes * self._group.size()
        buffer = self._workspace.take(size, self._device)
        own = buffer.data[first:first + self.row_bytes]
        torch.cat(self._wires, out=own[:self._num])
        return KnownPieceGather(self, all_gather_bytes(buffer.data, own, self._group), buffer, make_outputs)

    def end(self, buffer) -> None:
        self._workspace.give(buffer)

    @property
    def device(self) -> torch.device:
        return self._device


class KnownPieceGather:
    """One of these in flight; see PieceGather."""

    def __init__(self, known: KnownPieces, work: dist.Work, buffer, make_outputs):
        self._known, self._work, self._buffer, self._make_outputs = known, work, buffer, make_outputs

    def wait(self) -> None:
        device = self._known.device
        if device.type == "cuda" and streams.current_device() != device.index:
            with torch.cuda.device(device):
                return self.wait()
        self._work.wait()
        outputs = self._make_outputs()
        self._known.fill(self._buffer.data.data_ptr(), streams.current(device) or 0, [t.data_ptr() for t in outputs])
        self._known.end(self._buffer)
        self._known = self._work = self._buffer = self._make_outputs = None


def trial_frames(data: torch.Tensor, ranges: list[tuple[int, int]], codec_of: Callable[[int], Codec]) -> list[Piece]:
    """Pieces with frames of ``data``, one for each of its ``ranges``; ``codec_of(numel)``."""
    pieces, status = [], torch.zeros(1, dtype=torch.int32, device=data.device)
    for start, end in ranges:
        codec = codec_of(end - start)
        frame = codec.empty_frames(1, data.device)
        codec.encode(data[start:end].view(1, -1), frame, status)
        pieces.append(Piece(data[start:end], frame[0], codec))
    return pieces
