"""How much memory a rank needs beyond dense ZeRO 1. Follows from shapes and settings alone; a test compares it with what torch allocates.

Dense ZeRO 1 is Adam's: weights, whole gradients, and of the own partition master weights and two moments in fp32. AdamS has one moment, and
q takes the place of the other.
"""
from typing import NamedTuple

from ds_scape.kernels.impl_reference import LANES, position_dtype
from ds_scape.optimizer.flow import Flow
from ds_scape.optimizer.passage import PIECE
from ds_scape.optimizer.workspace import Rooms
from ds_scape.sync.mask import MaskCodec
from ds_scape.sync.partition import Layout
from ds_scape.update.residual import WIRE_DTYPES

#: What choosing coordinates takes on a GPU: bytes per tile of elements.
_TILE, _TILE_BYTES = 512, 66 * 4


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
    """What a rank keeps from step to step: its "residual", the own coordinates' "ages", the "masks" of all ranks, which arrive during
    forward and backward. "q" is in the place of Adam's second moment: it counts only beside dense AdamS."""
    own = sum(flat.partition_numel for flat in layout.flats)
    mask = _mask_bytes(layout, encoding)
    return {"residual": sizes.residual * own * layout.world_size, "ages": sizes.age * own,
            "masks": mask * (layout.world_size + (layout.world_size > 1)), "q": sizes.residual * own}


def buffer_bytes(layout: Layout, sizes: Sizes = USUAL, num_buffers: int = 2, piece: int = PIECE) -> int:
    """What offload keeps on the device in the residual's place."""
    return num_buffers * sizes.residual * min(piece, sum(flat.partition_numel for flat in layout.flats) * layout.world_size)


def masked_step_bytes(layout: Layout, sizes: Sizes = USUAL, encoding: str = "auto", *, offloaded: bool, lent: bool = True,
                      literal: bool = False, chunk: int = LANES) -> int:
    """What a step with masks needs at most at a time, beyond what is kept: the largest over the ranks.

    lent: the gradients' memory may be used once they have entered the residual, as under ZeRO. literal: "mask_statistic" is "first_moment".
    """
    sent, own = sum(layout.splits(False)), sum(flat.partition_numel for flat in layout.flats)
    gathered = _mask_bytes(layout, encoding) * layout.world_size if layout.world_size > 1 else 0
    positions = sum(position_dtype([f.partition_numel for f in layout.flats]).itemsize * sum(f.count(rank, False) for rank in range(
        layout.world_size)) for f in layout.flats if not f.is_full)
    unpacked = -(-layout.mask_numel // (1 << 16)) << 13                 # bits of one rank's mask, in blocks
    taken = positions + sizes.value * sent - gathered            # the masks of all are not needed any more
    spilled = max(_spilled(layout, rank, sizes, offloaded, lent) for rank in range(layout.world_size))
    return max(_norm_bytes(layout, chunk), positions + unpacked, taken + spilled) + (3 * sizes.residual * own if literal else 0)


def whole_step_bytes(layout: Layout, sizes: Sizes = USUAL, encoding: str = "auto", *, offloaded: bool, lent: bool = True,
                     literal: bool = False, chunk: int = LANES, piece: int = PIECE) -> int:
    """The same for a step without masks, which everything passes through in pieces; none are kept then, but at its end."""
    own, ranks, masks = sum(flat.partition_numel for flat in layout.flats), layout.world_size, kept_bytes(layout, sizes, encoding)["masks"]
    num = min(max(ranks, piece // ranks * ranks), own * ranks)
    mine, received = num // ranks, num if ranks > 1 else 0
    exchange = max(sizes.value * (num + received), sizes.value * received + sizes.residual * mine,
                   (sizes.residual + sizes.weight) * mine, sizes.weight * (mine + received))
    ranking = max(_spilled(layout, rank, sizes, offloaded, lent, exchanges=False) for rank in range(ranks))
    return max(_norm_bytes(layout, chunk) - masks, exchange - masks, ranking) + (3 * sizes.residual * own if literal else 0)


def design_bytes(layout: Layout) -> int:
    """What the design allows beyond dense ZeRO 1, with offload: 2 * 64 MiB + n / 4 + 8 * k."""
    return 2 * 4 * PIECE + sum(flat.partition_numel for flat in layout.flats) * layout.world_size // 4 + 8 * sum(layout.splits(False))


def text(flow: Flow, gradient_bytes: int) -> str:
    """What to say at the start; gradient_bytes: size of one fresh gradient."""
    layout, flats, params = flow.layout, flow.flats, flow.params
    passage, flat = flats[0].passage, flats[0]
    sizes = Sizes(flat.weight.element_size(), gradient_bytes, WIRE_DTYPES[params.values_dtype].itemsize, flat.copies.element_size(),
                  max(flat.last_sync.element_size() for flat in flats))
    device, host = kept_bytes(layout, sizes, params.mask_encoding), {}
    q = device.pop("q")
    if passage is not None:
        host["residual"] = device.pop("residual")
        device = {"buffers of the residual": buffer_bytes(layout, sizes, passage.num_buffers), **device}
    if flat.weight.device != flat.copies.device:
        host["ages"] = device.pop("ages")
    kept = [f"{_mb(sum(held.values()))} {where} ({', '.join(f'{what} {_mb(num)}' for what, num in held.items())})"
            for where, held in (("on the device", device), ("in host memory", host)) if held]
    settings = {"offloaded": passage is not None, "literal": params.mask_statistic == "first_moment"}
    masked, whole = (function(layout, sizes, params.mask_encoding, **settings) for function in (masked_step_bytes, whole_step_bytes))
    most, allowed = sum(device.values()) + max(masked, whole), design_bytes(layout)
    verdict = f"; at most {_mb(most)} in all, where 128 MiB + n/4 + 8k are {_mb(allowed)}" if passage is not None else ""
    return (f"SCAPE keeps beyond dense ZeRO 1, per rank: {' and '.join(kept)}; in a step up to {_mb(masked)} more, in one without masks "
            f"{_mb(whole)}{verdict} (q, {_mb(q)}, is where Adam has its second moment)")


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _mask_bytes(layout: Layout, encoding: str) -> int:
    return MaskCodec(layout, encoding).num_bytes if layout.has_masks else 0


def _norm_bytes(layout: Layout, chunk: int) -> int:
    return 16 * min(chunk, max(flat.partition_numel for flat in layout.flats) * layout.world_size)


def _spilled(layout: Layout, rank: int, sizes: Sizes, offloaded: bool, lent: bool, exchanges: bool = True) -> int:
    """What does not fit into the gradients' memory after they have entered the residual: as flow.py asks for it, in its order."""
    numels, num_rows, rooms = [flat.partition_numel for flat in layout.flats], layout.world_size, Rooms()

    def lend(first: int, last: int) -> None:
        for block, numel in enumerate(numels if lent else ()):
            rooms.lend(block, sizes.gradient * numel * first, sizes.gradient * numel * last)

    def take(*wanted, **alignment) -> int:
        return sum(num_bytes for num_bytes in wanted if num_bytes and rooms.take(num_bytes, **alignment) is None)

    def take_residuals() -> int:
        return take(*(sizes.residual * numel for numel in numels), alignment=sizes.residual) if offloaded else 0

    left, exchange = 0, 0
    if offloaded and exchanges:
        lend(0, rank)
        lend(rank + 1, num_rows)
        left = take_residuals()
        lend(rank, rank + 1)
    else:
        lend(0, num_rows)
        left = take_residuals()
    if exchanges:
        others, splits, mark = num_rows if num_rows > 1 else 0, layout.splits(False), rooms.mark()
        mean, rest = take(sizes.residual * splits[rank]), rooms.mark()
        received = take(sizes.value * splits[rank] * others)
        rooms.release(rest)
        exchange = mean + max(received, take(sizes.weight * max(splits), sizes.weight * max(splits) * others))
        rooms.release(mark)
    notes = [-(-numel // _TILE) * _TILE_BYTES for flat, numel in zip(layout.flats, numels, strict=True) if not flat.is_full]
    return left + max(exchange, take(layout.mask_numel, *notes))
