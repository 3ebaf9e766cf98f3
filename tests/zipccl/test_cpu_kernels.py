"""The CPU kernels, every instruction set of this machine, against the reference: equal bytes and bits, nothing else
written."""
import ctypes
import ctypes.util
import platform
import re
import shutil
import subprocess
import sys

import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import impl_cpu, impl_reference
from ds_zipccl.kernels.geometry import Geometry
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.helpers.bits import all_bf16_patterns, as_ints, assert_same_bits, gaussian, random_bits, specials
from tests.zipccl import window_cases
from tests.zipccl.window_cases import mixture
from zipscape.errors import BuildError
from zipscape.op_builder.base import NativeLibrary, csrc_dir
from zipscape.op_builder.zipccl import ZIPCCL_CPU

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=("bf16", "fp16", "fp32"))
LAYOUTS = ((35, 64), (0, 0), (0, 65535), (5, 64), (1024, 0))         # (escapes per block, spill bytes per tile)
GUARD = 128                                                          # canary bytes on both sides of every row
CANARY = 0xA5


@pytest.fixture(scope="module")
def kernels() -> list[impl_cpu.CpuKernels]:
    if not ZIPCCL_CPU.available()[0]:
        pytest.skip(f"no C++ compiler: {ZIPCCL_CPU.available()[1]}")
    library = ZIPCCL_CPU.load()
    usable = [isa for n, isa in enumerate(impl_cpu.ISAS) if library.zipccl_cpu_supports(n)]
    return [impl_cpu.CpuKernels(library, isa, uncached_from) for isa in usable for uncached_from in (0, 1 << 62)]


@pytest.fixture(autouse=True)
def one_thread():
    """The reference's many small tensors only lose by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Guarded:
    """``rows`` [count, numel] of a dtype, ``offset_bytes`` away from an aligned address, each between canaries."""

    def __init__(self, count: int, numel: int, dtype=torch.uint8, offset_bytes: int = 0):
        itemsize = torch.empty((), dtype=dtype).element_size()
        self._stride = -(-numel * itemsize // GUARD) * GUARD + 2 * GUARD
        self._all = torch.full((count * self._stride + 2 * GUARD,), CANARY, dtype=torch.uint8)
        self._first, self._width = GUARD + offset_bytes, numel * itemsize
        usable = (self._all.numel() - self._first) // itemsize * itemsize
        flat = self._all[self._first:self._first + usable].view(dtype)
        self.rows = flat.as_strided((count, numel), (self._stride // itemsize, 1), flat.storage_offset())

    def untouched(self) -> bool:
        outside = torch.ones(self._all.numel(), dtype=torch.bool)
        for i in range(self.rows.shape[0]):
            outside[self._first + i * self._stride:self._first + i * self._stride + self._width] = False
        return bool((self._all[outside] == CANARY).all())


def copy_of(x: torch.Tensor, offset_bytes: int = 0) -> torch.Tensor:
    """``x`` [P, n] at another alignment."""
    copy = Guarded(*x.shape, x.dtype, offset_bytes).rows
    as_rows(copy).copy_(as_rows(x))
    return copy


def as_rows(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def outcome(function, *arguments) -> str:
    """What a decoder says: empty, or its FrameError."""
    try:
        function(*arguments)
        return ""
    except FrameError as error:
        return str(error)


def check(kernels, x: torch.Tensor, g: Geometry, *, skip: int = -1, offset_bytes: int = 0) -> int:
    """Parity of frames, status, outputs and errors for the rows ``x`` [P, n]. Returns the status word."""
    num_rows = x.shape[0]
    expected, status = Guarded(num_rows, g.frame_bytes), torch.full((1,), -1, dtype=torch.int32)
    impl_reference.encode(x, expected.rows, status, g, skip)
    decoded = Guarded(num_rows, g.numel, x.dtype)
    said = outcome(impl_reference.decode, expected.rows, decoded.rows, g, skip)
    x = copy_of(x, offset_bytes)
    for k in kernels:
        frames, got = Guarded(num_rows, g.frame_bytes, offset_bytes=offset_bytes), torch.full_like(status, -1)
        k.encode(x, frames.rows, got, g, skip)
        assert int(got) == int(status), f"{k.isa}: status {int(got):#x}, reference {int(status):#x}"
        assert_same_bits(frames.rows, expected.rows, f"{k.isa} frames of {g}")
        out = Guarded(num_rows, g.numel, x.dtype, offset_bytes)
        assert outcome(k.decode, frames.rows, out.rows, g, skip) == said, k.isa
        assert frames.untouched() and out.untouched(), f"{k.isa} wrote outside its rows"
        if not said:
            assert_same_bits(out.rows, decoded.rows, f"{k.isa} decoded")
            for i in set(range(num_rows)) - {skip}:
                assert_same_bits(out.rows[i], x[i], f"{k.isa} round trip of row {i}")
    return int(status)


def check_reduce(kernels, x: torch.Tensor, own_index: int, g: Geometry, *, offset_bytes: int = 0,
                 alias: bool = False) -> None:
    """Parity of decode_reduce with the rows ``x`` [P, n] as frames but for row ``own_index``."""
    frames, status = Guarded(x.shape[0], g.frame_bytes, offset_bytes=offset_bytes), torch.zeros(1, dtype=torch.int32)
    impl_reference.encode(x, frames.rows, status, g, own_index)
    expected = torch.empty(g.numel, dtype=x.dtype)
    impl_reference.decode_reduce(frames.rows, x[own_index], own_index, expected, g)
    for k in kernels:
        own, out = Guarded(1, g.numel, x.dtype, offset_bytes), Guarded(1, g.numel, x.dtype, offset_bytes)
        as_rows(own.rows)[0] = as_rows(x)[own_index]
        target = own if alias else out
        k.decode_reduce(frames.rows, own.rows[0], own_index, target.rows[0], g)
        assert_same_bits(target.rows[0], expected, f"{k.isa}: sum of {x.shape[0]} rows, own {own_index}")
        assert own.untouched() and out.untouched() and frames.untouched(), f"{k.isa} wrote outside its output"


def layout(dtype, numel: int, capacity=(35, 64), window_lo: int = -1) -> Geometry:
    return fmt.layout(BY_TORCH[dtype], numel, *capacity, window_lo)


def data(kind: str, dtype, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 77)
    x = gaussian(numel, seed, FP32)
    if kind == "random bits":
        return random_bits(numel, seed, dtype)
    if kind == "specials":
        sprinkled = torch.rand(numel, generator=generator) < 0.1
        other = torch.where(sprinkled, random_bits(numel, seed, dtype), x.to(dtype))
        return specials(numel, seed) if dtype == BF16 else other
    if kind == "zeros":
        x = torch.zeros(numel)
    if kind.endswith("% zeros"):
        x[torch.rand(numel, generator=generator) < float(kind.split("%")[0]) / 100] = 0.0
    if kind == "mixed scales":
        x *= torch.logspace(-4, 0, 40).repeat_interleave(701)[torch.arange(numel) % (40 * 701)]
    if kind == "denormals":
        return (as_ints(random_bits(numel, seed, dtype)) & ((1 << BY_TORCH[dtype].mantissa_bits) - 1)).view(dtype)
    if kind == "mixture":
        return mixture(numel, seed, dtype, zeros=0.1 * (seed % 2))
    if kind == "extremes":                               # the smallest and the largest exponent in turn: no window fits
        x = torch.where(torch.arange(numel) % 2 == 0, torch.finfo(dtype).tiny * 1.5, torch.finfo(dtype).max * 0.7)
    return x.to(dtype)


KINDS = ("gaussian", "mixture", "random bits", "specials", "zeros", "10% zeros", "60% zeros", "mixed scales", "denormals",
         "extremes")


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_distributions_and_layouts(kernels, kind, dtype):
    numel = 32768 + 2 * 1024 + 77
    x = data(kind, dtype, numel).view(1, -1)
    words = [check(kernels, x, layout(dtype, numel, capacity)) for capacity in LAYOUTS]
    for window_lo in (3, BY_TORCH[dtype].top_lo):
        check(kernels, x[:, 32000:], layout(dtype, numel - 32000, (1024, 64), window_lo))
    assert not words[-1] & fmt.OVERFLOW_BIT                           # room for everything
    if kind in ("random bits", "extremes") and dtype != FP16:
        assert words[0] & fmt.OVERFLOW_BIT and words[1] & fmt.OVERFLOW_BIT         # the overflow flag was seen to rise
    if kind == "gaussian":
        assert not words[0] & fmt.OVERFLOW_BIT and words[1] & fmt.OVERFLOW_BIT and not words[2] & fmt.OVERFLOW_BIT


@DTYPES
def test_limit_of_spread_blocks(kernels, dtype):
    """Every instruction set tells 3 n n and its neighbours apart; also many blocks with a variance around it, both modes."""
    for x in window_cases.tensors(BY_TORCH[dtype]):
        check(kernels, x.view(1, -1), layout(dtype, x.numel(), (1024, 0)))
    x = torch.stack([mixture(65536, seed, dtype, zeros) for seed, zeros in enumerate((0.0, 0.02, 0.1, 0.6))])
    check(kernels, x, layout(dtype, 65536, (400, 64)))


def test_every_bf16_pattern(kernels):
    x = all_bf16_patterns()
    shuffled = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]
    for capacity in LAYOUTS:
        check(kernels, torch.stack([x, shuffled]), layout(BF16, x.numel(), capacity))


@DTYPES
def test_small_sizes(kernels, dtype):
    everything = torch.stack([data("specials", dtype, 258, 5), data("gaussian", dtype, 258, 6)])
    for numel in range(258) if dtype == BF16 else (*range(34), *range(254, 258)):
        check(kernels, everything[:, 258 - numel:], layout(dtype, numel, (1024, 0)))


@DTYPES
@pytest.mark.parametrize("around", [1024, 31 * 1024, 32 * 1024, 64 * 1024])
def test_block_and_tile_borders(kernels, dtype, around):
    for numel in (around - 1, around, around + 1):
        check(kernels, data("specials", dtype, numel, numel).view(1, -1), layout(dtype, numel, (20, 3000)))


@DTYPES
def test_groups(kernels, monkeypatch, dtype):
    """Groups of 3 tiles instead of 256, and spills across their borders."""
    monkeypatch.setattr(fmt, "GROUP_TILES", 3)
    for tiles, capacity in ((6, (10, 640)), (7, (10, 90)), (8, (10, 640))):
        numel = tiles * 32768 - 1500
        x = data("gaussian", dtype, numel, tiles).view(1, -1)
        x[0, 32768 * 4 + 5000:32768 * 4 + 5200] = data("random bits", dtype, 200)
        g = fmt.layout.__wrapped__(BY_TORCH[dtype], numel, *capacity)
        assert g.group_tiles == 3 and g.num_groups > 1
        assert bool(check(kernels, x, g) & fmt.OVERFLOW_BIT) == (capacity[1] == 90)
        if capacity[1] != 90:
            check_reduce(kernels, torch.cat([x, x.flip(1)]), tiles % 2, g)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_threads(kernels, monkeypatch, num_threads):
    """Enough rows that many threads have work, every row with spills in several groups; all must come out equal."""
    monkeypatch.setattr(fmt, "GROUP_TILES", 3)
    numel, num_rows = 5 * 32768 + 1100, 32
    g = fmt.layout.__wrapped__(BY_TORCH[BF16], numel, 10, 900)
    x = torch.cat([data("specials", BF16, 2000), data("gaussian", BF16, numel - 2000)]).expand(num_rows, numel)
    expected, status = torch.empty(1, g.frame_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    impl_reference.encode(x[:1], expected, status, g)
    total = torch.empty(numel, dtype=BF16)
    sum_in_order(x, total)
    torch.set_num_threads(num_threads)
    for k in kernels:
        frames, out, got = Guarded(num_rows, g.frame_bytes), Guarded(num_rows, numel, BF16), torch.zeros_like(status)
        k.encode(x, frames.rows, got, g)
        assert int(got) == int(status) and not int(status) & fmt.OVERFLOW_BIT
        assert_same_bits(frames.rows, expected.expand(num_rows, -1), f"{k.isa}, {num_threads} threads: frames")
        k.decode(frames.rows, out.rows, g)
        assert_same_bits(out.rows, x, f"{k.isa}, {num_threads} threads: decoded")
        assert frames.untouched() and out.untouched()
        k.decode_reduce(frames.rows, x[0], 7, out.rows[0], g)
        assert_same_bits(out.rows[0], total, f"{k.isa}, {num_threads} threads: sum")
        frames.rows[5, g.tiles_offset + 3 * g.tile_bytes] ^= 1           # the first of several errors is the one named
        frames.rows[9, g.tiles_offset] ^= 1
        assert "tiles 3..4" in outcome(k.decode, frames.rows, out.rows, g)


@pytest.mark.slow
def test_group_border(kernels):
    numel = 256 * 32768 + 1025
    x = data("gaussian", BF16, numel).view(1, -1)
    x[0, ::32768 * 5] = 3e38
    x[0, 255 * 32768:256 * 32768 + 700] = data("random bits", BF16, 32768 + 700)[:33468]
    check(kernels, x, layout(BF16, numel, (24, 300)))


@DTYPES
def test_rows_skip_and_strides(kernels, dtype):
    numel = 40000
    x = torch.stack([data(kind, dtype, numel, i) for i, kind in enumerate(("gaussian", "10% zeros", "random bits"))])
    g = layout(dtype, numel, (1024, 0))
    needs = [check(kernels, x, g, skip=skip) & fmt.NEED_MASK for skip in range(-1, 3)]
    assert needs[0] == max(needs) > needs[3]             # the skipped row counts for nothing
    check(kernels, x[:1].expand(3, numel), g)
    empty = torch.empty(0, g.frame_bytes, dtype=torch.uint8)
    for k in kernels:
        status = torch.full((1,), 7, dtype=torch.int32)
        k.encode(x[:0], empty, status, g)
        assert int(status) == 0


@DTYPES
def test_unaligned_views(kernels, dtype):
    itemsize = torch.empty((), dtype=dtype).element_size()
    for offset in range(1, 18):
        numel = 3000 + 97 * offset
        x = torch.stack([data("specials", dtype, numel, offset), data("gaussian", dtype, numel, offset)])
        check(kernels, x, layout(dtype, numel, (1024, 0)), offset_bytes=offset * itemsize)
        check_reduce(kernels, x, offset % 2, layout(dtype, numel, (1024, 0)), offset_bytes=offset * itemsize)


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5])
def test_decode_reduce(kernels, dtype, num_rows):
    numel = 32768 + 1500
    for i, kind in enumerate(("gaussian", "random bits", "denormals", "specials")):
        x = torch.stack([data(kind, dtype, numel, 10 + row) for row in range(num_rows)])
        x[:, :2] = -0.0
        check_reduce(kernels, x, i % num_rows, layout(dtype, numel, (1024, 0)), alias=i % 2 == 1)
    # near the largest values: rounding up to Inf; then a spread of 2^40: rounding, and order matters
    numel = 5000
    large = gaussian(num_rows * numel, 3, FP32).view(num_rows, -1).abs().clamp(max=0.05) * 20 * torch.finfo(dtype).max
    spread = gaussian(num_rows * numel, 4, FP32).view(num_rows, -1) * torch.logspace(-6, 4, numel)
    for x in (large, spread):
        check_reduce(kernels, x.to(dtype), num_rows - 1, layout(dtype, numel, (1024, 0)))


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=("bf16", "fp16"))
def test_sums_of_every_pattern(kernels, dtype):
    """Every pattern alone (canonical NaN, -0 and denormals kept) and added to another one: halves and ties included."""
    x = as_ints(all_bf16_patterns()).view(dtype)
    g = layout(dtype, x.numel(), (1024, 0))
    check_reduce(kernels, x.view(1, -1), 0, g)
    shuffled = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))]
    check_reduce(kernels, torch.stack([x, shuffled]), 0, g)
    neighbours = (as_ints(x) ^ 0x3F).view(dtype)         # of close exponents: many exact ties
    check_reduce(kernels, torch.stack([x, shuffled, neighbours]), 2, g)


def test_denormal_sums_are_not_flushed(kernels):
    x, g = torch.full((2, 2048), 1, dtype=torch.int16).view(BF16), layout(BF16, 2048)
    for k in kernels:
        frames, out = torch.empty(2, g.frame_bytes, dtype=torch.uint8), torch.empty_like(x[0])
        k.encode(x, frames, torch.zeros(1, dtype=torch.int32), g)
        k.decode_reduce(frames, x[0], 0, out, g)
        assert (as_ints(out) == 2).all(), k.isa


def test_errors_are_the_references(kernels, monkeypatch):
    """Bytes of headers and codes changed one at a time: the same FrameError, or the same output where nothing shows."""
    monkeypatch.setattr(fmt, "GROUP_TILES", 2)
    monkeypatch.setattr(fmt, "TILE_BLOCKS", 4)
    numel, generator = 5 * 4096 + 2000, torch.Generator().manual_seed(3)
    g = fmt.layout.__wrapped__(BY_TORCH[BF16], numel, 10, 400)
    x = torch.stack([data("gaussian", BF16, numel, i) for i in range(2)])
    frames, status = torch.empty(2, g.frame_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    impl_reference.encode(x, frames, status, g)
    places = [*range(0, 32), 40, 127]
    for tile in range(g.num_tiles):
        start = g.tiles_offset + tile * g.tile_bytes
        places += [start + i for i in (*range(9), 16, 17, 18, 19, 20, 21, 25)]
        places += (start + g.codes_offset + torch.randint(0, 1500, (4,), generator=generator)).tolist()
    seen = set()
    for n, place in enumerate(places):
        row, value = n % 2, int(torch.randint(1, 256, (1,), generator=generator))
        frames[row, place] ^= value
        expected = torch.empty_like(x)
        said = outcome(impl_reference.decode, frames, expected, g)
        seen.add(said.split(".")[0])
        for k in kernels:
            out, total = Guarded(2, numel, BF16), torch.empty(numel, dtype=BF16)
            assert outcome(k.decode, frames, out.rows, g) == said, f"{k.isa}: byte {place} of row {row} ^ {value:#x}"
            assert out.untouched()
            if not said:
                assert_same_bits(out.rows, expected, f"{k.isa}: byte {place} of row {row} ^ {value:#x}")
            if row == 1:
                assert outcome(k.decode_reduce, frames, x[0], 0, total, g) == said, k.isa
        frames[row, place] ^= value
    assert len(seen) == 7, seen                          # the five kinds of corruption, overflow, and none


def test_instruction_set_override(kernels, monkeypatch):
    monkeypatch.delenv(impl_cpu.ISA_VARIABLE, raising=False)
    assert impl_cpu.isa() == kernels[-1].isa
    monkeypatch.setenv(impl_cpu.ISA_VARIABLE, "scalar")
    assert impl_cpu.isa() == impl_cpu.load().isa == "scalar"
    monkeypatch.setenv(impl_cpu.ISA_VARIABLE, "mmx")
    with pytest.raises(BuildError, match="mmx.*scalar"):
        impl_cpu.load()


def test_control_words_stay(kernels):
    """Loading the library and running it changes neither the x87 control word nor MXCSR (its exception flags aside)."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("reads glibc's fenv_t of x86-64")
    library = ctypes.CDLL(ctypes.util.find_library("m"))

    def control() -> bytes:
        state = ctypes.create_string_buffer(64)
        library.fegetenv(state)
        return state.raw[:2] + (state.raw[28] & 0xC0).to_bytes(1, "little") + state.raw[29:32]

    before = control()
    x = torch.stack([data("denormals", FP16, 300000, i) for i in (1, 2)])
    check_reduce(kernels, x, 1, layout(FP16, 300000, (1024, 0)))
    assert control() == before
    script = ("import ctypes, ctypes.util; m = ctypes.CDLL(ctypes.util.find_library('m')); "
              "a, b = (ctypes.create_string_buffer(64) for _ in 'ab'); "
              f"m.fegetenv(a); ctypes.CDLL({str(ZIPCCL_CPU.build())!r}); m.fegetenv(b); assert a.raw == b.raw")
    subprocess.run([sys.executable, "-S", "-c", script], check=True, timeout=60)


def test_geometry_header_mirrors_python():
    fields = re.findall(r"^    int64_t (\w+);", (csrc_dir() / "zipccl" / "geometry.h").read_text(), re.MULTILINE)
    assert tuple(fields) + ("header",) == Geometry._fields


def test_these_tests_notice_swapped_lanes(tmp_path, monkeypatch):
    """C16: a codec that swaps two lanes on both ways round-trips its own frames; parity must still fail."""
    monkeypatch.setenv("ZIPSCAPE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(csrc_dir(), tmp_path / "csrc")
    source = tmp_path / "csrc" / "zipccl" / "cpu_scalar.h"
    text = source.read_text()
    assert text.count("4 * lane") == 7                      # in the search for escapes and pack three words each, in unpack one place
    source.write_text(text.replace("4 * lane", "4 * (lane ^ 4)"))
    mutant = NativeLibrary("zipccl_cpu", ["zipccl/cpu_codec.cpp"], csrc=tmp_path / "csrc")
    if not mutant.available()[0]:
        pytest.skip(f"no C++ compiler: {mutant.available()[1]}")
    swapped, g = impl_cpu.CpuKernels(mutant.load(), "scalar"), layout(BF16, 5000)
    x, frames = gaussian(5000, 1).view(1, -1), torch.empty(1, g.frame_bytes, dtype=torch.uint8)
    out = torch.empty_like(x)
    swapped.encode(x, frames, torch.zeros(1, dtype=torch.int32), g)
    swapped.decode(frames, out, g)
    assert_same_bits(out, x)
    with pytest.raises(AssertionError, match="scalar frames"):
        check([swapped], x, g)
