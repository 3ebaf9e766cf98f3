"""What is prepared for calls on a GPU (collectives/plans.py, csrc/zipccl/launch.h), run on a CPU: the codec's source compiled for the host,
a driver that does everything at once. Bits and places; what waits for what: test_stream_order.py."""
import ctypes
from types import SimpleNamespace

import pytest
import torch

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.format import OVERFLOW_BIT, SPILL_SHIFT
from ds_zipccl.collectives import nccl_direct, plans, streams
from ds_zipccl.collectives.plans import Plan, Recipe, Rows, Transfer, exchange
from ds_zipccl.errors import KernelError
from ds_zipccl.kernels import launch_calls, loader
from ds_zipccl.kernels.cuda_calls import CudaCalls
from ds_zipccl.kernels.launch_calls import NOT_SO, LaunchCalls
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.helpers.emulated import compile_for_host

CPU, BF, STREAM, DECODES, PAYLOADS, COMMUNICATOR = torch.device("cpu"), torch.bfloat16, 11, 22, 33, 44
N = 40_000                              # elements of a row: a tile and a part of one


@pytest.fixture(scope="module")
def codec_library(tmp_path_factory) -> ctypes.CDLL:
    return CudaCalls(ctypes.CDLL(str(compile_for_host(tmp_path_factory.mktemp("emulated"))))).library


@pytest.fixture
def gpu(codec_library, monkeypatch):
    """``log``: what the driver and NCCL were asked for. ``refuse``: a code for copies, ``nccl_refuses``: for what NCCL is to send.
    ``context``: the current one; ``captures``: whether a stream is captured."""
    gpu = SimpleNamespace(log=[], refuse=0, nccl_refuses=0, context=55, captures=0)

    def record(event, stream):
        gpu.log.append(("record", event, stream))
        return 0

    def wait(stream, event, flags):
        gpu.log.append(("wait", stream, event))
        return 0

    def copy(to, source, num_bytes, stream):
        gpu.log.append(("copy", num_bytes, stream))
        if not gpu.refuse:
            ctypes.memmove(to, source, num_bytes)
        return gpu.refuse

    def context(where):
        where[0] = gpu.context
        return 0

    def is_capturing(stream, status):
        status[0] = gpu.captures
        return 0

    p = ctypes.c_void_p
    driver = [ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(function) for function, arguments in (
        (record, (p, p)), (wait, (p, p, ctypes.c_uint)), (copy, (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, p)),
        (context, (ctypes.POINTER(p),)), (is_capturing, (p, ctypes.POINTER(ctypes.c_int))))]
    functions = [getattr(codec_library, name) for name in ("zipccl_cuda_encode_telling", "zipccl_cuda_decode", "zipccl_cuda_decode_reduce")]
    workspace, gpu.unread = torch.zeros(4096, dtype=torch.int64, device=CPU), torch.zeros(1, dtype=torch.int32, device=CPU)
    gpu.launcher = SimpleNamespace(workspace=lambda *_: workspace.data_ptr(), unread_word=lambda index: gpu.unread.data_ptr())
    gpu.remake = lambda: setattr(gpu.launcher, "launch_calls", LaunchCalls(codec_library, *functions, *driver))
    gpu.remake()
    monkeypatch.setattr(streams, "current", lambda device: STREAM)
    handles = iter(range(77, 88))
    monkeypatch.setattr(plans.streams, "Mark", lambda device: SimpleNamespace(handle=next(handles)))

    def asked(name, code=lambda: 0):
        def ask(*arguments):
            gpu.log.append((name, *arguments))
            return code()
        return ctypes.CFUNCTYPE(ctypes.c_int, *nccl_direct._ARGUMENTS[name])(ask)

    names = {"ncclAllGather": lambda: gpu.nccl_refuses, "ncclSend": lambda: gpu.nccl_refuses, "ncclRecv": lambda: 0,
             "ncclGroupStart": lambda: 0, "ncclGroupEnd": lambda: 0}
    gpu.nccl = [asked(name, code) for name, code in names.items()]
    table = (p * len(gpu.nccl))(*[ctypes.cast(function, p) for function in gpu.nccl])
    monkeypatch.setattr(nccl_direct, "payload_functions", lambda: table)
    return gpu


class Rank:
    def __init__(self, gpu, recipe: Recipe, x: torch.Tensor, out: torch.Tensor):
        self.x, self.out, self.status = x, out, torch.full((1,), -1, dtype=torch.int32, device=CPU)
        self.mail = torch.full((3,), 5, dtype=torch.int64, device=CPU)
        self.plan = Plan(recipe, gpu.launcher, x, out, self.status, SimpleNamespace(cuda_stream=DECODES), SimpleNamespace(handle=88),
                         SimpleNamespace(cuda_stream=PAYLOADS))

    def begin(self, stamp=1 << 31 | 5):
        self.plan.begin(self.x.data_ptr(), self.mail[1:].data_ptr(), stamp)
        return [value % (1 << 64) for value in self.mail.tolist()] == [5, stamp << 32 | int(self.status), 5]

    def call(self, fills=True, stamp=7):
        self.plan.call(COMMUNICATOR, self.x.data_ptr(), self.out.data_ptr(), self.mail[1:].data_ptr(), stamp, fills)
        return self.out

    def beside(self):
        self.plan.beside(self.x.data_ptr(), self.out.data_ptr())
        return self.out

    def end(self):
        self.plan.end(self.x.data_ptr(), self.out.data_ptr())
        return self.out


def codec() -> Codec:
    return Codec.of(BF, N, "cpu", kernels=loader.resolve("best", "cpu"))


def data(seed: int, *shape) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device=CPU) * 0.02).to(BF)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.int16), b.reshape(-1).view(torch.int16))


@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather(gpu, in_place):
    world, ranks = 3, []
    for turn in range(2):                                               # the same plans again
        for rank in range(world):
            if turn == 0:
                out = torch.full((world, N), 3.0, dtype=BF, device=CPU)
                frames = codec().empty_frames(world, CPU)
                recipe = Recipe([Rows(codec(), frames[rank:rank + 1])], [Rows(codec(), frames, rank)], copy=(0, rank * N, N),
                                own_in_place=True)
                assert recipe.is_aligned()
                ranks.append((Rank(gpu, recipe, out[rank] if in_place else data(0, N), out), frames))
            ranks[rank][0].x.copy_(data(10 * turn + rank, N))
            gpu.log.clear()
            assert ranks[rank][0].begin() and gpu.log == []
            assert same(ranks[rank][0].beside()[rank], data(10 * turn + rank, N))
            assert gpu.log == ([] if in_place else [("record", 77 + rank, STREAM), ("wait", DECODES, 77 + rank), ("copy", 2 * N, DECODES)])
        for rank, (one, frames) in enumerate(ranks):
            for peer, (_, theirs) in enumerate(ranks):
                if peer != rank:
                    frames[peer].copy_(theirs[peer])
            gpu.log.clear()
            assert same(one.end(), torch.stack([data(10 * turn + r, N) for r in range(world)])), (turn, rank)
            assert gpu.log == [("record", 88, DECODES)]
    assert int(gpu.unread) == 0


def test_reduce_scatter(gpu):
    world, ranks = 3, []
    for rank in range(world):
        sent, received = codec().empty_frames(world, CPU), codec().empty_frames(world, CPU)
        recipe = Recipe([Rows(codec(), sent, rank)], [Rows(codec(), received, rank, rank * N)], sums=True)
        ranks.append((Rank(gpu, recipe, data(rank, world, N), torch.zeros(N, dtype=BF, device=CPU)), sent, received))
        assert ranks[rank][0].begin() and gpu.log == []
    for rank, (one, _, received) in enumerate(ranks):
        for peer, (_, sent, _) in enumerate(ranks):
            received[peer].copy_(sent[rank])
        expected = torch.zeros(N, dtype=BF, device=CPU)
        sum_in_order([data(r, world, N)[rank] for r in range(world)], expected)
        assert same(one.end(), expected), rank


def test_all_to_all_of_unequal_runs(gpu):
    """Rows before and behind this rank's own, which is copied from another place than it goes to."""
    frames = [codec().empty_frames(1, CPU), codec().empty_frames(2, CPU)]
    own, x = 1000, data(5, 3 * N + 1000)
    rows = [Rows(codec(), frames[0], offset=0), Rows(codec(), frames[1], offset=N + own)]
    back = [Rows(codec(), frames[0], offset=own), Rows(codec(), frames[1], offset=own + N)]
    one = Rank(gpu, Recipe(rows, back, copy=(N, 0, own)), x, torch.zeros_like(x))
    one.plan.begin(one.x.data_ptr(), 0, 0)
    one.beside()
    assert same(one.end(), torch.cat([x[N:N + own], x[:N], x[N + own:]])) and one.mail.tolist() == [5, 5, 5]


def test_what_overflows_says_so_and_what_is_decoded_from_it_harms_nothing(gpu):
    frames, x = codec().empty_frames(1, CPU), torch.randint(-1 << 15, 1 << 15, (N,), dtype=torch.int16, device=CPU).view(BF)
    out = torch.full((3 * N,), 7.0, dtype=BF, device=CPU)
    one = Rank(gpu, Recipe([Rows(codec(), frames)], [Rows(codec(), frames)]), x, out[N:2 * N])
    assert one.begin() and int(one.status) & OVERFLOW_BIT
    one.end()
    assert bool((out[:N] == 7).all()) and bool((out[2 * N:] == 7).all()) and int(gpu.unread) != 0


def test_who_sends_nothing_or_gets_nothing_still_marks_the_end(gpu):
    x = data(1, N)
    Rank(gpu, Recipe([], []), x, x).end()
    assert gpu.log == [("record", 88, DECODES)]


def test_which_places_suit(gpu):
    frames, memory = codec().empty_frames(2, CPU), torch.zeros(4 * N, dtype=BF, device=CPU)
    at = memory.data_ptr()

    def suits(x: int, out: int, **more) -> bool:
        """Of tensors of one and two rows, at these rows."""
        plan = Rank(gpu, Recipe([], [], **more), memory[:N], memory[:2 * N]).plan
        return plan.suits(at + 2 * N * x, at + 2 * N * out)

    assert frames.shape[0] == 2 and suits(0, 1) and suits(2, 0) and suits(3, 0)
    assert not suits(0, 0) and not suits(1, 0)
    assert suits(1, 0, copy=(0, N, N), own_in_place=True) and not suits(0, 0, copy=(0, N, N), own_in_place=True)
    assert suits(0, 0, anywhere=True) and suits(1, 0, anywhere=True)


def test_what_cuda_refuses_is_said(gpu):
    frames, x = codec().empty_frames(1, CPU), data(1, N)
    one = Rank(gpu, Recipe([Rows(codec(), frames)], [], copy=(0, 0, N)), x, torch.zeros_like(x))
    gpu.refuse = 700
    with pytest.raises(KernelError, match="700"):
        one.beside()


def test_a_call_with_its_payload(gpu):
    """Of the last of three ranks, whose peers' frames are there before it asks NCCL for them."""
    world, rank = 3, 2
    frames, x = codec().empty_frames(world, CPU), data(rank, N)
    for peer in range(rank):
        codec().encode(data(peer, 1, N), frames[peer:peer + 1], torch.zeros(1, dtype=torch.int32, device=CPU))
    for in_place in (False, True):
        out = torch.zeros(world, N, dtype=BF, device=CPU)
        out[rank] = x
        recipe = Recipe([Rows(codec(), frames[rank:])], [Rows(codec(), frames, rank)], copy=(0, rank * N, N),
                        payload=(Transfer(frames[rank], frames),))
        one = Rank(gpu, recipe, out[rank] if in_place else x, out)
        encoded, arrived = (79, 80) if in_place else (77, 78)
        assert one.plan.sends
        gpu.log.clear()
        assert same(one.call(), torch.stack([data(r, N) for r in range(world)]))
        assert gpu.log == [("record", encoded, STREAM), ("wait", PAYLOADS, encoded),
                           ("ncclAllGather", frames[rank].data_ptr(), frames.data_ptr(), frames.shape[1], 1, COMMUNICATOR, PAYLOADS),
                           ("record", arrived, PAYLOADS),
                           *([] if in_place else [("wait", DECODES, encoded), ("copy", 2 * N, DECODES)]),
                           ("wait", DECODES, arrived), ("record", 88, DECODES)]
        assert one.mail.tolist() == [5, 7 << 32 | int(one.status), 5]


@pytest.mark.parametrize("by_ctypes", [False, True])
def test_a_call_and_its_end_by_one_call_of_c_each(gpu, by_ctypes, monkeypatch):
    """Of rank 1 of two, whose peer's frame and word are there; and what is not so, when nothing is done."""
    if by_ctypes:
        monkeypatch.setattr(launch_calls.python_calls, "functions", lambda *_: None)
        gpu.remake()
    frames, memory = codec().empty_frames(2, CPU), torch.zeros(4 * N, dtype=BF, device=CPU)
    codec().encode(data(0, 1, N), frames[:1], torch.zeros(1, dtype=torch.int32, device=CPU))
    recipe = Recipe([Rows(codec(), frames[1:])], [Rows(codec(), frames, 1)], copy=(0, N, N), own_in_place=True,
                    payload=(Transfer(frames[1], frames),))
    one = Rank(gpu, recipe, memory[:N], memory[2 * N:])
    depth, ring, mark = 4, torch.zeros(8, dtype=torch.int64, device=CPU), torch.zeros(1, dtype=torch.int64, device=CPU)
    repeat = one.plan.repeat(launch_calls.Ring(ring.data_ptr(), ring.data_ptr(), mark.data_ptr(), depth, 2, 1))
    at, whole = memory.data_ptr(), memory[2 * N:].view(2, N)

    def fire(count, x=0, out=2):
        return repeat.fire(repeat.address, COMMUNICATOR, at + int(2 * N * x), at + int(2 * N * out), count)

    for count in (0, 5, (1 << 32) - 1):
        place, stamp = 2 * (count % depth), count % ((1 << 32) - 1) + 1
        one.x.copy_(data(count % 7, N))
        gpu.log.clear()
        assert fire(count) == 0 and same(whole, torch.stack([data(0, N), one.x]))
        assert [entry[0] for entry in gpu.log] == ["record", "wait", "ncclAllGather", "record", "wait", "copy", "wait", "record"]
        said = [value % (1 << 64) for value in ring.tolist()]
        assert said[place + 1] == stamp << 32 | int(one.status) and said.count(said[place + 1]) == 1
        for missing in (0, stamp - 1 << 32 | 9, stamp << 32 | OVERFLOW_BIT, stamp << 32 | 1 << 31):
            ring[place] = missing - (1 << 64) * (missing >> 63)
            assert repeat.finish(repeat.address, STREAM, count) == NOT_SO and gpu.log[-1][0] == "record" and int(mark) != count + 1
        ring[place] = (stamp << 32 | 3 << SPILL_SHIFT) - (1 << 64) * (stamp >> 31)
        gpu.context = 56
        assert repeat.finish(repeat.address, STREAM, count) == NOT_SO and gpu.log[-1][0] == "record"
        gpu.context = 55
        assert repeat.finish(repeat.address, STREAM + 1, count) == 0 and gpu.log[-1] == ("wait", STREAM + 1, 88)
        assert list(repeat.words) == [3 << SPILL_SHIFT, int(one.status)] and int(mark) == count + 1
    gpu.log.clear()
    before = ring.tolist()
    assert fire(1, x=2) == fire(1, x=2.5) == fire(1, x=1.5) == fire(1, x=3.5) == NOT_SO, "they share memory"
    gpu.context = 56
    assert fire(1) == NOT_SO, "another device"
    gpu.context, gpu.captures = 55, 1
    assert fire(1) == NOT_SO and gpu.log == [] and ring.tolist() == before
    gpu.captures = 0
    one.x.copy_(data(4, N))
    memory[3 * N:] = one.x
    assert fire(1, x=3) == 0 and same(whole, torch.stack([data(0, N), data(4, N)])), "in place"
    gpu.nccl_refuses = 5
    assert fire(2) == -6
    with pytest.raises(KernelError, match="ncclResult 5"):
        launch_calls.refused(-6)


def test_a_payload_for_each_peer(gpu):
    """Rank 1 of 3 has nothing for rank 2 and gets nothing from rank 0; what comes after the payload is not this call's."""
    sent, received = codec().empty_frames(1, CPU), codec().empty_frames(1, CPU)
    nothing = sent[0][:0]
    recipe = Recipe([Rows(codec(), sent)], None, anywhere=True,
                    payload=exchange([sent[0], nothing, nothing], [nothing, nothing, received[0][:640]]))
    one = Rank(gpu, recipe, data(1, N), torch.zeros(N, dtype=BF, device=CPU))
    one.call(fills=False)
    size = sent.shape[1]
    assert gpu.log == [("record", 77, STREAM), ("wait", PAYLOADS, 77), ("ncclGroupStart",),
                       ("ncclSend", sent.data_ptr(), size, 1, 0, COMMUNICATOR, PAYLOADS),
                       ("ncclRecv", received.data_ptr(), 640, 1, 2, COMMUNICATOR, PAYLOADS), ("ncclGroupEnd",),
                       ("record", 78, PAYLOADS), ("wait", DECODES, 78)]
    assert not one.out.any()
    gpu.log.clear()
    gpu.nccl_refuses = 5
    with pytest.raises(KernelError, match="ncclResult 5"):
        one.call()
    assert gpu.log[-2:] == [("ncclSend", sent.data_ptr(), size, 1, 0, COMMUNICATOR, PAYLOADS), ("ncclGroupEnd",)]


def test_whose_communicators_may_be_used(monkeypatch):
    """Those that torch gives away, of its own backend and not of one that wraps it; and whose calls are queued when they return: others
    say that they are in progress, which is no error."""
    class Backend:
        def __init__(self, blocking, address=7):
            self.options, self._address = SimpleNamespace(config=SimpleNamespace(blocking=blocking)), address

        def _comm_ptr(self):
            if self._address is None:
                raise RuntimeError("it was aborted")
            return self._address

    monkeypatch.setattr(nccl_direct, "_BACKEND", Backend)
    monkeypatch.delenv("TORCH_NCCL_USE_COMM_NONBLOCKING", raising=False)
    undefined = -(1 << 31)
    assert [nccl_direct.handle(each) for each in (Backend(1), Backend(1, 0), Backend(1, None))] == [7, 0, 0]
    assert nccl_direct.handle(SimpleNamespace(_comm_ptr=lambda: 7)) == 0
    assert [nccl_direct.returns_when_queued(Backend(blocking)) for blocking in (1, undefined, 0)] == [True, True, False]
    assert not nccl_direct.returns_when_queued(SimpleNamespace())
    monkeypatch.setattr(nccl_direct, "_library", object)
    assert [nccl_direct.communicator(Backend(blocking)) is None for blocking in (1, undefined, 0)] == [False, False, True]
    assert nccl_direct.communicator(Backend(1, 0)) is None
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    assert not nccl_direct.returns_when_queued(Backend(undefined)) and nccl_direct.communicator(Backend(undefined)) is None
