"""Launches of Triton kernels that cost the host little: a kernel is compiled once for the types and the alignment of its arguments, and
then called with addresses and numbers.

Compiled such that every operation rounds on its own: no multiply-add where the source has two operations, denormals kept.
"""
import inspect
import threading

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import ASTSource

#: Options of every kernel.
EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
_POINTER = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64", torch.uint8: "*u8",
            torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}
_NUMBER = {tl.int32: "i32", tl.int64: "i64", tl.float32: "fp32"}
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Launcher:
    """One kernel function, of pointers, annotated numbers and constants, in this order. ``sizes``: numbers that, like addresses, allow wide
    accesses where all of them are multiples of 16."""

    def __init__(self, function, num_warps: int = 4, sizes: tuple[str, ...] = ()):
        self.function, self._options = function, {"num_warps": num_warps, "num_stages": 1, **EXACT}
        parameters = inspect.signature(function.fn).parameters
        self._names = list(parameters)
        self._numbers = {name: _NUMBER[p.annotation] for name, p in parameters.items() if p.annotation in _NUMBER}
        self._sizes = [list(self._numbers).index(name) for name in sizes]
        self._compiled: dict[tuple, object] = {}
        self._lock = threading.Lock()

    def __call__(self, grid: tuple[int, ...], tensors: tuple[torch.Tensor, ...], numbers: tuple = (), constants: tuple = ()) -> None:
        """Queues on the current stream of the tensors' device. ``grid``: one or two numbers of programs."""
        if knobs.runtime.interpret:
            self.function[grid](*tensors, *numbers, *constants, num_warps=self._options["num_warps"])
            return
        index = tensors[0].get_device()
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self(grid, tensors, numbers, constants)
        addresses, ors = [t.data_ptr() for t in tensors], 0
        for number in (*addresses, *(numbers[i] for i in self._sizes)):
            ors |= number
        key = index, ors % 16 == 0, constants, *[t.dtype for t in tensors]
        compiled = self._compiled.get(key)
        if compiled is None:
            with self._lock:
                compiled = self._compiled[key] = self.compile([t.dtype for t in tensors], constants, ors % 16 == 0)
        compiled[(*grid, 1, 1)[:3]](*addresses, *numbers, *constants, stream=_current_stream(index))

    def compile(self, dtypes: list[torch.dtype], constants: tuple, aligned: bool, target=None):
        """For these tensors and constants. target: a triton GPUTarget, for a GPU that need not be here."""
        num_tensors, num_numbers = len(dtypes), len(self._numbers)
        kinds = [*(_POINTER[dtype] for dtype in dtypes), *self._numbers.values(), *["constexpr"] * len(constants)]
        wide = [*range(num_tensors), *(num_tensors + i for i in self._sizes)] if aligned else []
        source = ASTSource(self.function, dict(zip(self._names, kinds, strict=True)),
                           dict(zip(self._names[num_tensors + num_numbers:], constants, strict=True)),
                           {(i,): [["tt.divisibility", 16]] for i in wide})
        return triton.compile(source, target=target, options=self._options)
