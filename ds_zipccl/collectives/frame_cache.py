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
from ds_zipccl.codec.format import OVERFLOW_BIT, SPILL_MASK, SPILL_SHIFT, SPILL_UNIT_BYTES
from ds_zipccl.codec.integrity import CODECS
from ds_zipccl.collectives import all_gather, switch
from ds_zipccl.collectives.cached import Piece, PieceGather, row_bytes
from ds_zipccl.collectives.cost import ZIPPED
from ds_zipccl.collectives.fingerprint import fingerprint, fingerprint_bytes
from ds_zipccl.collectives.frame_slot import CacheStats, Slot
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.runtime import STATUS_BYTES, Runtime
from ds_zipccl.errors import CollectiveError, FrameError
from zipscape.errors import describe

log = logging.getLogger("ds_zipccl")
REFUSED = -1 << 31          # a rank's word for a slot that it has no memory for; status words have this bit clear


def _may_have_frame(slot: Slot) -> bool:
    return slot.reason in (None, "not_encoded", "not_gathered")


class FrameCache:
    """The slots of one group and device. All ranks of the group add the same slots, and make all calls but ``changed_here``,
    ``free`` and ``close`` in the same order."""

    def __init__(self, runtime: Runtime, group: dist.ProcessGroup, device: torch.device, stats: CacheStats, boundary: Callable[[], int]):
        """``boundary()``: a number that goes up wherever an unannounced write becomes likely (between two forward passes): at their
        first use after it, frames are compared with what they were made of."""
        self.runtime, self.group, self.stats = runtime, group, stats
        self.slots: list[Slot] = []
        self.guard = True
        self.compares_on_host = device.type == "cpu"
        self._device, self._boundary = device, boundary
        self._pending: tuple | None = None
        self._written = self._read = None           # GPU: events after the last encode, and after the last row was filled
        self._mismatch: torch.Tensor | None = None  # GPU: bool per slot, read at the next refresh

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

    def close(self) -> None:
        """Drops everything."""
        if self._pending is not None:
            self._pending[-1].wait()                # who ends the group's channels must find nothing in flight
        self.free()
        self._pending, self.slots = None, []

    # -- made together, agreed once

    def refresh(self) -> None:
        """Encodes the stale slots and launches the exchange of their status words: nothing waits here. Call it where all data has just
        changed, far ahead of the next gather. Slots that were not gathered since they were last encoded lose their frames."""
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
        words = torch.zeros(len(stale) + 1, dtype=torch.int32, device=self._device)
        for i, slot in enumerate(stale):
            codec = self._codec(slot)
            if self._reserve(slot, codec):
                self._encode(slot, codec, words[i:i + 1])
            else:
                words[i] = REFUSED
            slot.stale = slot.used = False
        self._report_mismatches(words[-1:])
        size = self.group.size()
        table = torch.empty(size * words.numel(), dtype=torch.int32, device=self._device)
        work = self.runtime.state(self.group, self._device).side.all_gather(table, words)
        self._pending = stale, words, table.view(size, -1), work
        self.stats.refreshes += 1
        self.stats.status_bytes += STATUS_BYTES * words.numel() * (size - 1)

    def settle(self) -> None:
        """Waits for the status words of the last refresh, if they have not been read, and applies them: the layouts are agreed then."""
        if self._pending is None:
            return
        (stale, _, table, work), self._pending = self._pending, None
        with torch.cuda.stream(self.runtime.state(self.group, self._device).status_stream):
            work.wait()
            spills = torch.where(table < 0, 0, table >> SPILL_SHIFT & SPILL_MASK).amax(0) * SPILL_UNIT_BYTES
            summary = torch.stack([(table.amin(0) < 0).int(), ((table & OVERFLOW_BIT) * (table >= 0)).amax(0), spills]).tolist()
            mismatches = table[:, -1].tolist()
        for slot, refused, overflow, need in zip(stale, *(row[:-1] for row in summary), strict=True):
            self._apply(slot, bool(refused), bool(overflow), need)
        self._raise_for(mismatches)

    def _apply(self, slot: Slot, refused: bool, overflow: bool, need: int) -> None:
        if refused:
            self._drop(slot, "max_cache_bytes")
            return
        slot.capacity.observe(need, overflow)
        if overflow and slot.capacity.calls_left_out:
            self._drop(slot, "incompressible")
            return
        slot.codec, slot.reason = self._codec(slot) if overflow else slot.codec, None
        if overflow:                                # now with room for what every rank needs
            dirty = slot.dirty
            self._hold(slot, slot.codec.frame_bytes + fingerprint_bytes(slot.numel))
            self._encode(slot, slot.codec, torch.zeros(1, dtype=torch.int32, device=self._device))
            slot.dirty = dirty                      # written here since: the repair looks whether that fits

    def _left_out(self, slot: Slot) -> bool:
        if slot.capacity.next_call() is not None:
            return False
        self._drop(slot, "incompressible")
        slot.stale = False
        return True

    def _drop(self, slot: Slot, reason: str) -> None:
        slot.codec = slot.frame = slot.print = None
        slot.reason = reason
        self._hold(slot, 0)

    # -- one slot

    def _codec(self, slot: Slot) -> Codec:
        config = self.runtime.config
        return CODECS[config.integrity].of(slot.dtype, slot.numel, self._device.type, spill_per_tile=slot.capacity.spill_per_tile,
                                           level=config.level, kernels=self.runtime.kernels[self._device.type])

    def _reserve(self, slot: Slot, codec: Codec) -> bool:
        wanted = codec.frame_bytes + fingerprint_bytes(slot.numel)
        if self.stats.held_bytes - slot.held_bytes + wanted > self.stats.max_bytes:
            return False
        self._hold(slot, wanted)
        return True

    def _hold(self, slot: Slot, num_bytes: int) -> None:
        self.stats.held_bytes += num_bytes - slot.held_bytes
        slot.held_bytes = num_bytes

    def _data(self, slot: Slot) -> torch.Tensor:
        return slot.source().detach().to(self._device).view(-1)

    def _encode(self, slot: Slot, codec: Codec, status: torch.Tensor) -> None:
        if slot.frame is None or slot.frame.numel() != codec.frame_bytes:
            slot.frame = torch.empty(codec.frame_bytes, dtype=torch.uint8, device=self._device)
        self._wait_for(self._written)
        self._wait_for(self._read)
        data = self._data(slot)
        codec.encode(data.view(1, -1), slot.frame.view(1, -1), status)
        slot.codec, slot.dirty, slot.place = codec, False, slot.place_now()
        slot.print, slot.checked = fingerprint(data), self._boundary()
        self._used_here(slot.frame)
        self._note_write()
        self.stats.encodes += 1

    def _bring_up_to_date(self, slot: Slot) -> None:
        """Makes this rank's frame again if it isn't of the slot's present data."""
        place = slot.place_now()
        known = slot.dirty or slot.place[:2] != place[:2]
        if not known and slot.place == place and self._unchanged(slot):
            return
        self.stats.repairs += 1
        if not known:
            self.stats.unknown_writes += 1
            log.warning("%s was changed by a writer that ds_zipccl does not know; its frame was made again", slot.name)
        status = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._hold(slot, slot.codec.frame_bytes + fingerprint_bytes(slot.numel))
        self._encode(slot, slot.codec, status)
        if split_status(int(status))[0]:            # sent all the same: every other rank finds it overflowed and raises too
            raise FrameError(describe(
                "what one rank has written does not fit into the frame that the ranks agreed on", where=slot.name,
                got=f"rank {self.group.rank()} of the group wrote it outside of optimizer.step",
                todo="write it on all ranks with GatheredParameters(modifier_rank=...), or set cache_params to false"))

    def _unchanged(self, slot: Slot) -> bool:
        if self.runtime.config.integrity == "roundtrip":
            data = self._data(slot)
            again = torch.empty_like(data)
            slot.codec.decode(slot.frame.view(1, -1), again.view(1, -1))
            return torch.equal(again.view(torch.uint8), data.view(torch.uint8))
        if not self.guard or slot.checked == self._boundary():
            return True
        slot.checked = self._boundary()
        now = fingerprint(self._data(slot))
        if self.compares_on_host:
            return torch.equal(now, slot.print)
        if self._mismatch is None:
            self._mismatch = torch.zeros(len(self.slots), dtype=torch.bool, device=self._device)
        self._used_here(slot.print)
        self._mismatch[slot.index:slot.index + 1].logical_or_((now != slot.print).any())      # the host does not wait for it
        return True

    def _report_mismatches(self, word: torch.Tensor) -> None:
        if self._mismatch is not None:
            self._wait_for(self._read)
            word.copy_(torch.where(self._mismatch.any(), self._mismatch.int().argmax() + 1, 0))
            self._mismatch.zero_()
            self._note_write()

    def _raise_for(self, mismatches: list[int]) -> None:
        found = [f"{self.slots[word - 1].name} on rank {rank}" for rank, word in enumerate(mismatches) if word]
        if found:
            raise CollectiveError(describe(
                "parameters were changed by a writer that ds_zipccl does not know, and the last step used the old ones",
                got=", ".join(found), todo="go back to the last checkpoint; after such a write call "
                "ds_zipccl.backend.zero3_params.invalidate(parameters), or set cache_params to false"))

    # -- gathered

    def reason_against(self, slots: list[Slot]) -> str | None:
        """Why these slots are better gathered without their frames; None if with. The same on every rank."""
        config, size = self.runtime.config, self.group.size()
        framed = [slot for slot in slots if _may_have_frame(slot)]
        raw = sum(slot.raw_bytes for slot in slots)
        row = row_bytes(sum(s.frame_bytes() for s in framed), sum(s.raw_bytes for s in slots if s not in framed))
        if not framed:
            return slots[0].reason
        if size * raw < max(config.min_bytes, 1):
            return "min_bytes"
        if row >= raw:
            return "no_gain"
        if size * row > config.max_workspace_bytes:
            return "max_workspace_bytes"
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "graph_capture"
        if config.collectives.all_gather != "always" and not self._wins(size * raw, raw / row, slots[0].dtype):
            return "native_is_faster"
        return None

    def _wins(self, whole_bytes: int, ratio: float, dtype: torch.dtype) -> bool:
        """By the switch's cost model, measured with frames made beforehand."""
        measured = self.runtime.state(self.group, self._device).measured("cached_all_gather", dtype)
        if measured.due(self.runtime.config.reprobe_calls):
            self.runtime.settle(self.group)
            row = torch.empty(1, dtype=dtype, device=self._device)
            example = Call(all_gather.SPEC.name, row, row, self.group)          # for its group, dtype and device
            measured.costs = switch.measure(all_gather.SPEC, example, self._probed(), self.runtime.state(self.group, self._device).side,
                                            self.runtime.config.level)
        return measured.way(whole_bytes, ratio) == ZIPPED

    def _probed(self) -> Callable[[Call], bool]:
        pieces: list[Piece] = []

        def run(test: Call) -> bool:
            if not pieces or pieces[0].data is not test.input:      # a size's first round, which is not counted
                codec = Codec.of(test.input.dtype, test.input.numel(), self._device.type, level=self.runtime.config.level,
                                 kernels=self.runtime.kernels[self._device.type])
                frame, status = codec.empty_frames(1, self._device), torch.zeros(1, dtype=torch.int32, device=self._device)
                codec.encode(test.input.view(1, -1), frame, status)
                pieces[:] = [Piece(test.input, frame[0], codec)]
            PieceGather(pieces, self.group, self.runtime.workspace).wait([test.output.view(self.group.size(), -1)])
            return True

        return run

    def gather(self, slots: list[Slot]) -> PieceGather | None:
        """Launches the gather of these slots on the current stream; None (counted with its reason): gather them without frames."""
        self.settle()
        reason = self.reason_against(slots)
        if reason is None and any(slot.stale and slot.eligible for slot in slots):
            self._refresh([slot for slot in self.slots if slot.reason != "not_gathered" or slot in slots])
            self.settle()
            reason = self.reason_against(slots)
        if reason is not None:
            for slot in slots:
                self.stats.bypassed[reason if _may_have_frame(slot) else slot.reason] += 1
            return None
        self.runtime.advance(self.group)
        self.runtime.before_native(self.group, self._device)
        self._wait_for(self._written)
        try:
            failure = None
            for slot in slots:
                if slot.codec is not None:
                    self._bring_up_to_date(slot)
        except FrameError as error:
            failure = error
        gather = PieceGather([Piece(self._data(s), s.frame, s.codec) for s in slots], self.group, self.runtime.workspace)
        if self._device.type == "cuda":
            self._read = torch.cuda.current_stream(self._device).record_event()
            for slot in slots:
                self._used_here(slot.frame)
        if failure is not None:
            raise failure
        self._count(slots, gather.row_bytes)
        return gather

    def _count(self, slots: list[Slot], row: int) -> None:
        stats, others = self.stats, self.group.size() - 1
        raw = sum(slot.raw_bytes for slot in slots) * others
        for slot in slots:
            slot.used = True
            if slot.codec is None:
                stats.bypassed[slot.reason] += 1
        stats.gathers += 1
        stats.shards += sum(slot.codec is not None for slot in slots)
        stats.raw_bytes += raw
        stats.wire_bytes += row * others
        self.runtime.stats.zipped(all_gather.SPEC.name, raw, row * others)

    # -- streams

    def _note_write(self) -> None:
        if self._device.type == "cuda":
            self._written = torch.cuda.current_stream(self._device).record_event()

    def _used_here(self, tensor: torch.Tensor | None) -> None:
        """Dropping it must wait for what is queued now: frames are made, sent and compared on different streams."""
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def _wait_for(self, event) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
