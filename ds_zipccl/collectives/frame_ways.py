"""How kept frames (frame_cache.py) are gathered: natively without them, over the process group, or over symmetric memory. All ranks come to
the same answer, without talking."""
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.collectives import all_gather, repeats, streams, switch
from ds_zipccl.collectives.cached import KnownPieces, Piece, PieceGather, row_bytes, trial_frames
from ds_zipccl.collectives.cost import MIN_GAIN, NATIVE, ONE_SIDED, ZIPPED
from ds_zipccl.collectives.frame_known import KnownGather, all_in
from ds_zipccl.collectives.frame_slot import OP, Slot
from ds_zipccl.collectives.one_sided import ranges_of_row
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.symmetric import SymmetricTransport
from ds_zipccl.collectives.symmetric_plan import Arranged, Row
from ds_zipccl.kernels.launch_calls import MAX_OUTPUTS

MAX_SETS = 4096             # of slots that are gathered together


@dataclass
class _Set:
    """What is known of slots that are gathered together, while their layouts stay. ``against``: why they are not worth their frames,
    whatever the way; ``whole_bytes``: natively; ``row_bytes``: of a rank, with frames; ``ratio``: of raw bytes to these; ``kinds``:
    ``Slot.kind`` of each; ``arranged``: for ``transport``; None: it has no room. ``known``: to gather them like the last time."""
    against: str | None
    whole_bytes: int
    row_bytes: int
    ratio: float
    kinds: list[tuple]
    is_level_1: bool
    transport: SymmetricTransport | None = None
    arranged: Arranged | None = None
    way: str = ""                       # of the last gather
    known: KnownGather | None = None


class Ways:
    """Of one group and device. All ranks ask with the same slots in the same order."""

    def __init__(self, runtime: Runtime, group: dist.ProcessGroup, device: torch.device):
        #: The group's, while frames may go one-sided: they are made in level 1 then, which it decodes.
        self.transport: SymmetricTransport | None = None
        self.against: str | None = None             # why the last gather that was to go one-sided does not
        self._runtime, self._group, self._device = runtime, group, device
        self._examples: dict[torch.dtype, Call] = {}
        self._sets: dict[tuple[Slot, ...], _Set] = {}

    @property
    def level(self) -> int:
        """Of frames that are made now."""
        return self._runtime.config.level if self.transport is None else 1

    def choose(self, slots: list[Slot]) -> tuple[str, str | None]:
        """(ZIPPED or ONE_SIDED: with their frames, None), or (NATIVE, why these slots are better gathered without)."""
        known = self._known(slots)
        if known.against is not None:
            return NATIVE, known.against
        if self._device.type == "cuda" and streams.is_capturing():
            return NATIVE, "graph_capture"
        way = self._fastest(slots, known)
        if way == NATIVE:
            return NATIVE, "native_is_faster"
        too_much = way == ZIPPED and self._group.size() * known.row_bytes > self._runtime.config.max_workspace_bytes
        return (NATIVE, "max_workspace_bytes") if too_much else (way, None)

    def forget(self, slot: Slot | None = None) -> None:
        """What is known of slots together with this one (None: of all): its layout, or reason, may change."""
        for key in [key for key in self._sets if slot is None or slot in key]:
            found = self._sets.pop(key)
            if found.known is not None:
                found.known.end()

    def known_gather(self, slots: list[Slot]) -> KnownGather | None:
        found = self._sets.get(tuple(slots))
        return found and found.known

    def is_to_be_known(self, slots: list[Slot], way: str) -> bool:
        """Whether ``know`` wants the outputs of their next gather, which goes this way."""
        found = self._known(slots)
        return repeats.AGAIN and found.way == way and found.known is None and self.against is None

    def know(self, cache, slots: list[Slot], bases: list[torch.Tensor], way: str, parts: list[Row | Piece],
             outs: list[torch.Tensor] | None, launcher, sent_bytes: int) -> None:
        """After they went this way, as these parts to ``outs``: what comes again is known from the second time on. ``sent_bytes``: to all
        peers."""
        found, wholes = self._known(slots), {}
        if found.way == way and found.known is not None and found.known.holds_again(streams.current(self._device), bases):
            return
        if found.known is not None:
            found.known.end()
            found.known = None
        is_due, found.way = self.is_to_be_known(slots, way), way
        if outs is not None and any([out.is_inference() for out in outs]):
            return                                  # such views do not tell of what they are parts
        if not is_due or outs is None or not all_in(bases, [part.data for part in parts if part.data.numel()]):
            return
        for out in outs:
            if out.numel():
                whole = out if out._base is None else out._base
                wholes[id(whole)] = whole
        outputs, launches = list(wholes.values()), None
        if way == ONE_SIDED and hasattr(found.transport, "known_rows"):
            launches = found.transport.known_rows(parts, found.arranged, outputs)
        elif way == ZIPPED and launcher is not None and len(outputs) <= MAX_OUTPUTS:
            launches = KnownPieces(launcher, parts, outs, outputs, self._group, self._runtime.workspace)
        if launches is not None:
            always = self._runtime.router.wanted or not self._is_chosen()
            measured = None if always else self._state.measured("cached_all_gather", slots[0].dtype)
            raw_bytes = sum(slot.raw_bytes for slot in slots) * (self._group.size() - 1)
            data = [part.data for part in parts if part.frame is not None]
            found.known = KnownGather(cache, slots, bases, data, way, launches, measured, (found.whole_bytes, None),
                                      (raw_bytes, sent_bytes), len(outputs))

    def _is_chosen(self) -> bool:
        """Whether costs say how gathers go."""
        return switch.may_go_native(all_gather.SPEC, self._runtime.config) or self._runtime.router.is_measured

    def rows(self, slots: list[Slot]) -> tuple[list[tuple], Arranged]:
        """For slots that go one-sided: ``Slot.kind`` of each, and how those that are not empty are arranged."""
        known = self._known(slots)
        return known.kinds, known.arranged

    def _known(self, slots: list[Slot]) -> "_Set":
        key = tuple(slots)
        known = self._sets.get(key)
        if known is None:
            if len(self._sets) >= MAX_SETS:
                self.forget()
            known = self._sets[key] = self._look_at(slots)
        return known

    def _look_at(self, slots: list[Slot]) -> "_Set":
        config, size = self._runtime.config, self._group.size()
        framed = [slot for slot in slots if slot.may_have_frame]
        raw = sum(slot.raw_bytes for slot in slots)
        row = row_bytes(sum(s.frame_bytes() for s in framed), sum(s.raw_bytes for s in slots if s not in framed))
        against = (slots[0].reason if not framed else "min_bytes" if size * raw < max(config.min_bytes, 1)
                   else "no_gain" if row >= raw else None)
        return _Set(against, size * raw, row, raw / row if row else 1.0, [slot.kind() for slot in slots],
                    all(slot.codec is None or slot.codec.geometry.level == 1 for slot in slots))

    def _fastest(self, slots: list[Slot], known: "_Set") -> str:
        whole_bytes, ratio = known.whole_bytes, known.ratio
        router, call, self.against = self._runtime.router, self._example(slots[0].dtype), None
        if router.wanted:
            if self.transport is None or not self.transport.is_open:
                self.transport, self.against = router.for_rows(call, self._state)
            self.against = self.against or self._reason_against(known)
            if self.against is None:
                return ONE_SIDED
        natively = switch.may_go_native(all_gather.SPEC, self._runtime.config)
        if not self._is_chosen():
            return ZIPPED
        measured = self._measured(call)
        if not router.wanted:
            self.transport = None if measured.costs.one_sided is None else router.for_rows(call, self._state)[0]
        way = measured.way(whole_bytes, ratio, natively=natively)
        if way == ONE_SIDED:
            self.against = self._reason_against(known)
            if self.against is not None:
                way = ZIPPED if not natively or measured.gains(whole_bytes, ratio)[ZIPPED] > MIN_GAIN else NATIVE
        return way

    def _example(self, dtype: torch.dtype) -> Call:
        """For its group, dtype and device."""
        call = self._examples.get(dtype)
        if call is None:
            row = torch.empty(1, dtype=dtype, device=self._device)
            call = self._examples[dtype] = Call(OP, row, row, self._group)
        return call

    @property
    def _state(self):
        return self._runtime.state(self._group, self._device)

    def _reason_against(self, known: "_Set") -> str | None:
        """Why these slots cannot go over the transport that the group has."""
        if not known.is_level_1:
            return "level"                          # until they are encoded again
        if known.transport is not self.transport:
            known.transport = self.transport
            known.arranged = self.transport.arrange(tuple(kind for kind in known.kinds if kind[0].numel))
        return "small_memory" if known.arranged is None else None

    # -- measured with frames made beforehand

    def measure(self, dtype: torch.dtype) -> bool:
        """As ``Runtime.measure``, of gathers of frames."""
        call, measured = self._example(dtype), self._state.measured("cached_all_gather", dtype)
        if measured.costs is not None or not switch.decides(all_gather.SPEC, call, self._runtime.config, self._runtime.router):
            return False
        self._runtime.settle(self._group)
        switch.measure_now(*self._how(measured, call))
        return True

    def _measured(self, call: Call) -> switch.Measured:
        runtime, measured = self._runtime, self._state.measured("cached_all_gather", call.dtype)
        if measured.is_due_next(runtime.config.reprobe_calls):
            runtime.settle(self._group)
        switch.measure_if_due(*self._how(measured, call))
        return measured

    def _how(self, measured: switch.Measured, call: Call) -> tuple:
        runtime = self._runtime
        return (measured, all_gather.SPEC, call, self._trial(self._over_group, runtime.config.level), self._state, runtime.config,
                runtime.router if runtime.router.is_measured else None, self._prober)

    def _prober(self, _spec, call: Call, state) -> Callable[[Call], bool] | None:
        transport, reason = self._runtime.router.for_rows(call, state, again=True)
        if transport is None:
            if reason != "device":                  # which nobody expects
                self._runtime.stats.not_one_sided(OP, reason)
            return None

        def gather(pieces, outs) -> bool:
            state.settle()
            work = transport.gather_rows([Row(p.data, out, p.codec.geometry, p.frame) for p, out in zip(pieces, outs, strict=True)])
            return work is not None and work.wait()

        return self._trial(gather, 1, self._runtime.config)

    def _over_group(self, pieces, outs) -> bool:
        PieceGather(pieces, lambda: outs, self._group, self._runtime.workspace).wait()
        return True

    def _trial(self, gather, level: int, cut_for=None) -> Callable[[Call], bool]:
        """What carries out the switch's test calls with ``gather(pieces, outs)``. ``cut_for``: the configuration by which rows are cut."""
        size, kernels, pieces = self._group.size(), self._runtime.kernels[self._device.type], []

        def run(test: Call) -> bool:
            n, dtype = test.input.numel(), test.input.dtype
            ranges = [(0, n)] if cut_for is None else ranges_of_row(cut_for, dtype, n, size)
            if not pieces or pieces[0].data.data_ptr() != test.input.data_ptr():        # a size's first round, which is not counted
                pieces[:] = trial_frames(test.input, ranges, lambda numel: Codec.of(dtype, numel, self._device.type, level=level,
                                                                                    kernels=kernels))
            return gather(pieces, [test.output.view(size, -1)[:, start:end] for start, end in ranges])

        return run
