"""Sizes beyond 32 bits: the layout by arithmetic, and (slow, memory permitting) real frames (C13)."""
import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.codec import compress, decompress
from ds_zipccl.codec.dtypes import BY_TORCH
from tests.helpers.bits import as_ints
from tests.zipccl.codec_cases import BF16, DTYPES, FORMATS, FP32, data, header_of

GIB = 1 << 30


def from_the_document(dtype, numel: int, c: int, s: int, level: int) -> dict[str, int]:
    """docs/format.md, sections 2 to 4 and 9, computed once more and independently."""
    codes = 384 if level == 1 else 256
    blocks = (numel + 1023) // 1024
    tiles, last_blocks = (blocks + 31) // 32, blocks % 32 or (32 if blocks else 0)

    def up(n):
        return (n + 127) // 128 * 128

    def tile_bytes(nb):
        return up(16 + 4 * nb + c * nb) + codes * nb * (2 if dtype.extra_plane else 1) + 1024 * nb * dtype.byte_planes

    pools_at = 128 + (tiles - 1) * tile_bytes(32) + tile_bytes(last_blocks) if tiles else 128
    groups = (tiles + 255) // 256
    pools = (groups - 1) * up(256 * s) + up((tiles - 256 * (groups - 1)) * s) if groups else 0
    return {"num_tiles": tiles, "num_groups": groups, "last_blocks": last_blocks, "tile_bytes": tile_bytes(32),
            "pools_offset": pools_at, "frame_bytes": pools_at + pools}


@FORMATS
def test_layout_by_arithmetic(dtype, level):
    """C13: 0 and 123,456,789 elements, the borders, and far beyond 2^33 elements."""
    dtype, most = BY_TORCH[dtype], 1024 if level == 1 else 1792
    for numel in (0, 1, 1023, 1024, 1025, 32768, 32769, 256 * 32768, 256 * 32768 + 1, 123_456_789, 2**31 - 1, 2**31, 2**32 + 1,
                  2**33 + 7, 2**35 + 12345, 2**40 + 3):
        for c, s in ((35, 64), (0, 0), (most, 65535), (7, 1)):
            g = fmt.layout(dtype, numel, c, s, level=level)
            for name, value in from_the_document(dtype, numel, c, s, level).items():
                assert getattr(g, name) == value, f"{numel} {c} {s}: {name}"
            assert g.frame_bytes % 128 == 0 and all(-(2**63) <= i < 2**63 for i in g.ints)
            header = fmt.parse_header(g.header)
            assert (header.numel, header.level) == (numel, level)


def test_layout_refuses_what_the_header_cannot_hold():
    for wrong in ((-1, 35, 64), (10, -1, 64), (10, 1025, 64), (10, 35, -1), (10, 35, 65536), (10, 35, 64, -2), (10, 35, 64, 249)):
        with pytest.raises(ValueError, match="layout out of range"):
            fmt.layout(BY_TORCH[BF16], *wrong)
    for wrong in ((10, 1793, 64), (10, 95, 65536), (10, 95, 64, 0)):
        with pytest.raises(ValueError, match="layout out of range.*level 2"):
            fmt.layout(BY_TORCH[BF16], *wrong, level=2)


@DTYPES
def test_empty(kernels, dtype):
    """C13: a defined result."""
    frame = compress(torch.empty(0, dtype=dtype), kernels=kernels)
    assert frame.numel() == fmt.HEADER_BYTES and header_of(frame).numel == 0
    assert decompress(frame, torch.empty(0, dtype=dtype), kernels=kernels).numel() == 0


def free_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def large(dtype, numel: int) -> torch.Tensor:
    """Position-dependent and made quickly: a random piece, its sign and mantissa bits XORed with a hash of the piece's place."""
    piece = data("gaussian", dtype, 1 << 22)
    bits, out = as_ints(piece), torch.empty(numel, dtype=dtype)
    mask = ~(((1 << BY_TORCH[dtype].exponent_bits) - 1) << BY_TORCH[dtype].mantissa_bits)
    for i, part in enumerate(as_ints(out).split(bits.numel())):
        torch.bitwise_xor(bits[:part.numel()], (0x5DEECE6D * (i + 1) >> 7 & 0x7FFF) & mask, out=part)
    return out


def exact(dtype, numel: int) -> None:
    if free_bytes() < 3.5 * numel * dtype.itemsize:
        pytest.skip(f"{3.5 * numel * dtype.itemsize / GIB:.0f} GiB of free memory are needed")
    x = large(dtype, numel)
    frame = compress(x, kernels="best")
    assert header_of(frame).mode == fmt.MODE_ZIPPED
    out = torch.full((numel * dtype.itemsize,), 0xAA, dtype=torch.uint8).view(dtype)
    decompress(frame, out, kernels="best")
    assert torch.equal(as_ints(out), as_ints(x))


@pytest.mark.slow
@DTYPES
def test_123_456_789_elements(dtype):
    """C13, the fastest kernels of this machine (the reference takes minutes: it has the same tests at small sizes)."""
    exact(dtype, 123_456_789)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
def test_more_than_2_to_the_31_bytes(dtype):
    """Offsets beyond 32 bits, in the input, in the frame and in the output."""
    exact(dtype, 3 * GIB // dtype.itemsize + 4321)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    exact(BF16, 2**31 + 1234)
