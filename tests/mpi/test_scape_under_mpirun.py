"""SCAPE under ``mpirun -n 2`` (make test-mpi): the settings are agreed on without a launcher's store, training follows the simulation."""
import torch.distributed as dist

from tests.scape import refusal_cases, zero_cases


def test_follows_the_simulation(world):
    zero_cases.case_fp32(dist.get_rank(), world)


def test_wrong_settings_are_an_error_on_all_ranks(world):
    refusal_cases.refused(zero_cases.settings(3), "stage = 3")
