"""What a zipped call on a GPU waits for, and what waits for it, shown on a CPU: streams that know nothing but who waited for whom, tensors
without memory (torch's fake ones), kernels and communicators that only say when they ran. C61: the caller's streams, never the default one.
C62: the call passes what the caller queues after its launch, and does not hold it up either."""
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_zipccl.codec.format import OVERFLOW_BIT
from ds_zipccl.collectives import streams
from ds_zipccl.collectives.streams import copy as copy_elements
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.zipccl.stream_stand_in import (
    AGAIN,
    GPU,
    OPS,
    PREPARED,
    ROW,
    Group,
    begin,
    call_of,
    end,
)


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
def test_what_a_resend_uses_has_been_used_before_the_first_payload(gpu, live, op):
    """C62: NCCL connects and CUDA loads at first use, which may wait for a payload that waits for a rank that waits for the resend."""
    end(gpu, begin(gpu, live, op, 7), 7)
    end(gpu, begin(gpu, live, op, 7), 7)
    early = "connect words", "connect resend", "load kernels"
    assert [name for name, *_ in gpu.log if name in early] == list(early)
    assert max(gpu.all(*early)) < min(gpu.all("payload", "encode", "resend"))


@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sum_in_rank_order_brings_nothing_from_the_host(gpu, dtype, divisor):
    """C62: the host would wait until the GPU has come so far, in a resend for another rank."""
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            assert {t.device for t in tree_leaves((arguments, options)) if isinstance(t, torch.Tensor)} <= {GPU}, function
            assert function is not torch.ops.aten._local_scalar_dense.default
            return function(*arguments, **(options or {}))

    rows, out = [torch.empty(ROW, dtype=dtype, device=GPU) for _ in range(3)], torch.empty(ROW, dtype=dtype, device=GPU)
    with Seen():
        sum_in_order(rows, out, divisor)


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
