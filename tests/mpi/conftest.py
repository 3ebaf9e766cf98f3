"""One world for every file here, found through MPI as a user's script does under ``mpirun`` (make test-mpi)."""
import os
import socket
from datetime import timedelta

import pytest

from tests.helpers.ranks import COLLECTIVE_TIMEOUT_S

os.environ.setdefault("ZIPCCL_MAILBOX_LAG", "1")        # as in tests/zipccl/conftest.py, whose cases run here


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="session", autouse=True)
def world():
    """Its number of ranks. DeepSpeed's rendezvous would take port 29500, where a second run on the machine meets this one's store:
    ranks of two jobs then answer each other's handshakes."""
    MPI = pytest.importorskip("mpi4py.MPI", reason="mpi4py is not installed: these tests run under `make test-mpi`")
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        pytest.skip("not started by mpirun: use `make test-mpi`")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    port = MPI.COMM_WORLD.bcast(_free_port(), root=0)
    deepspeed.init_distributed(distributed_port=port, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), verbose=False)
    assert dist.get_world_size() == int(os.environ["OMPI_COMM_WORLD_SIZE"]) >= 2
    yield dist.get_world_size()
    dist.destroy_process_group()
