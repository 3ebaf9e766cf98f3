"""How many bytes a rank sends per step, and keeps. Follows from shapes and settings alone; tests compare it with what is really sent."""
from ds_scape.sync.mask import MaskCodec
from ds_scape.sync.partition import Layout

#: Bytes of the record that every rank sends to every other before each step: squared norm and checksum, two doubles.
NORM_BYTES = 16


def step_bytes(layout: Layout, rank: int, *, dense: bool, value_bytes: int, weight_bytes: int, encoding: str = "auto") -> dict[str, int]:
    """{"norm", "values", "weights", "mask"}: bytes that ``rank`` sends to others in one step.

    dense: a step without masks. value_bytes, weight_bytes: size of one gradient value on the wire and of one weight of the model. A gather
    counts what a ring sends, own part times world_size - 1. "mask" is the next step's and is sent behind its forward and backward pass; the
    last dense step sends one as well.
    """
    others, splits = layout.world_size - 1, layout.splits(dense)
    if not others:
        return dict.fromkeys(("norm", "values", "weights", "mask"), 0)
    mask = 0 if dense or not layout.has_masks else MaskCodec(layout, encoding).num_bytes
    return {"norm": NORM_BYTES * others, "values": value_bytes * (sum(splits) - splits[rank]),
            "weights": weight_bytes * max(splits) * others, "mask": mask * others}


def dense_zero_bytes(layout: Layout, weight_bytes: int, *, reduce_scatter: bool = True) -> int:
    """The same for a step of dense ZeRO 1 or 2: gradients and weights of ``weight_bytes`` each. reduce_scatter: gradients go to their
    owners only; False: they are all-reduced, as stock DeepSpeed does, which sends twice as much."""
    share = sum(flat.partition_numel for flat in layout.flats) * (layout.world_size - 1)
    return weight_bytes * share * (2 if reduce_scatter else 3)


def held_bytes(layout: Layout, residual_bytes: int = 4) -> dict[str, int]:
    """What a rank keeps beyond dense ZeRO with gradients of the same type: its "residual" (``residual_bytes`` per coordinate of all ranks),
    the "owner"'s moving average of squares and ages for its own coordinates, the "positions" of the present mask."""
    own = sum(flat.partition_numel for flat in layout.flats)
    masked = sum(flat.count(rank, dense=False) for flat in layout.flats if not flat.is_full for rank in range(layout.world_size))
    return {"residual": residual_bytes * own * layout.world_size, "owner": 8 * own, "positions": 8 * masked}


def transient_bytes(layout: Layout, *, dense: bool, value_bytes: int = 2, weight_bytes: int = 2, offloaded: bool = False) -> int:
    """What a step needs at most for its length, beside held_bytes()'s positions and 64 MiB for the norm: values going out and coming in,
    their sum and its parts in fp32, what the kernels mark per owned coordinate; under offload the own part of the residual."""
    sent, own = sum(layout.splits(dense)), sum(flat.partition_numel for flat in layout.flats)
    owned = max(layout.splits(dense))
    return (value_bytes + max(value_bytes, weight_bytes)) * sent + 8 * owned + 2 * own + (4 * own if offloaded else 0)
