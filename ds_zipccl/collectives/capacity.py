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
    num_calm: int = 0                       # calls in a row that did not overflow
    under_way: deque = field(default_factory=deque)         # needs of the calls launched, in order, until they are taken account of
    num_launched: int = field(default=0, compare=False)
    is_forgotten: bool = False              # the group keeps it no more: such calls are of a new class
    _recent: deque = field(default_factory=lambda: deque(maxlen=SHRINK_AFTER))
    _first_spill: int = DEFAULT_SPILL_PER_TILE
    _num_seen: int = field(default=0, compare=False)        # of the launched, by ``is_idle``
    _is_guess: bool = False                 # the room: nothing is known of the data yet

    @classmethod
    def of(cls, row_numel: int, itemsize: int, first_spill: float) -> "Capacity":
        """For rows of ``row_numel`` elements; ``first_spill``: the room before anything is known of the data, as a share of the
        raw bytes."""
        tile_bytes = min(TILE_ELEMS, row_numel) * itemsize
        spill = max(DEFAULT_SPILL_PER_TILE, int(first_spill * tile_bytes))
        return cls(int(GIVE_UP_SHARE * tile_bytes), spill, _first_spill=spill, _is_guess=spill > DEFAULT_SPILL_PER_TILE)

    def launched(self) -> Need:
        """A call goes with the room that ``next_call`` gave; who learns what it needed fills this in."""
        need = Need()
        self.under_way.append(need)
        self.num_launched += 1
        return need

    def is_idle(self) -> bool:
        """Whether there is more room than in a new class, and nothing was launched since this was asked last: the same on all ranks."""
        seen, self._num_seen = self._num_seen, self.num_launched
        return seen == self.num_launched and self.spill_per_tile > self._first_spill and not self.calls_left_out

    def overdue(self) -> Need | None:
        """What the next call must not go without: it is to be known, then ``take_account``; None: nothing."""
        return self.under_way[0] if len(self.under_way) >= (LAG if self.num_calm >= CALM_AFTER else 1) else None

    def take_account(self) -> None:
        """Of the oldest call; of nothing where that failed before its need was known."""
        need = self.under_way.popleft()
        if need.is_known():
            self.observe(need.num_bytes, need.overflow)

    def look_ahead(self) -> bool:
        """Takes account of the oldest call already, before the next one must not go without it, if it is known and leaves everything as it
        is: ranks that do this at different times, or never, agree. Returns whether the next call has nothing to wait for."""
        under_way = self.under_way
        if self.num_calm >= CALM_AFTER and len(under_way) >= LAG:
            need = under_way[0]
            if need.num_bytes is not None and not need.overflow:
                if self.spill_per_tile == DEFAULT_SPILL_PER_TILE:       # what ``take_account`` does then
                    self._recent.append(under_way.popleft().num_bytes)
                    self.num_calm += 1
                elif self._room_after((*self._recent, need.num_bytes)) is None:
                    self.take_account()
        return self.num_calm >= CALM_AFTER and len(under_way) < LAG

    def _room_after(self, needs) -> int | None:
        """The room that the latest calls, which did not overflow, leave, or None: it stays. A guess goes down as soon as the class is
        calm."""
        if self.spill_per_tile == DEFAULT_SPILL_PER_TILE or len(needs) < (CALM_AFTER if self._is_guess else SHRINK_AFTER):
            return None
        room = _room_for(max(needs[-SHRINK_AFTER:]))
        return room if room < self.spill_per_tile else None

    def next_call(self) -> int | None:
        """Sub-pool bytes per tile for the next call, or None: send it uncompressed, the data does not compress."""
        if self.calls_left_out:
            self.calls_left_out -= 1
            return None
        return self.spill_per_tile

    def observe(self, need: int, overflow: bool) -> None:
        """Takes the largest spill need over all ranks of a finished call, in bytes per tile."""
        self._recent.append(need)
        self.num_calm = 0 if overflow else self.num_calm + 1
        if overflow:
            if self.given_windows and len(self._recent) > 1:
                pass                                    # they served until now and are measured anew for the next call
            elif need > self.give_up_bytes:
                self.calls_left_out = RETRY_AFTER
            else:
                self.spill_per_tile = _room_for(need)
            self._recent.clear()
            self._is_guess = False
            return
        room = self._room_after(tuple(self._recent))
        if room is not None:
            self.spill_per_tile, self._is_guess = room, False
