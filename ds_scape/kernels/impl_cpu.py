"""The CPU kernels: C++ (csrc/scape/cpu_ops.cpp) behind a plain C interface, called through ctypes, without the GIL.

A call uses up to ``torch.get_num_threads()`` threads. The instruction set is chosen when the kernels are loaded, the best one the machine
has; ``SCAPE_CPU_ISA=baseline|avx2|avx512`` takes another one (all give the same bits).
"""
import ctypes
import functools
import os

import torch

from ds_scape.errors import KernelError
from ds_scape.kernels import c_structs as c
from ds_scape.kernels.impl_reference import index_bytes, position_dtype, sum_of_squares
from zipscape.errors import BuildError, describe

ISAS = ("baseline", "avx2", "avx512")          # in the order of the library's numbers
ISA_VARIABLE = "SCAPE_CPU_ISA"
_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES = {
    "enter": (_PTR, _I32, _I32),
    "track_square": (_PTR, _I32, _I32),
    "scatter": (_PTR, _PTR, _I32, _PTR, _I64, _I32, _I32),
    "take_ages": (_PTR, _I32, _PTR, _I32, _I64, _I64, _I32, _PTR, _I32),
    "mark_overdue": (_PTR, _PTR, _I32, _I64, _I32, _I32, _I32),
    "select": (_PTR, _PTR, _I64, _I32, _I32),
    "owner_step": (_PTR, _I32, _I32),
    "dense_step": (_PTR, _I32, _I32),
    "pack_mask": (_PTR, _I64, _PTR, _I64, _I32, _I64, _PTR, _I32),
    "unpack_mask": (_PTR, _I64, _I64, _PTR, _I64, _I32, _PTR, _I64, _PTR, _PTR, _I32, _PTR, _I32),
}
_CORRUPT, _TOO_MANY = 1, 2


@functools.lru_cache(maxsize=256)
def _numbers(values: tuple) -> ctypes.Array:
    """A tuple of integers, or of tuples of them, as int64."""
    flat = [int(x) for row in values for x in (row if isinstance(row, tuple) else (row,))]
    return (_I64 * len(flat))(*flat)


class CpuKernels:
    """A kernel set (ops.py has the contract) from a loaded library and with one instruction set. ``isa``: its name; None takes the best.
    Raises BuildError when the machine does not have it."""

    sum_of_squares = staticmethod(sum_of_squares)           # torch's threads do as well

    def __init__(self, library: ctypes.CDLL, isa: str | None = None):
        self._functions = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"scape_cpu_{name}")
            function.argtypes, function.restype = arguments, _I64
            self._functions[name] = function
        usable = [name for number, name in enumerate(ISAS) if library.scape_cpu_supports(number)]
        self.isa = usable[-1] if isa is None else isa
        if self.isa not in usable:
            raise BuildError(describe("SCAPE's CPU kernels cannot use this instruction set", got=isa,
                                      expected=f"one of {', '.join(usable)} on this machine", todo=f"unset {ISA_VARIABLE}"))
        self._number = ISAS.index(self.isa)

    def _call(self, name: str, *arguments) -> int:
        code = self._functions[name](*arguments)
        if code < 0:
            raise MemoryError(describe(f"SCAPE's {name} could not allocate its working memory"))
        return code

    def _call_with(self, name: str, structure, *arguments) -> None:
        self._call(name, ctypes.byref(structure), *arguments, torch.get_num_threads(), self._number)

    def pack_mask(self, mask, dense, encoding, max_ones):
        numel = mask.numel()
        num_bytes = -(-numel // 8) if encoding == "bits" else index_bytes(numel, max_ones)
        message = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        if self._call("pack_mask", mask.data_ptr(), numel, _numbers(dense), len(dense), encoding == "bits", max_ones, message.data_ptr(),
                      torch.get_num_threads()) == _TOO_MANY:
            raise KernelError(describe("a mask has more ones than its encoding has room for", expected=f"<= {max_ones}"))
        return message

    def unpack_mask(self, message, numel, dense, encoding, sizes, counts):
        dtype = position_dtype(sizes)
        parts = [torch.empty(count, dtype=dtype, device="cpu") for count in counts]
        found = (_I64 * len(sizes))()
        code = self._call("unpack_mask", message.data_ptr(), message.numel(), numel, _numbers(dense), len(dense), encoding == "bits",
                          _numbers(sizes), len(sizes), _numbers(counts), (_I64 * len(parts))(*(p.data_ptr() for p in parts)),
                          dtype.itemsize, found, torch.get_num_threads())
        return parts, [-1] * len(sizes) if code == _CORRUPT else list(found)

    def enter(self, residual, gradient, factor, index, values, first, square, own_start, beta2):
        self._call_with("enter", c.enter(residual, gradient, factor, index, values, first, square, own_start, beta2))

    def track_square(self, square, gradient, factor, beta2):
        self._call_with("track_square", c.enter(square, gradient, factor, None, None, 0, square, 0, beta2))

    def scatter(self, target, index, values):
        self._call("scatter", target.data_ptr(), index.data_ptr(), index.element_size(), values.data_ptr(), index.numel(),
                   target.element_size(), torch.get_num_threads())

    def take_ages(self, last_sync, index, first, step, out):
        self._call("take_ages", *c.ages(last_sync, index, first, step, out), torch.get_num_threads())

    def mark_overdue(self, rank_by, last_sync, step, max_age):
        self._call("mark_overdue", rank_by.data_ptr(), last_sync.data_ptr(), last_sync.element_size(), rank_by.numel(), step, max_age,
                   torch.get_num_threads())

    def select(self, rank_by, square, last_sync, step, max_age, segments, chosen=None, empty=None, hints=None):
        chosen = torch.empty(rank_by.numel(), dtype=torch.bool, device="cpu") if chosen is None else chosen
        structure = c.select(rank_by, square, last_sync, chosen, step, max_age)
        self._call_with("select", structure, _numbers(segments), len(segments))
        return chosen

    def owner_step(self, weight, momentum, last_sync, mean_value, index, step, tables, decay, lr, beta2, eps, catch_up, out):
        self._call_with("owner_step", c.owner(weight, momentum, last_sync, mean_value, index, step, tables, decay, lr, beta2, eps, catch_up,
                                              out))

    def dense_step(self, weight, momentum, gradient, lr, kept, taken, beta2, eps, decay, correction):
        self._call_with("dense_step", c.dense(weight, momentum, gradient, lr, kept, taken, beta2, eps, decay, correction))


def load() -> CpuKernels:
    """The kernels, built at first use. Raises BuildError when there is no compiler or it fails."""
    from zipscape.op_builder.scape import SCAPE_CPU
    return CpuKernels(SCAPE_CPU.load(), os.environ.get(ISA_VARIABLE) or None)
