"""What a frame cache (frame_cache.py) does with many slots on a GPU, by one call of C or one kernel: frames and fingerprints are made, or
these compared, where they were made before. One by one it takes some ten calls of torch's for each slot, and a model has hundreds."""
from collections.abc import Callable

import torch

from ds_zipccl.codec.codec import Codec
from ds_zipccl.collectives import streams
from ds_zipccl.collectives.fingerprint import shape_of
from ds_zipccl.collectives.frame_slot import Slot, place_of
from ds_zipccl.collectives.launch import PREPARED
from ds_zipccl.kernels import ops
from ds_zipccl.kernels.cuda_calls import FRAME_ALIGN, Print, workspace_words
from ds_zipccl.kernels.launch_calls import step


class Prints:
    """Fingerprints of the slots' ``data``, in ``Slot.print``; all stay where they are. ``differs``: bool, by slots' index: set where one is
    not that of the data (None: nothing will be compared). ``launcher``: kernels/ops.py. ``others``: slots and data that are not among
    these, but to be compared with them, one by one."""

    def __init__(self, launcher, slots: list[Slot], data: list[torch.Tensor], differs: torch.Tensor | None, others=()):
        rows = [Print(x.data_ptr(), *shape_of(x)[:2], slot.print.data_ptr(), 0 if differs is None else differs.data_ptr() + slot.index)
                for slot, x in zip(slots, data, strict=True)]
        self._launcher, self._of, self._kept = launcher, (Print * len(rows))(*rows), [slot.print for slot in slots]
        self._stream, self.others = streams.current(data[0].device), others
        for t in self._kept:
            streams.keep(t)                         # once for a stream is enough: what may be dropped is what was written before

    def make(self) -> None:
        """On the stream that was current when this was made."""
        self._launcher.prints(self._of, False, self._stream)

    def compare(self) -> None:
        self._launcher.prints(self._of, True, self._stream)

    @staticmethod
    def can(slot: Slot, data: torch.Tensor) -> bool:
        _, start, numel = shape_of(data)
        return slot.print is not None and slot.print.numel() == numel and (data.data_ptr() + 2 * start) % 8 == 0


class Batch:
    """Makes the frames and fingerprints of ``slots`` anew, of ``data``, while those lie where they lay, on the stream that is current now.
    ``words``: int32, 0 where the slots' status words will be: at their index."""

    def __init__(self, launcher, slots: list[Slot], data: list[torch.Tensor], words: torch.Tensor):
        device = data[0].device
        self.slots, self._words, self._stream = frozenset(slots), words, streams.current(device)
        self._what, self._prints, first = _what(slots, data), Prints(launcher, slots, data, None), words.data_ptr()
        steps = [step(slot.codec.geometry, slot.frame.data_ptr(), slot.frame.numel(), 1, -1, first + 4 * slot.index,
                      offset=x.data_ptr() // x.element_size()) for slot, x in zip(slots, data, strict=True)]
        words = max(workspace_words(1, slot.codec.geometry) for slot in slots)
        self._plan = launcher.launch_calls.plan(steps, [], (0, 0, 0), launcher.workspace(device.index or 0, self._stream, words),
                                                self._stream, self._stream, 0, 0)
        self._kept = [slot.frame for slot in slots]
        for frame in self._kept:
            streams.keep(frame)

    @staticmethod
    def can(slot: Slot, data: torch.Tensor) -> bool:
        """What has a frame already, where the kernels can write."""
        return (slot.frame is not None and slot.frame.numel() == slot.codec.frame_bytes and slot.frame.data_ptr() % FRAME_ALIGN == 0
                and Prints.can(slot, data))

    def is_of(self, slots: list[Slot], data: list[torch.Tensor], words: torch.Tensor) -> bool:
        return words is self._words and streams.current(words.device) == self._stream and _what(slots, data) == self._what

    def run(self) -> None:
        self._plan.begin(0, 0, 0)
        self._prints.make()


class Batches:
    """A cache's last batch, as long as it is as it was. ``launcher``: as ``launcher_of`` has it."""

    def __init__(self, launcher):
        self._launcher, self._last = launcher, None

    def of(self, slots: list[tuple[Slot, Codec]], data_of: Callable[[torch.Tensor], torch.Tensor],
           words: torch.Tensor) -> tuple[Batch | None, dict[Slot, tuple]]:
        """(of those of ``slots`` that have a frame already in the layout given: however many others there are, these are made at once;
        ``place_of`` the data of each). What has moved is made so only if all have: a batch is for where data stays.
        ``data_of(source)``: on the device; a copy is not made so."""
        found = []
        for slot, codec in slots if self._launcher is not None else ():
            if slot.codec is codec and slot.frame is not None:
                source = slot.source()
                x, place = data_of(source), place_of(source)
                if x.data_ptr() == place[1] and Batch.can(slot, x):
                    found.append((slot, x, place))
        found = [each for each in found if each[0].place[:2] == each[2][:2]] or found
        again, data = [slot for slot, _, _ in found], [x for _, x, _ in found]
        if self._last is not None and not (again and self._last.is_of(again, data, words)):
            self._last = None
        if again and self._last is None:
            self._last = Batch(self._launcher, again, data, words)
        return self._last, {slot: place for slot, _, place in found}

    def forget(self, slot: Slot | None = None) -> None:
        """This slot's frame is given up (None: all): a batch holds frames."""
        if slot is None or self._last is not None and slot in self._last.slots:
            self._last = None


def _what(slots: list[Slot], data: list[torch.Tensor]) -> list[tuple]:
    return [(slot, slot.codec.geometry, slot.frame.data_ptr(), slot.print.data_ptr(), x.data_ptr(), x.numel())
            for slot, x in zip(slots, data, strict=True)]


def launcher_of(runtime, device: torch.device):
    """The kernels of ``runtime``'s for ``device``, where C and addresses can launch them (kernels/ops.py); None elsewhere."""
    if device.type != "cuda" or runtime.config.integrity != "off" or not PREPARED:
        return None
    return ops.kernel_set(runtime.kernels["cuda"]).launcher
