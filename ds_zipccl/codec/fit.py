"""Capacity that fits given data: slots in every block for what is common, a shared sub-pool for what is rare."""
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import DType

_STEP = 4                                    # a tile's slots are whole 128 bytes: 4 for each of 32 blocks
_MAX_CANDIDATES = 64
_MAX_SPILL_PER_TILE = (1 << 16) - 1


def best_capacity(tile_escapes: torch.Tensor, dtype: DType, numel: int, level: int = 1) -> tuple[int, int]:
    """(escapes_per_block, spill_per_tile) of the smallest frame of ``numel`` elements that holds ``tile_escapes`` (analysis.py, int64
    [num_tiles]; bytes of streams at level 2) without overflow.

    The capacity alone that no tile exceeds (the *need* of the status) would let one odd tile blow up all the others.
    """
    if not tile_escapes.numel():
        return 0, 0
    tile_escapes = tile_escapes.cpu()
    blocks = torch.full_like(tile_escapes, fmt.TILE_BLOCKS)
    blocks[-1] = fmt.layout(dtype, numel, level=level).last_blocks
    need = int(((tile_escapes + blocks - 1) // blocks).max())
    step = -(-need // (_MAX_CANDIDATES * _STEP)) * _STEP or _STEP
    best = None
    for capacity in (*range(0, need, step), need):
        spill = _spill_per_tile(tile_escapes, fmt.layout(dtype, numel, capacity, 0, level=level))
        if spill <= _MAX_SPILL_PER_TILE:
            size = fmt.layout(dtype, numel, capacity, spill, level=level).frame_bytes
            best = min(best or (size, capacity, spill), (size, capacity, spill))
    return best[1:]


def _spill_per_tile(tile_escapes: torch.Tensor, g) -> int:
    """The smallest sub-pool size, per tile, that takes every group's spill."""
    slots = torch.full_like(tile_escapes, g.escapes_capacity)
    slots[-1:] = g.last_escapes_capacity
    spills = (tile_escapes - slots).clamp_(min=0)
    sizes = [-(-int(group.sum()) // group.numel()) for group in spills.split(g.group_tiles)]
    return max(sizes)
