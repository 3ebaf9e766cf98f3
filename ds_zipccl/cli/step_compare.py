"""Measures the runs of one combination after another: those that share an engine by switching its collectives, others on engines side by
side."""
import functools
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ds_zipccl.backend import step_trials, zero12
from ds_zipccl.cli import step_rows
from ds_zipccl.cli.step_run import Found, Training, new_host_ms, per_step, slowest
from ds_zipccl.cli.step_runs import RUNS, SILENT, Cell, Run
from ds_zipccl.cli.step_switch import Snapshot, Way

MIN_ROUNDS = 2          # are made even when the time is over
CHECK_STEPS = 3 * step_trials.BLOCK_STEPS       # of a trial, from one look at the clock to the next
UNCOUNTED = 2           # such a look waits for the GPU: before the first step of a block, which does not count, this one after the warm-up


class Deadline:
    """When to begin nothing more. ``seconds`` None: never. All ranks ask at the same points, and get the slowest rank's answer."""

    def __init__(self, seconds: float | None, device: str):
        self._end, self._device = None if seconds is None else time.monotonic() + seconds, device

    def is_over(self) -> bool:
        if self._end is None:
            return False
        word = torch.tensor([int(time.monotonic() > self._end)], device=self._device)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        return bool(word.item())


class Engine:
    """A training and the ways its collectives were made to go so far. ``steady_bytes``: allocated between steps, before other ways."""

    def __init__(self, run: Run, cell: Cell, args):
        self.training = Training(cell.model, cell.stage, run, args.seq_len, args.bucket_size, args.device)
        self.training.losses(1)                                 # what is made in a first step is there then
        self.snapshot = Snapshot(self.training.engine) if run.optimizer["type"] == "AdamW" else None
        self.steady_bytes = self.training.allocated()
        self.sent_bytes: dict[str, int] = {}                    # natively, in a step
        self._ways: dict[str, Way] = {}
        self._args = args

    def way(self, name: str) -> Way:
        if name not in self._ways:
            section = RUNS[name].zipccl
            if isinstance(section, dict):
                section = {"collectives": self._args.choice, "min_bytes": self._args.min_bytes} | section
            self._ways[name] = Way(self.training.engine, section, self.training.device)
        return self._ways[name]

    def close(self) -> None:
        for way in self._ways.values():
            way.close()
        self._ways = {}
        self.training.close()


class Comparison:
    """Of all ranks together. Engines stay for the next combination of the same model and stage, if it has runs on them."""

    def __init__(self, args, alone: dict[str, float], deadline: Deadline):
        self._args, self._alone, self._deadline, self._key = args, alone, deadline, None
        self._engines: dict[str, Engine] = {}
        self.left_out: list[str] = []               # of the last combination

    def close(self) -> None:
        self._close_but(())

    def _close_but(self, keys) -> None:
        for key in [key for key in self._engines if key not in keys]:
            self._engines.pop(key).close()

    def rows(self, cell: Cell) -> Iterator[dict]:
        """One for each of the combination's runs that was timed. When the time is over it is not ended as planned, and ``left_out`` says
        what of it there is not."""
        names, done, self.left_out = cell.known_runs(), {}, []
        keys = list(dict.fromkeys(RUNS[name].engine_key for name in names))
        first = {RUNS[name].engine_key: name for name in reversed(names)}
        self._close_but(keys if self._key == (cell.model, cell.stage) else ())
        self._key = cell.model, cell.stage
        for name in sorted(names, key=lambda name: keys.index(RUNS[name].engine_key)):
            if done and self._deadline.is_over():
                self.left_out.append(name)
                continue
            try:
                engine = self._engine(name, cell)
            except Exception as error:              # of all ranks alike: a lossy rival whose operations can't be built here
                if RUNS[name].rival is None:
                    raise
                self.left_out.append(f"{name} ({type(error).__name__}: {error})")
                continue
            done[name] = self._alone_first(engine, name)
        self._rounds(cell, done)
        self._traces(done)
        for name in done:
            if done[name].times_ms:
                training = self._engines[RUNS[name].engine_key].training
                row = step_rows.row(cell, name, done, first[RUNS[name].engine_key], self._alone, training.num_parameters)
                yield row | _ahead(done[name].ahead_before, training.ahead_counts())
            else:
                self.left_out.append(name)

    def _rounds(self, cell: Cell, done: dict[str, Found]) -> None:
        """Times all runs in turn, but those that a trial has timed; who is left alone then is native, and timed by that trial too."""
        args, names = self._args, [name for name in done if not done[name].trial]
        tried = next((found.trial for found in done.values() if found.trial), None)
        if len(names) == 1 and tried:
            done[names[0]].take_trial(tried, "native")
            return
        for turn in range(cell.rounds or args.rounds):
            if turn >= MIN_ROUNDS and self._deadline.is_over():
                self.left_out.append(f"rounds after {turn}")
                break
            for name in reversed(names) if turn % 2 else names:
                self._in_its_way(name, functools.partial(done[name].add_block, num_before=args.skip, num_steps=args.steps))

    def _traces(self, done: dict[str, Found]) -> None:
        for name, found in done.items():
            if RUNS[name].zipccl == SILENT or name.endswith("again") or not found.times_ms:
                continue
            if self._deadline.is_over():
                self.left_out.append(f"{name}'s trace")
            else:
                self._engines[RUNS[name].engine_key].way(name).release()        # also where native steps were kept
                found.trace = self._in_its_way(name, Training.traced)

    def _engine(self, name: str, cell: Cell) -> Engine:
        key = RUNS[name].engine_key
        if key not in self._engines:
            self._engines[key] = Engine(RUNS[name], cell, self._args)
        self._engines[key].training.micro_batch = cell.tokens // self._args.seq_len
        return self._engines[key]

    def _alone_first(self, engine: Engine, name: str) -> Found:
        """The run's first steps, from where all of its engine begin, and what is measured once; its trial, where it has one."""
        training, snapshot, num_steps = engine.training, engine.snapshot, self._args.warmup
        on_gpu, is_silent = training.device == "cuda", RUNS[name].zipccl == SILENT
        if snapshot is not None:
            snapshot.restore()
        before, ahead_before = training.allocated(), training.ahead_counts()
        way = engine.way(name)
        way.enter()
        way.begin_trial(num_steps)
        losses = training.losses(num_steps - 1)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        counted, busiest_bytes = (way.runtime.stats.snapshot(), zero12.stats_of(way.runtime).busiest_bytes) if way.runtime else ({}, 0)
        losses += training.losses(1, first=num_steps - 1)
        found = Found(losses, ahead_before=ahead_before)
        if way.runtime:
            found.ops = per_step(counted, way.runtime.stats.snapshot(), 1)
            found.busiest_bytes = zero12.stats_of(way.runtime).busiest_bytes - busiest_bytes
        if on_gpu:
            others = before - (engine.steady_bytes - training.bytes_before)
            found.memory_bytes = torch.cuda.max_memory_allocated() - others
        if snapshot is not None and not is_silent:
            found.prints = snapshot.prints()
        trial = self._trial(training, way)
        if trial:
            found.take_trial(trial, trial["choice"])
        way.leave()
        if not is_silent:
            engine.sent_bytes = engine.sent_bytes or training.sent_bytes()
            found.sent_bytes = engine.sent_bytes
        return found

    def _trial(self, training: Training, way: Way) -> dict | None:
        """{"choice", "zipped_ms", "native_ms": every timed step, the slowest rank's; "zipped_host_ms", "native_host_ms"}, or None."""
        host, tokens, count = {"zipped": new_host_ms(), "native": new_host_ms()}, training.tokens(0), 0
        while way.is_trying():
            count += 1
            if count % CHECK_STEPS == UNCOUNTED and self._deadline.is_over():
                way.give_up_trial()
                return None
            is_native = way.runtime.held is not None
            training.host_ms = new_host_ms()
            training.step(tokens)
            for part, times in training.host_ms.items():
                host["native" if is_native else "zipped"][part] += times
        trials = way.trials
        if trials is None or not trials.times:
            return None
        found = {"choice": trials.gauges["choice"]}
        for kind, times in trials.times.items():
            found |= {f"{kind}_ms": slowest([seconds * 1e3 for seconds in times], training.device), f"{kind}_host_ms": host[kind]}
        return found

    def _in_its_way(self, name: str, do: Callable[[Training], object]):
        """``do(training)`` while its collectives go as the run says; what is spoilt by leaving them out is put back."""
        engine = self._engines[RUNS[name].engine_key]
        way = engine.way(name)
        way.enter()
        try:
            return do(engine.training)
        finally:
            way.leave()
            if RUNS[name].zipccl == SILENT and engine.snapshot is not None:
                engine.snapshot.restore()


def _ahead(before: dict[str, int] | None, after: dict[str, int] | None) -> dict:
    """{"ahead": {"ahead_taken": steps, "ahead_not_taken_...": steps}}: of rank 0, in all of the run's steps; nothing without "ahead"."""
    return {} if after is None else {"ahead": {name: num - before.get(name, 0) for name, num in after.items()}}
