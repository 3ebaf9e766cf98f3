"""What data and frames are like: exponent statistics, the bounds they imply, and the bytes a frame really needs."""
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import BY_TORCH, DType
from ds_zipccl.kernels.geometry import Geometry

_INT_VIEW = {2: torch.int16, 4: torch.int32}
_CHUNK_BLOCKS = 1 << 13


def exponents(x: torch.Tensor) -> torch.Tensor:
    """The exponent fields, int32 [n], of a flat tensor of a dtype in the table."""
    dtype = BY_TORCH[x.dtype]
    return x.view(_INT_VIEW[dtype.itemsize]).to(torch.int32) >> dtype.mantissa_bits & (1 << dtype.exponent_bits) - 1


def exponent_entropy(x: torch.Tensor) -> float:
    """Bits an element: Shannon's entropy of the exponents of flat ``x``, taken over the whole tensor. 0 if it is empty."""
    counts = sum((torch.bincount(exponents(part), minlength=256) for part in x.split(_CHUNK_BLOCKS * fmt.BLOCK_ELEMS)),
                 torch.zeros(256, dtype=torch.int64, device=x.device))
    chances = counts[counts > 0].to(torch.float64) / max(x.numel(), 1)
    return float(-(chances * chances.log2()).sum())


def shannon_ratio(entropy_bits: float, dtype: DType) -> float:
    """The best ratio of any code that gives every exponent of the tensor one code word, sign and mantissa being random."""
    return 8 * dtype.itemsize / (entropy_bits + 1 + dtype.mantissa_bits)


def best_window_escapes(x: torch.Tensor) -> int:
    """Escapes of flat ``x`` when every block had its best single window: 7 exponents, or 6 and zero."""
    total = 0
    for part in x.split(_CHUNK_BLOCKS * fmt.BLOCK_ELEMS):
        num_blocks = -(-part.numel() // fmt.BLOCK_ELEMS)
        block = torch.arange(part.numel(), device=x.device) // fmt.BLOCK_ELEMS
        counts = torch.bincount(block * 256 + exponents(part), minlength=256 * num_blocks).view(num_blocks, 256)
        below = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
        inside = (below[:, 7:] - below[:, :-7]).amax(1)
        with_zero = (below[:, 7:] - below[:, 1:-6]).amax(1) + counts[:, 0]
        total += part.numel() - int(torch.maximum(inside, with_zero).sum())
    return total


def tile_escapes(frame: torch.Tensor, g: Geometry) -> torch.Tensor:
    """Number of escapes (level 2: bytes of streams) of each tile of a zipped frame, int64 [num_tiles]."""
    octets = frame.as_strided((g.num_tiles, 4), (g.tile_bytes, 1), frame.storage_offset() + g.tiles_offset).to(torch.int64)
    return (octets << torch.arange(0, 32, 8, device=frame.device)).sum(1)


def needed_bytes(num_escapes: int, dtype: DType, numel: int, level: int = 1) -> int:
    """What a frame of ``numel`` elements must hold: headers, codes, remainders and that many escapes (level 2: bytes of streams), without
    the unused slots and sub-pools of a size known beforehand."""
    g = fmt.layout(dtype, numel, 0, 0, level=level)
    slots_by_alignment = g.escapes_capacity * max(g.num_tiles - 1, 0) + g.last_escapes_capacity
    return g.frame_bytes - slots_by_alignment + num_escapes
