"""The CPU kernels: C++ (csrc/zipccl/cpu_codec.cpp) behind a plain C interface, called through ctypes, without the GIL.

A call uses up to ``torch.get_num_threads()`` threads: the OpenMP threads that torch itself uses, or, where it has none and in
a forked process, threads that end with the call. The instruction set is chosen when the kernels are loaded, the best one
the machine has; ``ZIPCCL_CPU_ISA=scalar|avx2|avx512`` takes another one (all give the same bytes).
"""
import ctypes
import functools
import os

import torch

from ds_zipccl.errors import KernelError
from ds_zipccl.kernels import ops
from ds_zipccl.kernels.frame_errors import frame_error
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import BuildError, describe

_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES = {
    "zipccl_cpu_encode": (_PTR, ctypes.c_char_p, _PTR, _I64, _PTR, _I64, _I64, _I64, _PTR, _I64, _I32, _I32),
    "zipccl_cpu_decode": (_PTR, ctypes.c_char_p, _PTR, _I64, _PTR, _I64, _I64, _I64, _PTR, _I32, _I32),
    "zipccl_cpu_decode_reduce": (_PTR, ctypes.c_char_p, _PTR, _I64, _PTR, _I64, _PTR, _I64, _PTR, _I32, _I32),
}
ISAS = ("scalar", "avx2", "avx512")          # in the order of the library's numbers
ISA_VARIABLE = "ZIPCCL_CPU_ISA"


@functools.lru_cache(maxsize=1024)
def _c_geometry(g: Geometry) -> ctypes.Array:
    return (_I64 * len(g.ints))(*g.ints)


class CpuKernels:
    """The three functions of kernels/ops.py on host tensors, from a loaded library and with one instruction set.

    ``isa``: its name; None takes the best one. ``uncached_from``: ``encode`` writes past the caches if it touches more bytes; -1: the
    default, 16 MiB. Raises BuildError when the machine does not have the instruction set.
    """
    levels = (1, 2)

    def __init__(self, library: ctypes.CDLL, isa: str | None = None, uncached_from: int = -1):
        self._uncached_from = uncached_from
        self._functions = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _I64
            self._functions[name] = function
        usable = [name for number, name in enumerate(ISAS) if library.zipccl_cpu_supports(number)]
        self.isa = usable[-1] if isa is None else isa
        if self.isa not in usable:
            raise BuildError(describe("the CPU kernels cannot use this instruction set", got=isa,
                                      expected=f"one of {', '.join(usable)} on this machine",
                                      todo=f"unset {ISA_VARIABLE}"))

    def encode(self, x: torch.Tensor, frames: torch.Tensor, status: torch.Tensor, g: Geometry, skip: int = -1) -> None:
        """See kernels/ops.py."""
        self._call("zipccl_cpu_encode", g, x.data_ptr(), x.stride(0) * g.itemsize, frames.data_ptr(), frames.stride(0),
                   x.shape[0], skip, status.data_ptr(), self._uncached_from)

    def decode(self, frames: torch.Tensor, out: torch.Tensor, g: Geometry, skip: int = -1) -> None:
        """See kernels/ops.py. After a FrameError the contents of ``out`` are unspecified."""
        failure = (_I64 * 3)()
        kind = self._call("zipccl_cpu_decode", g, frames.data_ptr(), frames.stride(0), out.data_ptr(),
                          out.stride(0) * g.itemsize, out.shape[0], skip, failure)
        self._raise_if(kind, failure, frames, g)

    def decode_reduce(self, frames: torch.Tensor, own: torch.Tensor, own_index: int, out: torch.Tensor,
                      g: Geometry) -> None:
        """See kernels/ops.py. After a FrameError the contents of ``out`` are unspecified."""
        failure = (_I64 * 3)()
        kind = self._call("zipccl_cpu_decode_reduce", g, frames.data_ptr(), frames.stride(0), own.data_ptr(), own_index,
                          out.data_ptr(), frames.shape[0], failure)
        self._raise_if(kind, failure, frames, g)

    def bind_encode(self, frames: torch.Tensor, status: torch.Tensor, g: Geometry, skip: int, offset: int):
        """See kernels/ops.py; the bound functions take addresses alone."""
        function, geometry, first = self._functions["zipccl_cpu_encode"], _c_geometry(g), offset * g.itemsize
        rest = (g.numel * g.itemsize, frames.data_ptr(), frames.stride(0), frames.shape[0], skip, status.data_ptr(), self._uncached_from)
        isa, needed, num_threads = ISAS.index(self.isa), offset + frames.shape[0] * g.numel, torch.get_num_threads

        def encode(x: torch.Tensor, buffers=(frames, status)) -> None:          # keeps the buffers
            ops.enough(x, needed)
            self._check(function(geometry, g.header, x.data_ptr() + first, *rest, num_threads(), isa), "zipccl_cpu_encode", g)

        return encode

    def bind_decode(self, frames: torch.Tensor, g: Geometry, skip: int, offset: int):
        function, geometry, first = self._functions["zipccl_cpu_decode"], _c_geometry(g), offset * g.itemsize
        place, rest = (frames.data_ptr(), frames.stride(0)), (g.numel * g.itemsize, frames.shape[0], skip)
        isa, needed, num_threads = ISAS.index(self.isa), offset + frames.shape[0] * g.numel, torch.get_num_threads

        def decode(out: torch.Tensor) -> None:
            ops.enough(out, needed)
            failure = (_I64 * 3)()
            kind = function(geometry, g.header, *place, out.data_ptr() + first, *rest, failure, num_threads(), isa)
            self._raise_if(self._check(kind, "zipccl_cpu_decode", g), failure, frames, g)

        return decode

    def bind_decode_reduce(self, frames: torch.Tensor, own_index: int, g: Geometry, offset: int):
        function, geometry, first = self._functions["zipccl_cpu_decode_reduce"], _c_geometry(g), offset * g.itemsize
        place, num_rows = (frames.data_ptr(), frames.stride(0)), frames.shape[0]
        isa, needed, num_threads = ISAS.index(self.isa), offset + g.numel, torch.get_num_threads

        def decode_reduce(x: torch.Tensor, out: torch.Tensor) -> None:
            ops.enough(x, needed)
            ops.enough(out, g.numel)
            failure = (_I64 * 3)()
            kind = function(geometry, g.header, *place, x.data_ptr() + first, own_index, out.data_ptr(), num_rows, failure,
                            num_threads(), isa)
            self._raise_if(self._check(kind, "zipccl_cpu_decode_reduce", g), failure, frames, g)

        return decode_reduce

    def _call(self, name: str, g: Geometry, *arguments) -> int:
        return self._check(self._functions[name](_c_geometry(g), g.header, *arguments, torch.get_num_threads(), ISAS.index(self.isa)),
                           name, g)

    @staticmethod
    def _check(result: int, name: str, g: Geometry) -> int:
        if result == -1:
            raise MemoryError(describe(f"{name} could not allocate its working memory"))
        if result < 0:
            raise KernelError(describe(f"{name} does not know this frame layout", got=g.ints))
        return result

    @staticmethod
    def _raise_if(kind: int, failure, frames: torch.Tensor, g: Geometry) -> None:
        if kind:
            row, tile, spill_end = failure
            raise frame_error(kind, bytes(frames[row, :len(g.header)].tolist()), tile, spill_end, g)


def load() -> CpuKernels:
    """The kernels, built at first use. Raises BuildError when there is no compiler or it fails."""
    from zipscape.op_builder.zipccl import ZIPCCL_CPU
    return CpuKernels(ZIPCCL_CPU.load(), os.environ.get(ISA_VARIABLE) or None)


def isa() -> str:
    """The instruction set that ``load`` takes on this machine. Raises BuildError like it."""
    return load().isa
