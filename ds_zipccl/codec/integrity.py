"""Codecs that check what they move, for the setting ``integrity``. They read on the host: a means to find faults, not for speed."""
from dataclasses import dataclass, replace

import torch

from ds_zipccl.codec.codec import Codec, seal, unseal
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import ops
from zipscape.errors import describe


def _rows(num_rows: int, skip: int) -> list[int]:
    return [row for row in range(num_rows) if row != skip]


class _Checking(Codec):
    """What is bound checks too."""

    def encoder(self, frames: torch.Tensor, status: torch.Tensor, skip: int = -1, offset: int = 0):
        return lambda x: self.encode(ops.rows_of(x, offset, frames.shape[0], self.geometry), frames, status, skip)

    def decoder(self, frames: torch.Tensor, skip: int = -1, offset: int = 0):
        return lambda out: self.decode(frames, ops.rows_of(out, offset, frames.shape[0], self.geometry), skip)

    def reducer(self, frames: torch.Tensor, own_index: int, offset: int = 0):
        return lambda x, out: self.decode_reduce(frames, ops.rows_of(x, offset, 1, self.geometry)[0], own_index,
                                                 ops.rows_of(out, 0, 1, self.geometry)[0])


@dataclass(frozen=True)
class SealedCodec(_Checking):
    """Every frame carries a CRC-32 of its bytes, verified before it is decoded: what was damaged on the way raises FrameError that names
    the rank it came from: row 0 is from ``first_rank``, the next from the next."""
    first_rank: int = 0

    def encode(self, rows: torch.Tensor, frames: torch.Tensor, status: torch.Tensor, skip: int = -1) -> None:
        super().encode(rows, frames, status, skip)
        for row in _rows(frames.shape[0], skip):
            seal(frames[row, :self.frame_bytes])

    def _unseal(self, frames: torch.Tensor, skip: int) -> None:
        for row in _rows(frames.shape[0], skip):
            try:
                unseal(frames[row, :self.frame_bytes])
            except FrameError as error:
                raise FrameError(f"{error} Where: the frame from rank {self.first_rank + row} of the group.") from None

    def decode(self, frames: torch.Tensor, rows: torch.Tensor, skip: int = -1) -> None:
        self._unseal(frames, skip)
        with self.raising(rows.device):
            super().decode(frames, rows, skip)

    def decode_reduce(self, frames: torch.Tensor, own: torch.Tensor, own_index: int, out: torch.Tensor) -> None:
        self._unseal(frames, own_index)
        with self.raising(out.device):
            super().decode_reduce(frames, own, own_index, out)


class ProvenCodec(_Checking):
    """Every frame is decoded again and compared with its row by bits before it is sent: finds a wrong kernel or broken memory here."""

    def encode(self, rows: torch.Tensor, frames: torch.Tensor, status: torch.Tensor, skip: int = -1) -> None:
        super().encode(rows, frames, status, skip)
        if int(status) & 1 << 16:
            return                                   # overflowed: the data goes another way
        again = torch.empty_like(rows, memory_format=torch.contiguous_format)
        with self.raising(rows.device):
            super().decode(frames, again, skip)
        for row in _rows(rows.shape[0], skip):
            sent, back = (t[row].contiguous().view(torch.uint8) for t in (rows, again))
            if not torch.equal(sent, back):
                first = int((sent != back).nonzero()[0]) // rows.element_size()
                raise FrameError(describe("a frame does not decode to what was encoded", got=f"element {first} differs",
                                          where=f"kernels {self.kernels!r}, row {row}",
                                          todo="results of this machine cannot be trusted; report it with the tensor"))


CODECS = {"off": Codec, "checksum": SealedCodec, "roundtrip": ProvenCodec}


def for_rank(codec: Codec, first_rank: int) -> Codec:
    """The codec for frames of which the first comes from rank ``first_rank`` of the group."""
    return replace(codec, first_rank=first_rank) if isinstance(codec, SealedCodec) else codec
