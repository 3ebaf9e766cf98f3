"""A given window is the writer's own: frames with any valid one are read, others are refused; what sigma measures (codec/window.py)."""
import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec import window
from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.errors import FrameError
from tests.helpers.bits import assert_same_bits
from tests.zipccl import test_cuda_source as cuda_source
from tests.zipccl.codec_cases import BF16, DTYPES, FP16, data

emulated = cuda_source.emulated              # the CUDA source, run by a CPU

NUMEL = 33_000


def frames_of(x: torch.Tensor, kernels: str, lo: int) -> tuple[Codec, torch.Tensor]:
    codec = Codec.of(x.dtype, x.shape[1], "cpu", escapes_per_block=1024, window_lo=lo, kernels=kernels)
    frames = codec.empty_frames(x.shape[0], "cpu")
    codec.encode(x, frames, torch.zeros(1, dtype=torch.int32))
    return codec, frames


@DTYPES
def test_readers_take_any_window_of_a_peer(kernels, dtype):
    """Three ranks, three windows; each reads the others' frames, whatever its own window is."""
    x = torch.stack([data("gaussian", dtype, NUMEL, seed) for seed in range(3)])
    top = BY_TORCH[dtype].top_lo
    windows = (-1, 9, top)
    frames = torch.cat([frames_of(row.view(1, -1), kernels, lo)[1] for row, lo in zip(x, windows, strict=True)])
    assert frames[:, 7].tolist() == [0, 10, top + 1]
    for own in windows:
        codec = Codec.of(dtype, NUMEL, "cpu", escapes_per_block=1024, window_lo=own, kernels=kernels)
        out = torch.empty_like(x)
        codec.decode(frames, out)
        assert_same_bits(out, x)
        totals = torch.empty_like(x[0]), torch.empty_like(x[0])
        codec.decode_reduce(frames, x[1], 1, totals[0])
        mean_codec, mean_frames = frames_of(x, kernels, -1)
        mean_codec.decode_reduce(mean_frames, x[1], 1, totals[1])
        assert_same_bits(*totals)


@DTYPES
def test_a_window_beyond_the_top_is_refused(kernels, dtype):
    x = data("gaussian", dtype, NUMEL, 5).view(1, -1)
    codec, frames = frames_of(x, kernels, 9)
    out, total = torch.empty_like(x), torch.empty_like(x[0])
    for value in range(256):
        frames[0, 7] = value
        if value <= BY_TORCH[dtype].top_lo + 1:
            codec.decode(frames, out)
            continue
        for act in (lambda: codec.decode(frames, out), lambda: codec.decode_reduce(frames.expand(2, -1), x[0], 1, total)):
            with pytest.raises(FrameError, match=f"given window is out of range.*byte 7 = {value}"):
                act()


@DTYPES
def test_cuda_source_takes_and_refuses_the_same(emulated, dtype):
    row = BY_TORCH[dtype]
    x, g = data("gaussian", dtype, NUMEL, 6).view(1, -1), fmt.layout(row, NUMEL, 1024, 0)
    frames, _ = cuda_source.encode(emulated, x, g)
    out = torch.empty_like(x)
    for value in (0, 1, 10, row.top_lo, row.top_lo + 1, row.top_lo + 2, 200, 250, 255):
        frames[0, 7] = value
        assert (cuda_source.decode(emulated, frames, out, g) != 0) == (value > row.top_lo + 1), value
    frames[0, 6] ^= 1
    frames[0, 7] = 0
    assert cuda_source.decode(emulated, frames, out, g) != 0


def test_the_other_bytes_of_that_word_still_count(kernels):
    x = data("gaussian", BF16, NUMEL, 5).view(1, -1)
    codec, frames = frames_of(x, kernels, 9)
    for place in (4, 5, 6, 8):
        frames[0, place] ^= 1
        with pytest.raises(FrameError, match=f"byte {place}"):
            codec.decode(frames, torch.empty_like(x))
        frames[0, place] ^= 1


@DTYPES
def test_measured_window_is_that_of_the_standard_deviation(dtype):
    row = BY_TORCH[dtype]
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    for sigma in (1e-3, 0.02, 1.0, 30.0):
        measured = window.measured_lo((x * sigma).to(dtype))
        assert abs(measured - window.lo_for_sigma(sigma, row)) <= (1 if dtype == FP16 else 0)


@pytest.mark.parametrize("values", [[], [0.0] * 9, [1.0, float("inf")], [1.0, float("nan")], [3.0]], ids=str)
def test_what_has_no_standard_deviation_has_no_window(values):
    assert window.measured_lo(torch.tensor(values, dtype=BF16)) == -1
