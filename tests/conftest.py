"""Shared by all tests: the tests of tests/mpi need mpirun to start them."""

import os
from pathlib import Path

import pytest

_MPI = Path(__file__).parent / "mpi"


def pytest_collection_modifyitems(items):
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return
    skip = pytest.mark.skip(reason="needs mpirun: run by `make test-mpi`")
    for item in items:
        if _MPI in item.path.parents:
            item.add_marker(skip)
