"""``adaptive`` judged by whole training steps: calls that gain by themselves can make a step slower, where the host is what it waits for.

Once any rank's switch has sent calls zipped, steps are made in blocks, "as decided" and "all native" by turns, and each rank measures its
host's time from the end of one optimizer step to the end of the next: nothing is synchronized for that, since in the long run the host is
no faster than its GPU. The ranks tell each other through the store. Everything happens at numbers of steps, which all ranks count alike.
"""
import itertools
import json
import logging
import math
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from ds_zipccl.collectives import held
from ds_zipccl.collectives.place import await_keys, place_of, read
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.transport import group_timeout
from ds_zipccl.config import FAMILIES, ZipcclConfig

log = logging.getLogger("ds_zipccl")
WARM_UP = 10                            # first steps: probes, allocations, the first connections
LAG = 2                                 # steps from what ranks tell to where all have it: nobody waits long
ZIPPED, NATIVE = "zipped", "native"
BLOCKS = (ZIPPED, NATIVE, NATIVE, ZIPPED) * 3           # so a drift concerns both alike
BLOCK_STEPS = 3                         # of which the first is not counted: it has the end of another one's, and frames to make
MIN_GAIN = 0.01
OUTLIER = 3                             # times the median: an evaluation, a checkpoint
_numbers = itertools.count()
_trials: "weakref.WeakKeyDictionary[Runtime, StepTrials]" = weakref.WeakKeyDictionary()


def attach(runtime: Runtime) -> None:
    """Has the steps of the next engine tried, if the settings say so; of one that had trials, anew. All ranks at the same point."""
    known = _trials.pop(runtime, None)
    if known is not None:
        held.release(runtime)
    if wanted(runtime.config) and dist.is_initialized() and dist.get_world_size() > 1:
        trials = _trials[runtime] = StepTrials(runtime.config.step_trial_every)
        runtime.stats.sections["step_trials"] = trials.section


def wanted(config: ZipcclConfig) -> bool:
    """"always" is not to be overruled, and where it is said of one family a native step would not be native. Where ranks compare each call,
    speed is not what is wanted."""
    choices = {getattr(config.collectives, family) for family in FAMILIES}
    return config.step_trials and "adaptive" in choices and "always" not in choices and not config.asks_each_call


def of(runtime: Runtime | None) -> "StepTrials | None":
    return None if runtime is None else _trials.get(runtime)


class StoreTalk:
    """What ranks tell each other, through the store of the world's group."""

    def __init__(self):
        self._prefix = f"step_trials/{next(_numbers)}"

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"

    def tell(self, number: int, words: list[float]) -> None:
        store, rank = place_of(dist.group.WORLD).store, dist.get_rank()
        store.set(self._key(number, rank), json.dumps(words))
        if number > 1:
            store.delete_key(self._key(number - 2, rank))          # whoever tells this has read that, and all have told the one between

    def hear(self, number: int) -> list[list[float]]:
        """Of all ranks. Waits for those that are behind."""
        world = dist.group.WORLD
        keys, store = [self._key(number, rank) for rank in range(world.size())], place_of(world).store
        device = torch.device("cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend() else "cpu")
        await_keys(store, keys, group_timeout(world, device).total_seconds())
        return [json.loads(text) for text in read(store, keys)]


class StepTrials:
    """Of the first engine that ends a step; those of others count as part of its.

    ``clock()``: seconds. ``talk``: see StoreTalk. Both to be replaced in tests.
    """

    def __init__(self, every: int, talk=None, clock: Callable[[], float] = time.monotonic):
        self._every, self._talk, self._clock = every, talk or StoreTalk(), clock
        self._engine: weakref.ref | None = None
        self._plan, self._last_end, self._zipped_before = self._plan_steps(), math.nan, 0
        self._runtime: weakref.ref | None = None
        self._told = 0
        self.warm_up = WARM_UP                          # may be changed before the first step
        self.nothing_zipped = 0                         # so often
        self.counts: Counter = Counter()                # trials that ended, by what was chosen
        self.gauges: dict[str, float | str | None] = {"choice": None}         # of the last one; ms a step, the slowest rank's
        self.times: dict[str, list[float]] = {}                               # of the last one: this rank's seconds, in order

    @property
    def has_answer(self) -> bool:
        """Whether a trial has ended, or there was nothing to try. The same on every rank."""
        return self.counts.total() > 0 or self.nothing_zipped > 0

    def section(self) -> tuple[dict, dict]:
        """(counters, gauges) for ``stats.Stats.sections``."""
        return {f"kept_{way}": self.counts[way] for way in (ZIPPED, NATIVE)}, dict(self.gauges)

    def step_ended(self, engine, runtime: Runtime) -> None:
        """At the end of an optimizer step, on all ranks. Not of an engine of some of them alone: others' may be ahead, or wait for this."""
        if engine.dp_world_size != dist.get_world_size():
            return
        if self._engine is None:
            self._engine, self._runtime = weakref.ref(engine), weakref.ref(runtime)
        if self._engine() is engine:
            now = self._clock()
            self._time_s, self._last_end = now - self._last_end, now
            next(self._plan)

    def _plan_steps(self):
        """Goes on by one step at each ``next``."""
        yield from self._pass(self.warm_up)
        pause, choice = 1, ZIPPED
        while True:
            while choice == ZIPPED and not (yield from self._anyone_zips()):
                self.nothing_zipped += 1
                yield from self._pass(pause)
                pause = min(2 * pause, self._every)
            choice = yield from self._trial()
            yield from self._pass(self._every)

    def _pass(self, num_steps: int):
        for _ in range(num_steps):
            yield

    def _anyone_zips(self):
        """Whether any rank has had a call zipped in the last step."""
        before = self._num_zipped()
        yield
        heard = yield from self._exchange([self._num_zipped() - before])
        return any(number > 0 for number, in heard)

    def _num_zipped(self) -> int:
        return sum(row["calls_zipped"] for row in self._runtime().stats.snapshot().values())

    def _exchange(self, words: list[float]):
        number, self._told = self._told, self._told + 1
        self._talk.tell(number, words)
        yield from self._pass(LAG)
        runtime = self._runtime()
        runtime.settle_all()                            # what others wait for from us
        return self._talk.hear(number)

    def _trial(self):
        """Which way is kept."""
        times: dict[str, list[float]] = {ZIPPED: [], NATIVE: []}
        for way in BLOCKS:
            self._go(way, "step_trial")
            for step in range(BLOCK_STEPS):
                yield
                if step:
                    times[way].append(self._time_s)
        heard = yield from self._exchange([typical(times[way]) for way in (ZIPPED, NATIVE)])
        zipped, native = (max(column) for column in zip(*heard, strict=True))
        choice = ZIPPED if zipped <= (1 - MIN_GAIN) * native else NATIVE
        self._go(choice, "steps_are_not_faster")
        if choice != self.gauges["choice"]:
            log.info("steps take %.2f ms with zipped calls and %.2f ms natively: %s", zipped * 1e3, native * 1e3,
                     "calls are zipped where that is faster" if choice == ZIPPED else "all calls go native (steps_are_not_faster)")
        self.counts[choice] += 1
        self.times = times
        self.gauges = {"choice": choice, "zipped_ms": round(zipped * 1e3, 3), "native_ms": round(native * 1e3, 3)}
        return choice

    def _go(self, way: str, reason: str) -> None:
        """From the next call on."""
        runtime = self._runtime()
        held.release(runtime)
        if way == NATIVE:
            held.hold(runtime, reason)


def typical(times: list[float]) -> float:
    """Their median, without those that stand out."""
    limit = OUTLIER * statistics.median(times)
    return statistics.median([t for t in times if t <= limit])
