"""The Triton kernels as a kernel set: the same frames as every other implementation, portable (triton_encode.py,
triton_decode.py, triton_reduce.py). Queued on the current stream, nothing waits; corrupt frames are noted as impl_cuda.py describes.

With TRITON_INTERPRET=1 in the environment (before Triton is first imported) the kernels run on CPU tensors: slow, for tests.
"""
import functools
import struct
import threading
from types import SimpleNamespace

import torch

from ds_zipccl.errors import FrameError
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import describe
from zipscape.op_builder import triton_device

# By level: warps and registers of a thread (None: as many as it takes) of the kernels' programs, for an H200. A tile is encoded by one
# program, as many blocks at a time as that has warps: wide ones where there are too few tiles to fill the GPU.
LAUNCHES = {1: {"encode": (16, 64), "encode_many": (8, 64), "decode": (4, 32), "decode_reduce": (1, 104), "decode_reduce2": (4, None)},
            2: {"encode": (32, 64), "encode_many": (4, 80), "decode": (4, None), "decode_reduce": (1, 112), "decode_reduce2": (4, None)}}
MANY_TILES = 1024

_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


def load():
    """Raises BuildError when Triton is not installed, there is no GPU for it, or it cannot build: it needs a C compiler at run time."""
    triton_device.device_type()
    return TritonKernels()


class _Numbers:
    """The kernels' arguments that a geometry decides, in their order."""

    def __init__(self, g: Geometry):
        header = struct.unpack("<5i", g.header[:20])
        place = (g.tiles_offset, g.tile_bytes, g.last_blocks)
        sections = (g.escapes_offset, g.escapes_capacity, g.codes_offset, g.extra_offset, g.planes_offset, g.last_escapes_offset,
                    g.last_escapes_capacity, g.last_codes_offset, g.last_extra_offset, g.last_planes_offset)
        pools = (g.pools_offset, g.pool_bytes, g.last_pool_bytes)
        self.encode = (g.numel, g.num_tiles, g.window_lo, *place, *sections, *pools, *header)
        self.decode = (g.numel, g.num_tiles, *place, *sections, *pools, *header)


_numbers_of = functools.lru_cache(maxsize=4096)(_Numbers)


def _is_wide(row_bytes: int, *tensors: torch.Tensor) -> int:
    """1 if every row starts on a 16-byte address, else 0. ``row_bytes``: from row to row, 0 if there is one."""
    for t in tensors:
        row_bytes |= t.data_ptr()
    return int(row_bytes % 16 == 0)


class _Words:
    """The words of 8 bytes in which encode's programs tell each other numbers, on one device (-1: the CPU). They start as zeros. Calls of
    one stream run one after the other and share theirs; a call that is being captured gets its own: its graph may run beside the stream."""

    def __init__(self, index: int):
        self._index, self._device = index, "cpu" if index < 0 else f"cuda:{index}"
        self._by_stream: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._free = None if index >= 0 and _is_capturing() else self._zeros(1 << 17)
        if index >= 0 and self._free is not None:
            torch.cuda.current_stream(index).synchronize()         # other streams will use them, too
        self._lock = threading.Lock()

    def _zeros(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int64, device=self._device)

    def take(self, num_words: int) -> torch.Tensor:
        """At least ``num_words`` for a call on the current stream of the current device."""
        if self._index >= 0 and _is_capturing():
            return self._cut(num_words)
        stream = _current_stream(self._index) if self._index >= 0 else 0
        words = self._by_stream.get(stream)
        if words is None or len(words) < num_words:
            words = self._by_stream[stream] = self._cut(max(num_words, 512 if words is None else 2 * len(words)))
        return words

    def _cut(self, num_words: int) -> torch.Tensor:
        with self._lock:
            if self._free is not None and len(self._free) >= num_words:
                words, self._free = self._free[:num_words], self._free[num_words:]
            else:
                words = self._zeros(num_words)
                self._kept.append(words)
            return words


class TritonKernels:
    """A kernel set; ops.py has the contract."""
    levels = (1, 2)

    def __init__(self, launches: dict[int, dict[str, tuple[int, int | None]]] = LAUNCHES):
        from ds_zipccl.kernels import triton_decode, triton_encode, triton_reduce
        from ds_zipccl.kernels.triton_launch import Launcher
        functions = {"encode": triton_encode.encode, "encode_many": triton_encode.encode, "decode": triton_decode.decode,
                     "decode_reduce": triton_reduce.decode_reduce, "decode_reduce2": triton_reduce.decode_reduce2}
        for function in functions.values():
            # Triton 3.6's key of a kernel depends on those hashed before it in the process: in one order, the cache on disk has it.
            getattr(function, "cache_key", None)
        self._launchers = {level: SimpleNamespace(**{name: Launcher(functions[name], *how, level) for name, how in rows.items()})
                           for level, rows in launches.items()}
        self._errors: dict[int, torch.Tensor] = {}
        self._words: dict[int, _Words] = {}

    def _words_of(self, index: int) -> "_Words":
        if index not in self._words:
            self._words.setdefault(index, _Words(index))
        return self._words[index]

    def _error_word(self, index: int) -> torch.Tensor:
        """Of device ``index``, -1: the CPU."""
        if index not in self._errors:
            self._errors[index] = torch.zeros(1, dtype=torch.int32, device="cpu" if index < 0 else f"cuda:{index}")
        return self._errors[index]

    def encode(self, x: torch.Tensor, frames: torch.Tensor, status: torch.Tensor, g: Geometry, skip: int = -1) -> None:
        index = x.get_device()
        if index >= 0 and index != _current_device():
            with torch.cuda.device(index):
                return self.encode(x, frames, status, g, skip)
        if not _is_aligned(frames):
            copy = _aligned_like(frames)
            self.encode(x, copy, status, g, skip)
            for i in range(frames.shape[0]):
                if i != skip:
                    frames[i, :g.frame_bytes] = copy[i, :g.frame_bytes]
            return None
        rows, row_stride, frame_stride, numbers = x.shape[0] - (skip >= 0), x.stride(0), frames.stride(0), _numbers_of(g)
        if rows == 0:
            return None
        launchers = self._launchers[g.level]
        programs = g.num_tiles + (g.num_groups or 1)
        launch = launchers.encode_many if g.num_tiles * rows >= MANY_TILES else launchers.encode
        aligned = _is_wide(row_stride * g.itemsize if rows > 1 or skip >= 0 else 0, x)
        launch((programs, rows), index, g.dtype_code, (x, frames, self._words_of(index).take(rows * programs + 1), status),
               (row_stride, frame_stride, skip, rows, *numbers.encode, aligned))

    def decode(self, frames: torch.Tensor, out: torch.Tensor, g: Geometry, skip: int = -1) -> None:
        index = out.get_device()
        if index >= 0 and index != _current_device():
            with torch.cuda.device(index):
                return self.decode(frames, out, g, skip)
        rows, row_stride = out.shape[0] - (skip >= 0), out.stride(0)
        if rows == 0:
            return None
        if not _is_aligned(frames):
            frames = _aligned_like(frames).copy_(frames)
        aligned = _is_wide(row_stride * g.itemsize if out.shape[0] > 1 else 0, out)
        launch = self._launchers[g.level].decode
        launch((launch.programs(g.num_tiles), rows), index, g.dtype_code, (frames, out, self._error_word(index)),
               (row_stride, frames.stride(0), skip, *_numbers_of(g).decode, aligned))

    def decode_reduce(self, frames: torch.Tensor, own: torch.Tensor, own_index: int, out: torch.Tensor, g: Geometry) -> None:
        index = out.get_device()
        if index >= 0 and index != _current_device():
            with torch.cuda.device(index):
                return self.decode_reduce(frames, own, own_index, out, g)
        if not g.num_tiles:
            return None
        if not _is_aligned(frames):
            frames = _aligned_like(frames).copy_(frames)
        launchers = self._launchers[g.level]
        launch = launchers.decode_reduce2 if frames.shape[0] == 2 else launchers.decode_reduce
        launch((launch.programs(g.num_tiles), 1), index, g.dtype_code, (frames, own, out, self._error_word(index)),
               (frames.stride(0), own_index, frames.shape[0], *_numbers_of(g).decode, _is_wide(0, own, out)))

    def raise_on_error(self, device) -> None:
        """See impl_cuda.CudaKernels.raise_on_error."""
        errors = self._error_word(torch.empty(0, device=device).get_device())
        word = int(errors)
        errors.zero_()
        if word:
            raise FrameError(describe("corrupt frame decoded", got=f"kinds {word:#x} (csrc/zipccl/frame.cuh)", where=str(device)))


def _is_aligned(frames: torch.Tensor) -> bool:
    return frames.data_ptr() % 16 == 0 and (frames.stride(0) % 16 == 0 or frames.shape[0] == 1)


def _aligned_like(frames: torch.Tensor) -> torch.Tensor:
    rows, size = frames.shape
    return torch.empty(rows, -(-size // 128) * 128, dtype=torch.uint8, device=frames.device)[:, :size]
