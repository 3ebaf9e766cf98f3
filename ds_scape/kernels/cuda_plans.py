"""What SCAPE's CUDA kernels are told about a layout: which warp looks at which elements. Follows from segments and sizes alone, so it is
made once and kept on the device."""
import functools
from typing import NamedTuple

import torch

from ds_scape.kernels.impl_reference import BLOCK

#: As in csrc/scape/select_tiles.cuh: elements of a warp's tile, keys it notes down, tiles of a group, counts of a histogram, words of
#: 8 bytes of a Search.
TILE, MAX_NOTES, GROUP, HISTOGRAM, SEARCH_WORDS = 512, 64, 256, 8192, 10

#: Up to this share of all elements to choose, a choice begins around the last one's keys: of more, too many keys lie close to the last one.
HINTED_SHARE = 0.05

#: As in csrc/scape/worker.cuh: elements of the residual that a CTA works on.
ENTER_TILE = 4096


class SelectPlan(NamedTuple):
    """Tensors are on the device."""
    search_of_tile: torch.Tensor
    """[T], int32. Tiles begin at multiples of four elements, so that the first one of a segment may have up to three that are not its."""
    groups: torch.Tensor
    """[G, 2], int64: first tile and, from bit 32 on, number of tiles; search. Tiles of one search each."""
    searches: torch.Tensor
    """[S, SEARCH_WORDS], int64: start of the first tile, end, number to choose; first tile and number of tiles; first group and elements
    before the segment's first; the rest 0. What every call begins with."""
    fills: torch.Tensor
    """[F, 3], int64: start, stop, value of what no search decides: gaps, segments chosen whole or not at all."""
    is_hinted: bool
    """Whether a choice begins around the keys of the last one."""


@functools.lru_cache(maxsize=256)
def select_plan(segments: tuple, numel: int, device: torch.device) -> SelectPlan:
    tiles_of, groups, searches, fills, covered = [], [], [], [], 0
    for start, stop, count in segments:
        if covered < start:
            fills.append((covered, start, 0))
        covered = stop
        if count in (0, stop - start):
            fills.append((start, stop, int(count > 0)))
            continue
        skip, first, num_tiles = start % 4, sum(tiles_of), -(-(stop - start + start % 4) // TILE)
        searches.append((start - skip, stop, count, first | num_tiles << 32, len(groups) | skip << 32, *[0] * (SEARCH_WORDS - 5)))
        groups += [(t | min(GROUP, first + num_tiles - t) << 32, len(tiles_of)) for t in range(first, first + num_tiles, GROUP)]
        tiles_of.append(num_tiles)
    if covered < numel:
        fills.append((covered, numel, 0))
    fills = [fill for fill in fills if fill[0] < fill[1]]
    search_of_tile = torch.arange(len(tiles_of), dtype=torch.int32, device="cpu").repeat_interleave(
        torch.tensor(tiles_of, dtype=torch.int64, device="cpu"))
    return SelectPlan(search_of_tile.to(device), _rows(groups, 2, device), _rows(searches, SEARCH_WORDS, device), _rows(fills, 3, device),
                      sum(search[2] for search in searches) <= HINTED_SHARE * sum(search[1] - search[0] for search in searches))


class PositionsPlan(NamedTuple):
    """Runs of up to 65,536 elements of the parts of a mask. int64, on the device."""
    runs: torch.Tensor
    """[R, 2]: start, stop, none across a part's end."""
    bases: torch.Tensor
    """[R]: the start of the run's part."""
    ends: torch.Tensor
    """[number of parts]: the number of runs up to the end of a part."""


class Ones:
    """How many ones each part of a mask has, or -1 where a message contradicts itself: the host waits for it where it is read."""

    def __init__(self, before: torch.Tensor, plan: PositionsPlan, is_sound: torch.Tensor):
        """before: the sums of the runs' ones; is_sound: negative where the message is not."""
        self._ends = torch.cat([before[plan.ends], is_sound])

    def __iter__(self):
        *ends, is_sound = self._ends.tolist()
        return iter([stop - start if is_sound >= 0 else -1 for start, stop in zip([0, *ends], ends, strict=False)])


@functools.lru_cache(maxsize=256)
def positions_plan(sizes: tuple[int, ...], device: torch.device) -> PositionsPlan:
    runs, ends, offset = [torch.empty(0, 3, dtype=torch.int64, device="cpu")], [], 0
    for size in sizes:
        starts = torch.arange(offset, offset + size, BLOCK, dtype=torch.int64, device="cpu")
        runs.append(torch.stack([starts, (starts + BLOCK).clamp(max=offset + size), torch.full_like(starts, offset)], 1))
        ends.append((ends[-1] if ends else 0) + len(starts))
        offset += size
    table = torch.cat(runs)
    return PositionsPlan(table[:, :2].contiguous().to(device), table[:, 2].contiguous().to(device),
                         torch.tensor(ends, dtype=torch.int64, device="cpu").to(device))


@functools.lru_cache(maxsize=256)
def ranges(pairs: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """[N, 2], int64, on the device."""
    return _rows(pairs, 2, device)


def _rows(rows, width: int, device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, width).to(device)
