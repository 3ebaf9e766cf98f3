"""Native, zipped, or zipped one-sided: measured per group, collective and dtype, agreed by all ranks, then decided by a cost model for
every call.

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
from dataclasses import replace
from typing import NamedTuple

import torch

from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import layout
from ds_zipccl.collectives.cost import MIN_GAIN, NATIVE, ONE_SIDED, ZIPPED, Costs, Curve, fastest
from ds_zipccl.collectives.native_launch import ASK, launch_of
from ds_zipccl.collectives.pairs import reason_for_raw
from ds_zipccl.collectives.registry import Call, CollectiveSpec
from ds_zipccl.collectives.transport import native_all_gather

log = logging.getLogger("ds_zipccl")
#: By device: bytes of the whole tensor. A GPU's calls are bound by the host up to some 16 MiB, so what links give shows beyond.
PROBE_SIZES = {"cpu": (1 << 18, 1 << 21, 1 << 24), "cuda": (1 << 20, 1 << 22, 1 << 24, 1 << 26)}
LARGER_SIZES = {"cpu": (), "cuda": (1 << 28,)}      # as well, while the largest takes less than SHORT_US natively
SHORT_US = 1500.0                                   # a call of which the launch is no more than a few percent
PROBE_ROUNDS = {"cpu": 3, "cuda": 11}               # of which the median counts
BURST_CALLS, BURST_ROUNDS = {"cpu": 1, "cuda": 6}, {"cpu": 1, "cuda": 3}        # on a CPU each call ends before the next begins
TENSORS_OF_A_PROBE = 8             # the memory it takes, at most, by that of its whole tensor
MAX_SIZES = 4096
NO_CHOICE = Costs(Curve((1, 2), (1.0, 1.0)), Curve((1, 2), (0.0, 0.0)), 1.0)          # what must be zipped, one way alone
ASK_EACH_CALL = 8                  # all-to-alls in which the ranks ask each other whether anyone could zip; then ever fewer


class Choice(NamedTuple):
    """What a call was found to be zipped for, or sent one-sided. The same again says so again: what the ranks share is compared, nothing is
    remembered that some of them may have forgotten."""
    measured: "Measured"
    costs: Costs
    state: object
    room: tuple                    # key of the class
    spill: int | None
    size: tuple
    way: str = ZIPPED

    def holds(self, reprobe_calls: int) -> bool:
        """For the next such call, which is then counted."""
        if not self.stands(reprobe_calls):
            return False
        self.measured.count()
        return True

    def stands(self, reprobe_calls: int) -> bool:
        """The same of one that is not counted."""
        measured, capacity = self.measured, self.state.capacities.get(self.room)
        return (measured.costs is self.costs and (None if capacity is None else capacity.spill_per_tile) == self.spill
                and measured.ways.get(self.size) == self.way and len(measured.ways) < MAX_SIZES and not measured.is_due_next(reprobe_calls))


class PairsChoice(NamedTuple):
    """The same of an all-to-all that cannot go one-sided: its pieces are decided each by itself."""
    measured: "Measured"
    costs: Costs
    way: str = ZIPPED

    def holds(self, reprobe_calls: int) -> bool:
        measured = self.measured
        if measured.costs is not self.costs or measured.is_due_next(reprobe_calls):
            return False
        measured.count()
        return True


def zipped_again(spec: CollectiveSpec, call: Call, state, way: str = ZIPPED) -> Choice | PairsChoice | None:
    """After ``choose`` or ``choose_for_pairs`` said ``way``, ZIPPED or ONE_SIDED."""
    if spec.pairwise:
        measured, numel = state.measured("pair", call.dtype), spec.row_numel(call)
        if way == ONE_SIDED:                            # all pieces alike, and no room for their frames is kept
            return Choice(measured, measured.costs, state, (), None, (numel * call.dtype.itemsize * call.world_size, None), way)
        return PairsChoice(measured, measured.costs) if measured.costs.one_sided is None else None
    measured, numel = state.measured(call.op, call.dtype), spec.row_numel(call)
    room, native_bytes = (call.op, call.dtype, numel), None if spec.native_numel is None else spec.native_numel(call) * call.dtype.itemsize
    capacity = state.capacities.get(room)
    if capacity is None and way == ZIPPED:              # it is about to get one
        return None
    return Choice(measured, measured.costs, state, room, None if capacity is None else capacity.spill_per_tile,
                  (spec.whole_numel(call) * call.dtype.itemsize, native_bytes), way)


class Measured:
    """What the switch knows of one collective and dtype on a group.

    ``num_calls``: that were eligible. ``ways``: of sizes that were not native last time: what all ranks carried out together.
    ``quiet_until``: so many calls, after which the next one may have to measure. ``num_changes``: of costs and ways.
    """
    __slots__ = ("_costs", "num_calls", "ways", "quiet_until", "num_changes", "_known_native", "_gains")

    def __init__(self, costs: Costs | None = None, num_calls: int = 0):
        self._costs, self.num_calls = costs, num_calls
        self.ways: dict[tuple, str] = {}
        self.quiet_until, self._known_native, self.num_changes = math.inf, None, 0
        self._gains: tuple[Costs | None, dict[tuple, dict]] = (None, {})           # found with these costs

    @property
    def costs(self) -> Costs | None:
        return self._costs

    @costs.setter
    def costs(self, costs: Costs | None) -> None:
        self._costs, self.num_changes = costs, self.num_changes + 1
        self.forget_native()

    def remember_native(self, table: dict, reprobe_calls: int) -> None:
        """``table``: what is known to go native, by these costs among others; it is emptied by all that may change that."""
        self._known_native = table
        if reprobe_calls:
            self.quiet_until = self.num_calls + reprobe_calls - 1 - self.num_calls % reprobe_calls

    def forget_native(self) -> None:
        self.quiet_until = math.inf
        if self._known_native is not None:
            self._known_native.clear()

    def count(self) -> None:
        """A call."""
        self.num_calls += 1
        if self.num_calls >= self.quiet_until:
            self.forget_native()

    def due(self, reprobe_calls: int) -> bool:
        """Counts a call; whether its costs must be measured first."""
        due = self.is_due_next(reprobe_calls)
        self.count()
        return due

    def is_due_next(self, reprobe_calls: int) -> bool:
        return self.costs is None or bool(reprobe_calls) and (self.num_calls + 1) % reprobe_calls == 0

    def way(self, num_bytes: int, ratio: float, native_bytes: int | None = None, natively: bool = True) -> str:
        """How a call of that size is to go. ``native_bytes``: what it is natively, if another. ``natively`` False: native is no choice."""
        size = num_bytes, native_bytes
        way = fastest(self.gains(num_bytes, ratio, native_bytes), self.ways.get(size, NATIVE), natively)
        if len(self.ways) >= MAX_SIZES:
            self.ways.clear()
            self.num_changes += 1
        if way != self.ways.get(size, NATIVE):
            self.num_changes += 1
        if way == NATIVE:
            self.ways.pop(size, None)
        else:
            self.ways[size] = way
        return way

    def gains(self, num_bytes: int, ratio: float, native_bytes: int | None = None) -> dict[str, float]:
        """Of the present costs, see ``Costs.gains``; each found once."""
        costs, known = self._gains
        if costs is not self.costs or len(known) >= MAX_SIZES:
            self._gains = costs, known = self.costs, {}
        key = num_bytes, ratio, native_bytes
        gains = known.get(key)
        if gains is None:
            gains = known[key] = self.costs.gains(num_bytes, ratio, native_bytes)
        return gains


def _timed_us(run, device: torch.device, start: Callable[[], None], num_calls: int = 1) -> float:
    """Of one of ``num_calls`` calls back to back."""
    start()
    began = time.perf_counter()
    for _ in range(num_calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * 1e6 / num_calls


@functools.lru_cache(maxsize=4096)
def frame_ratio(dtype: torch.dtype, numel: int, spill_per_tile: int | None = None, level: int = 1) -> float:
    """Raw bytes / frame bytes of a row of ``numel`` elements; None: the default room."""
    more = {} if spill_per_tile is None else {"spill_per_tile": spill_per_tile}
    return numel * dtype.itemsize / layout(BY_TORCH[dtype], max(numel, 1), level=level, **more).frame_bytes


def measure(spec: CollectiveSpec, call: Call, run_zipped: Callable[[Call], bool], side, level: int = 1,
            run_one_sided: Callable[[Call], bool] | None = None) -> Costs:
    """The costs of such calls, the same on every rank of the group: all must come here at the same call.

    Runs collectives of each size on the call's group by each way, in turns, on synthetic Gaussians: PROBE_ROUNDS single ones, and where
    their launches may hide behind each other BURST_ROUNDS bursts. The slowest rank's medians count, exchanged over ``side``.
    ``run_zipped(call)``, ``run_one_sided(call)`` carry out such a call to its end, or return False, on all ranks. One-sided results are
    compared with the others: a rank that sees a difference rules that way out for all.
    """
    device, (sizes, larger) = call.device, _affordable_sizes(call, side)
    ratio = frame_ratio(call.dtype, sizes[-1] // call.dtype.itemsize // call.world_size, level=level)

    def slowest(times: list[list[float]]) -> list[list[float]]:
        mine = torch.tensor(times, dtype=torch.float64, device=device).view(-1)
        gathered = torch.empty(mine.numel() * call.world_size, dtype=torch.float64, device=device)
        side.all_gather(gathered, mine).wait()
        return gathered.view(call.world_size, -1, 3).amax(0).tolist()

    tests: dict[int, Call] = {}

    def medians(size: int, start: Callable[[], None], *num_calls: int) -> list[float]:
        if size not in tests:
            tests[size] = _test_call(spec, call, size)
        return _medians(spec, tests[size], run_zipped, run_one_sided, start, *num_calls)

    start = _starter(call, side)
    singles = slowest([medians(size, start) for size in sizes])
    if larger and singles[-1][0] < SHORT_US:            # a fast link: the host has its share in the time still
        singles, sizes = singles + slowest([medians(size, start) for size in larger]), (*sizes, *larger)
    bursts, num_calls = singles, BURST_CALLS[device.type]
    if num_calls > 1:
        seen = [medians(size, start, num_calls) if single[0] < SHORT_US else single for size, single in zip(sizes, singles, strict=True)]
        bursts = slowest(seen)
    costs = replace(_costs(sizes, singles, ratio), burst=_costs(sizes, bursts, ratio) if num_calls > 1 else None)
    log.info("%s of %s on group %s: single and back-to-back us %s; zipped from %s bytes on, one-sided from %s", call.op, call.dtype,
             call.group.group_name, costs.as_dict(), costs.zipped_from(), costs.first(ONE_SIDED))
    return costs


def _costs(sizes: tuple[int, ...], times: list[list[float]], ratio: float) -> Costs:
    native, zipped, one_sided = (Curve(sizes, column) for column in zip(*times, strict=True))
    return Costs(native, zipped, ratio, one_sided if all(map(math.isfinite, one_sided.times_us)) else None)


def _affordable_sizes(call: Call, side) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of PROBE_SIZES, and of LARGER_SIZES, those for whose tensors and frames all ranks have memory: one that ran out would leave the
    others waiting."""
    sizes, larger, free = PROBE_SIZES[call.device.type], LARGER_SIZES[call.device.type], free_bytes(call.device)
    if free is None:
        return sizes, larger
    mine = torch.tensor([sum(TENSORS_OF_A_PROBE * size <= free for size in (*sizes, *larger))], dtype=torch.int32, device=call.device)
    everyones = torch.empty(call.world_size, dtype=torch.int32, device=call.device)
    side.all_gather(everyones, mine).wait()
    num = int(everyones.min())
    return sizes[:max(2, num)], larger[:max(0, num - len(sizes))]


def _starter(call: Call, side) -> Callable[[], None]:
    """What makes all ranks begin at the same time, with nothing queued: a run that begins while another rank is busy still, with the run
    before, is measured too long, or has its host time hidden behind that. On a GPU over the group itself, so that it has not rested: over
    host memory single calls took 200 us more when another one had been asked. The host's caches stay as that leaves them, as in ``bench
    collectives``: emptied before each call, they doubled the times of short calls, which then said more of the host than of the ways."""
    own = torch.zeros(1, dtype=torch.int32, device=call.device)
    everyones = torch.empty(call.world_size, dtype=torch.int32, device=call.device)

    def start() -> None:
        if call.device.type == "cuda":
            native_all_gather(everyones, own, call.group).wait()
            torch.cuda.synchronize(call.device)
        else:
            side.all_gather(everyones, own).wait()

    return start


def free_bytes(device: torch.device) -> int | None:
    """For new tensors on a GPU; None: elsewhere, nobody counts it."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _test_call(spec: CollectiveSpec, call: Call, whole_bytes: int) -> Call:
    row_numel = max(1, whole_bytes // call.dtype.itemsize // (1 if call.root is not None else call.world_size))
    test = replace(spec.make_call(call.group, row_numel, call.dtype, call.device), reduce_op=call.reduce_op)
    for t in test.inputs:
        t.normal_(0, 0.02, generator=torch.Generator(device=call.device).manual_seed(call.rank))
    return test


def _medians(spec: CollectiveSpec, test: Call, run_zipped, run_one_sided, start: Callable[[], None], num_calls: int = 1) -> list[float]:
    """Microseconds of a call on this rank: native, zipped, one-sided (infinite: not at all). ``start()`` before each, or before each
    burst of ``num_calls``."""
    launch = launch_of(test)

    def natively(test: Call) -> bool:               # as calls go that are known to go so
        work = launch(test.output, test.input, test.group, True, test.reduce_op, test.root)
        return (spec.native(test) if work is ASK else work).wait()

    runs, is_right = [natively, run_zipped if run_zipped(test) else None, None], True          # a first time, which is not measured
    if run_one_sided is not None:
        for t in test.outputs:
            t.zero_()
        if run_one_sided(test):
            runs[2], is_right = run_one_sided, _is_right(test, runs[1] or natively)
    times = [[] for _ in runs]
    rounds = PROBE_ROUNDS if num_calls == 1 else BURST_ROUNDS
    for turn in range(1 + rounds[test.device.type]):
        for run, seen in zip(runs, times, strict=True):
            time_us = math.inf if run is None else _timed_us(functools.partial(run, test), test.device, start, num_calls)
            if turn:
                seen.append(time_us)
    native, zipped, one_sided = map(statistics.median, times)
    return [native, zipped, one_sided if is_right else math.inf]        # the other ranks found it right perhaps, so all have carried it out


def _is_right(test: Call, run_again) -> bool:
    """Whether the outputs have the bits that ``run_again`` gives them."""
    results = [t.clone() for t in test.outputs]
    run_again(test)
    bad = sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in zip(results, test.outputs, strict=True))
    if bad:
        log.error("%d elements of a one-sided %s are wrong on rank %d of group %s: it is not used", bad, test.op, test.rank,
                  test.group.group_name)
    return not bad


def measure_if_due(measured: Measured, spec: CollectiveSpec, call: Call, run_zipped, state, config, router, prober=None) -> bool:
    """Counts the call, and measures with test calls like it; whether it did. ``router``: see ``choose``; ``prober``: instead of its own."""
    if not measured.due(config.reprobe_calls):
        return False
    measure_now(measured, spec, call, run_zipped, state, config, router, prober)
    return True


def measure_now(measured: Measured, spec: CollectiveSpec, call: Call, run_zipped, state, config, router, prober=None) -> None:
    """The same, whatever is due."""
    run_one_sided = None if router is None else (prober or router.prober)(spec, call, state)
    if may_go_native(spec, config) or run_one_sided is not None:
        costs = measure(spec, call, run_zipped, state.side, config.level, run_one_sided)
        measured.costs = costs if costs.first(ONE_SIDED, config.min_bytes, may_go_native(spec, config)) else costs.without_one_sided()
    else:
        measured.costs = NO_CHOICE
    if router is not None:
        router.keep_what_wins(state)


def may_go_native(spec: CollectiveSpec, config) -> bool:
    """Whether native is a choice. Else it is between two ways to zip."""
    return getattr(config.collectives, spec.family) != "always"


def decides(spec: CollectiveSpec, call: Call, config, router) -> bool:
    """Whether such calls' ways are chosen by what they cost. ``router``: a ``one_sided.Router``."""
    choice = getattr(config.collectives, spec.family)
    if choice == "adaptive":
        return not (spec.reduces and call.world_size > 2 and config.deterministic_reduce)
    return choice == "always" and router.is_choice(spec, call)


def choose(spec: CollectiveSpec, call: Call, run_zipped, state, config, router=None) -> str:
    """How an eligible call with one layout for all ranks is to go. ``router``: a ``one_sided.Router``, if that is a way to be measured."""
    measured = state.measured(call.op, call.dtype)
    if measure_if_due(measured, spec, call, run_zipped, state, config, router):
        state.forget_rooms(call.op, call.dtype)
    elif config.look_calls and measured.num_calls % config.look_calls == 0:
        state.forget_idle_rooms(call.op, call.dtype)    # calls that went native for their data's ratio: nobody saw it since
    numel = spec.row_numel(call)
    spill = state.likely_spill(call.op, call.dtype, numel, spec.first_spill)
    native_bytes = None if spec.native_numel is None else spec.native_numel(call) * call.dtype.itemsize
    return measured.way(spec.whole_numel(call) * call.dtype.itemsize, frame_ratio(call.dtype, numel, spill, config.level), native_bytes,
                        may_go_native(spec, config))


def choose_for_pairs(spec: CollectiveSpec, call: Call, run_zipped, state, config, router=None) -> str:
    """The same of an all-to-all. ZIPPED: each of its pieces is decided by itself (``choose_pair``); NATIVE: nothing is known yet.

    Sizes differ from pair to pair, so no rank alone could decide to measure: all do once somebody has had a piece that could be zipped.
    """
    measured, numel = state.measured("pair", call.dtype), spec.row_numel(call)
    if measured.costs is None and not _somebody_asks(call, state, reason_for_raw(numel, call.dtype, numel * call.world_size, config)):
        return NATIVE
    measure_if_due(measured, spec, call, run_zipped, state, config, router)
    if measured.costs.one_sided is None or router.reason_against(spec, call) is not None:
        return ZIPPED
    way = measured.way(numel * call.dtype.itemsize * call.world_size, frame_ratio(call.dtype, numel, level=config.level),
                       natively=may_go_native(spec, config))
    return ONE_SIDED if way == ONE_SIDED else ZIPPED


def choose_pair(state, dtype: torch.dtype, numel: int, world_size: int, level: int = 1) -> bool:
    """Whether a piece of ``numel`` elements is to be zipped. A function of what both its ends know: without memory of other pieces."""
    measured = state.measured("pair", dtype)
    return measured.costs is not None and (
        measured.gains(numel * dtype.itemsize * world_size, frame_ratio(dtype, numel, level=level))[ZIPPED] > MIN_GAIN)


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
