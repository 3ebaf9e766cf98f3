"""The CUDA kernels (csrc/scape/kernels.cu) as a kernel set: queued on the current stream; nothing waits but who reads unpack_mask's counts.

A library that was built ahead of time is taken where it suits the GPU and torch, else nvcc compiles one.
"""
import ctypes
import functools

import torch

from ds_scape.errors import KernelError
from ds_scape.kernels import c_structs as c
from ds_scape.kernels import cuda_plans as plans
from ds_scape.kernels.impl_reference import BLOCK, LANES, empty_beside, index_bytes, position_dtype
from zipscape.errors import BuildError, describe

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES = {
    "enter": (_P,), "track_square": (_P,), "owner_step": (_P,), "dense_step": (_P,),
    "scatter": (_P, _P, _I32, _P, _I64, _I32),
    "take_ages": (_P, _I32, _P, _I32, _I64, _I64, _I32, _P), "mark_overdue": (_P, _P, _I32, _I64, _I32, _I32),
    "select": (_P, _P, _P, _I64, _P, _I32, _P, _I64, _I32),
    "sum_of_squares": (_P, _I64, _I32, _P),
    "words_of_mask": (_P, _I64, _P, _P, _I64),
    "indices_of_words": (_P, _P, _I64, _I64, _P, _P),
    "words_of_indices": (_P, _I64, _I64, _P, _P),
    "positions": (_P, _P, _I64, _P, _P, _I64, _P, _P, _I64, _P, _I32),
}
#: CTAs that a multiprocessor has at once in the passes over everything.
CTAS_PER_MULTIPROCESSOR = 2
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class CudaKernels:
    """A kernel set (ops.py has the contract) over a loaded library. arches: what it was compiled for, checked at a device's first use;
    none: not checked. emulated: the library is one for the host (csrc/common/emulate.h), for tests, with so many CTAs at once."""

    def __init__(self, library: ctypes.CDLL, built_by: str, arches: tuple = (), emulated: int = 0):
        self.built_by, self._arches, self._emulated = built_by, arches, emulated
        self._ctas: dict[int, int] = {}
        self._functions = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"scape_cuda_{name}")
            function.argtypes, function.restype = (*arguments, _P), ctypes.c_int
            self._functions[name] = function

    def _call(self, name: str, device: torch.device, *arguments) -> None:
        """Queues on ``device``'s current stream."""
        if self._emulated:
            code = self._functions[name](*arguments, None)
        elif device.index == torch.cuda.current_device():
            code = self._functions[name](*arguments, _current_stream(device.index))
        else:
            with torch.cuda.device(device):
                code = self._functions[name](*arguments, _current_stream(device.index))
        if code:
            raise KernelError(describe(f"CUDA refused to launch SCAPE's {name}", got=f"cudaError {code}", where=str(device),
                                       todo="error 209 or 222 means the library was built for another GPU"))

    def _ctas_of(self, device: torch.device) -> int:
        index = -1 if self._emulated else device.index
        if index not in self._ctas:
            if self._emulated:
                self._ctas[index] = self._emulated
            else:
                _check_arches(self._arches, index)
                self._ctas[index] = torch.cuda.get_device_properties(index).multi_processor_count * CTAS_PER_MULTIPROCESSOR
        return self._ctas[index]

    # --- masks --------------------------------------------------------------------------------------------------------------------------
    def pack_mask(self, mask, dense, encoding, max_ones):
        device, numel = mask.device, mask.numel()
        words = torch.empty(-(-numel // BLOCK) * (BLOCK // 32), dtype=torch.int32, device=device)
        without = plans.ranges(dense, device)
        self._call("words_of_mask", device, mask.data_ptr(), numel, words.data_ptr(), without.data_ptr(), len(without))
        if encoding == "bits":
            return words.view(torch.uint8)[:-(-numel // 8)]
        blocks = plans.positions_plan((numel,), device).runs
        before = torch.empty(len(blocks) + 1, dtype=torch.int64, device=device)
        message = torch.zeros(index_bytes(numel, max_ones), dtype=torch.uint8, device=device)
        self._call("indices_of_words", device, words.data_ptr(), blocks.data_ptr(), len(blocks), max_ones, before.data_ptr(),
                   message.data_ptr())
        return message

    def unpack_mask(self, message, numel, dense, encoding, sizes, counts):
        device, num_blocks = message.device, -(-numel // BLOCK)
        words = torch.empty(num_blocks * (BLOCK // 32), dtype=torch.int32, device=device)
        sums = torch.zeros(num_blocks + 1, dtype=torch.int64, device=device)
        if encoding == "bits":
            words.view(torch.uint8)[:message.numel()].copy_(message)
        else:
            message = message if message.data_ptr() % 2 == 0 else message.clone()
            room = (message.numel() - 4 * num_blocks) // 2
            self._call("words_of_indices", device, message.data_ptr(), num_blocks, room, sums.data_ptr(), words.data_ptr())
        within, plan, total = plans.ranges(dense, device), plans.positions_plan(tuple(sizes), device), sum(counts)
        ones = torch.empty(len(plan.runs), dtype=torch.int32, device=device)
        before = torch.zeros(len(plan.runs) + 1, dtype=torch.int64, device=device)
        positions = torch.empty(total, dtype=position_dtype(sizes), device=device)
        self._call("positions", device, words.data_ptr(), within.data_ptr(), len(within), plan.runs.data_ptr(), plan.bases.data_ptr(),
                   len(plan.runs), ones.data_ptr(), before.data_ptr(), total, positions.data_ptr(), positions.element_size())
        return list(positions.split(counts)), plans.Ones(before, plan, sums[-1:])

    # --- a worker's residual, the owner's steps -----------------------------------------------------------------------------------------
    def enter(self, residual, gradient, factor, index, values, first, square, own_start, beta2):
        starts = None
        if gradient is not None and index is not None and index.numel():
            starts = torch.empty(-(-residual.numel() // plans.ENTER_TILE) + 1, dtype=torch.int64, device=residual.device)
        structure = c.enter(residual, gradient, factor, index, values, first, square, own_start, beta2, starts)
        self._call("enter", residual.device, ctypes.byref(structure))

    def track_square(self, square, gradient, factor, beta2):
        structure = c.enter(square, gradient, factor, None, None, 0, square, 0, beta2)
        self._call("track_square", square.device, ctypes.byref(structure))

    def scatter(self, target, index, values):
        self._call("scatter", target.device, target.data_ptr(), index.data_ptr(), index.element_size(), values.data_ptr(), index.numel(),
                   target.element_size())

    def take_ages(self, last_sync, index, first, step, out):
        self._call("take_ages", out.device, *c.ages(last_sync, index, first, step, out))

    def mark_overdue(self, rank_by, last_sync, step, max_age):
        self._call("mark_overdue", rank_by.device, rank_by.data_ptr(), last_sync.data_ptr(), last_sync.element_size(), rank_by.numel(),
                   step, max_age)

    def owner_step(self, weight, momentum, last_sync, mean_value, index, step, tables, decay, lr, beta2, eps, catch_up, out):
        structure = c.owner(weight, momentum, last_sync, mean_value, index, step, tables, decay, lr, beta2, eps, catch_up, out)
        self._call("owner_step", weight.device, ctypes.byref(structure))

    def dense_step(self, weight, momentum, gradient, lr, kept, taken, beta2, eps, decay, correction):
        structure = c.dense(weight, momentum, gradient, lr, kept, taken, beta2, eps, decay, correction)
        self._call("dense_step", weight.device, ctypes.byref(structure))

    def sum_of_squares(self, tensor):
        sums = torch.empty(LANES, dtype=torch.float64, device=tensor.device)
        self._call("sum_of_squares", tensor.device, tensor.data_ptr(), tensor.numel(), c.DTYPE[tensor.dtype], sums.data_ptr())
        return sums[:1].clone()

    # --- the next mask ------------------------------------------------------------------------------------------------------------------
    def select(self, rank_by, square, last_sync, step, max_age, segments, chosen=None, empty=None, hints=None):
        device, empty = rank_by.device, empty or empty_beside(rank_by)
        plan = plans.select_plan(segments, rank_by.numel(), device)
        num_tiles, num_searches, num_groups = len(plan.search_of_tile), len(plan.searches), len(plan.groups)
        chosen = torch.empty(rank_by.numel(), dtype=torch.bool, device=device) if chosen is None else chosen
        hints = hints if plan.is_hinted else None
        has_hints = hints is not None and hints.get("plan") is plan
        if hints is not None and not has_hints:
            hints.update(plan=plan, keys=torch.empty(2 * num_searches, dtype=torch.int32, device=device))
        keys = hints["keys"].data_ptr() if hints is not None else None
        sizes = (2 * plans.SEARCH_WORDS * num_searches, num_searches * plans.HISTOGRAM, plans.MAX_NOTES * num_tiles, num_tiles, num_tiles,
                 num_groups)
        parts = empty(sum(sizes), torch.int32).split(sizes)         # what is read by fours is the first
        scratch = c.Scratch(*(t.data_ptr() for t in (plan.search_of_tile, plan.groups, *parts)), num_tiles, num_groups)
        structure = c.select(rank_by, square, last_sync, chosen, step, max_age)
        self._call("select", device, ctypes.byref(structure), ctypes.byref(scratch), plan.searches.data_ptr(), num_searches, keys,
                   has_hints, plan.fills.data_ptr(), len(plan.fills), self._ctas_of(device))
        return chosen


def _check_arches(arches: tuple, index: int) -> None:
    if arches:
        from zipscape.op_builder import cuda_arch
        cuda_arch.check(arches, torch.cuda.get_device_capability(index), f"cuda:{index} ({torch.cuda.get_device_name(index)})")


@functools.cache
def load() -> CudaKernels:
    """Builds at first use. Raises BuildError when there is no usable GPU or nvcc, or when TORCH_CUDA_ARCH_LIST leaves this GPU out."""
    from zipscape.op_builder.scape import SCAPE_CUDA
    if not torch.cuda.is_available():
        raise BuildError(describe("there is no CUDA device", got=f"torch {torch.__version__} sees none"))
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise BuildError(describe("SCAPE's CUDA kernels need compute capability 8.0 or newer", got=".".join(map(str, capability))))
    _check_arches(SCAPE_CUDA.arches(), torch.cuda.current_device())           # before a build that would be in vain
    library, state = SCAPE_CUDA.load(), SCAPE_CUDA.state()
    how = "prebuilt by " if state["installed"] == "prebuilt" else ""
    return CudaKernels(library, f"{how}{state['compiler']}, code for {state['arches']}", SCAPE_CUDA.arches())
