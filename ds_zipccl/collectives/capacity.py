"""Sub-pool room per class of calls, from what earlier calls of the class needed. Pure: the same words give the same answer.

What a call needed is taken account of a fixed number of calls of its class later, whenever it became known: so ranks that wait for their
calls at different times agree, and no launch waits for the words of a call just before it. Only in a class that is new or has just
overflowed does the next call wait for the last.

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
CALM_AFTER = 4              # calls in a row that did not overflow: from then on
LAG = 8                     # so many calls of the class may be launched before the first of them is taken account of


def _room_for(need: int) -> int:
    return max(DEFAULT_SPILL_PER_TILE, -(-(need + need // MARGIN) // STEP_BYTES) * STEP_BYTES)


@dataclass(slots=True)
class Need:
    """What one call of a class needed, once its status words are known: bytes per tile, the largest over all ranks."""
    num_bytes: int | None = None
    overflow: bool = False

    def is_known(self) -> bool:
        return self.num_bytes is not None


@dataclass
class Capacity:
    """State of one class (same collective, dtype and size on one group). All ranks feed it the same needs in the same
    order. Bytes are per tile."""
    give_up_bytes: int
    spill_per_tile: int = DEFAULT_SPILL_PER_TILE
    calls_left_out: int = 0
    given_windows: bool = False             # measured once, by rank: an overflow may say no more than that one is out of date
    _recent: deque = field(default_factory=lambda: deque(maxlen=SHRINK_AFTER))
    _num_calm: int = 0
    _launched: deque = field(default_factory=deque)         # their needs, in order

    @classmethod
    def of(cls, row_numel: int, itemsize: int, first_spill: float) -> "Capacity":
        """For rows of ``row_numel`` elements; ``first_spill``: the room before anything is known of the data, as a share of the
        raw bytes."""
        tile_bytes = min(TILE_ELEMS, row_numel) * itemsize
        return cls(int(GIVE_UP_SHARE * tile_bytes), max(DEFAULT_SPILL_PER_TILE, int(first_spill * tile_bytes)))

    def launched(self) -> Need:
        """A call goes with the room that ``next_call`` gave; who learns what it needed fills this in."""
        need = Need()
        self._launched.append(need)
        return need

    def overdue(self) -> Need | None:
        """What the next call must not go without: it is to be known, then ``take_account``; None: nothing."""
        return self._launched[0] if len(self._launched) >= (LAG if self._num_calm >= CALM_AFTER else 1) else None

    def take_account(self) -> None:
        """Of the oldest call; of nothing where that failed before its need was known."""
        need = self._launched.popleft()
        if need.is_known():
            self.observe(need.num_bytes, need.overflow)

    def next_call(self) -> int | None:
        """Sub-pool bytes per tile for the next call, or None: send it uncompressed, the data does not compress."""
        if self.calls_left_out:
            self.calls_left_out -= 1
            return None
        return self.spill_per_tile

    def observe(self, need: int, overflow: bool) -> None:
        """Takes the largest spill need over all ranks of a finished call, in bytes per tile."""
        self._recent.append(need)
        self._num_calm = 0 if overflow else self._num_calm + 1
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
