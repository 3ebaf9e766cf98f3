"""The Triton kernels against the reference's bytes, interpreted on the CPU. On a GPU: benchmarks/gpu_codec.py."""
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds_zipccl.codec.dtypes import TABLE

LIMIT_S = 800              # most of a minute on quiet cores


def run(dtype: str, level: int) -> subprocess.CompletedProcess:
    command = [sys.executable, str(Path(__file__).with_name("triton_cases.py")), dtype, str(level)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def runs(request):
    """By dtype and level, those of this session; as many at a time as there are cores, as each takes one."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    wanted = [item.callspec.params for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as pool:
        yield {(one["dtype"], one["level"]): pool.submit(run, **one) for one in wanted}


@pytest.mark.timeout(2 * LIMIT_S + 100)
@pytest.mark.parametrize("dtype, level", [(row.name, level) for row in TABLE for level in row.levels])
def test_bytes_equal_the_reference(runs, dtype, level):
    done = runs[dtype, level].result()
    assert done.returncode == 0, done.stderr[-3000:]
