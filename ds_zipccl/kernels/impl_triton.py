"""The Triton kernels as a kernel set: the same frames as every other implementation, portable, slower than CUDA (triton_encode.py,
triton_decode.py). Queued on the current stream, nothing waits; corrupt frames are noted as impl_cuda.py describes.

With TRITON_INTERPRET=1 in the environment (before Triton is first imported) the kernels run on CPU tensors: slow, for tests.
"""
import contextlib
import functools
import struct

import torch

from ds_zipccl.errors import FrameError
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import BuildError, describe

_LANES, _WARPS = 256, 8                  # of a program: 8 blocks, a lane a thread
_VIEW = {2: torch.int16, 4: torch.int32}


def load():
    """Raises BuildError when Triton is not installed or there is no GPU for it."""
    try:
        from triton import knobs
    except ImportError as error:
        raise BuildError(describe("Triton is not installed", got=str(error), todo="pip install triton")) from error
    if not knobs.runtime.interpret and not torch.cuda.is_available():
        raise BuildError(describe("Triton has no device", got="no CUDA device, and TRITON_INTERPRET is not set"))
    from ds_zipccl.kernels import triton_decode, triton_encode
    return TritonKernels(triton_encode, triton_decode)


@functools.lru_cache(maxsize=4096)
def _header_words(g: Geometry) -> tuple[int, ...]:
    return struct.unpack("<5i", g.header[:20])


@functools.lru_cache(maxsize=4096)
def _sections(g: Geometry) -> tuple[int, ...]:
    return (g.tiles_offset, g.tile_bytes, g.last_blocks, g.escapes_offset, g.escapes_capacity, g.codes_offset, g.extra_offset,
            g.planes_offset, g.last_escapes_offset, g.last_escapes_capacity, g.last_codes_offset, g.last_extra_offset, g.last_planes_offset)


def _is_wide(*tensors: torch.Tensor) -> bool:
    """Whether every row starts on a 16-byte address."""
    return all(t.data_ptr() % 16 == 0 and (t.dim() == 1 or t.shape[0] == 1 or t.stride(0) * t.element_size() % 16 == 0) for t in tensors)


class TritonKernels:
    """A kernel set; ops.py has the contract."""

    def __init__(self, encode_kernels, decode_kernels):
        self._kernels, self._decoders = encode_kernels, decode_kernels
        self._errors: dict[torch.device, torch.Tensor] = {}

    def _error_word(self, device: torch.device) -> torch.Tensor:
        if device not in self._errors:
            self._errors[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._errors[device]

    def encode(self, x: torch.Tensor, frames: torch.Tensor, status: torch.Tensor, g: Geometry, skip: int = -1) -> None:
        rows = x.shape[0] - (skip >= 0)
        if rows == 0:
            return
        aligned = frames if _is_aligned(frames) else _aligned_like(frames)
        x = x.view(_VIEW[g.itemsize])
        outcomes = torch.empty(max(rows * g.num_groups, 1), dtype=torch.int32, device=x.device)
        with _on(x.device):
            options = dict(WIDE=_is_wide(x), L=_LANES, DT=g.dtype_code, num_warps=_WARPS)
            if g.num_tiles:
                self._kernels.tiles[g.num_tiles, rows](x, aligned, x.stride(0), aligned.stride(0), skip, g.numel, g.num_tiles, g.window_lo,
                                                       *_sections(g), **options)
                self._kernels.groups[g.num_groups, rows](
                    aligned, outcomes, aligned.stride(0), skip, g.num_tiles, g.num_groups, g.tiles_offset, g.tile_bytes, g.last_blocks,
                    g.escapes_capacity, g.last_escapes_capacity, g.pools_offset, g.pool_bytes, g.last_pool_bytes, GROUP=g.group_tiles)
            self._kernels.finish[max(g.num_tiles, 1), rows](
                x, aligned, status, outcomes, x.stride(0), aligned.stride(0), skip, rows, g.numel, g.num_tiles, g.num_groups, g.window_lo,
                g.tiles_offset, g.tile_bytes, g.last_blocks, g.escapes_capacity, g.last_escapes_capacity, g.pools_offset, g.pool_bytes,
                g.last_pool_bytes, *_header_words(g), **options)
        if aligned is not frames:
            for i in range(frames.shape[0]):
                if i != skip:
                    frames[i, :g.frame_bytes] = aligned[i, :g.frame_bytes]

    def decode(self, frames: torch.Tensor, out: torch.Tensor, g: Geometry, skip: int = -1) -> None:
        rows = out.shape[0] - (skip >= 0)
        if rows == 0:
            return
        if not _is_aligned(frames):
            frames = _aligned_like(frames).copy_(frames)
        out = out.view(_VIEW[g.itemsize])
        with _on(out.device):
            self._decoders.decode[max(g.num_tiles * 1024 // _LANES, 1), rows](
                frames, out, self._error_word(out.device), out.stride(0), frames.stride(0), skip, g.numel, g.num_tiles, g.num_groups,
                *_sections(g), g.pools_offset, g.pool_bytes, g.last_pool_bytes, *_header_words(g), WIDE=_is_wide(out), L=_LANES,
                DT=g.dtype_code, num_warps=_WARPS)

    def decode_reduce(self, frames: torch.Tensor, own: torch.Tensor, own_index: int, out: torch.Tensor, g: Geometry) -> None:
        if not g.num_tiles:
            return
        if not _is_aligned(frames):
            frames = _aligned_like(frames).copy_(frames)
        own, out = own.view(_VIEW[g.itemsize]), out.view(_VIEW[g.itemsize])
        with _on(out.device):
            self._decoders.decode_reduce[(g.num_tiles * 1024 // _LANES,)](
                frames, own, out, self._error_word(out.device), frames.stride(0), own_index, frames.shape[0], g.numel, g.num_tiles,
                g.num_groups, *_sections(g), g.pools_offset, g.pool_bytes, g.last_pool_bytes, *_header_words(g),
                WIDE=_is_wide(own, out), L=_LANES, DT=g.dtype_code, num_warps=_WARPS)

    def raise_on_error(self, device) -> None:
        """See impl_cuda.CudaKernels.raise_on_error."""
        errors = self._error_word(torch.empty(0, device=device).device)
        word = int(errors)
        errors.zero_()
        if word:
            raise FrameError(describe("corrupt frame decoded", got=f"kinds {word:#x} (csrc/zipccl/frame.cuh)", where=str(device)))


def _on(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _is_aligned(frames: torch.Tensor) -> bool:
    return frames.data_ptr() % 16 == 0 and (frames.stride(0) % 16 == 0 or frames.shape[0] == 1)


def _aligned_like(frames: torch.Tensor) -> torch.Tensor:
    rows, size = frames.shape
    return torch.empty(rows, -(-size // 128) * 128, dtype=torch.uint8, device=frames.device)[:, :size]
