"""The flight: everything one zipped call needs, made once for calls of one kind."""
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.format import OVERFLOW_BIT, SPILL_SHIFT, spill_need_bytes
from ds_zipccl.collectives import nccl_direct, streams, transport
from ds_zipccl.collectives.capacity import Capacity, Need
from ds_zipccl.collectives.payload_watch import WATCH
from ds_zipccl.collectives.plans import Plan, Recipe
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.words import Words
from ds_zipccl.kernels import launch_calls, ops

NO_MAIL = 0, 0
WORDS_FIRST = True          # before the payload: it takes the words many times as long to come through beside one


class Flight:
    """A call in flight: its frames, kernels bound to them, status words. Used by one call after another of one kind and layout on one
    stream; the workspace keeps it in between.

    ``launch``: launch.Launch, of all calls of the collective on the group.

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
    is_for_all = True                               # its words are everyone's, and ``post_words`` as it is here
    payload_work: dist.Work | None = None           # None: it was not torch's to launch, and comes before ``filled``
    raw_bytes = wire_bytes = 0
    launched_at = looked_at = 0.0                   # of a payload without torch: payload_watch.py

    def __init__(self, call: Call, launch):
        self.launch, self.device, self.rank, self.world_size = launch, launch.device, call.rank, call.world_size
        self.channel = None                         # for payloads: of the call's group, which nothing here keeps alive
        self.stream = streams.current(self.device)
        self.num_bytes, self._taken = 0, []
        self.status = torch.empty(1, dtype=torch.int32, device=self.device)          # encode sets it
        self.windows = launch.windows()
        self.key: tuple | None = None               # under which the workspace keeps it
        self.needs: tuple[Need, ...] = ()           # of the call's classes
        self.rooms: tuple[tuple[Capacity, int], ...] = ()           # the classes, and the room that it was made for
        self.call: Call | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.store: Callable[[], None] | None = None
        self.op = ""
        self.resent = False
        self.ended: streams.Mark | None = None     # where its last call ended, if that was on another stream
        self._copied = streams.Mark(self.device)    # what was queued beside the payload
        self.filled = streams.Mark(self.device)     # what was queued early
        self.is_early = self._sent_again = False
        self.recipe: Recipe | None = None           # of what can be prepared; the constructor's to give
        self._plan: Plan | None = None
        self._goes_by_plan = False
        self.repeat: launch_calls.Repeat | None = None              # of its plan
        self._is_repeated = False                                   # its last call went by that, and ended without a resend

    # What payload_watch.py asks.

    @property
    def timeout_s(self) -> float:
        """The group's."""
        return self.launch.side.timeout.total_seconds()

    @property
    def where(self) -> str:
        return f"{self.launch.spec.name}, {self.launch.side.where}"

    # What constructors use.

    def take_bytes(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] from the workspace."""
        buffer = self.launch.workspace.take(num_bytes, self.device)
        self._taken.append(buffer)
        self.num_bytes += buffer.whole.numel()
        if buffer.whole.is_cuda and self.launch.may_be_early:           # whatever becomes of this call: not free before that
            buffer.whole.record_stream(self.launch.state.decode_stream)
            if self.launch.launcher is not None:
                buffer.whole.record_stream(self.launch.state.payload_stream)
        return buffer.data

    def take_frames(self, codec: Codec, num_rows: int) -> torch.Tensor:
        """Frames [num_rows, frame_bytes], the same way."""
        return self.take_bytes(num_rows * codec.frame_bytes).view(num_rows, codec.frame_bytes)

    def encoder(self, codec: Codec, frames: torch.Tensor, skip: int = -1, offset: int = 0, status: torch.Tensor | None = None,
                phase: str = ""):
        """``Codec.encoder``, with this rank's given window where the configuration wants one; what is decoded needs no such thing."""
        windows, status = self.windows, self.status if status is None else status
        if windows is None:
            return codec.encoder(frames, status, skip, offset)

        def encode(x: torch.Tensor) -> None:
            rows = ops.rows_of(x, offset, frames.shape[0], codec.geometry)
            windows.codec(codec, rows, phase).encode(rows, frames, status, skip)

        return encode

    def everyones_words(self) -> Words:
        """For every rank's status word on every rank."""
        return Words(torch.empty(self.world_size, dtype=torch.int32, device=self.device), self.launch.state)

    # A call's life.

    def begin(self, call: Call) -> None:
        """Launches ``call``."""
        self.call, self.resent, self.channel, self._is_repeated = call, False, transport.direct(call.group, self.device), False
        self._sent_again, self.launched_at = False, self.looked_at
        if self.ended is not None:
            self.join_ended()
        self.prepare(call)
        if self.recipe is not None and self._begin_by_plan(call):
            return
        self._goes_by_plan = False
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

    def _begin_by_plan(self, call: Call) -> bool:
        """The same where all is prepared; False: it cannot be for this call."""
        launch, plan = self.launch, self._plan
        if launch.launcher is None or self.key is None or streams.current_device() != self.device.index:
            return False
        if plan is None:
            if not self.recipe.is_aligned():
                return False
            plan = self._plan = Plan(
                self.recipe, launch.launcher, call.input, call.output, self.status, launch.state.decode_stream, self.filled,
                launch.state.payload_stream if nccl_direct.returns_when_queued(self.channel) else None)
            if plan.sends:
                WATCH.add(self)
        x, out = call.input.data_ptr(), call.output.data_ptr()
        if not plan.suits(x, out):
            return False
        posted = self.post_words()
        communicator = nccl_direct.handle(self.channel) if plan.sends and posted is not None else 0
        if communicator:
            self.launched_at = time.monotonic()
            plan.call(communicator, x, out, *posted, plan.fills)
            self.is_early = self._goes_by_plan = True
            if not plan.fills:
                with streams.On(launch.state.decode_stream):
                    self.queue_early(call)
                plan.end(x, out)
            self.filled.stream = plan.decode_stream
            return True
        plan.begin(x, *(posted or NO_MAIL))
        if posted is None:
            self.send_words()
        work = self.payload_work = self.send(call)
        if posted is None:
            self.words.fetch()
        if plan.copies:
            plan.beside(x, out)
        self.is_early = self._goes_by_plan = True
        with streams.On(launch.state.decode_stream):
            work.wait()
            if not plan.fills:
                self.queue_early(call)
        plan.end(x, out)
        self.filled.stream = plan.decode_stream
        return True

    def join_ended(self) -> None:
        """Before anything is queued for the next call: where the last one ended."""
        self.ended.join()
        self.ended = None

    # What repeats.py asks, which queues calls like its last one without ``begin``.

    @property
    def repeats_whole(self) -> bool:
        """Whether its last call was one that ``repeat`` can queue, where the ranks have a mailbox."""
        return self._goes_by_plan and self._plan.sends and self._plan.fills and self.is_for_all and not self.two_phases

    def ready_to_repeat(self, box) -> launch_calls.Repeat | None:
        """``repeat``, made now; None: its next call is one for ``begin``."""
        if self.repeats_whole:
            self.repeat = self._plan.repeat(box.ring())
        return self.repeat

    def repeated(self, call: Call, reading) -> None:
        """``repeat`` has queued ``call``, whose words ``reading`` brings."""
        self.call, self.outputs = call, (call.output,)
        if not self._is_repeated:               # the last one was not like this
            self.store, self.op, self.resent, self.payload_work = None, call.op, False, None
            self._sent_again, self.is_early, self._goes_by_plan, self._is_repeated = False, True, True, True
            self.filled.stream = self._plan.decode_stream
        self.words.posted(reading, 0, 0)
        self.prepare(call)

    def finish_at_once(self, count: int) -> bool:
        """Whether all that remains of a call that ``repeat`` launched on the current stream, with exchange ``count``, was done: the ranks'
        words are there and no frame overflowed."""
        repeat = self.repeat
        if repeat is None or repeat.finish(repeat.address, self.stream, count):
            return False
        self.note(repeat.words)
        self.release()
        return True

    def note(self, words) -> None:
        """``settle`` of words without an overflow."""
        for need in self.needs:
            need.num_bytes = spill_need_bytes(max(words))

    def prepare(self, call: Call) -> None:
        """Before anything of the call is queued."""

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

    def post_words(self) -> tuple[int, int] | None:
        """(address, stamp) of where the encode is to put this rank's word itself, NO_MAIL where it has none; None: they go by
        ``send_words``."""
        return self.launch.side.post_to_all(self.words)

    def on_words(self, words: list[int]) -> None:
        sent_again = self.settle(words)
        if sent_again is not None:
            self._sent_again, self._is_repeated = True, False
            if self.launch.stats is not None:
                self.launch.stats.overflow(self.op, sent_again)
            if self.windows is not None:
                self.windows.forget()               # measured anew for the next call
        if sent_again is not None or self.two_phases:
            self._keep_tensors()

    def look(self, words: list[int]) -> None:
        """What the call needed, for its classes; ``settle`` finds it again."""
        observe(self.needs[0], words)

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
        if not self.is_early and self.payload_work is not None:
            self.payload_work.wait()
        # The driver takes the default stream for that of the current device.
        elif (not self._goes_by_plan or streams.current_device() != self.device.index
              or not self._plan.join(streams.current(self.device))):
            self.filled.join()

    def is_completed(self) -> bool:
        return self.filled.passed if self.is_early or self.payload_work is None else self.payload_work.is_completed()

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
            self.ended = streams.Mark(self.device)
            self.ended.set()
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


def largest_word(words: torch.Tensor) -> torch.Tensor:
    """int32 [1] of what ``observe`` reads, the largest of ``words`` in each field."""
    spill, overflow = (words >> SPILL_SHIFT).amax(), (words & OVERFLOW_BIT).amax()
    return (spill << SPILL_SHIFT | overflow).to(torch.int32).view(1)


def observe(need: Need, words: list[int]) -> bool:
    """Fills in the need of a call whose status words these are; returns whether it must be sent again."""
    need.overflow = any([word & OVERFLOW_BIT for word in words])
    need.num_bytes = spill_need_bytes(max(words))                       # the spill need is in the highest bits
    return need.overflow
