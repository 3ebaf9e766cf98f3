"""Every truncation of a frame raises FrameError, and writes nothing outside the output (C10)."""
import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.codec import compress, decompress
from ds_zipccl.errors import FrameError
from tests.helpers.bits import assert_same_bits
from tests.zipccl.codec_cases import FORMATS, LEVELS, Guarded, data, header_of, zip_frame


def refuse_every_truncation(frame: torch.Tensor, x: torch.Tensor, kernels: str) -> None:
    out = Guarded(x.numel(), x.dtype)
    for length in range(frame.numel()):
        with pytest.raises(FrameError, match="truncated|shorter than its header"):
            decompress(frame[:length], out.data, kernels=kernels)
    out.assert_untouched()
    decompress(frame, out.data, kernels=kernels)
    assert_same_bits(out.data, x)


@FORMATS
def test_zipped_frames(kernels, dtype, level):
    """Two blocks and a sub-pool in use: lengths in every section."""
    x = data("specials", dtype, 1100)
    frame = zip_frame(x, kernels, (0, 2000), level=level)
    assert header_of(frame).need > 0
    refuse_every_truncation(frame, x, kernels)


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 300])
def test_raw_frames(kernels, numel):
    x = data("random bits", torch.bfloat16, numel)
    frame = compress(x, kernels=kernels)
    assert header_of(frame).mode == fmt.MODE_RAW
    refuse_every_truncation(frame, x, kernels)


@LEVELS
def test_frames_with_a_checksum(kernels, level):
    x = data("gaussian", torch.bfloat16, 5000)
    frame = compress(x, kernels=kernels, level=level, integrity="checksum")
    assert header_of(frame).level == level
    for length in [*range(0, 129), *range(129, frame.numel(), 97), frame.numel() - 1]:
        with pytest.raises(FrameError):
            decompress(frame[:length], torch.empty_like(x), kernels=kernels)


@LEVELS
def test_a_longer_buffer_is_no_error(kernels, level):
    """What lies beyond the frame is not looked at, with a checksum too."""
    x = data("gaussian", torch.bfloat16, 5000)
    for integrity in ("off", "checksum"):
        frame = compress(x, kernels=kernels, level=level, integrity=integrity)
        longer = torch.cat([frame, torch.full((1000,), 0x5A, dtype=torch.uint8)])
        assert_same_bits(decompress(longer, torch.empty_like(x), kernels=kernels), x)


def test_a_frame_must_be_bytes(kernels):
    x = data("gaussian", torch.bfloat16, 5000)
    frame = compress(x, kernels=kernels)
    for wrong in (frame.view(1, -1), frame.view(torch.int16), frame.repeat_interleave(2)[::2]):
        with pytest.raises(FrameError, match="contiguous 1-D uint8"):
            decompress(wrong, torch.empty_like(x), kernels=kernels)
