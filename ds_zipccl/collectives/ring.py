"""Where messages go in a buffer that all ranks have alike: one behind the other, and round again. Pure: every rank that asks for the same
sizes in the same order gets the same answers."""
from collections import deque

ALIGN_BYTES = 128


def align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Ring:
    """Regions in ``room`` bytes from ``first`` on (a multiple of ALIGN_BYTES). Messages are numbered from 1."""

    def __init__(self, first: int, room: int):
        self.first, self.room, self.num_messages = first, room, 0
        self._at = 0                    # where the next region starts, as if the buffer had no end: round after round
        self._taken: deque[tuple[int, int]] = deque()          # (start in the same way, message), oldest first

    def take(self, num_bytes: int) -> tuple[int, int, int]:
        """The next message's (number, offset of its region, number of the last message that had a part of it; 0: none had)."""
        num_bytes = align(num_bytes)
        if num_bytes > self.room:
            raise ValueError(f"a message of {num_bytes} bytes does not fit in {self.room}")
        start, place, before = self._at, self._at % self.room, 0
        if place + num_bytes > self.room:
            start, place = start - place + self.room, 0
        self._at = start + num_bytes
        while self._taken and self._taken[0][0] < self._at - self.room:
            before = self._taken.popleft()[1]
        self.num_messages += 1
        self._taken.append((start, self.num_messages))
        return self.num_messages, self.first + place, before
