"""The collectives that SCAPE uses, on a communication module that is handed in, with every byte counted.

The module is torch.distributed or one that looks like it (deepspeed.comm): ``all_to_all_single``, ``all_gather_into_tensor`` and, to load
checkpoints, ``broadcast`` are called on it. At world size 1 nothing is called and the module may be None.
"""
from collections import Counter

import torch
import torch.distributed

from ds_scape.kernels.impl_reference import empty_beside


class Gathered:
    """A gather under way. ``wait()`` returns the result, [world_size, n]; it may be called more than once."""

    def __init__(self, out: torch.Tensor, work, own: torch.Tensor):
        self._out, self._work = out, work
        self._own = own                     # kept alive until the communication has read it

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        self._work = self._own = None
        return self._out


class Transport:
    """Collectives of one group. ``sent_bytes``: {what: bytes this rank sent to others}, ``calls``: {what: number}, both cumulative."""

    def __init__(self, comm=None, group=None, rank: int = 0, world_size: int = 1):
        self._comm, self._group = comm, group
        self.rank, self.world_size = rank, world_size
        self.sent_bytes, self.calls = Counter(), Counter()

    def to_owners(self, send: torch.Tensor, splits: list[int], what: str, empty=None) -> torch.Tensor:
        """Sends ``splits[o]`` consecutive elements of ``send`` to every rank o, once. Returns what came, in rank order, as
        [world_size, splits[rank]]; complete when the call returns (on a GPU: for the current stream). empty(numel, dtype): makes it."""
        assert send.numel() == sum(splits)
        if self.world_size == 1 or not send.numel():
            return send.expand(self.world_size, -1)
        own = splits[self.rank]
        received = (empty or empty_beside(send))(self.world_size * own, send.dtype)
        self._comm.all_to_all_single(received, send, output_split_sizes=[own] * self.world_size, input_split_sizes=splits,
                                     group=self._group)
        self._count(what, (send.numel() - own) * send.element_size())
        return received.view(self.world_size, own)

    def gather(self, own: torch.Tensor, what: str, empty=None) -> torch.Tensor:
        """Every rank's ``own`` (equal sizes), [world_size, n], in rank order. empty(numel, dtype): makes it."""
        return self.gather_async(own, what, True, empty).wait()

    def gather_async(self, own: torch.Tensor, what: str, wait: bool = False, empty=None) -> Gathered:
        """Starts the gather and returns at once. ``own`` must not be written to before ``wait()``."""
        if self.world_size == 1 or not own.numel():
            return Gathered(own.expand(self.world_size, -1), None, own)
        out = (empty or empty_beside(own))(self.world_size * own.numel(), own.dtype)
        work = self._comm.all_gather_into_tensor(out, own, group=self._group, async_op=not wait)
        self._count(what, own.numel() * own.element_size() * (self.world_size - 1))
        return Gathered(out.view(self.world_size, -1), work, own)

    def from_first(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Rank 0's ``tensor``; on the others, where it is overwritten, one of the same size."""
        if self.world_size > 1 and tensor.numel():
            first = 0 if self._group is None else torch.distributed.get_global_rank(self._group, 0)
            self._comm.broadcast(tensor, first, group=self._group)
            self._count(what, tensor.numel() * tensor.element_size() if self.rank == 0 else 0)
        return tensor

    def _count(self, what: str, num_bytes: int) -> None:
        self.sent_bytes[what] += num_bytes
        self.calls[what] += 1
