"""How ranks agree on words through shared memory (collectives/mailbox_meeting.py). Ranks are threads here, where not said otherwise."""
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.collectives import mailbox, mailbox_meeting
from ds_zipccl.collectives.mailbox_meeting import REASONS, Meeting, verdict
from tests.zipccl.test_mailbox import on_all, tensor


class Words:
    """As ``words.Words``: of one exchange."""
    turn = 1

    def __init__(self):
        self.num_waits = 0

    def wait(self):
        self.num_waits += 1


@pytest.fixture
def meetings(tmp_path, monkeypatch):
    """Makes one of each rank; ``folder``: in place of /dev/shm."""
    monkeypatch.setattr(mailbox_meeting, "FOLDER", str(tmp_path))
    monkeypatch.setattr(mailbox_meeting, "LAG", 3)

    def make(size):
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=20))
        return [Meeting(rank, size, torch.device("cpu"), store, 20.0, "some") for rank in range(size)]
    return make


def rank_here() -> int:
    return int(threading.current_thread().name)


def agreed(meetings, by_gathers):
    """All ranks in threads named by their ranks; returns [(why not, gathers before it was known)]."""
    results = [None] * len(meetings)

    def run(rank):
        meeting, number = meetings[rank], 0
        if not by_gathers:
            meeting.now()
        while not meeting.over:
            meeting.before_gather(Words())
            number += 1
            barriers.wait(20)                       # the words of a gather come when all ranks are there
        results[rank] = meeting.why_not, number

    barriers = threading.Barrier(len(meetings))
    threads = [threading.Thread(target=run, args=(rank,), name=str(rank), daemon=True) for rank in range(len(meetings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("by_gathers", (False, True))
def test_all_ranks_on_one_host_share_a_mailbox(meetings, tmp_path, by_gathers):
    ranks = meetings(3)
    assert agreed(ranks, by_gathers) == [(None, 7 * by_gathers)] * 3
    assert os.listdir(tmp_path) == []               # the file has no name any more
    readings = [meeting.box.gather(tensor(10 + rank)) for rank, meeting in enumerate(ranks)]
    assert [reading.wait() or reading.words for reading in readings] == [[10, 11, 12]] * 3


def break_at(monkeypatch, what, culprit):
    def only(rank, broken, whole):
        return lambda *args, **more: broken() if rank_here() == rank else whole(*args, **more)

    def refuse():
        raise PermissionError("refused")

    if what == "off":
        monkeypatch.setattr(mailbox_meeting, "_is_off", only(culprit, lambda: True, mailbox_meeting._is_off))
    elif what == "hosts":
        monkeypatch.setattr(mailbox_meeting, "_host", only(culprit, lambda: ["elsewhere", 1], mailbox_meeting._host))
    elif what == "cannot_map":
        monkeypatch.setattr(mailbox_meeting, "Mailbox", only(culprit, refuse, mailbox_meeting.Mailbox))
    else:
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: refuse())


@pytest.mark.parametrize("by_gathers", (False, True))
@pytest.mark.parametrize("what, culprit", [("off", 0), ("off", 2), ("hosts", 0), ("hosts", 2), ("cannot_map", 0), ("cannot_map", 1),
                                           ("no_memory", 0)])
def test_where_one_rank_cannot_none_does(meetings, tmp_path, monkeypatch, what, culprit, by_gathers):
    break_at(monkeypatch, what, culprit)
    ranks = meetings(3)
    number = 0 if not by_gathers else 7 if what == "cannot_map" else 4
    assert agreed(ranks, by_gathers) == [(what, number)] * 3
    assert all(meeting.box is None for meeting in ranks) and os.listdir(tmp_path) == []


def test_where_the_gpu_cannot_write_no_descriptor_is_left_open(meetings, tmp_path, monkeypatch):
    def refuse(device):
        raise OSError("no libcuda.so.1")

    def num_open():
        return sum(os.path.realpath(f"/proc/self/fd/{file}").startswith(str(tmp_path)) for file in os.listdir("/proc/self/fd"))

    monkeypatch.setattr(mailbox_meeting, "GpuWriter", refuse)
    ranks = meetings(2)
    for meeting in ranks:
        meeting._device = torch.device("cuda")
    for step in ("_say_where", "_map", "_decide"):
        for meeting in ranks:
            getattr(meeting, step)()
        assert num_open() == (step != "_decide")
    assert [meeting.why_not for meeting in ranks] == ["cannot_map"] * 2


def test_a_rank_alone_waits_for_nobody_before_its_first_words_have_come(meetings, tmp_path):
    first = meetings(2)[0]
    words = Words()
    first.before_gather(words)
    for _ in range(2):
        first.before_gather(Words())
    assert words.num_waits == 0 and not first.over and len(os.listdir(tmp_path)) == 1
    first.end("its group was closed")
    assert os.listdir(tmp_path) == []


def test_words_that_serve_a_later_call_are_not_waited_for(meetings):
    """Their exchange is settled, or they would not."""
    ranks, words = meetings(2), [Words(), Words()]
    for meeting, mine in zip(ranks, words, strict=True):
        meeting.before_gather(mine)
        mine.turn += 1
        for _ in range(2):
            meeting.before_gather(Words())
    on_all(lambda rank, meeting: meeting.before_gather(Words()), ranks)
    assert [mine.num_waits for mine in words] == [0, 0]


def test_what_a_killed_rank_left_is_removed_and_what_is_in_use_is_not(meetings, tmp_path):
    meeting = meetings(2)[0]
    meeting.before_gather(Words())
    mine, = os.listdir(tmp_path)
    for name, age in ((mine, 1000), (f"{mailbox_meeting.PREFIX}left", 1000), (f"{mailbox_meeting.PREFIX}new", 0), ("other", 1000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    mailbox_meeting._OPENED.clear()                 # as in another process
    other = meetings(2)[0]
    other.before_gather(Words())
    left = set(os.listdir(tmp_path))
    assert len(left) == 4 and left > {mine, f"{mailbox_meeting.PREFIX}new", "other"}
    for each in (meeting, other):
        each.end("its group was closed")


def test_who_looks_for_what_is_left_does_not_look_dead_to_another_group(meetings, tmp_path):
    """A process loses its locks on a file when it closes any descriptor of it."""
    ranks = meetings(2)
    for step in ("_say_where", "_map"):
        for meeting in ranks:
            getattr(meeting, step)()
    mine, = tmp_path.iterdir()
    other = meetings(2)[0]
    other.before_gather(Words())
    ask = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(sys.argv[2]))"
    for rank in range(2):
        asked = subprocess.run([sys.executable, "-c", ask, str(mine), str(rank)], capture_output=True, text=True, timeout=60)
        assert "BlockingIOError" in asked.stderr, rank
    for each in (*ranks, other):
        each.end("its group was closed")


def test_who_wants_one(monkeypatch):
    monkeypatch.delenv("ZIPCCL_MAILBOX", raising=False)
    assert not mailbox_meeting._is_off()
    for value in ("", "0", "1"):
        monkeypatch.setenv("ZIPCCL_MAILBOX", value)
        assert mailbox_meeting._is_off() == (value == "0")


def test_verdicts():
    here, there = {"why_not": None, "host": ["a", 1]}, {"why_not": None, "host": ["b", 1]}
    assert verdict([here, here], 2) is None and verdict([here, there], 2) == "hosts"
    off, full = {"why_not": "off", "host": None}, {"why_not": "no_memory", "host": None}
    assert verdict([here, off], 2) == verdict([off, full], 2) == verdict([full, off, there], 3) == "off"
    assert set(REASONS) >= {"off", "hosts", "no_memory", "cannot_map", "too_many_ranks", "not_agreed"}
    meeting = Meeting(0, mailbox.MAX_RANKS + 1, torch.device("cpu"), SimpleNamespace(), 1.0)
    assert meeting.over and meeting.why_not == "too_many_ranks"
    meeting.before_gather(Words())                  # which asks nobody


@pytest.mark.parametrize("unlinked, host, linked", [((), None, True), ((1,), None, False), ((0, 1), None, False), ((), 1, False)])
def test_ranks_agree_whether_their_gpus_reach_each_other(meetings, monkeypatch, unlinked, host, linked):
    """By what all of them say; ranks on several hosts do not."""
    monkeypatch.setattr(mailbox_meeting, "_is_linked", lambda device: rank_here() not in unlinked)
    monkeypatch.setattr(mailbox_meeting, "_host", lambda: ["here", 5] if rank_here() != host else ["there", 5])
    ranks = meetings(2)
    assert [why for why, _ in agreed(ranks, False)] == ["hosts" if host else None] * 2
    assert [rank.linked for rank in ranks] == [linked] * 2


def test_which_gpus_reach_each_other(monkeypatch):
    reach = {(0, 1): True, (0, 2): True, (1, 0): True, (1, 2): False}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach[one, other])
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)

    def found() -> list[bool]:
        return [mailbox_meeting._is_linked(torch.device(name)) for name in ("cpu", "cuda:0", "cuda:1")]

    assert found() == [True, True, False]
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert found() == [True, True, False]
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert found() == [True, False, False]
