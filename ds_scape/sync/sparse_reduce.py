"""Values to their owners, weights back to everyone: both packed by mask, so that only what changes is sent.

Order on the wire: by owner, then by buffer, then by position. Masks come as positions: int64 [k] ascending inside the partition, per owner
and buffer; None for a buffer that is exchanged whole.
"""
from collections.abc import Iterable

import torch

from ds_scape.kernels.ops import REFERENCE, Kernels
from ds_scape.sync.partition import Layout
from ds_scape.sync.transport import Transport


class Positions:
    """The coordinates of one step. Per buffer, int64 ascending, None where all are meant: ``whole``, in the whole buffer, for all owners:
    what to take from the residual and where to put weights; ``own``, in ``rank``'s partition: what it owns of them."""

    def __init__(self, layout: Layout, rank: int, masks: Iterable[list[torch.Tensor]] | None):
        """masks: per rank, in order, the positions in its partition of every buffer that is not full; they are copied one rank after
        another, so that an iterator need not hold those of all. None for a dense step."""
        self.dense = masks is None
        self.splits = layout.splits(self.dense)
        self.counts = [layout.counts(r, self.dense) for r in range(layout.world_size)]
        self.whole, self.own = [None] * len(layout.flats), [None] * len(layout.flats)
        masked = [] if self.dense else [(i, flat) for i, flat in enumerate(layout.flats) if not flat.is_full]
        filled = [0] * len(layout.flats)
        for r, found in enumerate(masks or ()):
            for (i, flat), positions in zip(masked, found, strict=True):
                if r == 0:
                    self.whole[i] = positions.new_empty(sum(counts[i] for counts in self.counts))
                if r == rank:
                    self.own[i] = positions
                torch.add(positions, r * flat.partition_numel, out=self.whole[i][filled[i]:filled[i] + len(positions)])
                filled[i] += len(positions)


@torch.no_grad()
def reduce_to_owners(taken: list[torch.Tensor], positions: Positions, transport: Transport, dtype: torch.dtype) -> list[torch.Tensor]:
    """Sends what was taken out of the residuals (per buffer, in the order of ``positions.whole``) to its owners. Returns, per buffer, the
    mean over the workers of what this rank owns: [k] in ``dtype``, summed in rank order."""
    received = transport.to_owners(_by_owner(taken, positions.counts), positions.splits, "values")
    total = received[0].to(dtype, copy=True)
    for row in received[1:]:
        total.add_(row)
    return list(total.div_(transport.world_size).split(positions.counts[transport.rank]))


@torch.no_grad()
def gather_weights(copies: list[torch.Tensor], own: list[torch.Tensor], positions: Positions, transport: Transport,
                   kernels: Kernels = REFERENCE) -> None:
    """Sends this rank's changed weights (``own``: per buffer [k], in the copies' dtype) to all and writes everyone's into ``copies``."""
    longest = max(positions.splits)
    message = torch.cat(own)
    received = transport.gather(torch.nn.functional.pad(message, (0, longest - message.numel())), "weights")
    rows = [received[rank, :split].split(positions.counts[rank]) for rank, split in enumerate(positions.splits)]
    for flat, (copy, index) in enumerate(zip(copies, positions.whole, strict=True)):
        if index is None:
            for part, row in zip(copy.view(len(rows), -1), rows, strict=True):
                part.copy_(row[flat])
        else:
            kernels.scatter(copy, index, torch.cat([row[flat] for row in rows]))


def _by_owner(values: list[torch.Tensor], counts: list[list[int]]) -> torch.Tensor:
    """Per buffer, owners one after another -> per owner, buffers one after another."""
    if len(values) == 1:
        return values[0]
    parts = [v.split([own[flat] for own in counts]) for flat, v in enumerate(values)]
    return torch.cat([part[owner] for owner in range(len(counts)) for part in parts])
