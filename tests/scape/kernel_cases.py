"""Inputs for SCAPE's kernels with every awkward feature, and the comparison of a kernel set with the reference: bits, and nothing written
beside what is asked for."""
import mmap
import os
from unittest import mock

import torch

from ds_scape.kernels import cuda_plans
from ds_scape.kernels import impl_reference as reference
from ds_scape.update import tables
from tests.helpers.bits import as_ints

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SENTINEL = 0x5A
#: From here on positions of 4 bytes would be negative if they had a sign.
FAR = 1 << 31
#: Where the kernels work; what goes in is made on the host, the same on every device.
DEVICE = os.environ.get("ZIPSCAPE_TEST_DEVICE", "cpu")


def rng(seed):
    return torch.Generator().manual_seed(seed)


def spread(n, seed, dtype=FP32, specials=True):
    """Gaussians over many scales, denormals among them; with specials also +-0, +-inf, NaN and the largest numbers."""
    x = torch.randn(n, generator=rng(seed)) * torch.pow(10.0, torch.randint(-42, 4, (n,), generator=rng(seed + 1)).float())
    x[torch.rand(n, generator=rng(seed + 2)) < 0.3] = 0.25
    if specials:
        odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -1e-45, 1e-38])
        at = torch.rand(n, generator=rng(seed + 3)) < 0.1
        x[at] = odd[torch.randint(0, len(odd), (int(at.sum()),), generator=rng(seed + 4))]
    return x.to(dtype)


def plain(n, seed, dtype=FP32, scale=1e-2):
    return (torch.randn(n, generator=rng(seed)) * scale).to(dtype)


def misleading(n, seed, factor):
    """Where the CUDA kernels take their sample (csrc/scape/select.cuh, in a segment that starts below 4), numbers are ``factor`` times
    0.03, elsewhere about 1."""
    place = torch.arange(n)
    sampled = place // 32 % 16 == place // 512 % 16
    return torch.where(sampled, 0.03 * factor, 1.0) * (1 + torch.rand(n, generator=rng(seed)))


def chosen(n, share, seed):
    """Ascending positions, int32 or int64."""
    return (torch.rand(n, generator=rng(seed)) < share).nonzero().view(-1).to((torch.int32, torch.int64)[seed % 2])


def synchronised(step, last, seed):
    """The same ages kept in another way: in int32, in int16, in int16 while the steps' numbers pass where those end."""
    late = (0, 0, (1 << 15) - 50, (1 << 16) - 50, 3 << 20)[seed % 5]
    dtype = torch.int32 if seed % 5 == 0 else torch.int16
    return step + late, (last + late).to(dtype)


def moved(index, first):
    """The same positions, ``first`` elements further on."""
    return (index.to(torch.int64) + first).to(index.dtype)


class Guarded:
    """Copies of tensors inside larger storages, ``offset`` elements in: what is written outside is seen."""

    def __init__(self, offset: int):
        self._offset, self._kept = offset, []

    def copy(self, t):
        if t is None:
            return None
        size = t.element_size()
        whole = torch.full(((t.numel() + self._offset + 7) * size,), SENTINEL, dtype=torch.uint8, device=DEVICE).view(t.dtype)
        view = whole[self._offset:self._offset + t.numel()]
        view.copy_(t)
        self._kept.append((whole.view(torch.uint8), self._offset * size, (self._offset + t.numel()) * size))
        return view

    def check(self):
        for whole, start, stop in self._kept:
            assert (whole[:start] == SENTINEL).all() and (whole[stop:] == SENTINEL).all(), "written beside a tensor"


def assert_same(got, expected, where):
    """The same bits, and NaN where there is NaN: its payload is open."""
    assert got.dtype == expected.dtype and got.shape == expected.shape, f"{where}: {got.dtype} {tuple(got.shape)}, {tuple(expected.shape)}"
    got, expected = got.cpu(), expected.cpu()
    a, b = as_ints(got).clone(), as_ints(expected).clone()
    if got.is_floating_point():
        both = torch.isnan(got).view(-1) & torch.isnan(expected).view(-1)
        a[both] = b[both] = 0
    if not torch.equal(a, b):
        i = int((a != b).nonzero()[0])
        raise AssertionError(f"{where}: {int((a != b).sum())} of {a.numel()} differ, first at {i}: {got.view(-1)[i]} {int(a[i]):#x}, "
                             f"expected {expected.view(-1)[i]} {int(b[i]):#x}")


def compare(kernels, name, tensors, call, offset=1):
    """call(function, **tensors) with the reference and with the set ``kernels`` on copies; all tensors and what is returned must agree."""
    guards = [Guarded(0), Guarded(offset)]
    copies = [{key: g.copy(t) for key, t in tensors.items()} for g in guards]
    results = [call(getattr(k, name), **c) for k, c in zip((reference, kernels), copies, strict=True)]
    if isinstance(results[0], torch.Tensor):
        assert_same(results[1], results[0], f"{name}: result")
    for key, expected in copies[0].items():
        if expected is not None:
            assert_same(copies[1][key], expected, f"{name}: {key}")
    guards[1].check()


def check_enter(kernels, n, *, gradient_dtype=FP32, wire=BF16, share=0.1, factor=0.37, own=(0.25, 0.5), first=0, seed=0, offset=1,
                specials=True):
    """share None: everything is taken; -1: nothing. gradient_dtype None: nothing enters."""
    make = spread if specials else plain
    index = None if share is None or share < 0 else moved(chosen(n, share, seed), first)
    num = n if index is None else len(index)
    start, size = int(own[0] * n), int(own[1] * n) if gradient_dtype else 0
    tensors = {"residual": make(n, seed + 10), "gradient": make(n, seed + 20, gradient_dtype) if gradient_dtype else None,
               "index": index, "values": torch.zeros(num, dtype=wire) if share is None or share >= 0 else None,
               "square": make(size, seed + 30).abs() if own[1] and size else None}
    compare(kernels, "enter", tensors, lambda f, residual, gradient, index, values, square: f(
        residual, gradient, factor, index, values, first, square, start, 0.95), offset)


def check_track(kernels, n, dtype, factor, seed=0, offset=1):
    compare(kernels, "track_square", {"square": spread(n, seed).abs(), "gradient": spread(n, seed + 9, dtype)},
            lambda f, square, gradient: f(square, gradient, factor, 0.95), offset)


def check_sum(kernels, n, dtype, seed=0, offset=1, specials=False):
    compare(kernels, "sum_of_squares", {"tensor": spread(n, seed, dtype, specials)}, lambda f, tensor: f(tensor), offset)


def check_scatter(kernels, n, share, dtype, seed=0, offset=1):
    index = chosen(n, share, seed)
    compare(kernels, "scatter", {"target": spread(n, seed, dtype), "index": index, "values": spread(len(index), seed + 1, dtype)},
            lambda f, **t: f(**t), offset)


def check_take_ages(kernels, n, share, first=0, seed=0, offset=1):
    index = None if share is None else chosen(n, share, seed)
    step, last = synchronised(100, torch.randint(0, 100, (n,), generator=rng(seed), dtype=torch.int32), seed)
    out = torch.zeros(n if index is None else len(index), dtype=last.dtype)
    compare(kernels, "take_ages", {"last_sync": last, "index": None if index is None else moved(index, first), "out": out},
            lambda f, last_sync, index, out: f(last_sync, index, first, step, out), offset)


def check_mark(kernels, n, max_age, seed=0, offset=1):
    step, last = synchronised(100, torch.randint(0, 100, (n,), generator=rng(seed), dtype=torch.int32), seed)
    compare(kernels, "mark_overdue", {"rank_by": spread(n, seed), "last_sync": last},
            lambda f, rank_by, last_sync: f(rank_by, last_sync, step, max_age), offset)


def check_select(kernels, rank_by, square, segments, *, overdue=0.02, seed=0, offset=1):
    """Twice, as CUDA's second choice has the first one's hints."""
    n = rank_by.numel()
    last = torch.randint(61, 99, (n,), generator=rng(seed + 5), dtype=torch.int32)
    last[torch.rand(n, generator=rng(seed + 6)) < overdue] = 7
    step, last = synchronised(100, last, seed)
    if seed % 4 == 1:                                           # the same from what has the signs of those that are overdue
        by_sign = rank_by.clone()
        reference.mark_overdue(by_sign, last, step, 40)
        compare(kernels, "select", {"rank_by": by_sign, "square": square}, lambda f, rank_by, square: f(
            rank_by, square, reference.upper_halves(rank_by), -1, 0, segments), offset)
    hints = {}
    with mock.patch.object(cuda_plans, "HINTED_SHARE", 1.0):
        cuda_plans.select_plan.cache_clear()
        for _ in range(2):
            compare(kernels, "select", {"rank_by": rank_by, "square": square, "last_sync": last},
                    lambda f, rank_by, square, last_sync: f(rank_by, square, last_sync, step, 40, segments, None, None, hints), offset)


def check_owner(kernels, n, *, share=0.1, out_dtype=BF16, decay=True, catch_up=True, max_age=40, seed=0, offset=1, specials=True,
                equal_ages=False, by_place=False):
    """share None: all coordinates. by_place: last_sync is of those at index alone. equal_ages: as after a step without masks, but for the
    last coordinate."""
    make = spread if specials else plain
    index = None if share is None else chosen(n, share, seed)
    num = n if index is None else len(index)
    by_age = tables.age_tables(max_age, 0.9, dtype=FP32, device=DEVICE)
    products = None
    if decay:
        products = tables.initial_decay(max_age + 21)
        for step in range(100):
            products = tables.advance_decay(products, 1 - 0.001 * (step % 7))
        products = products.to(DEVICE, FP32)
    last_sync = torch.randint(0, 100, (n,), generator=rng(seed), dtype=torch.int32)
    if equal_ages:
        last_sync[:-1] = 99 - seed % 90
    step, last_sync = synchronised(100, last_sync, seed)
    tensors = {"weight": make(n, seed), "momentum": make(n, seed + 1), "mean_value": make(num, seed + 2), "index": index,
               "last_sync": last_sync[index] if by_place else last_sync, "out": torch.zeros(num, dtype=out_dtype)}
    compare(kernels, "owner_step", tensors, lambda f, weight, momentum, mean_value, index, last_sync, out: f(
        weight, momentum, last_sync, mean_value, index, step, by_age, products, 0.01, 0.95, 1e-6, catch_up, out), offset)


def reserved(numel, dtype):
    """[numel], of which a CPU's memory holds what is touched."""
    if DEVICE != "cpu":
        return torch.empty(numel, dtype=dtype, device=DEVICE)
    no_reserve = 0x4000
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve), dtype=dtype)


def check_far_partition(kernels, n=20_000, seed=0):
    """scatter and owner_step in a partition of more than 2^31 elements: as in one of the ``n`` around there."""
    start, near = FAR - n // 2, chosen(n, 0.3, 2 * seed)
    far, num = moved(near, start).to(DEVICE), len(near)
    assert far.dtype == torch.int32 and bool((far < 0).any()) and bool((far >= 0).any())
    for dtype in (BF16, FP32):
        target, before, values = reserved(start + n, dtype), spread(n, seed, dtype).to(DEVICE), spread(num, seed + 1, dtype).to(DEVICE)
        target[start:] = before
        kernels.scatter(target, far, values)
        reference.scatter(before, near.to(DEVICE), values)
        assert_same(target[start:], before, "scatter")
    by_age, (step, last) = tables.age_tables(40, 0.9, dtype=FP32, device=DEVICE), synchronised(100, torch.arange(num) % 50 + 1, seed)
    state, mean = [plain(n, seed + i).to(DEVICE) for i in (1, 2)], plain(num, seed + 3).to(DEVICE)
    whole = [reserved(start + n, FP32) for _ in state]
    for far_one, near_one in zip(whole, state, strict=True):
        far_one[start:] = near_one
    outs = [torch.zeros(num, dtype=BF16, device=DEVICE) for _ in range(2)]
    for functions, tensors, index, out in ((kernels, whole, far, outs[0]), (reference, state, near.to(DEVICE), outs[1])):
        functions.owner_step(*tensors, last.to(DEVICE, copy=True), mean, index, step, by_age, None, 0.01, 0.95, 1e-6, True, out)
    for name, got, expected in zip(("weight", "momentum", "out"), (*(t[start:] for t in whole), outs[0]), (*state, outs[1]), strict=True):
        assert_same(got, expected, name)


def far_message(numel, seed):
    """(positions around 2^31 in a part of ``numel`` elements, its mask as indices)."""
    start = FAR - reference.BLOCK
    mask = torch.rand(numel - start, generator=rng(seed)) < 0.1
    near, before = reference.pack_indices(mask, int(mask.sum())), torch.zeros(4 * (start // reference.BLOCK), dtype=torch.uint8)
    return mask.nonzero().view(-1) + start, torch.cat([before, near])


def check_far_positions(kernels, is_real, seed=0):
    """unpack_mask of a part of more than 2^31 elements, or of its last ones alone, as if they lay there (impl_cuda and impl_triton)."""
    numel = FAR + 70_001
    expected, message = far_message(numel, seed)
    if is_real:
        sizes, counts = (numel,), (len(expected),)
        (positions,), found = kernels.unpack_mask(message.to(DEVICE), numel, (), "indices", sizes, counts)
    else:
        start = FAR - reference.BLOCK
        size, message = numel - start, message[4 * (start // reference.BLOCK):].to(DEVICE)
        plan = cuda_plans.positions_plan((size,), message.device)
        with mock.patch.object(cuda_plans, "positions_plan", lambda *_: plan._replace(bases=plan.bases - start)):
            (positions,), found = kernels.unpack_mask(message, size, (), "indices", (size,), (len(expected),))
    assert list(found) == [len(expected)] and positions.dtype == torch.int32
    assert_same(positions, expected.to(torch.int32), "positions")
    assert torch.equal(reference.places(positions).cpu(), expected)


def check_dense(kernels, n, *, step=0, decay=0.999, seed=0, offset=1):
    tensors = {"weight": spread(n, seed), "momentum": spread(n, seed + 1), "gradient": spread(n, seed + 2)}
    correction = 1 - 0.9 ** step if step else 1.0
    compare(kernels, "dense_step", tensors, lambda f, weight, momentum, gradient: f(
        weight, momentum, gradient, 0.01, 0.9, 1 - 0.9, 0.95, 1e-6, decay, correction), offset)


def check_masks(kernels, sizes, share, dense, encoding, seed=0):
    """Packs and unpacks, with every part of ``sizes``; the message sits at an odd address."""
    n = sum(sizes)
    mask = torch.rand(n, generator=rng(seed)) < share
    for start, stop in dense:
        mask[start:stop] = True
    free = mask & ~reference._ranges(dense, n, mask.device)
    max_ones = int(free.sum()) + 5
    for offset in (1, 16):
        compare(kernels, "pack_mask", {"mask": mask}, lambda f, mask: f(mask, dense, encoding, max_ones), offset)
    message = reference.pack_mask(mask.to(DEVICE), dense, encoding, max_ones)
    counts = tuple(int(part.sum()) for part in mask.split(sizes))
    guard = Guarded(1)
    positions, found = kernels.unpack_mask(guard.copy(message), n, dense, encoding, tuple(sizes), counts)
    expected, _ = reference.unpack_mask(message, n, dense, encoding, tuple(sizes), counts)
    assert tuple(found) == counts
    for got, wanted in zip(positions, expected, strict=True):
        assert_same(got, wanted, "positions")
    guard.check()
