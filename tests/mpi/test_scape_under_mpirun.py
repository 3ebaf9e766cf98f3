"""SCAPE under ``mpirun -n 2`` (make test-mpi): the settings are agreed on without a launcher's store, training follows the simulation."""
import os

import deepspeed
import pytest
import torch.distributed as dist

pytest.importorskip("mpi4py", reason="mpi4py is not installed: these tests run under `make test-mpi`")
if "OMPI_COMM_WORLD_SIZE" not in os.environ:
    pytest.skip("not started by mpirun: use `make test-mpi`", allow_module_level=True)

from tests.scape import zero_cases


@pytest.fixture(scope="session", autouse=True)
def world():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not dist.is_initialized():
        deepspeed.init_distributed(verbose=False)
    assert dist.get_world_size() == int(os.environ["OMPI_COMM_WORLD_SIZE"]) >= 2
    yield dist.get_world_size()


def test_follows_the_simulation(world):
    zero_cases.case_fp32(dist.get_rank(), world)


def test_wrong_settings_are_an_error_on_all_ranks(world):
    zero_cases._refused(zero_cases.settings(3), "stage = 3")
