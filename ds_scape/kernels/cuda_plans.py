"""What SCAPE's CUDA kernels are told about a layout: which warp looks at which elements. Follows from segments and sizes alone, so it is
made once and kept on the device."""
import functools
from typing import NamedTuple

import torch

from ds_scape.kernels.impl_reference import BLOCK

#: As in csrc/scape/select.cuh: elements of a warp's tile, keys it notes down, counts of a histogram, 64-bit words of a Search.
TILE, MAX_NOTES, HISTOGRAM, SEARCH_WORDS = 1024, 128, 8192, 8


class SelectPlan(NamedTuple):
    """Tensors are int64, on the device."""
    tiles: torch.Tensor
    """[T, 2]: start; number of elements and, from bit 32 on, of the search."""
    searches: torch.Tensor
    """[S, SEARCH_WORDS]: first tile, number of tiles, of elements, of those to choose; the rest 0. To be copied for every call."""
    fills: torch.Tensor
    """[F, 3]: start, stop, value of what no search decides: gaps, segments chosen whole or not at all."""


@functools.lru_cache(maxsize=256)
def select_plan(segments: tuple, numel: int, device: torch.device) -> SelectPlan:
    tiles, searches, fills, covered = [torch.empty(0, 2, dtype=torch.int64, device="cpu")], [], [], 0
    for start, stop, count in segments:
        if covered < start:
            fills.append((covered, start, 0))
        covered = stop
        if count in (0, stop - start):
            fills.append((start, stop, int(count > 0)))
            continue
        starts = torch.arange(start, stop, TILE, dtype=torch.int64, device="cpu")
        tiles.append(torch.stack([starts, (stop - starts).clamp(max=TILE) | len(searches) << 32], 1))
        first = searches[-1][0] + searches[-1][1] if searches else 0
        searches.append((first, len(starts), stop - start, count, *[0] * (SEARCH_WORDS - 4)))
    if covered < numel:
        fills.append((covered, numel, 0))
    fills = [fill for fill in fills if fill[0] < fill[1]]
    return SelectPlan(torch.cat(tiles).to(device), _rows(searches, SEARCH_WORDS, device), _rows(fills, 3, device))


class PositionsPlan(NamedTuple):
    """Runs of up to 65,536 elements of the parts of a mask. int64, on the device."""
    runs: torch.Tensor
    """[R, 2]: start, stop, none across a part's end."""
    bases: torch.Tensor
    """[R]: the start of the run's part."""
    ends: torch.Tensor
    """[number of parts]: the number of runs up to the end of a part."""


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
