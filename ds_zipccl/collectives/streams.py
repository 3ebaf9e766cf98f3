"""Current CUDA streams at little cost: torch's own wrappers make objects and look up devices, ten microseconds a time.

A stream is told by its raw handle (0: the default stream). On a CPU every stream is None.
"""
import ctypes
import functools

import torch

_objects: dict[tuple[int, int], torch.cuda.Stream] = {}

#: The handle of the current stream of the GPU of this index: torch's own function, with none of ours around it in a call's way.
of_device = getattr(torch._C, "_cuda_getCurrentRawStream", None)
#: The index of the current device.
current_device = getattr(torch._C, "_cuda_getDevice", lambda: 0)
#: Whether what is queued on the current stream goes into a CUDA graph.
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


def current(device: torch.device) -> int | None:
    """The handle of the device's current stream."""
    if device.type != "cuda":
        return None
    index = device.index
    return of_device(torch.cuda.current_device() if index is None else index)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def as_object(device: torch.device, handle: int) -> torch.cuda.Stream:
    """Torch's object for a handle; made once. (``ExternalStream(0)`` would be a new stream, not the default one.)"""
    key = _index(device), handle
    if key not in _objects:
        _objects[key] = torch.cuda.ExternalStream(handle, device=device) if handle else torch.cuda.default_stream(device)
    return _objects[key]


def join(device: torch.device, other: int | None) -> None:
    """Makes the current stream wait for what is queued on stream ``other`` by now; nothing to do on a CPU or for the stream itself."""
    mine = current(device)
    if mine != other:
        as_object(device, mine).wait_stream(as_object(device, other))


def keep(t: torch.Tensor) -> None:
    """The memory of ``t`` is not used anew before what is queued on the current stream by now is done."""
    if t.is_cuda:
        t.record_stream(as_object(t.device, current(t.device)))


def copy(target: torch.Tensor, offset: int, source: torch.Tensor) -> None:
    """Dense ``source`` to the elements of dense ``target`` from ``offset`` on, as they lie in memory. On a GPU by one call of the driver:
    torch's views and copies take ten times as long."""
    is_here = target.is_cuda and target.device == source.device and target.device.index == current_device()    # where its stream is, too
    driver = _driver() if is_here else None
    if driver is None:
        place = target.as_strided((source.numel(),), (1,), target.storage_offset() + offset)
        place.copy_(source.as_strided((source.numel(),), (1,), source.storage_offset()))
    elif code := driver(target.data_ptr() + offset * target.element_size(), source.data_ptr(), source.nbytes, current(target.device)):
        raise RuntimeError(f"CUDA refused a copy: CUresult {code}")


@functools.cache
def _driver():
    """cuMemcpyDtoDAsync, or None."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p), ctypes.c_int
    return function


class Mark:
    """A point in what is queued on a stream; set again and again. Nothing on a CPU."""
    __slots__ = ("_device", "_event", "stream")

    def __init__(self, device: torch.device):
        self._device, self.stream = device, None
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Here, on the current stream."""
        self.stream = current(self._device)
        if self._event is not None:
            self._event.record(as_object(self._device, self.stream))

    @property
    def handle(self) -> int:
        """The driver's, for who sets it by himself; ``stream`` is then his to say."""
        if self.stream is None:                 # torch makes it when it is first recorded
            self.set()
        return self._event.cuda_event

    def join(self) -> None:
        """Makes the current stream wait for the point, if that is on another one."""
        mine = current(self._device)
        if mine != self.stream and self._event is not None:
            as_object(self._device, mine).wait_event(self._event)

    @property
    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Blocks the host."""
        if self._event is not None:
            self._event.synchronize()


class On:
    """Context: ``stream`` is current within; None: nothing changes."""

    def __init__(self, stream: "torch.cuda.Stream | None"):
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            s = self._stream
            self._device = torch._C._cuda_getDevice()                     # setting a stream sets its device too
            self._before = torch._C._cuda_getCurrentStream(s.device_index)
            torch._C._cuda_setStream(stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type)

    def __exit__(self, *exc) -> None:
        if self._stream is not None:
            stream_id, device_index, device_type = self._before
            torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)
            if self._device != device_index:
                torch._C._cuda_setDevice(self._device)
