"""Status words through memory that all ranks of a group share, where they are on one host: no communicator, nothing beside the payload.

The memory is an array of 8-byte entries. A status word lies there as ``stamp << 32 | word``; the stamp says which exchange it belongs to,
so who reads an entry (one 8-byte load) sees whether the word is there, and never half of one. Each entry has one writer.

* Gathers, and broadcasts, in which the root alone writes: a ring of DEPTH rows with an entry for each rank. All ranks count them.
* Words between two ranks: a ring of DEPTH entries for each ordered pair, counted by both ends.
* Marks: how many exchanges a rank has read, for gathers and for each pair. An entry is written anew when everyone has read what was in it.
  Only who is DEPTH - SLACK exchanges ahead of another rank's reading waits for that.

A GPU writes by itself. Where its encode can, that puts word and stamp there in one store (``post_to_all``, ...). Else it is done on the
status stream, behind the encode: a copy of the word, then a stream memory operation that sets the stamp.
Agreement on using all this: mailbox_meeting.py.
"""
import ctypes
import fcntl
import mmap
import os
import struct
import time
import weakref
from collections import deque

import torch

from ds_zipccl.errors import CollectiveError
from ds_zipccl.kernels.launch_calls import Ring
from zipscape.errors import describe

DEPTH = 256
SLACK = 64              # more calls than are ever in flight: words of neighbouring calls may be read in another order than launched
MAX_RANKS = 32          # of a group: memory grows with the square
SPINS = 50              # looks before the first sleep
LOOK_S = 1.0            # who waits looks so often whether the others are alive
_WORD, _NUM_STAMPS = 0xFFFFFFFF, (1 << 32) - 1


def _stamp(count: int) -> int:
    """Never 0, which is what fresh memory holds."""
    return count % _NUM_STAMPS + 1


class Places:
    """Where everything lies in the memory of a group of ``world_size`` ranks: indices of entries."""

    def __init__(self, world_size: int):
        self._size = size = world_size
        self._pairs = DEPTH * size
        self._marks = self._pairs + DEPTH * size * size
        self._pair_marks = self._marks + size
        self._trials = self._pair_marks + size * size
        self.num_bytes = -(-8 * (self._trials + size) // mmap.PAGESIZE) * mmap.PAGESIZE

    def row(self, count: int, writer: int) -> int:
        return count % DEPTH * self._size + writer

    def pair(self, writer: int, reader: int, count: int) -> int:
        return self._pairs + (writer * self._size + reader) * DEPTH + count % DEPTH

    def mark(self, reader: int) -> int:
        """Of gathers."""
        return self._marks + reader

    def pair_mark(self, writer: int, reader: int) -> int:
        return self._pair_marks + writer * self._size + reader

    def trial(self, rank: int) -> int:
        """For tries before the first exchange."""
        return self._trials + rank


class Reading:
    """One exchange on this rank: ``words``, int32 values, once they have all come; None before. Any number of threads at once."""
    __slots__ = ("words", "_box", "_entries", "_marks")

    def __init__(self, box: "Mailbox", entries: list[tuple[int, int]], marks: list[tuple[int, int]]):
        """``entries``: (entry, its stamp). ``marks``: (entry, what is to be put there once the words are read)."""
        self.words, self._box, self._entries, self._marks = None, box, entries, marks

    def is_there(self) -> bool:
        if self.words is None:
            memory, words = self._box.memory, []
            for entry, stamp in self._entries:
                value = memory[entry]
                if value >> 32 != stamp:
                    return self.words is not None           # another thread may have read it, so that it was written anew
                word = value & _WORD
                words.append(word - (1 << 32) if word >> 31 else word)
            self.words = words
            for entry, count in self._marks:
                memory[entry] = count
        return True

    def _expected(self) -> list[tuple[int, int]]:
        return self._entries

    def wait(self) -> None:
        for _ in range(SPINS):
            if self.is_there():
                return
        self._box.wait_until(self.is_there, self._late, "status words have not come")

    def _late(self) -> set[int]:
        """The ranks whose words are missing."""
        memory, box = self._box.memory, self._box
        return {box.writer_of(entry) for entry, stamp in self._expected() if memory[entry] >> 32 != stamp}


class RowReading(Reading):
    """The same of entries one after another with one stamp: ``num`` from ``first`` on; ``mark``: what this rank has read then."""
    __slots__ = ("_first", "_num", "_stamp", "_mark")

    def __init__(self, box: "Mailbox", first: int, num: int, stamp: int, mark: int):
        self.words, self._box, self._first, self._num, self._stamp, self._mark = None, box, first, num, stamp, mark

    def is_there(self) -> bool:
        if self.words is None:
            box, stamp, words = self._box, self._stamp, []
            for value in box.memory[self._first:self._first + self._num]:
                if value >> 32 != stamp:
                    return self.words is not None           # as above
                word = value & _WORD
                words.append(word - (1 << 32) if word >> 31 else word)
            self.words = words
            box.memory[box.mark] = self._mark
        return True

    def _expected(self) -> list[tuple[int, int]]:
        return [(self._first + i, self._stamp) for i in range(self._num)]


class Mailbox:
    """One rank's end. Exchanges are begun by one thread at a time, in one order on all ranks.

    ``file``: a descriptor of the shared file, as large as ``Places.num_bytes``; taken over. ``writer``: a mailbox_gpu.GpuWriter, on a GPU.
    ``neighbours``: ranks that are threads of this process. ``first``: where all ranks begin to count. ``where``: for messages.
    """

    def __init__(self, file: int, rank: int, world_size: int, timeout_s: float, *, writer=None,
                 neighbours=(), first: int = 0, where: str = ""):
        weakref.finalize(self, os.close, file)
        self._file, self._rank, self._size, self._timeout_s, self._where = file, rank, world_size, timeout_s, where
        self._places, self._neighbours, self._gpu = Places(world_size), {rank, *neighbours}, writer
        self._map = mmap.mmap(file, self._places.num_bytes)
        self.memory = memoryview(self._map).cast("Q")
        self._first, self._count, self._room_for_all = first, first, first + DEPTH - SLACK
        self._marks = [self._places.mark(reader) for reader in range(world_size)]
        self.mark = self._marks[rank]
        self._pair_counts: dict[tuple[int, int], int] = {}          # by (writer, reader), of which this rank is one
        self._room: dict[tuple[int, ...], int] = {}                 # exchanges so far that may be written, as known when last looked
        self._ended: str | None = None
        self._posted: deque[tuple[int, int]] = deque(maxlen=2 * DEPTH)      # what the GPU was told to write last
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)           # ends with the process, whatever ends that
        if writer is not None:
            writer.open(self._map, self._places.trial(rank))

    # Exchanges. ``own``: int32, on a GPU in its memory, from where the words are taken on ``stream`` (a handle).

    def gather(self, own: torch.Tensor, stream: int | None = None) -> Reading:
        """One word of each rank."""
        reading, place = self._round(0, self._size, True)
        self._write([place], own, stream)
        return reading

    def broadcast(self, own: torch.Tensor, root: int, stream: int | None = None) -> Reading:
        """The root's word."""
        reading, place = self._round(root, 1, self._rank == root)
        self._write([place] if self._rank == root else [], own, stream)
        return reading

    def _round(self, first: int, num: int, writes: bool) -> tuple[Reading, tuple[int, int]]:
        """The next exchange that all ranks count, of words of ``num`` ranks from ``first`` on: its reading, and (entry, stamp) for this
        rank's word, if it ``writes`` one."""
        count = self._count
        self._count = count + 1
        if writes and count >= self._room_for_all:
            self._make_room((), count, self._marks)
            self._room_for_all = self._room[()]
        row, stamp = self._places.row(count, 0), _stamp(count)
        return RowReading(self, row + first, num, stamp, count + 1), (row + self._rank, stamp)

    def exchange(self, own: torch.Tensor, counts: list[int], out_counts: list[int], stream: int | None = None) -> Reading:
        """``counts[r]`` words, 0 or 1, of ``own`` go to rank r, ``out_counts[r]`` come from it. The reading has this rank's own words, then
        the others'."""
        reading, places = self._pairs_round(counts, out_counts)
        self._write(places, own, stream)
        return reading

    def _pairs_round(self, counts: list[int], out_counts: list[int]) -> tuple[Reading, list[tuple[int, int]]]:
        rank, places = self._rank, self._places
        sent = [(rank, peer) for peer, count in enumerate(counts) if count]
        pairs = sent + [(peer, rank) for peer, count in enumerate(out_counts) if count]
        entries, marks = [], []
        for pair in pairs:
            count = self._pair_counts.get(pair, self._first)
            self._pair_counts[pair] = count + 1
            entries.append((places.pair(*pair, count), _stamp(count)))
            if pair[0] == rank:
                self._make_room(pair, count, [places.pair_mark(*pair)])
            else:
                marks.append((places.pair_mark(*pair), count + 1))
        return Reading(self, entries, marks), entries[:len(sent)]

    # The same where the encode that is queued next on ``stream`` writes this rank's word: (reading, address of the entry for the GPU, stamp
    # << 32 | word goes there). The address is 0 where this rank has no word.

    def post_to_all(self, stream: int) -> tuple[Reading, int, int]:
        count = self._count                                             # what _round and _post do, for the calls that come most often
        if count >= self._room_for_all:
            reading, place = self._round(0, self._size, True)
            return reading, *self._post(place, stream)
        self._count = count + 1
        first, stamp = count % DEPTH * self._size, count % _NUM_STAMPS + 1
        entry = first + self._rank
        self._posted.append((entry, stamp))
        return RowReading(self, first, self._size, stamp, count + 1), self._gpu.address(entry, stream), stamp

    # The same for who finds the entry by himself (kernels/launch_calls.Repeat).

    def ring(self) -> Ring:
        """Where it is; on a GPU."""
        host = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        return Ring(self._gpu.address(0, None), host, host + 8 * self.mark, DEPTH, self._size, self._rank)

    def next_exchange(self) -> int:
        """Its number; -1: only who waits may begin it."""
        count = self._count
        return count if count < self._room_for_all and self._ended is None else -1

    def begun(self, count: int, stream: int) -> Reading:
        """It is under way, this rank's word to be written by what was queued on ``stream``."""
        self._count = count + 1
        first, stamp = count % DEPTH * self._size, count % _NUM_STAMPS + 1
        self._posted.append((first + self._rank, stamp))
        self._gpu.posting = stream
        return RowReading(self, first, self._size, stamp, count + 1)

    def post_from(self, root: int, stream: int) -> tuple[Reading, int, int]:
        reading, place = self._round(root, 1, self._rank == root)
        return reading, *(self._post(place, stream) if self._rank == root else (0, 0))

    def post_to_one(self, counts: list[int], out_counts: list[int], stream: int) -> tuple[Reading, int, int]:
        """``counts`` has one word at most."""
        reading, places = self._pairs_round(counts, out_counts)
        return reading, *(self._post(*places, stream) if places else (0, 0))

    def _post(self, place: tuple[int, int], stream: int) -> tuple[int, int]:
        self._posted.append(place)
        return self._gpu.address(place[0], stream), place[1]

    def _write(self, places: list[tuple[int, int]], own: torch.Tensor, stream: int | None) -> None:
        if not places:
            return
        if self._gpu is not None:
            address = own.data_ptr()
            self._posted.extend(places)
            for i, (entry, stamp) in enumerate(places):
                self._gpu.write(entry, stamp, address + 4 * i, stream)
            return
        memory = self.memory
        for (entry, stamp), word in zip(places, own.tolist(), strict=True):
            memory[entry] = stamp << 32 | word & _WORD

    def _make_room(self, ring: tuple[int, ...], count: int, marks: list[int]) -> None:
        """Waits, where it must, until exchange ``count`` of a ring may be written. ``marks``: its readers'."""
        if count - self._first < DEPTH - SLACK or count < self._room.get(ring, 0):
            return
        memory = self.memory

        def late() -> set[int]:
            return {reader for i, reader in enumerate(ring[1:] or range(self._size))
                    if max(memory[marks[i]], self._first) + DEPTH - SLACK <= count}

        self.wait_until(lambda: not late(), late, "status words have not been read")
        self._room[ring] = min([memory[mark] for mark in marks]) + DEPTH - SLACK

    def writer_of(self, entry: int) -> int:
        pairs = DEPTH * self._size
        return entry % self._size if entry < pairs else (entry - pairs) // DEPTH // self._size

    def wait_until(self, condition, late, what: str) -> None:
        """Until ``condition()``. ``late()``: the ranks that are waited for. Raises CollectiveError after ``end``; RuntimeError, as a
        channel would, after the timeout or when the process of such a rank has ended."""
        begin = time.monotonic()
        deadline, next_look = begin + self._timeout_s, begin + LOOK_S
        while not condition():
            if self._ended is not None:
                raise CollectiveError(describe(what, got=self._ended, where=self._where))
            now = time.monotonic()
            if now >= min(next_look, deadline):
                next_look = now + LOOK_S
                if self._gpu is not None:
                    self._gpu.raise_on_error()
                ranks = late()
                gone = [rank for rank in ranks if not self._lives(rank)]
                if gone and not condition():
                    raise RuntimeError(describe(what, got=f"the process of rank {gone[0]} has ended", where=self._where))
                if ranks and now >= deadline:
                    raise RuntimeError(describe(f"timed out: {what}", got=f"nothing from ranks {sorted(ranks)} in {self._timeout_s:g} s",
                                                where=self._where))
            time.sleep(min(1e-3, max(2e-5, (now - begin) / 50)))

    def _lives(self, rank: int) -> bool:
        """Whether the rank's process still has its lock."""
        if rank in self._neighbours:
            return True
        question = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        return struct.unpack("hhqqi0q", fcntl.fcntl(self._file, fcntl.F_GETLK, question))[0] != fcntl.F_UNLCK

    def end(self, why: str) -> None:
        """On this rank alone, at once: who waits gets an error that says ``why``."""
        if self._ended is None:
            self._ended = why
            if self._gpu is not None and not (self._all_written() and self._gpu.close()):
                _KEPT.append(self._map)


    def _all_written(self) -> bool:
        """Whether the GPU has put everything there that it was told to."""
        return all([self.memory[entry] >> 32 == stamp for entry, stamp in dict(self._posted).items()])


_KEPT: list[mmap.mmap] = []         # memory that a GPU may still write to
