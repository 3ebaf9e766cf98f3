"""Shared by all tests: an environment like the Makefile's, and the tests of tests/mpi need mpirun to start them."""

import os
import sys
from pathlib import Path

import pytest

# DeepSpeed looks for ninja on PATH; it is beside the interpreter, also where that was started by its full path.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
if (Path(sys.prefix) / "torch_extensions").is_dir():
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))

# Small tensors: more threads only wait for each other, which took some tests ten times as long on a busy machine. Before torch is imported;
# tests of several threads set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# TCPStore looks up the name of every client: where answers get lost, it asks again after one second and not after five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

_MPI = Path(__file__).parent / "mpi"


def pytest_collection_modifyitems(items):
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return
    skip = pytest.mark.skip(reason="needs mpirun: run by `make test-mpi`")
    for item in items:
        if _MPI in item.path.parents:
            item.add_marker(skip)
