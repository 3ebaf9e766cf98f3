"""nvCOMP's ANS, in its 16-bit float mode, as a rival on a GPU: found, built against, and timed like our kernels where it is installed.

Installed means: the wheel nvidia-nvcomp-cu13 (or -cu12), or a folder with its include/ and lib64/ that NVCOMP_HOME names.
"""
import ctypes
import functools
import importlib.util
import os
import re
from pathlib import Path

import torch

from ds_zipccl.errors import KernelError
from zipscape.errors import BuildError, describe
from zipscape.op_builder.base import NativeLibrary

VARIABLE = "NVCOMP_HOME"
CHUNK_BYTES = 256 << 10                      # the best ratio of the sizes tried, at the same speed (64 KiB: 1.46 in place of 1.50)
_FOLDERS = ("libnvcomp", "nvcomp")           # inside the name space package nvidia
_P, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_ARGUMENTS = {"open": [_P, _P, _SIZE, _SIZE, _P, ctypes.POINTER(_P)], "compress": [_P, _P], "decompress": [_P, _P],
              "compressed_bytes": [_P, _P, ctypes.POINTER(_SIZE)], "close": [_P]}


def find() -> tuple[Path, Path] | None:
    """(folder of headers, library), or None where it is not installed. Raises KernelError if NVCOMP_HOME names no nvCOMP."""
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        found = _in_folder(Path(named))
        if found is None:
            raise KernelError(describe(f"{VARIABLE} names no nvCOMP", got=named, expected="a folder with include/nvcomp/ans.h and "
                                       "lib64/libnvcomp.so.*", todo=f"correct or unset {VARIABLE}"))
        return found
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) / name for place in (spec.submodule_search_locations if spec else ()) for name in _FOLDERS]
    return next(filter(None, map(_in_folder, folders)), None)


def _in_folder(folder: Path) -> tuple[Path, Path] | None:
    headers, libraries = folder / "include", sorted(folder.glob("lib*/libnvcomp.so*"))
    return (headers, libraries[0]) if libraries and (headers / "nvcomp" / "ans.h").is_file() else None


def _version_in(headers: Path) -> str:
    parts = re.findall(r"#define NVCOMP_VER_(?:MAJOR|MINOR|PATCH|BUILD) (\d+)", (headers / "nvcomp" / "version.h").read_text())
    return ".".join(parts)


def library(headers: Path) -> NativeLibrary:
    """The launcher, to be built against these headers; another version of them is another build."""
    return NativeLibrary("nvcomp_ans", ["nvcomp_ans.cu"], compiler="nvcc", csrc=Path(__file__).parent,
                         flags=[f"-I{headers}", f"-DZIPSCAPE_NVCOMP_VERSION={_version_in(headers)}"])


@functools.cache
def _load(headers: Path, nvcomp: Path) -> ctypes.CDLL:
    """Raises BuildError when it cannot be built or nvCOMP cannot be loaded."""
    try:
        ctypes.CDLL(str(nvcomp), mode=ctypes.RTLD_GLOBAL)         # the launcher's open symbols are found there
    except OSError as error:
        raise BuildError(describe("nvCOMP cannot be loaded", got=str(error), where=str(nvcomp))) from None
    handle = library(headers).load()
    for name, arguments in _ARGUMENTS.items():
        function = getattr(handle, f"nvcomp_ans_{name}")
        function.argtypes, function.restype = arguments, None if name == "close" else ctypes.c_int
    return handle


class NvcompAns:
    """Compresses one contiguous CUDA tensor ``x`` [n] of a 2-byte float type, and decompresses it into ``out``; both are queued on the
    current stream. ``wire_bytes``: of the chunks, without the list of their sizes. Raises BuildError, KernelError."""
    device = "cuda"
    advice = f"pip install nvidia-nvcomp-cu13, or name the folder of an unpacked nvCOMP in {VARIABLE}"

    @staticmethod
    def version() -> str | None:
        """None when it is not installed."""
        found = find()
        return _version_in(found[0]) if found else None

    @staticmethod
    def absent() -> str | None:
        """Why it cannot be measured here; builds what it needs."""
        try:
            found = find()
            if found is None:
                return f"not installed ({NvcompAns.advice})"
            _load(*found)
        except (BuildError, KernelError) as error:
            return str(error)
        return None

    @staticmethod
    def refuses(dtype: torch.dtype) -> str | None:
        """Why tensors of ``dtype`` are not measured."""
        return None if dtype.itemsize == 2 else "its 16-bit float mode is measured alone"

    def __init__(self, x: torch.Tensor, out: torch.Tensor):
        self._library, self._tensors, self._handle = _load(*find()), (x, out), _P()
        self._call("open", x.data_ptr(), out.data_ptr(), x.nbytes, CHUNK_BYTES, _stream(), ctypes.byref(self._handle))
        self.compress()
        size = _SIZE()
        self._call("compressed_bytes", self._handle, _stream(), ctypes.byref(size))
        self.wire_bytes = size.value

    def compress(self) -> None:
        self._call("compress", self._handle, _stream())

    def decompress(self) -> None:
        self._call("decompress", self._handle, _stream())

    def close(self) -> None:
        if self._handle:
            torch.cuda.synchronize()
            self._library.nvcomp_ans_close(self._handle)
            self._handle = _P()

    def _call(self, name: str, *arguments) -> None:
        code = getattr(self._library, f"nvcomp_ans_{name}")(*arguments)
        if code:
            raise KernelError(describe(f"nvCOMP's ANS failed: {name}", got=f"code {code} (nvcomp_ans.cu says what it may be)"))


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
