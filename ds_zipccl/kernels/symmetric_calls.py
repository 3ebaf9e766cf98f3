"""The C interface of csrc/zipccl/symmetric.cu, through ctypes: addresses, offsets and sizes in, an error code out. Knows no torch group."""
import ctypes
import functools

from ds_zipccl.errors import KernelError
from ds_zipccl.kernels.cuda_calls import packed_geometry
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import describe
from zipscape.op_builder.zipccl import ZIPCCL_SYMMETRIC

_P, _I = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "open": [_I, _I, ctypes.POINTER(_P), _P, _P, _I, ctypes.POINTER(_P)],
    "begin": [_P, _P],
    "claim": [_P, _I, _P],
    "send": [_P, _I, _P, _I, _I, _P, _I, _I, _I, _I, _I, _I, _P],
    "receive": [_P, _P, _I, _I, _I, _I, _I, _P, _P, _I],
    "copy_own": [_P, _P, _P, _I],
    "end": [_P, _I, _I],
    "join": [_P, _I, _P],
    "is_done": [_P, _I],
}


@functools.cache
def load() -> "SymmetricCalls":
    """Builds at first use, with nvcc; there is no NVRTC form. Raises BuildError."""
    return SymmetricCalls(ZIPCCL_SYMMETRIC.load())


class SymmetricCalls:
    """The launchers of one loaded library. Raises KernelError when CUDA refuses one."""

    def __init__(self, library: ctypes.CDLL):
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, f"zipccl_symmetric_{name}")
            function.argtypes, function.restype = arguments, ctypes.c_int
            setattr(self, f"_{name}", function)
        self._close = library.zipccl_symmetric_close
        self._close.argtypes, self._close.restype = [_P], None
        for name in ("words_bytes", "scratch_bytes", "max_ranks"):
            function = getattr(library, f"zipccl_symmetric_{name}")
            function.argtypes, function.restype = [], _I
            setattr(self, name, function())
        self.library = library

    def open(self, rank: int, memory: list[int], scratch: int, errors: int, timeout_ns: int) -> "Engine":
        """``memory``: addresses of all ranks' symmetric memory, as this rank sees them; zeros in its first ``words_bytes``. ``scratch``:
        ``scratch_bytes`` zeros of this rank's. ``errors``: the word for what decode finds."""
        handle = _P()
        addresses = (_P * len(memory))(*memory)
        _check(self._open(rank, len(memory), addresses, scratch, errors, timeout_ns, ctypes.byref(handle)), "open")
        return Engine(self, handle)


class Engine:
    """One rank's end. Offsets are bytes in a rank's symmetric memory; ``stream`` is a cudaStream_t (see symmetric.cu for the rest)."""

    def __init__(self, calls: SymmetricCalls, handle: ctypes.c_void_p):
        self._calls, self._handle = calls, handle

    def begin(self, stream: int) -> None:
        _check(self._calls._begin(self._handle, stream), "begin")

    def claim(self, message: int, stream: int) -> None:
        _check(self._calls._claim(self._handle, message, stream), "claim")

    def send(self, message: int, frames: int, frame_stride: int, frame_bytes: int, rows: int, row_stride: int, raw_bytes: int,
             slot: int, slot_stride: int, slots_here: bool, lanes: int, stream: int) -> None:
        _check(self._calls._send(self._handle, message, frames, frame_stride, frame_bytes, rows, row_stride, raw_bytes,
                                 slot, slot_stride, slots_here, lanes, stream), "send")

    def receive(self, g: Geometry, message: int, read_before: int, slot: int, slot_stride: int, slots_there: bool, own: int,
                out: int, row_stride: int) -> None:
        """``own``: 0 where nothing is summed."""
        _check(self._calls._receive(self._handle, packed_geometry(g), message, read_before, slot, slot_stride, slots_there,
                                    own or None, out, row_stride), "receive")

    def copy_own(self, to: int, source: int, num_bytes: int) -> None:
        _check(self._calls._copy_own(self._handle, to, source, num_bytes), "copy_own")

    def end(self, message: int, call: int) -> None:
        _check(self._calls._end(self._handle, message, call), "end")

    def join(self, call: int, stream: int) -> None:
        _check(self._calls._join(self._handle, call, stream), "join")

    def is_done(self, call: int) -> bool:
        code = self._calls._is_done(self._handle, call)
        if code < 0:
            _check(-code, "is_done")
        return code == 1

    def close(self) -> None:
        """With nothing in flight."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._calls._close(handle)


def _check(code: int, what: str) -> None:
    if code:
        raise KernelError(describe(f"CUDA refused the one-sided transport's {what}", got=f"cudaError {code}",
                                   todo="a peer that ended, or waited longer than the group's timeout, looks like this too: see its log"))
