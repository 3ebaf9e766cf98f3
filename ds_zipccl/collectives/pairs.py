"""Which parts of an all-to-all are zipped, and where they lie: pure functions of what both ends of a pair know.

What goes from rank i to rank j has n elements, known to both; nobody else needs to know. So everything about it (zipped or raw, frame
layout, capacity) follows from n, the settings and what both ends saw in earlier calls.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import layout
from ds_zipccl.collectives.capacity import Capacity
from ds_zipccl.config import ZipcclConfig


def reason_for_raw(numel: int, dtype: torch.dtype, whole_numel: int, config: ZipcclConfig) -> str | None:
    """Why ``numel`` elements for one peer go uncompressed (a reason of backend/policy.py), or None. ``whole_numel``: elements of the
    whole tensor; of a pair of ranks as if every peer were sent as much, so that equal splits mean what they mean for other collectives."""
    whole_bytes = whole_numel * dtype.itemsize
    if whole_bytes < max(config.min_bytes, 1):
        return "min_bytes"
    if layout(BY_TORCH[dtype], numel, level=BY_TORCH[dtype].level(config.level)).frame_bytes >= numel * dtype.itemsize:
        return "no_gain"
    if 2 * whole_bytes > config.max_workspace_bytes:        # two sets of frames, each no larger than the tensor
        return "max_workspace_bytes"
    return None


class Piece(NamedTuple):
    """What goes from one rank to another in one call. ``codec`` None: raw, or nothing, or the rank's own."""
    numel: int
    num_bytes: int                       # on the wire
    codec: Codec | None = None
    capacity: Capacity | None = None


@dataclass(frozen=True)
class Run:
    """Consecutive peers whose pieces have one layout: one kernel call."""
    first: int
    count: int
    codec: Codec

    @property
    def peers(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Side:
    """All that this rank sends, or all that it receives."""
    pieces: tuple[Piece, ...]            # one per rank
    runs: tuple[Run, ...]                # of the zipped pieces

    @property
    def frame_bytes(self) -> int:
        return sum(run.count * run.codec.frame_bytes for run in self.runs)

    @property
    def word_counts(self) -> list[int]:
        """Status words per rank: one for each zipped piece."""
        return [int(piece.codec is not None) for piece in self.pieces]

    @property
    def wire_bytes(self) -> int:
        """Without status words."""
        return sum(piece.num_bytes for piece in self.pieces)

    def offsets(self) -> list[int]:
        """Where each piece starts when all lie one after another, in bytes."""
        starts, end = [], 0
        for piece in self.pieces:
            starts.append(end)
            end += piece.num_bytes
        return starts


def plan(numels, own: int, itemsize: int, rooms: list[tuple[Capacity, int | None] | None],
         codec_of: Callable[[int, int], Codec]) -> Side:
    """``numels[r]``: elements that go to (or come from) rank r; ``own``: this rank, whose piece is not sent. ``rooms[r]``: the class of
    that piece and the room that it gives this call (None: incompressible); None: the piece goes raw. ``codec_of(numel, spill_per_tile)``:
    its layout."""
    pieces, runs = [], []
    for peer, numel in enumerate(numels):
        piece = Piece(numel, 0 if peer == own else numel * itemsize)
        if rooms[peer] is not None:
            capacity, spill = rooms[peer]
            codec = None if spill is None else codec_of(numel, spill)
            if codec is not None and codec.frame_bytes < piece.num_bytes:
                piece = Piece(numel, codec.frame_bytes, codec, capacity)
        pieces.append(piece)
    for peer, piece in enumerate(pieces):
        if piece.codec is not None:
            if runs and runs[-1].peers.stop == peer and runs[-1].codec == piece.codec:
                runs[-1] = Run(runs[-1].first, runs[-1].count + 1, piece.codec)
            else:
                runs.append(Run(peer, 1, piece.codec))
    return Side(tuple(pieces), tuple(runs))
