"""What the compiled kernels say about a corrupt frame, in the reference's words (docs/format.md, section 7)."""
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import impl_reference
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import describe

# csrc/zipccl: FailureKind
BAD_HEADER, BAD_BLOCK_COUNT, BAD_TILE_COUNT, BAD_WINDOW, BAD_SPILL = range(1, 6)
_WORDS = {
    BAD_BLOCK_COUNT: "a block's escape count differs from its codes",
    BAD_TILE_COUNT: "a tile's escape count differs from its blocks'",
    BAD_WINDOW: "block mode or window base out of range",
    BAD_SPILL: "a tile's spill lies outside its sub-pool",
}
_LEVEL_2_WORDS = {**_WORDS, BAD_BLOCK_COUNT: "a block's stream is not as long as its header says",
                  BAD_SPILL: "a tile's spill lies outside its sub-pool, or starts within a word"}


def frame_error(kind: int, header: bytes, tile: int, spill_end: int, g: Geometry) -> FrameError:
    """The error for a FailureKind > 0 of a frame with these 128 header bytes. ``spill_end``: bytes, of a bad spill."""
    if kind == BAD_HEADER:
        try:
            impl_reference.check_header(header, g)
        except FrameError as error:
            return error
    words = _LEVEL_2_WORDS if g.level == 2 else _WORDS
    what = f"corrupt frame: {words.get(kind, 'it changed while it was read')}"
    if kind == BAD_SPILL:
        pool_bytes = g.last_pool_bytes if tile // g.group_tiles == g.num_groups - 1 else g.pool_bytes
        return FrameError(describe(what, got=spill_end, expected=f"<= {pool_bytes}", where=f"tile {tile}"))
    return FrameError(describe(what, where=_run_of(tile, g)))


def _run_of(tile: int, g: Geometry) -> str:
    """The tiles that the reference decodes together with ``tile``: a group's but for the frame's last one."""
    first = tile // g.group_tiles * g.group_tiles
    end = min(first + g.group_tiles, g.num_tiles)
    if end == g.num_tiles:
        first, end = (tile, end) if tile == end - 1 else (first, end - 1)
    return f"tiles {first}..{end - 1}"
