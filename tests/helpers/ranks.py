"""Runs many distributed cases in one set of processes: ranks are started once per module and world size, results are kept for the
session.

A *case* is a function ``case(rank, world_size)`` of an importable module; it raises to fail. Cases run in the order
given. When a case fails on a rank, the ranks may be out of step, so nothing after it is run: later cases report which
one broke the run. A case that needs what is not there raises ``LeftOut`` on every rank, before anything else.
A module may have an ``init_process_group(backend, **kwargs)`` of its own, and say ``SPAWNED = True`` (processes.py).
"""
import functools
import importlib
import os
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.helpers import processes
from tests.helpers.processes import DEVICE, run_ranks

COLLECTIVE_TIMEOUT_S = 60
TIME_IS_OVER = "the time of the whole run was over"
_LEFT = "left out: "


class LeftOut(unittest.SkipTest):
    """Why a case cannot run here; to pytest a skip."""


class Outcome(NamedTuple):
    """Of a case, per rank: "ok", "left out: WHY", a traceback, or why it did not run; and the seconds it took there, None where it did not
    end."""
    texts: list[str]
    seconds: list[float | None]

    @property
    def has_failed(self) -> bool:
        return any(_is_failure(text) for text in self.texts)

    @property
    def kind(self) -> str:
        """Left out is what every rank has left out: a case that only some of them left was not made right."""
        if all(text == "ok" for text in self.texts):
            return "passed"
        return "left out" if all(text.startswith(_LEFT) for text in self.texts) else "failed"


def _is_failure(text: str) -> bool:
    return text != "ok" and not text.startswith(_LEFT)


def left_out(why: str, world_size: int) -> Outcome:
    return Outcome([f"{_LEFT}{why}"] * world_size, [None] * world_size)


def gpu_of(rank: int, world_size: int) -> tuple[int, dict[str, str]]:
    """(its index, environment). Where there are fewer GPUs than ranks all share the first: NCCL, which refuses two ranks of a host on one
    GPU, is told that each is on a host of its own, and goes through sockets."""
    if torch.cuda.device_count() >= world_size:
        return rank, {}
    return 0, {"NCCL_HOSTID": f"h{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def _left_out_where(is_so: Callable[[int], bool], why: str) -> Callable[[Callable], Callable]:
    """Marks cases. ``is_so(world_size)``: asked when they run."""
    def mark(case):
        @functools.wraps(case)
        def run(rank: int, world_size: int) -> None:
            if is_so(world_size):
                raise LeftOut(why)
            case(rank, world_size)

        return run

    return mark


#: The case, left out where ranks share a GPU: no peer's memory is there to write into. On CPUs stand-ins have some.
needs_a_gpu_each = _left_out_where(lambda world_size: DEVICE == "cuda" and torch.cuda.device_count() < world_size,
                                   "one-sided transfers need a GPU for each rank")
#: The case, left out on GPUs: it has a CPU do as they do.
stands_for_a_gpu = _left_out_where(lambda _: DEVICE == "cuda", "a CPU does in it what GPUs do in every case")
#: The case, left out of a rank alone.
needs_peers = _left_out_where(lambda world_size: world_size == 1, "one rank alone has no peers")
#: The case, left out on GPUs: it needs what only a stand-in for symmetric memory does.
needs_stand_ins = _left_out_where(lambda _: DEVICE == "cuda", "symmetric memory is real here")


def _rank_main(rank: int, world_size: int, module: str, names: tuple[str, ...], folder: str, ends_at: float | None,
               log: str | None) -> None:
    if log is not None:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    gpu, settings = gpu_of(rank, world_size) if DEVICE == "cuda" else (rank, {})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(gpu), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                      DS_ACCELERATOR=DEVICE, OMP_NUM_THREADS="1", **settings)
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(gpu)
        torch.set_default_device("cuda")
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    cases = importlib.import_module(module)
    init = getattr(cases, "init_process_group", dist.init_process_group)
    init("nccl" if DEVICE == "cuda" else "gloo", store=store, rank=rank, world_size=world_size,
         timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    begins = dist.PrefixStore("begins", store)
    Path(folder, f"ready.{rank}").touch()
    for name in names:
        start = time.monotonic()
        try:
            if ends_at is not None:
                _raise_if_over(begins, name, rank, ends_at)
                start = time.monotonic()
            getattr(cases, name)(rank, world_size)
            outcome = "ok"
        except LeftOut as why:
            outcome = f"{_LEFT}{why}"
        except BaseException:
            outcome = traceback.format_exc()
        part = Path(folder, f"part.{rank}")
        part.write_text(f"{time.monotonic() - start}\n{outcome}")
        part.rename(Path(folder, f"{name}.{rank}"))         # who looks sees all of it
        if _is_failure(outcome):
            os._exit(1)
    if dist.is_initialized():           # a case may have ended it
        dist.barrier()                  # a rank that goes while another still connects to it is an error there
        dist.destroy_process_group()


def _raise_if_over(store: dist.Store, name: str, rank: int, ends_at: float) -> None:
    """On all ranks or on none: the first one looks at the clock."""
    if rank == 0:
        store.set(name, "over" if time.time() > ends_at else "begins")
    if store.get(name) == b"over":
        raise LeftOut(TIME_IS_OVER)


def results(module: str, names: tuple[str, ...], world_size: int, *, case_s: float | None = None, ends_at: float | None = None,
            log: str | None = None, seen: Callable[[str, Outcome], None] = lambda name, outcome: None) -> dict[str, Outcome]:
    """The cases as far as they came: one that has failed is the last. Starts ``world_size`` processes.

    ``case_s``: the seconds of a case, after which its processes are ended (they count anew when a rank has come to its end); None:
    processes.STALLED_S, which in any case is what the ranks have to start.
    ``ends_at``: by ``time.time()``; cases that would begin later are left out. ``log``: what ranks print goes to the end of this file.
    ``seen``: called with each case as soon as its outcome is known."""
    found: dict[str, Outcome] = {}

    def add(name: str, read: list[tuple[str, float | None]]) -> None:
        found[name] = Outcome([text for text, _ in read], [seconds for _, seconds in read])
        seen(name, found[name])

    def broken() -> bool:
        return any(outcome.has_failed for outcome in found.values())

    with tempfile.TemporaryDirectory() as folder:

        def look() -> float:
            while len(found) < len(names) - 1 and not broken():          # how the processes end belongs to the last one
                read = [_read(folder, names[len(found)], rank) for rank in range(world_size)]
                if None in read:
                    break
                add(names[len(found)], read)
            has_begun = all(Path(folder, f"ready.{rank}").exists() for rank in range(world_size))
            return case_s if case_s is not None and has_begun else processes.STALLED_S

        spawned = getattr(importlib.import_module(module), "SPAWNED", False)
        verdicts = run_ranks(_rank_main, (world_size, module, names, folder, ends_at, log), world_size, folder, spawned, look)
        look()
        while len(found) < len(names) and not broken():
            name = names[len(found)]
            read = [_read(folder, name, rank) or (f"not run: {verdict or 'the others failed'}", None)
                    for rank, verdict in enumerate(verdicts)]
            if name == names[-1] and not any(_is_failure(text) for text, _ in read):         # and yet a process may have ended badly
                read = [(verdict or text, seconds) for verdict, (text, seconds) in zip(verdicts, read, strict=True)]
            add(name, read)
    return found


def _read(folder: str, name: str, rank: int) -> tuple[str, float] | None:
    file = Path(folder, f"{name}.{rank}")
    if not file.exists():
        return None
    seconds, text = file.read_text().split("\n", 1)
    return text, float(seconds)


@functools.cache
def outcomes(module: str, names: tuple[str, ...], world_size: int) -> dict[str, list[str]]:
    """{case: outcome per rank}: "ok", a traceback, or why it did not run. Starts ``world_size`` processes at the first
    call."""
    found = results(module, names, world_size)
    *_, last = found
    return {name: found[name].texts if name in found else [f"not run: {last} failed before it"] * world_size for name in names}


def assert_ok(module: str, names: tuple[str, ...], world_size: int, name: str) -> None:
    """Fails with every rank's traceback unless the case passed on all ranks."""
    outcome = Outcome(outcomes(module, names, world_size)[name], [])
    if outcome.kind == "left out":
        raise LeftOut(outcome.texts[0].removeprefix(_LEFT))
    failures = [f"--- rank {rank}\n{text}" for rank, text in enumerate(outcome.texts) if text != "ok"]
    assert not failures, "\n".join(failures)


def case_names(module: str) -> tuple[str, ...]:
    """The cases of a module: its functions called ``case_*``, in the order written."""
    return tuple(name for name, value in vars(importlib.import_module(module)).items()
                 if name.startswith("case_") and callable(value))
