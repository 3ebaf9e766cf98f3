"""Which parts of the buffers a step works on at a time, so that what it needs beside them stays small."""
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ds_scape.optimizer.passage import PIECE, Passage, exchanged_for
from ds_scape.sync.partition import FlatLayout, Layout


class Span(NamedTuple):
    """Neighbours in one partition of one buffer, in elements from the partition's start."""
    flat: int
    owner: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, whole: torch.Tensor, layout: FlatLayout) -> torch.Tensor:
        """Its elements of the whole buffer, a view."""
        return whole.narrow(0, self.owner * layout.partition_numel + self.start, self.numel)


def partitions(flats: tuple[FlatLayout, ...], owners: list[int]) -> list[Span]:
    """Whole partitions of these owners: buffers one after another, every buffer's by owner."""
    return [Span(i, owner, 0, flat.partition_numel) for i, flat in enumerate(flats) for owner in owners]


def fitting(most: int, size: int, own_size: int, ranks: int = 1) -> int:
    """Coordinates that fit where ``most`` elements of ``size`` bytes do, if each takes ``ranks`` such elements and ``own_size`` bytes."""
    return most * size // (ranks * size + own_size)


def pieces(spans: Iterable[Span], most: int) -> list[list[Span]]:
    """The same elements in the same order, in pieces of up to ``most`` elements, all but the last of exactly so many."""
    result, room = [], 0
    for flat, owner, start, stop in spans:
        while start < stop:
            if not room:
                result.append([])
                room = most
            end = min(stop, start + room)
            result[-1].append(Span(flat, owner, start, end))
            room -= end - start
            start = end
    return result


def columns(flats: tuple[FlatLayout, ...], most: int) -> list[list[Span]]:
    """All elements in pieces of up to ``most``, each with the same coordinates of every partition; in a piece by owner, then by buffer."""
    world_size = flats[0].world_size
    own = pieces(partitions(flats, [0]), max(1, most // world_size))
    return [[span._replace(owner=owner) for owner in range(world_size) for span in piece] for piece in own]


def of_steps(layout: Layout, rank: int, passage: Passage | None, size: int, age: int, wire: int) -> tuple[list, list, int]:
    """What passes through a step at a time: without masks; with masks, where the own partitions come last; and how many own elements may be
    ranked at a time (0: all). Of own coordinates the ages may have to pass too, in the same memory. Sizes of one in bytes: of residuals, of
    such ages or 0, on the wire."""
    layouts, ranks = layout.flats, layout.world_size
    by_owner = [partitions(layouts, [owner for owner in range(ranks) if owner != rank]), partitions(layouts, [rank])]
    if passage is None:
        return columns(layouts, PIECE), by_owner, 0
    exchanged, own = exchanged_for(layout.numel, ranks, wire), fitting(passage.piece, size, age)
    return (columns(layouts, min(ranks * fitting(passage.piece, size, age, ranks), exchanged)),
            [*pieces(by_owner[0], passage.piece), *pieces(by_owner[1], own)], own)
