"""The processes of ranks: started together, ended together, and each says how it ended.

On CPUs they are forked from a server that has imported torch and DeepSpeed once (preloaded.py): what a rank imports costs seconds, a fork
a tenth of one. The server starts no threads, which a fork would lose. With GPUs, which do not survive a fork, and for a module that
says ``SPAWNED = True``, each process is new.
"""
import atexit
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import torch

DEVICE = os.environ.get("ZIPSCAPE_TEST_DEVICE", "cpu")        # "cuda": NCCL; one GPU a rank, where there are so many (ranks.py)
#: Where one rank has failed, the others have this long to find out and say where they were.
GRACE_S = 5
#: No rank of a run has come further for this long: more than a collective's timeout and the longest case on a busy machine.
STALLED_S = 200
_SERVER = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "DS_ACCELERATOR": DEVICE}
_starting = threading.Lock()


def run_ranks(target, arguments: tuple, world_size: int, folder: str, spawned: bool = False,
              look: Callable[[], float] = lambda: STALLED_S) -> list[str]:
    """Calls ``target(rank, *arguments)`` in ``world_size`` processes with this one's environment; per rank, why it did not end well,
    else "".

    A file that appears in ``folder`` counts as progress. ``look`` is called about once a second and says how many seconds the run may be
    without any. When a rank has failed, or none has made progress for so long, the stacks of the others are taken and they are ended: the
    run never outlives that. Several threads may run ranks beside each other.
    """
    context = multiprocessing.get_context("spawn" if spawned or DEVICE == "cuda" else "forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded"])
    processes = []
    try:
        with _starting:                      # whose environment is everybody's
            processes += [context.Process(target=_main, args=(rank, target, arguments, folder, dict(os.environ)), daemon=True)
                          for rank in range(world_size)]
            with mock.patch.dict(os.environ, _SERVER):
                for process in processes:
                    process.start()
        return _watch(processes, folder, look)
    finally:
        for process in processes:
            if process.pid and process.exitcode is None:         # interrupted here, by Ctrl-C or the test's own time limit
                process.kill()


def _main(rank: int, target, arguments: tuple, folder: str, environment: dict[str, str]) -> None:
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    stacks = open(_stacks(folder, rank), "w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    try:
        target(rank, *arguments)
        atexit._run_exitfuncs()                  # a forked process would leave them out
    except BaseException:
        traceback.print_exc(file=stacks)
        raise


def _stacks(folder: str, rank: int) -> Path:
    return Path(folder, f"stacks.{rank}")


def _watch(processes: list, folder: str, look: Callable[[], float]) -> list[str]:
    verdicts, files, since, deadline = [""] * len(processes), 0, time.monotonic(), float("inf")
    while running := [rank for rank, process in enumerate(processes) if process.exitcode is None]:
        stalled_s = look()
        if not any(process.exitcode for process in processes):
            if (now := len(os.listdir(folder))) != files:
                files, since = now, time.monotonic()
            deadline = since + stalled_s
        else:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() < deadline:
            wait([processes[rank].sentinel for rank in running], timeout=1)
            continue
        for rank in running:
            os.kill(processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)                      # for the stacks to be written
        for rank in running:
            verdicts[rank] = f"process {rank} was ended: it ran on after another's failure, or for {stalled_s} s without progress"
            processes[rank].kill()
            processes[rank].join()
    for rank, process in enumerate(processes):
        if process.exitcode:
            verdict = verdicts[rank] or f"process {rank} ended by {_ending(process.exitcode)}"
            verdicts[rank] = f"{verdict}\n{_stacks(folder, rank).read_text()}"
    return verdicts


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
