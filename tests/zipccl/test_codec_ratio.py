"""How small frames get, by arithmetic and on data, and the numbers that docs/format.md derives (section 5)."""
import math

import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.analysis import best_window_escapes, exponent_entropy, exponents, needed_bytes, shannon_ratio, tile_escapes
from ds_zipccl.codec.codec import Codec, compress, split_status
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.fit import best_capacity
from ds_zipccl.codec.window import MEAN_LOG2_ABS_NORMAL, lo_for_sigma
from tests.helpers.bits import gaussian
from tests.zipccl.codec_cases import BF16, DTYPES, FP16, FP32, data, header_of, zip_frame

ROW = BY_TORCH[BF16]
HALF_OCTAVES = [2.0 ** (k / 2) for k in range(-40, 21)]              # 1e-6 to 1e3
TILE = fmt.TILE_ELEMS


def statistics(x: torch.Tensor, kernels: str, **layout) -> tuple[bool, int]:
    """(overflow, escapes) of a frame of flat ``x`` with the default capacity."""
    codec = Codec.of(x.dtype, x.numel(), "cpu", kernels=kernels, **layout)
    frames, status = codec.empty_frames(1, "cpu"), torch.zeros(1, dtype=torch.int32)
    codec.encode(x.view(1, -1), frames, status)
    return split_status(int(status))[0], int(tile_escapes(frames[0], codec.geometry).sum())


# ---- by arithmetic

@pytest.mark.parametrize("dtype, target", [(BF16, 1.412), (FP16, 1.116), (FP32, 1.170)], ids=("bf16", "fp16", "fp32"))
def test_fixed_size_ratio(dtype, target):
    """Large frames at the default capacity; the loss by alignment in a single tile is under 0.4 %."""
    row = BY_TORCH[dtype]
    for tiles in (256, 4096, 1 << 18):
        assert tiles * TILE * row.itemsize / fmt.layout(row, tiles * TILE).frame_bytes >= target
    assert TILE * row.itemsize / fmt.layout(row, TILE).frame_bytes >= target * 0.996


def test_numbers_of_the_format_document():
    g = fmt.layout(ROW, 256 * TILE)
    assert (g.codes_offset, g.tile_bytes) == (1280, 46336)
    assert 2 * TILE / g.tile_bytes == pytest.approx(1.4144, abs=5e-5)
    assert 512 * TILE / g.frame_bytes == pytest.approx(1.4124, abs=1e-4)
    assert g.escapes_capacity // 32 == 35 and g.escapes_capacity / 32 == 35.5


def test_numbers_of_level_2():
    g = fmt.layout(ROW, 256 * TILE, level=2)
    assert (g.tile_bytes, g.escapes_capacity / 32) == (44160, 95.5)
    assert 2 * TILE / g.tile_bytes == pytest.approx(1.4841, abs=5e-5)
    assert 512 * TILE / g.frame_bytes == pytest.approx(1.4819, abs=1e-4)
    assert fmt.layout(ROW, 7 * TILE, level=2).tile_bytes == 44416
    assert fmt.layout(ROW, 8 * TILE, level=2).tile_bytes == 44160


# ---- the Gaussian, exactly

def chance_below(t: float) -> float:
    return math.erf(t / math.sqrt(2))                    # P(|Z| < t)


def missed(lo: int, log2_sigma: float, width: int = 7) -> float:
    """P(exponent outside lo+1..lo+width) for X = sigma Z; exponents without bias."""
    return chance_below(2 ** (lo + 1 - log2_sigma)) + math.erfc(2 ** (lo + 1 + width - log2_sigma) / math.sqrt(2))


def mean_exponent(log2_sigma: float) -> float:
    return sum(e * (chance_below(2 ** (e + 1 - log2_sigma)) - chance_below(2 ** (e - log2_sigma))) for e in range(-60, 12))


PHASES = [i / 500 for i in range(500)]                   # log2 sigma, one octave: everything repeats with it


def test_mean_exponent_of_a_gaussian():
    assert MEAN_LOG2_ABS_NORMAL == pytest.approx(-0.9164, abs=5e-5)
    assert MEAN_LOG2_ABS_NORMAL * math.log(2) == pytest.approx(-0.6352, abs=5e-5)
    for phase in PHASES:
        assert mean_exponent(phase) - phase == pytest.approx(-1.4164, abs=5e-4)


def test_the_rule_takes_the_best_window():
    """docs/format.md: escapes 2.13-3.03 %, top of the window 2.43-4.87 sigma, at most 0.02 % of the elements above the best."""
    rule, best, tops = [], [], []
    for phase in PHASES:
        lo = math.floor(mean_exponent(phase) - 4.3)
        rule.append(missed(lo, phase))
        best.append(min(missed(other, phase) for other in range(-12, 2)))
        tops.append(2 ** (lo + 8 - phase))
    assert min(rule) == pytest.approx(0.0213, abs=5e-5) and max(rule) == pytest.approx(0.0303, abs=5e-5)
    assert sum(rule) / len(rule) == pytest.approx(0.0245, abs=5e-5)
    assert max(best) == pytest.approx(1 - 0.9697, abs=5e-5)                 # "at least 96.97 %"
    assert max(r - b for r, b in zip(rule, best, strict=True)) < 2.1e-4
    assert min(tops) == pytest.approx(2.434, abs=0.004) and max(tops) == pytest.approx(4.867, abs=0.008)


def test_where_two_windows_are_equal():
    """docs/format.md: the best window's top lies between 2.429 and 4.858 sigma."""
    low, high = 2.0, 3.0
    for _ in range(50):
        top = (low + high) / 2
        here, above = missed(0, 8 - math.log2(top)), missed(1, 8 - math.log2(top))
        low, high = (top, high) if here > above else (low, top)
    assert top == pytest.approx(2.429, abs=5e-4) and here == pytest.approx(0.0303, abs=5e-5)


def test_other_offsets_would_cost():
    def worst(offset):
        return max(missed(math.floor(p + MEAN_LOG2_ABS_NORMAL - 0.5 - offset), p) - min(missed(lo, p) for lo in range(-12, 2))
                   for p in PHASES)
    assert worst(4.3) < 2.1e-4 < 0.003 < min(worst(4.25), worst(4.35)) < max(worst(4.25), worst(4.35)) < 0.0042


def test_zero_mode_takes_nearly_the_best_window():
    rule = [missed(math.floor(mean_exponent(p) - 3.4), p, 6) for p in PHASES]
    best = [min(missed(lo, p, 6) for lo in range(-12, 2)) for p in PHASES]
    assert min(rule) == pytest.approx(0.0399, abs=5e-5) and max(rule) == pytest.approx(0.0566, abs=1e-4)
    assert min(best) == pytest.approx(0.0399, abs=5e-5) and max(best) == pytest.approx(0.0549, abs=1e-4)


# ---- measured

def test_no_overflow_at_any_sigma(kernels):
    """Gaussians of every half octave: default capacity, no overflow, used-bytes ratio >= 1.415, escapes close to the best window's."""
    numel = (1 << 18) + 5 if kernels != "reference" else TILE
    z = gaussian(numel, 1, FP32, 1.0)
    for i, sigma in enumerate(HALF_OCTAVES if kernels != "reference" else HALF_OCTAVES[::6]):
        x = (z * sigma).to(BF16)
        overflow, num_escapes = statistics(x, kernels)
        assert not overflow, f"sigma {sigma}"
        assert x.nbytes / needed_bytes(num_escapes, ROW, numel) >= 1.415, f"sigma {sigma}"
        assert 0.019 < num_escapes / numel < 0.032
        if i % 5 == 0:
            best = best_window_escapes(x)
            assert best <= num_escapes <= 1.10 * best, f"sigma {sigma}"


def test_best_window_is_a_bound():
    """The yardstick itself, against a search block by block over every window."""
    for kind in ("gaussian", "10% zeros", "60% zeros", "random bits", "mixed scales"):
        x = data(kind, BF16, 5 * 1024 + 33, 2)
        expected = 0
        for block in exponents(x).split(1024):
            inside = [((block >= lo) & (block < lo + 7)).sum() for lo in range(250)]
            with_zero = [((block >= lo) & (block < lo + 6) | (block == 0)).sum() for lo in range(1, 251)]
            expected += block.numel() - int(max(inside + with_zero))
        assert best_window_escapes(x) == expected, kind


@pytest.mark.parametrize("kind, at_most", [("gaussian", 1.06), ("mixed scales", 1.06), ("10% zeros", 1.12), ("60% zeros", 1.25)])
def test_block_mean_is_close_to_the_best_window(kind, at_most):
    x = data(kind, BF16, 16 * TILE, 3)
    ours, best = statistics(x, "reference" if kind == "gaussian" else "best", escapes_per_block=200)[1], best_window_escapes(x)
    assert best <= ours <= at_most * best, f"{kind}: {ours / best:.3f}"
    assert needed_bytes(ours, ROW, x.numel()) <= 1.01 * needed_bytes(best, ROW, x.numel())      # the goal: within 1 %


@DTYPES
def test_lo_for_sigma_agrees_with_the_block_rule(kernels, dtype):
    """The paper's window from sigma: never more than one step from what the blocks' means say."""
    row, numel = BY_TORCH[dtype], 4 * 1024
    z = gaussian(numel, 4, FP32, 1.0)
    sweep = [s for s in HALF_OCTAVES[::2] if dtype != FP16 or 2e-3 < s < 64]
    equal = total = 0
    for sigma in sweep:
        g = Codec.of(dtype, numel, "cpu", kernels=kernels).geometry
        frame = zip_frame((z * sigma).to(dtype), kernels)
        blocks = frame[g.tiles_offset + 16:g.tiles_offset + 16 + 4 * 4].view(4, 4)
        assert (blocks[:, 1] == 0).all(), "window mode"
        distance = blocks[:, 0].to(torch.int64) - lo_for_sigma(sigma, row)
        assert (distance.abs() <= 1).all(), f"sigma {sigma}: {distance.tolist()}"
        equal, total = equal + int((distance == 0).sum()), total + 4
    assert equal > 0.75 * total


def test_a_given_window_costs_what_the_block_mean_costs(kernels):
    numel = 4 * TILE if kernels != "reference" else TILE
    for sigma in (0.013, 0.02, 0.028):
        x = gaussian(numel, 5, BF16, sigma)
        block, given = statistics(x, kernels), statistics(x, kernels, window_lo=lo_for_sigma(sigma, ROW))
        assert not given[0] and given[1] <= 1.05 * block[1]
    wrong = statistics(x, kernels, window_lo=lo_for_sigma(sigma * 100, ROW))
    assert wrong[0] and wrong[1] > 10 * block[1]          # so a window that does not fit is seen


def test_lo_for_sigma_refuses():
    for sigma in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive and finite"):
            lo_for_sigma(sigma, ROW)
    assert lo_for_sigma(1e-300, ROW) == 0 and lo_for_sigma(1e300, ROW) == ROW.top_lo


def test_statistics_of_frames_and_data(kernels):
    """The bench's yardsticks: entropy against a known distribution, escapes against the codes."""
    x = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=BF16).repeat_interleave(torch.tensor([512, 256, 128, 128]))
    assert exponent_entropy(x) == pytest.approx(1.75)
    assert shannon_ratio(1.75, ROW) == pytest.approx(16 / 9.75)
    assert exponent_entropy(x[:0]) == 0.0
    assert 2.53 < exponent_entropy(gaussian(1 << 18, 6, BF16)) < 2.56          # H of a Gaussian: bound 1.517
    x = data("gaussian", BF16, 2 * TILE + 1500, 7)
    frame = zip_frame(x, kernels)
    per_tile = tile_escapes(frame, fmt.layout(ROW, x.numel()))
    assert per_tile.shape == (3,) and 0.02 < int(per_tile.sum()) / x.numel() < 0.032
    assert header_of(frame).need == max(math.ceil(int(e) / nb) for e, nb in zip(per_tile, (32, 32, 2), strict=True))
    assert needed_bytes(0, ROW, TILE) == 128 + 16 + 32 * (4 + 384 + 1024)


def test_heavy_tails_are_stored_with_the_capacity_they_need(kernels):
    """One repetition with the capacity that fits: smaller than raw, without overflow, within 1 % of what is really needed."""
    x = (gaussian(2 * TILE, 8, FP32, 1.0) * torch.exp(gaussian(2 * TILE, 9, FP32, 1.0))).to(BF16)
    frame = compress(x, kernels=kernels)
    header = header_of(frame)
    assert header.mode == fmt.MODE_ZIPPED and header.need > 35 and not header.overflow
    num_escapes = int(tile_escapes(frame, fmt.layout(ROW, x.numel(), header.escapes_per_block, header.spill_per_tile)).sum())
    assert 1.0 <= frame.numel() / needed_bytes(num_escapes, ROW, x.numel()) < 1.01


def test_one_odd_tile_does_not_blow_up_the_others(kernels):
    """A tile of random bits among Gaussians spills to the sub-pool; with the status' need alone the frame would be stored raw."""
    x = torch.cat([gaussian(5 * TILE, 10, BF16), data("random bits", BF16, TILE, 11)])
    frame = compress(x, kernels=kernels)
    header = header_of(frame)
    assert header.need > 900 and header.escapes_per_block < 64 and header.spill_per_tile > 4000
    assert fmt.layout(ROW, x.numel(), header.need, 0).frame_bytes > fmt.raw_frame_bytes(x.nbytes) > 1.2 * frame.numel()


def test_the_fit_is_the_smallest_frame_without_overflow():
    """Against a search over every capacity and the smallest sub-pool for it, by arithmetic; and never an overflow."""
    generator = torch.Generator().manual_seed(12)
    for numel in (1, 1500, TILE, TILE + 1, 3 * TILE + 5000, 300 * TILE + 77):
        g = fmt.layout(ROW, numel)
        for top in (0, 30, 200, 1024):
            blocks = torch.full((g.num_tiles,), 32)
            blocks[-1] = g.last_blocks
            counts = (torch.rand(g.num_tiles, generator=generator) ** 3 * top * blocks).to(torch.int64)
            c, s = best_capacity(counts, ROW, numel)
            sizes = {}
            for capacity in range(0, 1025, 4 if g.num_tiles < 100 else 64):
                h = fmt.layout(ROW, numel, capacity, 0)
                slots = torch.full((g.num_tiles,), h.escapes_capacity)
                slots[-1] = h.last_escapes_capacity
                groups = [(part.sum(), part.numel()) for part in (counts - slots).clamp(min=0).split(256)]
                spill = max(math.ceil(int(total) / num) for total, num in groups)
                sizes[capacity] = fmt.layout(ROW, numel, capacity, spill).frame_bytes if spill < 65536 else 1 << 60
                if capacity == c:
                    assert s == spill
            assert fmt.layout(ROW, numel, c, s).frame_bytes <= 1.02 * min(sizes.values())
    assert best_capacity(torch.zeros(0, dtype=torch.int64), ROW, 0) == (0, 0)


def test_spill_need_is_what_the_sub_pools_must_hold(kernels):
    """Tight, per group, largest over rows; with that much room nothing overflows, whatever the capacity it was found with."""
    x = data("mixed scales", BF16, 3 * fmt.TILE_ELEMS + 5000, 21)
    for capacity in (0, 8, 16):
        words = []
        for spill in (0, 65535):
            codec = Codec.of(BF16, x.numel(), "cpu", escapes_per_block=capacity, spill_per_tile=spill, kernels=kernels)
            frames, status = codec.empty_frames(1, "cpu"), torch.zeros(1, dtype=torch.int32)
            codec.encode(x.view(1, -1), frames, status)
            words.append(int(status))
        assert header_of(frames[0]).spill_need_bytes == fmt.spill_need_bytes(words[0]) == fmt.spill_need_bytes(words[1])
        slots = torch.tensor([codec.geometry.escapes_capacity] * 3 + [codec.geometry.last_escapes_capacity])
        spilled = int((tile_escapes(frames[0], codec.geometry) - slots).clamp(min=0).sum())
        need = fmt.spill_need_bytes(words[0])
        assert spilled and 4 * need >= spilled > 4 * (need - fmt.SPILL_UNIT_BYTES)                  # 4 tiles
        enough = Codec.of(BF16, x.numel(), "cpu", escapes_per_block=capacity, spill_per_tile=need, kernels=kernels)
        two = torch.stack([data("gaussian", BF16, x.numel(), 22), x])
        frames = enough.empty_frames(2, "cpu")
        enough.encode(two, frames, status)
        assert fmt.spill_need_bytes(int(status)) == need and not int(status) & fmt.OVERFLOW_BIT and words[0] & fmt.OVERFLOW_BIT


@pytest.mark.parametrize("level", [2])
def test_level_2_of_gaussians_fits_its_slots(kernels, level):
    """Every phase of sigma at the default capacity: no overflow in 16 tiles, and what docs/format.md, section 9, says of them."""
    numel = 16 * TILE
    for step in range(0, 16, 1 if kernels != "reference" else 5):
        x = gaussian(numel, 100 + step, FP32).mul_(0.02 * 2 ** (step / 16)).to(BF16)
        overflow, num_bytes = statistics(x, kernels, level=level)
        assert not overflow, f"phase {step}"
        assert 1.482 < x.nbytes / needed_bytes(num_bytes, ROW, numel, level) < 1.493, f"phase {step}"


@pytest.mark.parametrize("level", [2])
def test_level_2_is_smaller_on_everything_that_compresses(kernels, level):
    numel = 2 * TILE if kernels == "reference" else 8 * TILE
    for kind in ("gaussian", "10% zeros", "60% zeros", "mixed scales", "zero rows"):
        x = data(kind, BF16, numel, 3)
        sizes = [compress(x, kernels=kernels, level=asked).numel() for asked in (1, level)]
        assert sizes[1] < 0.99 * sizes[0], f"{kind} {sizes}"
