"""The C interface of csrc/zipccl/launch.h, through ctypes: what a zipped call queues, by one call, or by three around its payload.
Knows no group.

Addresses are of device memory, streams and events handles of the driver's, communicators of NCCL's.
"""
import ctypes
from typing import NamedTuple

from ds_zipccl.errors import KernelError
from ds_zipccl.kernels import python_calls
from ds_zipccl.kernels.cuda_calls import packed_geometry
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import describe

_P, _I = ctypes.c_void_p, ctypes.c_int64
_FROM_CODEC = ("zipccl_cuda_encode_telling", "zipccl_cuda_decode", "zipccl_cuda_decode_reduce")
_FROM_DRIVER = ("cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoDAsync_v2", "cuCtxGetCurrent", "cuStreamIsCapturing")
NOT_SO = -1000            # launch.h's
MAX_OUTPUTS = 509         # launch.h's


class _Step(ctypes.Structure):
    """launch.h has the meaning."""
    _fields_ = [("geometry", ctypes.c_char_p), ("start", _I), ("to", _I), ("row_stride", _I), ("frames", _P), ("frame_stride", _I),
                ("num_rows", _I), ("skip", _I), ("is_sum", _I), ("word", _P)]


class _Transfer(ctypes.Structure):
    """launch.h has the meaning."""
    _fields_ = [("sent", _P), ("num_sent", _I), ("received", _P), ("num_received", _I), ("peer", _I)]


class _Plan(ctypes.Structure):
    """launch.h has the meaning."""
    _fields_ = [("functions", ctypes.POINTER(_P)), ("encodes", ctypes.POINTER(_Step)), ("decodes", ctypes.POINTER(_Step)),
                ("num_encodes", _I), ("num_decodes", _I), ("copy_from", _I), ("copy_to", _I), ("copy_bytes", _I), ("workspace", _P),
                ("stream", _P), ("decode_stream", _P), ("encoded", _P), ("filled", _P), ("nccl", ctypes.POINTER(_P)),
                ("transfers", ctypes.POINTER(_Transfer)), ("num_transfers", _I), ("payload_stream", _P), ("arrived", _P)]


class _Repeat(ctypes.Structure):
    """launch.h has the meaning."""
    _fields_ = [("plan", _P), ("context", _P), ("x_bytes", _I), ("out_bytes", _I), ("anywhere", _I), ("place", _I), ("mail", _P),
                ("ring", _P), ("mark", _P), ("depth", _I), ("num_ranks", _I), ("rank", _I), ("stops", ctypes.c_uint32), ("words", _P)]


class _Piece(ctypes.Structure):
    """launch.h has the meaning."""
    _fields_ = [("geometry", ctypes.c_char_p), ("at", _I), ("num_bytes", _I), ("which", _I), ("to", _I), ("row_stride", _I)]


class _Filling(ctypes.Structure):
    """launch.h has the meaning."""
    _fields_ = [("functions", ctypes.POINTER(_P)), ("pieces", ctypes.POINTER(_Piece)), ("num_pieces", _I), ("row_bytes", _I),
                ("num_ranks", _I), ("errors", _P)]


class Piece(NamedTuple):
    """Of every rank's row: a frame of ``geometry``, or (None) data of ``num_bytes``, ``at`` so many bytes; it goes to output ``which``,
    from its byte ``to`` on, the next rank's ``row_stride`` further."""
    geometry: Geometry | None
    at: int
    num_bytes: int
    which: int
    to: int
    row_stride: int


class Ring(NamedTuple):
    """Of a mailbox, where ``Repeat`` finds status words: addresses of its first entry for the GPU and the host, and of this rank's mark."""
    mail: int
    entries: int
    mark: int
    depth: int
    num_ranks: int
    rank: int


def step(g: Geometry, frames: int, frame_stride: int, num_rows: int, skip: int, word: int, *, offset: int = 0,
         is_sum: bool = False) -> _Step:
    """A call of the codec's, with what it is before and after the payload. ``offset``: elements of the tensor (of a sum: of the input)
    before its first row. ``word``: address of the status, or of what decode finds wrong."""
    start = offset * g.itemsize
    to, stride = 0 if is_sum else start, g.numel * g.itemsize
    return _Step(packed_geometry(g), start, to, stride, frames, frame_stride, num_rows, skip, is_sum, word)


def load(codec: ctypes.CDLL) -> "LaunchCalls":
    """Of the codec's library (csrc/zipccl/codec.cu)."""
    driver = ctypes.CDLL("libcuda.so.1")
    return LaunchCalls(codec, *[getattr(codec, name) for name in _FROM_CODEC], *[getattr(driver, name) for name in _FROM_DRIVER])


class LaunchCalls:
    """``functions``: encode, decode, decode_reduce of the codec, then the driver's to record an event, wait for one, copy, tell the current
    context, and whether a stream is captured; C functions."""

    def __init__(self, library: ctypes.CDLL, *functions):
        self._functions = functions                 # kept
        self._table = (_P * len(functions))(*[ctypes.cast(function, _P) for function in functions])
        for name, arguments in (("begin", (_P, _P, _P, ctypes.c_uint32)), ("beside", (_P, _P, _P)), ("end", (_P, _P, _P)),
                                ("call", (_P, _P, _P, _P, _P, ctypes.c_uint32, _I)), ("join", (_P, _P)),
                                ("repeat", (_P, _P, _P, _P, ctypes.c_uint64)), ("finish", (_P, _P, ctypes.c_uint64)),
                                ("fill", (_P, _P, _P, _P))):
            function = getattr(library, f"zipccl_launch_{name}")
            function.argtypes, function.restype = arguments, ctypes.c_int
            setattr(self, name, function)
        self._fill = self.fill
        self.repeat, self.finish, self.fill = python_calls.functions(library, "zipccl_launch", "repeat", "finish", "fill") or (
            self.repeat, self.finish, self._fill_few)

    def _fill_few(self, address: int, rows: int, stream: int, *outs: int) -> int:
        return self._fill(address, rows, stream, (ctypes.c_uint64 * len(outs))(*outs))

    def filling(self, pieces: list[Piece], row_bytes: int, num_ranks: int, errors: int) -> "Filling":
        """``errors``: address of the word for what decode finds."""
        return Filling(self, (_Piece * len(pieces))(*[_Piece(p.geometry and packed_geometry(p.geometry), *p[1:]) for p in pieces]),
                       len(pieces), row_bytes, num_ranks, errors)

    def plan(self, encodes: list[_Step], decodes: list[_Step], copy: tuple[int, int, int], workspace: int, stream: int, decode_stream: int,
             encoded: int, filled: int, nccl=None, transfers=(), payload_stream: int = 0, arrived: int = 0) -> "Plan":
        """``copy``: bytes before this rank's piece in the input, before its place in the output, and of it. ``encoded``, ``filled``,
        ``arrived``: events. ``nccl``: a C array of addresses of NCCL's functions, as launch.h's ``Nccl`` has them, for a payload of
        ``transfers``: (address of what goes, its bytes, address for what comes, its bytes, peer; -1 for an all-gather)."""
        transfers = (_Transfer * len(transfers))(*[_Transfer(*each) for each in transfers])
        return Plan(self, encodes, decodes, (*copy, workspace, stream, decode_stream, encoded, filled, nccl, transfers, len(transfers),
                                             payload_stream, arrived))


    def context(self) -> int:
        """The current one; 0: none."""
        context = _P()
        return context.value or 0 if self._functions[6](ctypes.byref(context)) == 0 else 0


class Repeat:
    """A plan that fills, for calls whose status words are in a mailbox's ring, with exchange ``count`` of all ranks. Without Python around
    it, since a GPU waits for that: ``fire(address, communicator, x, out, count)`` is ``Plan.call``, ``finish(address, stream, count)`` is
    ``Plan.join`` where all ranks' words are there, which then are in ``words``, uint32, and none of them has one of the bits ``stops``.
    Both return 0, NOT_SO where that cannot be and nothing was done, or what ``refused`` raises.

    ``x_bytes``, ``out_bytes``: the tensors'. They may share memory ``anywhere``, or where the input is byte ``place`` of the output (-1:
    nowhere); else that is NOT_SO, as is another current device or a stream that is captured. None of this is checked: the plan's kernels
    are bound to such tensors."""
    __slots__ = ("fire", "finish", "address", "words", "_kept")

    def __init__(self, plan: "Plan", ring: Ring, x_bytes: int, out_bytes: int, anywhere: bool, place: int, stops: int):
        calls = plan.calls
        words = (ctypes.c_uint32 * ring.num_ranks)()
        repeat = _Repeat(plan.address, calls.context(), x_bytes, out_bytes, anywhere, place, *ring, stops, ctypes.addressof(words))
        self.fire, self.finish, self.address = calls.repeat, calls.finish, ctypes.addressof(repeat)
        self.words, self._kept = memoryview(words).cast("B").cast("I"), (plan, repeat, words)


class Plan:
    """What calls of one kind queue. Raises KernelError when CUDA refuses something."""
    __slots__ = ("_begin", "_beside", "_end", "_join", "_call", "address", "calls", "_kept")

    def __init__(self, calls: LaunchCalls, encodes, decodes, rest: tuple):
        lists = [(_Step * len(steps))(*steps) for steps in (encodes, decodes)]
        plan = _Plan(calls._table, *lists, len(encodes), len(decodes), *rest)
        self._begin, self._beside, self._end, self._join, self._call = calls.begin, calls.beside, calls.end, calls.join, calls.call
        self.address, self.calls, self._kept = ctypes.addressof(plan), calls, (plan, lists, rest)

    def call(self, communicator: int, x: int, out: int, mail: int, stamp: int, fills: bool) -> None:
        """``begin``, the payload, ``beside`` and, if ``fills``, ``end``; else the decode stream waits for the payload."""
        code = self._call(self.address, communicator, x, out, mail, stamp, fills)
        if code:
            refused(code)

    def begin(self, x: int, mail: int, stamp: int) -> None:
        """Before the payload; ``x``, ``out``: the tensors' addresses. ``mail``: where ``stamp`` << 32 | the status goes; 0: nowhere."""
        code = self._begin(self.address, x, mail, stamp)
        if code:
            refused(code)

    def beside(self, x: int, out: int) -> None:
        """When the payload is launched, with nothing else queued on the caller's stream since ``begin``."""
        code = self._beside(self.address, x, out)
        if code:
            refused(code)

    def end(self, x: int, out: int) -> None:
        """When the decode stream waits for the payload."""
        code = self._end(self.address, x, out)
        if code:
            refused(code)

    def join(self, stream: int) -> bool:
        """``stream`` waits for the output. False: the driver refused; as from a thread that has not used CUDA yet."""
        return self._join(self.address, stream) == 0


class Filling:
    """Fills outputs from rows that came from all ranks. Raises KernelError when CUDA refuses something."""
    __slots__ = ("_fill", "_address", "_kept")

    def __init__(self, calls: LaunchCalls, pieces, *rest):
        filling = _Filling(calls._table, pieces, *rest)
        self._fill, self._address, self._kept = calls.fill, ctypes.addressof(filling), (filling, pieces, calls)

    def queue(self, rows: int, stream: int, outs: list[int]) -> None:
        """``rows``: where they begin; ``outs``: the outputs, as many as pieces name, MAX_OUTPUTS at most."""
        code = self._fill(self._address, rows, stream, *outs)
        if code:
            refused(code)


def refused(code: int) -> None:
    if code < 0:
        raise KernelError(describe("NCCL refused to send frames", got=f"ncclResult {-1 - code}",
                                   todo="run with NCCL_DEBUG=WARN to see why"))
    raise KernelError(describe("CUDA refused a part of a zipped call", got=f"error {code}",
                               todo="run `ds_zipccl report`; error 209 or 222 means the library was built for another GPU"))
