"""The C interface of csrc/zipccl/symmetric.cu, through ctypes: addresses, offsets and sizes in, an error code out. Knows no torch group."""
import ctypes
import functools

from ds_zipccl.errors import KernelError
from ds_zipccl.kernels import python_calls
from zipscape.errors import describe
from zipscape.op_builder.zipccl import ZIPCCL_SYMMETRIC

_P, _I = ctypes.c_void_p, ctypes.c_int64


class Part(ctypes.Structure):
    """Elements of each row from byte ``start`` on, as one message, and the region that it takes (bytes; symmetric.cu has the meaning).
    ``geometry``: packed_geometry's bytes, which the caller keeps."""
    _fields_ = [("geometry", ctypes.c_char_p), *((name, _I) for name in ("start", "raw_bytes", "frame_bytes", "slot_bytes", "num_slots",
                                                                         "frame_stride", "num_frames", "as_it_is"))]


class Place(ctypes.Structure):
    """Where a part's row is, and where all ranks' rows come: addresses of device memory, a stride in bytes."""
    _fields_ = [("row", _P), ("out", _P), ("out_stride", _I)]


class Exchange(ctypes.Structure):
    """A call (symmetric.cu has the meaning). Addresses are of device memory, ``stream`` is a cudaStream_t; ``num_senders`` more
    than 0: kernels carry frames, unless a part has too many tiles."""
    _fields_ = [("rows", _P), ("row_stride", _I), ("out", _P), ("out_stride", _I), ("own", _P), ("copy_to", _P), ("copy_from", _P),
                ("copy_bytes", _I), ("num_lanes", _I), ("num_parts", _I), ("parts", ctypes.POINTER(Part)), ("made", ctypes.POINTER(_P)),
                ("places", ctypes.POINTER(Place)), ("status", _P), ("workspace", _P), ("stream", _P),
                ("num_senders", _I), ("num_receivers", _I), ("num_groups", _I)]


class Repeat(ctypes.Structure):
    """Calls like an earlier one (exchange.h has the meaning): for ``SymmetricCalls.repeat``."""
    _fields_ = [("engine", _P), ("exchange", Exchange), ("own", _I), ("copy_to", _I), ("copy_from", _I), ("device", _I)]


class Regather(ctypes.Structure):
    """Gathers of rows like an earlier one (exchange.h has the meaning): for ``SymmetricCalls.gather``."""
    _fields_ = [("engine", _P), ("exchange", Exchange), ("which", ctypes.POINTER(_I)), ("device", _I)]


NOT_SO = -1000              # exchange.h's kNotSo
MAX_OUTPUTS = 510           # symmetric.cu's
_ARGUMENTS = {
    "open": [_I, _I, ctypes.POINTER(_P), _I, _P, _P, _P, _I, _P, ctypes.POINTER(_P)],
    "run": [_P, ctypes.POINTER(Exchange)],
    "start": [_P, ctypes.POINTER(Exchange)],
    "step": [_P],
    "join": [_P, _I, _P],
    "repeat": [_P, _P, _P, _I],
    "gather": [_P, _P, _I],
    "is_done": [_P, _I],
}


@functools.cache
def load() -> "SymmetricCalls":
    """Builds at first use, with nvcc; there is no NVRTC form. Raises BuildError."""
    return SymmetricCalls(ZIPCCL_SYMMETRIC.load())


class SymmetricCalls:
    """The launchers of one loaded library."""

    def __init__(self, library: ctypes.CDLL):
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, f"zipccl_symmetric_{name}")
            function.argtypes, function.restype = arguments, ctypes.c_int
            setattr(self, f"_{name}", function)
        for name, result, *arguments in (("close", None, _P), ("take", None, _P, _I, _P), ("claimed", _I, _P, _P)):
            function = getattr(library, f"zipccl_symmetric_{name}")
            function.argtypes, function.restype = arguments, result
            setattr(self, f"_{name}", function)
        self.words_bytes = library.zipccl_symmetric_words_bytes            # of so many ranks
        self.words_bytes.argtypes, self.words_bytes.restype = [_I], _I
        for name in ("scratch_bytes", "overflows_bytes", "max_ranks"):
            function = getattr(library, f"zipccl_symmetric_{name}")
            function.argtypes, function.restype = [], _I
            setattr(self, name, function())
        self.library = library
        #: ``repeat(address of a Repeat, x, out, num_receivers)``: queues the call, 0, NOT_SO or what ``refused`` raises;
        #: ``join(handle, call, stream)``: ``Engine.join``; ``gather(address of a Regather, num_receivers, output, ...)``: as ``repeat``, of
        #: as many outputs as it has, MAX_OUTPUTS at most. They take ints.
        self.repeat, self.join, self.gather = python_calls.functions(library, "zipccl_symmetric", "repeat", "join", "gather") or (
            self._repeat, self._join, self._gather_of_few)

    def _gather_of_few(self, address: int, num_receivers: int, *outs: int) -> int:
        return self._gather(address, (ctypes.c_uint64 * len(outs))(*outs), num_receivers)

    def open(self, rank: int, memory: list[int], num_bytes: int, scratch: int, overflows: int, errors: int, timeout_ns: int,
             encode) -> "Engine":
        """``memory``: addresses of all ranks' symmetric memory, of ``num_bytes``, as this rank sees them; zeros in its first
        ``words_bytes(num_ranks)``. ``scratch``: ``scratch_bytes`` zeros of this rank's. ``overflows``: ``overflows_bytes`` zeros of host
        memory that the GPU can write, u32s whose sum is how many frames were sent raw. ``errors``: the word for what decode finds.
        ``encode``: the C function zipccl_cuda_encode."""
        handle = _P()
        addresses = (_P * len(memory))(*memory)
        _check(self._open(rank, len(memory), addresses, num_bytes, scratch, overflows, errors, timeout_ns,
                          ctypes.cast(encode, _P), ctypes.byref(handle)), "open")
        return Engine(self, handle)


class Engine:
    """One rank's end. Raises KernelError when CUDA refuses a launch."""

    def __init__(self, calls: SymmetricCalls, handle: ctypes.c_void_p):
        self._calls, self._handle = calls, handle
        self.repeat, self.gather, self._join, self.address = calls.repeat, calls.gather, calls.join, handle.value

    def run(self, exchange: Exchange) -> None:
        """Queues a call. The same calls in the same order on all ranks; calls are counted from 1."""
        _check(self._calls._run(self._handle, exchange), "call")

    def start(self, exchange: Exchange) -> None:
        """The same, queued by ``step``: for ranks that take turns in one process."""
        _check(self._calls._start(self._handle, exchange), "call")

    def step(self) -> bool:
        """False after the last one."""
        code = self._calls._step(self._handle)
        _check(min(code, 0), "call")
        return code == 1

    def join(self, call: int, stream: int) -> None:
        """``stream`` waits for the end of call ``call``."""
        code = self._join(self.address, call, stream)
        if code:
            refused("join", code)

    def is_done(self, call: int) -> bool:
        code = self._calls._is_done(self._handle, call)
        _check(min(code, 0), "is_done")
        return code == 1

    def take(self, num_bytes: int) -> tuple[int, int, int]:
        """Takes a region as a call would: (message, offset, last message that had a part of the region; 0: none had)."""
        taken = (_I * 3)()
        self._calls._take(self._handle, num_bytes, taken)
        return tuple(taken)

    def claimed(self, stream: int) -> int:
        """The last message that ``stream`` has waited for all ranks to have read."""
        return self._calls._claimed(self._handle, stream)

    def close(self) -> None:
        """With nothing in flight."""
        handle, self._handle, self.address = self._handle, None, 0
        if handle is not None:
            self._calls._close(handle)


def _check(code: int, what: str) -> None:
    if code:
        refused(what, code)


def refused(what: str, code: int) -> None:
    raise KernelError(describe(f"CUDA refused the one-sided transport's {what}", got=f"cudaError {abs(code)}",
                               todo="a peer that ended, or waited longer than the group's timeout, looks like this too: see its log"))
