"""The CUDA kernels on a CPU: the source compiled for the host, one fiber a thread (csrc/common/emulate.h), as a kernel set."""
import ctypes
import subprocess
from pathlib import Path

import torch

from ds_zipccl.errors import FrameError
from ds_zipccl.kernels.cuda_calls import CudaCalls, workspace_words
from zipscape.op_builder import toolchain
from zipscape.op_builder.base import csrc_dir
from zipscape.op_builder.zipccl import ZIPCCL_CUDA

_compiled: dict[str, Path] = {}


def compile_for_host(folder: Path, library=ZIPCCL_CUDA) -> Path:
    """The library: in ``folder``, or in that of who asked for it earlier in the session, as compiling takes seconds."""
    if library.name in _compiled:
        return _compiled[library.name]
    target = folder / f"{library.name}.so"
    subprocess.run([*toolchain.find("c++"), "-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off",
                    "-fno-strict-aliasing", "-DZIPSCAPE_EMULATE", f"-I{csrc_dir()}", str(library.source_paths()[0]),
                    "-o", str(target)], check=True, timeout=300)
    return _compiled.setdefault(library.name, target)


class EmulatedCuda:
    """See kernels/ops.py. Frames must be aligned to 16 bytes, as their stride."""

    def __init__(self, library: Path):
        self._calls = CudaCalls(ctypes.CDLL(str(library)))
        self._errors = torch.zeros(1, dtype=torch.int32)

    def encode(self, x, frames, status, g, skip=-1):
        workspace = torch.zeros(workspace_words(x.shape[0], g), dtype=torch.int64)
        self._calls.encode(g, x.data_ptr(), x.stride(0) * g.itemsize, frames.data_ptr(), frames.stride(0), x.shape[0], skip,
                           status.data_ptr(), workspace.data_ptr(), 0)

    def decode(self, frames, out, g, skip=-1):
        self._calls.decode(g, frames.data_ptr(), frames.stride(0), out.data_ptr(), out.stride(0) * g.itemsize, out.shape[0], skip,
                           self._errors.data_ptr(), 0)

    def decode_reduce(self, frames, own, own_index, out, g):
        self._calls.decode_reduce(g, frames.data_ptr(), frames.stride(0), frames.shape[0], own.data_ptr(), own_index, out.data_ptr(),
                                  self._errors.data_ptr(), 0)

    def raise_on_error(self, device):
        word = int(self._errors)
        self._errors.zero_()
        if word:
            raise FrameError(f"corrupt frame decoded: kinds {word:#x}")
