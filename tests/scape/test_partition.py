"""Segments of flat buffers: every element once, padding in none, counts exact."""
import random

import pytest

from ds_scape.optimizer import spans
from ds_scape.sync.partition import Layout, TensorSlot, flat_layout, num_sent

SLOTS = [TensorSlot(0, 35, 2), TensorSlot(35, 5, 1), TensorSlot(40, 0, 2), TensorSlot(48, 17, 3), TensorSlot(65, 1, 0)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_element_is_in_one_segment_and_padding_in_none(world_size):
    flat_numel = -(-66 // (2 * world_size)) * 2 * world_size
    layout = flat_layout(SLOTS, flat_numel, world_size, 0.25)
    per_rank = layout.partition_numel
    covered = sorted(rank * per_rank + i for rank, own in enumerate(layout.segments) for s in own for i in range(s.start, s.stop))
    assert covered == [i for slot in SLOTS for i in range(slot.offset, slot.offset + slot.numel)]
    for own in layout.segments:
        assert list(own) == sorted(own) and all(0 <= s.start < s.stop <= layout.partition_numel for s in own)


@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize("density", [0.5, 0.1, 0.01])
def test_density_does_not_grow_with_the_world(world_size, density):
    """C113: no fill-in; per segment the target, to one element."""
    rng = random.Random(world_size)
    slots, offset = [], 0
    for _ in range(6):
        numel = rng.randrange(1, 5000)
        slots.append(TensorSlot(offset, numel, 2))
        offset += numel
    layout = flat_layout(slots, -(-offset // (2 * world_size)) * 2 * world_size, world_size, density)
    for own in layout.segments:
        for s in own:
            assert abs(s.num_sent - density * (s.stop - s.start)) <= 1 and s.num_sent >= 1


def test_counts():
    assert [num_sent(n, 0.1) for n in (0, 1, 4, 5, 14, 15, 25, 100)] == [0, 1, 1, 1, 1, 2, 3, 10]
    assert num_sent(7, 1.0) == 7
    sparse, dense = flat_layout([TensorSlot(0, 100, 2), TensorSlot(100, 3, 1)], 104, 2, 0.1), flat_layout([TensorSlot(0, 7, 1)], 8, 2, 0.1)
    assert not sparse.is_full and dense.is_full and flat_layout([TensorSlot(0, 8, 2)], 8, 2, 1.0).is_full
    layout = Layout((sparse, dense), 2)
    assert [layout.counts(r, dense=False) for r in range(2)] == [[5, 4], [5 + 3, 4]]
    assert layout.splits(dense=True) == [56, 56] and layout.splits(dense=False) == [9, 12]
    assert layout.mask_numel == 52 and layout.max_masked == 5 and layout.has_masks
    assert not Layout((dense,), 2).has_masks


def test_a_model_without_elements():
    layout = Layout((flat_layout([TensorSlot(0, 0, 2)], 0, 2, 0.1),), 2)
    assert layout.splits(dense=False) == [0, 0] and not layout.has_masks


@pytest.mark.parametrize("most", [1, 3, 7, 40, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_element_passes_once(world_size, most):
    """In pieces of one partition after another, in order; or of the same coordinates of all partitions."""
    layouts = tuple(flat_layout([], numel * world_size, world_size, 0.25) for numel in (48, 0, 5))
    wholes = spans.partitions(layouts, list(reversed(range(world_size))))
    expected = [(span.flat, span.owner, i) for span in wholes for i in range(span.stop)]
    for pieces, room in ((spans.pieces(wholes, most), most), (spans.columns(layouts, most), max(most, world_size))):
        sizes = [sum(span.numel for span in piece) for piece in pieces]
        assert all(0 < size <= room for size in sizes)
        found = [(span.flat, span.owner, i) for piece in pieces for span in piece for i in range(span.start, span.stop)]
        assert sorted(found) == sorted(expected)
    in_order = [span for piece in spans.pieces(wholes, most) for span in piece]
    assert [(span.flat, span.owner, i) for span in in_order for i in range(span.start, span.stop)] == expected
    for piece in spans.columns(layouts, most):
        by_owner = [[(span.flat, span.start, span.stop) for span in piece if span.owner == owner] for owner in range(world_size)]
        assert all(own == by_owner[0] for own in by_owner) and [span.owner for span in piece] == sorted(span.owner for span in piece)
