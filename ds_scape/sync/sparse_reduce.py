"""Values to their owners, weights back to everyone: both packed by mask, so that only what changes is sent.

Order on the wire: by owner, then by buffer, then by position. Masks come as positions: int64 [k] ascending inside the partition, per owner
and buffer; None for a buffer that is exchanged whole.
"""
import torch

from ds_scape.kernels.ops import REFERENCE, Kernels
from ds_scape.sync.partition import Layout
from ds_scape.sync.transport import Transport


class Positions:
    """The coordinates of one step. Per buffer, int64 ascending, None where all are meant: ``whole``, in the whole buffer, for all owners:
    what to take from the residual and where to put weights; ``own``, in ``rank``'s partition: what it owns of them."""

    def __init__(self, layout: Layout, rank: int, masks: list[list[torch.Tensor]] | None):
        """masks[r][j]: positions in r's partition of the j-th buffer that is not full; None for a dense step."""
        self.dense = masks is None
        self.splits = layout.splits(self.dense)
        self.counts = [layout.counts(r, self.dense) for r in range(layout.world_size)]
        self.whole, self.own = [], []
        masked = 0
        for flat in layout.flats:
            if self.dense or flat.is_full:
                self.whole.append(None)
                self.own.append(None)
                continue
            self.own.append(masks[rank][masked])
            self.whole.append(torch.cat([masks[r][masked] + r * flat.partition_numel for r in range(layout.world_size)]))
            masked += 1


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
