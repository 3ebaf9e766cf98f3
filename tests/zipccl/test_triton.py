"""The Triton kernels against the reference's bytes, interpreted on the CPU. On a GPU: benchmarks/gpu_codec.py."""
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ds_zipccl.codec.dtypes import TABLE


@pytest.mark.parametrize("dtype, level", [(row.name, level) for row in TABLE for level in row.levels])
def test_bytes_equal_the_reference(dtype, level):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, str(Path(__file__).with_name("triton_cases.py")), dtype, str(level)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
