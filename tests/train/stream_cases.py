"""Cases run on every rank by test_streams.py: what the host waits for in steady state (C62), streams of the user's (C61), memory."""
import collections
import contextlib
import time
import traceback
import warnings
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zipccl.collectives.registry import specs
from tests.helpers.bits import assert_same_bits
from tests.train import zero3_cache_helpers, zero_cases
from tests.zipccl.collective_helpers import AG, RS, carry_out, runtime
from tests.zipccl.collective_repeat_cases import OPS, begin_ours, call_and_result, check

#: Operations whose result the host needs: on a GPU it waits there for all that the stream was given before.
ON_THE_HOST = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item", "masked_select", "_unique2", "repeat_interleave"}
#: Status words, which lie in host memory (words.py; mailbox.py: a CPU's own), and those of cached frames, once a step and on a stream of
#: their own (frame_cache.py).
KNOWN = {"collectives/words.py", "collectives/mailbox.py", "collectives/frame_words.py"}
KNOWN_ON_A_CPU = KNOWN | {"collectives/frame_guard.py"}         # compares at once there


class HostWaits(TorchDispatchMode):
    """Within it, on a CPU: operations that would hold the host on a GPU. On a GPU: what torch itself says held it. ``ours``: where in
    ds_zipccl; ``others``: where elsewhere."""

    def __init__(self):
        super().__init__()
        self.ours, self.others = collections.Counter(), collections.Counter()
        self._cuda = torch.get_default_device().type == "cuda"

    def _note(self, filename, function, line):
        file = filename.rsplit("/ds_zipccl/")[-1]
        if file == filename:
            self.others[f"{file}:{line} {function}"] += 1
        elif file not in (KNOWN if self._cuda else KNOWN_ON_A_CPU):
            self.ours[f"{file}:{line} {function}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._cuda and func._schema.name.split("::")[1] in ON_THE_HOST:
            frame = next(f for f in reversed(traceback.extract_stack()[:-1]) if "/torch/" not in f.filename)        # who asked torch
            self._note(frame.filename, frame.name, frame.lineno)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def watching(self):
        if not self._cuda:
            original = torch.Tensor.tolist

            def tolist(tensor):
                frame = traceback.extract_stack(limit=2)[0]
                self._note(frame.filename, frame.name, frame.lineno)
                return original(tensor)

            torch.Tensor.tolist = tolist
            try:
                with self:
                    yield self
            finally:
                torch.Tensor.tolist = original
            return
        def shown(message, category, filename, lineno, file=None, line=None):
            if "synchroniz" in str(message):
                frame = next(f for f in reversed(traceback.extract_stack()[:-1])        # who asked torch
                             if "/torch/" not in f.filename and not f.filename.endswith("warnings.py"))
                self._note(frame.filename, frame.name, frame.lineno)

        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = shown
                yield self
        finally:
            torch.cuda.set_sync_debug_mode("default")


def case_the_host_waits_are_seen(rank, world):
    """The cases below can fail."""
    waits = HostWaits()
    with waits.watching():
        assert torch.ones(3).sum().item() == 3
    assert waits.others.total() == 1 and not waits.ours


def case_repeated_calls_wait_for_nothing_on_the_host(rank, world):
    """But for their status words, in a way of their own. (Every collective; the third call of its kind.)"""
    with runtime() as live:
        for op in OPS:
            waits = HostWaits()
            for turn in range(3):
                call, result = call_and_result(op, rank, world, 4000, turn)
                with waits.watching() if turn == 2 else contextlib.nullcontext():
                    work, ours = begin_ours(live, call)
                    work.wait()
                assert ours, op
                check(call, ours, result, f"{op} {turn}")
            assert not waits.ours, (op, waits.ours)


def case_steps_wait_for_nothing_more_on_the_host_at_2(rank, world):
    """Of a whole training step, forward to optimizer: nothing in our code, in each stage and with cached frames."""
    cached = zero3_cache_helpers.CACHED
    for stage, section in ((1, zero_cases.ZIPPED), (2, zero_cases.ZIPPED), (3, zero_cases.ZIPPED), (3, cached)):
        found = []
        for one in (None, section):
            waits = HostWaits()
            config = zero_cases.settings(stage, "bf16", **({} if one is None else {"zipccl": one}))
            _train(config, stage, lambda step, waits=waits: waits.watching() if step == 2 else contextlib.nullcontext(), steps=3)
            assert not waits.ours, (stage, one, waits.ours)
            found.append(waits.others)
        more = found[1] - found[0]
        assert found[1] and found[1].total() <= found[0].total(), f"{stage} {section}: {dict(found[0])}, and then also {dict(more)}"


def _train(config, stage, around, steps):
    """``zero_cases.train`` with ``around(step)`` around its micro steps."""
    step, inner = iter(range(10**9)), zero_cases.deepspeed.initialize

    def initialize(**how):
        engine, *rest = inner(**how)
        forward, stepped = engine.forward, engine.step
        open_ = contextlib.ExitStack()

        def entering(*args, **kwargs):
            open_.enter_context(around(next(step) // 2))
            return forward(*args, **kwargs)

        def leaving(*args, **kwargs):
            stepped(*args, **kwargs)
            open_.close()

        engine.forward, engine.step = entering, leaving
        return engine, *rest

    zero_cases.deepspeed.initialize = initialize
    try:
        return zero_cases.train(config, stage, steps=steps)
    finally:
        zero_cases.deepspeed.initialize = inner


def case_compiled_models_train_as_natively_at_2(rank, world):
    """C60: through ``engine.compile``, with gradients reduced behind a compiled backward."""
    inner = zero_cases.deepspeed.initialize

    def compiling(**how):
        engine, *rest = inner(**how)
        engine.compile(backend="aot_eager")
        return engine, *rest

    for stage, section in ((2, zero_cases.ZIPPED), (3, zero3_cache_helpers.CACHED)):
        runs = []
        for one in (None, section):
            config = zero_cases.settings(stage, "bf16", **({} if one is None else {"zipccl": one}))
            config["zero_optimization"]["overlap_comm"] = True
            counters.clear()
            with mock.patch.object(zero_cases.deepspeed, "initialize", compiling):
                runs.append(zero_cases.train(config, stage, steps=2))
            assert torch._dynamo.config.disable or counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
            torch._dynamo.reset()
        assert runs[0][:2] == runs[1][:2], f"stage {stage}"
        assert runs[1][2]["all_gather_into_tensor"]["calls_zipped"] > 0, runs[1][2]


# -- on GPUs: real streams


def _busy(seconds: float) -> None:
    """Keeps the current stream so long."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def case_calls_pass_a_busy_stream_on_gpus(rank, world):
    """C62, C47: what the caller queues after a launch neither delays the call, its decoding included, nor holds the host in ``wait()``."""
    with runtime() as live:
        for op in OPS:
            for turn in range(3):
                call, result = call_and_result(op, rank, world, 40000, turn)
                torch.cuda.synchronize()
                work, ours = begin_ours(live, call)
                assert ours, op
                if turn == 2:
                    _busy(1.0)
                    end = torch.cuda.current_stream().record_event()
                    start = time.monotonic()
                    while not work.is_completed():
                        assert time.monotonic() - start < 20, op
                    work.wait()
                    assert time.monotonic() - start < 0.5 and not end.query(), f"{op}: the call waited for what came after it"
                work.wait()
                check(call, ours, result, f"{op} {turn}")


def case_calls_on_streams_of_the_users_on_gpus(rank, world):
    """C61: launched on one stream, behind work that makes the input, waited for on another, which reads; the default stream is late, so
    whoever goes by way of it reads or writes at the wrong time."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with runtime() as live:
        for op in OPS:
            for turn in range(4):
                call, result = call_and_result(op, rank, world, 40000, turn)
                made = [t.clone() for t in call.inputs]
                for t in (*call.outputs, *call.inputs):
                    t.zero_()
                torch.cuda.synchronize()
                _busy(0.05)                                     # the default stream
                with torch.cuda.stream(first):
                    _busy(0.01)
                    for t, data in zip(call.inputs, made, strict=True):
                        t.copy_(data)
                    work, ours = begin_ours(live, call)
                assert ours, op
                with torch.cuda.stream(second if turn % 2 else first):
                    work.wait()
                    seen = torch.cat([t.view(-1) for t in call.outputs])
                    for t in call.outputs:
                        t.zero_()                               # a decode that comes later would fill it again
                    after = [t.clone() for t in call.outputs]
                torch.cuda.synchronize()
                assert_same_bits(seen, result, f"{op} {turn}")
                assert not any(t.any() for t in (*after, *call.outputs)), f"{op} {turn}: written after wait()"


def case_calls_in_a_cuda_graph_on_gpus(rank, world):
    """They go native, counted with the reason, and a replay works on new data; before and after it such calls are zipped. The zipped ones
    are done before the capture, as docs/torch_backend.md asks."""
    for integrity in ("off", "checksum"):
        with runtime(integrity=integrity) as live:
            for op in specs():
                before, result = call_and_result(op, rank, world, 4000, 0)
                work, ours = begin_ours(live, before)
                work.wait()
                torch.cuda.synchronize()
                assert ours, op
                captured, result = call_and_result(op, rank, world, 4000, 1)
                data = [t.clone() for t in captured.inputs]
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    work, ours = begin_ours(live, captured)
                    work.wait()
                assert not ours, op
                for t in captured.outputs:
                    t.zero_()
                for t, given in zip(captured.inputs, data, strict=True):
                    t.copy_(given)
                graph.replay()
                torch.cuda.synchronize()
                check(captured, True, result, f"{op} {integrity}")
                assert live.stats.snapshot()[op]["native_reasons"] == {"graph_capture": 1}, op
                after, result = call_and_result(op, rank, world, 4000, 2)
                work, ours = begin_ours(live, after)
                work.wait()
                assert ours, op
                check(after, True, result, f"{op} after the capture")


def case_fifty_steps_with_overlap_on_gpus(rank, world):
    """C60: buffers that are used again before a call is done with them would show as other losses, now or then."""
    for stage, section in ((1, zero_cases.ZIPPED), (2, zero_cases.ZIPPED), (3, zero3_cache_helpers.CACHED)):
        runs = []
        for zipped in (False, True, True, True):
            config = zero_cases.settings(stage, "bf16", **({"zipccl": section} if zipped else {}))
            config["zero_optimization"].update(overlap_comm=True, contiguous_gradients=True)
            runs.append(zero_cases.train(config, stage, steps=50)[:2])
        assert runs == runs[:1] * 4, f"stage {stage}: native and three times zipped"


def case_memory_stays_within_the_bound_on_gpus(rank, world):
    """C95: frames in flight and idle ones, each at most ``max_workspace_bytes``; nothing stays after the end."""
    bound, numel = 64 << 20, 128 << 20
    data, out = (torch.randn(numel) * 0.02).bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with runtime(max_workspace_bytes=bound) as live:
        for op, output, given in ((AG, out, data[:numel // world]), (RS, out[:numel // world], data)):
            torch.cuda.reset_peak_memory_stats()
            for _ in range(3):
                assert carry_out(live, op, output, given)
            torch.cuda.synchronize()
            extra = torch.cuda.max_memory_allocated() - before
            print(f"{op}: {extra >> 20} MiB at most, bound {bound >> 20}")
            assert extra <= 2 * bound + (4 << 20), (op, extra)
            if op == AG:
                assert_same_bits(out.split(numel // world)[rank], given, op)
    torch.cuda.empty_cache()                    # which looks at what other streams used: freed so far, counted still
    behind = torch.cuda.memory_allocated() - before
    assert behind <= 1 << 20, f"{behind >> 20} MiB stay behind"


@contextlib.contextmanager
def _late_default_stream(step):
    with torch.cuda.stream(torch.cuda.default_stream()):
        _busy(0.02)
    yield


def case_steps_on_a_stream_of_the_users_on_gpus(rank, world):
    """C61: the same training on a stream of the user's while the default stream is late: the same losses and parameters."""
    side = torch.cuda.Stream()
    cached = zero3_cache_helpers.CACHED
    for stage, section in ((1, zero_cases.ZIPPED), (2, zero_cases.ZIPPED), (3, zero_cases.ZIPPED), (3, cached)):
        for overlap in (False, True):
            runs = []
            for zipped, stream in ((False, None), (False, side), (True, side)):
                config = zero_cases.settings(stage, "bf16", **({"zipccl": section} if zipped else {}))
                config["zero_optimization"]["overlap_comm"] = overlap
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    runs.append(_train(config, stage, _late_default_stream if stream else contextlib.nullcontext, steps=2)[:2])
                torch.cuda.synchronize()
            where = f"stage {stage} {'with' if overlap else 'without'} overlap, {section}"
            assert runs[0] == runs[1], f"{where}: DeepSpeed alone is wrong on such a stream"
            assert runs[2] == runs[0], where
