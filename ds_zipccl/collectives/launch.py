"""What a collective works with while it is launched, and the flight: everything one call needs, made once for calls of one kind."""
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import OVERFLOW_BIT, SPILL_SHIFT, layout, spill_need_bytes
from ds_zipccl.codec.integrity import CODECS
from ds_zipccl.collectives import streams, switch, transport
from ds_zipccl.collectives.capacity import Capacity, Need
from ds_zipccl.collectives.registry import Call, CollectiveSpec
from ds_zipccl.collectives.windows import LaunchWindows
from ds_zipccl.collectives.words import Words
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import ops
from ds_zipccl.stats import Stats

STATUS_BYTES = 4
WORDS_FIRST = True          # before the payload: it takes the words many times as long to come through beside one
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
    ``memo``: for the collective's own use."""
    __slots__ = ("spec", "launch", "state", "shapes", "classes", "memo")

    def __init__(self, spec: CollectiveSpec, launch: Launch):
        self.spec, self.launch, self.state, self.shapes, self.classes, self.memo = spec, launch, launch.state, None, None, None


class Flight:
    """A call in flight: its frames, kernels bound to them, status words. Used by one call after another of one kind and layout on one
    stream; the workspace keeps it in between.

    A collective makes these of it: the constructor, which takes shapes from ``call`` and nothing else; ``encode``; ``send``, which queues
    the payload and returns its Work; ``beside``, for what need not wait for it; ``settle(words)``, called once the status words are known,
    in launch order: it keeps the capacities, sends again what overflowed and returns the bytes this rank sent again (None: nothing
    overflowed); ``fill``, which fills the output, or what of it a resend has not filled, from the payload. By default one capacity class,
    whose words all ranks see, and ``resend(call)`` for all of it.

    ``fill`` may be queued before the words are known, at launch on a stream of its own (GPU), so that nothing then waits for the host: what
    it writes for a call that overflowed is written again. ``can_fill_early(call)``: whether that harms nothing.
    ``two_phases``: ``settle`` always communicates, not after an overflow alone.
    """
    two_phases = False
    payload_work: dist.Work
    raw_bytes = wire_bytes = 0

    def __init__(self, call: Call, launch: Launch):
        self.launch, self.device, self.rank, self.world_size = launch, launch.device, call.rank, call.world_size
        self.channel = None                         # for payloads: of the call's group, which nothing here keeps alive
        self.stream = streams.current(self.device)
        self.num_bytes, self._taken = 0, []
        self.status = torch.empty(1, dtype=torch.int32, device=self.device)          # encode sets it
        self.windows = launch.windows()
        self.key: tuple | None = None               # under which the workspace keeps it
        self.needs: tuple[Need, ...] = ()           # of the call's classes
        self.call: Call | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.store: Callable[[], None] | None = None
        self.op = ""
        self.resent = False
        self._ended: streams.Mark | None = None     # where its last call ended, if that was on another stream
        self._copied = streams.Mark(self.device)    # what was queued beside the payload
        self.filled = streams.Mark(self.device)     # what was queued early
        self.is_early = self._sent_again = False

    # What constructors use.

    def take_bytes(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] from the workspace."""
        buffer = self.launch.workspace.take(num_bytes, self.device)
        self._taken.append(buffer)
        self.num_bytes += buffer.whole.numel()
        if buffer.whole.is_cuda and self.launch.may_be_early:           # whatever becomes of this call: not free before that
            buffer.whole.record_stream(self.launch.state.decode_stream)
        return buffer.data

    def take_frames(self, codec: Codec, num_rows: int) -> torch.Tensor:
        """Frames [num_rows, frame_bytes], the same way."""
        return self.take_bytes(num_rows * codec.frame_bytes).view(num_rows, codec.frame_bytes)

    def encoder(self, codec: Codec, frames: torch.Tensor, skip: int = -1, offset: int = 0, status: torch.Tensor | None = None):
        """``Codec.encoder``, with this rank's given window where the configuration wants one; what is decoded needs no such thing."""
        windows, status = self.windows, self.status if status is None else status
        if windows is None:
            return codec.encoder(frames, status, skip, offset)

        def encode(x: torch.Tensor) -> None:
            rows = ops.rows_of(x, offset, frames.shape[0], codec.geometry)
            windows.codec(codec, rows).encode(rows, frames, status, skip)

        return encode

    def everyones_words(self) -> Words:
        """For every rank's status word on every rank."""
        return Words(torch.empty(self.world_size, dtype=torch.int32, device=self.device), self.launch.state)

    # A call's life.

    def begin(self, call: Call) -> None:
        """Launches ``call``."""
        self.call, self.resent, self.channel = call, False, transport.direct(call.group, self.device)
        self._sent_again = False
        if self._ended is not None:
            self._ended.join()
            self._ended = None
        self.encode(call)
        if WORDS_FIRST:
            self.send_words()
            self.payload_work = self.send(call)
        else:
            self.payload_work = self.send(call)
            self.send_words()
        self.words.fetch()
        self.is_early = self.launch.may_be_early and self.can_fill_early(call)
        if not self.is_early:
            self.beside(call)
            return
        with streams.On(self.launch.state.decode_stream):
            self.words.after_encode()
            self.beside(call)
            self.payload_work.wait()
            self.queue_early(call)
            self.filled.set()

    def encode(self, call: Call) -> None:
        raise NotImplementedError

    def send(self, call: Call) -> dist.Work:
        raise NotImplementedError

    def beside(self, call: Call) -> None:
        pass

    def can_fill_early(self, call: Call) -> bool:
        """A resend needs the input as it was."""
        return not any([overlap(out, t) for out in call.outputs for t in call.inputs])

    def queue_early(self, call: Call) -> None:
        self.fill(call)

    def send_words(self) -> None:
        """Every rank's word to every rank. What is queued on the current stream after this does not delay them."""
        self.words.exchange(self.launch.side.gather_words, self.status)

    def on_words(self, words: list[int]) -> None:
        sent_again = self.settle(words)
        if sent_again is not None:
            self._sent_again = True
            if self.launch.stats is not None:
                self.launch.stats.overflow(self.op, sent_again)
            if self.windows is not None:
                self.windows.forget()               # measured anew for the next call
        if sent_again is not None or self.two_phases:
            self._keep_tensors()

    def settle(self, words: list[int]) -> int | None:
        self.resent = observe(self.needs[0], words)
        if not self.resent:
            return None
        self.after_early()
        self.resend(self.call)
        return self.raw_bytes

    def after_early(self) -> None:
        """What is queued on the current stream from now on comes after what was queued early."""
        if self.is_early:
            self.filled.join()

    # What ``work.Pending`` asks of the Work that brings the payload: here with what was queued early.

    def wait(self) -> None:
        if self.is_early:
            self.filled.join()
        else:
            self.payload_work.wait()

    def is_completed(self) -> bool:
        return self.filled.passed if self.is_early else self.payload_work.is_completed()

    def finish(self) -> None:
        """Fills the output."""
        if not self.is_early:
            self._copied.join()
        if not self.resent and (self._sent_again or not self.is_early):
            self.fill(self.call)
        if self.store is not None:
            self.store()
        if not self.is_early or self._sent_again or streams.current(self.device) != self.stream:
            self._keep_tensors()                    # else nothing of ours runs here, and who launched is in charge, as natively

    def _keep_tensors(self) -> None:
        """The user's may have been allocated on another stream than the current one."""
        if self.device.type == "cuda":
            call = self.call
            for t in call.inputs if call.input is call.output else (*call.inputs, *call.outputs):
                streams.keep(t)
            if self.outputs is not call.outputs:
                for t in self.outputs:
                    streams.keep(t)

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keeps the memory of tensors until the current stream, which may not be the one they were allocated on, is done with them. Not for
        what ``take_bytes`` gave."""
        for t in tensors:
            streams.keep(t)

    def release(self) -> None:
        """All that uses it is queued on the current stream, or on streams that this one waits for."""
        self.call, self.channel, self.payload_work, self.outputs, self.store = None, None, None, (), None
        workspace = self.launch.workspace
        if self.key is None:
            for buffer in self._taken:
                workspace.give(buffer)
            return
        if streams.current(self.device) != self.stream:
            self._ended = streams.Mark(self.device)
            self._ended.set()
            for buffer in self._taken:
                streams.keep(buffer.whole)
        workspace.give_flight(self.key, self)

    # For what ``start`` copies beside the payload.

    @staticmethod
    def lies_there(output: torch.Tensor, offset: int, data: torch.Tensor) -> bool:
        return output.data_ptr() + offset * output.element_size() == data.data_ptr()

    def copy_own(self, output: torch.Tensor, offset: int, data: torch.Tensor) -> None:
        """This rank's piece, unless it lies there already: while the payload is on its way."""
        if not self.lies_there(output, offset, data):
            streams.copy(output, offset, data)
            if not self.is_early:
                self._copied.set()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors may share memory."""
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes


def frames_bytes(dtype: torch.dtype, numel: int, count: int, first_spill: float = 0.0) -> int:
    """``count`` frames of ``numel`` elements with the room of a new class, and their status words."""
    spill = Capacity.of(numel, dtype.itemsize, first_spill).spill_per_tile
    return count * (layout(BY_TORCH[dtype], numel, spill_per_tile=spill).frame_bytes + STATUS_BYTES)


def largest_word(words: torch.Tensor) -> torch.Tensor:
    """int32 [1] of what ``observe`` reads, the largest of ``words`` in each field."""
    spill, overflow = (words >> SPILL_SHIFT).amax(), (words & OVERFLOW_BIT).amax()
    return (spill << SPILL_SHIFT | overflow).to(torch.int32).view(1)


def observe(need: Need, words: list[int]) -> bool:
    """Fills in the need of a call whose status words these are; returns whether it must be sent again."""
    need.overflow = any([word & OVERFLOW_BIT for word in words])
    need.num_bytes = spill_need_bytes(max(words))                       # the spill need is in the highest bits
    return need.overflow


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

    def make() -> Flight:
        flight = spec.flight(call, launch, *[launch.codec(call.dtype, each[2], room) for each, room in zip(arguments, rooms, strict=True)])
        flight.raw_bytes = spec.raw_bytes(call)
        return flight

    flight = ready(kind, launch, rooms, make)
    flight.needs = tuple([capacity.launched() for capacity in classes])
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
