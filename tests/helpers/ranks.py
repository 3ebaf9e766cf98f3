"""Runs many distributed cases in one set of processes: ranks are started once per module and world size, results are kept for the
session.

A *case* is a function ``case(rank, world_size)`` of an importable module; it raises to fail. Cases run in the order
given. When a case fails on a rank, the ranks may be out of step, so nothing after it is run: later cases report which
one broke the run. A module may have an ``init_process_group(backend, **kwargs)`` of its own, and say ``SPAWNED = True`` (processes.py).
"""
import functools
import importlib
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers.processes import DEVICE, run_ranks

COLLECTIVE_TIMEOUT_S = 60


def _rank_main(rank: int, world_size: int, module: str, names: tuple[str, ...], folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                      DS_ACCELERATOR=DEVICE, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    cases = importlib.import_module(module)
    init = getattr(cases, "init_process_group", dist.init_process_group)
    init("nccl" if DEVICE == "cuda" else "gloo", store=store, rank=rank, world_size=world_size,
         timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    for name in names:
        try:
            getattr(cases, name)(rank, world_size)
            outcome = "ok"
        except BaseException:
            outcome = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(outcome)
        if outcome != "ok":
            os._exit(1)
    if dist.is_initialized():           # a case may have ended it
        dist.barrier()                  # a rank that goes while another still connects to it is an error there
        dist.destroy_process_group()


@functools.cache
def outcomes(module: str, names: tuple[str, ...], world_size: int) -> dict[str, list[str]]:
    """{case: outcome per rank}: "ok", a traceback, or why it did not run. Starts ``world_size`` processes at the first
    call."""
    with tempfile.TemporaryDirectory() as folder:
        spawned = getattr(importlib.import_module(module), "SPAWNED", False)
        verdicts = run_ranks(_rank_main, (world_size, module, names, folder), world_size, folder, spawned)
        result, broken = {}, None
        for name in names:
            files = [Path(folder, f"{name}.{rank}") for rank in range(world_size)]
            texts = [f.read_text() if f.exists() else f"not run: {broken or verdict or 'the others failed'}"
                     for f, verdict in zip(files, verdicts, strict=True)]
            result[name] = texts
            if broken is None and any(t != "ok" for t in texts):
                broken = f"{name} failed before it"
        if broken is None and any(verdicts):
            result[names[-1]] = [verdict or "ok" for verdict in verdicts]         # all passed, and the end of a process did not
        return result


def assert_ok(module: str, names: tuple[str, ...], world_size: int, name: str) -> None:
    """Fails with every rank's traceback unless the case passed on all ranks."""
    texts = outcomes(module, names, world_size)[name]
    failures = [f"--- rank {rank}\n{text}" for rank, text in enumerate(texts) if text != "ok"]
    assert not failures, "\n".join(failures)


def case_names(module: str) -> tuple[str, ...]:
    """The cases of a module: its functions called ``case_*``, in the order written."""
    return tuple(name for name, value in vars(importlib.import_module(module)).items()
                 if name.startswith("case_") and callable(value))
