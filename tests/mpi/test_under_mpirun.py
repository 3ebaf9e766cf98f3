"""Runs under ``mpirun -n 2`` (make test-mpi): DeepSpeed finds its ranks through MPI, training equals native bit for bit."""
import torch.distributed as dist

from tests.train import zero_cases


def test_gathers_and_parameters_equal_native(world):
    zero_cases.case_stage_2_bf16(dist.get_rank(), world)


def test_zero_3_equals_native(world):
    zero_cases.case_stage_3_bf16(dist.get_rank(), world)
