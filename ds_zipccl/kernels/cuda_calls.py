"""The C interface of csrc/zipccl/codec.cu, through ctypes: addresses and sizes in, an error code out. Knows no device
and no stream."""
import ctypes
import functools

from ds_zipccl.errors import KernelError
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import describe

FRAME_ALIGN = 16             # what the kernels need of a frame's address and stride
_P, _I = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "zipccl_cuda_encode": [_P, _P, _I, _P, _I, _I, _I, _P, _P, _P],
    "zipccl_cuda_decode": [_P, _P, _I, _P, _I, _I, _I, _P, _P],
    "zipccl_cuda_decode_reduce": [_P, _P, _I, _I, _P, _I, _P, _P, _P],
    "zipccl_cuda_prepare": [ctypes.POINTER(_P), ctypes.POINTER(_I), ctypes.POINTER(_P)],
    "zipccl_cuda_prints": [_P, _I, _I, _P],
    "zipccl_cuda_take_word": [_P, ctypes.POINTER(ctypes.c_uint32), _P],
}


class Print(ctypes.Structure):
    """Of a fingerprint: addresses of device memory (csrc/zipccl/prints.cuh)."""
    _fields_ = [("data", _P), ("numel", _I), ("lead", _I), ("sums", _P), ("differs", _P)]


@functools.lru_cache(maxsize=4096)
def packed_geometry(g: Geometry) -> bytes:
    """The geometry as the kernels read it: its integers as int64, then the header's 128 bytes."""
    return bytes((ctypes.c_int64 * len(g.ints))(*g.ints)) + g.header


def workspace_words(num_rows: int, g: Geometry) -> int:
    """Words of 8 bytes, once zeroed, that encode needs as workspace (``workspace_words`` in csrc/zipccl/frame.cuh, a test compares
    both)."""
    return 1 + num_rows * (1 + g.num_tiles)


class CudaCalls:
    """The launchers of one loaded library. Addresses are of device memory, ``stream`` is a cudaStream_t; strides are
    bytes.

    Raises KernelError when CUDA refuses a launch.
    """

    def __init__(self, library: ctypes.CDLL):
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        library.zipccl_cuda_workspace_words.argtypes = [_I, _I]
        library.zipccl_cuda_workspace_words.restype = _I
        library.zipccl_cuda_allow_overlap.argtypes, library.zipccl_cuda_allow_overlap.restype = [ctypes.c_int], None
        self.library = library
        self._encode = library.zipccl_cuda_encode
        self._decode = library.zipccl_cuda_decode
        self._decode_reduce = library.zipccl_cuda_decode_reduce

    # The same with all but what a call brings converted already: ctypes takes a microsecond for ten arguments.

    def bind_encode(self, g, row_stride, frames, frame_stride, num_rows, skip, status):
        """A function of (x, workspace, stream)."""
        function, geometry = self._encode, packed_geometry(g)
        rest = _I(row_stride), _P(frames), _I(frame_stride), _I(num_rows), _I(skip), _P(status)

        def run(x: int, workspace: int, stream: int) -> None:
            code = function(geometry, x, *rest, workspace, stream)
            if code:
                _refused("encode", code)

        return run

    def bind_decode(self, g, frames, frame_stride, row_stride, num_rows, skip, errors):
        """A function of (out, stream)."""
        function, geometry = self._decode, packed_geometry(g)
        place, rest = (_P(frames), _I(frame_stride)), (_I(row_stride), _I(num_rows), _I(skip), _P(errors))

        def run(out: int, stream: int) -> None:
            code = function(geometry, *place, out, *rest, stream)
            if code:
                _refused("decode", code)

        return run

    def bind_decode_reduce(self, g, frames, frame_stride, num_rows, own_index, errors):
        """A function of (own, out, stream)."""
        function, geometry = self._decode_reduce, packed_geometry(g)
        place, index, errors = (_P(frames), _I(frame_stride), _I(num_rows)), _I(own_index), _P(errors)

        def run(own: int, out: int, stream: int) -> None:
            code = function(geometry, *place, own, index, out, errors, stream)
            if code:
                _refused("decode_reduce", code)

        return run

    def prepare(self) -> tuple[int, int, int]:
        """Once for each device, before other calls, for the current one: address and number of the module's workspace words, address of
        its error word."""
        workspaces, num_words, errors = _P(), _I(), _P()
        code = self.library.zipccl_cuda_prepare(ctypes.byref(workspaces), ctypes.byref(num_words), ctypes.byref(errors))
        if code:
            _refused("the module", code)
        return workspaces.value, num_words.value, errors.value

    def allow_overlap(self, allowed: bool) -> None:
        """For measurements: whether launches from now on may overlap the end of the one before them on their stream. They may by default
        (compute capability 9.0 or newer)."""
        self.library.zipccl_cuda_allow_overlap(int(allowed))

    def take_word(self, address: int, stream: int) -> int:
        """Waits for ``stream``, reads the u32 at a device address and sets it to zero."""
        word = ctypes.c_uint32()
        code = self.library.zipccl_cuda_take_word(address, ctypes.byref(word), stream)
        if code:
            _refused("the reading of the error word", code)
        return word.value

    def prints(self, of, compares: bool, stream: int) -> None:
        """``of``: an array of Print."""
        code = self.library.zipccl_cuda_prints(of, len(of), compares, stream)
        if code:
            _refused("fingerprints", code)

    def encode(self, g, x, row_stride, frames, frame_stride, num_rows, skip, status, workspace, stream) -> None:
        code = self._encode(packed_geometry(g), x, row_stride, frames, frame_stride, num_rows, skip, status, workspace, stream)
        if code:
            _refused("encode", code)

    def decode(self, g, frames, frame_stride, out, row_stride, num_rows, skip, errors, stream) -> None:
        code = self._decode(packed_geometry(g), frames, frame_stride, out, row_stride, num_rows, skip, errors, stream)
        if code:
            _refused("decode", code)

    def decode_reduce(self, g, frames, frame_stride, num_rows, own, own_index, out, errors, stream) -> None:
        code = self._decode_reduce(packed_geometry(g), frames, frame_stride, num_rows, own, own_index, out, errors, stream)
        if code:
            _refused("decode_reduce", code)


def _refused(what: str, code: int) -> None:
    raise KernelError(describe(f"CUDA refused to launch {what}", got=f"cudaError {code}",
                               todo="run `ds_zipccl report`; error 209 or 222 means the library was built for another GPU"))
