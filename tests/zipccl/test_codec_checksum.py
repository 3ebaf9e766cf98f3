"""The checksum is zlib's CRC-32 on every device, and stands where docs/format.md says (C11)."""
import zlib

import pytest
import torch

from ds_zipccl.codec import checksum
from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.codec import compress, decompress
from ds_zipccl.errors import FrameError
from tests.helpers.bits import assert_same_bits, random_bits
from tests.zipccl.codec_cases import BF16, data, header_of


def test_folding_equals_zlib(monkeypatch):
    """The parallel form for GPUs, run here on the CPU: every small length, several pieces, with and without a start."""
    monkeypatch.setattr(checksum, "_PIECE_BYTES", 512)
    for length in [*range(70), 127, 128, 511, 512, 513, 1024, 5000, 100_001]:
        octets = random_bits(length, length, torch.uint8)
        plain = bytes(octets.tolist())
        for start in (0, 0x12345678, 0xFFFFFFFF):
            assert checksum.crc32_by_folding(octets, start) == zlib.crc32(plain, start) == checksum.crc32(octets, start), length


def test_folding_a_large_piece():
    octets = random_bits((1 << 20) + 4, 1, torch.uint8)
    assert checksum.crc32_by_folding(octets) == zlib.crc32(bytes(octets.tolist()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gives_the_same_number():
    octets = random_bits((1 << 27) + 13, 2, torch.uint8)
    assert checksum.crc32(octets.cuda()) == checksum.crc32(octets)


@pytest.mark.parametrize("kind", ["gaussian", "random bits"])
def test_the_checksum_of_the_document(kernels, kind):
    """Kind 1: CRC-32 of all bytes of the frame, the four bytes of the checksum itself zero; zipped and raw alike."""
    frame = compress(data(kind, BF16, 9000), kernels=kernels, integrity="checksum")
    plain = bytearray(frame.tolist())
    stored = int.from_bytes(plain[28:32], "little")
    plain[28:32] = bytes(4)
    assert plain[24:28] == b"\1\0\0\0" and stored == zlib.crc32(plain) == header_of(frame).checksum
    assert header_of(frame).mode == (fmt.MODE_ZIPPED if kind == "gaussian" else fmt.MODE_RAW)


def test_checked_frames_decode(kernels):
    for numel in (0, 1, 300, 9000):
        for dtype in (BF16, torch.float16, torch.float32, torch.int32):
            x = data("gaussian", dtype, numel, numel) if dtype != torch.int32 else random_bits(numel, numel, dtype)
            frame = compress(x, kernels=kernels, integrity="checksum")
            assert_same_bits(decompress(frame, torch.empty_like(x), kernels=kernels), x)


def test_what_the_checksum_covers(kernels):
    """Fields that structure alone cannot judge: need, unused slots, zero bytes behind raw data, the sub-pool."""
    x = data("gaussian", BF16, 9000)
    frame = compress(x, kernels=kernels, integrity="checksum")
    for offset in (fmt.STATUS_OFFSET, fmt.HEADER_BYTES + 8, fmt.HEADER_BYTES + 16 + 4 * 9 + 320, frame.numel() - 1):
        changed = frame.clone()
        changed[offset] ^= 1
        with pytest.raises(FrameError, match="checksum"):
            decompress(changed, torch.empty_like(x), kernels=kernels)
