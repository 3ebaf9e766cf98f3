"""Who is in the next mask where the own residuals are in host memory: found while they pass through the device, in groups of segments, so
that neither they nor a mask of a byte per coordinate has to be on the device whole."""
import itertools
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ds_scape.kernels import impl_reference
from ds_scape.kernels.ops import Kernels
from ds_scape.optimizer import spans
from ds_scape.optimizer.passage import summed_for
from ds_scape.optimizer.state import FlatState
from ds_scape.optimizer.workspace import ALIGNMENT, Workspace
from ds_scape.sync.partition import FlatLayout, Layout, Segment

#: Elements that are looked at together where the kernels have no room, at most.
SLICE = 1 << 21
#: Bytes for each of them.
SLICE_BYTES = 16
#: What a kernel's selection notes down on a GPU, the Triton one most, and a little more: bytes per tile of elements, and per segment.
TILE, TILE_BYTES, SEGMENT_BYTES = 512, 83 * 4, 33 << 10


#: Of a key that is settled at a time where everything has to pass for it, and what this needs in bytes.
DIGIT_BITS, DIGIT_BYTES = 11, 5 << 14
_INT = {4: torch.int32, 8: torch.int64}


class Group(NamedTuple):
    """Neighbouring segments of one partition of one buffer."""
    flat: int
    start: int
    stop: int
    segments: tuple[tuple[int, int, int], ...]
    """(start, stop, number to choose), from the group's start on."""
    pieces: tuple[spans.Span, ...]
    """What passes at a time: all of it, or parts of its only segment."""

    @property
    def numel(self) -> int:
        return self.stop - self.start


def slice_for(numel: int) -> int:
    """Elements that are looked at together, where there are ``numel`` in all: a multiple of 8."""
    return max(8, min(SLICE, numel // 128) // 8 * 8)


def groups(flats: tuple[FlatLayout, ...], rank: int, most: int) -> list[Group]:
    """All of the rank's segments that masks cover, in groups of up to ``most`` elements; larger segments are groups of their own."""
    result = []
    for i, flat in enumerate(flats):
        own: list[list[Segment]] = []
        for segment in () if flat.is_full else flat.segments[rank]:
            if own and segment.stop - own[-1][0].start <= most:
                own[-1].append(segment)
            else:
                own.append([segment])
        for group in own:
            start, stop = group[0].start, group[-1].stop
            pieces = tuple(span for (span,) in spans.pieces([spans.Span(i, rank, start, stop)], most))
            result.append(Group(i, start, stop, tuple((s.start - start, s.stop - start, s.num_sent) for s in group), pieces))
    return result


def fit_beside_the_exchange(layout: Layout, rank: int, residual: int, gradient: int, value: int, age: int) -> bool:
    """Whether the own residuals find room where the other partitions' gradients were, and what is exchanged where gradients were at all:
    then they need not pass once more. Sizes in bytes."""
    own, num, ranks = sum(flat.partition_numel for flat in layout.flats), layout.splits(False)[rank], layout.world_size
    return (ranks - 1) * gradient >= residual + age and residual * own + (age + residual + value * ranks) * num <= gradient * ranks * own


def own_gradients_hold_the_exchange(layout: Layout, rank: int, gradient: int, value: int, state: int, weight: int, age: int) -> bool:
    """Whether all that is exchanged with masks finds room where the own partition's gradients were: then masks may be found where the
    others' were meanwhile. Sizes in bytes."""
    splits, ranks, own = layout.splits(False), layout.world_size, sum(flat.partition_numel for flat in layout.flats)
    return splits[rank] * (value * ranks + state + age) + (ranks + 1) * max(splits) * weight + 8 * ALIGNMENT <= gradient * own


def is_too_large(group: Group, has_room, size: int) -> bool:
    """Whether there is no room for a group's residuals, of ``size`` bytes each, to lie together."""
    return len(group.pieces) > 1 and 0 < group.segments[0][2] < group.numel and not has_room(size * group.numel)


def ways(of: list[Group], space: Workspace, size: int) -> list[tuple[Group, spans.Span, int | None]]:
    """What passes for the groups, in order: every piece once (None), or, of those that are too large, once for every digit of a key (which
    one) and once more to choose."""
    return [(group, span, digit) for group in of for digit in (range(num_digits(size) + 1) if space.lends and is_too_large(
        group, space.has_room, size) else (None,)) for span in group.pieces]


def as_they_pass_again(of: list[Group], through, flats: list[FlatState], step: int, space: Workspace, kernels: Kernels) -> torch.Tensor:
    """See choose_passing(). through: the flow's, which lets them pass."""
    found = ways(of, space, flats[0].stored_residual.element_size())
    return choose_passing(found, through([[span] for _, span, _ in found], write_back=False), flats, step, space, kernels)


def choose_passing(ways: list[tuple], passing, flats: list[FlatState], step: int, space: Workspace, kernels: Kernels) -> torch.Tensor:
    """bool, the masks of all buffers that are not full, one after another: per segment as many as are to be chosen. passing: yields for
    each of the ways (span, its residual, which is overwritten, its last synchronisations), on the device of all that is made."""
    starts, numel, most = _starts(flats), _mask_numel(flats), slice_for(sum(flat.copies.numel() for flat in flats))
    is_whole = space.lends and _fits(numel, {group: None for group, _, _ in ways}, flats, space, False)
    masks = _Whole(numel, space) if is_whole else _Bits(numel, flats[0].weight.device, space, most)
    mark, by, digits = space.mark(), None, None
    for (group, span, digit), ((_, residual, last),) in zip(ways, passing, strict=True):
        flat, begin = flats[group.flat], starts[group.flat] + group.start
        kernels.mark_overdue(residual, last, step, flat.max_age)
        if digit is not None:
            if digit == 0 and span.start == group.start:
                digits = Digits(group.segments[0][2], residual)
            digits.look(residual, flat.square[span.start:span.stop], digit, most, span.stop == group.stop,
                        lambda at, part, begin=begin - group.start + span.start: masks.put(begin + at, part))
            continue
        if len(group.pieces) == 1:
            by = residual
        elif span.start == group.start:
            by = space.empty(group.numel, residual.dtype, is_tight=True)
        if len(group.pieces) > 1:
            by[span.start - group.start:span.stop - group.start] = residual
        if span.stop < group.stop:
            continue
        if is_in_slices(group, space.has_room):
            for part in choose_in_slices(by, flat.square[group.start:group.stop], group.segments[0][2], most):
                masks.put(begin, part)
                begin += len(part)
        else:
            _select(by, group, flat, step, masks, begin, space, kernels)
        by = None
        space.release(mark)
    return masks.all()


def as_they_pass(of: list[Group], layout: Layout, rank: int, flats: list[FlatState], step: int, space: Workspace, kernels: Kernels,
                 gradient: int, value: int, lend_own) -> "AsTheyPass | None":
    """None: there is no room for it in what is lent, the memory of the other partitions' gradients, or not for all that is exchanged
    afterwards, when the own ones are lent too. Sizes of a gradient and of a value that is sent in bytes."""
    numel, sizes = _mask_numel(flats), [t.element_size() for t in (flats[0].weight, flats[0].copies, flats[0].stored_last_sync)]
    if not space.lends or not own_gradients_hold_the_exchange(layout, rank, gradient, value, *sizes):
        return None
    is_whole = _fits(numel, of, flats, space, True)
    if not is_whole and not _fits(-(-numel // 8), of, flats, space, True, True):
        return None
    mark, splits, ranks = space.mark(), layout.splits(False), layout.world_size
    space.empty(numel if is_whole else -(-numel // 8), torch.uint8)
    lend_own()
    longest, mean = sizes[1] * max(splits), sizes[0] * min(max(layout.counts(rank, False)), summed_for(layout.numel))
    room = max(value * ranks * splits[rank], longest), longest * (value < sizes[1])
    has_room = space.has_room(*room, mean) and space.has_room(*room, ranks * longest)
    space.release(mark)
    return AsTheyPass(of, flats, step, space, kernels, is_whole) if has_room else None


class AsTheyPass:
    """Chooses while a step's own residuals pass for the first time: then they need not pass once more."""

    def __init__(self, of: list[Group], flats: list[FlatState], step: int, space: Workspace, kernels: Kernels, is_whole: bool):
        """space: of which this keeps a part for the masks. is_whole: there is room for them as they are found."""
        self._groups, self._flats, self._step, self._space, self._kernels = deque(of), flats, step, space, kernels
        self._starts, numel, most = _starts(flats), _mask_numel(flats), slice_for(sum(flat.copies.numel() for flat in flats))
        self._masks = _Whole(numel, space) if is_whole else _Bits(numel, flats[0].weight.device, space, most, space.empty)
        self._mark, self._by = space.mark(), None

    def look(self, span: spans.Span, residual: torch.Tensor, last: torch.Tensor) -> None:
        """At the own spans, in order, as they are after the step. Nothing given is changed."""
        while self._groups and self._groups[0].flat == span.flat and self._groups[0].start < span.stop:
            group, flat = self._groups[0], self._flats[span.flat]
            start, stop = max(group.start, span.start), min(group.stop, span.stop)
            if start == group.start:
                self._by = self._space.empty(group.numel, residual.dtype, is_tight=True)
            part, own = self._by[start - group.start:stop - group.start], slice(start - span.start, stop - span.start)
            part.copy_(residual[own])
            self._kernels.mark_overdue(part, last[own], self._step, flat.max_age)
            if stop < group.stop:
                return
            _select(self._by, group, flat, self._step, self._masks, self._starts[span.flat] + group.start, self._space, self._kernels)
            self._by = None
            self._space.release(self._mark)
            self._groups.popleft()

    def all(self) -> torch.Tensor:
        """As choose_passing()."""
        assert not self._groups, "residuals that did not pass"
        return self._masks.all()


def _starts(flats: list[FlatState]) -> list[int]:
    """Of each buffer, in the masks one after another."""
    sizes = (0 if flat.layout.is_full else flat.layout.partition_numel for flat in flats)
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def _mask_numel(flats: list[FlatState]) -> int:
    return sum(flat.layout.partition_numel for flat in flats if not flat.layout.is_full)


def _fits(kept: int, of, flats: list[FlatState], space: Workspace, is_copied: bool, chosen: bool = False) -> bool:
    """Whether there is room for ``kept`` bytes and what the kernels need for each of the groups. is_copied: their residuals too, which
    otherwise only those of several pieces are; chosen: what is chosen of them too."""
    return all(space.has_room(kept, flats[group.flat].stored_residual.element_size() * group.numel * (is_copied or len(group.pieces) > 1),
                              group.numel * chosen, notes_bytes(group.numel, len(group.segments))) for group in of)


def _select(by, group: Group, flat: FlatState, step: int, masks, begin: int, space: Workspace, kernels: Kernels) -> None:
    chosen = masks.place(begin, group.numel)
    kernels.select(by, flat.square[group.start:group.stop], None, step, flat.max_age, group.segments, chosen, space.empty)
    masks.put(begin, chosen)


class _Whole:
    """Masks as they are found, where there is room for all of them beside what finds them."""

    def __init__(self, numel: int, space: Workspace):
        self._chosen = space.empty(numel, torch.bool)
        self._chosen.zero_()                        # padding

    def place(self, start: int, numel: int) -> torch.Tensor:
        return self._chosen[start:start + numel]

    def put(self, start: int, chosen: torch.Tensor) -> None:
        place = self.place(start, len(chosen))
        if place.data_ptr() != chosen.data_ptr():
            place.copy_(chosen)

    def all(self) -> torch.Tensor:
        return self._chosen


class _Bits:
    """Masks in an eighth of the memory until there is room for them. empty: makes it, in place of the allocator."""

    def __init__(self, numel: int, device: torch.device, space: Workspace, most: int, empty=None):
        size = -(-numel // 8)
        self._bits = empty(size, torch.uint8).zero_() if empty else torch.zeros(size, dtype=torch.uint8, device=device)
        self._numel, self._space, self._most = numel, space, most

    def place(self, start: int, numel: int) -> torch.Tensor:
        return self._space.empty(numel, torch.bool)

    def put(self, start: int, chosen: torch.Tensor) -> None:
        put_bits(self._bits, start, chosen, self._most)

    def all(self) -> torch.Tensor:
        return bytes_of_bits(self._bits, self._space.empty(self._numel, torch.bool), self._most)


def is_in_slices(group: Group, has_room) -> bool:
    """Whether the kernels' selection would need memory that is not there, beside the residuals: then it goes without. has_room(*sizes in
    bytes): whether there is memory for all of them."""
    return len(group.pieces) > 1 and 0 < group.segments[0][2] < group.numel and not has_room(group.numel, notes_bytes(group.numel))


def notes_bytes(numel: int, num_segments: int = 1) -> int:
    """What the kernels' selection needs beside what it chooses, on a GPU."""
    return (-(-numel // TILE) + num_segments) * TILE_BYTES + num_segments * SEGMENT_BYTES


def choose_in_slices(rank_by: torch.Tensor, square: torch.Tensor, count: int, most: int) -> Iterator[torch.Tensor]:
    """As ops.select for one segment, ``last_sync`` None and 0 < count < n, without room for anything as long as the segment: yields bool,
    slices of ``most``. rank_by [n] is overwritten. The last key that is chosen is found bit by bit; the host does not wait."""
    keys = rank_by.view(_INT[rank_by.element_size()])
    sign = torch.iinfo(keys.dtype).min
    for key in keys_of(rank_by, square, most):
        key.bitwise_xor_(sign)                                  # now they order like integers
    parts, last = keys.split(most), keys.new_full((), sign)
    for bit in reversed(range(8 * keys.element_size())):
        larger = last ^ (sign if 1 << bit == -sign else 1 << bit)
        last = torch.where(sum((part >= larger).sum() for part in parts) >= count, larger, last)
    left = count - sum((part > last).sum() for part in parts)
    for part in parts:
        equal = part == last
        before = equal.cumsum(0, dtype=torch.int32)
        yield (part > last) | equal & (before <= left)
        left = left - before[-1]


def keys_of(rank_by: torch.Tensor, square: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """In ``rank_by``'s memory, slice by slice: integers that order, if they had no sign, like what is to be chosen first."""
    keys = rank_by.view(_INT[rank_by.element_size()])
    for key, part, q in zip(*(t.split(most) for t in (keys, rank_by, square)), strict=True):
        is_kept = key & torch.iinfo(key.dtype).min
        part.copy_(impl_reference.score_residual(part, q))
        yield key.bitwise_or_(is_kept)


def num_digits(size: int) -> int:
    """Of a key of ``size`` bytes."""
    return -(-8 * size // DIGIT_BITS)


class Digits:
    """Chooses ``count`` of a segment that never lies together: for each digit of the last key, from the top, all of it passes. The host
    does not wait."""

    def __init__(self, count: int, like: torch.Tensor):
        self._left, self._prefix = (torch.full((), num, dtype=torch.int64, device=like.device) for num in (count, 0))
        self._counts = torch.zeros((1 << DIGIT_BITS) + 1, dtype=torch.int64, device=like.device)         # the last one: of other prefixes
        self._one, self._width = torch.ones((), dtype=torch.int64, device=like.device), 8 * like.element_size()

    def look(self, rank_by, square, digit: int, most: int, is_end: bool, choose) -> None:
        """At a part, for a digit: with the last part it is settled. After the last digit choose(start in the part, bool) is called."""
        top = self._width - digit * DIGIT_BITS
        bits, at = min(DIGIT_BITS, top), 0
        for key in keys_of(rank_by, square, most // 2):
            if digit == num_digits(self._width // 8):
                choose(at, self._chosen(key))
            else:
                found = (key >> top - bits).bitwise_and_((1 << bits) - 1)
                if digit:
                    found.masked_fill_((key >> top & (1 << self._width - top) - 1) != self._prefix, 1 << DIGIT_BITS)
                self._counts.scatter_add_(0, found.to(torch.int64), self._one.expand(len(found)))
            at += len(key)
        if is_end and digit < num_digits(self._width // 8):
            counts = self._counts[:1 << bits].flip(0)
            sums = counts.cumsum(0)
            number = (sums < self._left).sum()
            self._left = self._left - sums.take(number) + counts.take(number)
            self._prefix = self._prefix << bits | (1 << bits) - 1 - number
            self._counts.zero_()

    def _chosen(self, key: torch.Tensor) -> torch.Tensor:
        sign = torch.iinfo(key.dtype).min
        last = self._prefix.to(key.dtype) ^ sign
        key.bitwise_xor_(sign)
        equal = key == last
        before = equal.cumsum(0, dtype=torch.int32)
        found = (key > last) | equal & (before <= self._left)
        self._left = self._left - before[-1]
        return found


def put_bits(bits: torch.Tensor, start: int, chosen: torch.Tensor, most: int) -> None:
    """Sets those of the bits from number ``start`` on, all of them 0, for which ``chosen`` (bool [n]) is true."""
    for part in chosen.split(most):
        packed = impl_reference.pack_bits(torch.nn.functional.pad(part, (start % 8, 0)))
        bits[start // 8:start // 8 + len(packed)] |= packed
        start += len(part)


def bytes_of_bits(bits: torch.Tensor, out: torch.Tensor, most: int) -> torch.Tensor:
    """``out`` (bool [n]) from ceil(n / 8) bytes."""
    for part, packed in zip(out.split(most), bits.split(most // 8), strict=True):
        part.copy_(impl_reference.unpack_bits(packed, len(part)))
    return out
