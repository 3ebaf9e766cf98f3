"""What ranks tell each other of frames that they have just made (frame_cache.py): a word for each slot of the cache, by its index, and one
more of what frame_guard.py has found."""
import torch

from ds_zipccl.codec.format import OVERFLOW_BIT, SPILL_MASK, SPILL_SHIFT, SPILL_UNIT_BYTES

REFUSED = -1 << 31          # a rank's word for a slot that it has no memory for; status words have this bit clear


class Words:
    """This rank's, int32, in the same place each time."""

    def __init__(self, device: torch.device):
        self._words, self._refused = torch.empty(0, dtype=torch.int32, device=device), None
        self._begin = self._words

    def begin(self, num_slots: int, refused: list[int]) -> torch.Tensor:
        """[num_slots + 1]: REFUSED at these, 0 elsewhere. What was sent of them before must have been read."""
        if self._words.numel() != num_slots + 1:
            self._words, self._refused = self._words.new_empty(num_slots + 1), None
        if self._refused != refused:                # one copy each time, not a kernel for each of them
            begin = torch.zeros(num_slots + 1, dtype=torch.int32, device="cpu")
            begin[refused] = REFUSED
            self._begin, self._refused = begin.to(self._words.device), refused
        return self._words.copy_(self._begin)


def read(table: torch.Tensor) -> tuple[list[tuple[bool, bool, int]], list[int]]:
    """``table``: every rank's words [world size, num slots + 1]. (For each slot: whether a rank has refused it, whether its frame has
    overflowed somewhere, bytes of sub-pool per tile that all need; every rank's last word.) The host waits for the device."""
    spills = torch.where(table < 0, 0, table >> SPILL_SHIFT & SPILL_MASK).amax(0) * SPILL_UNIT_BYTES
    refused, overflows, needs = torch.stack([(table.amin(0) < 0).int(), ((table & OVERFLOW_BIT) * (table >= 0)).amax(0), spills]).tolist()
    told = [(bool(no), bool(over), need) for no, over, need in zip(refused, overflows, needs, strict=True)]
    return told[:-1], table[:, -1].tolist()
