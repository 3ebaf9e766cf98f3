"""Where the channels of a group meet in its store: over one connection per process, on which nobody waits.

A TCPStore's client serves one call at a time: one that waits for a key keeps every other thread of the process from the store. In the
group's own client anybody may be waiting, for a rank that waits for us. So channels have connections of their own to its server. That is
one thread for all ranks, and each connection costs it a file and mostly a look into the DNS; so all channels of a process share one, and
who needs a key asks now and then whether it is there. What waits inside the store, where we cannot ask instead, borrows one for as long.
"""
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from zipscape.errors import describe

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.25


def pause_s(waited_s: float) -> float:
    """How long to leave the store alone after waiting that long: a wait gets a tenth longer by it, and a thousand ranks do not keep the
    server from its work."""
    return min(max(waited_s / 10, FIRST_PAUSE_S), LONGEST_PAUSE_S)


def await_keys(store: dist.Store, keys: list[str], timeout_s: float, why_ended: Callable[[], str | None] = lambda: None) -> None:
    """Waits for them without keeping other threads from the store. Raises DistStoreError after ``timeout_s``, as a store does, and once
    ``why_ended()`` says why nobody will come."""
    begin = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - begin
        if (why := why_ended()) is not None:
            raise dist.DistStoreError(describe("other ranks are not waited for any more", got=why))
        if waited > timeout_s:
            absent = [key for key in keys if not store.check([key])]
            raise dist.DistStoreError(describe(f"Wait timeout: other ranks did not say within {timeout_s:g} s what they are asked",
                                               got=f"no keys {', '.join(absent)}", todo="look for the ranks' first errors"))
        time.sleep(pause_s(waited))


def place_of(group: dist.ProcessGroup) -> "Place":
    """The group's; all ranks find the same."""
    place = _places.get(group)
    if place is None:                   # two threads may come to different objects: to the same keys over the same connection
        place = _places[group] = Place(group.get_group_store())
    return place


def read(store: dist.Store, keys: list[str]) -> list[bytes]:
    """What is under keys that are there."""
    return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]


class Place:
    """What a group's ranks have to themselves in its store: nobody else uses the keys below. ``store``: for calls that return at once."""

    def __init__(self, group_store: dist.Store):
        root = group_store
        while isinstance(root, dist.PrefixStore):
            root = root.underlying_store
        self._server, self._prefix = None, ""
        if isinstance(root, dist.TCPStore):
            # Groups have prefixes of their own, which say apart their lives too, but a PrefixStore does not tell its prefix. So the first
            # rank to come invents one for all that ask here. Both calls return at once, and after the server has done them.
            self._prefix = f"zipccl/{group_store.compare_set('zipccl/place', '', uuid.uuid4().hex).decode()}"
            root.add(self._prefix, 1)
            self._server = _Server.of(root, self._prefix)
            self.store = dist.PrefixStore(self._prefix, self._server.client)
        else:                           # in memory or in a file: without connections, and none waits for another there
            self.store = _own(group_store)

    def borrow(self, prefix: str) -> "Loan":
        """A connection for waiting, on which keys begin with ``prefix``."""
        if self._server is None:
            return Loan(dist.PrefixStore(prefix, _own(self.store)), lambda: None)
        client = self._server.borrow()
        return Loan(dist.PrefixStore(f"{self._prefix}/{prefix}", client), lambda: self._server.take_back(client))


@dataclass(frozen=True)
class Loan:
    """``store``: which may go on using it after ``give_back``, but not wait there."""
    store: dist.Store
    give_back: Callable[[], None]


class _Server:
    """This process's connections to the server of a TCPStore."""

    def __init__(self, root: dist.TCPStore):
        self.client, self._idle = root.clone(), []

    @staticmethod
    def of(root: dist.TCPStore, key: str) -> "_Server":
        """The one that knows ``key``: of another world there may have been another at the same address."""
        with _lock:
            server = _servers.get((root.host, root.port))
            if server is None or not server._knows(key):
                server = _servers[root.host, root.port] = _Server(root)
            if dist.is_initialized():               # groups come and go
                _kept[dist.group.WORLD] = server
            return server

    def _knows(self, key: str) -> bool:
        try:
            return self.client.check([key])
        except RuntimeError:                        # it is no more
            return False

    def borrow(self) -> dist.TCPStore:
        with _lock:
            if self._idle:
                return self._idle.pop()
        return self.client.clone()

    def take_back(self, client: dist.TCPStore) -> None:
        if client not in self._idle:                # said twice
            self._idle.append(client)


def _own(store: dist.Store) -> dist.Store:
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):     # one that somebody wrote in Python
        return store


def _forget() -> None:
    """In a child process: the connections are its parent's."""
    global _lock
    _lock = threading.Lock()
    for known in (_servers, _kept, _places):
        known.clear()


_lock = threading.Lock()
_servers: "weakref.WeakValueDictionary[tuple[str, int], _Server]" = weakref.WeakValueDictionary()
_kept: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Server]" = weakref.WeakKeyDictionary()
_places: "weakref.WeakKeyDictionary[dist.ProcessGroup, Place]" = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_forget)
