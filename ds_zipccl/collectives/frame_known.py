"""Gathers of kept frames (frame_cache.py) like an earlier one of the same slots: nothing is looked at but what may have changed since. Over
symmetric memory one call of C queues it: on a host that was busy elsewhere the whole way took 210 us before the first kernel was queued."""
from collections.abc import Callable

import torch

from ds_zipccl.collectives import streams
from ds_zipccl.collectives.cached import KnownPieceGather, KnownPieces
from ds_zipccl.collectives.cost import ONE_SIDED
from ds_zipccl.collectives.frame_slot import OP, Slot
from ds_zipccl.collectives.switch import MAX_SIZES, Measured
from ds_zipccl.collectives.symmetric import SymmetricWork
from ds_zipccl.collectives.symmetric_known import KnownRows


class KnownGather:
    """``bases``: the tensors that the slots' data are parts of; who launches it has seen that it is still these. ``data``: of those with
    frames. ``way``: ONE_SIDED or ZIPPED; ``rows``: what it takes to launch it. ``measured``: whose costs chose the way (None: nobody's),
    and ``size``: its key there. ``sent``: bytes, natively and really. ``num_outputs``: of ``launch``."""
    __slots__ = ("num_outputs", "_cache", "_slots", "_places", "_rows", "_measured", "_costs", "_size", "_num_writes", "_boundary",
                 "_framed", "_data", "_prints", "_bypassed", "_sent", "_count", "_state", "_way")

    def __init__(self, cache, slots: list[Slot], bases: list[torch.Tensor], data: list[torch.Tensor], way: str,
                 rows: KnownRows | KnownPieces, measured: Measured | None, size: tuple, sent: tuple[int, int],
                 num_outputs: int):
        self.num_outputs = num_outputs
        self._cache, self._slots, self._rows, self._measured, self._size, self._sent = cache, slots, rows, measured, size, sent
        self._framed, self._data, self._prints = [slot for slot in slots if slot.codec is not None], data, None
        self._way, self._bypassed = way, [slot.reason for slot in slots if slot.codec is None]
        self._count = cache.runtime.stats.zipped_count(OP, *sent, one_sided=way == ONE_SIDED)
        self._state = cache.runtime.state(cache.group, cache.device)
        # When it was written last is nobody's business of what has no frame.
        framed = [slot.place[1] for slot in slots if slot.codec is not None and slot.numel]
        self._places = [(base, base.data_ptr(), base._version if any([_holds(base, at) for at in framed]) else None) for base in bases]
        self._note()

    def _note(self) -> None:
        # What does not fit into its frame stays dirty, and is to be looked at each time.
        self._num_writes = -1 if any([slot.dirty for slot in self._framed]) else self._cache.num_writes
        self._boundary = self._cache.boundary
        self._costs = self._measured and self._measured.costs

    def holds_again(self, stream: int | None, bases: list[torch.Tensor]) -> bool:
        """After such a gather was launched on ``stream`` all the same, because of something else: whether the next one is as this says."""
        if not self._is_there(stream) or any([base is not other for base, (other, *_) in zip(bases, self._places, strict=True)]):
            return False
        if any([base.data_ptr() != at for base, at, _ in self._places]):
            return False
        self._places = [(base, at, None if version is None else base._version) for base, at, version in self._places]
        self._note()
        return True

    def end(self) -> None:
        """A frame, or its layout, or why there is none, is not what it was: holds nothing any more."""
        self._rows, self._prints, self._data, self._places = None, None, [], []

    def _is_there(self, stream: int | None) -> bool:
        return self._rows is not None and self._rows.is_open and stream == self._rows.stream

    def launch(self, make_outputs: Callable[[], list[torch.Tensor]]) -> SymmetricWork | KnownPieceGather | None:
        """``make_outputs``: called once, when they are needed; in the order of ``FrameCache.gather``'s. None: ask that, nothing has
        happened but what that begins with."""
        cache, measured = self._cache, self._measured
        cache.settle()                                      # the layouts are agreed then
        if not self._is_there(streams.current(cache.device)):
            return None
        boundary = cache.boundary
        if boundary != self._boundary:
            if not any([slot.checked != boundary for slot in self._framed]):
                self._boundary = boundary
            elif self._prints is None:
                self._prints = cache.comparisons.all_at_once(self._framed, self._data)
                if self._prints is None:
                    return None
        for base, at, version in self._places:
            if base.data_ptr() != at or version is not None and base._version != version:
                return None
        if measured is not None and (
                measured.costs is not self._costs or measured.ways.get(self._size) != self._way or len(measured.ways) >= MAX_SIZES
                or measured.is_due_next(cache.runtime.config.reprobe_calls)):
            return None
        if self._num_writes != cache.num_writes and not self._is_as_agreed():
            return None
        cache.before_gather()
        if boundary != self._boundary:
            if not cache.compare(self._prints, self._framed, boundary):
                return None
            self._boundary = boundary
        if self._way == ONE_SIDED and self._state.in_flight:
            self._state.settle()                            # resends must be queued before what waits for peers
        work = self._rows.launch(make_outputs)
        if work is None:
            return None
        if measured is not None:
            measured.count()
        stats = cache.stats
        if self._way == ONE_SIDED:
            cache.join_sent, stats.one_sided = work.join, stats.one_sided + 1
        else:
            cache.read.set()
        stats.gathers, stats.shards = stats.gathers + 1, stats.shards + len(self._framed)
        stats.raw_bytes, stats.wire_bytes = stats.raw_bytes + self._sent[0], stats.wire_bytes + self._sent[1]
        for reason in self._bypassed:
            stats.bypassed[reason] += 1
        self._count.num_calls += 1
        return work

    def _is_as_agreed(self) -> bool:
        """After writes: whether every slot's frame is of its present data."""
        for slot in self._slots:
            if slot.dirty and slot.codec is not None or slot.stale and slot.eligible:
                return False
        for slot in self._slots:
            slot.used = True
        self._num_writes = self._cache.num_writes
        return True


def _holds(base: torch.Tensor, address: int) -> bool:
    return 0 <= address - base.data_ptr() < base.nbytes


def all_in(bases: list[torch.Tensor], tensors: list[torch.Tensor]) -> bool:
    """Whether each tensor is a part of one of ``bases``, not a copy, and what is written to these can be seen."""
    return not any([base.is_inference() for base in bases]) and all([any([_holds(base, t.data_ptr()) for base in bases]) for t in tensors])
