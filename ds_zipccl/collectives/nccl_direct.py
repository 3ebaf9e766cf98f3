"""NCCL's own functions on the communicator of a torch backend: torch's way around them (events, records, its watchdog's queue) takes 20 to
40 us of host time a call. The operations are those that torch itself would call, so ranks may mix.

Status words go so, and payloads of prepared calls (plans.py) on groups with a mailbox. Torch's watchdog does not know these calls: that a
rank has ended or is late is found by who waits for its word, and by who watches payloads (payload_watch.py), after the group's own timeout.
"""
import ctypes
import functools
import os

from torch.distributed import distributed_c10d as c10d

from ds_zipccl.errors import CollectiveError
from zipscape import environment
from zipscape.errors import describe

_INT32 = 2
_BACKEND = getattr(c10d, "ProcessGroupNCCL", ())
_P, _N, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_ARGUMENTS = {
    "ncclAllGather": (_P, _P, _N, _I, _P, _P),
    "ncclBroadcast": (_P, _P, _N, _I, _I, _P, _P),
    "ncclSend": (_P, _N, _I, _I, _P, _P),
    "ncclRecv": (_P, _N, _I, _I, _P, _P),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


#: Whether payloads may go so.
PAYLOADS = environment.is_on("ZIPCCL_DIRECT")


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
    """Of a ProcessGroupNCCL that is connected; None where this torch does not give it away, NCCL's functions are not at hand, or they may
    return before they have queued their work."""
    address = handle(backend) if returns_when_queued(backend) else 0
    return Communicator(address, _library()) if address and _library() is not None else None


@functools.cache
def payload_functions():
    """For ``launch_calls.LaunchCalls.plan``; None where they are not at hand or not wanted."""
    library = _library() if PAYLOADS else None
    names = "ncclAllGather", "ncclSend", "ncclRecv", "ncclGroupStart", "ncclGroupEnd"
    return library and (_P * len(names))(*[ctypes.cast(getattr(library, name), _P) for name in names])


def returns_when_queued(backend) -> bool:
    """Whether NCCL's functions have queued their work when they return: those of a communicator that does not block may not have."""
    try:
        return backend.options.config.blocking != 0 and os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0") in ("", "0")
    except AttributeError:
        return False


def handle(backend) -> int:
    """Of a ProcessGroupNCCL's communicator on the current device; 0: it has none yet, or none any more, or torch does not give it away."""
    if not isinstance(backend, _BACKEND):           # one that wraps it wants to see the calls
        return 0
    try:
        return backend._comm_ptr()
    except (AttributeError, RuntimeError):
        return 0


class Communicator:
    """int32 words at addresses of device memory, results also of pinned host memory; queued on ``stream`` (a cudaStream_t)."""

    def __init__(self, address: int, library: ctypes.CDLL):
        self._handle, self._library = _P(address), library

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
