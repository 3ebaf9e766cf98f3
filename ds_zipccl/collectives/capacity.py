"""Escape capacity per class of calls, from what earlier calls of the class needed. Pure: the same words give the same
answer."""
from collections import deque
from dataclasses import dataclass, field

from ds_zipccl.codec.format import DEFAULT_ESCAPES_PER_BLOCK

STEP = 4                # capacities are rounded up to this: few different frame layouts
MARGIN = 4              # and leave this much room above the largest recent need
SHRINK_AFTER = 32       # calls that must agree before a capacity goes down: hysteresis
GIVE_UP_NEED = 440      # BF16 would gain less than 10 %
RETRY_AFTER = 64        # calls that go uncompressed before the class is tried again


def _capacity_for(need: int) -> int:
    return max(DEFAULT_ESCAPES_PER_BLOCK, -(-(need + MARGIN) // STEP) * STEP)


@dataclass
class Capacity:
    """State of one class (same collective, dtype and size on one group). All ranks feed it the same needs in the same
    order."""
    escapes_per_block: int = DEFAULT_ESCAPES_PER_BLOCK
    calls_left_out: int = 0
    _recent: deque = field(default_factory=lambda: deque(maxlen=SHRINK_AFTER))

    def next_call(self) -> int | None:
        """Capacity for the next call in bytes per block, or None: send this one uncompressed, the data does not
        compress."""
        if self.calls_left_out:
            self.calls_left_out -= 1
            return None
        return self.escapes_per_block

    def observe(self, need: int, overflow: bool) -> None:
        """Takes the largest need over all ranks of a finished call."""
        self._recent.append(need)
        if overflow:
            if need > GIVE_UP_NEED:
                self.calls_left_out = RETRY_AFTER
            else:
                self.escapes_per_block = _capacity_for(need)
            self._recent.clear()
        elif len(self._recent) == SHRINK_AFTER:
            self.escapes_per_block = min(self.escapes_per_block, _capacity_for(max(self._recent)))
