"""Host time of ds_zipccl's own Python, in microseconds: what it adds to a call that goes native, and what a zipped call costs without its
encode, decode and transfers.

    python benchmarks/host_time.py [--calls]

Native: two gloo ranks on this machine; the native collective itself is not called. What a call costs in a loop; and until it would be
launched, with cold caches (64 MiB are read before each): what an idle GPU would wait for. Function, method: the launch itself, by torch's
function and as it is done for calls that are known to go native; a group that moves nothing, in a loop and with cold caches.
An all-to-all as on a GPU, where it is remembered; on a CPU it is not.
Zipped: one process; kernels, process group and side channels are stand-ins that do nothing (a store of zeros for the status words), so
that only our Python and torch's tensor operations in it are timed, on CPU tensors. ``launch``: from the front's entry until it returns the
Work; ``payload``: until the payload is launched; ``wait``: of Work.wait(). A GPU adds the launches themselves, events and streams.
Words: two ranks; an exchange of status words as every zipped call has one: ``launch``: until it is under way; ``both``: until the words of
both ranks are there. Through shared memory, and through a channel (gloo).
The best of 100 means over 40 calls. ``--calls`` also counts the function calls of a zipped call (cProfile).
"""
import argparse
import cProfile
import functools
import os
import pstats
import statistics
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_zipccl.backend import front
from ds_zipccl.cli.bench_collectives import make_call
from ds_zipccl.collectives import group_state, native_calls, native_launch, transport
from ds_zipccl.collectives.cost import Costs, Curve
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.words import Words
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader, ops

SLOWER = Costs(Curve((1, 2), (1.0, 2.0)), Curve((1, 2), (5.0, 10.0)), 1.41)
FASTER = Costs(Curve((1, 2), (5.0, 10.0)), Curve((1, 2), (1.0, 2.0)), 1.41)
CASES = (("never", 4 << 20, "all_gather_into_tensor"), ("adaptive", 64 << 10, "all_gather_into_tensor"),
         *(("adaptive", 4 << 20, op) for op in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce",
                                                "broadcast", "all_gather", "reduce_scatter", "all_to_all")))
ZIPPED = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce", "broadcast", "all_gather", "reduce_scatter")
ROUNDS, CALLS = 100, 40
OTHER_WORK = b"." * (64 << 20)


def native(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    native_calls.launch_of = lambda call: lambda *_: time.perf_counter()
    for choice, size, op in CASES:
        runtime = Runtime(ZipcclConfig(enabled=True, collectives=choice, reprobe_calls=0), {"cpu": loader.resolve("best", "cpu")})
        call = make_call(specs()[op], size, torch.bfloat16, torch.device("cpu"), False)
        for name in (op, "pair"):
            runtime.state(call.group, call.device).measured(name, torch.bfloat16).costs = SLOWER
        if op.startswith("all_to_all"):
            measured = runtime.state(call.group, call.device).measured("pair", torch.bfloat16)
            runtime.native_calls.remember(call, "native_is_faster", 0, measured)
            runtime.native_calls.show(call.group)
        best = float("inf")
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(CALLS):
                if front.run(runtime, call) is not None:
                    raise SystemExit("the call did not go native")
            best = min(best, (time.perf_counter() - start) / CALLS * 1e6)
        cold = []
        for _ in range(CALLS):
            OTHER_WORK.find(b"-")
            start = time.perf_counter()
            cold.append((front.run(runtime, call, print) - start) * 1e6)
        reason, = runtime.stats.snapshot()[op]["native_reasons"]
        if rank == 0:
            print(f"native {op:24s} {size >> 10:6d} KiB, {choice}: {reason:18s} {best:5.1f} us, launched after "
                  f"{statistics.median(cold):4.1f} us with cold caches", flush=True)
        dist.barrier()
        runtime.close()
    dist.destroy_process_group()


def launches(rank: int, folder: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    torch.set_num_threads(1)
    for op, launch in native_launch.LAUNCHES.items():
        call = make_call(specs()[op], 64 << 10, torch.bfloat16, torch.device("cpu"), False)
        ways = {"function": functools.partial(specs()[op].native, call),
                "method": functools.partial(launch, call.output, call.input, call.group, True, None, call.root)}
        warm, cold = {way: [] for way in ways}, {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, one in ways.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    one()
                warm[way].append((time.perf_counter() - start) / CALLS * 1e6)
                OTHER_WORK.find(b"-")
                start = time.perf_counter()
                one()
                cold[way].append((time.perf_counter() - start) * 1e6)
        print(f"launch {op:24s} " + ", ".join(f"{way} {min(warm[way]):5.2f} us, cold {statistics.median(cold[way]):5.1f}" for way in ways),
              flush=True)
    dist.destroy_process_group()


def words(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/words", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for wanted in ("1", "0"):
        os.environ["ZIPCCL_MAILBOX"] = wanted
        cpu = torch.device("cpu")
        side, data, own = transport.SideChannel(dist.group.WORLD, cpu), Words(torch.empty(2, dtype=torch.int32, device=cpu), None), None
        best = [float("inf")] * 2
        for number in range(ROUNDS):
            sums = [0.0, 0.0]
            for _ in range(CALLS):
                own = torch.full((1,), number + rank, dtype=torch.int32, device=cpu)
                start = time.perf_counter()
                data.exchange(side.gather_words, own)
                data.fetch()
                sums[0] += time.perf_counter() - start
                data.wait()
                if data.tolist() != [number, number + 1]:
                    raise SystemExit("wrong words")
                sums[1] += time.perf_counter() - start
            best = min(best, [each / CALLS * 1e6 for each in sums], key=lambda times: times[1])
        if rank == 0:
            print(f"words  {'shared memory' if side.words_go_by == 'mailbox' else 'channel':24s} launch {best[0]:5.1f}, "
                  f"both {best[1]:5.1f} us", flush=True)
        dist.barrier()
        side.close()
    dist.destroy_process_group()


DONE = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)


class NoGroup:
    """A process group of ``size`` ranks that moves nothing. ``launched``: when a payload was launched last."""
    group_name, launched = "stand-in", 0.0

    def __init__(self, rank: int, size: int):
        self.rank, self.size = (lambda: rank), (lambda: size)

    def _payload(self, *_) -> SimpleNamespace:
        self.launched = time.perf_counter()
        return DONE

    _allgather_base = alltoall_base = alltoall = broadcast = _payload

    def _get_backend(self, device) -> "NoGroup":
        return self


class NoChannel:
    """A side channel on which all ranks' words are zero."""

    def __init__(self, *_):
        pass

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return _all_zero


def _all_zero(out=None, *_) -> SimpleNamespace:
    """``out``: a tensor, or the words.Words of a call."""
    if out is not None:
        getattr(out, "data", out).zero_()
    return DONE


def _nothing(*_) -> None:
    """A kernel; whatever it is bound to."""


def stand_in() -> None:
    """Side channels and the kernel set "nothing"."""
    group_state.SideChannel = NoChannel
    ops.register("nothing", SimpleNamespace(encode=lambda x, frames, status, g, skip=-1: None, decode=_nothing, decode_reduce=_nothing,
                                            bind_encode=lambda *_: _nothing, bind_decode=lambda *_: _nothing,
                                            bind_decode_reduce=lambda *_: _nothing), ("cpu",))
    known = loader.load
    loader.load = lambda name: None if name == "nothing" else known(name)


def _timed(runtime: Runtime, call: Call) -> tuple[float, float, float]:
    """Seconds until the payload is launched, of the launch, of wait()."""
    start = time.perf_counter()
    work = front.run(runtime, replace(call))
    launched = time.perf_counter()
    work.wait()
    return call.group.launched - start, launched - start, time.perf_counter() - launched


def zipped(choice: str, count_calls: bool) -> None:
    for op in ZIPPED:
        spec, group = specs()[op], NoGroup(1, 4)
        output, data = spec.make_tensors(1, 4, 1 << 13, torch.bfloat16, torch.device("cpu"))
        runtime = Runtime(ZipcclConfig(enabled=True, collectives=choice, min_bytes=0, deterministic_reduce=False), {"cpu": "nothing"})
        for name in (op, "pair"):
            runtime.state(group, torch.device("cpu")).measured(name, torch.bfloat16).costs = FASTER
        one = functools.partial(_timed, runtime, Call(op, output, data, group, root=1 if spec.rooted else None))
        best = [float("inf")] * 3
        for _ in range(ROUNDS):
            sums = [sum(column) / CALLS * 1e6 for column in zip(*(one() for _ in range(CALLS)), strict=True)]
            best = min(best, sums, key=lambda times: times[1] + times[2])
        calls = ""
        if count_calls:
            profile = cProfile.Profile()
            profile.runcall(lambda run=one: [run() for _ in range(CALLS)])
            calls = f", {pstats.Stats(profile).total_calls / CALLS:.0f} function calls"
        print(f"zipped {op:24s} {choice}: payload {best[0]:5.1f}, launch {best[1]:5.1f}, wait {best[2]:5.1f}, "
              f"both {best[1] + best[2]:5.1f} us{calls}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stand_in()
    for choice in ("always", "adaptive"):
        zipped(choice, options.calls)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(native, (folder,), nprocs=2)
        mp.spawn(launches, (folder,), nprocs=1)
        mp.spawn(words, (folder,), nprocs=2)
