"""Frame layout and header: the one place that computes offsets, sizes and alignment (docs/format.md)."""
import functools
import struct
from dataclasses import dataclass

from ds_zipccl.codec.checksum import CRC32, NONE
from ds_zipccl.codec.dtypes import BY_CODE, RAW_CODE, DType
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import describe

VERSION = 1
MAGIC = b"ZCCL"
ALIGN_BYTES = 128
HEADER_BYTES = 128
BLOCK_ELEMS = 1024
TILE_BLOCKS = 32
GROUP_TILES = 256
TILE_ELEMS = BLOCK_ELEMS * TILE_BLOCKS
TILE_HEADER_BYTES = 16
BLOCK_HEADER_BYTES = 4
CODE_BYTES = BLOCK_ELEMS * 3 // 8            # one packed 3-bit plane of a block (FP16's extra plane, the codes of level 1)
WINDOW_OFFSET = 7
STATUS_OFFSET = 20
CHECKSUM_OFFSET = 24                         # u32 kind, u32 checksum of the frame with this u32 zero
OVERFLOW_BIT = 1 << 16
NEED_MASK = OVERFLOW_BIT - 1
SPILL_SHIFT, SPILL_MASK, SPILL_UNIT_BYTES = 17, (1 << 14) - 1, 4
MODE_ZIPPED, MODE_RAW, MODE_ZERO_BLOCKS, MODE_ZIPPED_2 = 0, 1, 2, 3
DEFAULT_SPILL_PER_TILE = 64                  # 0.14 %: a group of 256 tiles can hold 16 blocks of arbitrary exponents
FEW_TILES = 8                                # fewer cannot lend each other sub-pool: they get larger slots

_HEADER = struct.Struct("<4sBBBBQHHIII96x")
assert _HEADER.size == HEADER_BYTES


@dataclass(frozen=True)
class Level:
    """What the layout of a zipped frame depends on. Of a block: ``code_bytes`` at a fixed place, at most ``max_slot_bytes`` in the slots
    (``c``), by default ``slot_bytes`` and, in frames of few tiles, ``slot_bytes_few``. ``given_window``: whether there may be one."""
    mode: int
    code_bytes: int
    max_slot_bytes: int
    slot_bytes: int
    slot_bytes_few: int
    given_window: bool


LEVELS = {
    # a full BF16 tile has room for 35.5 escapes a block: Gaussians need 21-31
    1: Level(MODE_ZIPPED, CODE_BYTES, BLOCK_ELEMS, slot_bytes=35, slot_bytes_few=35, given_window=True),
    # for 95.5 bytes of streams a block: Gaussians need 89-96; at most 2 + 4 + 8 bits an element
    2: Level(MODE_ZIPPED_2, BLOCK_ELEMS * 2 // 8, BLOCK_ELEMS * 14 // 8, slot_bytes=95, slot_bytes_few=103, given_window=False),
}
LEVEL_OF_MODE = {row.mode: level for level, row in LEVELS.items()}
DEFAULT_ESCAPES_PER_BLOCK = LEVELS[1].slot_bytes


def align(num_bytes: int) -> int:
    """Rounds up to the next multiple of 128 bytes."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Header:
    """A parsed frame header. ``dtype`` is None for raw bytes (dtype code 0)."""
    dtype: DType | None
    mode: int
    window_lo: int
    numel: int
    escapes_per_block: int
    spill_per_tile: int
    status: int
    checksum_kind: int           # checksum.NONE or checksum.CRC32
    checksum: int

    @property
    def level(self) -> int | None:
        """The compression level of a zipped frame; None for the other modes."""
        return LEVEL_OF_MODE.get(self.mode)

    @property
    def overflow(self) -> bool:
        return bool(self.status & OVERFLOW_BIT)

    @property
    def need(self) -> int:
        """Escape capacity per block, in bytes, with which no tile would have spilled."""
        return self.status & NEED_MASK

    @property
    def spill_need_bytes(self) -> int:
        """Sub-pool bytes per tile with which no group would have overflowed."""
        return spill_need_bytes(self.status)


def spill_need_bytes(status: int) -> int:
    """Of a status word: sub-pool bytes per tile with which no group overflows, at the escape capacity the frame was written with."""
    return (status >> SPILL_SHIFT & SPILL_MASK) * SPILL_UNIT_BYTES


def pack_header(dtype_code: int, mode: int, numel: int, escapes_per_block: int = 0, spill_per_tile: int = 0,
                window_lo: int = -1) -> bytes:
    """The 128 header bytes with status 0."""
    return _HEADER.pack(MAGIC, VERSION, dtype_code, mode, window_lo + 1, numel, escapes_per_block, spill_per_tile, 0, 0, 0)


def parse_header(data: bytes) -> Header:
    """Reads a frame header.

    Raises FrameError when the bytes are too few, or a field or a reserved byte is not what version 1 defines. The
    checksum is not compared: it needs the whole frame.
    """
    if len(data) < HEADER_BYTES:
        raise FrameError(describe("frame is shorter than its header", got=f"{len(data)} bytes", expected=f">= {HEADER_BYTES}"))
    magic, version, code, mode, window, numel, escapes, spill, status, kind, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(describe("not a ZipCCL frame", got=f"magic {magic!r}", expected=repr(MAGIC)))
    if version != VERSION:
        raise FrameError(describe("frame of another format version", got=version, expected=VERSION,
                                  todo="use the same zipscape version on every rank"))
    if code not in BY_CODE and code != RAW_CODE:
        raise FrameError(describe("unknown dtype code in a frame", got=code, expected=sorted([RAW_CODE, *BY_CODE])))
    level = LEVEL_OF_MODE.get(mode)
    if mode not in (MODE_RAW, MODE_ZERO_BLOCKS) and level is None or (mode != MODE_RAW and code == RAW_CODE) \
            or level and level not in BY_CODE[code].levels:
        raise FrameError(describe("unknown mode in a frame", got=f"mode {mode}, dtype code {code}",
                                  expected="0 (zipped), 1 (raw), 2 (zero blocks left out) or, with dtype code 1, 3 (zipped at level 2)"))
    if any(data[CHECKSUM_OFFSET + 8:HEADER_BYTES]) or status >> 31 \
            or level is None and (window or escapes or spill or status) or level and window and not LEVELS[level].given_window:
        raise FrameError(describe("reserved bytes of a frame header are set", expected="zeros in version 1"))
    if kind not in (NONE, CRC32) or (kind == NONE and checksum):
        raise FrameError(describe("checksum kind of a frame", got=f"kind {kind}, checksum {checksum:#x}",
                                  expected=f"{NONE} (none, checksum zero) or {CRC32} (CRC-32)"))
    dtype = BY_CODE.get(code)
    if dtype is not None and window - 1 > dtype.top_lo:
        raise FrameError(describe("window base of a frame out of range", got=window - 1, expected=f"<= {dtype.top_lo}"))
    if level and escapes > LEVELS[level].max_slot_bytes:
        raise FrameError(describe("escape capacity of a frame out of range", got=escapes, expected=f"<= {LEVELS[level].max_slot_bytes}"))
    return Header(dtype, mode, window - 1, numel, escapes, spill, status, kind, checksum)


def pack_checksum(kind: int, checksum: int) -> bytes:
    """The 8 header bytes at CHECKSUM_OFFSET."""
    return struct.pack("<II", kind, checksum)


def default_capacity(numel: int, level: int) -> int:
    """The usual escape capacity per block, in bytes, of a frame of ``numel`` elements."""
    return LEVELS[level].slot_bytes_few if numel <= (FEW_TILES - 1) * TILE_ELEMS else LEVELS[level].slot_bytes


def _tile_sections(dtype: DType, num_blocks: int, escapes_per_block: int, code_bytes: int) -> tuple[int, ...]:
    """(escapes_offset, escapes_capacity, codes_offset, extra_offset, planes_offset, tile_bytes) of a tile of
    ``num_blocks``."""
    escapes_offset = TILE_HEADER_BYTES + BLOCK_HEADER_BYTES * num_blocks
    codes_offset = align(escapes_offset + escapes_per_block * num_blocks)
    extra_offset = codes_offset + code_bytes * num_blocks
    planes_offset = extra_offset + CODE_BYTES * num_blocks * dtype.extra_plane
    tile_bytes = planes_offset + BLOCK_ELEMS * dtype.byte_planes * num_blocks
    return escapes_offset, codes_offset - escapes_offset, codes_offset, extra_offset, planes_offset, tile_bytes


@functools.lru_cache(maxsize=4096)
def layout(dtype: DType, numel: int, escapes_per_block: int | None = None, spill_per_tile: int = DEFAULT_SPILL_PER_TILE,
           window_lo: int = -1, level: int = 1) -> Geometry:
    """The geometry of a zipped frame of ``numel`` elements. Equal arguments give equal frames on every rank.

    ``escapes_per_block`` (0..1024, level 2: 0..1792; None: ``default_capacity``) and ``spill_per_tile`` (0..65535) are bytes;
    ``window_lo`` -1 takes each block's own mean, level 2 has no other. ``level``: one of ``dtype.levels``. Raises ValueError when an
    argument is out of range.
    """
    if level not in dtype.levels:
        raise ValueError(describe("this compression level is not defined for the dtype", got=f"level {level}, {dtype.name}",
                                  expected=" or ".join(map(str, dtype.levels))))
    row = LEVELS[level]
    top = dtype.top_lo if row.given_window else -1
    if escapes_per_block is None:
        escapes_per_block = default_capacity(numel, level)
    if numel < 0 or not 0 <= escapes_per_block <= row.max_slot_bytes or not 0 <= spill_per_tile < 1 << 16 or not -1 <= window_lo <= top:
        raise ValueError(describe("frame layout out of range", got=(numel, escapes_per_block, spill_per_tile, window_lo),
                                  expected=f"numel >= 0, escapes_per_block 0..{row.max_slot_bytes}, spill_per_tile 0..65535, "
                                           f"window_lo -1..{top} at level {level}"))
    num_blocks = -(-numel // BLOCK_ELEMS)
    num_tiles = -(-num_blocks // TILE_BLOCKS)
    num_groups = -(-num_tiles // GROUP_TILES)
    last_blocks = num_blocks - TILE_BLOCKS * (num_tiles - 1) if num_tiles else 0
    full = _tile_sections(dtype, TILE_BLOCKS, escapes_per_block, row.code_bytes)
    last = _tile_sections(dtype, last_blocks, escapes_per_block, row.code_bytes) if num_tiles else (0,) * 6
    pools_offset = HEADER_BYTES + full[5] * max(num_tiles - 1, 0) + last[5]
    pool_bytes = align(spill_per_tile * GROUP_TILES)
    last_pool_bytes = align(spill_per_tile * (num_tiles - GROUP_TILES * (num_groups - 1))) if num_tiles else 0
    frame_bytes = pools_offset + pool_bytes * max(num_groups - 1, 0) + last_pool_bytes
    return Geometry(
        level=level, dtype_code=dtype.code, itemsize=dtype.itemsize, exponent_bits=dtype.exponent_bits,
        mantissa_bits=dtype.mantissa_bits, byte_planes=dtype.byte_planes, extra_plane=int(dtype.extra_plane), window_lo=window_lo,
        numel=numel, num_tiles=num_tiles,
        num_groups=num_groups, tile_blocks=TILE_BLOCKS, group_tiles=GROUP_TILES, tiles_offset=HEADER_BYTES, tile_bytes=full[5],
        escapes_offset=full[0], escapes_capacity=full[1], codes_offset=full[2], extra_offset=full[3], planes_offset=full[4],
        last_blocks=last_blocks, last_escapes_offset=last[0], last_escapes_capacity=last[1], last_codes_offset=last[2],
        last_extra_offset=last[3], last_planes_offset=last[4], pools_offset=pools_offset, pool_bytes=pool_bytes,
        last_pool_bytes=last_pool_bytes, spill_per_tile=spill_per_tile, frame_bytes=frame_bytes,
        header=pack_header(dtype.code, row.mode, numel, escapes_per_block, spill_per_tile, window_lo))


def raw_frame_bytes(num_bytes: int) -> int:
    """Size of a raw-mode frame around ``num_bytes`` of data: the worst case of a stored frame."""
    return HEADER_BYTES + align(num_bytes)
