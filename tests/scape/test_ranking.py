"""Ranking where there is no room for the kernels' selection: by slices, into bits."""
import pytest
import torch

from ds_scape.kernels import impl_reference as reference
from ds_scape.optimizer import ranking
from ds_scape.sync.partition import FlatLayout, Segment
from tests.scape import kernel_cases as cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [cases.spread, cases.plain, lambda n, seed: (torch.arange(n) % 3).float(), lambda n, seed: torch.zeros(n)])
@pytest.mark.parametrize("overdue", [0.0, 0.1, 1.0])
def test_slices_choose_what_the_reference_does(dtype, make, overdue):
    """Ties within and across slices, by lowest index; special numbers; all of them overdue, some, none."""
    for n in (2, 64, 65, 1000):
        r, q = make(n, n).to(dtype), cases.plain(n, 7).abs().to(dtype)
        last = torch.where(torch.rand(n, generator=cases.rng(n)) < overdue, 1, 90).to(torch.int16)
        for count in sorted({1, n // 10 + 1, n // 2, n - 1}):
            expected, by_sign = reference.select(r, q, last, 100, 40, (Segment(0, n, count),)), r.clone()
            reference.mark_overdue(by_sign, last, 100, 40)
            found = torch.cat(list(ranking.choose_in_slices(by_sign, q, count, 64)))
            assert int(found.sum()) == count and torch.equal(found, expected), (n, count)
            assert torch.equal(digit_by_digit(r, q, last, count), expected), (n, count)


def digit_by_digit(r, q, last, count):
    """In parts of 300, which pass again and again."""
    digits, found = ranking.Digits(count, r), torch.zeros(len(r), dtype=torch.bool)
    for digit in range(ranking.num_digits(r.element_size()) + 1):
        for start in range(0, len(r), 300):
            part, own = r[start:start + 300].clone(), slice(start, start + 300)
            reference.mark_overdue(part, last[own], 100, 40)
            digits.look(part, q[own], digit, 128, start + 300 >= len(r),
                        lambda at, chosen, start=start: found[start + at:].narrow(0, 0, len(chosen)).copy_(chosen))
    return found


def test_bits_from_anywhere():
    chosen, bits = torch.rand(1003, generator=cases.rng(1)) < 0.3, torch.zeros(126, dtype=torch.uint8)
    for start, stop in ((0, 5), (5, 77), (77, 77), (90, 400), (400, 1003)):
        ranking.put_bits(bits, start, chosen[start:stop], 64)
    chosen[77:90] = False
    assert torch.equal(bits, reference.pack_bits(chosen))
    assert torch.equal(ranking.bytes_of_bits(bits, torch.ones(1003, dtype=torch.bool), 64), chosen)


def test_groups_have_every_segment_once():
    places = (3, 10), (10, 40), (45, 200), (200, 201), (230, 260)
    segments = tuple(Segment(start, stop, (stop - start + 1) // 2) for start, stop in places)
    flats = (FlatLayout(1, 300, (segments,)), FlatLayout(1, 9, ((Segment(0, 9, 9),),)), FlatLayout(1, 50, (segments[:2],)))
    found = ranking.groups(flats, 0, 40)
    assert [(group.flat, group.start, group.stop, [span[2:] for span in group.pieces]) for group in found] == [
        (0, 3, 40, [(3, 40)]), (0, 45, 200, [(45, 85), (85, 125), (125, 165), (165, 200)]), (0, 200, 201, [(200, 201)]),
        (0, 230, 260, [(230, 260)]), (2, 3, 40, [(3, 40)])]
    assert [tuple(s) for group in found for s in group.segments] == [
        (0, 7, 4), (7, 37, 15), (0, 155, 78), (0, 1, 1), (0, 30, 15), (0, 7, 4), (7, 37, 15)]
