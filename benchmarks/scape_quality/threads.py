"""W ranks of SCAPE's flow as threads of one process: the product's code as it is, with memory for a network."""
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from ds_scape.sync.transport import Gathered, Transport


class Meeting:
    """Where the threads lay down what they send. Every thread calls ``swap`` equally often."""

    def __init__(self, world_size: int):
        self._barrier = threading.Barrier(world_size)
        self._places = [None] * world_size

    def swap(self, rank: int, mine) -> list:
        """Everybody's, in rank order."""
        self._places[rank] = mine
        self._barrier.wait()
        everybodys = list(self._places)
        self._barrier.wait()                    # nobody lays down the next before all have looked
        return everybodys

    def leave(self) -> None:
        """After an error: no other thread may wait for this one."""
        self._barrier.abort()


class ThreadTransport(Transport):
    """Counts bytes as the real one. All threads use one device and its default stream, so what is queued first is done first."""

    def __init__(self, meeting: Meeting, rank: int, world_size: int):
        super().__init__(None, None, rank, world_size)
        self._meeting = meeting

    def to_owners(self, send: torch.Tensor, splits: list[int], what: str, empty=None) -> torch.Tensor:
        rows = [sent.split(splits)[self.rank] for sent in self._meeting.swap(self.rank, send)]
        self._count(what, (send.numel() - splits[self.rank]) * send.element_size())
        return torch.stack(rows)

    def gather_async(self, own: torch.Tensor, what: str, wait: bool = False, empty=None) -> Gathered:
        rows = torch.stack(self._meeting.swap(self.rank, own))
        self._count(what, own.numel() * own.element_size() * (self.world_size - 1))
        return Gathered(rows, None, own)


class Ranks:
    """Calls ``function(rank, *arguments)`` in every rank's thread; raises the first error."""

    def __init__(self, world_size: int):
        self.meeting, self._pool, self._world_size = Meeting(world_size), ThreadPoolExecutor(world_size), world_size

    def run(self, function, *arguments) -> list:
        def guarded(rank):
            try:
                return function(rank, *arguments)
            except BaseException:
                self.meeting.leave()
                raise

        futures = [self._pool.submit(guarded, rank) for rank in range(self._world_size)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]
