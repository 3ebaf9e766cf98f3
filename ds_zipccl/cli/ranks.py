"""A process group for commands: from the environment of torchrun, deepspeed or mpirun, or of processes that are spawned here."""
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from zipscape import environment
from zipscape.errors import ZipScapeError, describe

_MPI = {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE", "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK"}
_HOW_TO_START = ("start it with `torchrun --nproc-per-node N -m ds_zipccl.cli.main ...`, `deepspeed --module ds_zipccl.cli.main ...` or "
                 "`mpirun -n N ds_zipccl ...`, or say --ranks N")


def launched() -> bool:
    """Whether a launcher has said which rank this process is."""
    return "RANK" in os.environ or _MPI["RANK"] in os.environ


def writes_results() -> bool:
    """Whether this process is rank 0, or nobody has launched ranks: the others' hosts may not even have the folder."""
    return environment.integer("RANK" if os.environ.get("RANK") else _MPI["RANK"], 0, todo=_HOW_TO_START) == 0


def run(function: Callable[..., int], ranks: int | None, device: str, *args) -> int:
    """``function(*args)`` in every rank, with the default process group (NCCL or gloo) initialized; the exit status of this process.

    ``ranks``: processes to spawn here where no launcher has. Raises ZipScapeError where neither says how many there are, or an environment
    variable is wrong.
    """
    environment.check()
    if launched():
        for name, mpi in _MPI.items():
            os.environ.setdefault(name, os.environ.get(mpi, ""))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")           # mpirun on one machine; several set it themselves
        os.environ.setdefault("MASTER_PORT", "29517")
        return _in_group(function, device, "env://", args)
    if not ranks or ranks < 2:
        raise ZipScapeError(describe("collectives need at least 2 ranks", got="no launcher" if ranks is None else f"--ranks {ranks}",
                                     todo=_HOW_TO_START))
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ZipScapeError(describe("a rank needs a GPU of its own", got=f"{torch.cuda.device_count()} GPUs", expected=f">= {ranks}"))
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_spawned, (ranks, function, device, f"file://{folder}/store", args), nprocs=ranks)
        except mp.ProcessExitedException as error:
            return error.exit_code
    return 0


def _spawned(rank: int, ranks: int, function, device: str, init_method: str, args) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    status = _in_group(function, device, init_method, args)
    if status:
        os._exit(status)


def _in_group(function, device: str, init_method: str, args) -> int:
    if device == "cuda":
        torch.cuda.set_device(environment.integer("LOCAL_RANK", 0, todo=_HOW_TO_START))
    rank, world_size = environment.integer("RANK", todo=_HOW_TO_START), environment.integer("WORLD_SIZE", least=1, todo=_HOW_TO_START)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=init_method, rank=rank, world_size=world_size)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
