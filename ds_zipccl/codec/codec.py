"""Tensors to frames and back: the codec's interface for everything above it.

Two levels. ``Codec`` works on rows of equal size with a layout both sides know (the collectives' hot path: no
allocation of its own, nothing waits for the device). ``compress``/``decompress`` make self-describing frames of any
tensor (files, benchmarks) and choose capacity and raw mode by themselves; they read the status on the host.
"""
import contextlib
import zlib
from dataclasses import dataclass, replace

import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec import zero_blocks
from ds_zipccl.codec.analysis import tile_escapes
from ds_zipccl.codec.checksum import CRC32, crc32
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.fit import best_capacity
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import loader, ops
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import describe

INTEGRITY = ("off", "checksum", "roundtrip")


@dataclass(frozen=True)
class Codec:
    """A layout together with the kernel set that reads and writes it."""
    geometry: Geometry
    kernels: str

    @classmethod
    def of(cls, dtype: torch.dtype, numel: int, device_type: str, *, escapes_per_block: int | None = None,
           spill_per_tile: int = fmt.DEFAULT_SPILL_PER_TILE, window_lo: int = -1, level: int = 1, kernels: str = "best") -> "Codec":
        """The codec for rows of ``numel`` elements; see ``format.layout``. Raises KeyError for a dtype outside the table, ValueError for a
        level that the dtype does not have, KernelError for kernels that are unusable or do not know the level."""
        geometry = fmt.layout(BY_TORCH[dtype], numel, escapes_per_block, spill_per_tile, window_lo, level)
        return cls(geometry, loader.resolve(kernels, device_type, level))

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

    def encoder(self, frames: torch.Tensor, status: torch.Tensor, skip: int = -1, offset: int = 0):
        """``encode`` bound to its frames: see ``kernels.ops.bind_encode``."""
        return ops.bind_encode(frames, status, self.geometry, skip, offset, kernels=self.kernels)

    def decoder(self, frames: torch.Tensor, skip: int = -1, offset: int = 0):
        """See ``kernels.ops.bind_decode``."""
        return ops.bind_decode(frames, self.geometry, skip, offset, kernels=self.kernels)

    def reducer(self, frames: torch.Tensor, own_index: int, offset: int = 0):
        """See ``kernels.ops.bind_decode_reduce``."""
        return ops.bind_decode_reduce(frames, own_index, self.geometry, offset, kernels=self.kernels)

    def expecting(self, header: bytes) -> "Codec":
        """The codec whose frames have these 128 header bytes, checksum included: kernels compare the whole header."""
        plain = header[:fmt.STATUS_OFFSET] + bytes(4) + header[fmt.STATUS_OFFSET + 4:]
        return self if plain == self.geometry.header else replace(self, geometry=self.geometry._replace(header=plain))

    def giving(self, window_lo: int) -> "Codec":
        """The same codec with another given window (-1: none) in what it encodes. Raises ValueError for one at level 2."""
        if window_lo >= 0 and not fmt.LEVELS[self.geometry.level].given_window:
            raise ValueError(describe("this level takes no given window", got=f"level {self.geometry.level}, window base {window_lo}"))
        header = self.geometry.header[:fmt.WINDOW_OFFSET] + bytes([window_lo + 1]) + self.geometry.header[fmt.WINDOW_OFFSET + 1:]
        return replace(self, geometry=self.geometry._replace(window_lo=window_lo, header=header))

    def raise_on_error(self, device: torch.device) -> None:
        """Raises FrameError if a frame decoded on ``device`` before was corrupt. Only kernels that cannot raise by
        themselves (CUDA) have anything to look up; they wait for the device."""
        check = getattr(ops.kernel_set(self.kernels), "raise_on_error", None)
        if check is not None:
            check(device)

    @contextlib.contextmanager
    def raising(self, device: torch.device):
        """Frames decoded inside raise FrameError if they were corrupt, at the latest at the end. What kernels noted before is forgotten: it
        is of calls that nobody asked about, which may have decoded, early, what had overflowed."""
        with contextlib.suppress(FrameError):
            self.raise_on_error(device)
        yield
        self.raise_on_error(device)


def split_status(word: int) -> tuple[bool, int]:
    """(overflow, need) of a status word."""
    return bool(word & fmt.OVERFLOW_BIT), word & fmt.NEED_MASK


def compress(x: torch.Tensor, *, kernels: str = "best", level: int = 1, escapes_per_block: int | None = None,
             spill_per_tile: int = fmt.DEFAULT_SPILL_PER_TILE, window_lo: int = -1, integrity: str = "off") -> torch.Tensor:
    """A self-describing frame, uint8 [bytes], of a dense tensor of any dtype, shape and strides, on its device.

    ``level``: 1, or 2 for smaller frames that take longer to make; a dtype without level 2 (``dtypes.TABLE``) takes level 1. Level 2 has
    no ``window_lo``: ValueError.

    Starts with the given capacity, repeats once with the capacity that fits the data best, and stores raw (mode 1) what
    that does not make smaller than raw or whose dtype the codec does not know. The result is never longer than
    ``format.raw_frame_bytes(x.nbytes)``. Shape and, for dtypes outside the table, dtype are the caller's to remember.

    ``integrity``: "off"; "checksum": the frame carries a CRC-32 that ``decompress`` verifies; "roundtrip": the frame is
    decoded again and compared with ``x`` by bits before it is returned, FrameError if they differ.
    Raises TypeError for tensors without bytes of their own (sparse, quantized, meta).
    """
    if integrity not in INTEGRITY:
        raise ValueError(describe("unknown integrity setting", got=integrity, expected=" or ".join(INTEGRITY)))
    if level not in fmt.LEVELS:
        raise ValueError(describe("unknown compression level", got=level, expected=" or ".join(map(str, fmt.LEVELS))))
    flat = _flat(x)
    options = kernels, level, escapes_per_block, spill_per_tile, window_lo
    frame = _zero_block_frame(flat, *options)
    if frame is None:
        frame = _plain_frame(flat, *options)
    if integrity == "checksum":
        seal(frame)
    elif integrity == "roundtrip":
        _prove(frame, flat, kernels)
    return frame


def _flat(x: torch.Tensor) -> torch.Tensor:
    if x.layout != torch.strided or x.is_quantized or x.device.type == "meta":
        raise TypeError(describe("the codec takes dense tensors", got=f"{x.dtype}, {x.layout}, on {x.device}",
                                 todo="compress the dense tensors that it consists of"))
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _zipped_frame(flat: torch.Tensor, kernels: str, level: int, escapes_per_block: int | None, spill_per_tile: int,
                  window_lo: int) -> torch.Tensor | None:
    """None when a raw frame is as small, or the dtype is not in the table."""
    dtype, raw_bytes = BY_TORCH.get(flat.dtype), fmt.raw_frame_bytes(flat.nbytes)
    level = dtype.level(level) if dtype else level
    for _ in range(2 if dtype else 0):
        codec = Codec.of(flat.dtype, flat.numel(), flat.device.type, escapes_per_block=escapes_per_block,
                         spill_per_tile=spill_per_tile, window_lo=window_lo, level=level, kernels=kernels)
        if codec.frame_bytes >= raw_bytes:
            return None
        frames = codec.empty_frames(1, flat.device)
        status = torch.zeros(1, dtype=torch.int32, device=flat.device)
        codec.encode(flat.view(1, -1), frames, status)
        if not split_status(int(status))[0]:
            return frames[0]
        counts = tile_escapes(frames[0], codec.geometry)
        escapes_per_block, spill_per_tile = best_capacity(counts, dtype, flat.numel(), level)
    return None


def _plain_frame(flat: torch.Tensor, *options) -> torch.Tensor:
    frame = _zipped_frame(flat, *options)
    return _raw_frame(flat) if frame is None else frame


def _zero_block_frame(flat: torch.Tensor, *options) -> torch.Tensor | None:
    """None when there are too few zero blocks, or a raw frame is as small (a lone zero block that is partly filled)."""
    present = zero_blocks.find(flat) if flat.dtype in BY_TORCH else None
    if present is None:
        return None
    header = fmt.pack_header(BY_TORCH[flat.dtype].code, fmt.MODE_ZERO_BLOCKS, flat.numel())
    bitmap, inner = zero_blocks.to_bitmap(present), _plain_frame(zero_blocks.pack(flat, present), *options)
    start = fmt.HEADER_BYTES + bitmap.numel()
    if start + inner.numel() >= fmt.raw_frame_bytes(flat.nbytes):
        return None
    frame = torch.empty(start + inner.numel(), dtype=torch.uint8, device=flat.device)
    _put(frame, 0, header)
    frame[fmt.HEADER_BYTES:start] = bitmap
    frame[start:] = inner
    return frame


def _raw_frame(flat: torch.Tensor) -> torch.Tensor:
    dtype = BY_TORCH.get(flat.dtype)
    data = flat.view(torch.uint8)
    header = fmt.pack_header(dtype.code if dtype else fmt.RAW_CODE, fmt.MODE_RAW, flat.numel() if dtype else data.numel())
    frame = torch.zeros(fmt.raw_frame_bytes(data.numel()), dtype=torch.uint8, device=flat.device)
    _put(frame, 0, header)
    frame[fmt.HEADER_BYTES:fmt.HEADER_BYTES + data.numel()] = data
    return frame


def _put(frame: torch.Tensor, offset: int, data: bytes) -> None:
    frame[offset:offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(frame.device)


def _checksum(frame: torch.Tensor, kind: int) -> int:
    """Of the whole frame, as if its checksum field were zero and its kind were ``kind``."""
    header = bytearray(frame[:fmt.HEADER_BYTES].tolist())
    header[fmt.CHECKSUM_OFFSET:fmt.CHECKSUM_OFFSET + 8] = fmt.pack_checksum(kind, 0)
    return crc32(frame[fmt.HEADER_BYTES:], zlib.crc32(header))


def seal(frame: torch.Tensor) -> None:
    """Writes a CRC-32 of the whole frame into its header."""
    _put(frame, fmt.CHECKSUM_OFFSET, fmt.pack_checksum(CRC32, _checksum(frame, CRC32)))


def unseal(frame: torch.Tensor) -> None:
    """Verifies the checksum and takes it out of the header again. Raises FrameError if it is wrong or there is none."""
    header = fmt.parse_header(bytes(frame[:fmt.HEADER_BYTES].tolist()))
    if not header.checksum_kind:
        raise FrameError(describe("a frame carries no checksum", expected="one: integrity is \"checksum\" on every rank"))
    _verify(frame, header)
    _put(frame, fmt.CHECKSUM_OFFSET, bytes(8))


def _verify(frame: torch.Tensor, header: fmt.Header) -> None:
    found = _checksum(frame, header.checksum_kind)
    if found != header.checksum:
        raise FrameError(describe("the checksum of a frame is wrong", got=f"{found:#010x}", expected=f"{header.checksum:#010x}"))


def _prove(frame: torch.Tensor, flat: torch.Tensor, kernels: str) -> None:
    again = decompress(frame, torch.empty_like(flat), kernels=kernels).view(torch.uint8)
    if not torch.equal(again, flat.view(torch.uint8)):
        first = int((again != flat.view(torch.uint8)).nonzero()[0])
        raise FrameError(describe("a frame does not decode to what was encoded", where=f"kernels {kernels!r}, byte {first} of the data",
                                  todo="report this as a bug, with the tensor; compressed results of this machine cannot be trusted"))


def decompress(frame: torch.Tensor, out: torch.Tensor, *, kernels: str = "best") -> torch.Tensor:
    """Fills the contiguous tensor ``out`` from a frame made by ``compress`` and returns it.

    Bytes of ``frame`` beyond its own size are ignored. Raises FrameError when the frame is corrupt, truncated, of
    another version, or of another dtype or element count than ``out``; the contents of ``out`` are then unspecified.
    """
    if frame.dtype != torch.uint8 or frame.dim() != 1 or not frame.is_contiguous():
        raise FrameError(describe("a frame is a contiguous 1-D uint8 tensor", got=f"{frame.dtype} {tuple(frame.shape)}"))
    if not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise ValueError(describe("decompress needs a contiguous output of plain bytes", got=f"strides {tuple(out.stride())}"))
    flat = out.detach().view(-1)
    head, header = _read_header(frame, flat)
    if header.mode == fmt.MODE_ZERO_BLOCKS:
        _decompress_zero_blocks(frame, header, flat, kernels)
    else:
        _decompress_plain(frame, head, header, flat, kernels)
    return out


def _read_header(frame: torch.Tensor, flat: torch.Tensor) -> tuple[bytes, fmt.Header]:
    """The header bytes and what they mean; FrameError unless the frame says it holds ``flat``'s dtype and number of elements."""
    head = bytes(frame[:fmt.HEADER_BYTES].tolist())
    header = fmt.parse_header(head)
    dtype = BY_TORCH.get(flat.dtype)
    numel = flat.numel() if dtype else flat.nbytes
    if header.dtype != dtype or header.numel != numel:
        raise FrameError(describe("a frame holds something else than asked for",
                                  got=f"{header.numel} x {header.dtype.name if header.dtype else 'bytes'}",
                                  expected=f"{numel} x {dtype.name if dtype else 'bytes'}"))
    return head, header


def _whole(frame: torch.Tensor, size: int, header: fmt.Header) -> torch.Tensor:
    """The frame's own ``size`` bytes, checksum verified if it carries one."""
    if frame.numel() < size:
        raise FrameError(describe("frame is truncated", got=f"{frame.numel()} bytes", expected=f">= {size}"))
    if header.checksum_kind:
        _verify(frame[:size], header)
    return frame[:size]


def _codec_of(header: fmt.Header, flat: torch.Tensor, kernels: str) -> Codec | None:
    """The codec of a plain frame that is said to hold ``flat``; None for raw mode."""
    if header.mode == fmt.MODE_RAW:
        return None
    return Codec.of(flat.dtype, flat.numel(), flat.device.type, escapes_per_block=header.escapes_per_block,
                    spill_per_tile=header.spill_per_tile, window_lo=header.window_lo, level=header.level, kernels=kernels)


def _decompress_plain(frame: torch.Tensor, head: bytes, header: fmt.Header, flat: torch.Tensor, kernels: str) -> None:
    codec = _codec_of(header, flat, kernels)
    frame = _whole(frame, codec.frame_bytes if codec else fmt.raw_frame_bytes(flat.nbytes), header)
    if codec:
        with codec.raising(flat.device):
            codec.expecting(head).decode(frame.view(1, -1), flat.view(1, -1))
    else:
        flat.view(torch.uint8).copy_(frame[fmt.HEADER_BYTES:fmt.HEADER_BYTES + flat.nbytes])


def _decompress_zero_blocks(frame: torch.Tensor, header: fmt.Header, flat: torch.Tensor, kernels: str) -> None:
    num_blocks = -(-flat.numel() // fmt.BLOCK_ELEMS)
    start = fmt.HEADER_BYTES + zero_blocks.bitmap_bytes(num_blocks)
    if frame.numel() < start + fmt.HEADER_BYTES:
        raise FrameError(describe("frame is truncated", got=f"{frame.numel()} bytes", expected=f">= {start + fmt.HEADER_BYTES}"))
    present = zero_blocks.from_bitmap(frame[fmt.HEADER_BYTES:start], num_blocks)
    if present is None:
        raise FrameError(describe("corrupt frame: its bitmap names blocks beyond the last", expected=f"{num_blocks} blocks"))
    packed = torch.empty(zero_blocks.num_packed(present, flat.numel()), dtype=flat.dtype, device=flat.device)
    inner_head, inner = _read_header(frame[start:], packed)
    if inner.mode == fmt.MODE_ZERO_BLOCKS or inner.checksum_kind:
        raise FrameError(describe("corrupt frame: the frame inside it is of another kind", got=f"mode {inner.mode}",
                                  expected="0, 1 or 3, no checksum"))
    codec = _codec_of(inner, packed, kernels)
    size = start + (codec.frame_bytes if codec else fmt.raw_frame_bytes(packed.nbytes))
    _decompress_plain(_whole(frame, size, header)[start:], inner_head, inner, packed, kernels)
    zero_blocks.unpack(packed, present, flat)
