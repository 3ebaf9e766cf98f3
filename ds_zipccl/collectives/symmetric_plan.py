"""How the one-sided transport (symmetric.py) cuts calls into parts, and what it knows of each: a function of what all ranks know."""
import ctypes
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import BLOCK_ELEMS, HEADER_BYTES, TILE_ELEMS, layout
from ds_zipccl.kernels.cuda_calls import packed_geometry, workspace_words
from ds_zipccl.kernels.geometry import Geometry
from ds_zipccl.kernels.symmetric_calls import Part

ALIGN_BYTES = 128
NUM_IN_RING = 8             # messages of a call that have room: some on their way here, and peers may be as far behind
FIRST_PART_BYTES, LAST_PART_BYTES = 16 << 20, 64 << 20     # raw bytes of a row in the smallest and largest parts of a large call


def words_bytes(world_size: int) -> int:
    """Of the memory, before the room for messages (csrc/zipccl/carry.cuh, which a test compares)."""
    return (1 << 14) + 3 * 4112 * 8 * world_size


def align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def slot_bytes(g: Geometry) -> int:
    """Room for a frame, or for the raw row in whole blocks behind a header."""
    return align(max(g.frame_bytes, HEADER_BYTES + -(-g.numel // BLOCK_ELEMS) * BLOCK_ELEMS * g.itemsize))


def part_sizes(num_tiles: int, first: int, largest: int) -> list[int]:
    """Cuts a row, all in tiles. Nothing is on the links while the first part is encoded and the last one decoded, so both are small; each
    part costs the host launches, so those between are twice as large, and so on up to ``largest``."""
    ends, size, left = [], first, num_tiles
    while left >= 4 * size and size < largest:
        ends.append(size)
        size, left = 2 * size, left - 2 * size
    middle = -(-left // -(-left // largest))
    return [*ends, *(min(middle, left - at) for at in range(0, left, middle)), *reversed(ends)]


@dataclass(frozen=True)
class Plan:
    """The parts of a row: ``starts`` and ``geometries`` in elements, ``parts`` for C. ``words``: encode's workspace. ``sent_bytes``: to
    each peer, of ``raw_bytes``."""
    starts: tuple[int, ...]
    geometries: tuple[Geometry, ...]
    parts: ctypes.Array
    words: int
    sent_bytes: int
    raw_bytes: int
    keep: tuple

    @property
    def num_parts(self) -> int:
        return len(self.starts)


class Layout(NamedTuple):
    """Of a call, in bytes: strides of its rows in the input and the output; the place of this rank's row in the input (-1: no sum), of its
    own part of the result, and of where that comes from; the part's length (0: none)."""
    cut: Plan | None
    row_stride: int
    out_stride: int
    own: int
    copy_to: int
    copy_from: int
    copy_bytes: int


class Arranged(NamedTuple):
    """Rows in a call: their ``order``, and the parts that they are then."""
    order: list[int]
    cut: Plan


class Row(NamedTuple):
    """One of several tensors of a gather: this rank's ``data`` [n], and ``out`` [world_size, n], whose rows may lie apart. ``geometry``: of
    its frame, in level 1. ``frame``: that of what ``data`` is now (uint8, aligned to 16 bytes), which may have overflowed; None: it is
    made on the way. ``as_it_is``: the data travel without one."""
    data: torch.Tensor
    out: torch.Tensor
    geometry: Geometry
    frame: torch.Tensor | None = None
    as_it_is: bool = False

    @property
    def kind(self) -> tuple[Geometry, bool, bool]:
        """What all ranks must have alike, for ``plan_of_rows``."""
        return self.geometry, self.frame is None and not self.as_it_is, self.as_it_is


def _num_slots(world_size: int) -> int:
    return 1 if world_size == 2 else world_size            # a rank's own among more is left empty: addresses are then plain strides


def _part(packed: bytes, g: Geometry, start: int, num_slots: int, num_frames: int, as_it_is: bool = False) -> Part:
    return Part(packed, start * g.itemsize, g.numel * g.itemsize, g.frame_bytes, slot_bytes(g), num_slots, align(g.frame_bytes), num_frames,
                as_it_is)


def _region_bytes(g: Geometry, num_slots: int, num_frames: int) -> int:
    return num_slots * slot_bytes(g) + num_frames * align(g.frame_bytes)


@functools.lru_cache(maxsize=1024)
def plan(dtype: torch.dtype, row_numel: int, world_size: int, same_for_all: bool, spill_per_tile: int, room: int,
         first_bytes: int = FIRST_PART_BYTES, largest_bytes: int = LAST_PART_BYTES) -> Plan | None:
    """The parts of rows of ``row_numel`` elements; NUM_IN_RING of the largest fit in ``room`` bytes, None if not even a tile of each would.
    ``same_for_all``: peers get the same frame (all-gather). A function of what all ranks know."""
    row, tile_bytes = BY_TORCH[dtype], TILE_ELEMS * BY_TORCH[dtype].itemsize
    num_slots = _num_slots(world_size)
    num_frames = 1 if same_for_all else num_slots

    def part(start: int, num_tiles: int) -> Geometry:
        return layout(row, min(num_tiles * TILE_ELEMS, row_numel - start), spill_per_tile=spill_per_tile)

    num_tiles = -(-row_numel // TILE_ELEMS)
    largest = min(num_tiles, max(1, largest_bytes // tile_bytes))
    while _region_bytes(part(0, largest), num_slots, num_frames) > room // NUM_IN_RING:
        if largest == 1:
            return None
        largest //= 2
    starts, geometries = [], []
    for size in part_sizes(num_tiles, min(largest, max(1, first_bytes // tile_bytes)), largest):
        starts.append(starts[-1] + geometries[-1].numel if starts else 0)
        geometries.append(part(starts[-1], size))
    keep = tuple(packed_geometry(g) for g in geometries)
    parts = (Part * len(starts))(*(_part(packed, g, start, num_slots, num_frames)
                                   for packed, start, g in zip(keep, starts, geometries, strict=True)))
    return Plan(tuple(starts), tuple(geometries), parts, max(workspace_words(num_frames, g) for g in geometries),
                sum(g.frame_bytes for g in geometries), row_numel * row.itemsize, keep)


@functools.lru_cache(maxsize=1024)
def plan_of_rows(kinds: tuple[tuple[Geometry, bool, bool], ...], world_size: int, room: int) -> Plan | None:
    """Rows of these kinds (``Row.kind``), each a part; None: one is too large for the memory."""
    num_slots = _num_slots(world_size)
    if any(_region_bytes(g, num_slots, made) > room // NUM_IN_RING for g, made, _ in kinds):
        return None
    geometries = tuple(g for g, _, _ in kinds)
    keep = tuple(packed_geometry(g) for g in geometries)
    parts = (Part * len(kinds))(*(_part(packed, g, 0, num_slots, 1, as_it_is)
                                  for packed, (g, _, as_it_is) in zip(keep, kinds, strict=True)))
    return Plan((0,) * len(kinds), geometries, parts, max(workspace_words(1, g) if made else 0 for g, made, _ in kinds),
                sum(g.numel * g.itemsize if as_it_is else g.frame_bytes for g, _, as_it_is in kinds),
                sum(g.numel * g.itemsize for g in geometries), keep)


def in_turn(sizes: list[int]) -> list[int]:
    """Places of rows in a call: small ones first and last, as ``part_sizes`` has it."""
    upwards = sorted(range(len(sizes)), key=sizes.__getitem__)
    return [*upwards[::2], *upwards[1::2][::-1]]
