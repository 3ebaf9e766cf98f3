"""How the ranks of a group agree on a mailbox (mailbox.py): all of them use it from one exchange on, or none ever does.

Everything is decided from records that all ranks read from the group's store, so they come to the same verdict:

1. Every rank says on which host it is. Rank 0 makes the memory, a file in /dev/shm, and says its name.
2. All on one host: every rank maps it and says whether that went well.
3. All went well: the mailbox is used from here on. The file has no name any more: nothing is left behind, however a rank ends. (What is
   left by one that is killed before this, the next that makes such a file removes.)

On a GPU these follow each other at the group's first exchange, where ranks wait for each other anyway (NCCL connects them). On a CPU ranks
may come to their groups in different orders, and nobody may wait for a rank that has not come. There they are LAG gathers apart: whoever
launches gather LAG has had the words of gather 0, so all ranks have launched that, and said before it what is read now.
"""
import fcntl
import json
import logging
import os
import socket
import time
import uuid
import weakref
from contextlib import suppress

import torch
import torch.distributed as dist

from ds_zipccl.collectives.mailbox import MAX_RANKS, Mailbox, Places
from ds_zipccl.collectives.mailbox_gpu import GpuWriter
from ds_zipccl.collectives.place import await_keys, read
from zipscape import environment

log = logging.getLogger("ds_zipccl")

FOLDER, PREFIX = "/dev/shm", "zipccl-words-"
STALE_S = 60            # who makes a file has it locked long before
_PROCESS = uuid.uuid4().hex
_OPENED: set[str] = set()           # files that this process has opened: closing any descriptor of one would end its locks (mailbox.py)
LAG = environment.number("ZIPCCL_MAILBOX_LAG")

#: Why a group's words go through a channel.
REASONS = {
    "off": "ZIPCCL_MAILBOX=0 on a rank",
    "too_many_ranks": f"more than {MAX_RANKS} ranks",
    "hosts": "ranks on several hosts, or without common memory",
    "no_memory": "no memory to be had in /dev/shm",
    "cannot_map": "a rank cannot map the memory, or its GPU cannot write there",
    "not_agreed": "the ranks have not agreed yet",
}


def _process() -> list:
    return [_PROCESS, os.getpid()]


def _is_off() -> bool:
    return not environment.is_on("ZIPCCL_MAILBOX")


def _host() -> list:
    """The same for ranks that have FOLDER in common."""
    boot = socket.gethostname()
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return [boot, os.stat(FOLDER).st_dev]


def _is_linked(device: torch.device) -> bool:
    """Whether NCCL has this GPU write into all others of the host, as far as can be told; no other device is asked."""
    if device.type != "cuda":
        return True
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0") or os.environ.get("NCCL_P2P_LEVEL", "") in ("0", "LOC"):
        return False
    others = set(range(torch.cuda.device_count()))
    if len(others) < 2:
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    return all([torch.cuda.can_device_access_peer(index, other) for other in others - {index}])


def _make(num_bytes: int) -> tuple[str, int]:
    """A new file with all its memory: (path, descriptor). As long as that is open the file is known to be somebody's."""
    _sweep()
    path = f"{FOLDER}/{PREFIX}{uuid.uuid4().hex}"
    _OPENED.add(path)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.unlink(path)
        os.close(file)
        raise
    return path, file


def _sweep() -> None:
    """Removes what a rank left that was killed before the others had mapped it."""
    for name in os.listdir(FOLDER):
        path = f"{FOLDER}/{name}"
        if name.startswith(PREFIX) and path not in _OPENED:
            with suppress(OSError), open(path, "rb") as file:           # another user's, or somebody else was faster
                if time.time() - os.fstat(file.fileno()).st_mtime > STALE_S:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def verdict(records: list[dict], world_size: int) -> str | None:
    """Why the ranks cannot go on, a key of REASONS; None: they can. The same for the same records."""
    failed = [record["why_not"] for record in records if record["why_not"]]
    if failed:
        return min(failed, key=list(REASONS).index)
    if any(record["host"] != records[0]["host"] for record in records):
        return "hosts"
    return None


class Meeting:
    """One rank's part in it. ``box``: once agreed. ``why_not``: a key of REASONS, until then."""

    def __init__(self, rank: int, world_size: int, device: torch.device, store: dist.Store, timeout_s: float, group_name: str = ""):
        """``store``: no keys of it are used but those that begin with "mailbox", and nobody waits inside it (place.py)."""
        self.box: Mailbox | None = None
        self.why_not: str | None = "too_many_ranks" if world_size > MAX_RANKS else "not_agreed"
        self._rank, self._size, self._device, self._timeout_s, self._group_name = rank, world_size, device, timeout_s, group_name
        self._store, self._num_gathers, self._awaited = store, 0, None
        self._path, self._file, self._remove, self._candidate = None, None, None, None
        self._why_ended: str | None = None
        self.linked = True                              # as far as is known, all ranks' devices reach each other directly

    @property
    def over(self) -> bool:
        return self.why_not != "not_agreed"

    def now(self) -> None:
        """Waits for all ranks."""
        for step in (self._say_where, self._map, self._decide):
            if not self.over:
                step()

    def before_gather(self, words) -> None:
        """Before every gather of status words into ``words``, by all ranks of the group in one order."""
        if self.over:
            return
        number, self._num_gathers = self._num_gathers, self._num_gathers + 1
        step = {0: self._say_where, LAG: self._map, 2 * LAG: self._decide}.get(number)
        if step is not None:
            if self._awaited is not None:
                exchange, turn = self._awaited
                if exchange.turn == turn:           # else it serves a later call, so this one is settled
                    exchange.wait()
            self._awaited = words, words.turn
            step()

    def _say_where(self) -> None:
        record = {"why_not": "off" if _is_off() else None, "host": None, "linked": _is_linked(self._device)}
        if record["why_not"] is None:
            try:
                record["host"] = _host()
                if self._rank == 0:
                    self._path, self._file = _make(Places(self._size).num_bytes)
                    self._remove = weakref.finalize(self, _unlink, self._path)
                    record["path"] = self._path
            except OSError as error:
                record["why_not"] = "no_memory"
                log.info("no memory for status words: %s", error)
        self._say("where", record)

    def _map(self) -> None:
        records = self._hear("where")
        why_not = verdict(records, self._size)
        self.linked = why_not != "hosts" and all(record["linked"] for record in records)
        if why_not is None:
            record = {"why_not": None, "host": None}
            try:
                writer = GpuWriter(self._device) if self._device.type == "cuda" else None
                _OPENED.add(records[0]["path"])
                file = os.open(records[0]["path"], os.O_RDWR | os.O_CLOEXEC) if self._file is None else self._file
                self._file = None
                self._candidate = Mailbox(file, self._rank, self._size, self._timeout_s, writer=writer, where=f"group {self._group_name}",
                                          neighbours=[rank for rank, other in enumerate(records) if other["process"] == _process()])
            except Exception as error:              # whatever it is: the other ranks must hear of it
                record["why_not"] = "cannot_map"
                log.info("status words cannot go through shared memory: %s", error)
            self._say("mapped", record)
        else:
            self._end(why_not)

    def _decide(self) -> None:
        why_not = verdict(self._hear("mapped"), self._size)
        self.box = self._candidate if why_not is None else None
        self._end(why_not)

    def _end(self, why_not: str | None) -> None:
        self.why_not, self._store, self._awaited = why_not, None, None
        self._forget_file()
        if self.box is None and self._candidate is not None:
            self._candidate.end("it is not used")
        self._candidate = None
        if why_not is not None:
            log.info("status words of group %s go through a channel: %s", self._group_name, REASONS[why_not])

    def end(self, why: str) -> None:
        """Of the channel: see ``Mailbox.end``. Who waits for other ranks' records stops waiting."""
        self._why_ended = why
        for box in (self.box, self._candidate):
            if box is not None:
                box.end(why)
        self._store = self._awaited = None
        self._forget_file()

    def _forget_file(self) -> None:
        """Its name, and a descriptor that nobody took."""
        if self._remove is not None:
            self._remove()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _say(self, what: str, record: dict) -> None:
        self._store.set(f"mailbox/{what}/{self._rank}", json.dumps(record | {"process": _process()}))

    def _hear(self, what: str) -> list[dict]:
        """All ranks' records."""
        keys, store = [f"mailbox/{what}/{rank}" for rank in range(self._size)], self._store
        await_keys(store, keys, self._timeout_s, lambda: self._why_ended)
        return [json.loads(value) for value in read(store, keys)]
