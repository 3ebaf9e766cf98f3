"""The worst-case size holds for everything, every byte of an output is written, and no byte beside a frame or an output is (C05 C08)."""
import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.codec import Codec, compress, decompress
from tests.helpers.bits import assert_same_bits, random_bits
from tests.zipccl.codec_cases import BF16, FORMATS, FP16, KINDS, LEVELS, Guarded, data, header_of

INCOMPRESSIBLE = ("random bits", "extremes")


@FORMATS
@pytest.mark.parametrize("kind", KINDS)
def test_stored_frames_stay_within_the_bound(kernels, dtype, level, kind):
    for numel in (0, 1, 65, 5000, fmt.TILE_ELEMS + 999):
        x = data(kind, dtype, numel, numel)
        for capacity in ({}, {"escapes_per_block": 1024}, {"escapes_per_block": 0, "spill_per_tile": 0}):
            frame = compress(x, kernels=kernels, level=level, **capacity)
            assert frame.numel() <= fmt.raw_frame_bytes(x.nbytes) == 128 + -(-x.nbytes // 128) * 128
    if kind in INCOMPRESSIBLE and dtype != FP16:
        assert header_of(frame).mode == fmt.MODE_RAW and frame.numel() == fmt.raw_frame_bytes(x.nbytes)
        assert_same_bits(decompress(frame, torch.empty_like(x), kernels=kernels), x)


@FORMATS
@pytest.mark.parametrize("kind", INCOMPRESSIBLE + ("gaussian",))
def test_nothing_is_written_beside_a_frame(kernels, dtype, level, kind):
    """Rows with a stride, an overflow among them: the bytes between and around the frames stay, a skipped row too."""
    numel, gap = 2 * 1024 + 17, 96
    x = torch.stack([data(kind, dtype, numel, seed) for seed in range(3)])
    most = fmt.LEVELS[level].max_slot_bytes
    for capacity in ((35, 64), (0, 0), (most, 0)):
        codec = Codec.of(dtype, numel, "cpu", escapes_per_block=capacity[0], spill_per_tile=capacity[1], level=level, kernels=kernels)
        all_bytes = Guarded(3 * (codec.frame_bytes + gap))
        frames = all_bytes.data.view(3, codec.frame_bytes + gap)
        status = torch.full((3,), -7, dtype=torch.int32)
        codec.encode(x, frames, status[1:2], skip=1)
        all_bytes.assert_untouched(f"{kernels} {kind} {capacity}")
        assert (frames[:, codec.frame_bytes:] == 0xAA).all() and (frames[1] == 0xAA).all()
        assert status[0] == -7 and status[2] == -7 and status[1] >= 0
        if kind in INCOMPRESSIBLE and dtype != FP16 and capacity != (most, 0):
            assert int(status[1]) & fmt.OVERFLOW_BIT                  # so an overflowed frame was among those checked


@FORMATS
def test_every_length_writes_all_of_its_output_and_no_more(kernels, dtype, level):
    """C08: every length modulo 64 (and modulo a block): no 0xAA survives, nothing beside the output changes, skipped rows stay."""
    everything = data("gaussian", dtype, 3000, 1)
    everything[(everything.view(torch.uint8).view(3000, -1) == 0xAA).any(1)] = 1.0      # so that 0xAA can only be what was there before
    for numel in (*range(1, 65), *range(1024, 1024 + 65, 4 if kernels == "reference" else 1)):
        codec = Codec.of(dtype, numel, "cpu", escapes_per_block=300, level=level, kernels=kernels)
        x = everything[numel:2 * numel].expand(3, numel).contiguous()
        frames, out = codec.empty_frames(3, "cpu"), Guarded(3 * numel, dtype)
        codec.encode(x, frames, torch.zeros(1, dtype=torch.int32))
        codec.decode(frames, out.data.view(3, numel), skip=2)
        out.assert_untouched(f"{kernels} {numel}")
        octets = out.data.view(torch.uint8)
        num_written = 2 * numel * dtype.itemsize
        assert (octets[:num_written] != 0xAA).all() and (octets[num_written:] == 0xAA).all(), f"{kernels} {numel}"
        assert_same_bits(out.data[:2 * numel].view(2, numel), x[:2])


def test_raw_frames_write_all_of_their_output_and_no_more(kernels):
    for num_bytes in range(0, 130):
        x = random_bits(num_bytes, num_bytes, torch.uint8)
        x[x == 0xAA] = 0
        frame, out = compress(x, kernels=kernels), Guarded(num_bytes)
        assert (frame[fmt.HEADER_BYTES + num_bytes:] == 0).all()
        decompress(frame, out.data, kernels=kernels)
        out.assert_untouched()
        assert_same_bits(out.data, x)


@FORMATS
def test_equal_data_make_equal_frames(kernels, dtype, level):
    """No byte of a frame without overflow depends on what was in memory before, or on the thread number."""
    x = data("specials", dtype, fmt.TILE_ELEMS + 2100, 2)
    codec = Codec.of(dtype, x.numel(), "cpu", escapes_per_block=300, spill_per_tile=20000, level=level, kernels=kernels)
    frames, before = [], torch.get_num_threads()
    for fill, threads in ((0x00, 1), (0xFF, 2), (0x5A, 5)):
        torch.set_num_threads(threads)
        frame, status = torch.full((1, codec.frame_bytes), fill, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        codec.encode(x.view(1, -1), frame, status)
        assert not int(status) & fmt.OVERFLOW_BIT
        frames.append(frame)
    torch.set_num_threads(before)
    assert torch.equal(frames[0], frames[1]) and torch.equal(frames[0], frames[2])


@LEVELS
def test_integrity_off_leaves_the_frame_as_the_kernels_made_it(kernels, level):
    x = data("gaussian", BF16, 9000, 3)
    plain, checked = (compress(x, kernels=kernels, level=level, integrity=how) for how in ("off", "checksum"))
    assert_same_bits(compress(x, kernels=kernels, level=level, integrity="roundtrip"), plain)
    assert header_of(plain).checksum_kind == 0 and header_of(checked).checksum_kind == 1
    differing = (plain != checked).nonzero().flatten().tolist()
    assert differing and all(fmt.CHECKSUM_OFFSET <= at < fmt.CHECKSUM_OFFSET + 8 for at in differing)
