"""SCAPE's Triton kernels against the reference, bit for bit, interpreted on the CPU, and what they are compiled to. On a GPU
test_kernels.py runs all cases with them (ZIPSCAPE_TEST_DEVICE=cuda)."""
import importlib
import importlib.util
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from ds_scape.kernels import impl_triton, loader
from ds_scape.optimizer import ranking
from ds_scape.sync.partition import Segment
from zipscape.errors import BuildError
from zipscape.op_builder import triton_device

LIMIT_S = 300              # some seconds on a quiet core


@pytest.mark.parametrize("group", ["worker", "owner", "masks", "select", "ptx", pytest.param("more", marks=pytest.mark.slow)])
def test_bits(group, tmp_path):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, str(Path(__file__).with_name("triton_cases.py")), group]
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "ZIPSCAPE_TEST_DEVICE": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_nvcc_triton_is_the_best_on_a_gpu(monkeypatch, caplog):
    """And where there is no Triton either, the reference; each said once."""
    reasons = {"cuda": "no nvcc", "triton": None}
    monkeypatch.setattr(loader, "load", lambda name: reasons.get(name))
    loader._best.cache_clear()
    try:
        assert [loader._best("cuda") for _ in range(2)] == ["triton"] * 2
        loader._best.cache_clear()
        reasons["triton"] = "not installed"
        assert [loader._best("cuda") for _ in range(2)] == ["reference"] * 2
    finally:
        loader._best.cache_clear()
    assert [("cuda" in r.message, "triton" in r.message) for r in caplog.records] == [(True, False), (True, False), (False, True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu():
    with pytest.raises(BuildError, match="not installed|no device"):
        impl_triton.load()


@pytest.mark.parametrize("package", ["ds_scape", "ds_zipccl"])
def test_it_is_not_there_where_it_cannot_build(package, monkeypatch):
    """Before anything is trained with it: else a job that had run with other kernels would end in its first step."""
    triton = pytest.importorskip("triton")

    def launch():
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton, "jit", lambda kernel: {(1,): launch})
    triton_device.device_type.cache_clear()
    load = importlib.import_module(f"{package}.kernels.impl_triton").load
    with pytest.raises(BuildError, match="Failed to find C compiler"):
        getattr(load, "__wrapped__", load)()


@pytest.mark.parametrize("sizes", [(1,), (512,), (513, 3, 100_000), (7,) * 50])
def test_selection_needs_no_more_memory_than_is_said(sizes):
    """All of it is asked for where the caller says."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    kernels, asked, segments, n = impl_triton.TritonKernels(), [], [], 0
    kernels._run = defaultdict(lambda: lambda *arguments: None)

    def empty(numel, dtype):
        asked.append(numel * dtype.itemsize)
        return torch.empty(numel, dtype=dtype)

    for size in sizes:
        segments.append(Segment(n, n + 2 * size, size))
        n += 2 * size
    kernels.select(torch.ones(n), torch.ones(n), torch.zeros(n, dtype=torch.int16), 5, 3, tuple(segments), None, empty)
    assert 0.9 * ranking.notes_bytes(n, len(sizes)) < sum(asked) <= ranking.notes_bytes(n, len(sizes))
