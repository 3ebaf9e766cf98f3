"""Every flipped bit of a frame raises FrameError or changes what docs/format.md says it may; nothing is written elsewhere (C05 C11).

The frames lie between canaries at the end of their allocations, so that a read past them shows under a sanitizer, and outputs between
canaries, so that a write past them shows here.
"""
import struct

import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.codec import Codec, compress, decompress
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.integrity import ProvenCodec, SealedCodec
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import loader, ops
from tests.helpers.bits import as_ints
from tests.zipccl.codec_cases import BF16, FORMATS, Guarded, data, header_of, zip_frame

TILE_HEAD = fmt.HEADER_BYTES                 # of the first tile; its block headers follow
BLOCK_HEAD = TILE_HEAD + fmt.TILE_HEADER_BYTES


def flipped(frame: torch.Tensor, bit: int) -> torch.Tensor:
    out = frame.clone()
    out[bit // 8] ^= 1 << bit % 8
    return out


def decoded(frame: torch.Tensor, out: Guarded, kernels: str) -> bool:
    """False when it raised FrameError; any other exception, and a touched canary, is a failure."""
    try:
        decompress(frame, out.data, kernels=kernels)
    except FrameError:
        return False
    finally:
        out.assert_untouched(kernels)
    return True


@FORMATS
def test_every_bit(kernels, dtype, level):
    """One block with a partly used sub-pool. A flip that decodes changes one element at most, unless it hit
    what many elements share: the spill offset, the window base, the block mode; at level 2 also a code or a place in the stream that
    moves what follows it."""
    x = data("specials", dtype, 700)
    capacity = (0, 900)
    g = Codec.of(dtype, 700, "cpu", escapes_per_block=0, spill_per_tile=900, level=level).geometry
    frame = zip_frame(x, kernels, capacity, level=level)
    assert frame.numel() == g.frame_bytes and header_of(frame).need > g.last_escapes_capacity
    bits = list(range(8 * (TILE_HEAD + g.last_codes_offset)))                    # every bit of header and tile headers
    rest = range(bits[-1] + 1, 8 * g.frame_bytes)
    bits += rest if kernels != "reference" else rest[::41]
    wide = {*range(8 * TILE_HEAD + 32, 8 * TILE_HEAD + 64), *range(8 * BLOCK_HEAD, 8 * BLOCK_HEAD + 16)}      # spill offset, lo, mode
    if level == 2:
        wide |= {*range(8 * (BLOCK_HEAD + 4), 8 * (TILE_HEAD + g.last_planes_offset)), *range(8 * g.pools_offset, 8 * g.frame_bytes)}
    ints, raised = as_ints(x), 0
    for bit in bits:
        out = Guarded(x.numel(), dtype)
        if not decoded(flipped(frame, bit), out, kernels):
            raised += 1
            continue
        num_changed = int((as_ints(out.data) != ints).sum())
        assert num_changed <= 1 or bit in wide, f"{kernels}: bit {bit} changed {num_changed} elements"
    assert raised > 300 and raised < len(bits)


@FORMATS
def test_every_bit_with_a_checksum(kernels, dtype, level):
    """C11: no flip goes unseen, in zipped and in raw frames; the error names both checksums."""
    x = data("gaussian", dtype, 1100)
    zipped = compress(x.repeat(12), kernels=kernels, level=level, integrity="checksum")
    assert header_of(zipped).level == level
    raw = compress(data("random bits", dtype, 200), kernels=kernels, integrity="checksum")
    assert header_of(raw).mode == fmt.MODE_RAW
    for frame, numel in ((zipped, 12 * 1100), (raw, 200)):
        out = Guarded(numel, dtype)
        num_bits = 8 * frame.numel()
        for bit in [*range(1024), *range(1024, num_bits, 1 if numel == 200 else 397), num_bits - 1]:
            assert not decoded(flipped(frame, bit), out, kernels), f"bit {bit}"
        with pytest.raises(FrameError, match="checksum of a frame is wrong.*0x.*0x"):
            decompress(flipped(frame, num_bits - 1), out.data, kernels=kernels)


def patched(frame: torch.Tensor, offset: int, data: bytes) -> torch.Tensor:
    out = frame.clone()
    out[offset:offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return out


def u32(frame: torch.Tensor, offset: int) -> int:
    return struct.unpack("<I", bytes(frame[offset:offset + 4].tolist()))[0]


def structural(frame: torch.Tensor, numel: int, dtype, level: int) -> dict[str, torch.Tensor]:
    """Each fault of docs/format.md, sections 7 and 9, in a frame of one tile that spills."""
    top, other = BY_TORCH[dtype].top_lo, 1 + BY_TORCH[dtype].code % 3
    count, spill_at = u32(frame, TILE_HEAD), u32(frame, TILE_HEAD + 4)
    head = u32(frame, BLOCK_HEAD)
    faults = {
        "magic": (0, b"ZCCX"), "version 0": (4, b"\0"), "version 2": (4, b"\2"), "dtype": (5, bytes([other])), "unknown dtype": (5, b"\7"),
        "raw dtype in zipped mode": (5, b"\0"), "unknown mode": (6, b"\4"), "zero blocks with capacities": (6, b"\2"),
        "raw mode with capacities": (6, b"\1"),
        "given window beyond top": (7, bytes([top + 2])), "given window 254": (7, b"\xff"),
        "one element more": (8, struct.pack("<Q", numel + 1)), "one element less": (8, struct.pack("<Q", numel - 1)),
        "2^63 elements": (8, struct.pack("<Q", 1 << 63)), "c beyond a block": (16, struct.pack("<H", fmt.LEVELS[level].max_slot_bytes + 1)),
        "c that needs a longer frame": (16, struct.pack("<H", 1024)), "s that needs a longer frame": (18, struct.pack("<H", 65535)),
        "overflow": (22, b"\1"), "status bit 31": (23, b"\x80"),
        "unknown checksum kind": (24, b"\2"), "checksum without kind": (28, b"\1"), "wrong checksum": (24, struct.pack("<II", 1, 12345)),
        "reserved byte 32": (32, b"\1"), "reserved byte 127": (127, b"\x80"),
        "tile count + 1": (TILE_HEAD, struct.pack("<I", count + 1)), "tile count 2^32 - 1": (TILE_HEAD, b"\xff" * 4),
        "spill past the sub-pool": (TILE_HEAD + 4, struct.pack("<I", spill_at + 65408)), "spill at 2^32 - 1": (TILE_HEAD + 4, b"\xff" * 4),
        "block count + 1": (BLOCK_HEAD + 2, struct.pack("<H", (head >> 16) + 1)), "block count 65535": (BLOCK_HEAD + 2, b"\xff\xff"),
        "block mode 2": (BLOCK_HEAD + 1, b"\2"), "block mode 255": (BLOCK_HEAD + 1, b"\xff"),
        "lo beyond top": (BLOCK_HEAD, bytes([top + 1])), "lo 255": (BLOCK_HEAD, b"\xff"),
    }
    if level == 2:
        faults |= {"given window": (7, b"\1"), "block mode 6": (BLOCK_HEAD + 1, b"\6"), "lo 251": (BLOCK_HEAD, b"\xfb"),
                   "spill within a word": (TILE_HEAD + 4, struct.pack("<I", spill_at + 2)),
                   "stream + 4": (BLOCK_HEAD + 2, struct.pack("<H", (head >> 16) + 4))}
        faults["block mode 2"] = faults["lo beyond top"] = faults["block mode 6"]
    frames = {name: patched(frame, *patch) for name, patch in faults.items()}
    frames["block and tile count + 1"] = patched(frames["tile count + 1"], BLOCK_HEAD + 2, struct.pack("<H", (head >> 16) + 1))
    if level == 2:                           # the same bytes, shared out differently between the two blocks
        second = u32(frame, BLOCK_HEAD + 4)
        frames["4 bytes of the next block's stream"] = patched(frame, BLOCK_HEAD, struct.pack("<II", head + (4 << 16), second - (4 << 16)))
    return frames


@FORMATS
def test_structural_faults(kernels, dtype, level):
    x = data("specials", dtype, 1100)
    frame = zip_frame(x, kernels, (0, 2000), level=level)
    assert u32(frame, TILE_HEAD) > 232 or dtype != BF16
    faults = structural(frame, 1100, dtype, level)
    if ops.kernel_set(kernels).levels == BY_TORCH[dtype].levels:
        faults["the other level"] = patched(frame, 6, bytes([3 if level == 1 else 0]))
    for name, bad in faults.items():
        out = Guarded(x.numel(), dtype)
        assert not decoded(bad, out, kernels), f"{kernels} did not notice: {name}"


@FORMATS
def test_random_rubbish(kernels, dtype, level):
    """A valid header with random bytes behind it, and random bytes alone: raised or decoded, never outside."""
    x = data("gaussian", dtype, 3000)
    frame = zip_frame(x, kernels, level=level)
    generator = torch.Generator().manual_seed(5)
    for i in range(60 if kernels != "reference" else 12):
        bad = torch.randint(0, 256, (frame.numel(),), generator=generator, dtype=torch.uint8)
        if i % 3:
            bad[:fmt.HEADER_BYTES] = frame[:fmt.HEADER_BYTES]
        if i % 3 == 2:                       # sane block headers, so that more is read
            bad[TILE_HEAD:BLOCK_HEAD + 12] = frame[TILE_HEAD:BLOCK_HEAD + 12]
        assert not decoded(bad, Guarded(x.numel(), dtype), kernels)


def test_the_round_trip_setting_notices_a_broken_encoder(monkeypatch):
    """C11: integrity="roundtrip" decodes and compares before it returns; without it this fault would be stored."""
    x = data("gaussian", BF16, 9000)
    encode = Codec.encode

    def broken(self, rows, frames, status, skip=-1):
        encode(self, rows, frames, status, skip)
        frames[0, self.geometry.tiles_offset + self.geometry.last_planes_offset + 77] ^= 4

    monkeypatch.setattr(Codec, "encode", broken)
    compress(x)
    with pytest.raises(FrameError, match="does not decode to what was encoded.*byte"):
        compress(x, integrity="roundtrip")
    with pytest.raises(ValueError, match="md5.*off or checksum or roundtrip"):
        compress(x, integrity="md5")


class _Noting:
    """Kernels that note corrupt frames, as those of a GPU do, and raise when asked."""

    def __init__(self, noted):
        self.reference, self.noted = ops.kernel_set("reference"), noted

    def __getattr__(self, name):
        return getattr(self.reference, name)

    def decode(self, *args):
        try:
            self.reference.decode(*args)
        except FrameError as error:
            self.noted.append(error)

    def raise_on_error(self, device):
        noted, self.noted[:] = list(self.noted), []
        if noted:
            raise noted[0]


def test_what_others_decoded_is_not_held_against_a_frame(monkeypatch):
    """C11: a call that overflowed is decoded early, and its kernels note what they find; who asks about a frame is told of that one."""
    noted, x = [], data("gaussian", BF16, 3000)
    monkeypatch.setitem(ops._SETS, "noting", _Noting(noted))
    monkeypatch.setattr(loader, "resolve", lambda kernels, *_: kernels)
    geometry = Codec.of(BF16, x.numel(), "cpu", kernels="reference").geometry
    for checking in (SealedCodec, ProvenCodec):
        codec, status, out = checking(geometry, "noting"), torch.zeros(1, dtype=torch.int32), torch.empty_like(x)
        noted.append(FrameError("of another call"))
        frames = codec.empty_frames(1, "cpu")
        codec.encode(x.view(1, -1), frames, status)
        noted.append(FrameError("of another call"))
        codec.decode(frames, out.view(1, -1))
        codec.raise_on_error("cpu") if checking is SealedCodec else noted.clear()
        assert torch.equal(as_ints(out), as_ints(x))
    for integrity in ("off", "checksum"):
        noted.append(FrameError("of another call"))
        decompress(compress(x, kernels="reference", integrity=integrity), out.zero_(), kernels="noting")
        assert torch.equal(as_ints(out), as_ints(x))
    noted.append(FrameError("of another call"))
    bad = patched(compress(x, kernels="reference"), BLOCK_HEAD + 1, b"\xff")
    with pytest.raises(FrameError, match="window"):                    # its own fault is told
        decompress(bad, out, kernels="noting")
