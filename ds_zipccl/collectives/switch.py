"""Native or zipped: measured per group, collective and dtype, agreed by all ranks, then decided by a cost model for every call.

Each rank has the same costs, because they are exchanged when they are measured, and the same capacities; so it comes to the same decision
without talking. What is measured again, and when, follows from the number of calls, which all ranks count alike. Data that changes needs no
new measurement: its ratio, as seen in the calls before, goes into every decision.
"""
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import layout
from ds_zipccl.collectives.cost import GAIN_TO_STAY, MIN_GAIN, Costs, Curve
from ds_zipccl.collectives.pairs import reason_for_raw
from ds_zipccl.collectives.registry import Call, CollectiveSpec

log = logging.getLogger("ds_zipccl")
PROBE_SIZES = (1 << 18, 1 << 21, 1 << 24)           # bytes of the whole tensor
PROBE_ROUNDS = 3
MAX_SIZES = 4096
ASK_EACH_CALL = 8                  # all-to-alls in which the ranks ask each other whether anyone could zip; then ever fewer


@dataclass
class Measured:
    """What the switch knows of one collective and dtype on a group."""
    costs: Costs | None = None
    num_calls: int = 0             # that were eligible
    zipped: set[tuple] = field(default_factory=set)          # sizes whose last call was zipped: what all ranks carried out together
    _gains: tuple[Costs | None, dict[tuple, float]] = field(default_factory=lambda: (None, {}))         # found with these costs

    def due(self, reprobe_calls: int) -> bool:
        """Counts a call; whether its costs must be measured first."""
        due = self.is_due_next(reprobe_calls)
        self.num_calls += 1
        return due

    def is_due_next(self, reprobe_calls: int) -> bool:
        return self.costs is None or bool(reprobe_calls) and (self.num_calls + 1) % reprobe_calls == 0

    def choose(self, num_bytes: int, ratio: float, native_bytes: int | None = None) -> bool:
        """Whether a call of that size is to be zipped. ``native_bytes``: what it is natively, if another."""
        size = num_bytes, native_bytes
        answer = self.gain(num_bytes, ratio, native_bytes) > (GAIN_TO_STAY if size in self.zipped else MIN_GAIN)
        if len(self.zipped) >= MAX_SIZES:
            self.zipped.clear()
        if answer:
            self.zipped.add(size)
        else:
            self.zipped.discard(size)
        return answer

    def gain(self, num_bytes: int, ratio: float, native_bytes: int | None = None) -> float:
        """Of the present costs, see ``Costs.gain``; each found once."""
        costs, gains = self._gains
        if costs is not self.costs or len(gains) >= MAX_SIZES:
            self._gains = costs, gains = self.costs, {}
        key = num_bytes, ratio, native_bytes
        gain = gains.get(key)
        if gain is None:
            gain = gains[key] = self.costs.gain(num_bytes, ratio, native_bytes)
        return gain


def _timed_us(run, device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e6


@functools.lru_cache(maxsize=4096)
def frame_ratio(dtype: torch.dtype, numel: int, spill_per_tile: int | None = None, level: int = 1) -> float:
    """Raw bytes / frame bytes of a row of ``numel`` elements; None: the default room."""
    more = {} if spill_per_tile is None else {"spill_per_tile": spill_per_tile}
    return numel * dtype.itemsize / layout(BY_TORCH[dtype], max(numel, 1), level=level, **more).frame_bytes


def measure(spec: CollectiveSpec, call: Call, run_zipped: Callable[[Call], bool], side, level: int = 1) -> Costs:
    """The costs of such calls, the same on every rank of the group: all must come here at the same call.

    Runs 2 x (1 + PROBE_ROUNDS) collectives of each PROBE_SIZES on the call's group, native and zipped in turns, on synthetic Gaussians; the
    slowest rank's medians count, exchanged over ``side``. ``run_zipped(call)`` carries out a zipped call to its end, or returns False.
    """
    device, times = call.device, {"native": [], "zipped": []}
    for size in PROBE_SIZES:
        native, zipped = _medians(spec, _test_call(spec, call, size), run_zipped)
        times["native"].append(native)
        times["zipped"].append(zipped)
    mine = torch.tensor([*times["native"], *times["zipped"]], dtype=torch.float64, device=device)
    gathered = torch.empty(mine.numel() * call.world_size, dtype=torch.float64, device=device)
    side.all_gather(gathered, mine).wait()
    slowest = gathered.view(call.world_size, -1).amax(0).tolist()
    points = len(PROBE_SIZES)
    costs = Costs(Curve(PROBE_SIZES, tuple(slowest[:points])), Curve(PROBE_SIZES, tuple(slowest[points:])),
                  frame_ratio(call.dtype, PROBE_SIZES[-1] // call.dtype.itemsize // call.world_size, level=level))
    log.info("%s of %s on group %s: native %s us, zipped %s us at %s bytes; zipped from %s bytes on", call.op, call.dtype,
             call.group.group_name, *([round(t) if math.isfinite(t) else t for t in c.times_us] for c in (costs.native, costs.zipped)),
             list(PROBE_SIZES), costs.zipped_from())
    return costs


def _test_call(spec: CollectiveSpec, call: Call, whole_bytes: int) -> Call:
    row_numel = max(1, whole_bytes // call.dtype.itemsize // (1 if call.root is not None else call.world_size))
    test = replace(spec.make_call(call.group, row_numel, call.dtype, call.device), reduce_op=call.reduce_op)
    for t in test.inputs:
        t.normal_(0, 0.02, generator=torch.Generator(device=call.device).manual_seed(call.rank))
    return test


def _medians(spec: CollectiveSpec, test: Call, run_zipped) -> tuple[float, float]:
    """(native, zipped) microseconds on this rank."""
    native, zipped = [], []
    can_zip = run_zipped(test)
    for turn in range(1 + PROBE_ROUNDS):
        times = _timed_us(lambda: spec.native(test).wait(), test.device), \
            _timed_us(lambda: run_zipped(test), test.device) if can_zip else math.inf
        if turn:
            native.append(times[0])
            zipped.append(times[1])
    return statistics.median(native), statistics.median(zipped)


def choose(spec: CollectiveSpec, call: Call, run_zipped, state, config) -> bool:
    """Whether an eligible call with one layout for all ranks is to be zipped."""
    measured = state.measured(call.op, call.dtype)
    if measured.due(config.reprobe_calls):
        measured.costs = measure(spec, call, run_zipped, state.side, config.level)
        state.forget_rooms(call.op, call.dtype)         # calls that went native for their data's ratio: nobody saw it since
    numel = spec.row_numel(call)
    spill = state.likely_spill(call.op, call.dtype, numel, spec.first_spill)
    native_bytes = None if spec.native_numel is None else spec.native_numel(call) * call.dtype.itemsize
    return measured.choose(spec.whole_numel(call) * call.dtype.itemsize, frame_ratio(call.dtype, numel, spill, config.level), native_bytes)


def pairs_are_measured(spec: CollectiveSpec, call: Call, run_zipped, state, config) -> bool:
    """Whether the costs of the group's all-to-alls of the call's dtype are known; pieces are then decided one by one (``choose_pair``).

    Sizes differ from pair to pair, so no rank alone could decide to measure: all do once somebody has had a piece that could be zipped.
    """
    measured = state.measured("pair", call.dtype)
    if measured.costs is None:
        numel = spec.row_numel(call)
        if not _somebody_asks(call, state, reason_for_raw(numel, call.dtype, numel * call.world_size, config)):
            return False
    if measured.due(config.reprobe_calls):
        measured.costs = measure(spec, call, run_zipped, state.side, config.level)
    return True


def choose_pair(state, dtype: torch.dtype, numel: int, world_size: int, level: int = 1) -> bool:
    """Whether a piece of ``numel`` elements is to be zipped. A function of what both its ends know: without memory of other pieces."""
    measured = state.measured("pair", dtype)
    return measured.costs is not None and (
        measured.gain(numel * dtype.itemsize * world_size, frame_ratio(dtype, numel, level=level)) > MIN_GAIN)


def _somebody_asks(call: Call, state, why_not: str | None) -> bool:
    """Whether on any rank of the group ``why_not`` was None in an earlier call; the same answer on every rank, without waiting: each
    call (later: calls that are powers of two) asks, and the next one reads the answers."""
    answers, state.answers, state.num_asked = state.answers, None, state.num_asked + 1
    if answers is not None:
        flags, work = answers
        with torch.cuda.stream(state.status_stream):
            work.wait()
            if any(flags.tolist()):
                return True
    if state.num_asked <= ASK_EACH_CALL or state.num_asked & state.num_asked - 1 == 0:
        flags = torch.empty(call.world_size, dtype=torch.int32, device=call.device)
        own = torch.full((1,), int(why_not is None), dtype=torch.int32, device=call.device)
        state.answers = flags, state.side.all_gather(flags, own)
    return False
