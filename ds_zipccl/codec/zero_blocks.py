"""Frames that leave out blocks of nothing but zero bits: mode 2 of the format (docs/format.md, section 3).

Dispatch tensors of a mixture of experts, padded to their capacity, and gradients of embeddings are full of them.
"""
import torch

from ds_zipccl.codec import format as fmt

WORTHWHILE = 8                   # leave blocks out when at least one in 8 is zero
_INT = {2: torch.int16, 4: torch.int32}


def _padded_blocks(flat: torch.Tensor) -> torch.Tensor:
    """The bit patterns as [num_blocks, 1024], the last block filled up with zeros (a view where nothing is to be filled)."""
    bits = flat.view(_INT[flat.element_size()])
    absent = -flat.numel() % fmt.BLOCK_ELEMS
    return torch.nn.functional.pad(bits, (0, absent)).view(-1, fmt.BLOCK_ELEMS) if absent else bits.view(-1, fmt.BLOCK_ELEMS)


def find(flat: torch.Tensor) -> torch.Tensor | None:
    """bool [num_blocks]: which blocks hold a set bit. None when too few are zero to leave them out."""
    if flat.numel() <= fmt.BLOCK_ELEMS:
        return None
    present = _padded_blocks(flat).any(1)
    num_zero = present.numel() - int(present.sum())
    return present if num_zero * WORTHWHILE >= present.numel() else None


def _element_mask(present: torch.Tensor, numel: int) -> torch.Tensor:
    return present.repeat_interleave(fmt.BLOCK_ELEMS)[:numel]


def pack(flat: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """The elements of the present blocks, in order."""
    return flat[_element_mask(present, flat.numel())]


def unpack(packed: torch.Tensor, present: torch.Tensor, out: torch.Tensor) -> None:
    """Fills ``out``: ``packed`` in the present blocks, zero bits elsewhere."""
    out.zero_()
    out[_element_mask(present, out.numel())] = packed


def num_packed(present: torch.Tensor, numel: int) -> int:
    """Elements in the present blocks of a tensor of ``numel`` elements."""
    if not numel:
        return 0
    last = numel - fmt.BLOCK_ELEMS * (present.numel() - 1)
    return fmt.BLOCK_ELEMS * int(present[:-1].sum()) + last * int(present[-1])


def to_bitmap(present: torch.Tensor) -> torch.Tensor:
    """Bit i mod 8 of byte i div 8 is block i; zeros up to a multiple of 128 bytes."""
    size = bitmap_bytes(present.numel())
    bits = torch.zeros(8 * size, dtype=torch.uint8, device=present.device)
    bits[:present.numel()] = present
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=present.device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def from_bitmap(bitmap: torch.Tensor, num_blocks: int) -> torch.Tensor | None:
    """Inverse of ``to_bitmap``; None when a bit beyond the last block is set."""
    bits = (bitmap[:, None] >> torch.arange(8, device=bitmap.device, dtype=torch.uint8) & 1).view(-1).bool()
    return None if bool(bits[num_blocks:].any()) else bits[:num_blocks]


def bitmap_bytes(num_blocks: int) -> int:
    return fmt.align(-(-num_blocks // 8))
