"""Moves bytes: payloads over the caller's own group, small agreements and resends over a side channel of the same
ranks."""
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# torch 2.13 renames these two; 2.11 knows only the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def native_all_gather(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """torch's asynchronous all_gather_into_tensor."""
    return _all_gather(out, own, group=group, async_op=True)


def native_reduce_scatter(out: torch.Tensor, data: torch.Tensor, op, group: dist.ProcessGroup) -> dist.Work:
    """torch's asynchronous reduce_scatter_tensor."""
    return _reduce_scatter(out, data, op=op, group=group, async_op=True)


def all_gather_bytes(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Asynchronous all-gather of equal uint8 pieces on ``group``; ``own`` may be this rank's slice of ``out``."""
    return _all_gather(out, own, group=group, async_op=True)


def all_to_all_bytes(out: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Asynchronous all-to-all of equal uint8 pieces on ``group``."""
    return dist.all_to_all_single(out, rows, group=group, async_op=True)


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group itself waits for its ranks."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return c10d.default_pg_timeout


class SideChannel:
    """A communicator of its own over the ranks of ``group``, made from the group's store: no global state, no torch
    group.

    Agreements go through it so that they neither wait behind payloads nor disturb their order; resends after an
    overflow too, so that they cannot mix with calls on the group that do not pass through this library. Every rank of
    the group must construct it at the same point of its call sequence.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        rank, size = group.rank(), group.size()
        # No key of the store is used twice. The store counts, not the process: a later group of the same name may have other ranks.
        generation = (group.get_group_store().add(f"zipccl/side/{group.group_name}/arrivals", 1) - 1) // size
        store = dist.PrefixStore(f"zipccl/side/{group.group_name}/{generation}", group.get_group_store())
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _timeout(group, device)
            self._backend = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, rank, size, _timeout(group, device))

    def all_gather(self, out: torch.Tensor, own: torch.Tensor) -> dist.Work:
        """Asynchronous; ``out`` [size * n], ``own`` [n]."""
        return self._backend._allgather_base(out, own)

    def close(self) -> None:
        """Ends the communicator. All ranks of the group at the same point, with nothing in flight."""
        shutdown = getattr(self._backend, "shutdown", None)      # older torch: dropping the object ends it
        if shutdown is not None:
            shutdown()

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor) -> dist.Work:
        """Asynchronous, equal pieces."""
        return self._backend.alltoall_base(out, rows, [], [])
