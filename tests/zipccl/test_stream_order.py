"""What a zipped call on a GPU waits for, and what waits for it, shown on a CPU: streams that know nothing but who waited for whom, tensors
without memory (torch's fake ones), kernels and communicators that only say when they ran. C61: the caller's streams, never the default one.
C62: the call passes what the caller queues after its launch, and does not hold it up either."""
import ctypes
import itertools
import subprocess
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from ds_zipccl.codec.format import OVERFLOW_BIT
from ds_zipccl.collectives import flight, group_state, launch, nccl_direct, streams
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.streams import copy as copy_elements
from ds_zipccl.collectives.words import Words
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader, ops
from ds_zipccl.kernels.launch_calls import LaunchCalls
from zipscape.op_builder import toolchain
from zipscape.op_builder.base import csrc_dir

GPU, WORLD, ROW = torch.device("cuda", 0), 2, 4096
OPS = tuple(specs(internal=True))
PREPARED = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce", "broadcast")
MAIL = 0x1234500         # an entry of a mailbox
COMMUNICATOR = 0x77700


class Gpu:
    """``seen[stream]``: numbers of what has ended when that stream gets to what is queued next; ``host``: when the host goes on.
    ``log``: (what, stream, numbers of what has ended before, names of the memory it
    touched)."""

    def __init__(self):
        self.current, self.seen, self.host, self.log, self.handles = 0, {}, set(), [], itertools.count(100)
        self._kept, self.events, self.storages, self.posts, self.told = {}, {}, {}, False, {}
        self.is_prepared, self.num_prepared, self.num_sent, self.sends, self.watched = False, 0, 0, False, []

    def address(self, tensor):
        storage = tensor.untyped_storage()
        base, _ = self.storages.setdefault(storage._cdata, (len(self.storages) + 1 << 32, storage))
        return base + tensor.storage_offset() * tensor.element_size()

    def at(self, address):
        """The memory, for ``queue``."""
        return next((storage for base, storage in self.storages.values() if base == address >> 32 << 32), None)

    def queue(self, what, stream=None, touched=()):
        stream = self.current if stream is None else stream
        self.order(stream, self.host)
        seen = self.seen[stream]
        storages = [t.untyped_storage() if isinstance(t, FakeTensor) else t for t in tree_leaves(touched)]
        storages = {t._cdata: t for t in storages if isinstance(t, torch.UntypedStorage)}
        self._kept.update(storages)                             # else the next one might get the name of one that is gone
        self.log.append((what, stream, frozenset(seen), storages.keys()))
        seen.add(len(self.log) - 1)

    def order(self, stream, seen):
        self.seen.setdefault(stream, set()).update(seen)

    def now(self, stream=None):
        return frozenset(self.seen.get(self.current if stream is None else stream, ()))

    def all(self, *what):
        """Numbers of the entries of these names."""
        return {i for i, (name, *_) in enumerate(self.log) if name in what}

    def before(self, number):
        return self.log[number][2]


class Stream:
    def __init__(self, gpu, handle):
        self._gpu, self.cuda_stream = gpu, handle

    def wait_stream(self, other):
        self._gpu.order(self.cuda_stream, self._gpu.now(other.cuda_stream))

    def wait_event(self, event):
        self._gpu.order(self.cuda_stream, event.seen)


class Event:
    def __init__(self, gpu):
        self._gpu, self.seen, self.cuda_event = gpu, frozenset(), 0

    def record(self, stream=None):
        if not self.cuda_event:
            self.cuda_event = next(self._gpu.handles)
            self._gpu.events[self.cuda_event] = self
        self.seen = self._gpu.now(stream and stream.cuda_stream)

    def query(self):
        return True

    def synchronize(self):
        self._gpu.host |= self.seen


class Communicator:
    """Runs on a stream of its own, behind what the current one was given, as NCCL under torch."""
    timeout, where = timedelta(seconds=90), "group 7"

    def __init__(self, gpu, name):
        self._gpu, self._name = gpu, name

    def _run(self, *tensors):
        gpu, stream = self._gpu, f"stream of {self._name}"
        gpu.order(stream, gpu.now())
        gpu.queue(self._name, stream, tensors)
        seen = gpu.now(stream)
        return SimpleNamespace(wait=lambda: gpu.order(gpu.current, seen), is_completed=lambda: True)

    _allgather_base = alltoall = alltoall_base = broadcast = all_gather = all_to_all = _run

    def exchange_pairs(self, *_):
        self._run().wait()

    def _words(self, words, *_):
        words.through(self._run)

    gather_words = broadcast_word = exchange_words = _words

    def _post(self, words, root=None, *_):
        if not self._gpu.posts:
            return None
        gpu, stamp = self._gpu, next(self._gpu.handles)

        def is_there():
            gpu.host |= gpu.told.get(stamp, set())
            return True

        said = SimpleNamespace(is_there=is_there, wait=is_there, words=[gpu.word] * words.data.numel())
        return words.posted(said, *((MAIL, stamp) if root in (None, 0) or isinstance(root, list) else (0, 0)))

    post_to_all = post_from = post_to_one = _post

    def connect(self, *_):
        pass

    def pair_gathers(self):
        return self._gpu.sends

    close = abort = exchange_no_words = connect


class Kernels:
    levels = (1,)

    def __init__(self, gpu, launch_calls):
        self.launch_calls, self.workspace, self.unread_word = launch_calls, lambda *_: 1, lambda index: 1
        bound = lambda what: lambda *frames: lambda *_: gpu.queue(what, None, frames)         # noqa: E731
        self.bind_encode, self.bind_decode, self.bind_decode_reduce = bound("encode"), bound("decode"), bound("decode")
        self.encode = lambda *tensors: gpu.queue("encode", None, tensors)
        self.decode = self.decode_reduce = lambda *tensors: gpu.queue("decode", None, tensors)


def prepared(gpu, library):
    """What a plan calls in place of the codec and the driver: functions of C's that tell ``gpu``."""
    def encode(geometry, x, row_stride, frames, frame_stride, num_rows, skip, status, workspace, mail, stamp, stream):
        gpu.num_prepared += 1
        gpu.queue("encode", stream or 0, gpu.at(frames))
        if mail:
            assert mail == MAIL and stamp not in gpu.told
            gpu.queue("words", stream or 0)
            gpu.told[stamp] = gpu.now(stream or 0)
        return 0

    def decode(geometry, frames, *rest):
        gpu.num_prepared += 1
        gpu.queue("decode", rest[-1] or 0, gpu.at(frames))
        return 0

    def record(event, stream):
        gpu.events[event].seen = gpu.now(stream or 0)
        return 0

    def wait(stream, event, flags):                # no stream: the default one of the device that is current
        gpu.order(stream or ("another device's" if streams.current_device() else 0), gpu.events[event].seen)
        return 0

    def copy(to, source, num_bytes, stream):
        gpu.queue("copy", stream or 0)
        return 0

    p, i, u = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    signatures = ((encode, (p, p, i, p, i, i, i, p, p, p, u, p)), (decode, (p, p, i, p, i, i, i, p, p)),
                  (decode, (p, p, i, i, p, i, p, p, p)), (record, (p, p)), (wait, (p, p, u)),
                  (copy, (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, p)))
    return LaunchCalls(library, *[ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(function) for function, arguments in signatures])


def nccl(gpu):
    """NCCL's functions, the same way, as ``nccl_direct.payload_functions`` gives them."""
    in_group = []

    def queue(stream, *places):
        gpu.num_sent += 1
        gpu.queue("payload", stream or 0, [gpu.at(place) for place in places])
        return 0

    def all_gather(own, out, count, dtype, communicator, stream):
        assert communicator == COMMUNICATOR and not in_group and count and out <= own < out + WORLD * count
        return queue(stream, own, out)

    def one_way(place, count, dtype, peer, communicator, stream):
        assert communicator == COMMUNICATOR and in_group == [1] and count and peer == 1
        return queue(stream, place)

    def group(*change):
        in_group[:] = change
        return 0

    p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    signatures = ((all_gather, (p, p, n, i, p, p)), (one_way, (p, n, i, i, p, p)), (one_way, (p, n, i, i, p, p)),
                  (lambda: group(1), ()), (lambda: group(), ()))
    gpu.nccl = [ctypes.CFUNCTYPE(i, *arguments)(function) for function, arguments in signatures]
    return (p * len(gpu.nccl))(*[ctypes.cast(function, p) for function in gpu.nccl])


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("launch") / "launch.so"
    subprocess.run([*toolchain.find("c++"), "-x", "c++", "-std=c++17", "-fPIC", "-shared", str(csrc_dir() / "zipccl/launch.h"), "-o",
                    str(target)], check=True, timeout=120)
    return ctypes.CDLL(str(target))


@pytest.fixture(params=["step by step", "prepared", "prepared, words by encode", "prepared, words by encode, payload too"])
def gpu(request, monkeypatch, library):
    gpu = Gpu()
    gpu.is_prepared, gpu.posts = "prepared" in request.param, "words" in request.param
    calls = prepared(gpu, library)
    monkeypatch.setattr(launch, "PREPARED", gpu.is_prepared)
    gpu.sends = "payload" in request.param
    if gpu.sends:
        functions = nccl(gpu)
        monkeypatch.setattr(nccl_direct, "payload_functions", lambda: functions)
        monkeypatch.setattr(nccl_direct, "returns_when_queued", lambda backend: True)
        monkeypatch.setattr(nccl_direct, "handle", lambda backend: COMMUNICATOR)
    objects = {}

    def stream(handle):
        return objects.setdefault(handle, Stream(gpu, handle))

    class On:
        def __init__(self, stream):
            self._stream = stream

        def __enter__(self):
            self._before = gpu.current
            gpu.current = gpu.current if self._stream is None else self._stream.cuda_stream

        def __exit__(self, *exc):
            gpu.current = self._before

    def copy(tensor, *_, **__):
        if tensor.is_cuda:                                      # the words' way to host memory is not of interest
            gpu.queue("copy")
        return tensor

    def part(tensor, key):                                      # torch's own makes the device current, which is not there
        dim = 0
        for one in key if isinstance(key, tuple) else (key,):
            if isinstance(one, slice):
                tensor, dim = torch.ops.aten.slice(tensor, dim, one.start, one.stop), dim + 1
            else:
                tensor = torch.select(tensor, dim, one)
        return tensor

    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(gpu))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: stream(next(gpu.handles)))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: stream(handle))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream(0))
    monkeypatch.setattr(streams, "_objects", {})
    monkeypatch.setattr(streams, "_raw_current", lambda index: gpu.current)
    monkeypatch.setattr(streams, "is_capturing", lambda: False)
    monkeypatch.setattr(streams, "On", On)
    monkeypatch.setattr(streams, "copy", lambda target, offset, source: gpu.queue("copy"))
    monkeypatch.setattr(streams, "keep", lambda tensor: None)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: gpu.address(tensor), raising=False)
    monkeypatch.setattr(FakeTensor, "__getitem__", part, raising=False)
    monkeypatch.setattr(FakeTensor, "__setitem__", lambda tensor, key, value: copy(tensor), raising=False)
    monkeypatch.setattr(FakeTensor, "copy_", copy, raising=False)
    monkeypatch.setattr(FakeTensor, "record_stream", lambda *_: None, raising=False)
    monkeypatch.setattr(group_state, "SideChannel", lambda group, device, purpose="words": Communicator(gpu, {"bulk": "resend"}.get(
        purpose, "words")))
    monkeypatch.setattr(flight, "WATCH", SimpleNamespace(add=gpu.watched.append))
    monkeypatch.setattr(group_state, "WATCH", SimpleNamespace(add=lambda state: None, wake=lambda: None))
    monkeypatch.setattr(Words, "tolist", lambda words: [gpu.word] * words.data.numel())
    monkeypatch.setitem(ops._SETS, "told", None)
    monkeypatch.setattr(loader, "resolve", lambda *_: "told")
    ops.register("told", Kernels(gpu, calls), ("cuda",))
    gpu.word = 0
    with FakeTensorMode():
        yield gpu


class Group:
    group_name = "g"

    def __init__(self, gpu):
        self._payloads = Communicator(gpu, "payload")

    def rank(self):
        return 0

    def size(self):
        return WORLD

    def _get_backend(self, device):
        return self._payloads


@pytest.fixture
def live(gpu):
    live = Runtime(ZipcclConfig(enabled=True, collectives="always", min_bytes=0, transport="process_group"), {"cuda": "told"})
    live.group = Group(gpu)
    return live


def call_of(op, group):
    small = op in ("all_gather_into_tensor", "all_gather", "broadcast")
    data = torch.empty(ROW if small else WORLD * ROW, dtype=torch.bfloat16, device=GPU)
    if op in ("all_reduce", "broadcast"):
        return Call(op, data, data, group, root=1 if op == "broadcast" else None)
    output = torch.empty(ROW if "scatter" in op else WORLD * ROW, dtype=torch.bfloat16, device=GPU)
    return Call(op, output.split(ROW) if op in ("all_gather", "all_to_all") else output,
                data.split(ROW) if op in ("reduce_scatter", "reduce_scatter_uneven", "all_to_all") else data, group)


def begin(gpu, live, op, stream, group=None):
    """A call launched on ``stream``, with work of the caller's before and after it."""
    call = call_of(op, group or live.group)
    gpu.current = stream
    gpu.queue("input")
    work = live.run(call)
    assert work is not None
    gpu.queue("between")
    return work


def end(gpu, work, stream):
    gpu.current = stream
    work.wait()
    gpu.queue("read")


@pytest.mark.parametrize("op", PREPARED)
def test_who_waits_while_another_device_is_current(gpu, live, monkeypatch, op):
    """A thread of the user's, as for checkpoints, begins with device 0."""
    work = begin(gpu, live, op, 7)
    monkeypatch.setattr(streams, "current_device", lambda: 1)
    end(gpu, work, 0)
    assert gpu.all("decode") <= gpu.before(max(gpu.all("read"))) and gpu.all("decode")


def test_copies_while_another_device_is_current_go_to_the_tensors_own_one(gpu, monkeypatch):
    """The driver takes a default stream for that of the current device."""
    asked, data = [], torch.empty(ROW, dtype=torch.bfloat16, device=GPU)
    monkeypatch.setattr(streams, "_driver", lambda: lambda *arguments: asked.append(arguments) or 0)
    for device in (0, 1):
        monkeypatch.setattr(streams, "current_device", lambda device=device: device)
        copy_elements(torch.empty_like(data), 0, data)
    assert len(asked) == len(gpu.all("copy")) == 1


@pytest.mark.parametrize("second", [7, 9, 0])
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_order_of_a_call(gpu, live, op, overflow, second):
    """Behind its input, before what reads its output, on any streams; nothing of the default stream's, unless the caller is there."""
    gpu.word = OVERFLOW_BIT if overflow else 0
    gpu.queue("of the default stream")
    for _ in range(3):
        first = len(gpu.log)
        end(gpu, begin(gpu, live, op, 7), second)
        encodes, payloads, words, decodes, copies, resends = ({i for i in gpu.all(what) if i > first} for what in (
            "encode", "payload", "words", "decode", "copy", "resend"))
        read, others = max(gpu.all("read")), gpu.all("of the default stream")
        assert payloads and (encodes and words or op == "broadcast") and (decodes or overflow)
        assert bool(gpu.num_prepared) == (gpu.is_prepared and op in PREPARED)
        assert bool(gpu.num_sent) == (gpu.sends and op in PREPARED and op != "broadcast")
        watched = [(each.launched_at > 0, each.timeout_s, each.where) for each in gpu.watched]
        assert watched == [(True, 90, f"{op}, group 7")] * len(set(map(id, gpu.watched))) and bool(watched) == bool(gpu.num_sent)
        assert bool(resends) == (overflow or op == "all_reduce")
        for each in encodes | payloads | words | decodes | copies | resends:
            assert first in gpu.before(each), f"{gpu.log[each]} before its input is there"
            assert others.isdisjoint(gpu.before(each)) or second == 0, f"{gpu.log[each]} waited for the default stream"
        assert not encodes or all(min(encodes) in gpu.before(each) for each in payloads | words)
        assert all(min(payloads) in gpu.before(each) for each in decodes)
        again = {i for i in decodes | copies if overflow and resends & gpu.before(i)}
        assert all(decodes - again <= gpu.before(i) for i in again), "a decode that began early may write over what was sent again"
        assert encodes | payloads | decodes | copies | resends <= gpu.before(read), "the caller goes on too early"


@pytest.mark.parametrize("op", OPS)
def test_a_call_passes_what_comes_after_it(gpu, live, op):
    """C62: neither waits for the other before ``wait()``; words are not behind payloads."""
    work = begin(gpu, live, op, 7)
    between, = gpu.all("between")
    others = gpu.all("payload", "decode", "resend", *[] if gpu.posts else ["words"])             # an encode's words are its own
    assert others.isdisjoint(gpu.before(between)), "the caller is held up"
    assert all(gpu.all("payload").isdisjoint(gpu.before(each)) for each in gpu.all("words") if op != "all_reduce")
    assert gpu.all("decode"), "decoded at wait() alone"
    end(gpu, work, 9)
    for each in gpu.all("encode", "payload", "words", "decode", "copy", "resend"):
        assert between not in gpu.before(each), f"{gpu.log[each]} waited for what the caller queued later"


@pytest.mark.parametrize("op", OPS)
def test_what_a_call_leaves_is_used_again_after_it(gpu, live, op):
    """Frames of calls that are waited for on other streams than the next one is launched on; two in flight."""
    again = 0
    for first, second in ((7, 7), (7, 9), (7, 0), (9, 7), (9, 9), (7, 7)):
        works = [begin(gpu, live, op, first) for _ in range(2)]
        for work in works:
            end(gpu, work, second)
    users = [i for i, (what, *_) in enumerate(gpu.log) if what in ("encode", "payload", "decode")]
    for later in users:
        for earlier in users:
            if earlier < later and gpu.log[later][0] != "decode" and gpu.log[earlier][3] & gpu.log[later][3]:
                assert earlier in gpu.before(later), f"{gpu.log[later][:2]} beside {gpu.log[earlier][:2]} on the same memory"
                again += 1
    assert again > 3


@pytest.mark.parametrize("op", ["all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"])
def test_calls_like_an_earlier_one_are_not_decided_anew(gpu, live, monkeypatch, op):
    """... and others are, or at least looked for among flights."""
    done, choose, start = [], live._choose, live._start
    monkeypatch.setattr(live, "_choose", lambda *args: (done.append("decided"), choose(*args))[1])
    monkeypatch.setattr(live, "_start", lambda *args, **more: (done.append("started"), start(*args, **more))[1])
    anew = ["decided", "started"]

    def run(*calls, stream=7) -> list[str]:
        done.clear()
        for call in calls:
            gpu.current = stream
            end(gpu, live.run(call), 7)
        return done

    def call():
        return call_of(op, live.group)

    assert run(call(), call(), call()) == anew
    assert live.stats.snapshot()[op]["calls_zipped"] == 3
    assert run(call(), stream=9) == ["started"]
    assert run(replace(call(), group=Group(gpu))) == anew, "another group of the same name"
    live.group = Group(gpu)
    assert run(call(), call()) == anew
    twice = call()
    twice = replace(twice, input=torch.select(torch.empty(twice.input.numel(), 2, dtype=torch.bfloat16, device=GPU), 1, 0))
    if op != "broadcast":
        with pytest.raises(RuntimeError, match="cuda"):             # a copy of it
            run(twice)
        assert done == ["decided"], "strides"
    (capacity,) = live.state(live.group, GPU).capacities.values()
    capacity.spill_per_tile += 64
    assert run(call(), call()) == ["started"], "more room"
    capacity.calls_left_out = 1
    live.run(call())
    assert live.stats.snapshot()[op]["native_reasons"] == {"incompressible": 1}
    live.state(live.group, GPU).capacities.clear()
    assert run(call(), call()) == ["started"], "a class that was forgotten"
    if op == "reduce_scatter_tensor":
        assert run(replace(call(), reduce_op=dist.ReduceOp.SUM)) == anew
    live.close(live.group)
    assert not live._repeats._known


@pytest.mark.parametrize("op", ["all_to_all_single", "all_reduce"])
def test_what_others_do_before_their_launch_is_done_anew(gpu, live, monkeypatch, op):
    done, choose, start = [], live._choose, live._start
    monkeypatch.setattr(live, "_choose", lambda *args: (done.append("decided"), choose(*args))[1])
    monkeypatch.setattr(live, "_start", lambda *args, **more: (done.append("started"), start(*args, **more))[1])
    for _ in range(3):
        end(gpu, begin(gpu, live, op, 7), 7)
    assert done == ["decided", "started", "started", "started"]
    done.clear()
    call = call_of(op, live.group)
    shaped = call.input.view(2, -1)
    end(gpu, live.run(replace(call, input=shaped, output=shaped if op == "all_reduce" else call.output.view(2, -1))), 7)
    assert done == (["started"] if op == "all_reduce" else ["decided", "started"])
    lists = call_of("all_to_all", live.group)
    end(gpu, live.run(lists), 7)
    assert live.stats.snapshot()["all_to_all"]["calls_zipped"] == 1
