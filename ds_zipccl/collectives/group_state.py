"""What is remembered per process group: calls in flight, capacities, the switch's decisions, the side channel."""
import threading

import torch
import torch.distributed as dist

from ds_zipccl.collectives.capacity import Capacity
from ds_zipccl.collectives.transport import SideChannel
from ds_zipccl.collectives.work import Pending


class GroupState:
    """State of one group on this rank. All ranks of the group build it at the same call, because eligibility is decided
    from shapes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.side = SideChannel(group, device)
        self.capacities: dict[tuple, Capacity] = {}
        self.decisions: dict[tuple, bool] = {}
        self._in_flight: list[Pending] = []        # in launch order
        self._lock = threading.RLock()

    def capacity(self, *key) -> Capacity:
        """The capacity class of calls with this (op, dtype, row size)."""
        return self.capacities.setdefault(key, Capacity())

    def add(self, pending: Pending) -> None:
        with self._lock:
            self._in_flight.append(pending)

    def settle(self) -> None:
        """Settles every call in flight: before the next call of the group is launched, so that capacities and resends
        are in the same order on every rank. Calls whose handle was dropped are completed here, since nobody else
        will."""
        with self._lock:
            for pending in self._in_flight:
                pending.settle()
                if pending.abandoned:
                    pending.finish()
            self._in_flight = [pending for pending in self._in_flight if not pending.finished]

    def complete(self, pending: Pending) -> None:
        """Settles the calls launched before ``pending``, strictly in launch order, and finishes it."""
        with self._lock:
            for earlier in self._in_flight:
                earlier.settle()
                if earlier is pending:
                    break
            pending.finish()
            self._in_flight = [p for p in self._in_flight if not p.finished]

    def close(self) -> None:
        """Completes every call in flight and ends the side channel."""
        with self._lock:
            for pending in list(self._in_flight):
                self.complete(pending)
            self.side.close()
