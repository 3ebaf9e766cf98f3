"""All implementations, all dtypes and levels: the same bytes, and each reads the others' (parity_cases.py)."""
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ds_zipccl.codec.dtypes import TABLE
from ds_zipccl.kernels import impl_cpu
from tests.helpers import emulated


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return emulated.compile_for_host(tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("dtype, level", [(row.name, level) for row in TABLE for level in row.levels])
def test_every_implementation_reads_every_other(library, dtype, level):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, str(Path(__file__).with_name("parity_cases.py")), dtype, str(level), str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("CPU, ") == len(impl_cpu.ISAS)                 # or the reason why it is not here
