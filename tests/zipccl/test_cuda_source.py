"""The CUDA source without a GPU: nvcc compiles it for every architecture we name, and a CPU runs it, one fiber a thread, against the
reference's bytes. Races and speed need a GPU: benchmarks/gpu_codec.py."""
import ctypes
import mmap
import os
import re
import struct
import subprocess
import types
from pathlib import Path

import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import TABLE
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import impl_reference, nvrtc
from ds_zipccl.kernels.cuda_calls import CudaCalls, packed_geometry, workspace_words
from tests.helpers.emulated import compile_for_host
from tests.zipccl import window_cases
from zipscape.errors import BuildError
from zipscape.op_builder import toolchain
from zipscape.op_builder.base import csrc_dir
from zipscape.op_builder.zipccl import ZIPCCL_CUDA

CSRC = csrc_dir()
BITS = {2: torch.int16, 4: torch.int32}
BF16 = TABLE[0]
DTYPES = pytest.mark.parametrize("dtype", TABLE, ids=lambda row: row.name)
LEVELS = pytest.mark.parametrize("level", BF16.levels)
FORMATS = pytest.mark.parametrize("dtype, level", [(row, level) for row in TABLE for level in row.levels],
                                  ids=lambda value: getattr(value, "name", f"level{value}"))
SIZES = (0, 1, 3, 1023, 1025, 32768, 32769, 70001)


@pytest.mark.slow           # the prebuilt wheel's test compiles the same, as strictly
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", sorted(CSRC.glob("*/*.cu")), ids=lambda path: path.name)
def test_nvcc_compiles(source: Path, arch: str, tmp_path):
    try:
        nvcc = toolchain.find("nvcc")
    except BuildError as error:
        pytest.skip(f"nvcc is not installed: {error}")
    subprocess.run([*nvcc, "-cubin", f"-arch={arch}", "-std=c++17", "-Werror", "all-warnings", f"-I{CSRC}", str(source), "-o",
                    str(tmp_path / "out.cubin")], check=True, timeout=300)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvrtc_compiles(arch):
    """Every kernel of every dtype and level, from the same source."""
    try:
        nvrtc._find_nvrtc()
    except BuildError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    cubin = nvrtc.compile_cubin(ZIPCCL_CUDA.source_paths()[0], arch)
    assert cubin[:4] == b"\x7fELF"
    formats = [f"{nvrtc._DTYPE_NAMES[row.code]}{'_level2' if level == 2 else ''}" for row in TABLE for level in row.levels]
    missing = [name for name in (f"zipccl_{operation}_{one}" for operation in nvrtc._WARPS for one in formats)
               if f"\0.text.{name}\0".encode() not in cubin]
    assert not missing


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> CudaCalls:
    return CudaCalls(ctypes.CDLL(str(compile_for_host(tmp_path_factory.mktemp("emulated")))))


def make(kind: str, n: int, dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, generator=g)
    if kind == "bits":
        width = 8 * dtype.itemsize - 1
        return torch.randint(-(1 << width), 1 << width, (n,), generator=g).to(BITS[dtype.itemsize]).view(dtype.torch_dtype)
    if kind == "specials":
        z[::7], z[3::11], z[5::13], z[1::17] = float("inf"), float("nan"), 1e-39, -0.0
    scale = {"gauss": 0.02, "specials": 1.0, "zeros": 0.0, "sparse": 0.02 * (torch.rand(n, generator=g) > 0.1),
             "half zeros": 0.02 * (torch.rand(n, generator=g) > 0.5),
             "tail": torch.exp(2 * torch.randn(n, generator=g))}[kind]
    return (z * scale).to(dtype.torch_dtype)


def rows_of(kind: str, rows: int, n: int, dtype, offset: int) -> torch.Tensor:
    """[rows, n], each row a gap away from the next and, unless offset is 0, not on a 16-byte address."""
    x = torch.empty(rows * (n + 3) + offset, dtype=dtype.torch_dtype)[offset:].view(rows, n + 3)[:, :n]
    for i in range(rows):
        x[i] = make(kind, n, dtype, i)
    return x


WORKSPACE = torch.zeros(4096, dtype=torch.int64)           # the same for all calls, as on a stream


def encode(calls, x, g, skip=-1):
    stride = fmt.align(g.frame_bytes)
    frames = torch.full((x.shape[0], stride), 0xA5, dtype=torch.uint8)
    status = torch.full((1,), -1, dtype=torch.int32)
    assert workspace_words(x.shape[0], g) <= WORKSPACE.numel()
    calls.encode(g, x.data_ptr(), x.stride(0) * g.itemsize, frames.data_ptr(), stride, x.shape[0], skip, status.data_ptr(),
                 WORKSPACE.data_ptr(), 0)
    return frames, status


def reference_encode(x, g, skip=-1):
    frames = torch.full((x.shape[0], fmt.align(g.frame_bytes)), 0xA5, dtype=torch.uint8)
    status = torch.full((1,), -1, dtype=torch.int32)
    impl_reference.encode(x, frames, status, g, skip)
    return frames, status


def decode(calls, frames, out, g, skip=-1) -> int:
    errors = torch.zeros(1, dtype=torch.int32)
    calls.decode(g, frames.data_ptr(), frames.stride(0), out.data_ptr(), out.stride(0) * g.itemsize, out.shape[0], skip,
                 errors.data_ptr(), 0)
    return int(errors)


def decode_reduce(calls, frames, own, own_index, total, g) -> int:
    errors = torch.zeros(1, dtype=torch.int32)
    calls.decode_reduce(g, frames.data_ptr(), frames.stride(0), frames.shape[0], own.data_ptr(), own_index, total.data_ptr(),
                        errors.data_ptr(), 0)
    return int(errors)


def check(calls, x, g, skip=-1):
    item = g.itemsize
    expected, expected_status = reference_encode(x, g, skip)
    frames, status = encode(calls, x, g, skip)
    assert torch.equal(status, expected_status)
    assert torch.equal(frames, expected), f"first difference at {(frames != expected).nonzero()[0].tolist()}"
    if int(status) & fmt.OVERFLOW_BIT:
        return
    whole = torch.zeros_like(x.new_empty(x.shape[0], x.shape[1] + 3))
    out = whole[:, :x.shape[1]]
    assert decode(calls, frames, out, g, skip) == 0
    kept = [i for i in range(x.shape[0]) if i != skip]
    assert torch.equal(out[kept].view(BITS[item]), x[kept].view(BITS[item]))
    assert not whole[:, x.shape[1]:].view(BITS[item]).any(), "nothing may be written behind a row"
    own = max(skip, 0)
    total, expected_total = torch.empty_like(x[0]), torch.empty_like(x[0])
    errors = decode_reduce(calls, frames, x[own], own, total, g)
    impl_reference.decode_reduce(frames, x[own], own, expected_total, g)
    assert errors == 0 and torch.equal(total.view(BITS[item]), expected_total.view(BITS[item]))


@FORMATS
@pytest.mark.parametrize("kind", ["gauss", "sparse", "zeros", "tail", "bits", "half zeros", "specials"])
def test_bytes_equal_the_reference(emulated, dtype, level, kind):
    for n in SIZES:
        for capacity, spill in ((35, 64), (20, 2048)) if level == 1 else ((95, 64), (60, 40000)):
            rows = 2 + n % 2
            g = fmt.layout(dtype, n, capacity, spill, level=level)
            check(emulated, rows_of(kind, rows, n, dtype, n % 3), g, skip=n % (rows + 1) - 1)


@FORMATS
@pytest.mark.parametrize("rows, own_index", [(1, 0), (3, 1), (4, 0), (5, 4), (8, 3), (8, 7)])
def test_sums_of_many_rows(emulated, dtype, level, rows, own_index):
    """The own row at both ends and between; escapes that are fetched early, too many of a block for that, spilled; zeros and NaNs; partly
    filled blocks, and rows on any address."""
    for kind, n, offset, capacity, spill in (("gauss", 33000, 0, 35 * level, 2000), ("tail", 3000, 1, 20, 60000),
                                             ("half zeros", 1024, 0, 60, 8000), ("bits", 2500, 0, (1024, 1792)[level - 1], 0),
                                             ("specials", 5000, 2, 0, 60000)):
        g = fmt.layout(dtype, n, capacity, spill, level=level)
        x = rows_of(kind, rows, n, dtype, offset)
        frames, status = reference_encode(x, g, own_index)
        assert not int(status) & fmt.OVERFLOW_BIT
        whole = torch.full((n + 16,), 1.5, dtype=dtype.torch_dtype)
        total, expected = whole[offset:offset + n], torch.empty_like(x[0])
        assert decode_reduce(emulated, frames, x[own_index], own_index, total, g) == 0
        impl_reference.decode_reduce(frames, x[own_index], own_index, expected, g)
        assert torch.equal(total.view(BITS[dtype.itemsize]), expected.view(BITS[dtype.itemsize])), kind
        assert bool((whole[:offset] == 1.5).all() and (whole[offset + n:] == 1.5).all())


@pytest.mark.parametrize("dtype", TABLE[:2], ids=lambda row: row.name)
def test_sums_of_blocks_around_what_is_fetched_early(emulated, dtype):
    """As many escapes of a block as a warp fetches before their turn, fewer and more, at every place in a word."""
    room = int(re.search(r"kNearEscapes = (\d+)", (CSRC / "zipccl/reduce_rows.cuh").read_text())[1])
    generator = torch.Generator().manual_seed(4)
    x = torch.ones(3, 32, 1024, dtype=torch.float64) * (1 + torch.rand(3, 32, 1024, generator=generator, dtype=torch.float64) * 0.9)
    for row in range(3):
        for b in range(32):                    # exponents far off on both sides
            count = room - 16 + (b * 5 + row) % 32
            places = torch.randperm(1024, generator=generator)[:count]
            x[row, b, places] *= 2.0 ** (torch.randint(6, 9, (count,), generator=generator) * (torch.arange(count) % 2 * 2 - 1))
    x = x.view(3, -1).to(dtype.torch_dtype)
    check(emulated, x, fmt.layout(dtype, x.shape[1], 1024, 0), skip=1)
    heads = encode(emulated, x, fmt.layout(dtype, x.shape[1], 1024, 0))[0][:, 128 + 16:128 + 144].contiguous().view(torch.int32) >> 16
    assert sorted(heads[0].tolist()) == list(range(room - 16, room + 16))


@DTYPES
def test_capacities_and_given_windows(emulated, dtype):
    for capacity, spill in ((0, 0), (0, 40000), (60, 0), (1024, 64)):          # slots beyond what a CTA stages, none at all
        check(emulated, rows_of("tail", 1, 5000, dtype, 0), fmt.layout(dtype, 5000, capacity, spill))
    for lo in (0, dtype.bias - 8, dtype.top_lo):
        check(emulated, rows_of("sparse", 9, 5000, dtype, 1), fmt.layout(dtype, 5000, 1024, 0, lo), skip=4)


@DTYPES
def test_pairs_of_blocks_around_what_encode_gathers(emulated, dtype):
    """Pairs of blocks whose escapes just fit the room where encode puts them side by side, or just not, in slots and beyond them."""
    room = int(re.search(r"kGathered = (\d+)", (CSRC / "zipccl/encode.cuh").read_text())[1])
    generator = torch.Generator().manual_seed(3)
    x = torch.ones(32, 1024, dtype=torch.float64) * (1 + torch.rand(32, 1024, generator=generator, dtype=torch.float64) * 0.9)
    for pair in range(16):                     # escapes: exponents far off on both sides, the mean stays
        escapes = room - 8 + pair
        for b, count in ((2 * pair, escapes // 3), (2 * pair + 1, escapes - escapes // 3)):
            places = torch.randperm(1024, generator=generator)[:count]
            x[b, places] *= 2.0 ** (torch.randint(6, 9, (count,), generator=generator) * (torch.arange(count) % 2 * 2 - 1))
    x = torch.stack([x.flatten(), x.flip(0).flatten()]).to(dtype.torch_dtype)
    for capacity, spill in ((1024, 0), (40, 8000)):
        g = fmt.layout(dtype, x.shape[1], capacity, spill)
        check(emulated, x, g)
        heads = encode(emulated, x, g)[0][0, g.tiles_offset + 16:g.tiles_offset + 144].view(torch.int32) >> 16
        assert (heads[0::2] + heads[1::2]).tolist() == [room - 8 + pair for pair in range(16)]


@DTYPES
def test_limit_of_spread_blocks(emulated, dtype):
    for x in window_cases.tensors(dtype):
        check(emulated, x.view(1, -1), fmt.layout(dtype, x.numel(), 1024, 0))
    x = torch.stack([window_cases.mixture(65536, seed, dtype.torch_dtype, zeros) for seed, zeros in enumerate((0.0, 0.02, 0.1, 0.6))])
    check(emulated, x, fmt.layout(dtype, 65536, 400, 64))


@LEVELS
def test_every_bf16_pattern(emulated, level):
    x = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    x = torch.stack([x, x[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))]])
    check(emulated, x, fmt.layout(BF16, x.shape[1], fmt.LEVELS[level].max_slot_bytes, 0, level=level))


@LEVELS
def test_spills_of_many_tiles_over_two_groups(emulated, level):
    n = 32768 * 260 + 77
    x = make("gauss", n, BF16).view(1, -1)
    for capacity, spill in ((22, 600), (22, 64)) if level == 1 else ((80, 2000), (80, 64)):        # fits the sub-pools, overflows them
        check(emulated, x, fmt.layout(BF16, n, capacity, spill, level=level))


@DTYPES
def test_encode_asks_for_nothing_behind_its_input(emulated, dtype):
    """The input ends where memory does, and the emulation touches what is fetched early: in a process of its own, which would die."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for num_tiles, more in ((9, 0), (5, 1000), (1, 0)):
        n = num_tiles * 32768 + more * 16
        size, page = n * dtype.itemsize, mmap.PAGESIZE
        whole = -(-size // page) * page
        start = libc.mmap(None, whole + page, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert libc.mprotect(start + whole, page, 0) == 0
        x = torch.frombuffer((ctypes.c_uint8 * size).from_address(start + whole - size), dtype=dtype.torch_dtype)
        x.copy_(make("gauss", n, dtype))
        assert x.data_ptr() % 16 == 0
        g = fmt.layout(dtype, n)
        frame, status = torch.empty(g.frame_bytes, dtype=torch.uint8), torch.empty(1, dtype=torch.int32)
        arguments = g, x.data_ptr(), size, frame.data_ptr(), g.frame_bytes, 1, -1, status.data_ptr(), WORKSPACE.data_ptr(), 0
        child = os.fork()
        if child == 0:                         # torch has no threads here: nothing but the call
            emulated.encode(*arguments)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(whole + page))


def test_level_2_near_its_limits(emulated):
    """Exponents at both ends, where the window is cut off; classes by a step of the mean; shares of zeros around both limits."""
    generator = torch.Generator().manual_seed(7)
    z = torch.randn(65536, generator=generator)
    scales = torch.logspace(-38.5, 38, 64).repeat_interleave(1024)
    rows = [z * scales, z * 2 ** torch.linspace(-2, 2, 65536)]
    for percent in (26 / 10.24, 170 / 10.24):
        share = torch.linspace(percent - 0.6, percent + 0.6, 64).repeat_interleave(1024) / 100
        rows.append(rows[1] * (torch.rand(65536, generator=generator) > share))
    x = torch.stack(rows).to(torch.bfloat16)
    check(emulated, x, fmt.layout(BF16, 65536, 400, 64, level=2))
    modes = set(encode(emulated, x, fmt.layout(BF16, 65536, 400, 64, level=2))[0][:, 128 + 17:128 + 144:4].flatten().tolist())
    assert modes == set(range(6))
    for capacity, spill in ((0, 0), (0, 65000), (1792, 64)):
        check(emulated, rows_of("tail", 1, 5000, BF16, 0), fmt.layout(BF16, 5000, capacity, spill, level=2))
    check(emulated, rows_of("sparse", 9, 5000, BF16, 1), fmt.layout(BF16, 5000, 1792, 0, level=2), skip=4)


@LEVELS
def test_corrupt_metadata_is_reported_as_by_the_reference(emulated, level):
    x = rows_of("gauss", 1, 40000, BF16, 0)
    g = fmt.layout(BF16, x.shape[1], *((22, 600) if level == 1 else (60, 4000)), level=level)
    good, _ = encode(emulated, x, g)
    out, silent = torch.empty_like(x), 0
    generator = torch.Generator().manual_seed(5)
    places = [*range(128 + 16 + 4 * 32), *range(g.tile_bytes + 128, g.tile_bytes + 128 + 16 + 4 * g.last_blocks), 128 + g.codes_offset]
    if level == 2:                             # the streams, too
        places += [*range(272, 272 + 60, 3), *range(272 + 60, 128 + g.codes_offset, 97), *range(g.pools_offset, g.pools_offset + 900, 29)]
    for place in places:
        frames = good.clone()
        frames[0, place] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        try:
            impl_reference.decode(frames, out, g)
            expected = False
        except FrameError:
            expected = True
        found = decode(emulated, frames, out, g)
        assert (found != 0) == expected, f"byte {place}"
        silent += not expected
        if place % 3 == 0:                     # in a sum of three rows likewise
            rows = torch.cat([good, frames, good])
            assert decode_reduce(emulated, rows, x[0], 0, torch.empty_like(x[0]), g) == found, f"byte {place} in a sum"
    assert silent < len(places) / 2            # a changed window base, need or reserved byte cannot be seen


def test_nvrtc_launches_what_the_source_says():
    source = ZIPCCL_CUDA.source_paths()[0].read_text() + (CSRC / "zipccl/encode.cuh").read_text()
    warps = {name.lower(): int(count) for name, count in re.findall(r"k(Encode|Decode|Reduce|Reduce2)Warps = (\d+)", source)}
    assert warps == nvrtc._WARPS and f"kReduceRowsWarps = {nvrtc._REDUCE_ROWS_WARPS}," in source.replace(";", ",")
    wide, narrow = map(int, re.search(r"kLaneStage = F::kItem == 4 \? (\d+) : (\d+)", (CSRC / "zipccl/window.cuh").read_text()).groups())
    assert {2: 32 * narrow, 4: 32 * wide} == nvrtc._BLOCK_STAGE
    level2_warps, stream = (int(re.search(pattern, source + (CSRC / "zipccl/level2.cuh").read_text())[1])
                            for pattern in (r"define ZIPCCL_ENCODE2_WARPS (\d+)", r"kStreamBytes = (\d+)"))
    assert nvrtc._ENCODE_LEVEL2 == (level2_warps, level2_warps * 2 * 1024 + 32 * stream)


def test_nvrtc_fills_the_call_as_the_source_declares_it(monkeypatch):
    """The fields behind the header, by their names in frame.cuh, for each of the operations."""
    text = re.search(r"struct Call \{.*?u32 header[^\n]*\n(.*?)\n\};", (CSRC / "zipccl/frame.cuh").read_text(), re.DOTALL)[1]
    fields = re.findall(r"^ +(?:const )?(?:u8|u32|u64|i64)([^;]+);", text, re.MULTILINE)
    names = [name.strip("* ") for line in fields for name in line.split(",")]
    seen, g = [], fmt.layout(BF16, 40000)

    def launched(function, *rest):
        call = ctypes.string_at(rest[-2][0], 8 * len(g.ints) + 128 + 8 * len(names))
        assert call.startswith(packed_geometry(g))
        seen.append(dict(zip(names, struct.unpack(f"<{len(names)}q", call[-8 * len(names):]), strict=True)))
        return 0

    calls = object.__new__(nvrtc.NvrtcCalls)
    calls._functions = {(0, f"zipccl_{name}_bf16"): 1 for name in nvrtc._WARPS}
    calls._driver = types.SimpleNamespace(cuLaunchKernel=launched)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvrtc, "_num_multiprocessors", lambda device: 132)
    calls.encode(g, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    calls.decode(g, 11, 12, 13, 14, 15, -1, 17, 18)
    calls.decode_reduce(g, 21, 22, 3, 24, 2, 26, 27, 28)
    common = {"look_ahead": 132, "mail": 0, "stamp": 0}
    assert seen == [common | dict(x=1, row_stride=2, frames=3, frame_stride=4, num_rows=5, skip=6, status=7, workspace=8, out=0),
                    common | dict(frames=11, frame_stride=12, out=13, row_stride=14, num_rows=15, skip=-1, status=17, x=0, workspace=0),
                    common | dict(frames=21, frame_stride=22, num_rows=3, x=24, skip=2, out=26, status=27, row_stride=0, workspace=0)]


@pytest.mark.parametrize("stamp", [1, 0x80000001, 0xFFFFFFFF])
def test_encode_tells_its_status_where_it_is_told_to(emulated, stamp):
    """Of all rows, in one entry with its stamp; nothing beside it, and the frames as ever."""
    telling = emulated.library.zipccl_cuda_encode_telling
    telling.argtypes = [*emulated.library.zipccl_cuda_encode.argtypes[:-1], ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p]
    for kind, skip in (("tail", 1), ("bits", -1), ("gauss", 2)):
        x, g = rows_of(kind, 3, 40000, BF16, 1), fmt.layout(BF16, 40000)
        expected, expected_status = reference_encode(x, g, skip)
        frames, status, mail = torch.full_like(expected, 0xA5), torch.full((1,), -1, dtype=torch.int32), torch.full((3,), 77)
        assert telling(packed_geometry(g), x.data_ptr(), x.stride(0) * 2, frames.data_ptr(), frames.stride(0), 3, skip, status.data_ptr(),
                       WORKSPACE.data_ptr(), mail[1:].data_ptr(), stamp, 0) == 0
        assert torch.equal(frames, expected) and torch.equal(status, expected_status)
        assert [value % (1 << 64) for value in mail.tolist()] == [77, stamp << 32 | int(status), 77]


def test_workspace_size_is_the_same_on_both_sides(emulated):
    g = fmt.layout(BF16, 40_000_000)
    assert emulated.library.zipccl_cuda_workspace_words(3, g.num_tiles) == workspace_words(3, g)
    assert len(packed_geometry(g)) == 8 * len(g.ints) + 128
