"""Sub-pool room per class of calls, from what earlier calls of the class needed. Pure: the same words give the same answer.

Slots are the same in every tile and fit Gaussians; what a heavier tile needs beyond them it takes from its group's sub-pool, which only has
to hold the sum. So it is the room in the sub-pools that follows the data.
"""
from collections import deque
from dataclasses import dataclass, field

from ds_zipccl.codec.format import DEFAULT_SPILL_PER_TILE, TILE_ELEMS

STEP_BYTES = 64             # rooms are rounded up to this: few different frame layouts
MARGIN = 8                  # and leave one part in 8 above the largest recent need
SHRINK_AFTER = 32           # calls that must agree before a room goes down: hysteresis
GIVE_UP_SHARE = 3 / 16      # of the raw bytes, in sub-pools: BF16 would gain less than 12 %
RETRY_AFTER = 64            # calls that go uncompressed before the class is tried again


def _room_for(need: int) -> int:
    return max(DEFAULT_SPILL_PER_TILE, -(-(need + need // MARGIN) // STEP_BYTES) * STEP_BYTES)


@dataclass
class Capacity:
    """State of one class (same collective, dtype and size on one group). All ranks feed it the same needs in the same
    order. Bytes are per tile."""
    give_up_bytes: int
    spill_per_tile: int = DEFAULT_SPILL_PER_TILE
    calls_left_out: int = 0
    given_windows: bool = False             # measured once, by rank: an overflow may say no more than that one is out of date
    _recent: deque = field(default_factory=lambda: deque(maxlen=SHRINK_AFTER))

    @classmethod
    def of(cls, row_numel: int, itemsize: int, first_spill: float) -> "Capacity":
        """For rows of ``row_numel`` elements; ``first_spill``: the room before anything is known of the data, as a share of the
        raw bytes."""
        tile_bytes = min(TILE_ELEMS, row_numel) * itemsize
        return cls(int(GIVE_UP_SHARE * tile_bytes), max(DEFAULT_SPILL_PER_TILE, int(first_spill * tile_bytes)))

    def next_call(self) -> int | None:
        """Sub-pool bytes per tile for the next call, or None: send it uncompressed, the data does not compress."""
        if self.calls_left_out:
            self.calls_left_out -= 1
            return None
        return self.spill_per_tile

    def observe(self, need: int, overflow: bool) -> None:
        """Takes the largest spill need over all ranks of a finished call, in bytes per tile."""
        self._recent.append(need)
        if overflow:
            if self.given_windows and len(self._recent) > 1:
                pass                                    # they served until now and are measured anew for the next call
            elif need > self.give_up_bytes:
                self.calls_left_out = RETRY_AFTER
            else:
                self.spill_per_tile = _room_for(need)
            self._recent.clear()
        elif len(self._recent) == SHRINK_AFTER and self.spill_per_tile > DEFAULT_SPILL_PER_TILE:
            self.spill_per_tile = min(self.spill_per_tile, _room_for(max(self._recent)))
