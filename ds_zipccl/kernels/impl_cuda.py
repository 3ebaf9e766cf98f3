"""The CUDA kernels (csrc/zipccl/codec.cu) as a kernel set: queued on the current stream, nothing waits, capturable in
CUDA graphs.

A library that was built ahead of time is taken where it suits the GPU and torch, else nvcc compiles one; where no nvcc that goes with torch
is installed, NVRTC compiles the same source (nvrtc.py). Which one is in use is ``load().built_by``; NVRTC is logged.

Corrupt frames cannot raise here without waiting for the device. The kernels note what they find in a word on the
device; ``raise_on_error(device)`` waits, reads and clears that word, and raises FrameError. Whoever needs certainty
calls it; the hot path does not.
"""
import functools
import logging
import threading

import torch

from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import launch_calls, ops
from ds_zipccl.kernels.cuda_calls import FRAME_ALIGN, CudaCalls, workspace_words
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import BuildError, describe
from zipscape.op_builder import cuda_arch
from zipscape.op_builder.zipccl import ZIPCCL_CUDA

log = logging.getLogger("ds_zipccl")

_KINDS = ("a frame header is not what this call expects, or marked as overflowed",
          "a block's escape count differs from its codes, or its stream's length from its header",
          "a tile's escape count differs from its blocks'", "block mode or window base out of range",
          "a tile's spill lies outside its sub-pool")              # bits of the error word, csrc/zipccl/frame.cuh

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", lambda: 0)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


@functools.cache
def load() -> "CudaKernels":
    """Builds at first use. Raises BuildError when there is no usable GPU, when TORCH_CUDA_ARCH_LIST is malformed or leaves this GPU out, or
    when neither nvcc nor NVRTC can build."""
    if not torch.cuda.is_available():
        raise BuildError(describe("there is no CUDA device", got=f"torch {torch.__version__} sees none"))
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise BuildError(describe("the CUDA kernels need compute capability 8.0 or newer", got=".".join(map(str, capability))))
    arches = ZIPCCL_CUDA.arches()
    available, reason = ZIPCCL_CUDA.available()
    if not available:
        from ds_zipccl.kernels.nvrtc import NvrtcCalls
        kernels = CudaKernels(NvrtcCalls(ZIPCCL_CUDA.source_paths()[0]), "NVRTC")
        log.warning("the CUDA kernels were compiled by NVRTC: %s", reason)
        return kernels
    cuda_arch.check(arches, capability, _name_of(torch.cuda.current_device()))           # before a build that would be in vain
    calls, state = CudaCalls(ZIPCCL_CUDA.load()), ZIPCCL_CUDA.state()
    how = "prebuilt by " if state["installed"] == "prebuilt" else ""
    return CudaKernels(calls, f"{how}{state['compiler']}, code for {state['arches']}", ZIPCCL_CUDA.arches())


def _name_of(index: int) -> str:
    return f"cuda:{index} ({torch.cuda.get_device_name(index)})"


class _Device:
    """The module's global words on one device, and which of the workspace words are taken by whom."""

    def __init__(self, calls):
        self._base, self._num_words, self.errors = calls.prepare()
        self._used = 0
        self.unread = self._take(1)           # errors of what is decoded early, perhaps from a frame that overflowed: nobody asks
        self._by_stream: dict[int, tuple[int, int]] = {}          # stream -> (address, words)
        self._kept: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def workspace(self, stream: int, num_words: int) -> int:
        """Address of at least ``num_words`` words of 8 bytes for a call on ``stream``. Calls of one stream run one after the
        other and share theirs; a call that is being captured gets its own, since its graph may run beside the
        stream."""
        if _is_capturing():
            with self._lock:
                return self._take(num_words)
        address, size = self._by_stream.get(stream, (0, 0))
        if size < num_words:
            with self._lock:
                size = max(num_words, 2 * size, 512)
                address = self._take(size)
                self._by_stream[stream] = address, size
        return address

    def _take(self, num_words: int) -> int:
        if self._used + num_words <= self._num_words:
            self._used += num_words
            return self._base + 8 * (self._used - num_words)
        self._kept.append(torch.zeros(num_words, dtype=torch.int64, device="cuda"))
        return self._kept[-1].data_ptr()


class CudaKernels:
    """A kernel set (ops.py has the contract) over ``calls``, an object like CudaCalls. ``arches``: what they were compiled for; none
    where they are compiled for each device when it is first used."""

    levels = (1, 2)

    def __init__(self, calls, built_by: str, arches: tuple = ()):
        self._calls, self._arches = calls, arches
        self.built_by = built_by
        self._devices: dict[int, _Device] = {}

    def _device(self, index: int) -> _Device:
        device = self._devices.get(index)
        if device is None:
            if self._arches:
                cuda_arch.check(self._arches, torch.cuda.get_device_capability(index), _name_of(index))
            device = self._devices.setdefault(index, _Device(self._calls))
        return device

    def encode(self, x: torch.Tensor, frames: torch.Tensor, status: torch.Tensor, g: Geometry, skip: int = -1) -> None:
        index = x.get_device()
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.encode(x, frames, status, g, skip)
        if not _aligned(frames):
            copy = _aligned_like(frames)
            self.encode(x, copy, status, g, skip)
            for i in range(frames.shape[0]):
                if i != skip:
                    frames[i, :g.frame_bytes] = copy[i, :g.frame_bytes]
            return None
        rows = x.shape[0]
        stream = _current_stream(index)
        workspace = self._device(index).workspace(stream, workspace_words(rows, g))
        self._calls.encode(g, x.data_ptr(), x.stride(0) * g.itemsize, frames.data_ptr(), frames.stride(0), rows, skip,
                           status.data_ptr(), workspace, stream)

    def workspace(self, index: int, stream: int, num_words: int) -> int:
        """Address of ``num_words`` words of 8 bytes, zero between calls, for encode calls on a stream of device ``index``, the current
        one."""
        return self._device(index).workspace(stream, num_words)

    @functools.cached_property
    def launch_calls(self) -> launch_calls.LaunchCalls | None:
        """Queue a call's work by few calls of C; None where NVRTC compiled the kernels."""
        library = getattr(self._calls, "library", None)
        return library and launch_calls.load(library)

    def unread_word(self, index: int) -> int:
        """Address of the word for what is decoded early, perhaps from a frame that overflowed: nobody reads it."""
        return self._device(index).unread

    @property
    def prints(self):
        """``CudaCalls.prints``; None where NVRTC compiled the kernels."""
        return getattr(self._calls, "prints", None)

    def c_encode(self):
        """The C function zipccl_cuda_encode; None where NVRTC compiled the kernels."""
        library = getattr(self._calls, "library", None)
        return library and library.zipccl_cuda_encode

    def error_word(self, index: int) -> int:
        """Address of the word in which kernels of device ``index`` note corruption; ``raise_on_error`` reads it."""
        return self._device(index).errors

    def decode(self, frames: torch.Tensor, out: torch.Tensor, g: Geometry, skip: int = -1) -> None:
        index = out.get_device()
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.decode(frames, out, g, skip)
        if not _aligned(frames):
            frames = _aligned_like(frames).copy_(frames)
        self._calls.decode(g, frames.data_ptr(), frames.stride(0), out.data_ptr(), out.stride(0) * g.itemsize, out.shape[0], skip,
                           self._device(index).errors, _current_stream(index))

    def decode_reduce(self, frames: torch.Tensor, own: torch.Tensor, own_index: int, out: torch.Tensor, g: Geometry) -> None:
        index = out.get_device()
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.decode_reduce(frames, own, own_index, out, g)
        if not _aligned(frames):
            frames = _aligned_like(frames).copy_(frames)
        self._calls.decode_reduce(g, frames.data_ptr(), frames.stride(0), frames.shape[0], own.data_ptr(), own_index, out.data_ptr(),
                                  self._device(index).errors, _current_stream(index))

    def bind_encode(self, frames: torch.Tensor, status: torch.Tensor, g: Geometry, skip: int, offset: int):
        """See kernels/ops.py: the bound functions take addresses alone, and look whether device and stream are as they were."""
        if not _aligned(frames):
            return lambda x: self.encode(ops.rows_of(x, offset, frames.shape[0], g), frames, status, g, skip)
        index, num_rows, first, needed = frames.get_device(), frames.shape[0], offset * g.itemsize, offset + frames.shape[0] * g.numel
        num_words, before, run = workspace_words(num_rows, g), (None, 0), self._calls.bind_encode(
            g, g.numel * g.itemsize, frames.data_ptr(), frames.stride(0), num_rows, skip, status.data_ptr())

        def queue(x: int) -> None:
            nonlocal before
            stream = _current_stream(index)
            if stream != before[0] or _is_capturing():
                before = stream, self._device(index).workspace(stream, num_words)
            run(x, before[1], stream)

        def encode(x: torch.Tensor, buffers=(frames, status)) -> None:          # keeps the buffers
            ops.enough(x, needed)
            if index == _current_device():
                return queue(x.data_ptr() + first)
            with torch.cuda.device(index):          # not by calling itself: a function that knows itself outlives its last user
                queue(x.data_ptr() + first)

        return encode

    def bind_decode(self, frames: torch.Tensor, g: Geometry, skip: int, offset: int):
        if not _aligned(frames):
            return lambda out: self.decode(frames, ops.rows_of(out, offset, frames.shape[0], g), g, skip)
        index, num_rows, first, needed = frames.get_device(), frames.shape[0], offset * g.itemsize, offset + frames.shape[0] * g.numel
        run = self._calls.bind_decode(g, frames.data_ptr(), frames.stride(0), g.numel * g.itemsize, num_rows, skip,
                                      self._device(index).unread)

        def decode(out: torch.Tensor, buffer=frames) -> None:
            ops.enough(out, needed)
            if index == _current_device():
                return run(out.data_ptr() + first, _current_stream(index))
            with torch.cuda.device(index):
                run(out.data_ptr() + first, _current_stream(index))

        return decode

    def bind_decode_reduce(self, frames: torch.Tensor, own_index: int, g: Geometry, offset: int):
        if not _aligned(frames):
            return lambda x, out: self.decode_reduce(frames, ops.rows_of(x, offset, 1, g)[0], own_index, ops.rows_of(out, 0, 1, g)[0], g)
        index, first, needed = frames.get_device(), offset * g.itemsize, offset + g.numel
        run = self._calls.bind_decode_reduce(g, frames.data_ptr(), frames.stride(0), frames.shape[0], own_index, self._device(index).unread)

        def decode_reduce(x: torch.Tensor, out: torch.Tensor, buffer=frames) -> None:
            ops.enough(x, needed)
            ops.enough(out, g.numel)
            if index == _current_device():
                return run(x.data_ptr() + first, out.data_ptr(), _current_stream(index))
            with torch.cuda.device(index):
                run(x.data_ptr() + first, out.data_ptr(), _current_stream(index))

        return decode_reduce

    def raise_on_error(self, device) -> None:
        """Waits for the current stream of ``device``; raises FrameError if a frame decoded there since the last call
        was corrupt."""
        device = torch.device(device)
        with torch.cuda.device(device):
            errors = self._device(torch.cuda.current_device()).errors
            word = self._calls.take_word(errors, torch.cuda.current_stream().cuda_stream)
        if word:
            kinds = "; ".join(text for bit, text in enumerate(_KINDS) if word >> bit & 1)
            raise FrameError(describe("corrupt frame decoded", got=kinds, where=str(device)))


def _aligned(frames: torch.Tensor) -> bool:
    """Others are copied first."""
    return frames.data_ptr() % FRAME_ALIGN == 0 and (frames.stride(0) % FRAME_ALIGN == 0 or frames.shape[0] == 1)


def _aligned_like(frames: torch.Tensor) -> torch.Tensor:
    rows, size = frames.shape
    stride = -(-size // 128) * 128
    return torch.empty(rows, stride, dtype=torch.uint8, device=frames.device)[:, :size]
