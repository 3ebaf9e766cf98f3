"""Masks: which coordinates of a partition are sent. Exact counts, ties by lowest index, and two encodings of which the smaller is used.

Bits: one per element, lowest bit first. Indices: per block of 65,536 elements its number of ones (uint32), then the 16-bit offsets of all
ones inside their blocks, ascending. Only freely chosen coordinates are encoded; those of dense tensors follow from the layout.
"""
import torch

from ds_scape.kernels import impl_reference
from ds_scape.kernels.impl_reference import index_bytes
from ds_scape.kernels.impl_reference import select_scores as select  # noqa: F401  (the rule on scores; kernels fuse the scores with it)
from ds_scape.kernels.ops import REFERENCE, Kernels
from ds_scape.sync.partition import Layout
from zipscape.errors import ZipScapeError, describe


class MaskCodec:
    """Encodes one rank's masks of all buffers into one message of a size that all ranks know, and decodes any rank's."""

    def __init__(self, layout: Layout, encoding: str = "auto", kernels: Kernels = REFERENCE):
        self.layout, self._kernels = layout, kernels
        self._numel, self._max_ones = layout.mask_numel, layout.max_masked
        sizes = {"bits": -(-self._numel // 8), "indices": index_bytes(self._numel, self._max_ones)}
        self.encoding = min(sizes, key=sizes.get) if encoding == "auto" else encoding
        self.num_bytes = sizes[self.encoding]
        self._masked = [flat for flat in layout.flats if not flat.is_full]
        self._sizes = tuple(flat.partition_numel for flat in self._masked)
        self._dense = [self._dense_ranges(rank) for rank in range(layout.world_size)]

    def _dense_ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of rank's parts of dense tensors, in the masks one after another; neighbours joined."""
        ranges, offset = [], 0
        for flat in self._masked:
            for start, stop in ((s.start + offset, s.stop + offset) for s in flat.segments[rank] if s.is_dense and s.stop > s.start):
                if ranges and ranges[-1][1] == start:
                    start = ranges.pop()[0]
                ranges.append((start, stop))
            offset += flat.partition_numel
        return tuple(ranges)

    def parts(self, masks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of bool [layout.mask_numel], per buffer that is not full its [P]."""
        return masks.split(self._sizes)

    def overlap(self, masks: torch.Tensor, present: list[torch.Tensor]) -> float:
        """The share of these positions, per buffer that is not full, that are in the masks too."""
        places = [impl_reference.places(index).to(masks.device) for index in present]
        return sum(int(mask[at].sum()) for mask, at in zip(self.parts(masks), places, strict=True)) / max(1, sum(map(len, places)))

    def encode(self, masks: torch.Tensor, rank: int) -> torch.Tensor:
        """uint8 [num_bytes] from bool [layout.mask_numel]."""
        return self._kernels.pack_mask(masks, self._dense[rank], self.encoding, self._max_ones)

    def decode(self, message: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """The positions (ops.py), [k] ascending, per buffer that is not full. Raises ZipScapeError unless every count is the layout's."""
        return self._checked(*self._unpack(message, rank), rank)

    def decode_all(self, messages: torch.Tensor) -> list[list[torch.Tensor]]:
        """The same of all ranks' messages. On a GPU the host waits once, when all are unpacked."""
        unpacked = [self._unpack(message, rank) for rank, message in enumerate(messages)]
        return [self._checked(*found, rank) for rank, found in enumerate(unpacked)]

    def _counts(self, rank: int) -> tuple[int, ...]:
        return tuple(flat.count(rank, dense=False) for flat in self._masked)

    def _unpack(self, message: torch.Tensor, rank: int):
        return self._kernels.unpack_mask(message, self._numel, self._dense[rank], self.encoding, self._sizes, self._counts(rank))

    def _checked(self, positions: list[torch.Tensor], found, rank: int) -> list[torch.Tensor]:
        found, counts = tuple(found), self._counts(rank)
        if found != counts:
            raise ZipScapeError(describe("a received mask does not have the number of ones that its layout says",
                                         got="counts that contradict its size" if -1 in found else list(found), expected=list(counts),
                                         where=f"the partition of rank {rank}"))
        return positions
