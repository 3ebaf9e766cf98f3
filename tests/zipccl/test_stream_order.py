"""What a zipped call on a GPU waits for, and what waits for it, shown on a CPU: streams that know nothing but who waited for whom, tensors
without memory (torch's fake ones), kernels and communicators that only say when they ran. C61: the caller's streams, never the default one.
C62: the call passes what the caller queues after its launch, and does not hold it up either."""
import ctypes
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ds_zipccl.codec.format import OVERFLOW_BIT, SPILL_SHIFT
from ds_zipccl.collectives import capacity, flight, group_state, launch, nccl_direct, repeats, streams
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.streams import copy as copy_elements
from ds_zipccl.collectives.words import Words
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader, ops
from tests.zipccl.stream_stand_in import (
    COMMUNICATOR,
    GPU,
    OPS,
    PREPARED,
    ROW,
    WORLD,
    Communicator,
    Event,
    Gpu,
    Group,
    Kernels,
    Stream,
    begin,
    call_of,
    end,
    mailbox_of,
    nccl,
    prepared,
)
from zipscape.op_builder import toolchain
from zipscape.op_builder.base import csrc_dir

AGAIN = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")             # repeats are one call of C


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("launch") / "launch.so"
    subprocess.run([*toolchain.find("c++"), "-x", "c++", "-std=c++17", "-fPIC", "-shared", str(csrc_dir() / "zipccl/launch.h"), "-o",
                    str(target)], check=True, timeout=120)
    return ctypes.CDLL(str(target))


@pytest.fixture(params=["step by step", "prepared", "prepared, words by encode", "prepared, words by encode, payload too",
                        "prepared, words by encode, payload too, again"])
def gpu(request, monkeypatch, library):
    gpu = Gpu()
    gpu.is_prepared, gpu.posts = "prepared" in request.param, "words" in request.param
    calls = prepared(gpu, library)
    monkeypatch.setattr(launch, "PREPARED", gpu.is_prepared)
    gpu.sends = "payload" in request.param
    gpu.box = mailbox_of(gpu) if "again" in request.param else None
    if gpu.box is not None:
        for module in (capacity, repeats):
            monkeypatch.setattr(module, "CALM_AFTER", 1)
        monkeypatch.setattr(repeats, "AGAIN", True)
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


@pytest.fixture
def live(gpu):
    live = Runtime(ZipcclConfig(enabled=True, collectives="always", min_bytes=0, transport="process_group"), {"cuda": "told"})
    live.group = Group(gpu)
    return live


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
    num_calls = 0
    for _ in range(4):
        first = len(gpu.log)
        end(gpu, begin(gpu, live, op, 7), second)
        encodes, payloads, words, decodes, copies, resends = ({i for i in gpu.all(what) if i > first} for what in (
            "encode", "payload", "words", "decode", "copy", "resend"))
        read, others = max(gpu.all("read")), gpu.all("of the default stream")
        assert payloads and (encodes and words or op == "broadcast") and (decodes or overflow)
        assert bool(gpu.num_prepared) == (gpu.is_prepared and op in PREPARED)
        assert bool(gpu.num_sent) == (gpu.sends and op in PREPARED and op != "broadcast")
        num_calls += bool(gpu.box)
        assert overflow or live.repeats.num_again == (max(0, num_calls - 2) if op in AGAIN else 0)
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
    assert live.repeats.num_again >= 6 or gpu.box is None or op not in AGAIN


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

    shrinks = gpu.box is not None and op == "reduce_scatter_tensor"                # its first room, which was a guess
    assert run(call(), call(), call()) == anew + ["started"] * shrinks
    assert live.stats.snapshot()[op]["calls_zipped"] == 3
    assert run(call(), stream=9) == ["started"]
    assert run(replace(call(), group=Group(gpu))) == anew, "another group of the same name"
    live.group = Group(gpu)
    assert run(*[call() for _ in range(2 + shrinks)]) == anew + ["started"] * shrinks
    twice = call()
    twice = replace(twice, input=torch.select(torch.empty(twice.input.numel(), 2, dtype=torch.bfloat16, device=GPU), 1, 0))
    if op != "broadcast":
        with pytest.raises(RuntimeError, match="cuda"):             # a copy of it
            run(twice)
        assert done == ["decided"], "strides"
    (room,) = live.state(live.group, GPU).capacities.values()
    room.spill_per_tile += 64
    assert run(call(), call()) == ["started"], "more room"
    room.calls_left_out = 1
    live.run(call())
    assert live.stats.snapshot()[op]["native_reasons"] == {"incompressible": 1}
    live.state(live.group, GPU).forget_rooms(op, torch.bfloat16)
    assert run(call(), call()) == ["started"] * (1 + shrinks), "a class that was forgotten"
    if op == "reduce_scatter_tensor":
        assert run(replace(call(), reduce_op=dist.ReduceOp.SUM)) == anew
    live.close(live.group)
    assert not live.repeats._known


@pytest.mark.parametrize("op", ["all_to_all_single", "all_reduce"])
def test_what_others_do_before_their_launch_is_done_anew(gpu, live, monkeypatch, op):
    done, choose, start = [], live._choose, live._start
    monkeypatch.setattr(live, "_choose", lambda *args: (done.append("decided"), choose(*args))[1])
    monkeypatch.setattr(live, "_start", lambda *args, **more: (done.append("started"), start(*args, **more))[1])
    for _ in range(3):
        end(gpu, begin(gpu, live, op, 7), 7)
    is_again = gpu.box is not None and op in AGAIN                  # from the third on
    assert done == ["decided", "started", "started", "started"][:4 - is_again]
    done.clear()
    call = call_of(op, live.group)
    shaped = call.input.view(2, -1)
    end(gpu, live.run(replace(call, input=shaped, output=shaped if op == "all_reduce" else call.output.view(2, -1))), 7)
    assert done == (["started"] if op == "all_reduce" else ["decided", "started"])
    lists = call_of("all_to_all", live.group)
    end(gpu, live.run(lists), 7)
    assert live.stats.snapshot()["all_to_all"]["calls_zipped"] == 1


@pytest.fixture
def many(gpu, live, monkeypatch):
    """Launches so many calls on stream 7, after three that made them known; how many ``again`` launched, and how many ended at once."""
    ended, at_once = [], group_state.GroupState.finish_at_once
    monkeypatch.setattr(group_state.GroupState, "finish_at_once",
                        lambda state, pending: (ended.append(at_once(state, pending)), ended[-1])[1])

    def run(op, *waits, stream=7, make=lambda call: call):
        for _ in range(3):
            end(gpu, begin(gpu, live, op, 7), 7)
        before = live.repeats.num_again
        ended.clear()
        gpu.current = stream
        works = [live.run(make(call_of(op, live.group))) for _ in waits]
        for i in waits:
            end(gpu, works[i], stream)
        return live.repeats.num_again - before, sum(ended)

    return run


ONE_CALL = pytest.mark.parametrize("gpu", ["prepared, words by encode, payload too, again"], indirect=True)


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
def test_known_calls_are_one_call_of_c_and_end_by_another(gpu, live, many, op):
    assert many(op, 0) == (1, 1) and many(op, 0, 1, 2)[0] == 1, "there is one flight"
    assert many(op, 0, 1, 2) == (3, 3)
    assert many(op, 2, 0, 1) == (3, 0), "what was settled for another one's sake"
    before = len(gpu.log)
    work = begin(gpu, live, op, 7)
    (between,) = (i for i in gpu.all("between") if i >= before)
    others = {i for i in gpu.all("payload", "decode", "words", "copy") if i >= before} - gpu.all("words")
    assert others and others.isdisjoint(gpu.before(between))
    end(gpu, work, 9)
    assert others <= gpu.before(max(gpu.all("read")))
    made = {item for stack in live.workspace._idle.values() for item in stack if isinstance(item, flight.Flight)}
    gpu.current = 7
    for _ in range(3):
        live.run(call_of(op, live.group))                               # nobody keeps the handle
    end(gpu, live.run(call_of(op, live.group)), 7)
    state = live.state(live.group, GPU)
    assert not state.in_flight and made == {item for stack in live.workspace._idle.values() for item in stack
                                            if isinstance(item, flight.Flight)}, "flights are not given back"
    row = live.stats.snapshot()[op]
    assert row["calls_zipped"] == 27 > live.repeats.num_again > 20 and row["raw_bytes"] == 27 * 2 * ROW
    for capacity_of, _ in next(iter(live.repeats._known.values())).rooms:
        assert len(capacity_of.under_way) < 8 and capacity_of.num_calm > 8


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
def test_an_overflow_of_a_known_call_is_sent_again(gpu, live, many, op):
    many(op, 0)
    before, first, gpu.word = live.repeats.num_again, len(gpu.log), OVERFLOW_BIT | 200 << SPILL_SHIFT
    work = begin(gpu, live, op, 7)
    assert live.repeats.num_again == before + 1
    end(gpu, work, 7)
    resends = {i for i in gpu.all("resend") if i >= first}
    assert resends and resends <= gpu.before(max(gpu.all("read"))) and live.stats.snapshot()[op]["overflows"] == 1
    gpu.word, before = 0, live.repeats.num_again
    for _ in range(9):
        end(gpu, begin(gpu, live, op, 7), 7)
    assert live.repeats.num_again < before + 9, "another room, once the overflow counts"
    many(op, 0, 1)
    assert many(op, 0, 1) == (2, 2)


WAYS = {
    "the stream is captured": lambda gpu, patch, live: setattr(gpu, "captures", 1),
    "the ring is full": lambda gpu, patch, live: setattr(gpu.box, "_room_for_all", gpu.box._count),
    "the mailbox has ended": lambda gpu, patch, live: setattr(gpu.box, "_ended", "why"),
    "torch gives no communicator away": lambda gpu, patch, live: patch.setattr(nccl_direct, "handle", lambda backend: 0),
    "another device is current": lambda gpu, patch, live: patch.setattr(streams, "current_device", lambda: 1),
    "there are tensors on the CPU too": lambda gpu, patch, live: live._groups["g"].update(cpu=None),
    "the room is another": lambda gpu, patch, live: [setattr(c, "spill_per_tile", 999) for c, _ in _known(live).rooms],
    "the class is forgotten": lambda gpu, patch, live: [setattr(c, "is_forgotten", True) for c, _ in _known(live).rooms],
    "a call must be taken account of": lambda gpu, patch, live: [c.under_way.extend([capacity.Need()] * 8) for c, _ in _known(live).rooms],
    "it has just overflowed": lambda gpu, patch, live: [setattr(c, "num_calm", 0) for c, _ in _known(live).rooms],
    "the idle flight is gone": lambda gpu, patch, live: live.workspace.clear(),
}


def _known(live):
    return next(iter(live.repeats._known.values()))


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
@pytest.mark.parametrize("why", WAYS)
def test_what_is_not_as_it_was_goes_the_long_way(gpu, live, many, monkeypatch, op, why):
    assert many(op, 0) == (1, 1)
    before, held = live.repeats.num_again, len(live.workspace._idle)
    with monkeypatch.context() as patch:
        WAYS[why](gpu, patch, live)
        gpu.current = 7
        assert live.again(call_of(op, live.group)) is None and live.repeats.num_again == before
    assert len(live.workspace._idle) == held or "idle" in why
    gpu.captures = 0


@ONE_CALL
@pytest.mark.parametrize("op", AGAIN)
def test_tensors_that_share_memory_go_the_long_way(gpu, live, many, op):
    def shared(call):
        whole = torch.empty(2 * WORLD * ROW, dtype=torch.bfloat16, device=GPU)
        a, b = call.output.numel(), call.input.numel()
        return replace(call, output=torch.ops.aten.slice(whole, 0, 0, a), input=torch.ops.aten.slice(whole, 0, ROW // 2, ROW // 2 + b))

    num_prepared = gpu.num_prepared
    assert many(op, 0, make=shared) == (0, 0) and gpu.num_prepared > num_prepared
    assert many(op, 0, stream=9) == (0, 0) and many(op, 0, stream=7) == (1, 1)
