"""Tensors to frames and back: the codec's interface for everything above it.

Two levels. ``Codec`` works on rows of equal size with a layout both sides know (the collectives' hot path: no
allocation of its own, nothing waits for the device). ``compress``/``decompress`` make self-describing frames of any
tensor (files, benchmarks) and choose capacity and raw mode by themselves; they read the status on the host.
"""
from dataclasses import dataclass

import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import loader, ops
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import describe


@dataclass(frozen=True)
class Codec:
    """A layout together with the kernel set that reads and writes it."""
    geometry: Geometry
    kernels: str

    @classmethod
    def of(cls, dtype: torch.dtype, numel: int, device_type: str, *, escapes_per_block: int = fmt.DEFAULT_ESCAPES_PER_BLOCK,
           spill_per_tile: int = fmt.DEFAULT_SPILL_PER_TILE, window_lo: int = -1, kernels: str = "best") -> "Codec":
        """The codec for rows of ``numel`` elements. Raises KeyError for a dtype outside the table, KernelError for
        unusable kernels."""
        geometry = fmt.layout(BY_TORCH[dtype], numel, escapes_per_block, spill_per_tile, window_lo)
        return cls(geometry, loader.resolve(kernels, device_type))

    @property
    def frame_bytes(self) -> int:
        return self.geometry.frame_bytes

    def empty_frames(self, num_rows: int, device) -> torch.Tensor:
        """Uninitialised frames [num_rows, frame_bytes], uint8."""
        return torch.empty(num_rows, self.frame_bytes, dtype=torch.uint8, device=device)

    def encode(self, rows: torch.Tensor, frames: torch.Tensor, status: torch.Tensor, skip: int = -1) -> None:
        """See ``kernels.ops.encode``; ``status`` is int32 [1] on the rows' device."""
        ops.encode(rows, frames, status, self.geometry, skip, kernels=self.kernels)

    def decode(self, frames: torch.Tensor, rows: torch.Tensor, skip: int = -1) -> None:
        """See ``kernels.ops.decode``."""
        ops.decode(frames, rows, self.geometry, skip, kernels=self.kernels)

    def decode_reduce(self, frames: torch.Tensor, own: torch.Tensor, own_index: int, out: torch.Tensor) -> None:
        """See ``kernels.ops.decode_reduce``."""
        ops.decode_reduce(frames, own, own_index, out, self.geometry, kernels=self.kernels)


def split_status(word: int) -> tuple[bool, int]:
    """(overflow, need) of a status word."""
    return bool(word & fmt.OVERFLOW_BIT), word & fmt.NEED_MASK


def compress(x: torch.Tensor, *, kernels: str = "best", escapes_per_block: int = fmt.DEFAULT_ESCAPES_PER_BLOCK,
             spill_per_tile: int = fmt.DEFAULT_SPILL_PER_TILE, window_lo: int = -1) -> torch.Tensor:
    """A self-describing frame, uint8 [bytes], of a contiguous tensor of any dtype, on its device.

    Starts with the given capacity, repeats once with the capacity the data needs, and stores raw (mode 1) what that
    does not make smaller than raw or whose dtype the codec does not know. The result is never longer than
    ``format.raw_frame_bytes(x.nbytes)``. Shape and, for dtypes outside the table, dtype are the caller's to remember.
    """
    flat = x.detach().contiguous().reshape(-1)
    raw_bytes = fmt.raw_frame_bytes(flat.numel() * flat.element_size())
    if flat.dtype in BY_TORCH:
        for _ in range(2):
            codec = Codec.of(flat.dtype, flat.numel(), flat.device.type, escapes_per_block=escapes_per_block,
                             spill_per_tile=spill_per_tile, window_lo=window_lo, kernels=kernels)
            if codec.frame_bytes >= raw_bytes:
                break
            frames = codec.empty_frames(1, flat.device)
            status = torch.zeros(1, dtype=torch.int32, device=flat.device)
            codec.encode(flat.view(1, -1), frames, status)
            overflow, need = split_status(int(status))
            if not overflow:
                return frames[0]
            escapes_per_block = need
    return _raw_frame(flat, raw_bytes)


def _raw_frame(flat: torch.Tensor, frame_bytes: int) -> torch.Tensor:
    dtype = BY_TORCH.get(flat.dtype)
    data = flat.view(torch.uint8)
    header = fmt.pack_header(dtype.code if dtype else fmt.RAW_CODE, fmt.MODE_RAW, flat.numel() if dtype else data.numel())
    frame = torch.zeros(frame_bytes, dtype=torch.uint8, device=flat.device)
    frame[:fmt.HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    frame[fmt.HEADER_BYTES:fmt.HEADER_BYTES + data.numel()] = data
    return frame


def decompress(frame: torch.Tensor, out: torch.Tensor, *, kernels: str = "best") -> torch.Tensor:
    """Fills the contiguous tensor ``out`` from a frame made by ``compress`` and returns it.

    Raises FrameError when the frame is corrupt, truncated, of another version, or of another dtype or element count
    than ``out``.
    """
    if frame.dtype != torch.uint8 or frame.dim() != 1 or not frame.is_contiguous():
        raise FrameError(describe("a frame is a contiguous 1-D uint8 tensor", got=f"{frame.dtype} {tuple(frame.shape)}"))
    if not out.is_contiguous():
        raise ValueError(describe("decompress needs a contiguous output", got=f"strides {tuple(out.stride())}"))
    header = fmt.parse_header(bytes(frame[:fmt.HEADER_BYTES].tolist()))
    flat = out.view(-1)
    dtype = BY_TORCH.get(flat.dtype)
    numel = flat.numel() if dtype else flat.numel() * flat.element_size()
    if header.dtype != dtype or header.numel != numel:
        raise FrameError(describe("a frame holds something else than asked for",
                                  got=f"{header.numel} x {header.dtype.name if header.dtype else 'bytes'}",
                                  expected=f"{numel} x {dtype.name if dtype else 'bytes'}"))
    if header.mode == fmt.MODE_RAW:
        num_bytes = flat.numel() * flat.element_size()
        if frame.numel() < fmt.raw_frame_bytes(num_bytes):
            raise FrameError(describe("raw frame is truncated", got=frame.numel(), expected=fmt.raw_frame_bytes(num_bytes)))
        flat.view(torch.uint8).copy_(frame[fmt.HEADER_BYTES:fmt.HEADER_BYTES + num_bytes])
        return out
    if header.escapes_per_block > fmt.MAX_ESCAPES_PER_BLOCK:
        raise FrameError(describe("escape capacity of a frame out of range", got=header.escapes_per_block,
                                  expected=f"<= {fmt.MAX_ESCAPES_PER_BLOCK}"))
    codec = Codec.of(flat.dtype, flat.numel(), flat.device.type, escapes_per_block=header.escapes_per_block,
                     spill_per_tile=header.spill_per_tile, window_lo=header.window_lo, kernels=kernels)
    if frame.numel() < codec.frame_bytes:
        raise FrameError(describe("frame is truncated", got=f"{frame.numel()} bytes", expected=f">= {codec.frame_bytes}"))
    codec.decode(frame[:codec.frame_bytes].view(1, -1), flat.view(1, -1))
    return out
