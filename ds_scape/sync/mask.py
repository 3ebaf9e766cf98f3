"""Masks: which coordinates of a partition are sent. Exact counts, ties by lowest index, and two encodings of which the smaller is used.

Bits: one per element, lowest bit first. Indices: per block of 65,536 elements its number of ones (uint32), then the 16-bit offsets of all
ones inside their blocks, ascending. Only freely chosen coordinates are encoded; those of dense tensors follow from the layout.
"""
import torch

from ds_scape.sync.partition import FlatLayout, Layout, Segment
from zipscape.errors import ZipScapeError, describe

BLOCK = 1 << 16
_INT = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def select(scores: torch.Tensor, overdue: torch.Tensor, segments: tuple[Segment, ...]) -> torch.Tensor:
    """bool [P]: per segment exactly num_sent coordinates: overdue ones first, then by score, equal scores by lowest index.

    scores: float [P], >= 0 (the bits of such floats order like integers). overdue: bool [P]. Dense segments are all ones, padding zeros.
    """
    chosen = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    for start, stop, count in segments:
        if count == stop - start:
            chosen[start:stop] = True
        elif count:
            # Keys: scores from the lowest integer up, overdue coordinates above all of them.
            key = scores[start:stop].abs().view(_INT[scores.element_size()]).to(torch.int64)
            key = torch.where(overdue[start:stop], key, key + torch.iinfo(torch.int64).min)
            last = torch.topk(key, count, sorted=False).values.min()
            above, equal = key > last, key == last
            chosen[start:stop] = above | equal & (equal.cumsum(0) <= count - above.sum())
    return chosen


def dense_positions(flat: FlatLayout, rank: int, device) -> torch.Tensor:
    """bool [P]: the coordinates of dense tensors in rank's partition."""
    positions = torch.zeros(flat.partition_numel, dtype=torch.bool, device=device)
    for segment in flat.segments[rank]:
        if segment.is_dense:
            positions[segment.start:segment.stop] = True
    return positions


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """bool [n] -> uint8 [ceil(n / 8)]."""
    padded = torch.nn.functional.pad(mask.view(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """uint8 [ceil(n / 8)] -> bool [n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 1).view(-1)[:numel].to(torch.bool)


def index_bytes(numel: int, max_ones: int) -> int:
    """Size of the index encoding of ``numel`` elements with at most ``max_ones`` ones."""
    return 4 * -(-numel // BLOCK) + 2 * max_ones


def pack_indices(mask: torch.Tensor, max_ones: int) -> torch.Tensor:
    """bool [n] -> uint8 [index_bytes(n, max_ones)]; unused offsets are 0."""
    blocks = torch.nn.functional.pad(mask, (0, -mask.numel() % BLOCK)).view(-1, BLOCK)
    offsets = mask.nonzero().view(-1) % BLOCK
    out = torch.zeros(index_bytes(mask.numel(), max_ones), dtype=torch.uint8, device=mask.device)
    counts = blocks.sum(1, dtype=torch.int32)
    out[:4 * len(counts)] = counts.view(torch.uint8)
    out[4 * len(counts):4 * len(counts) + 2 * len(offsets)] = offsets.to(torch.int16).view(torch.uint8)
    return out


def unpack_indices(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """The inverse, bool [n]. Raises ZipScapeError where the counts do not fit the size."""
    num_blocks = -(-numel // BLOCK)
    counts = packed[:4 * num_blocks].clone().view(torch.int32).to(torch.int64)
    offsets = packed[4 * num_blocks:].clone().view(torch.int16).to(torch.int64) & BLOCK - 1
    if bool((counts < 0).any()) or int(counts.sum()) > offsets.numel():
        raise ZipScapeError(describe("a received mask is corrupt", got=f"{int(counts.sum())} ones", expected=f"<= {offsets.numel()}"))
    starts = torch.repeat_interleave(torch.arange(num_blocks, device=packed.device) * BLOCK, counts)
    mask = torch.zeros(num_blocks * BLOCK, dtype=torch.bool, device=packed.device)
    mask[starts + offsets[:len(starts)]] = True
    return mask[:numel]


class MaskCodec:
    """Encodes one rank's masks of all buffers into one message of a size that all ranks know, and decodes any rank's."""

    def __init__(self, layout: Layout, encoding: str = "auto"):
        self.layout = layout
        self._numel, self._max_ones = layout.mask_numel, layout.max_masked
        sizes = {"bits": -(-self._numel // 8), "indices": index_bytes(self._numel, self._max_ones)}
        self.encoding = min(sizes, key=sizes.get) if encoding == "auto" else encoding
        self.num_bytes = sizes[self.encoding]

    def _masked(self):
        return [flat for flat in self.layout.flats if not flat.is_full]

    def encode(self, masks: list[torch.Tensor], rank: int) -> torch.Tensor:
        """uint8 [num_bytes] from one bool [P] per buffer that is not full."""
        free = torch.cat([mask & ~dense_positions(flat, rank, mask.device) for flat, mask in zip(self._masked(), masks, strict=True)])
        return pack_bits(free) if self.encoding == "bits" else pack_indices(free, self._max_ones)

    def decode(self, message: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """The positions, int64 [k] ascending, per buffer that is not full. Raises ZipScapeError unless every count is the layout's."""
        free = unpack_bits(message, self._numel) if self.encoding == "bits" else unpack_indices(message, self._numel)
        found = []
        for flat, own in zip(self._masked(), free.split([flat.partition_numel for flat in self._masked()]), strict=True):
            positions = (own | dense_positions(flat, rank, own.device)).nonzero().view(-1)
            if len(positions) != flat.count(rank, dense=False):
                raise ZipScapeError(describe("a received mask does not have the number of ones that its layout says", got=len(positions),
                                             expected=flat.count(rank, dense=False), where=f"the partition of rank {rank}"))
            found.append(positions)
        return found
