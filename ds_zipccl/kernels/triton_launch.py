"""Launches of Triton kernels that cost the host little: a kernel is compiled once a device, dtype and size of program, and then called with
addresses and numbers. Triton's own way would look at every argument's type, value and alignment again at every call.
"""
import inspect
import threading

import torch
import triton
import triton.language as tl
from triton import knobs

from ds_zipccl.kernels.triton_words import PTX

_VIEW = {2: torch.int16, 4: torch.int32}
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def kernel(function):
    """A launchable kernel that is compiled once for its constants, not again for other sizes, offsets and alignments; only ``frames`` is
    known to be aligned to 16 bytes."""
    parameters = inspect.signature(function).parameters.items()
    return triton.jit(function, do_not_specialize=[name for name, p in parameters if name != "frames" and p.annotation is not tl.constexpr])


class Launcher:
    """One kernel function of ``kernel``. Its arguments are pointers, numbers, and the constants L, DT and LEVEL, in this order."""

    def __init__(self, function, num_warps: int, max_registers: int | None = None, level: int = 1):
        self._function, self._num_warps, self._level = function, num_warps, level
        self._options = {"num_warps": num_warps}
        if max_registers:
            self._options["maxnreg"] = max_registers
        if PTX.value >= 90:
            self._options["launch_pdl"] = True             # see begin_in_turn
        self._compiled: dict[tuple[int, int], object] = {}
        self._lock = threading.Lock()

    def programs(self, num_tiles: int) -> int:
        """The number of programs of num_warps blocks for so many tiles, at least 1."""
        return max(num_tiles * 32 // self._num_warps, 1)

    def __call__(self, grid: tuple[int, int], index: int, dtype_code: int, tensors: tuple, numbers: tuple) -> None:
        """``index``: the current device, -1: a CPU, where the interpreter runs. ``tensors``: floating-point ones are passed as bits."""
        constants = (32 * self._num_warps, dtype_code, self._level)
        if knobs.runtime.interpret:
            pointers = (t.view(_VIEW[t.element_size()]) if t.is_floating_point() else t for t in tensors)
            self._function[grid](*pointers, *numbers, *constants, num_warps=self._num_warps)
            return
        compiled = self._compiled.get((index, dtype_code))
        if compiled is None:
            with self._lock:
                compiled = self._compile(index, dtype_code, tensors, numbers, constants)
        compiled[grid[0], grid[1], 1](*[t.data_ptr() for t in tensors], *numbers, *constants, stream=_current_stream(index))

    def _compile(self, index: int, dtype_code: int, tensors: tuple, numbers: tuple, constants: tuple):
        dtypes = (_VIEW[t.element_size()] if t.is_floating_point() else t.dtype for t in tensors)
        compiled = self._function.warmup(*dtypes, *numbers, *constants, grid=(1,), **self._options)
        self._compiled[index, dtype_code] = compiled
        return compiled
