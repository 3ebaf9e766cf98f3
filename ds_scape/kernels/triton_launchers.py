"""The Triton kernels by name, with the number of warps that suits an H200."""
from ds_scape.kernels import triton_mask, triton_norm, triton_owner, triton_select, triton_select_notes, triton_worker
from ds_scape.kernels.triton_launch import Launcher, ceil_div

__all__ = ["LAUNCHERS", "ceil_div"]

#: Module; kernels with their numbers of warps, and the numbers that decide about wide accesses.
_KERNELS = {
    triton_worker: {"tile_starts": (4,), "enter": (8, ("num", "own_start", "own_num")), "take": (4,), "track_square": (4, ("num",)),
                    "scatter": (4,), "take_ages": (4, ("num",)), "mark_overdue": (4, ("num",))},
    triton_owner: {"owner_step": (4, ("num",)), "dense_step": (4, ("num",))},
    triton_norm: {"lane_sums": (4, ("num", "lanes")), "halve": (4,), "last_halves": (4,)},
    triton_mask: {"words_of_mask": (4, ("num",)), "fill": (4,), "count_ones": (8,), "sums_before": (4,), "write_ones": (8,),
                  "words_of_offsets": (4,)},
    triton_select: {"sample": (4,), "set_bracket": (8,), "clear": (1,), "unclear": (4,), "settle_two": (8,), "settle_three": (8,)},
    triton_select_notes: {"third": (4,), "equal": (4,), "equal_before": (4,), "finish": (4,), "fill_bytes": (4,)},
}
LAUNCHERS = {name: Launcher(getattr(module, name), *how) for module, kernels in _KERNELS.items() for name, how in kernels.items()}
