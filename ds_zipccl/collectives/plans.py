"""What a flight's calls queue on a GPU, prepared so that one call of C does it, or three around torch's for the payload
(kernels/launch_calls.py)."""
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.format import OVERFLOW_BIT
from ds_zipccl.collectives import nccl_direct, streams
from ds_zipccl.kernels import launch_calls
from ds_zipccl.kernels.cuda_calls import FRAME_ALIGN, workspace_words


class Rows(NamedTuple):
    """One call of the codec's: ``frames`` [rows, bytes] of the rows that begin at the tensor's element ``offset`` (of a sum: the own one,
    in the input). ``skip``: a row to leave out; of a sum the one that is not from a frame."""
    codec: Codec
    frames: torch.Tensor
    skip: int = -1
    offset: int = 0


class Transfer(NamedTuple):
    """A part of the payload: uint8 that goes to ``peer`` and uint8 that comes from there; ``peer`` -1: an all-gather."""
    sent: torch.Tensor
    received: torch.Tensor
    peer: int = -1


@dataclass(frozen=True)
class Recipe:
    """``decodes``: None: more is to be done than decoding, step by step. ``copy``: this rank's piece, in elements: where it begins in the
    input, and in the output, and its length. Output and input may share memory ``anywhere`` at all, or where ``own_in_place`` and this
    rank's piece of the output is the input; else such calls are launched step by step. ``payload``: none: torch launches it."""
    encodes: list[Rows]
    decodes: list[Rows] | None
    copy: tuple[int, int, int] = (0, 0, 0)
    sums: bool = False
    anywhere: bool = False
    own_in_place: bool = False
    payload: tuple[Transfer, ...] = ()

    def is_aligned(self) -> bool:
        """As kernels that take addresses need it."""
        return not any((t.data_ptr() | t.stride(0)) % FRAME_ALIGN for _, t, *_ in (*self.encodes, *(self.decodes or ())))


def exchange(sent, received) -> tuple[Transfer, ...]:
    """The payload of pieces for, and from, every rank; this rank's own are empty."""
    return tuple([Transfer(ours, theirs, peer) for peer, (ours, theirs) in enumerate(zip(sent, received, strict=True))
                  if ours.numel() or theirs.numel()])


class Plan:
    """A recipe for tensors of known sizes on the current stream. ``filled``: the flight's mark. ``payload_stream``: None: torch launches
    the payload. ``sends``: whether ``call`` can."""
    __slots__ = ("begin", "beside", "end", "join", "call", "fills", "copies", "sends",
                 "decode_stream", "_anywhere", "_place", "_x_bytes", "_out_bytes", "_plan", "_kept")

    def __init__(self, recipe: Recipe, launcher, x: torch.Tensor, out: torch.Tensor, status: torch.Tensor, decode_stream: torch.cuda.Stream,
                 filled: streams.Mark, payload_stream: torch.cuda.Stream | None = None):
        index, item, stream, encoded = x.get_device(), x.element_size(), streams.current(x.device), streams.Mark(x.device)
        words = max([workspace_words(len(rows.frames), rows.codec.geometry) for rows in recipe.encodes], default=0)
        unread = launcher.unread_word(index)
        encodes = [_step(rows, status.data_ptr()) for rows in recipe.encodes]
        decodes = [_step(rows, unread, recipe.sums) for rows in recipe.decodes or ()]
        nccl = nccl_direct.payload_functions() if payload_stream is not None and recipe.payload else None
        self.sends, arrived, payload = nccl is not None, None, ()
        if self.sends:
            arrived = streams.Mark(x.device)
            payload = nccl, [(t.sent.data_ptr(), t.sent.numel(), t.received.data_ptr(), t.received.numel(), t.peer)
                             for t in recipe.payload], payload_stream.cuda_stream, arrived.handle
        plan = launcher.launch_calls.plan(encodes, decodes, tuple(item * each for each in recipe.copy), words and launcher.workspace(
            index, stream, words), stream, decode_stream.cuda_stream, encoded.handle, filled.handle, *payload)
        self.begin, self.beside, self.end, self.join, self.call = plan.begin, plan.beside, plan.end, plan.join, plan.call
        self.copies = recipe.copy[2] > 0
        self.fills, self.decode_stream = recipe.decodes is not None, decode_stream.cuda_stream
        self._anywhere, self._place = recipe.anywhere, item * recipe.copy[1] if recipe.own_in_place else None
        self._x_bytes, self._out_bytes, self._plan, self._kept = x.nbytes, out.nbytes, plan, (recipe, encoded, arrived, status)

    def repeat(self, ring: launch_calls.Ring) -> launch_calls.Repeat:
        """Of a plan that ``sends`` and ``fills``, where every rank's word goes into a ring of a mailbox."""
        return launch_calls.Repeat(self._plan, ring, self._x_bytes, self._out_bytes, self._anywhere,
                                   -1 if self._place is None else self._place, OVERFLOW_BIT | 1 << 31)

    def suits(self, x: int, out: int) -> bool:
        """Tensors at these addresses: whether filling the output early harms nothing, for a resend needs the input as it was."""
        apart = out >= x + self._x_bytes or x >= out + self._out_bytes
        return apart or self._anywhere or self._place is not None and x == out + self._place


def _step(rows: Rows, word: int, is_sum: bool = False):
    frames = rows.frames
    return launch_calls.step(rows.codec.geometry, frames.data_ptr(), frames.stride(0), len(frames), rows.skip, word, offset=rows.offset,
                             is_sum=is_sum)
