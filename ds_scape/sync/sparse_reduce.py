"""Values to their owners, weights back to everyone: both packed by mask, so that only what changes is sent.

Order on the wire: by owner, then by buffer, then by position. Masks come as positions: ascending inside the partition, per owner and
buffer; None for a buffer that is exchanged whole. ``empty(numel, dtype)`` makes tensors that live during the step only.
"""
import itertools
from collections.abc import Iterable

import torch

from ds_scape.kernels.impl_reference import places
from ds_scape.kernels.ops import REFERENCE, Kernels
from ds_scape.sync.partition import Layout
from ds_scape.sync.transport import Transport

#: Checksums travel as doubles: integers below this are exact.
CHECKSUM_MODULUS = 1 << 52
#: In partitions of fewer elements the positions ascend as numbers with a sign too.
SIGNED = 1 << 31
#: Elements that are summed at a time on a CPU.
ON_CPU = 1 << 16


class Positions:
    """The coordinates of one step. ``of[owner][buffer]``: ascending positions in the owner's partition; None where all are meant."""

    def __init__(self, layout: Layout, masks: Iterable[list[torch.Tensor]] | None):
        """masks: per rank, in order, the positions in its partition of every buffer that is not full. None for a step without masks."""
        self.dense = masks is None
        self.splits = layout.splits(self.dense)
        self.counts = [layout.counts(rank, self.dense) for rank in range(layout.world_size)]
        whole = [self.dense or flat.is_full for flat in layout.flats]
        self.of: list[list[torch.Tensor | None]] = []
        for found in masks or [()] * layout.world_size:
            rest = iter(found)
            self.of.append([None if is_whole else next(rest) for is_whole in whole])

    def rows(self, whole: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """By owner and buffer, views of what lies as on the wire."""
        return [row.split(counts) for row, counts in zip(whole.split(self.splits), self.counts, strict=True)]

    def to_be_sent(self, pieces, layout: Layout, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, list, dict]:
        """(room for what is sent, its rows(), the cuts() of these pieces)."""
        sent = torch.empty(sum(self.splits), dtype=dtype, device=device)
        return sent, self.rows(sent), self.cuts(pieces, layout, device)

    def checksum(self, device: torch.device) -> torch.Tensor:
        """float64 [1], equal where the positions are."""
        total = torch.zeros(1, dtype=torch.int64, device=device)
        for index in (index for own in self.of for index in own if index is not None):
            weights = torch.arange(1, len(index) + 1, device=device) % 65521
            total = (total * 31 + ((places(index) + 1) * weights).sum()) % CHECKSUM_MODULUS
        return total.to(torch.float64)

    def cuts(self, pieces, layout: Layout, device: torch.device) -> dict[tuple, tuple[int, int]]:
        """Where each span (flat, owner, start, stop) of these pieces that has a mask begins and ends among the positions of its partition.
        The host waits where spans are not whole partitions."""
        cuts, asked = {}, []
        for span in (span for piece in pieces for span in piece):
            index = self.of[span.owner][span.flat]
            if index is not None and span.numel == layout.flats[span.flat].partition_numel:
                cuts[span] = 0, len(index)
            elif index is not None:
                asked.append(span)
        if asked:
            ends, found = torch.tensor([span[2:] for span in asked], dtype=torch.int64, device="cpu").to(device), []
            for (flat, owner), spans in itertools.groupby(asked, lambda span: (span.flat, span.owner)):
                rows = slice(len(found), len(found) + len(list(spans)))
                found += num_below(self.of[owner][flat], ends[rows], layout.flats[flat].partition_numel)
            cuts.update((span, tuple(own)) for span, own in zip(asked, torch.stack(found).tolist(), strict=True))
        return cuts


def num_below(index: torch.Tensor, ends: torch.Tensor, numel: int) -> torch.Tensor:
    """How many of these positions in a partition of ``numel`` elements are below each of ``ends``, int64. The host does not wait."""
    if index.dtype == torch.int64 or numel < SIGNED:
        return torch.searchsorted(index, ends.to(index.dtype))
    # torch searches by numbers with a sign, and a copy without it would take 8 bytes for each.
    found, total = torch.zeros_like(ends), len(index)
    for power in reversed(range(total.bit_length())):
        more = found + (1 << power)
        is_below = (more <= total) & (places(index[more.clamp(max=total) - 1]) < ends)
        found = torch.where(is_below, more, found)
    return found


@torch.no_grad()
def mean_of_rows(received: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """[W, k] in any dtype -> ``out`` [k]: the mean over the workers, summed in rank order and in out's precision."""
    # On a CPU torch makes a converted copy of what it adds, so there it is better added while it is in a cache.
    step = len(out) if out.device.type != "cpu" else ON_CPU
    for start in range(0, len(out), max(1, step)):
        part, rows = out[start:start + step], received[:, start:start + step]
        part.copy_(rows[0])
        for row in rows[1:]:
            part.add_(row)
        part.div_(len(received))
    return out


@torch.no_grad()
def gather_weights(copies: list[torch.Tensor], message: torch.Tensor, positions: Positions, transport: Transport, empty,
                   kernels: Kernels = REFERENCE) -> None:
    """Sends this rank's changed weights, in the copies' dtype, to all and writes everyone's into ``copies``. message: as long as the
    longest of any rank; what lies behind the own weights is sent and means nothing."""
    received = transport.gather(message, "weights", empty)
    for owner, (row, split) in enumerate(zip(received, positions.splits, strict=True)):
        parts = row[:split].split(positions.counts[owner])
        for copy, index, part in zip(copies, positions.of[owner], parts, strict=True):
            size = copy.numel() // len(received)
            own = copy.narrow(0, owner * size, size)
            if index is None:
                own.copy_(part)
            else:
                kernels.scatter(own, index, part)
