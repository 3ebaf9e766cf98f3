"""The collectives' cases under ``mpirun -n 2`` (make test-mpi): the same as with ranks that torch spawned."""
import importlib
import os

import pytest
import torch.distributed as dist

from tests.zipccl.test_collectives import MODULES, cases_of

WORLD_SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 2))
RUNS = [(module, case) for module in MODULES for case in cases_of(module, WORLD_SIZE)]


@pytest.mark.parametrize("module, case", RUNS, ids=[case for _, case in RUNS])
def test_collectives(world, module, case):
    getattr(importlib.import_module(module), case)(dist.get_rank(), world)
