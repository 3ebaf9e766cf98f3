"""Choosing kernels where they cannot be built: slower ones, said once and shown in the report; a named set is an error."""
import json
import os
import subprocess
import sys

import pytest
import torch

from ds_zipccl.kernels import impl_cuda, nvrtc
from zipscape.errors import BuildError
from zipscape.op_builder import cuda_arch
from zipscape.op_builder.zipccl import ZIPCCL_CUDA

SCRIPT = """
import json, logging, sys
logging.basicConfig(stream=sys.stderr, format="LOG %(message)s")
from ds_zipccl.errors import KernelError
from ds_zipccl.kernels import loader
best = [loader.resolve("best", "cpu") for _ in range(3)]
try:
    loader.resolve("cpu", "cpu")
    explicit = None
except KernelError as error:
    explicit = str(error)
print(json.dumps({"best": best, "explicit": explicit, "report": loader.report()["cpu"]}))
"""


def run_without_compiler(tmp_path, **variables):
    empty = tmp_path / "bin"
    empty.mkdir()
    env = {key: value for key, value in os.environ.items() if key not in ("CXX", "CC", "CUDA_HOME")}
    env.update(PATH=str(empty), ZIPSCAPE_CACHE=str(tmp_path / "cache"), HOME=str(tmp_path), **variables)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_without_a_compiler(tmp_path):
    """C121, C124: nothing breaks, nothing is silent."""
    result, log = run_without_compiler(tmp_path)
    assert result["best"] == ["reference"] * 3
    assert log.count("'cpu' are not available") == 1, log
    assert not result["report"]["available"] and "compiler" in result["report"]["reason"]
    assert "were asked for" in result["explicit"] and "compiler" in result["explicit"]


def test_with_a_compiler_that_fails(tmp_path):
    """C124: the compiler's own words, once, then the kernels that need none."""
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\ncase \"$*\" in *--version*) echo 1.0; exit;; esac\necho 'fatal error: cannot find <cstdint>'; exit 1\n")
    broken.chmod(0o755)
    result, log = run_without_compiler(tmp_path, ZIPSCAPE_CXX=str(broken))
    assert result["best"] == ["reference"] * 3
    assert log.count("cannot find <cstdint>") == 1, log
    assert "cannot find <cstdint>" in result["report"]["reason"] and "cannot find <cstdint>" in result["explicit"]


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """cuda:0 of capability 9.0 and cuda:1 of 8.0, as far as torch's questions go, and an nvcc that would only be asked its version."""
    for name, answer in {"is_available": True, "current_device": 0, "device_count": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: [(9, 0), (8, 0)][index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: ["GPU X", "GPU Y"][index])
    monkeypatch.setattr(cuda_arch, "visible", lambda: [(8, 0), (9, 0)])
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("ZIPSCAPE_NVCC", str(nvcc))


def test_a_gpu_that_the_list_leaves_out_is_a_clear_error(two_gpus, monkeypatch):
    """C126: at load, or at the device's first use, never "no kernel image" at a launch."""
    monkeypatch.setenv(cuda_arch.VARIABLE, "8.0")
    with pytest.raises(BuildError, match=r"not built for cuda:0 \(GPU X\).*code for 8\.0.*add 9\.0 to TORCH_CUDA_ARCH_LIST"):
        impl_cuda.load.__wrapped__()
    kernels = impl_cuda.CudaKernels(object(), "nvcc", cuda_arch.parse("9.0"))
    with pytest.raises(BuildError, match=r"not built for cuda:1 \(GPU Y\)"):
        kernels._device(1)
    monkeypatch.setenv(cuda_arch.VARIABLE, "9.0;nonsense")
    with pytest.raises(BuildError, match="'9.0;nonsense'"):
        impl_cuda.load.__wrapped__()


def test_without_a_list_every_visible_gpu_is_built_for(two_gpus, monkeypatch):
    """C126"""
    monkeypatch.delenv(cuda_arch.VARIABLE, raising=False)
    monkeypatch.setattr(ZIPCCL_CUDA, "load", lambda: None)
    monkeypatch.setattr(impl_cuda, "CudaCalls", lambda library: "calls")
    kernels = impl_cuda.load.__wrapped__()
    assert kernels.built_by == "nvcc 13.0, code for 8.0, 9.0"


def test_without_nvcc_nvrtc_compiles_and_that_is_said(two_gpus, monkeypatch, caplog):
    """The report, ``built_by``, and one warning with the reason; where there is no NVRTC either, an error that says what to install."""
    monkeypatch.setattr(ZIPCCL_CUDA, "available", lambda: (False, "nvcc was not found"))
    monkeypatch.setattr(nvrtc.NvrtcCalls, "__init__", lambda self, source: setattr(self, "source", source))
    with caplog.at_level("WARNING", "ds_zipccl"):
        kernels = impl_cuda.load.__wrapped__()
    assert kernels.built_by == "NVRTC" and kernels._calls.source == ZIPCCL_CUDA.source_paths()[0]
    assert [record.getMessage() for record in caplog.records] == ["the CUDA kernels were compiled by NVRTC: nvcc was not found"]
    monkeypatch.undo()
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(BuildError, match="NVRTC was not found.*install nvcc, or the wheel nvidia-cuda-nvrtc"):
        nvrtc.compile_cubin(ZIPCCL_CUDA.source_paths()[0], "sm_90")
