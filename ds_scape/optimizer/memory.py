"""How much memory a rank needs beyond dense ZeRO 1. Follows from shapes and settings alone; a test compares it with what torch allocates.

Dense ZeRO 1 is Adam's: weights, whole gradients, and of the own partition master weights and two moments in fp32. AdamS has one moment, and
q takes the place of the other.
"""
from typing import NamedTuple

from ds_scape.kernels.impl_reference import LANES, position_dtype
from ds_scape.optimizer import ranking, spans
from ds_scape.optimizer.flow import Flow
from ds_scape.optimizer.passage import PIECE, exchanged_for, piece_for, summed_for
from ds_scape.optimizer.workspace import ALIGNMENT, Rooms, starts_of
from ds_scape.sync.mask import MaskCodec
from ds_scape.sync.partition import Layout
from ds_scape.update.residual import WIRE_DTYPES


class Sizes(NamedTuple):
    """Bytes per element."""
    residual: int = 4
    gradient: int = 2
    value: int = 2
    weight: int = 2
    age: int = 2


#: bf16 throughout, and density above 0.0001.
USUAL = Sizes()


def kept_bytes(layout: Layout, sizes: Sizes = USUAL, encoding: str = "auto") -> dict[str, int]:
    """What a rank keeps from step to step: its "residual", the own coordinates' "ages" (both in host memory with offload), the "masks" of
    all ranks, which arrive during forward and backward. "q" is in the place of Adam's second moment: it counts only beside dense AdamS."""
    own = _own_numel(layout)
    mask = _mask_bytes(layout, encoding)
    return {"residual": sizes.residual * own * layout.world_size, "ages": sizes.age * own,
            "masks": mask * (layout.world_size + (layout.world_size > 1)), "q": sizes.residual * own}


def buffer_bytes(layout: Layout, sizes: Sizes = USUAL, num_buffers: int = 2, piece: int = PIECE) -> int:
    """What offload keeps on the device in the place of residual and ages."""
    return num_buffers * sizes.residual * piece_for(layout.numel, piece)


def masked_step_bytes(layout: Layout, sizes: Sizes = USUAL, encoding: str = "auto", *, offloaded: bool, lent: bool = True,
                      literal: bool = False, ahead: bool = False, chunk: int = LANES, piece: int = PIECE) -> int:
    """What a step with masks needs at most at a time, beyond what is kept: the largest over the ranks.

    lent: the gradients' memory may be used once they have entered the residual, as under ZeRO. literal: "mask_statistic" is "first_moment".
    ahead: own residuals may pass before the step.
    """
    gathered = _mask_bytes(layout, encoding) * layout.world_size if layout.world_size > 1 else 0
    positions = sum(position_dtype([f.partition_numel for f in layout.flats]).itemsize * sum(f.count(rank, False) for rank in range(
        layout.world_size)) for f in layout.flats if not f.is_full)
    unpacked = -(-layout.mask_numel // (1 << 16)) << 13                 # bits of one rank's mask, in blocks
    left = positions - gathered                                         # the masks of all are not needed any more
    spilled = [_spilled(layout, rank, sizes, offloaded, lent, literal, piece, ahead=way)[:2] for rank in range(layout.world_size)
               for way in {False, ahead}]
    most = max(_norm_bytes(layout, chunk), positions + unpacked, *(left + num for both in spilled for num in both))
    if ahead:                                                           # before the step all of this is there already, beside the masks
        sent = sizes.value * sum(layout.splits(False)) + sizes.age * max(layout.splits(False))
        most = max(most, positions + sent + _norm_bytes(layout, chunk))
    return most + (3 * sizes.residual * _own_numel(layout) if literal else 0)


def whole_step_bytes(layout: Layout, sizes: Sizes = USUAL, encoding: str = "auto", *, offloaded: bool, lent: bool = True,
                     literal: bool = False, chunk: int = LANES, piece: int = PIECE) -> int:
    """The same for a step without masks, which everything passes through in pieces; none are kept then, but at its end."""
    own, ranks, masks = _own_numel(layout), layout.world_size, kept_bytes(layout, sizes, encoding)["masks"]
    most = min(_coordinates(layout, sizes, piece, ranks) * ranks, exchanged_for(layout.numel, ranks, sizes.value)) if offloaded else piece
    num = min(max(1, most // ranks), own) * ranks
    mine, received = num // ranks, num if ranks > 1 else 0
    exchange = max(sizes.value * (num + received), sizes.value * received + sizes.residual * mine,
                   (sizes.residual + sizes.weight) * mine, sizes.weight * (mine + received))
    found = [_spilled(layout, rank, sizes, offloaded, lent, literal, piece, exchanges=False)[1:] for rank in range(ranks)]
    search, chosen = map(max, zip(*found, strict=True))
    return max(max(_norm_bytes(layout, chunk), exchange, search) - masks, chosen) + (3 * sizes.residual * own if literal else 0)


def design_bytes(layout: Layout) -> int:
    """What the design allows beyond dense ZeRO 1, with offload: 2 * 64 MiB + n / 4 + 8 * k."""
    return 2 * 4 * PIECE + layout.numel // 4 + 8 * sum(layout.splits(False))


def text(flow: Flow, gradient_bytes: int) -> str:
    """What to say at the start; gradient_bytes: size of one fresh gradient."""
    layout, flats, params = flow.layout, flow.flats, flow.params
    passage, flat = flats[0].passage, flats[0]
    sizes = Sizes(flat.weight.element_size(), gradient_bytes, WIRE_DTYPES[params.values_dtype].itemsize, flat.copies.element_size(),
                  max(flat.stored_last_sync.element_size() for flat in flats))
    device, host = kept_bytes(layout, sizes, params.mask_encoding), {}
    q = device.pop("q")
    if passage is not None:
        host = {what: device.pop(what) for what in ("residual", "ages")}
        for what, spares in zip(("residual", "ages"), flow._ahead.spares if flow._ahead else (), strict=False):
            host[what] *= 2 if spares else 1
        device = {"buffers": buffer_bytes(layout, sizes, passage.num_buffers), **device}
    elif flat.weight.device != flat.copies.device:
        host["ages"] = device.pop("ages")
    kept = [f"{_mb(sum(held.values()))} {where} ({', '.join(f'{what} {_mb(num)}' for what, num in held.items())})"
            for where, held in (("on the device", device), ("in host memory", host)) if held]
    settings = {"offloaded": passage is not None, "literal": params.mask_statistic == "first_moment"}
    masked = masked_step_bytes(layout, sizes, params.mask_encoding, ahead=flow._ahead is not None and flow._ahead.is_whole, **settings)
    whole = whole_step_bytes(layout, sizes, params.mask_encoding, **settings)
    most, allowed = sum(device.values()) + max(masked, whole), design_bytes(layout)
    verdict = f"; at most {_mb(most)} in all, where 128 MiB + n/4 + 8k are {_mb(allowed)}" if passage is not None else ""
    return (f"SCAPE keeps beyond dense ZeRO 1, per rank: {' and '.join(kept)}; in a step up to {_mb(masked)} more, in one without masks "
            f"{_mb(whole)}{verdict} (q, {_mb(q)}, is where Adam has its second moment)")


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _own_numel(layout: Layout) -> int:
    return layout.numel // layout.world_size


def _coordinates(layout: Layout, sizes: Sizes, piece: int, ranks: int = 1) -> int:
    """How many own ones pass at a time, with their ages."""
    return spans.fitting(piece_for(layout.numel, piece), sizes.residual, sizes.age, ranks)


def _mask_bytes(layout: Layout, encoding: str) -> int:
    return MaskCodec(layout, encoding).num_bytes if layout.has_masks else 0


def _norm_bytes(layout: Layout, chunk: int) -> int:
    return 16 * min(chunk, max(flat.partition_numel for flat in layout.flats) * layout.world_size)


class _Space:
    """The gradients' memory, as workspace.py hands it out."""

    def __init__(self, layout: Layout, gradient_bytes: int, lent: bool):
        self._rooms, self._ranks = Rooms(), layout.world_size
        self.lends = lent
        self._sizes = [gradient_bytes * flat.partition_numel for flat in layout.flats if lent]
        self._starts = starts_of([size * self._ranks for size in self._sizes])
        self.mark, self.release = self._rooms.mark, self._rooms.release

    def lend(self, owners) -> None:
        for i, size in enumerate(self._sizes):
            for owner in owners:
                end = self._starts[i + 1] if owner == self._ranks - 1 else self._starts[i] + size * (owner + 1)
                self._rooms.lend(0, self._starts[i] + size * owner, end)

    def take(self, *sizes: int, tight: int = ALIGNMENT, at_end: bool = False) -> tuple[int, list]:
        """(how many bytes of these do not fit, where the others are)."""
        places = [(size, self._rooms.take(size, tight, at_end)) for size in sizes if size]
        return sum(size for size, place in places if place is None), [(size, place) for size, place in places if place is not None]

    def give_back(self, places: list) -> None:
        for size, (block, start) in places:
            self._rooms.lend(block, start, start + size)

    def spilled(self, *sizes: int) -> int:
        """The same for what is soon not needed any more."""
        mark = self.mark()
        num_bytes = self.take(*sizes)[0]
        self.release(mark)
        return num_bytes


def _spilled(layout: Layout, rank: int, sizes: Sizes, offloaded: bool, lent: bool, literal: bool, piece: int,
             exchanges: bool = True, ahead: bool = False) -> tuple[int, int, int]:
    """What the gradients' memory does not suffice for, after they have entered the residual, in the order in which flow.py asks for it:
    while values and weights are exchanged, while the next mask is found, and while it is sent."""
    space, ranks, left, exchange, passes = _Space(layout, sizes.gradient, lent), layout.world_size, 0, 0, offloaded and not literal
    if not exchanges:
        space.lend(range(ranks))
    else:
        splits, ages = layout.splits(False), (0, [])
        if ahead:
            ages = sizes.age * sum(layout.counts(rank, False)), []
        elif offloaded:
            space.lend([owner for owner in range(ranks) if owner != rank])
            if passes and lent and ranking.fit_beside_the_exchange(layout, rank, *(sizes[i] for i in (0, 1, 2, 4))):
                masked = (flat for flat in layout.flats if not flat.is_full)
                left, passes = space.take(*(sizes.residual * flat.partition_numel for flat in masked), tight=sizes.residual)[0], False
            ages = space.take(*(sizes.age * num for num in layout.counts(rank, False)), tight=sizes.age, at_end=rank == 0)
        space.lend([rank] if offloaded and not ahead else range(ranks))
        is_one, others, longest = sizes.value >= sizes.weight, ranks > 1, sizes.weight * max(splits)
        # In the order of flow.py: the values that come, or the weights in the same place; these apart; the mean of a part.
        room = space.take(max(sizes.value * splits[rank] * ranks, longest if is_one else 0) * others)
        message = space.take(0 if is_one else longest, tight=sizes.weight)
        summed = space.take(sizes.residual * min(max(layout.counts(rank, False)), summed_for(layout.numel)), tight=sizes.residual)
        sent, both = sizes.value * sum(splits), left + room[0] + message[0]
        exchange = both + sent + ages[0] + summed[0]
        space.give_back(summed[1] + ages[1])
        exchange = max(exchange, both + (0 if others else sent) + space.spilled(longest * ranks * others))
        space.give_back(room[1] + message[1])
    if passes:
        return exchange, _ranking_bytes(layout, rank, sizes, space, piece), space.spilled(layout.mask_numel)
    notes = (ranking.notes_bytes(flat.partition_numel, len(flat.segments[rank])) for flat in layout.flats if not flat.is_full)
    search = left + space.spilled(layout.mask_numel, *notes)
    return exchange, search, search


def _ranking_bytes(layout: Layout, rank: int, sizes: Sizes, space: _Space, piece: int) -> int:
    """Where what ranks the own coordinates passes once more (ranking.py)."""
    most, slice_ = space.spilled(layout.mask_numel), ranking.slice_for(layout.numel)
    most += 3 * min(slice_, layout.mask_numel)
    for group in ranking.groups(layout.flats, rank, _coordinates(layout, sizes, piece)):
        mark = space.mark()
        is_too_large = space.lends and ranking.is_too_large(group, lambda *wanted: not space.spilled(*wanted), sizes.residual)
        is_kept = len(group.pieces) > 1 and not is_too_large
        held = space.take(sizes.residual * group.numel if is_kept else 0, tight=sizes.residual)[0]
        if is_too_large:
            needed = ranking.DIGIT_BYTES + ranking.SLICE_BYTES * min(slice_, group.numel)
        elif ranking.is_in_slices(group, lambda *wanted: not space.spilled(*wanted)):
            needed = held + ranking.SLICE_BYTES * min(slice_, group.numel)
        else:
            needed = held + space.spilled(group.numel, ranking.notes_bytes(group.numel, len(group.segments))) + 3 * min(slice_, group.numel)
        space.release(mark)
        most = max(most, needed)
    return -(-layout.mask_numel // 8) + most
