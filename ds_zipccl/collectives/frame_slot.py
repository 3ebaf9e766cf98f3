"""What a frame cache (frame_cache.py) keeps: slots, counters, and the bound on memory."""
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import layout
from ds_zipccl.collectives import all_gather
from ds_zipccl.collectives.capacity import Capacity
from ds_zipccl.kernels.geometry import Geometry

OP = all_gather.SPEC.name


@dataclass
class CacheStats:
    """Counters of all frame caches of a process, and their common bound. Bytes are what this rank sends, or holds."""
    max_bytes: int
    held_bytes: int = 0                 # frames and fingerprints, now
    gathers: int = 0                    # launched with frames
    one_sided: int = 0                  # of these gathers: over symmetric memory
    shards: int = 0                     # frames they sent
    encodes: int = 0                    # frames made, off the gathers' path or as repairs
    repairs: int = 0                    # frames made again by one rank alone, just before they were sent
    unknown_writes: int = 0             # of those: nobody had announced the change
    refreshes: int = 0                  # exchanges of status words
    status_bytes: int = 0
    raw_bytes: int = 0                  # of the gathers: natively, and really sent
    wire_bytes: int = 0
    bypassed: Counter = field(default_factory=Counter)      # tensors gathered without their frames, by reason

    def section(self) -> tuple[dict, dict]:
        """(counters, gauges) for ``stats.Stats.sections``."""
        counters = {k: v for k, v in self.__dict__.items() if isinstance(v, int) and k not in ("max_bytes", "held_bytes")}
        counters["encodes_saved"] = self.shards - self.encodes
        counters.update({f"bypassed_{reason}": count for reason, count in self.bypassed.items()})
        return counters, {"held_bytes": self.held_bytes, "max_bytes": self.max_bytes}


class Slot:
    """One shard. ``source()`` returns its tensor [numel], contiguous, as it is now."""

    def __init__(self, name: str, source: Callable[[], torch.Tensor], numel: int, dtype: torch.dtype):
        self.name, self.source, self.numel, self.dtype = name, source, numel, dtype
        self.index = -1                             # in its cache
        self.capacity = Capacity.of(numel, dtype.itemsize, 0.0)
        # Agreed between the ranks:
        self.stale, self.used = True, False         # changed since it was encoded; gathered since then
        self.codec: Codec | None = None             # None: travels as it is, because of
        self.reason = "no_gain" if self.frame_bytes() >= self.raw_bytes else "not_encoded"
        # This rank's own:
        self.frame: torch.Tensor | None = None
        self.dirty = False
        self.held_bytes = 0
        self.place: tuple = ()                      # where the encoded data was, and its version
        self.print: torch.Tensor | None = None      # its fingerprint
        self.room: tuple = ()                       # for which its codec was made: bytes of sub-pool per tile, level
        self.checked = -1                           # boundary at which it was last compared

    @property
    def raw_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def eligible(self) -> bool:
        return self.reason != "no_gain"

    @property
    def may_have_frame(self) -> bool:
        return self.reason in (None, "not_encoded", "not_gathered")

    def geometry(self) -> Geometry:
        """Of the frame, in the layout that is agreed, or else likely."""
        return self.codec.geometry if self.codec else layout(BY_TORCH[self.dtype], self.numel, spill_per_tile=self.capacity.spill_per_tile)

    def frame_bytes(self) -> int:
        return self.geometry().frame_bytes

    def kind(self) -> tuple[Geometry, bool, bool]:
        """Of its row in a one-sided gather (``symmetric.Row``): what there is no memory for to keep a frame of has one made on the way."""
        on_the_way = self.codec is None and self.reason == "max_cache_bytes"
        return self.geometry(), on_the_way, self.codec is None and not on_the_way


def place_of(source: torch.Tensor) -> tuple:
    """Where a slot's data is, and its version."""
    return source.device, source.data_ptr(), 0 if source.is_inference() else source._version
