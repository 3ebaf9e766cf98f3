"""Writes to kept frames' data that nobody has announced (frame_cache.py): the data is compared with fingerprints of what was encoded."""
import torch

from ds_zipccl.collectives import streams
from ds_zipccl.collectives.fingerprint import fingerprint
from ds_zipccl.collectives.frame_batch import Prints
from ds_zipccl.collectives.frame_slot import Slot
from ds_zipccl.errors import CollectiveError
from zipscape.errors import describe


class Guard:
    """Of a cache's ``slots``. ``on_host``: the host waits for what a comparison says; else that goes into ``word``, on a GPU.
    ``launcher``: frame_batch.launcher_of."""

    def __init__(self, slots: list[Slot], device: torch.device, launcher):
        self.on_host, self.has_compared = device.type == "cpu", False           # the latter: on a GPU, since somebody set it
        self._slots, self._device, self.launcher = slots, device, launcher
        self._differs: torch.Tensor | None = None           # GPU: bool per slot, read at the next refresh

    def unchanged(self, slot: Slot, data: torch.Tensor) -> bool:
        """Whether ``data`` is what the slot's fingerprint is of, as far as the host knows."""
        now = fingerprint(data)
        if self.on_host:
            return torch.equal(now, slot.print)
        streams.keep(slot.print)
        self.has_compared = True
        self._found()[slot.index:slot.index + 1].logical_or_((now != slot.print).any())       # the host does not wait for it
        return True

    def all_at_once(self, slots: list[Slot], data: list[torch.Tensor]) -> Prints | None:
        """To ``compare`` these, which have frames, while data and fingerprints lie where they are; None: one by one."""
        if self.launcher is None or self.on_host:
            return None
        together, others = [], []
        for slot, x in zip(slots, data, strict=True):
            (together if Prints.can(slot, x) else others).append((slot, x))
        return Prints(self.launcher, *map(list, zip(*together, strict=True)), self._found(), others) if together else None

    def compare(self, prints: Prints) -> None:
        prints.compare()
        for slot, x in prints.others:
            self.unchanged(slot, x)

    def _found(self) -> torch.Tensor:
        if self._differs is None:
            self._differs = torch.zeros(len(self._slots), dtype=torch.bool, device=self._device)
        return self._differs

    def tell(self, word: torch.Tensor, read: streams.Mark) -> bool:
        """Sets ``word``, behind ``read``, to one more than the index of a slot that was found changed, and begins anew. Whether it did."""
        if self._differs is None:
            return False
        read.join()
        word.copy_(torch.where(self._differs.any(), self._differs.int().argmax() + 1, 0))
        self._differs.zero_()
        return True

    def raise_for(self, words: list[int]) -> None:
        """Of all ranks."""
        found = [f"{self._slots[word - 1].name} on rank {rank}" for rank, word in enumerate(words) if word]
        if found:
            raise CollectiveError(describe(
                "parameters were changed by a writer that ds_zipccl does not know, and the last step used the old ones",
                got=", ".join(found), todo="go back to the last checkpoint; after such a write call "
                "ds_zipccl.backend.zero3_params.invalidate(parameters), or set cache_params to false"))
