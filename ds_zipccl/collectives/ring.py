"""Where messages go in a buffer that all ranks have alike: one behind the other, and round again. Pure: every rank that asks for the same
sizes in the same order gets the same answers."""
from collections import deque

ALIGN_BYTES = 128


def align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Ring:
    """Regions of ``num_bytes`` bytes that start at ``first``. Messages are numbered from 1."""

    def __init__(self, first: int, num_bytes: int):
        self._first, self._end, self._at = align(first), first + num_bytes, align(first)
        self._taken: deque[tuple[int, int, int]] = deque()          # (start, end, message), oldest first
        self.num_messages = 0

    @property
    def room(self) -> int:
        return self._end - self._first

    def take(self, num_bytes: int) -> tuple[int, int, int]:
        """The next message's (number, offset of its region, number of the last message that had a part of it; 0: none had)."""
        num_bytes = align(num_bytes)
        if num_bytes > self.room:
            raise ValueError(f"a message of {num_bytes} bytes does not fit in {self.room}")
        if self._at + num_bytes > self._end:
            self._at = self._first
        start, end, before = self._at, self._at + num_bytes, 0
        while any(low < end and start < high for low, high, _ in self._taken):
            before = self._taken.popleft()[2]              # with it all older ones
        self.num_messages += 1
        self._taken.append((start, end, self.num_messages))
        self._at = end
        return self.num_messages, start, before
