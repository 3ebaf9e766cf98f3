"""What calls of a collective work with while they are launched, and how they are: what one call needs is a flight (flight.py)."""
import os
from collections.abc import Callable

import torch

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import layout
from ds_zipccl.codec.integrity import CODECS
from ds_zipccl.collectives import streams, switch
from ds_zipccl.collectives.capacity import Capacity
from ds_zipccl.collectives.flight import Flight
from ds_zipccl.collectives.registry import Call, CollectiveSpec
from ds_zipccl.collectives.windows import LaunchWindows
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import ops
from ds_zipccl.stats import Stats
from zipscape import environment

STATUS_BYTES = 4
#: Whether what a call queues on a GPU is prepared (plans.py).
PREPARED = environment.is_on("ZIPCCL_PREPARED")
_WAITS_BLOCK = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0")         # Work.wait() of NCCL's holds the host


class Launch:
    """What all calls of one collective on a group share: its channels and capacities, codecs, settings. ``trial``: leaves no trace in the
    capacities and windows."""

    def __init__(self, *, spec: CollectiveSpec, config: ZipcclConfig, choice: str, kernels: str, workspace, state, device: torch.device,
                 stats: Stats | None = None, trial: bool = False):
        self.spec, self.config, self.choice, self.workspace, self.stats = spec, config, choice, workspace, stats
        self.side, self.state, self.device, self.trial = state.side, state, device, trial
        self._kernels, self._gives_windows = kernels, config.window == "sigma" and not trial
        # Kernels with bound functions note nothing of what is decoded early, perhaps from a frame that overflowed.
        self.may_be_early = device.type == "cuda" and config.integrity == "off" and not _WAITS_BLOCK and (
            ops.kernel_set(kernels).bind_decode is not None)
        self.launcher = ops.kernel_set(kernels).launcher if PREPARED and self.may_be_early and not self._gives_windows else None

    @property
    def bulk(self):
        """The channel for resends."""
        return self.state.bulk

    def capacity(self, op: str, dtype: torch.dtype, row_numel: int, first_spill: float) -> Capacity:
        """The class of such calls on the group; rows of ``row_numel`` elements."""
        if self.trial:
            return Capacity.of(row_numel, dtype.itemsize, first_spill)
        return self.up_to_date(self.state.capacity(op, dtype, row_numel, first_spill))

    def pair_capacity(self, op: str, peer: int, outgoing: bool, dtype: torch.dtype, numel: int, first_spill: float) -> Capacity:
        """The class of what goes to or comes from ``peer``; before it is asked for room it must be brought ``up_to_date``."""
        if self.trial:
            return Capacity.of(numel, dtype.itemsize, first_spill)
        return self.state.pair_capacity(op, peer, outgoing, dtype, numel, first_spill)

    def up_to_date(self, capacity: Capacity) -> Capacity:
        """Waits for status words that the class's next call must not go without."""
        capacity.given_windows = self._gives_windows
        if not self.trial:
            self.state.bring_up_to_date(capacity)
        return capacity

    def windows(self) -> LaunchWindows | None:
        """For one flight: the given windows of what it encodes, where the configuration wants them."""
        return LaunchWindows(self.state.windows, self.spec.name, self.spec.pairwise) if self._gives_windows else None

    def slower_pair(self, dtype: torch.dtype, numel: int, world_size: int) -> str | None:
        """The reason why a piece of ``numel`` elements goes raw that would be zipped if the switch had not found that slower."""
        if self.trial or self.choice == "always" or switch.choose_pair(self.state, dtype, numel, world_size, self.config.level):
            return None
        return "native_is_faster"

    def codec(self, dtype: torch.dtype, numel: int, spill_per_tile: int) -> Codec:
        level = BY_TORCH[dtype].level(self.config.level)
        return CODECS[self.config.integrity].of(dtype, numel, self.device.type, spill_per_tile=spill_per_tile, level=level,
                                                kernels=self._kernels)


class Kind:
    """Calls that differ in their tensors' places and contents alone, on one group: that they can be zipped was found out once.
    ``shapes``: of (output, input), where they matter too. ``classes``: the arguments of ``GroupState.capacity`` for each class of theirs.
    ``choice``: how the switch found the last one to be zipped. ``memo``: for the collective's own use."""
    __slots__ = ("spec", "launch", "state", "on_gpu", "shapes", "classes", "choice", "memo")

    def __init__(self, spec: CollectiveSpec, launch: Launch):
        self.spec, self.launch, self.state, self.on_gpu = spec, launch, launch.state, launch.device.type == "cuda"
        self.shapes = self.classes = self.choice = self.memo = None


def frames_bytes(dtype: torch.dtype, numel: int, count: int, first_spill: float = 0.0) -> int:
    """``count`` frames of ``numel`` elements with the room of a new class, and their status words."""
    spill = Capacity.of(numel, dtype.itemsize, first_spill).spill_per_tile
    return count * (layout(BY_TORCH[dtype], numel, spill_per_tile=spill).frame_bytes + STATUS_BYTES)


def start(spec: CollectiveSpec, call: Call, launch: Launch, kind: Kind | None = None) -> Flight | str:
    """Launches a call, or returns the reason why it must go native. ``kind``: its kind, if another such call may come."""
    if spec.start is not None:
        return spec.start(spec, call, launch, kind)
    arguments = None if kind is None else kind.classes
    if arguments is None:
        numel = spec.row_numel(call)
        arguments = [(name, call.dtype, numel, spec.first_spill) for name in (spec.classes or (call.op,))]
        if kind is not None:
            kind.classes = arguments
    if spec.flight.two_phases:
        launch.state.settle()           # its second phase and what was sent again before have one order on every rank
    classes = tuple([launch.capacity(*each) for each in arguments])
    rooms = tuple([capacity.next_call() for capacity in classes])
    if None in rooms:
        return "incompressible"
    if launch.device.type == "cuda":
        launch.state.connect()

    def make() -> Flight:
        flight = spec.flight(call, launch, *[launch.codec(call.dtype, each[2], room) for each, room in zip(arguments, rooms, strict=True)])
        flight.raw_bytes = spec.raw_bytes(call)
        return flight

    flight = ready(kind, launch, rooms, make)
    flight.needs, flight.rooms = tuple([capacity.launched() for capacity in classes]), tuple(zip(classes, rooms, strict=True))
    flight.begin(call)
    return flight


def ready(kind: Kind | None, launch: Launch, rooms: tuple, make: Callable[[], Flight | None]) -> Flight | None:
    """An idle flight of the kind with this room in its sub-pools, or a new one."""
    key = None if kind is None else (kind, streams.current(launch.device), rooms)
    flight = None if key is None else launch.workspace.take_flight(key)
    if flight is None:
        with torch.inference_mode(False):           # it may serve other modes later
            flight = make()
        if flight is not None:
            flight.key = key
    return flight
