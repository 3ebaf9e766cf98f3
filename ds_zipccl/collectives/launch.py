"""What a collective works with while it is launched, and the launch that most of them share: one layout for all ranks."""
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import OVERFLOW_BIT, SPILL_SHIFT, layout, spill_need_bytes
from ds_zipccl.codec.integrity import CODECS
from ds_zipccl.collectives import streams, switch
from ds_zipccl.collectives.capacity import Capacity
from ds_zipccl.collectives.registry import Call, CollectiveSpec
from ds_zipccl.collectives.windows import LaunchWindows
from ds_zipccl.config import ZipcclConfig

STATUS_BYTES = 4


@dataclass
class Started:
    """A call whose payload and status words are queued.

    ``words`` int32: the status words this rank waits for, ``status_work`` fills them. ``on_words(words)`` is called once they are known,
    in launch order: it keeps the capacities, sends again what overflowed and returns the bytes this rank sent again (None: nothing
    overflowed).
    ``finish()`` fills the output (or what of it a resend has not filled) after ``payload_work``. ``two_phases``: ``on_words`` always
    communicates, not after an overflow alone.
    """
    words: torch.Tensor
    status_work: dist.Work
    payload_work: dist.Work
    on_words: Callable[[list[int]], int | None]
    finish: Callable[[], None]
    raw_bytes: int
    wire_bytes: int
    two_phases: bool = False


class Launch:
    """The group's channels and capacities, frames from the workspace, codecs. ``trial``: leaves no trace in the capacities and windows."""

    def __init__(self, *, spec: CollectiveSpec, config: ZipcclConfig, choice: str, kernels: str, workspace, state, device: torch.device,
                 trial: bool = False):
        self.config, self.choice, self.side, self.state, self.device, self.trial = config, choice, state.side, state, device, trial
        self.status = torch.empty(1, dtype=torch.int32, device=device)          # encode sets it
        self._kernels, self._workspace, self._taken = kernels, workspace, []
        self._windows = LaunchWindows(state.windows, spec.name, spec.pairwise) if config.window == "sigma" and not trial else None

    @property
    def bulk(self):
        """The channel for resends."""
        return self.state.bulk

    def capacity(self, op: str, dtype: torch.dtype, row_numel: int, first_spill: float) -> Capacity:
        """The class of such calls on the group; rows of ``row_numel`` elements."""
        if self.trial:
            return Capacity.of(row_numel, dtype.itemsize, first_spill)
        return self._told(self.state.capacity(op, dtype, row_numel, first_spill))

    def pair_capacity(self, op: str, peer: int, outgoing: bool, dtype: torch.dtype, numel: int, first_spill: float) -> Capacity:
        """The class of what goes to or comes from ``peer``."""
        if self.trial:
            return Capacity.of(numel, dtype.itemsize, first_spill)
        return self._told(self.state.pair_capacity(op, peer, outgoing, dtype, numel, first_spill))

    def _told(self, capacity: Capacity) -> Capacity:
        capacity.given_windows = self._windows is not None
        return capacity

    def slower_pair(self, dtype: torch.dtype, numel: int, world_size: int) -> str | None:
        """The reason why a piece of ``numel`` elements goes raw that would be zipped if the switch had not found that slower."""
        if self.trial or self.choice == "always" or switch.choose_pair(self.state, dtype, numel, world_size, self.config.level):
            return None
        return "native_is_faster"

    def codec(self, dtype: torch.dtype, numel: int, spill_per_tile: int) -> Codec:
        level = BY_TORCH[dtype].level(self.config.level)
        return CODECS[self.config.integrity].of(dtype, numel, self.device.type, spill_per_tile=spill_per_tile, level=level,
                                                kernels=self._kernels)

    def take_bytes(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] that go back to the workspace when the call is finished."""
        buffer = self._workspace.take(num_bytes, self.device)
        self._taken.append(buffer)
        return buffer.data

    def take_frames(self, codec: Codec, num_rows: int) -> torch.Tensor:
        """Frames [num_rows, frame_bytes], the same way."""
        return self.take_bytes(num_rows * codec.frame_bytes).view(num_rows, codec.frame_bytes)

    def encode(self, codec: Codec, rows: torch.Tensor, frames: torch.Tensor, skip: int = -1) -> None:
        """With this rank's given window where the configuration wants one; what is decoded needs no such thing."""
        if self._windows is not None:
            codec = self._windows.codec(codec, rows)
        codec.encode(rows, frames, self.status, skip)

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keeps the memory of tensors until the current stream, which may not be the one they were allocated on, is done with them. Not for
        what ``take_bytes`` gave."""
        for t in tensors:
            streams.keep(t)

    def forget_windows(self) -> None:
        """After an overflow: given windows are measured anew for the next call."""
        if self._windows is not None:
            self._windows.forget()

    def release(self) -> None:
        for buffer in self._taken:
            self._workspace.give(buffer)


def frames_bytes(dtype: torch.dtype, numel: int, count: int, first_spill: float = 0.0) -> int:
    """``count`` frames of ``numel`` elements with the room of a new class, and their status words."""
    spill = Capacity.of(numel, dtype.itemsize, first_spill).spill_per_tile
    return count * (layout(BY_TORCH[dtype], numel, spill_per_tile=spill).frame_bytes + STATUS_BYTES)


def everyones_words(call: Call, launch: Launch) -> tuple[torch.Tensor, dist.Work]:
    """Every rank's status word on every rank."""
    words = torch.empty(call.world_size, dtype=torch.int32, device=launch.device)
    return words, launch.side.all_gather(words, launch.status)


def largest_word(words: torch.Tensor) -> torch.Tensor:
    """int32 [1] of what ``observe`` reads, the largest of ``words`` in each field."""
    spill, overflow = (words >> SPILL_SHIFT).amax(), (words & OVERFLOW_BIT).amax()
    return (spill << SPILL_SHIFT | overflow).to(torch.int32).view(1)


def observe(capacity: Capacity, words: list[int]) -> bool:
    """Keeps the capacity of a call whose status words these are; returns whether it must be sent again."""
    overflow = any(word & OVERFLOW_BIT for word in words)
    capacity.observe(max(map(spill_need_bytes, words)), overflow)
    return overflow


def start(spec: CollectiveSpec, call: Call, launch: Launch) -> Started | str:
    """Launches a call, or returns the reason why it must go native. Default: all frames have one layout."""
    if spec.start is not None:
        return spec.start(spec, call, launch)
    numel = spec.row_numel(call)
    capacity = launch.capacity(call.op, call.dtype, numel, spec.first_spill)
    spill = capacity.next_call()
    if spill is None:
        return "incompressible"
    codec = launch.codec(call.dtype, numel, spill)
    payload_work, finish = spec.zipped(call, launch, codec)
    words, status_work = (spec.gather_words or everyones_words)(call, launch)
    resent = False

    def on_words(seen: list[int]) -> int | None:
        nonlocal resent
        resent = observe(capacity, seen)
        if not resent:
            return None
        spec.resend(call, launch)
        return spec.raw_bytes(call)

    def finish_unless_resent() -> None:
        if not resent:
            finish()

    wire_bytes = (codec.frame_bytes + STATUS_BYTES) * spec.frames_sent(call)
    return Started(words, status_work, payload_work, on_words, finish_unless_resent, spec.raw_bytes(call), wire_bytes)
