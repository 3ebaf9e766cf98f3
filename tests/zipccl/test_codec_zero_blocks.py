"""Frames that leave out zero blocks (mode 2): smaller where it counts, exact, and as strict about damage as the others (C23)."""
import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.codec import compress, decompress
from ds_zipccl.errors import FrameError
from tests.helpers.bits import assert_same_bits
from tests.zipccl.codec_cases import BF16, DTYPES, Guarded, data, header_of

BLOCK = fmt.BLOCK_ELEMS


def with_zero_blocks(numel: int, dtype: torch.dtype, zero: set[int], seed: int = 5) -> torch.Tensor:
    x = data("gaussian", dtype, numel, seed)
    for block in zero:
        x[block * BLOCK:(block + 1) * BLOCK] = 0.0
    return x


def test_expert_batch_with_60_percent_zero_rows(kernels):
    """C23, [experts, capacity, model]: the zero rows cost a bit each, so the frame is clearly smaller than 11 bits an element."""
    experts, capacity, model = 4, 64, 1536
    x = data("gaussian", BF16, experts * capacity * model, 7).view(experts * capacity, model)
    x[torch.rand(experts * capacity, generator=torch.Generator().manual_seed(3)) < 0.6] = 0.0
    frame = compress(x.view(experts, capacity, model), kernels=kernels)
    assert header_of(frame).mode == fmt.MODE_ZERO_BLOCKS
    assert frame.numel() < 0.62 * x.numel() * 11 / 8
    assert_same_bits(decompress(frame, torch.empty_like(x), kernels=kernels), x)


@DTYPES
@pytest.mark.parametrize("numel, zero", [
    (1025, {0}), (2048, {0, 1}), (5000, {0, 2, 4}), (5000, {1, 3}), (8 * BLOCK, {7}), (70 * BLOCK + 1, set(range(0, 71, 2))),
    (70 * BLOCK + 1, set(range(71))),
])
def test_round_trip(kernels, dtype, numel, zero):
    x = with_zero_blocks(numel, dtype, zero)
    for integrity in ("off", "checksum", "roundtrip"):
        frame = compress(x, kernels=kernels, integrity=integrity)
        assert header_of(frame).mode == fmt.MODE_ZERO_BLOCKS and frame.numel() < fmt.raw_frame_bytes(x.nbytes)
        out = Guarded(numel, dtype)
        decompress(frame, out.data, kernels=kernels)
        out.assert_untouched()
        assert_same_bits(out.data, x)


def test_negative_zeros_are_not_zero_blocks(kernels):
    x = with_zero_blocks(4 * BLOCK, BF16, {0, 1, 2})
    x[:BLOCK] = -0.0
    frame = compress(x, kernels=kernels)
    assert frame[fmt.HEADER_BYTES] == 0b1001
    assert_same_bits(decompress(frame, torch.empty_like(x), kernels=kernels), x)


def test_a_lone_partial_zero_block_is_not_worth_it(kernels):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = with_zero_blocks(1025, dtype, {1})
        frame = compress(x, kernels=kernels)
        assert frame.numel() <= fmt.raw_frame_bytes(x.nbytes)
        assert_same_bits(decompress(frame, torch.empty_like(x), kernels=kernels), x)


def test_few_zero_blocks_are_not_worth_it(kernels):
    assert header_of(compress(with_zero_blocks(17 * BLOCK, BF16, {3, 9}), kernels=kernels)).mode == fmt.MODE_ZIPPED
    assert header_of(compress(with_zero_blocks(17 * BLOCK, BF16, {3, 9, 11}), kernels=kernels)).mode == fmt.MODE_ZERO_BLOCKS


def test_incompressible_blocks_stay_below_the_bound(kernels):
    x = data("random bits", BF16, 8 * BLOCK, 9)
    x[:BLOCK] = 0.0
    frame = compress(x, kernels=kernels)
    assert header_of(frame).mode == fmt.MODE_ZERO_BLOCKS and frame.numel() <= fmt.raw_frame_bytes(x.nbytes)
    assert_same_bits(decompress(frame, torch.empty_like(x), kernels=kernels), x)


def test_every_truncation_is_refused(kernels):
    x = with_zero_blocks(2100, BF16, {1})
    frame = compress(x, kernels=kernels)
    for length in range(frame.numel()):
        with pytest.raises(FrameError):
            decompress(frame[:length], torch.empty_like(x), kernels=kernels)


def test_flipped_bits_of_header_and_bitmap(kernels):
    """A flipped bitmap changes the number of elements, or names a block that is not there: never a wrong result."""
    x = with_zero_blocks(2100, BF16, {1})
    frame = compress(x, kernels=kernels)
    for bit in range(8 * 2 * fmt.HEADER_BYTES):
        damaged = frame.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            decompress(damaged, torch.empty_like(x), kernels=kernels)


def test_frames_do_not_nest(kernels):
    """Mode 2 inside mode 2, or a checksum inside, is corrupt: no recursion from hostile input."""
    x = with_zero_blocks(4 * BLOCK, BF16, {1, 3})
    frame, start = compress(x, kernels=kernels), 2 * fmt.HEADER_BYTES
    for offset, value in ((start + 6, fmt.MODE_ZERO_BLOCKS), (start + fmt.CHECKSUM_OFFSET, 1)):
        damaged = frame.clone()
        damaged[offset] = value
        with pytest.raises(FrameError):
            decompress(damaged, torch.empty_like(x), kernels=kernels)


def test_empty_tensor_in_mode_2_is_corrupt_or_empty(kernels):
    header = fmt.pack_header(1, fmt.MODE_ZERO_BLOCKS, 0)
    frame = torch.frombuffer(bytearray(header + bytes(256)), dtype=torch.uint8)
    with pytest.raises(FrameError):
        decompress(frame, torch.empty(0, dtype=BF16), kernels=kernels)
