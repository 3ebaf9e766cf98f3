"""A step's work on a residual in host memory, in one pass through the device (passage.py). The arithmetic and its order per element are
those of a residual on the device, and so are the bits."""
import torch

from ds_scape.kernels.ops import Kernels
from ds_scape.optimizer.passage import Passage


@torch.no_grad()
def enter(host: torch.Tensor, passage: Passage, fresh: torch.Tensor | None, factor: float, index: torch.Tensor | None, wire: torch.dtype,
          own: slice, keep_before: bool, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """accumulate() and take() on a host residual in one pass.

    fresh: [n] on the device, None: nothing enters. index: int64 [k] ascending positions of what is sent; None: everything. own: the rank's
    partition. Returns (values [k] in the wire dtype, the own partition before anything was taken if ``keep_before``, and after it), all on
    the device.
    """
    num = host.numel() if index is None else len(index)
    values = torch.empty(num, dtype=wire, device=passage.device)
    before, after = (torch.empty(own.stop - own.start, dtype=host.dtype, device=passage.device) if keep else None
                     for keep in (keep_before, True))
    edges = list(range(0, host.numel(), passage.piece)) + [host.numel()]
    cuts = edges if index is None else torch.searchsorted(index, torch.tensor(edges, device=index.device)).tolist()
    for i, (start, part) in enumerate(passage.pieces(host)):
        stop = start + part.numel()
        gradient, lo, hi = None if fresh is None else fresh[start:stop], cuts[i], cuts[i + 1]
        if keep_before:
            kernels.enter(part, gradient, factor)
            _copy_overlap(before, part, start, own)
            gradient = None
        kernels.enter(part, gradient, factor, None if index is None else index[lo:hi], values[lo:hi], first=start)
        _copy_overlap(after, part, start, own)
    return values, before, after


def _copy_overlap(target: torch.Tensor | None, part: torch.Tensor, start: int, own: slice) -> None:
    lo, hi = max(start, own.start), min(start + part.numel(), own.stop)
    if target is not None and lo < hi:
        target[lo - own.start:hi - own.start] = part[lo - start:hi - start]
