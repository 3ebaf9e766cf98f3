"""How many bytes a rank sends per step. Follows from shapes and settings alone; tests compare it with what is really sent."""
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
