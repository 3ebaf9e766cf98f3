"""The CPU kernels at level 2, every instruction set against the reference: frames, status, outputs and what they say of corrupt frames."""
import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.kernels import impl_reference
from tests.helpers.bits import all_bf16_patterns, as_ints, assert_same_bits, gaussian
from tests.zipccl import test_cpu_kernels as cpu
from tests.zipccl.test_cpu_kernels import BF16, KINDS, Guarded, check, check_reduce, data, outcome

kernels, one_thread = cpu.kernels, cpu.one_thread          # fixtures

ROW = BY_TORCH[BF16]
ALL, NONE = (1792, 64), (0, 0)
LAYOUTS = ((95, 64), NONE, (0, 65535), (60, 64), ALL)       # (bytes of streams per block, spill bytes per tile)


def layout(numel: int, capacity=ALL):
    return fmt.layout(ROW, numel, *capacity, level=2)


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_and_layouts(kernels, kind):
    numel = 32768 + 2 * 1024 + 77
    x = data(kind, BF16, numel).view(1, -1)
    words = [check(kernels, x, layout(numel, capacity)) for capacity in LAYOUTS]
    assert not words[-1] & fmt.OVERFLOW_BIT
    if kind in ("gaussian", "random bits"):
        assert bool(words[0] & fmt.OVERFLOW_BIT) == (kind == "random bits") and words[1] & fmt.OVERFLOW_BIT


def test_every_pattern(kernels):
    x = all_bf16_patterns()
    shuffled = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]
    check(kernels, torch.stack([x, shuffled]), layout(x.numel()))


def test_sizes(kernels):
    everything = torch.stack([data("specials", BF16, 32769, 5), data("gaussian", BF16, 32769, 6)])
    for numel in (*range(0, 258, 3), 1023, 1024, 1025, 32767, 32768, 32769):
        check(kernels, everything[:, 32769 - numel:], layout(numel))


def test_windows(kernels):
    """Classes by a step of the mean, both ends of the exponents, zeros around both limits, variances around the limit."""
    z, generator = gaussian(65536, 3, torch.float32), torch.Generator().manual_seed(4)
    rows = [z * 2 ** torch.linspace(-2, 2, 65536), z * torch.logspace(-38.5, 38, 64).repeat_interleave(1024)]
    for percent in (26 / 10.24, 170 / 10.24):
        share = torch.linspace(percent - 0.6, percent + 0.6, 64).repeat_interleave(1024) / 100
        rows.append(rows[0] * (torch.rand(65536, generator=generator) > share))
    x = torch.stack([*(row.to(BF16) for row in rows), cpu.mixture(65536, 1, BF16, 0.0)])
    g = layout(65536, (400, 64))
    check(kernels, x, g)
    frames = torch.empty(len(x), g.frame_bytes, dtype=torch.uint8)
    impl_reference.encode(x, frames, torch.zeros(1, dtype=torch.int32), g)
    assert set(frames[:, 128 + 17:128 + 144:4].flatten().tolist()) == set(range(6))


def test_groups(kernels, monkeypatch):
    """Groups of 3 tiles instead of 256, and spills across their borders."""
    monkeypatch.setattr(fmt, "GROUP_TILES", 3)
    for tiles, capacity in ((7, (80, 900)), (8, (80, 90))):
        numel = tiles * 32768 - 1500
        x = data("gaussian", BF16, numel, tiles).view(1, -1)
        g = fmt.layout.__wrapped__(ROW, numel, *capacity, level=2)
        assert bool(check(kernels, x, g) & fmt.OVERFLOW_BIT) == (capacity[1] == 90)
        if capacity[1] != 90:
            check_reduce(kernels, torch.cat([x, x.flip(1)]), tiles % 2, g)


def test_rows_views_and_sums(kernels):
    x = torch.stack([data(kind, BF16, 40000, i) for i, kind in enumerate(("gaussian", "10% zeros", "random bits"))])
    for skip in range(-1, 3):
        check(kernels, x, layout(40000), skip=skip)
    for offset in range(1, 18, 4):
        part = torch.stack([data("specials", BF16, 3000 + offset, offset), data("gaussian", BF16, 3000 + offset, offset)])
        check(kernels, part, layout(3000 + offset), offset_bytes=2 * offset)
        check_reduce(kernels, part, offset % 2, layout(3000 + offset), offset_bytes=2 * offset)
    for num_rows in (1, 2, 5):
        rows = torch.stack([data("specials", BF16, 34000, 10 + row) for row in range(num_rows)])
        check_reduce(kernels, rows, num_rows - 1, layout(34000), alias=num_rows == 2)


def test_errors_are_the_references(kernels, monkeypatch):
    """Bytes of headers, codes and streams changed one at a time: the same FrameError, or the same output where nothing shows."""
    monkeypatch.setattr(fmt, "GROUP_TILES", 2)
    monkeypatch.setattr(fmt, "TILE_BLOCKS", 4)
    numel, generator = 5 * 4096 + 2000, torch.Generator().manual_seed(3)
    g = fmt.layout.__wrapped__(ROW, numel, 60, 1200, level=2)
    x = data("gaussian", BF16, numel, 1).view(1, -1)
    x[0, :700] = data("random bits", BF16, 700)              # raw exponents, and a spill
    frames, status = torch.empty(1, g.frame_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    impl_reference.encode(x, frames, status, g)
    assert not int(status) & fmt.OVERFLOW_BIT
    places = [*range(0, 32), 40, 127]
    for tile in range(g.num_tiles):
        start = g.tiles_offset + tile * g.tile_bytes
        places += [start + i for i in (*range(9), 16, 17, 18, 19, 20, 21, 25)]
        places += (start + torch.randint(32, g.codes_offset + 1500, (16,), generator=generator)).tolist()
    places += torch.randint(g.pools_offset, g.frame_bytes, (20,), generator=generator).tolist()
    seen = set()
    for place in places:
        value = int(torch.randint(1, 256, (1,), generator=generator))
        frames[0, place] ^= value
        expected = torch.empty_like(x)
        said = outcome(impl_reference.decode, frames, expected, g)
        seen.add(said.split(".")[0])
        for k in kernels:
            out = Guarded(1, numel, BF16)
            assert outcome(k.decode, frames, out.rows, g) == said, f"{k.isa}: byte {place} ^ {value:#x}"
            assert out.untouched()
            if not said:
                assert_same_bits(out.rows, expected, f"{k.isa}: byte {place} ^ {value:#x}")
        frames[0, place] ^= value
    assert len(seen) == 8, seen                          # the kinds of corruption, a given window, overflow, and none


def test_denormals_alone(kernels):
    """Every element a zero code, first code 1: a block without a stream."""
    x = (torch.arange(5000) % 128).to(torch.int16).view(BF16).view(1, -1)
    assert check(kernels, x, layout(5000, NONE)) == 0
    assert (as_ints(x) != 0).any()
