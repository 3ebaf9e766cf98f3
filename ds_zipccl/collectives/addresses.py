"""Ranks tell each other their addresses, and nobody waits for those who have not come.

Gloo connects ranks at their first message, in threads of its own, which wait in a store for the other's address. Here that is a store in
this process's memory. A thread of the process brings what other ranks said, and puts it there: no thread of gloo's needs Python, and none
keeps others from the group's store (place.py).
"""
import atexit
import logging
import os
import threading
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_zipccl.collectives.place import pause_s, read
from zipscape.errors import describe

log = logging.getLogger("ds_zipccl")


class Addresses:
    """Of one channel's ranks. ``local``: the store for gloo; every rank has gloo say its own there, then calls ``tell``."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta, where: str = ""):
        """``store``: no other use of it has keys "come/..." and "num_come". ``timeout``: of waits in ``local``."""
        self.local = dist.HashStore()
        self.local.set_timeout(timeout)
        self._store, self._rank, self._size, self._where = store, rank, world_size, where
        self._seconds, self._come, self._num_read = timeout.total_seconds(), {rank}, 0
        self._ended: str | None = None          # why nobody else will come

    def tell(self) -> None:
        """Says this rank's address to the others, and has theirs brought."""
        if not self.local.check([_key(self._rank)]):
            raise RuntimeError(describe("gloo did not say its address", expected=f"key {_key(self._rank)!r} in its store",
                                        got=f"torch {torch.__version__}", where=self._where))
        # Those who come are numbered: to look for the next is to ask for one key.
        number = self._store.add("num_come", 1) - 1
        self._store.set(f"come/{number}", b"%d " % self._rank + self.local.get(_key(self._rank)))
        COURIER.add(self)

    def look(self) -> bool:
        """Brings what has been said since the last look; whether there is no more to bring. Waits for nobody."""
        num = 1
        while num and self._num_read < self._size and not self._ended:
            keys = [f"come/{number}" for number in range(self._num_read, min(self._num_read + num, self._size))]
            if not self._store.check(keys):
                num //= 2
                continue
            for said in read(self._store, keys):
                rank, address = said.split(b" ", 1)
                if int(rank) != self._rank:
                    self.local.set(_key(int(rank)), address)
                    self._come.add(int(rank))
            self._num_read, num = self._num_read + len(keys), 2 * num
        return self._ended is not None or self._num_read == self._size

    def end(self, why: str) -> None:
        """Nobody else will come: who waits for an address gets one that gloo refuses at once."""
        self._ended = why
        for rank in set(range(self._size)) - self._come:
            self.local.set(_key(rank), _NO_ADDRESS)

    def watched(self, work: dist.Work) -> dist.Work:
        """The handle for a message that may still wait for addresses."""
        return work if len(self._come) == self._size else _Watched(work, self)

    @contextmanager
    def naming_the_absent(self):
        """Says of what failed in it who did not come, if somebody did not."""
        try:
            yield
        except RuntimeError as error:
            absent = [str(rank) for rank in range(self._size) if rank not in self._come]
            if not absent:
                raise
            ranks, why = f"rank {', '.join(absent)}", self._ended
            raise dist.DistStoreError(describe(
                f"a call waited for {ranks}: {why}" if why else f"Wait timeout: {ranks} did not come to a call within {self._seconds:g} s",
                got=str(error), where=self._where, todo="look for the first error of these ranks")) from error


class _Watched(dist.Work):
    def __init__(self, work: dist.Work, addresses: Addresses):
        super().__init__()
        self._work, self._addresses = work, addresses

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._addresses.naming_the_absent():
            return self._work.wait(timeout) if timeout else self._work.wait()


def _key(rank: int) -> str:
    return f"0/{rank}"              # gloo's, with its number of the device, of which we make one


_NO_ADDRESS = bytes(16)             # as gloo writes them: the name of a host, and its address, both of no bytes


class Courier:
    """The thread: looks for each channel's addresses, ever less often, until they are there. Sleeps while there are none."""

    def __init__(self):
        self._errands: list[tuple[float, float, weakref.ref[Addresses]]] = []         # when to look, since when, for what
        self._changed, self._thread, self._ended = threading.Condition(), None, False

    def add(self, addresses: Addresses) -> None:
        now = time.monotonic()
        with self._changed:
            self._errands.append((now, now, weakref.ref(addresses)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="zipccl addresses", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._next()) is not None:
            for _, since, reference in due:
                addresses = reference()
                if addresses is not None and not self._look(addresses):
                    now = time.monotonic()
                    with self._changed:
                        self._errands.append((now + pause_s(now - since), since, reference))
                del addresses

    def _next(self) -> list | None:
        """What is due, once something is; None at the end."""
        with self._changed:
            while not self._ended:
                now = time.monotonic()
                due = [errand for errand in self._errands if errand[0] <= now]
                if due:
                    self._errands = [errand for errand in self._errands if errand[0] > now]
                    return due
                self._changed.wait(min(errand[0] for errand in self._errands) - now if self._errands else None)
        return None

    @staticmethod
    def _look(addresses: Addresses) -> bool:
        try:
            return addresses.look()
        except Exception:               # the store is gone, and with it the job
            log.debug("the store does not answer", exc_info=True)
            addresses.end("the group's store does not answer")
            return True

    def end(self) -> None:
        """Before the interpreter ends: its threads must not be in the store then."""
        with self._changed:
            self._ended, errands = True, self._errands
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(1)
        for _, _, reference in errands:         # nor gloo's, which are waited for
            if (addresses := reference()) is not None:
                addresses.end("the program ends")


def _begin() -> None:
    global COURIER
    COURIER = Courier()


_begin()
atexit.register(lambda: COURIER.end())
os.register_at_fork(after_in_child=_begin)
