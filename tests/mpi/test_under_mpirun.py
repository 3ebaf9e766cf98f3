"""Runs under ``mpirun -n 2`` (make test-mpi): DeepSpeed finds its ranks through MPI, training equals native bit for bit."""
import os

import deepspeed
import pytest
import torch.distributed as dist

pytest.importorskip("mpi4py", reason="mpi4py is not installed: these tests run under `make test-mpi`")
if "OMPI_COMM_WORLD_SIZE" not in os.environ:
    pytest.skip("not started by mpirun: use `make test-mpi`", allow_module_level=True)

from tests.train import zero_cases


@pytest.fixture(scope="session", autouse=True)
def world():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed(verbose=False)
    assert dist.get_world_size() == int(os.environ["OMPI_COMM_WORLD_SIZE"]) >= 2
    yield dist.get_world_size()
    dist.destroy_process_group()


def test_gathers_and_parameters_equal_native(world):
    zero_cases.case_stage_2_bf16(dist.get_rank(), world)


def test_zero_3_equals_native(world):
    zero_cases.case_stage_3_bf16(dist.get_rank(), world)
