"""NCCL's own functions for status words, on the communicator of a torch backend: a few bytes for which torch's way around them (events,
records, its watchdog's queue) would take 20 us of host time. The operations are those that torch itself would call, so ranks may mix.

Payloads do not come here: they belong to the caller's group, with all that torch does for it.
"""
import ctypes
import functools

from ds_zipccl.errors import CollectiveError
from zipscape.errors import describe

_INT32 = 2
_P, _N, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_ARGUMENTS = {
    "ncclAllGather": (_P, _P, _N, _I, _P, _P),
    "ncclBroadcast": (_P, _P, _N, _I, _I, _P, _P),
    "ncclSend": (_P, _N, _I, _I, _P, _P),
    "ncclRecv": (_P, _N, _I, _I, _P, _P),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The one that torch has loaded; None where it cannot be told (linked statically)."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=getattr(ctypes, "RTLD_NOLOAD", 4) | ctypes.RTLD_LOCAL)
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _I
        return library
    except (OSError, AttributeError):
        return None


def communicator(backend) -> "Communicator | None":
    """Of a ProcessGroupNCCL that is connected; None where this torch does not give it away, or NCCL's functions are not at hand."""
    try:
        handle = backend._comm_ptr()
    except (AttributeError, RuntimeError):
        return None
    return Communicator(handle, _library()) if handle and _library() is not None else None


class Communicator:
    """int32 words at addresses of device memory, results also of pinned host memory; queued on ``stream`` (a cudaStream_t)."""

    def __init__(self, handle: int, library: ctypes.CDLL):
        self._handle, self._library = _P(handle), library

    def all_gather(self, out: int, own: int, count: int, stream: int) -> None:
        self._check(self._library.ncclAllGather(own, out, count, _INT32, self._handle, stream))

    def broadcast(self, out: int, own: int, count: int, root: int, stream: int) -> None:
        self._check(self._library.ncclBroadcast(own, out, count, _INT32, root, self._handle, stream))

    def exchange(self, out: int, words: int, out_counts: list[int], counts: list[int], stream: int) -> None:
        """``counts[r]`` go to rank r, ``out_counts[r]`` come from it; none: nothing is sent."""
        nccl, codes = self._library, []
        nccl.ncclGroupStart()
        try:
            for peer, (count, out_count) in enumerate(zip(counts, out_counts, strict=True)):
                if count:
                    codes.append(nccl.ncclSend(words, count, _INT32, peer, self._handle, stream))
                    words += 4 * count
                if out_count:
                    codes.append(nccl.ncclRecv(out, out_count, _INT32, peer, self._handle, stream))
                    out += 4 * out_count
        finally:
            codes.append(nccl.ncclGroupEnd())
        self._check(max(codes))

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise CollectiveError(describe("NCCL refused to send status words", got=f"ncclResult {code}",
                                           todo="run with NCCL_DEBUG=WARN to see why"))
