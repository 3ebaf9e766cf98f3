"""Status words through shared memory (collectives/mailbox.py). Ranks are threads here, where not said otherwise; how they agree on it:
test_mailbox_meeting.py; whole calls: collective_mailbox_cases.py."""
import multiprocessing
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ds_zipccl.collectives import mailbox
from ds_zipccl.collectives.mailbox import DEPTH, SLACK, Mailbox, Places
from ds_zipccl.errors import CollectiveError

AHEAD = DEPTH - SLACK               # exchanges that a writer may be ahead of a reader


def tensor(*words) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int32, device="cpu")


def opened(path) -> int:
    return os.open(path, os.O_RDWR)


@pytest.fixture
def make(tmp_path):
    """Makes the mailboxes of all ranks."""
    def make(world_size, timeout_s=30.0, **more):
        path = tmp_path / "memory"
        path.write_bytes(bytes(Places(world_size).num_bytes))
        return [Mailbox(opened(path), rank, world_size, timeout_s, neighbours=range(world_size), **more) for rank in range(world_size)]
    return make


def on_all(function, boxes):
    """``function(rank, box)`` in a thread for each rank; its results, or the first failure."""
    with ThreadPoolExecutor(len(boxes)) as pool:
        return [future.result(60) for future in [pool.submit(function, rank, box) for rank, box in enumerate(boxes)]]


def test_places_do_not_overlap():
    for size in (2, 3, 8):
        places = Places(size)
        entries = [places.row(c, w) for c in range(DEPTH) for w in range(size)] + [
            places.pair(w, r, c) for c in range(DEPTH) for w in range(size) for r in range(size)]
        entries += [f(r) for f in (places.mark, places.trial) for r in range(size)] + [
            places.pair_mark(w, r) for w in range(size) for r in range(size)]
        assert len(set(entries)) == len(entries) and 0 <= min(entries) and 8 * (max(entries) + 1) <= places.num_bytes
    assert Places(mailbox.MAX_RANKS).num_bytes < 3 << 20


@pytest.mark.parametrize("first", (0, (1 << 32) - 1 - 300, 1 << 40))
def test_all_kinds_of_exchanges_over_many_rounds_of_the_rings(make, first):
    """Ranks at different speeds, words of all 32 bits, several exchanges in flight; also where stamps begin anew."""
    size, turns = 3, 3 * DEPTH

    def word(turn, *who):
        return random.Random(repr((turn, who))).randrange(-1 << 31, 1 << 31)

    def run(rank, box):
        pace, flying = random.Random(rank), []
        for turn in range(turns):
            kind = random.Random(turn).randrange(4)             # the same on all ranks
            if kind < 2:
                reading = box.gather(tensor(word(turn, rank)))
                expected = [word(turn, r) for r in range(size)]
            elif kind == 2:
                root = turn % size
                reading, expected = box.broadcast(tensor(word(turn, rank)), root), [word(turn, root)]
            else:                       # not all pairs have words
                pairs = [(w, r) for w in range(size) for r in range(size) if w != r and random.Random(repr((turn, w, r))).random() < 0.7]
                sent, received = [r for w, r in pairs if w == rank], [w for w, r in pairs if r == rank]
                reading = box.exchange(tensor(*[word(turn, rank, r) for r in sent]), [int(r in sent) for r in range(size)],
                                       [int(w in received) for w in range(size)])
                expected = [word(turn, rank, r) for r in sent] + [word(turn, w, rank) for w in received]
            flying.append((reading, expected))
            if len(flying) > pace.randrange(16):
                for reading, expected in flying:
                    reading.wait()
                    assert reading.words == expected, turn
                flying = []
            if pace.random() < 0.02:
                time.sleep(0.002)
        for reading, expected in flying:
            reading.wait()
            assert reading.words == expected

    on_all(run, make(size, first=first))


def test_an_entry_is_not_written_anew_before_all_have_read_it(make):
    boxes = make(3, timeout_s=0.2)
    root, fast, slow = boxes
    seen = {1: [], 2: []}
    readings = {box: [box.broadcast(tensor(0), 0) for _ in range(2 * AHEAD)] for box in (fast, slow)}
    for i in range(AHEAD):
        root.broadcast(tensor(7 * i), 0).wait()
        readings[fast][i].wait()
    with pytest.raises(RuntimeError, match=r"have not been read.*ranks \[2\]"):
        root.broadcast(tensor(-1), 0)
    root._count -= 1                                # as if it had not been tried
    seen[2] = [reading.wait() or reading.words[0] for reading in readings[slow][:AHEAD]]
    assert seen[2] == [7 * i for i in range(AHEAD)]
    for i in range(AHEAD, 2 * AHEAD):
        root.broadcast(tensor(7 * i), 0).wait()     # nobody in the way
    readings[fast][-1].wait()
    assert readings[fast][-1].words == [7 * (2 * AHEAD - 1)]


def test_pairs_wait_for_their_own_reader_only(make):
    boxes = make(3, timeout_s=0.2)
    for i in range(AHEAD):
        boxes[0].exchange(tensor(i, i), [0, 1, 1], [0, 0, 0]).wait()
        reading = boxes[1].exchange(tensor(), [0, 0, 0], [1, 0, 0])
        reading.wait()
        assert reading.words == [i]
    boxes[0].exchange(tensor(-1), [0, 1, 0], [0, 0, 0]).wait()
    with pytest.raises(RuntimeError, match=r"have not been read.*ranks \[2\]"):
        boxes[0].exchange(tensor(-1), [0, 0, 1], [0, 0, 0])


def test_what_lies_there_from_before_is_not_taken_for_new(make):
    """Neither the words of DEPTH exchanges ago nor a word whose stamp is still the old one."""
    a, b = make(2)
    for i in range(DEPTH):
        readings = [box.gather(tensor(i)) for box in (a, b)]
        for reading in readings:
            reading.wait()
    entry = Places(2).row(DEPTH, 1)
    reading = a.gather(tensor(1))
    assert not reading.is_there() and reading.words is None
    old = b.memory[entry]
    assert old
    b.memory[entry] = old >> 32 << 32 | 12345       # a GPU has copied the word
    assert not reading.is_there()
    b.memory[entry] = (old >> 32) + DEPTH << 32 | 12345
    assert reading.is_there() and reading.words == [1, 12345]


def _write_in_turns(path, stop):
    box = Mailbox(opened(path), 1, 2, 1.0)
    entry, memory = Places(2).row(0, 1), box.memory
    values = [stamp << 32 | stamp ^ 0xFFFFFFFF for stamp in range(1, 1 << 32, 0x01010101)]
    while not stop.is_set():
        for value in values:
            memory[entry] = value


def test_no_entry_is_seen_half_written(make, tmp_path):
    """By another process, while this one looks: stamp and word always belong together."""
    box = make(2)[0]
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    writer = context.Process(target=_write_in_turns, args=(tmp_path / "memory", stop), daemon=True)
    writer.start()
    entry, seen, begin = Places(2).row(0, 1), set(), time.monotonic()
    while len(seen) < 50 and time.monotonic() - begin < 60:
        for _ in range(1000):
            value = box.memory[entry]
            assert value == 0 or value >> 32 == value & 0xFFFFFFFF ^ 0xFFFFFFFF, hex(value)
            seen.add(value)
    stop.set()
    writer.join(30)
    assert len(seen) > 1


def test_several_threads_may_wait_for_one_exchange(make):
    a, b = make(2)
    for i in range(20):
        reading = a.gather(tensor(i))
        with ThreadPoolExecutor(3) as pool:
            waits = [pool.submit(lambda r=reading: r.wait() or r.words) for _ in range(3)]
            b.gather(tensor(-i)).wait()
            assert [wait.result(30) for wait in waits] == [[i, -i]] * 3


def test_a_rank_that_does_not_come_is_noticed_when_the_group_would_notice_it(make):
    reading = make(3, timeout_s=0.3)[1].gather(tensor(5))
    assert not reading.is_there()                   # which waits for nothing
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"timed out.*ranks \[0, 2\] in 0.3 s") as raised:
        reading.wait()
    assert 0.3 <= time.monotonic() - begin < 20 and not isinstance(raised.value, CollectiveError)


def test_who_waits_when_the_group_is_aborted_gets_an_error(make):
    box = make(2)[0]
    reading = box.gather(tensor(5))
    threading.Timer(0.1, box.end, ("its group was aborted",)).start()
    with pytest.raises(CollectiveError, match="aborted"):
        reading.wait()


def _say_and_die(path, num_words, is_there, go_on):
    box = Mailbox(opened(path), 1, 2, 60.0)
    is_there.set()
    for i in range(num_words):
        go_on.wait(60)
        go_on.clear()
        box.gather(tensor(i))
    os._exit(9)


def test_a_rank_that_died_is_named_at_once_and_what_it_said_counts(make, tmp_path, monkeypatch):
    """One that is late is not taken for dead."""
    monkeypatch.setattr(mailbox, "LOOK_S", 0.05)
    make(2)
    box = Mailbox(opened(tmp_path / "memory"), 0, 2, 60.0)
    context = multiprocessing.get_context("spawn")
    is_there, go_on = context.Event(), context.Event()
    other = context.Process(target=_say_and_die, args=(tmp_path / "memory", 2, is_there, go_on))
    other.start()
    assert is_there.wait(60)
    reading = box.gather(tensor(9))
    threading.Timer(0.4, go_on.set).start()
    reading.wait()                                  # several looks
    go_on.set()
    other.join(60)
    last = box.gather(tensor(9))
    last.wait()
    assert other.exitcode == 9 and (reading.words, last.words) == ([9, 0], [9, 1])
    with pytest.raises(RuntimeError, match="process of rank 1 has ended"):
        box.gather(tensor(9)).wait()


class Gpu:
    """Writes later, the stamp after the word, as a stream does."""

    def __init__(self):
        self.queued = []

    def open(self, memory, trial):
        self._memory = memoryview(memory).cast("I")

    def address(self, entry, stream):
        self.queued.append(None)                    # a kernel that is still to run
        return 8 * entry

    def write(self, entry, stamp, word, stream):
        self.queued += [(2 * entry, int.from_bytes((torch.frombuffer(_at(word), dtype=torch.int32)).numpy().tobytes(), "little")),
                        (2 * entry + 1, stamp)]

    def step(self):
        place, value = self.queued.pop(0)
        self._memory[place] = value

    def raise_on_error(self):
        pass

    def close(self):
        return not self.queued


def _at(address):
    import ctypes
    return (ctypes.c_char * 4).from_address(address)


def test_words_that_a_gpu_writes(make):
    gpu = Gpu()
    box = make(1, writer=gpu)[0]
    for turn in range(3):
        own = tensor(-7 * turn - 1)
        reading = box.gather(own, 0)
        for _ in range(2):
            assert not reading.is_there()
            gpu.step()
        assert reading.is_there() and reading.words == own.tolist()
    kept = len(mailbox._KEPT)
    box.end("closed")
    assert len(mailbox._KEPT) == kept
    box = make(1, writer=gpu)[0]
    box.gather(tensor(1), 0)
    box.end("closed")                               # with a write on its way
    assert len(mailbox._KEPT) == kept + 1


def test_words_that_an_encode_writes(make):
    """The stamp and the address are those that readers look at; memory is kept while a kernel may still write there."""
    gpu = Gpu()
    box, kept = make(1, writer=gpu)[0], len(mailbox._KEPT)
    for turn, post in enumerate((box.post_to_all, lambda stream: box.post_from(0, stream), box.post_to_all)):
        reading, address, stamp = post(5)
        assert not reading.is_there() and gpu.queued.pop() is None
        box.memory[address // 8] = stamp << 32 | (-9 * turn - 1) & 0xFFFFFFFF
        assert reading.is_there() and reading.words == [-9 * turn - 1]
    box.end("closed")
    assert len(mailbox._KEPT) == kept
    box = make(1, writer=gpu)[0]
    box.post_to_all(5)
    gpu.queued.clear()                              # as far as streams of ours can tell
    box.end("closed")
    assert len(mailbox._KEPT) == kept + 1


def test_pairs_whose_words_an_encode_writes(make, tmp_path):
    a, b = make(2)
    a._gpu, b._gpu = Gpu(), Gpu()
    for box in (a, b):
        box._gpu.open(box._map, 0)
    for turn in range(3):
        mine, address, stamp = a.post_to_one([0, 1], [0, 0], 5)
        theirs, nowhere, _ = b.post_to_one([0, 0], [1, 0], 5)
        assert nowhere == 0 and not theirs.is_there()
        a.memory[address // 8] = stamp << 32 | turn
        assert mine.is_there() and theirs.is_there() and theirs.words == mine.words == [turn]
