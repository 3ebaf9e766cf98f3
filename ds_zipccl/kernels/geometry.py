"""The numbers a kernel needs to find its way in a frame. Filled by codec/format.py, the only place that computes
them."""
import struct
from typing import NamedTuple

_HEADER = struct.Struct("<16q")


class Geometry(NamedTuple):
    """Sizes and offsets of one frame, in bytes unless said otherwise (docs/format.md).

    The C and CUDA sources receive the integer fields in this order as int64 (``csrc/zipccl/geometry.h`` mirrors it, a
    test compares both) and ``header`` as 128 bytes. ``last_*`` describe the last tile, which may have fewer blocks than
    the others.
    """
    level: int                   # compression level, 1 or 2
    dtype_code: int
    itemsize: int
    exponent_bits: int
    mantissa_bits: int
    byte_planes: int
    extra_plane: int             # 0 or 1
    window_lo: int               # given window base, -1: block mean
    numel: int                   # elements in the frame
    num_tiles: int
    num_groups: int
    tile_blocks: int             # blocks in a full tile
    group_tiles: int             # tiles that share a sub-pool
    tiles_offset: int            # first tile in the frame
    tile_bytes: int              # stride between tiles
    escapes_offset: int          # in a full tile: escape slots; block headers start at 16
    escapes_capacity: int
    codes_offset: int
    extra_offset: int
    planes_offset: int
    last_blocks: int             # the same for the last tile
    last_escapes_offset: int
    last_escapes_capacity: int
    last_codes_offset: int
    last_extra_offset: int
    last_planes_offset: int
    pools_offset: int            # first sub-pool in the frame
    pool_bytes: int              # stride between sub-pools = size of a full group's sub-pool
    last_pool_bytes: int
    spill_per_tile: int
    frame_bytes: int
    header: bytes                # the frame header with status 0

    @property
    def ints(self) -> tuple[int, ...]:
        """The integer fields, in order."""
        return self[:-1]

    def flatten(self) -> list[int]:
        """All fields as int64s: the integer ones, then the header as 16 of them (for torch operator schemas)."""
        return [*self.ints, *_HEADER.unpack(self.header)]

    @classmethod
    def unflatten(cls, values) -> "Geometry":
        """Inverse of ``flatten``."""
        return cls(*values[:-16], _HEADER.pack(*values[-16:]))
