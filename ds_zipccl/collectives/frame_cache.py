"""Frames that are kept as long as the data they hold stays the same, for one group of ranks.

A *slot* is one rank's shard of a tensor that all ranks hold a shard of. Two things are known of it. Agreed, the same on every rank: whether
it has a frame and in which layout; that changes in ``refresh`` alone, where all stale slots are encoded and one exchange of status words
says what fits everywhere. Local: whether this rank's frame is current; where it is not, it is made again in the agreed layout before it is
sent, and nobody else needs to know. So writers that all ranks carry out call ``changed`` and others ``changed_here``, and neither talks.
"""
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec, split_status
from ds_zipccl.codec.integrity import CODECS
from ds_zipccl.collectives import streams
from ds_zipccl.collectives.cached import MakeOuts, Piece, PieceGather
from ds_zipccl.collectives.cost import ONE_SIDED
from ds_zipccl.collectives.fingerprint import fingerprint, fingerprint_bytes
from ds_zipccl.collectives.frame_batch import Batches, Prints, launcher_of
from ds_zipccl.collectives.frame_guard import Guard
from ds_zipccl.collectives.frame_known import KnownGather
from ds_zipccl.collectives.frame_slot import OP, CacheStats, Slot, place_of
from ds_zipccl.collectives.frame_ways import Ways
from ds_zipccl.collectives.frame_words import Words, read
from ds_zipccl.collectives.launch import STATUS_BYTES
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.symmetric import SymmetricWork
from ds_zipccl.collectives.symmetric_plan import Row
from ds_zipccl.errors import FrameError
from zipscape.errors import describe

log = logging.getLogger("ds_zipccl")
_ANY = object()             # boundary at which nothing is compared


class FrameCache:
    """The slots of one group and device. All ranks of the group add the same slots, and make all calls but ``changed_here``,
    ``free`` and ``close`` in the same order."""

    def __init__(self, runtime: Runtime, group: dist.ProcessGroup, device: torch.device, stats: CacheStats, boundary: Callable[[], int]):
        """``boundary()``: a number that goes up wherever an unannounced write becomes likely (between two forward passes): at their
        first use after it, frames are compared with what they were made of."""
        self.runtime, self.group, self.stats = runtime, group, stats
        self.slots: list[Slot] = []
        self.guard = True
        self.device, self._boundary = device, boundary
        self.pending: tuple | None = None
        # After the last write or encode, and after what a gather last read on its caller's stream; streams that wait for the former.
        self._written, self.read, self._waiting = streams.Mark(device), streams.Mark(device), set()
        self.num_writes = 0                         # announced, or of frames
        self.join_sent: Callable[[], None] | None = None           # the last one-sided gather, whose frames may be on their way still
        self._ways = Ways(runtime, group, device)
        self._launcher = launcher_of(runtime, device)
        self.comparisons = Guard(self.slots, device, self._launcher)
        self._batches, self._words = Batches(self._launcher), Words(device)

    # What frame_known.py asks.

    @property
    def boundary(self):
        """What has been compared at this boundary need not be again."""
        return None if self.runtime.config.integrity == "roundtrip" else self._boundary() if self.guard else _ANY

    def before_gather(self) -> None:
        self.runtime.advance(self.group)
        self.runtime.before_native(self.group, self.device)
        self._wait_for_writes()

    def add(self, slot: Slot) -> None:
        slot.index = len(self.slots)
        self.slots.append(slot)
        self._note_write()

    def changed(self, slots: list[Slot]) -> None:
        """All ranks have new data in these slots, or may have."""
        for slot in slots:
            slot.stale = True
        self._note_write()

    def changed_here(self, slots: list[Slot]) -> None:
        """This rank, and perhaps no other, has new data in these slots, or the old data elsewhere."""
        for slot in slots:
            slot.dirty = True
        self._note_write()

    def free(self) -> None:
        """Gives this rank's frames back to the allocator; they are made again when they are needed."""
        for slot in self.slots:
            slot.frame, slot.dirty = None, True
            self._hold(slot, 0)
        self._ways.forget()
        self._batches.forget()

    def close(self) -> None:
        """Drops everything."""
        if self.pending is not None:
            self.pending[-1].wait()                # who ends the group's channels must find nothing in flight
        self.free()
        self.pending = self.join_sent = self._ways.transport = None
        self.slots = []

    # -- made together, agreed once

    def refresh(self) -> None:
        """Encodes the stale slots and launches the exchange of their status words: nothing waits here. Call it where all data has just
        changed, far ahead of the next gather. Slots that were not gathered since they were last encoded lose their frames."""
        self.settle()                               # what it says of a slot must not come after its drop
        for slot in self.slots:
            if slot.stale and slot.eligible and not slot.used:
                self._drop(slot, "not_gathered")
        self._refresh([slot for slot in self.slots if slot.used])

    def _refresh(self, slots: list[Slot]) -> None:
        self.settle()
        stale = [slot for slot in slots if slot.stale and slot.eligible and not self._left_out(slot)]
        if not stale:
            return
        self.runtime.advance(self.group)            # messages are in the same order on every rank's side channel
        reserved = [(slot, codec) for slot in stale if (codec := self._reserve(slot)) is not None]
        kept = {slot for slot, _ in reserved}
        words = self._words.begin(len(self.slots), [slot.index for slot in stale if slot not in kept])
        done = self._encode_at_once(reserved, words)
        for slot, codec in reserved:
            if slot not in done:
                self._encode(slot, codec, words[slot.index:slot.index + 1])
            slot.room = slot.capacity.spill_per_tile, self._ways.level          # with its codec: what fails leaves both
        for slot in stale:
            slot.stale = slot.used = False
        if self.comparisons.tell(words[-1:], self.read):
            self._note_write()
        size = self.group.size()
        table = torch.empty(size * words.numel(), dtype=torch.int32, device=self.device)
        work = self.runtime.state(self.group, self.device).side.all_gather(table, words)
        self.pending = stale, words, table.view(size, -1), work
        self.stats.refreshes += 1
        self.stats.status_bytes += STATUS_BYTES * words.numel() * (size - 1)

    def settle(self) -> None:
        """Waits for the status words of the last refresh, if they have not been read, and applies them: the layouts are agreed then."""
        if self.pending is None:
            return
        (stale, _, table, work), self.pending = self.pending, None
        with torch.cuda.stream(self.runtime.state(self.group, self.device).status_stream):
            work.wait()
            told, mismatches = read(table)
        for slot in stale:
            self._apply(slot, *told[slot.index])
        self.comparisons.raise_for(mismatches)

    def _apply(self, slot: Slot, refused: bool, overflow: bool, need: int) -> None:
        if refused:
            self._drop(slot, "max_cache_bytes")
            return
        slot.capacity.observe(need, overflow)
        if overflow and slot.capacity.calls_left_out:
            self._drop(slot, "incompressible")
            return
        if overflow or slot.reason is not None:
            self._ways.forget(slot)
        slot.codec, slot.reason = self._codec(slot) if overflow else slot.codec, None
        if overflow:                                # now with room for what every rank needs
            dirty, slot.room = slot.dirty, (slot.capacity.spill_per_tile, self._ways.level)
            self._hold(slot, slot.codec.frame_bytes + fingerprint_bytes(slot.numel))
            self._encode(slot, slot.codec, torch.zeros(1, dtype=torch.int32, device=self.device))
            slot.dirty = dirty                      # written here since: the repair looks whether that fits

    def _left_out(self, slot: Slot) -> bool:
        if slot.capacity.next_call() is not None:
            return False
        self._drop(slot, "incompressible")
        slot.stale = False
        return True

    def _drop(self, slot: Slot, reason: str) -> None:
        if slot.codec is not None or slot.frame is not None or slot.reason != reason:
            self._ways.forget(slot)
        self._batches.forget(slot)
        slot.codec = slot.frame = slot.print = None
        slot.reason = reason
        self._hold(slot, 0)

    # -- one slot

    def _codec(self, slot: Slot) -> Codec:
        config = self.runtime.config
        return CODECS[config.integrity].of(slot.dtype, slot.numel, self.device.type, spill_per_tile=slot.capacity.spill_per_tile,
                                           level=self._ways.level, kernels=self.runtime.kernels[self.device.type])

    def _reserve(self, slot: Slot) -> Codec | None:
        """For its next frame, whose memory is counted from now on. None: that would be beyond the bound, and what the slot had is given up
        at once, or all that are made after it would be refused too."""
        room = slot.capacity.spill_per_tile, self._ways.level
        codec = slot.codec if slot.codec is not None and slot.room == room else self._codec(slot)
        wanted = codec.frame_bytes + fingerprint_bytes(slot.numel)
        if self.stats.held_bytes - slot.held_bytes + wanted > self.stats.max_bytes:
            slot.frame, slot.print, slot.dirty = None, None, True           # its layout is agreed until all ranks drop it
            self._hold(slot, 0)
            return None
        self._hold(slot, wanted)
        return codec

    def _hold(self, slot: Slot, num_bytes: int) -> None:
        self.stats.held_bytes, slot.held_bytes = self.stats.held_bytes + num_bytes - slot.held_bytes, num_bytes

    def _data(self, source: torch.Tensor) -> torch.Tensor:
        if source.device == self.device and source.dim() == 1 and not source.requires_grad:
            return source
        return source.detach().to(self.device).view(-1)

    def _encode_at_once(self, slots: list[tuple[Slot, Codec]], words: torch.Tensor) -> dict[Slot, tuple]:
        """As many of these as one batch can make. Which, and where their data are."""
        batch, places = self._batches.of(slots, self._data, words) if self._may_queue() else (None, {})
        if batch is not None:
            self._before_encode()
            batch.run()
            boundary = self._boundary()
            for slot, place in places.items():
                slot.dirty, slot.place, slot.checked = False, place, boundary
            self._note_write()
            self.stats.encodes += len(places)
        return places

    def _may_queue(self) -> bool:
        """Kernels, by address: the device is the current one, and its stream is not captured."""
        return self.device.type != "cuda" or streams.current_device() == self.device.index and not streams.is_capturing()

    def _before_encode(self) -> None:
        self._wait_for_writes()
        self.read.join()
        if self.join_sent is not None:
            self.join_sent()

    def _encode(self, slot: Slot, codec: Codec, status: torch.Tensor) -> None:
        if slot.codec is None or slot.codec is not codec and slot.codec != codec:
            self._ways.forget(slot)
        if slot.frame is None or slot.frame.numel() != codec.frame_bytes:
            self._ways.forget(slot)
            slot.frame = torch.empty(codec.frame_bytes, dtype=torch.uint8, device=self.device)
        self._before_encode()
        source = slot.source()
        data = self._data(source)
        codec.encode(data.view(1, -1), slot.frame.view(1, -1), status)
        slot.codec, slot.dirty, slot.place = codec, False, place_of(source)
        slot.checked = self._boundary()
        found = fingerprint(data)
        if slot.print is not None and slot.print.numel() == found.numel():
            slot.print.copy_(found)                 # where it lies is known (frame_batch.py)
        else:
            self._ways.forget(slot)
            slot.print = found
        self._used_here(slot.frame)
        self._note_write()
        self.stats.encodes += 1

    def _bring_up_to_date(self, slot: Slot, source: torch.Tensor, way: str) -> None:
        """Makes this rank's frame again if it isn't of the slot's present data, for a gather that goes ``way``."""
        place = place_of(source)
        known = slot.dirty or slot.place[:2] != place[:2]
        if not known and slot.place == place and self._unchanged(slot, source):
            return
        self.stats.repairs += 1
        if not known:
            self.stats.unknown_writes += 1
            log.warning("%s was changed by a writer that ds_zipccl does not know; its frame was made again", slot.name)
        status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._hold(slot, slot.codec.frame_bytes + fingerprint_bytes(slot.numel))
        self._encode(slot, slot.codec, status)
        if not split_status(int(status))[0]:
            return
        slot.dirty = True
        if way != ONE_SIDED:                        # it is sent all the same: other ranks find it overflowed, and raise too
            raise FrameError(describe(
                "what one rank has written does not fit into the frame that the ranks agreed on", where=slot.name,
                got=f"rank {self.group.rank()} of the group wrote it outside of optimizer.step",
                todo="write it on all ranks with GatheredParameters(modifier_rank=...), or set cache_params to false"))

    def _unchanged(self, slot: Slot, source: torch.Tensor) -> bool:
        if self.runtime.config.integrity == "roundtrip":
            data = self._data(source)
            again = torch.empty_like(data)
            slot.codec.decode(slot.frame.view(1, -1), again.view(1, -1))
            return torch.equal(again.view(torch.uint8), data.view(torch.uint8))
        if not self.guard or slot.checked == self._boundary():
            return True
        slot.checked = self._boundary()
        return self.comparisons.unchanged(slot, self._data(source))

    def compare(self, prints: Prints, slots: list[Slot], boundary: int) -> bool:
        """With what ``guard.all_at_once`` gave. False: not now, nothing has happened."""
        if not self._may_queue():
            return False
        self.comparisons.compare(prints)
        self.read.set()
        for slot in slots:
            slot.checked = boundary
        return True

    # -- gathered

    def gather(self, slots: list[Slot], make_outs: MakeOuts,
               bases: list[torch.Tensor] | None = None) -> PieceGather | SymmetricWork | None:
        """Launches the gather of these slots on the current stream: its ``wait()`` makes the outputs ready on the then current one. None
        (counted with its reason): gather them without frames.

        ``bases``: the tensors that the slots' data are parts of; then such a gather may be ``known`` the next time, whose outputs are
        those that the made ones are parts of, each once, in their order."""
        self.settle()
        way, reason = self._ways.choose(slots)
        if reason is None and any(slot.stale and slot.eligible for slot in slots):
            self._refresh([slot for slot in self.slots if slot.reason != "not_gathered" or slot in slots])
            self.settle()
            way, reason = self._ways.choose(slots)
        if reason is not None:
            for slot in slots:
                self.stats.bypassed[reason if slot.may_have_frame else slot.reason] += 1
            return None
        self.before_gather()
        sources, self.comparisons.has_compared = [slot.source() for slot in slots], False
        boundary, failure = self.boundary, None
        try:
            for slot, source in zip(slots, sources, strict=True):
                # Most are as they were, which costs no more than to see it.
                if slot.codec is not None and (boundary is None or boundary is not _ANY and slot.checked != boundary or slot.dirty
                                               or slot.place != place_of(source)):
                    self._bring_up_to_date(slot, source, way)
        except FrameError as error:
            failure = error
        gather, row = self._launch(slots, sources, make_outs, way, bases)
        if way != ONE_SIDED or self.comparisons.has_compared:
            self.read.set()
        if way != ONE_SIDED:                        # else the transport keeps them
            for slot in slots:
                self._used_here(slot.frame)
        if failure is not None:
            raise failure
        self._count(slots, row, way)
        return gather

    def known(self, slots: list[Slot]) -> KnownGather | None:
        """To launch gathers of these slots like the last one."""
        return self._ways.known_gather(slots)

    def _launch(self, slots: list[Slot], sources: list[torch.Tensor], make_outs: MakeOuts, way: str,
                bases: list[torch.Tensor] | None) -> tuple[PieceGather | SymmetricWork, int]:
        """(the gather, how many bytes it sends to each peer)"""
        if way == ONE_SIDED:
            self.runtime.state(self.group, self.device).settle()            # resends must be queued before what waits for peers
            kinds, arranged = self._ways.rows(slots)
            outs = make_outs()
            parts = [Row(self._data(source), out, kind[0], s.frame, kind[2])
                     for s, source, out, kind in zip(slots, sources, outs, kinds, strict=True) if s.numel]
            gather = self._ways.transport.gather_rows(parts, arranged)
            self.join_sent, num_bytes = gather.join, gather.sent_bytes
        else:
            parts = [Piece(self._data(source), s.frame, s.codec) for s, source in zip(slots, sources, strict=True)]
            outs = make_outs() if bases is not None and self._launcher is not None and self._ways.is_to_be_known(slots, way) else None
            gather = PieceGather(parts, make_outs if outs is None else lambda: outs, self.group, self.runtime.workspace)
            num_bytes = gather.row_bytes * (self.group.size() - 1)
        if bases is not None:
            self._ways.know(self, slots, bases, way, parts, outs, self._launcher, num_bytes)
        return gather, num_bytes // (self.group.size() - 1)

    def _count(self, slots: list[Slot], row: int, way: str) -> None:
        stats, others = self.stats, self.group.size() - 1
        raw = sum(slot.raw_bytes for slot in slots) * others
        for slot in slots:
            slot.used = True
            if slot.codec is None:
                stats.bypassed[slot.reason] += 1
        stats.gathers, stats.one_sided = stats.gathers + 1, stats.one_sided + (way == ONE_SIDED)
        stats.shards += sum(slot.codec is not None for slot in slots)
        stats.raw_bytes, stats.wire_bytes = stats.raw_bytes + raw, stats.wire_bytes + row * others
        if self._ways.against is not None:
            self.runtime.stats.not_one_sided(OP, self._ways.against)
        self.runtime.stats.zipped(OP, raw, row * others, one_sided=way == ONE_SIDED)

    # -- streams

    def _note_write(self) -> None:
        self.num_writes += 1
        self._written.set()
        self._waiting.clear()

    def _used_here(self, tensor: torch.Tensor | None) -> None:
        """Dropping it must wait for what is queued now: frames are made, sent and compared on different streams."""
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def _wait_for_writes(self) -> None:
        stream = streams.current(self.device)
        if stream not in self._waiting:
            self._written.join()
            self._waiting.add(stream)
