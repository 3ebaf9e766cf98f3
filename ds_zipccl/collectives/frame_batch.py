"""What a frame cache (frame_cache.py) does with many slots on a GPU, by one call of C or one kernel: frames and fingerprints are made, or
these compared, where they were made before. One by one it takes some ten calls of torch's for each slot, and a model has hundreds."""
import torch

from ds_zipccl.collectives import streams
from ds_zipccl.collectives.fingerprint import shape_of
from ds_zipccl.collectives.frame_slot import Slot
from ds_zipccl.collectives.launch import PREPARED
from ds_zipccl.kernels import ops
from ds_zipccl.kernels.cuda_calls import FRAME_ALIGN, Print, workspace_words
from ds_zipccl.kernels.launch_calls import step


class Prints:
    """Fingerprints of the slots' ``data``, in ``Slot.print``; all stay where they are. ``differs``: bool, by slots' index: set where one is
    not that of the data (None: nothing will be compared). ``launcher``: kernels/ops.py."""

    def __init__(self, launcher, slots: list[Slot], data: list[torch.Tensor], differs: torch.Tensor | None):
        rows = [Print(x.data_ptr(), *shape_of(x)[:2], slot.print.data_ptr(), 0 if differs is None else differs.data_ptr() + slot.index)
                for slot, x in zip(slots, data, strict=True)]
        self._launcher, self._of, self._kept = launcher, (Print * len(rows))(*rows), [slot.print for slot in slots]
        self._stream = streams.current(data[0].device)
        for t in self._kept:
            streams.keep(t)                         # once for a stream is enough: what may be dropped is what was written before

    def make(self) -> None:
        """On the stream that was current when this was made."""
        self._launcher.prints(self._of, False, self._stream)

    def compare(self) -> None:
        self._launcher.prints(self._of, True, self._stream)

    @staticmethod
    def can(slots: list[Slot], data: list[torch.Tensor]) -> bool:
        return all([slot.print is not None and slot.print.numel() == shape_of(x)[2] and (x.data_ptr() + 2 * shape_of(x)[1]) % 8 == 0
                    for slot, x in zip(slots, data, strict=True)])


class Batch:
    """Makes the frames and fingerprints of ``slots`` anew, of ``data``, while those lie where they lay, on the stream that is current now.
    ``words``: int32, for each slot's status word and one more."""

    def __init__(self, launcher, slots: list[Slot], data: list[torch.Tensor]):
        device = data[0].device
        self.words, self._stream = torch.zeros(len(slots) + 1, dtype=torch.int32, device=device), streams.current(device)
        self._what, self._prints, first = _what(slots, data), Prints(launcher, slots, data, None), self.words.data_ptr()
        steps = [step(slot.codec.geometry, slot.frame.data_ptr(), slot.frame.numel(), 1, -1, first + 4 * i,
                      offset=x.data_ptr() // x.element_size()) for i, (slot, x) in enumerate(zip(slots, data, strict=True))]
        words = max(workspace_words(1, slot.codec.geometry) for slot in slots)
        self._plan = launcher.launch_calls.plan(steps, [], (0, 0, 0), launcher.workspace(device.index or 0, self._stream, words),
                                                self._stream, self._stream, 0, 0)
        self._kept = [slot.frame for slot in slots]
        for frame in self._kept:
            streams.keep(frame)

    @staticmethod
    def can(slots: list[Slot], data: list[torch.Tensor]) -> bool:
        """What has a frame already, where the kernels can write."""
        return all([slot.frame is not None and slot.frame.numel() == slot.codec.frame_bytes and slot.frame.data_ptr() % FRAME_ALIGN == 0
                    for slot in slots]) and Prints.can(slots, data)

    def is_of(self, slots: list[Slot], data: list[torch.Tensor]) -> bool:
        return streams.current(self.words.device) == self._stream and _what(slots, data) == self._what

    def run(self) -> None:
        self.words.zero_()
        self._plan.begin(0, 0, 0)
        self._prints.make()


def _what(slots: list[Slot], data: list[torch.Tensor]) -> list[tuple]:
    return [(slot, slot.codec.geometry, slot.frame.data_ptr(), slot.print.data_ptr(), x.data_ptr(), x.numel())
            for slot, x in zip(slots, data, strict=True)]


def launcher_of(runtime, device: torch.device):
    """The kernels of ``runtime``'s for ``device``, where C and addresses can launch them (kernels/ops.py); None elsewhere."""
    if device.type != "cuda" or runtime.config.integrity != "off" or not PREPARED:
        return None
    return ops.kernel_set(runtime.kernels["cuda"]).launcher
