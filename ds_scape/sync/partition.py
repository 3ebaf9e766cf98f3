"""How flat buffers are cut into (tensor x partition) segments, and how many coordinates of each segment a sparse step sends.

ZeRO-1/2 flattens every parameter group into one buffer of world_size * P elements; rank i owns elements [i * P, (i + 1) * P). Padding lies
between tensors (alignment) and at the end. All numbers here follow from shapes and settings alone, so every rank computes the same ones,
and the sizes of all exchanges are known without looking at data.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple


class TensorSlot(NamedTuple):
    """Where one parameter lies in its flat buffer."""
    offset: int
    numel: int
    num_dims: int


class Segment(NamedTuple):
    """The part of one tensor inside one partition, in elements from the partition's start."""
    start: int
    stop: int
    num_sent: int
    """Coordinates sent per sparse step; stop - start where the tensor is dense."""

    @property
    def is_dense(self) -> bool:
        return self.num_sent == self.stop - self.start


def num_sent(numel: int, density: float) -> int:
    """round(density * numel), halves up, but at least 1: a segment that never sends would never train."""
    return min(numel, max(1, math.floor(density * numel + 0.5))) if numel else 0


@dataclass(frozen=True)
class FlatLayout:
    """One flat buffer. ``segments[r]``: rank r's, by position; padding belongs to none."""
    world_size: int
    partition_numel: int
    segments: tuple[tuple[Segment, ...], ...]

    @property
    def is_full(self) -> bool:
        """Every tensor is dense: the whole buffer is exchanged in every step, padding included, and no mask is needed."""
        return all(s.is_dense for own in self.segments for s in own)

    def count(self, rank: int, dense: bool) -> int:
        """Values that ``rank`` owns and receives per step. dense: in a step without masks."""
        return self.partition_numel if dense or self.is_full else sum(s.num_sent for s in self.segments[rank])

    def count_masked(self, rank: int) -> int:
        """Coordinates of ``rank`` that its mask chooses freely, which are those of the tensors that are not dense."""
        return sum(s.num_sent for s in self.segments[rank] if not s.is_dense)


def flat_layout(slots, flat_numel: int, world_size: int, density: float) -> FlatLayout:
    """Cuts one buffer of ``flat_numel`` elements (padding included, divisible by world_size). Tensors of up to one dimension are dense."""
    assert flat_numel % world_size == 0
    per_rank = flat_numel // world_size
    segments = [[] for _ in range(world_size)]
    for slot in sorted(slots):
        position, end = slot.offset, slot.offset + slot.numel
        while position < end:
            rank = position // per_rank
            stop = min(end, (rank + 1) * per_rank)
            numel = stop - position
            kept = numel if slot.num_dims <= 1 else num_sent(numel, density)
            segments[rank].append(Segment(position - rank * per_rank, stop - rank * per_rank, kept))
            position = stop
    return FlatLayout(world_size, per_rank, tuple(tuple(own) for own in segments))


@dataclass(frozen=True)
class Layout:
    """All flat buffers of a model. What an owner receives is ordered by buffer, then by position."""
    flats: tuple[FlatLayout, ...]
    world_size: int

    @property
    def has_masks(self) -> bool:
        return not all(flat.is_full for flat in self.flats)

    def counts(self, rank: int, dense: bool) -> list[int]:
        """Per buffer: values that ``rank`` owns and receives in a step."""
        return [flat.count(rank, dense) for flat in self.flats]

    def splits(self, dense: bool) -> list[int]:
        """Per rank: values that every worker sends to it."""
        return [sum(self.counts(rank, dense)) for rank in range(self.world_size)]

    @property
    def numel(self) -> int:
        """Of all buffers, padding included."""
        return self.world_size * sum(flat.partition_numel for flat in self.flats)

    @property
    def mask_numel(self) -> int:
        """Elements of a partition that a mask covers: those of the buffers that are not full, padding and dense tensors included."""
        return sum(flat.partition_numel for flat in self.flats if not flat.is_full)

    @property
    def max_masked(self) -> int:
        """The largest number of freely chosen coordinates of any rank: sizes the index encoding."""
        return max((sum(f.count_masked(rank) for f in self.flats if not f.is_full) for rank in range(self.world_size)), default=0)
