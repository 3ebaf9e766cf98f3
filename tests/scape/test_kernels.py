"""Every kernel set against the reference, bit for bit, on everything that floats and masks can be."""
import ctypes

import pytest
import torch

from ds_scape.kernels import c_structs, cuda_plans, impl_cpu, impl_cuda, impl_triton, ops
from ds_scape.kernels import impl_reference as reference
from ds_scape.sync.partition import Segment
from tests.helpers.emulated import compile_for_host
from tests.scape import kernel_cases as cases
from tests.scape.kernel_cases import BF16, FP16, FP32
from zipscape.op_builder.scape import SCAPE_CPU, SCAPE_CUDA


def _cpu(isa):
    library = SCAPE_CPU.load()
    if not library.scape_cpu_supports(impl_cpu.ISAS.index(isa)):
        pytest.skip(f"this machine has no {isa}")
    return impl_cpu.CpuKernels(library, isa)


@pytest.fixture(scope="module")
def emulated_library(tmp_path_factory) -> ctypes.CDLL:
    """The CUDA source for a CPU, one fiber a thread: checks logic, not races."""
    return ctypes.CDLL(str(compile_for_host(tmp_path_factory.mktemp("emulated"), SCAPE_CUDA)))


@pytest.fixture(scope="module", params=[*impl_cpu.ISAS, "cuda"] if cases.DEVICE == "cpu" else ["cuda", "triton"])
def kernels(request):
    if cases.DEVICE == "cuda":
        return (impl_cuda if request.param == "cuda" else impl_triton).load()
    if request.param == "cuda":
        return impl_cuda.CudaKernels(request.getfixturevalue("emulated_library"), "emulated", emulated=3)
    return _cpu(request.param)


#: Nothing, one, around the vectors', blocks' and pieces' sizes.
SIZES = (0, 1, 2, 15, 17, 255, 257, 2047, 2049, 4097, 70001)


@pytest.mark.parametrize("gradient_dtype", [None, FP32, BF16, FP16])
@pytest.mark.parametrize("wire", [FP32, BF16])
@pytest.mark.parametrize("share", [None, -1, 0.0, 0.01, 0.4, 1.0])
def test_enter(kernels, gradient_dtype, wire, share):
    if gradient_dtype is None and share == -1:
        return
    for i, n in enumerate(SIZES):
        factor, first = (1.0, 0.37, 1 / 1024)[i % 3], (0, 12345, cases.FAR - n // 2)[i % 3]
        cases.check_enter(kernels, n, gradient_dtype=gradient_dtype, wire=wire, share=share, factor=factor, seed=i, offset=i % 4,
                          first=first, own=((0, 0), (0, 1), (0.4, 0.3), (0.75, 0.25))[i % 4], specials=i % 3 != 0)
    for own in ((0, 0), (0, 1), (0.4, 0.3), (0.75, 0.25)):              # aligned, so that neighbours are read together
        cases.check_enter(kernels, 20000, gradient_dtype=gradient_dtype, wire=wire, share=share, own=own, seed=len(str(own)), offset=8,
                          first=cases.FAR - 9000)


@pytest.mark.parametrize("start, stop", [(0, 1), (9000, 9050), (4095, 4097), (19_999, 20_000)])
def test_enter_where_what_is_taken_lies_together(kernels, start, stop):
    tensors = {"residual": cases.plain(20_000, 1), "gradient": cases.plain(20_000, 2, BF16), "index": torch.arange(start, stop),
               "values": torch.zeros(stop - start, dtype=BF16)}
    cases.compare(kernels, "enter", tensors, lambda f, residual, gradient, index, values: f(
        residual, gradient, 0.3, index, values, 0, None, 0, 0.95), offset=8)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_track_square(kernels, dtype):
    for i, n in enumerate(SIZES):
        cases.check_track(kernels, n, dtype, (1.0, 0.3)[i % 2], seed=i, offset=i % 4)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_sum_of_squares(kernels, dtype):
    for n, offset, specials in ((0, 0, False), (3 << 19, 0, False), (70_001, 1, True), (1 << 19, 8, True), ((5 << 19) + 13, 8, False)):
        cases.check_sum(kernels, n, dtype, seed=n % 100, offset=offset, specials=specials)


def test_sum_of_squares_is_one(kernels):
    x = cases.plain(1_200_000, 4, scale=3.0)
    expected = float(x.to(torch.float64).square().sum())
    assert float(kernels.sum_of_squares(x.to(cases.DEVICE))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_scatter(kernels, dtype):
    for i, n in enumerate(SIZES):
        cases.check_scatter(kernels, n, (0.0, 0.02, 1.0)[i % 3], dtype, seed=i, offset=i % 4)


def random_segments(n, seed):
    """(start, stop, count) with gaps: counts of nothing, one, some, all but one, all; segments of one element among them."""
    generator, segments, position = cases.rng(seed), [], 0
    while position < n:
        size = min(n - position, int(torch.randint(1, (3, 40, 5000, 30000)[len(segments) % 4], (1,), generator=generator)))
        count = (0, 1, size // 10, size - 1, size, size // 100, size // 2)[int(torch.randint(0, 7, (1,), generator=generator))]
        segments.append(Segment(position, position + size, count))
        position += size + len(segments) % 3
    return tuple(segments)


@pytest.mark.parametrize("kind", ["spread", "plain", "ties", "all equal", "zeros", "given scores", "bits"])
def test_select(kernels, kind):
    for i, n in enumerate(SIZES):
        r = {"spread": cases.spread, "plain": cases.plain}.get(kind, cases.plain)(n, i)
        q = cases.spread(n, i + 7) if kind == "spread" else cases.plain(n, i + 7).abs() ** 2
        if kind == "ties":
            r, q = torch.randint(-3, 4, (n,), generator=cases.rng(i)).float(), torch.ones(n)
        elif kind == "all equal":
            r, q = torch.full((n,), -0.5), torch.full((n,), 2.0)
        elif kind == "zeros":
            r, q = torch.zeros(n), torch.where(q > q.median() if n else q > 0, q, torch.zeros(n))
        elif kind == "given scores":
            r, q = cases.spread(n, i).abs(), None
        elif kind == "bits":                    # every pattern: NaN payloads decide the order
            r, q = (torch.randint(-1 << 31, 1 << 31, (n,), generator=cases.rng(i)).to(torch.int32).view(FP32) for i in (i, i + 50))
        for overdue, offset in ((0.0, i % 4), (0.03, 0), (1.0, 8)):         # aligned ones are read by fours
            cases.check_select(kernels, r, q, random_segments(n, i), overdue=overdue, seed=i, offset=offset)


@pytest.mark.parametrize("middle", [1.0, 1.0625, 2.0 ** 100, 2.0 ** -99, 2.0 ** -140])
@pytest.mark.parametrize("normalised", [True, False])
def test_select_where_scores_lie_close_to_the_end_of_a_digit(kernels, middle, normalised):
    """What the CUDA kernels know of most scores is an approximation."""
    n = 6000
    r = torch.tensor(middle) * (1 + (torch.rand(n, generator=cases.rng(1)) - 0.5) * 1e-4) * torch.where(torch.arange(n) % 3 == 0, 1, -1)
    q, r = (torch.full((n,), 4.0), 2 * r) if normalised else (None, r.abs())
    for i, count in enumerate((20, 2000, 2985, 3015, 4000, n - 20)):
        for overdue in (0.0, 0.6):
            cases.check_select(kernels, r, q, (Segment(0, n, count),), overdue=overdue, seed=i, offset=4 * (i % 2))


@pytest.mark.parametrize("num_equal", [63, 64, 65])
def test_select_among_as_many_equal_keys_as_a_warp_notes_down(kernels, num_equal):
    r = torch.ones(1300)
    r[torch.cat([torch.randperm(500, generator=cases.rng(num_equal + i))[:num_equal] + 512 * i for i in range(2)])] = 2.0
    for count in (50, num_equal, num_equal + 1, 2 * num_equal - 1, 2 * num_equal, 2 * num_equal + 1):
        cases.check_select(kernels, r, torch.ones(1300), (Segment(0, 1300, count),), overdue=0.0, offset=4 * (count % 2))


@pytest.mark.parametrize("num_equal", [32767, 32768, 32769])
def test_select_among_as_many_equal_keys_as_a_thread_notes_down(kernels, num_equal):
    r = torch.ones(270_000)
    r[torch.randperm(1 << 18, generator=cases.rng(num_equal))[:num_equal]] = 2.0
    for count in (16_000, num_equal - 1, num_equal, num_equal + 1):
        cases.check_select(kernels, r, torch.ones(270_000), (Segment(0, 270_000, count),), overdue=0.0)


@pytest.mark.parametrize("factor", [0.03, 30.0])
def test_select_where_the_sample_of_a_small_segment_misleads(kernels, factor):
    """The C++ kernels' sample (csrc/scape/cpu_select.h, select_at_once) is ``factor`` times the rest."""
    n = 20_000
    place = torch.arange(n)
    r = torch.where(place % 16 == place // 16 * 5 % 16, factor, 1.0) * (1 + torch.rand(n, generator=cases.rng(1)))
    for count in (1, 700, 1250, 2500, 10_000, n - 700, n - 1):
        cases.check_select(kernels, r, torch.ones(n), (Segment(0, n, count),), overdue=0.0)


@pytest.mark.parametrize("numel, counts", [(600_000, (1, 6000, 300_000, 599_999))])
def test_select_of_a_segment_of_several_pieces(kernels, numel, counts):
    """Ties across pieces; more keys in question than a piece notes down; a sample that is of no use."""
    for count in counts:
        for i, r in enumerate((cases.plain(numel, count), torch.full((numel,), 0.5), (torch.arange(numel) % 3).float(), torch.zeros(numel),
                               cases.spread(numel, count), cases.misleading(numel, count, 1.0), cases.misleading(numel, count, 1e-3),
                               1 + 0.06 * torch.rand(numel, generator=cases.rng(count)))):          # one first digit, many second ones
            segments = (Segment(3, numel - 5, count - min(count - 1, 8)), Segment(numel - 5, numel - 1, 2))
            cases.check_select(kernels, r, torch.ones(numel), segments, overdue=0.001, seed=i, offset=(i + count) % 2)
    for count in range(4000, numel // 2, 24_000):           # wherever the last one lies among the digits that a sample leaves open
        cases.check_select(kernels, cases.plain(numel, 1), torch.ones(numel), (Segment(3, numel - 5, count),), overdue=0.001, offset=4)


@pytest.mark.parametrize("octaves", [20, 45, 90, 180, 250])
def test_select_where_a_small_sample_leaves_many_octaves_open(kernels, octaves):
    n, counts = 20_000, (520, 700, 9000)
    segments = tuple(Segment(i * n, (i + 1) * n, count) for i, count in enumerate(counts))
    exponents = octaves * (torch.rand(len(counts) * n, generator=cases.rng(octaves), dtype=torch.float64) - 0.5)
    for i, x in enumerate((exponents, (exponents * 8).round() / 8)):            # without and with equal ones
        cases.check_select(kernels, torch.exp2(x).float(), torch.ones(len(x)), segments, overdue=0.01 * i, seed=i, offset=4)


@pytest.mark.parametrize("offset", [0, 1])
def test_hints_change_no_choice(kernels, offset):
    """Of what is chosen again and again: nearly the same numbers, much larger and smaller ones, none but zeros, NaNs, many that are
    overdue; then in the place of hints what never was one."""
    n, segments, hints = 30_000, (Segment(3, 9_000, 200), Segment(9_000, 9_050, 50), Segment(9_100, 29_000, 1200)), {}
    r, q = cases.plain(n, 1), cases.plain(n, 2).abs()
    last = torch.randint(40, 99, (n,), generator=cases.rng(3), dtype=torch.int16)
    for i, change in enumerate((1.0, 1.01, 1.2, 0.9, 0.5, 100.0, 1e-30, 1.0, 0.0, 1.0, float("nan"), 1.0, 1.1, 1.1)):
        r = r + cases.plain(n, i + 9, scale=1e-3)
        max_age = 30 if i % 4 == 3 else 60
        cases.compare(kernels, "select", {"rank_by": r * change, "square": q, "last_sync": last}, lambda f, max_age=max_age, **t: f(
            *t.values(), 100, max_age, segments, None, None, hints), offset)
        if "keys" in hints and i > 9:
            hints["keys"].random_(-1 << 31, 1 << 31)
    assert ("keys" in hints) == isinstance(kernels, impl_cuda.CudaKernels)


@pytest.mark.parametrize("share", [None, 0.0, 0.05, 1.0])
def test_ages_that_pass_with_a_residual(kernels, share):
    for i, n in enumerate(SIZES):
        cases.check_take_ages(kernels, n, share, first=(0, 12345, cases.FAR - n // 2)[i % 3], seed=i, offset=i % 4)
        cases.check_mark(kernels, n, max_age=(40, 1, 101)[i % 3], seed=i, offset=i % 4)


def test_signs_say_what_is_overdue():
    """Of numbers of 4 and 8 bytes, infinity and NaN: the choice that ages make."""
    n, segments = 5000, (Segment(0, 4000, 300), Segment(4000, 5000, 7))
    for i, dtype in enumerate((FP32, torch.float64)):
        step, last = cases.synchronised(100, torch.randint(0, 99, (n,), generator=cases.rng(i), dtype=torch.int32), i)
        r, q = cases.spread(n, i).to(dtype), cases.plain(n, 5).abs().to(dtype)
        expected, by_sign = reference.select(r, q, last, step, 95, segments), r.clone()
        reference.mark_overdue(by_sign, last, step, 95)
        assert torch.equal(by_sign.abs().nan_to_num(), r.abs().nan_to_num()) and expected.sum() == 307
        assert torch.equal(ops.REFERENCE.select(by_sign, q, None, step, 95, segments), expected)
        assert not torch.equal(ops.REFERENCE.select(r, q, None, step, 95, segments), expected)


@pytest.mark.parametrize("share", [None, 0.0, 0.05, 1.0])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("catch_up", [True, False])
def test_owner_step(kernels, share, decay, catch_up):
    for i, n in enumerate(SIZES):
        cases.check_owner(kernels, n, share=share, out_dtype=(BF16, FP16, FP32)[i % 3], decay=decay, catch_up=catch_up, seed=i,
                          offset=i % 4, max_age=(40, 3)[i % 2], specials=i % 3 != 1)
        cases.check_owner(kernels, n, share=share, decay=decay, catch_up=catch_up, seed=i, max_age=(40, 3)[i % 2], equal_ages=True)
        if share is not None:
            cases.check_owner(kernels, n, share=share, decay=decay, catch_up=catch_up, seed=i, offset=i % 4, by_place=True)


def test_positions_beyond_two_billion(kernels):
    """Four bytes without a sign. A CPU's memory is not needed for what lies below; the emulated kernels would take too long for it."""
    cases.check_far_partition(kernels)
    cases.check_far_positions(kernels, is_real=not isinstance(kernels, impl_cuda.CudaKernels) or cases.DEVICE != "cpu")


@pytest.mark.parametrize("step", [0, 1, 7])
def test_dense_step(kernels, step):
    for i, n in enumerate(SIZES):
        cases.check_dense(kernels, n, step=step, decay=(1.0, 0.99)[i % 2], seed=i, offset=i % 4)


@pytest.mark.parametrize("encoding", ["bits", "indices"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_masks(kernels, encoding, share):
    for i, sizes in enumerate([(1,), (7,), (8, 1), (64,), (65, 63), (65536,), (65535, 2, 70001), (200_003, 5)]):
        n = sum(sizes)
        dense = [(), ((0, 1),), ((n // 3, n // 2),), ((n - 1, n),), tuple((k, k + 1) for k in range(0, min(n, 40), 2))][i % 5]
        cases.check_masks(kernels, sizes, share, tuple(r for r in dense if r[1] > r[0]), encoding, seed=i)


def test_corrupt_masks_are_found_as_by_the_reference(kernels):
    n, mask = 150_000, torch.rand(150_000, generator=cases.rng(1)) < 0.02
    count = int(mask.sum())
    message = reference.pack_mask(mask.to(cases.DEVICE), (), "indices", count)
    for place in (*range(12), 12, 13, 500, message.numel() - 1):
        for flip in (1, 0x80):
            broken = message.clone()
            broken[place] ^= flip
            expected, found = reference.unpack_mask(broken, n, (), "indices", (n,), (count,))
            positions, got = kernels.unpack_mask(broken, n, (), "indices", (n,), (count,))
            assert list(got) == found
            if found == [count]:
                assert torch.equal(positions[0], expected[0])


def test_threads_agree(kernels):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        n = 1_500_000
        cases.check_enter(kernels, n, own=(0.3, 0.4))
        cases.check_owner(kernels, n, share=0.3)
        cases.check_dense(kernels, n)
        cases.check_select(kernels, cases.plain(n, 1), cases.plain(n, 2).abs(), (Segment(0, 900_000, 9000), Segment(900_000, n, 200_000)))
        cases.check_masks(kernels, (n,), 0.1, ((10, 500),), "indices")
        cases.check_masks(kernels, (n // 2, n - n // 2), 0.1, ((10, 500),), "bits")
    finally:
        torch.set_num_threads(before)


def test_structs_are_as_large_as_the_librarys(emulated_library):
    structures = (c_structs.Enter, c_structs.Select, c_structs.Owner, c_structs.Dense)
    for sizes, size_of in ((structures, SCAPE_CPU.load().scape_cpu_struct_size), (structures, emulated_library.scape_cuda_struct_size)):
        assert [size_of(number) for number in range(4)] == [ctypes.sizeof(structure) for structure in sizes]
    assert [emulated_library.scape_cuda_struct_size(number) for number in range(4, 9)] == [
        16, 8 * cuda_plans.SEARCH_WORDS, ctypes.sizeof(c_structs.Scratch), 16, 24]
