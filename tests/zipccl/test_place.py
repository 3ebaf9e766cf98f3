"""Where the channels of a group meet in its store: connections, waits and ends, with all ranks in this process, over a TCPStore."""
import gc
import itertools
import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_zipccl.collectives import place, transport
from ds_zipccl.collectives.place import Place, await_keys, place_of
from ds_zipccl.collectives.transport import SideChannel
from ds_zipccl.errors import CollectiveError

CPU = torch.device("cpu")
SOON = timedelta(seconds=30)


class Group:
    """What a channel asks of a group."""
    group_name = "group"

    def __init__(self, store, rank, size):
        self.get_group_store, self.rank, self.size = lambda: store, lambda: rank, lambda: size


class World:
    """A server, and a client for each of its ranks, as in as many processes."""
    size = 3

    def __init__(self, port=0):
        self.server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        self.port, self._prefixes = self.server.port, itertools.count()
        self.clients = [dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=SOON, wait_for_workers=False)
                        for _ in range(self.size)]

    def groups(self):
        """The ranks' objects of a new group."""
        prefix = f"group {next(self._prefixes)}"
        return [Group(dist.PrefixStore(prefix, dist.PrefixStore("world", client)), rank, self.size)
                for rank, client in enumerate(self.clients)]

    @property
    def num_connections(self):
        """From this machine to the server."""
        gc.collect()
        remote = f":{self.port:04X}"
        lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}")]
        return sum(words[2].endswith(remote) and words[3] == "01" for words in lines)


@pytest.fixture(scope="module")
def world():
    """One for all tests: where names are looked up in vain, connections cost seconds."""
    return World()


def talk(channels, base=0):
    """Every channel's ranks hear each other's words."""
    outs = [torch.empty(len(channels), dtype=torch.int32) for _ in channels]
    works = [channel.all_gather(out, torch.tensor([base + rank], dtype=torch.int32))
             for rank, (channel, out) in enumerate(zip(channels, outs, strict=True))]
    for work, out in zip(works, outs, strict=True):
        assert work.wait(SOON) and out.tolist() == [base + rank for rank in range(len(channels))]


def test_channels_take_the_connections_of_those_before_them(world):
    """One on which nobody waits, and one for every channel at a time."""
    before = world.num_connections
    kept = [world.groups() for _ in range(3)]
    for number, groups in enumerate(kept):
        for purpose in ("side", "bulk", "side"):
            channels = [SideChannel(group, CPU, purpose) for group in groups]
            talk(channels, 100 * number)
            for channel in channels:
                channel.close()
    assert world.num_connections == before + 1 + world.size
    del kept, groups, channels, channel
    assert world.num_connections == before


def test_a_connection_in_which_gloo_may_wait_is_nobody_elses(world, monkeypatch):
    monkeypatch.setattr(transport, "group_timeout", lambda *_: timedelta(seconds=1))
    group = world.groups()[0]
    side = SideChannel(group, CPU)
    work = side.all_gather(torch.empty(3), torch.ones(1))       # the others do not come
    given_back = []
    monkeypatch.setattr(place._Server, "take_back", lambda *client: given_back.append(client))
    backend, side._backend = side._backend, SimpleNamespace()   # its end waits for what is in flight
    assert not work.is_completed()
    side.close()
    assert not given_back
    talk(channels := [SideChannel(each, CPU) for each in world.groups()])
    channels[0].close()
    assert len(given_back) == 1
    with pytest.raises(RuntimeError):
        work.wait()
    del backend


def test_ranks_may_come_at_any_time(world):
    """Each is told of those who come before it, together with it and long after it."""
    groups, channels = world.groups(), [None] * world.size
    for rank in (1, 0, 2):
        channels[rank] = SideChannel(groups[rank], CPU)
        time.sleep(0.05)
    talk(channels)


def test_a_channel_is_made_and_connects_while_somebody_waits_in_the_groups_store(world):
    """As an all_reduce's second phase has its channel made while this rank's main thread is in a native call."""
    groups = world.groups()
    talk([SideChannel(group, CPU) for group in groups])
    waiting = threading.Thread(target=world.clients[0].wait, args=(["never said"], timedelta(seconds=60)))
    waiting.start()
    try:
        time.sleep(0.05)
        talk([SideChannel(group, CPU, "bulk") for group in groups])
        assert waiting.is_alive()
    finally:
        world.clients[1].set("never said", "after all")
        waiting.join()


def test_another_world_at_the_same_address():
    """What was connected to the first is not taken for a connection to the second."""
    world = World()
    groups = world.groups()
    talk([SideChannel(group, CPU) for group in groups])
    del world.server
    again = World(world.port)
    others = again.groups()
    talk([SideChannel(group, CPU) for group in others], 7)
    assert place_of(others[0])._server is place_of(others[1])._server is not place_of(groups[0])._server


def test_groups_of_one_prefix_meet_and_others_do_not(world):
    """An elastic restart has another prefix in the same store."""
    def place_at(prefix, rank):
        return Place(dist.PrefixStore(prefix, world.clients[rank]))

    first, same, restarted = place_at("attempt_0", 0), place_at("attempt_0", 1), place_at("attempt_1", 0)
    first.store.set("key", "value")
    assert first.store.add("number", 1) == 1            # answered after the key is there
    assert same.store.check(["key"]) and not restarted.store.check(["key"])
    borrowed = same.borrow("below").store
    borrowed.set("key", "other")
    assert borrowed.get("key") == b"other" and first.store.get("key") == b"value"


@pytest.mark.parametrize("kind", ("file", "memory"))
def test_stores_without_connections(kind, tmp_path):
    one = {"file": lambda: dist.FileStore(str(tmp_path / "store"), 2), "memory": dist.HashStore}[kind]()
    groups = [Group(one if kind != "file" or not rank else one.clone(), rank, 2) for rank in range(2)]
    talk([SideChannel(group, CPU) for group in groups])
    assert place_of(groups[0]).borrow("a").store.add("number", 1) == 1


def test_await_keys_leaves_the_store_to_others(world):
    client = world.clients[0]

    def say():
        time.sleep(0.1)
        client.set("asked", "said")                     # the client in which the other thread waits
    thread = threading.Thread(target=say)
    thread.start()
    await_keys(client, ["asked"], 30)
    thread.join()
    with pytest.raises(dist.DistStoreError, match="Wait timeout.*no keys what, nobody"):
        await_keys(client, ["asked", "what", "nobody"], 0.05)


def test_pauses_grow_with_the_wait():
    assert [place.pause_s(waited) for waited in (0, 0.001, 0.5, 1000)] == [0.001, 0.001, 0.05, 0.25]


def test_on_gpus_a_connection_is_borrowed_until_all_ranks_are_connected(world, monkeypatch):
    """NCCL waits in the store at its first call; two that wait at a time must not share one."""
    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store, rank, size, options):
            self.store = store

        def _allgather_base(self, out, own):
            return "work"

        def alltoall_base(self, *_):
            return "work"

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    group, gpu = world.groups()[0], torch.device("cuda")
    root = lambda channel: channel._backend.store.underlying_store          # noqa: E731
    before = world.num_connections
    first, second, _ = (SideChannel(group, gpu, purpose) for purpose in ("side", "bulk", "never used"))
    assert world.num_connections <= before + 1
    assert root(first) is not root(second) and world.num_connections == before + 3
    first.all_gather(None, None)
    third = SideChannel(group, gpu)
    assert root(third) is root(first)
    third.all_to_all(None, None)
    second.all_gather(None, None)
    for _ in range(4):
        SideChannel(group, gpu).all_gather(None, None)
    assert world.num_connections == before + 3
    first.store.set("asked", "said")
    assert first.store.get("asked") == b"said"


def test_on_gpus_ranks_are_connected_for_every_kind_and_size_of_call(world, monkeypatch):
    """What has not been connected for is connected when a resend needs it, while payloads hold the device."""
    asked = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *_):
            pass

        def _asked(self, kind, out, rows):
            asked.append((kind, out.numel(), rows.numel()))
            return SimpleNamespace(wait=lambda: asked.append("waited"))

        _allgather_base = lambda self, out, own: self._asked("gather", out, own)               # noqa: E731
        alltoall_base = lambda self, out, rows, *_: self._asked("exchange", out, rows)         # noqa: E731
        broadcast = lambda self, tensors, options: self._asked("broadcast", tensors[0], tensors[0])         # noqa: E731

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    group, names = world.groups()[0], ("gather", "broadcast", "exchange")
    size = group.size()

    def connected(purpose):
        asked.clear()
        with FakeTensorMode():
            SideChannel(group, torch.device("cuda:0"), purpose).connect()
        assert asked[1::2] == ["waited"] * len(asked[::2])
        return asked[::2]

    def expected(*numels, kinds=names):
        return [(kind, size * numel, numel if kind == "gather" else size * numel) for numel in numels for kind in kinds]

    assert connected("bulk") == expected(16, (8 << 20) // size)
    monkeypatch.setattr(SideChannel, "_box_at_once", lambda channel: None)
    assert connected("side") == expected(16, kinds=("gather", "broadcast")), "words are small, and pairs are many"
    monkeypatch.setattr(transport, "CONNECTING", (16, 16 * size - 1))
    assert connected("bulk") == expected(16, 16), "of a thousand ranks' bytes there must not be a thousand times as many"


def test_aborted_before_its_communicator_was_made(world, monkeypatch):
    """By another thread: nobody would end what is made afterwards."""
    aborted = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *_):
            pass

        def abort(self):
            aborted.append(self)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    side = SideChannel(world.groups()[0], torch.device("cuda"))
    side.abort()
    with pytest.raises(CollectiveError, match="its group was aborted"):
        side.all_gather(None, None)
    for _ in range(100):
        if aborted:
            break
        time.sleep(0.05)
    assert len(aborted) == 1


def test_aborted_while_it_asks_for_the_others_records(world):
    side = SideChannel(world.groups()[0], CPU)
    threading.Timer(0.1, side.abort).start()
    with pytest.raises(dist.DistStoreError, match="not waited for any more.*its group was aborted"):
        side._meeting.now()


def test_a_child_process_does_not_use_its_parents_connections(world):
    groups = world.groups()
    side = SideChannel(groups[0], CPU)                  # still waits for the others
    server = place_of(groups[0])._server
    child = os.fork()
    if child == 0:
        os._exit(0 if not place._servers and not place._places and side else 1)
    assert os.waitpid(child, 0)[1] == 0
    talk([side, *(SideChannel(group, CPU) for group in groups[1:])])
    assert place_of(groups[0])._server is server
