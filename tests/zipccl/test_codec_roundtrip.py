"""Decoded equals encoded, by bits: every pattern, size, distribution and dtype (C01 C02 C04 C07 C16 C17 C19 C22)."""
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.codec import compress, decompress
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.errors import FrameError
from tests.helpers.bits import all_bf16_patterns, as_ints, assert_same_bits, random_bits
from tests.zipccl.codec_cases import BF16, FORMATS, FP16, FP32, KINDS, LEVELS, data, header_of, nans, round_trip, unzip, zip_frame

TILE = fmt.TILE_ELEMS


@pytest.mark.parametrize("dtype, level", ((BF16, 1), (BF16, 2), (FP16, 1)), ids=("bf16", "bf16-level2", "fp16"))
def test_every_16_bit_pattern(kernels, dtype, level):
    """C01: in order, shuffled, and each one alone among Gaussians (so that it is an escape, or a code, in turn)."""
    patterns = as_ints(all_bf16_patterns()).view(dtype)
    shuffled = patterns[torch.randperm(patterns.numel(), generator=torch.Generator().manual_seed(1))]
    sparse = data("gaussian", dtype, 4 * patterns.numel(), 2)
    sparse[::4] = shuffled
    for x in (patterns, shuffled, sparse if kernels != "reference" else sparse[:TILE]):
        assert_same_bits(unzip(zip_frame(x, kernels, level=level), x, kernels), x, kernels)


def test_fp32_patterns(kernels):
    """C01: every sign and exponent with random mantissas, and with the mantissas at the borders."""
    heads = torch.arange(512, dtype=torch.int64) << 23
    generator = torch.Generator().manual_seed(2)
    borders = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x7FFFFF, *torch.randint(0, 1 << 23, (27,), generator=generator).tolist()])
    bits = (heads[:, None] | borders).flatten()
    bits = bits[torch.randperm(bits.numel(), generator=generator)]
    round_trip((bits - (bits >> 31 << 32)).to(torch.int32).view(FP32), kernels)


@FORMATS
@pytest.mark.parametrize("kind", KINDS)
def test_distributions(kernels, dtype, level, kind):
    """C16, C17: position dependent data of every kind, fresh in every repetition, a partial block and tile at the end."""
    for seed in range(2):
        round_trip(data(kind, dtype, TILE + 3 * 1024 + 77 + seed, seed), kernels, kind, level)


@FORMATS
def test_every_small_size(kernels, dtype, level):
    """C04: 0 to 257 elements."""
    everything = data("specials", dtype, 2 * 258, 3)
    for numel in range(258) if dtype == BF16 else (*range(34), *range(63, 66), *range(127, 130), 255, 256, 257):
        round_trip(everything[numel:2 * numel].contiguous(), kernels, level=level)


@FORMATS
def test_around_powers_of_two(kernels, dtype, level):
    """C04: 2^k - 1, 2^k, 2^k + 1 up to 2^20; for the slow reference to 2^15, and 2^20 + 1 in BF16."""
    top = 15 if kernels == "reference" else 20
    sizes = [(1 << k) + d for k in range(top + 1) for d in (-1, 0, 1)]
    if kernels == "reference" and dtype == BF16 and level == 1:
        sizes.append((1 << 20) + 1)
    everything = data("gaussian", dtype, max(sizes) + 64, 4)
    for i, numel in enumerate(sizes):
        round_trip(everything[i:i + numel], kernels, level=level)


@LEVELS
def test_around_borders_of_block_tile_and_group(kernels, level, monkeypatch):
    """Groups of 2 tiles instead of 256, so that the reference reaches their borders; spill in every tile."""
    monkeypatch.setattr(fmt, "GROUP_TILES", 2)
    monkeypatch.setattr(fmt, "layout", fmt.layout.__wrapped__)
    everything = data("specials", BF16, 5 * TILE, 5)
    for border in (1024, 31 * 1024, TILE, TILE + 1024, 2 * TILE, 4 * TILE):
        for numel in (border - 1, border, border + 1):
            x = everything[border % 19:][:numel]
            for capacity in ((140, 64), (0, 9000)) if level == 1 else ((240, 64), (0, 16000)):
                assert_same_bits(unzip(zip_frame(x, kernels, capacity, level=level), x, kernels), x, f"{kernels} {numel} {capacity}")


@FORMATS
def test_nans_keep_their_payload(kernels, dtype, level):
    x = nans(3000, 6, dtype)
    assert x.isnan().all() and as_ints(x).unique().numel() > 100
    round_trip(x, kernels, "NaN", level)


_GENERATED = st.fixed_dictionaries({
    "dtype": st.sampled_from((BF16, FP16, FP32)),
    "pieces": st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1500)), max_size=4),
    "seed": st.integers(0, 1 << 30), "capacity": st.tuples(st.integers(0, 1024), st.integers(0, 65535)),
    "window": st.integers(-1, 255), "skip": st.integers(0, 40)})


@given(case=_GENERATED)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@LEVELS
def test_generated_tensors_and_layouts(kernels, level, case):
    """Any mixture of kinds, any capacity, spill and given window: exact, and `compress` never says otherwise."""
    dtype = case["dtype"] if level == 1 else BF16
    pieces = [data(kind, dtype, numel, case["seed"] + i) for i, (kind, numel) in enumerate(case["pieces"])]
    x = torch.cat([torch.empty(0, dtype=dtype), *pieces])[case["skip"]:]
    window_lo = min(case["window"], BY_TORCH[dtype].top_lo) if level == 1 else -1
    frame = zip_frame(x, kernels, case["capacity"], window_lo, level)
    assert_same_bits(unzip(frame, x, kernels), x, kernels)
    round_trip(x, kernels, level=level)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
                                   torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16], ids=str)
def test_other_dtypes_are_stored_raw(kernels, dtype):
    """C02, C07: bit equal, in raw mode, never taken for floats of another width."""
    for numel in (0, 1, 7, 128, 1000):
        x = random_bits(numel * dtype.itemsize, 7, torch.uint8)
        x = x % 2 == 1 if dtype == torch.bool else x.view(dtype)
        frame, out = compress(x, kernels=kernels), torch.empty_like(x)
        assert header_of(frame).mode == fmt.MODE_RAW and header_of(frame).dtype is None
        assert frame.numel() == fmt.raw_frame_bytes(x.nbytes)
        decompress(frame, out, kernels=kernels)
        assert_same_bits(out.view(torch.uint8), x.view(torch.uint8), str(dtype))


def test_a_frame_is_never_reinterpreted(kernels):
    """C02: the same number of bytes in another table dtype, or in raw bytes, is an error."""
    x = data("gaussian", BF16, 4096)
    for out in (torch.empty(4096, dtype=FP16), torch.empty(2048, dtype=FP32), torch.empty(4096, dtype=torch.int16)):
        with pytest.raises(FrameError, match="something else.*bfloat16"):
            decompress(compress(x, kernels=kernels), out, kernels=kernels)


def test_tensors_without_plain_bytes():
    """C02: a clear TypeError; lazily conjugated tensors are resolved first."""
    for x in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(TypeError, match="dense"):
            compress(x)
    x = torch.randn(50, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(decompress(compress(x.conj()), torch.empty_like(x)), x.conj())
    with pytest.raises(ValueError, match="plain bytes"):
        decompress(compress(x), torch.empty_like(x).conj())


def test_shapes(kernels):
    """0-D to 5-D; what has a gradient may be compressed, and filled."""
    for shape in ((), (0,), (3, 0), (5, 7), (2, 3, 4, 5, 6)):
        x = data("gaussian", BF16, max(1, torch.Size(shape).numel()), 8)[:torch.Size(shape).numel()].view(shape).requires_grad_()
        out = torch.zeros_like(x)
        assert_same_bits(decompress(compress(x, kernels=kernels), out, kernels=kernels), x)
        assert out.requires_grad == torch.zeros_like(x).requires_grad and x.grad is None


def test_fp16_gains_little_and_raw_is_chosen_where_nothing(kernels):
    """C19: FP16 never better than 16/14; data without structure in the exponent are stored raw."""
    x = data("gaussian", FP16, 3 * TILE, 9)
    assert 1.10 < x.nbytes / round_trip(x, kernels).numel() < 16 / 14
    assert header_of(compress(data("extremes", FP16, 3 * TILE, 9), kernels=kernels)).mode == fmt.MODE_RAW


def test_mixed_scales_lose_nothing(kernels):
    """C22: one flat buffer of 16 layers, standard deviations 1e-4 to 1e-1: at most 2 % worse than each layer alone."""
    mixed = data("mixed scales", BF16, 16 * TILE if kernels != "reference" else 2 * TILE, 10)
    alone = [compress(layer.contiguous(), kernels=kernels).numel() for layer in mixed.chunk(16 if kernels != "reference" else 2)]
    assert compress(mixed, kernels=kernels).numel() <= 1.02 * sum(alone)
    assert mixed.nbytes / compress(mixed, kernels=kernels).numel() > 1.40


def test_level_2_of_other_dtypes(kernels):
    """``compress`` takes the highest level that there is; a layout is what it says, or an error; so is a given window."""
    for dtype in (FP16, FP32):
        x = data("gaussian", dtype, 3 * TILE, 11)
        assert header_of(compress(x, kernels=kernels, level=2)).level == 1
        with pytest.raises(ValueError, match="level 2, float"):
            fmt.layout(BY_TORCH[dtype], 100, level=2)
    x = data("gaussian", BF16, 3 * TILE, 11)
    with pytest.raises(ValueError, match="unknown compression level.*3"):
        compress(x, kernels=kernels, level=3)
    with pytest.raises(ValueError, match="window_lo -1..-1 at level 2"):
        fmt.layout(BY_TORCH[BF16], 100, window_lo=9, level=2)


@LEVELS
def test_zero_blocks_are_left_out_at_every_level(kernels, level):
    x = data("gaussian", BF16, 2 * TILE, 12)
    x.view(-1, 1024)[::3] = 0.0
    frame = round_trip(x, kernels, level=level)
    assert header_of(frame).mode == fmt.MODE_ZERO_BLOCKS and header_of(frame[fmt.HEADER_BYTES + 128:]).level == level
