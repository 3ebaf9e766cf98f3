"""Measures the runs of one combination after another: those that share an engine by switching its collectives, others on engines side by
side."""
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ds_zipccl.cli import step_rows
from ds_zipccl.cli.step_run import PARTS, Found, Training, per_step
from ds_zipccl.cli.step_runs import RUNS, SILENT, Cell, Run
from ds_zipccl.cli.step_switch import Snapshot, Way

NUM_COUNTED = 2         # steps whose calls and bytes are counted


class Engine:
    """A training and the ways its collectives were made to go so far. ``steady_bytes``: allocated between steps, before other ways."""

    def __init__(self, run: Run, cell: Cell, args):
        self.training = Training(cell.model, cell.stage, run, args.seq_len, args.bucket_size, args.device)
        self.steady_bytes: int | None = None
        self._ways: dict[str, Way] = {}
        self._args = args

    def way(self, name: str) -> Way:
        if name not in self._ways:
            section = RUNS[name].zipccl
            if isinstance(section, dict):
                section = section | {"collectives": self._args.choice, "min_bytes": self._args.min_bytes}
            self._ways[name] = Way(self.training.engine, section, self.training.device)
        return self._ways[name]

    def close(self) -> None:
        for way in self._ways.values():
            way.close()
        self._ways = {}
        self.training.close()


class Comparison:
    """Of all ranks together. Engines stay for the next combination of the same model and stage."""

    def __init__(self, args, alone: dict[str, float]):
        self._args, self._alone, self._key = args, alone, None
        self._engines: dict[str, Engine] = {}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines = {}

    def rows(self, cell: Cell) -> Iterator[dict]:
        """Those of a rival first, then of all that is compared with it, engine by engine."""
        if self._key != (cell.model, cell.stage):
            self.close()
            self._key = cell.model, cell.stage
        names = cell.known_runs()
        for rival in [name for name in names if RUNS[name].rival is None]:
            partners = [name for name in names if RUNS[name].rival == rival]
            key = RUNS[rival].engine_key
            mine = [rival, *(name for name in partners if RUNS[name].engine_key == key)]
            done: dict[str, Found] = {}
            yield from self._together(cell, mine, done)
            for other in dict.fromkeys(RUNS[name].engine_key for name in partners if RUNS[name].engine_key != key):
                done[rival] = replace(done[rival], times_ms=[], host_ms={part: [] for part in PARTS})       # the rest of it still holds
                yield from self._together(cell, [name for name in partners if RUNS[name].engine_key == other], done, rival)
                self._engines.pop(other).close()
            if len([name for name in names if RUNS[name].rival is None]) > 1:
                self._engines.pop(key).close()

    def _together(self, cell: Cell, names: list[str], done: dict[str, Found], rival: str | None = None) -> Iterator[dict]:
        """Rows of ``names``, which share an engine, from rounds of them; and of their rival, if that is on another engine and was looked at
        before. ``done``: everything that was found on this cell."""
        args, engine = self._args, self._engine(names[0], cell)
        engine.training.micro_batch = cell.tokens // args.seq_len
        engine.training.losses(2)                               # what is made in first steps is there then
        snapshot = Snapshot(engine.training.engine) if RUNS[names[0]].optimizer["type"] == "AdamW" else None
        if engine.steady_bytes is None:
            engine.steady_bytes = engine.training.allocated()
        for name in names:
            done[name] = self._alone_first(engine, name, snapshot)
            if RUNS[name].zipccl != SILENT:
                done[name].sent_bytes = done[names[0]].sent_bytes or engine.training.sent_bytes()           # natively
        in_turn = [name for name in (rival, *names) if name is not None]
        for turn in range(args.rounds):
            for name in reversed(in_turn) if turn % 2 else in_turn:
                self._in_its_way(name, functools.partial(done[name].add_block, num_before=args.skip, num_steps=args.steps), snapshot)
        for name in names:
            if RUNS[name].zipccl != SILENT and not name.endswith("again"):
                done[name].trace = self._in_its_way(name, Training.traced, snapshot)
        for name in names:
            yield step_rows.row(cell, name, done, names[0], self._alone, engine.training.num_parameters)

    def _engine(self, name: str, cell: Cell) -> Engine:
        key = RUNS[name].engine_key
        if key not in self._engines:
            self._engines[key] = Engine(RUNS[name], cell, self._args)
        return self._engines[key]

    def _alone_first(self, engine: Engine, name: str, snapshot: Snapshot | None) -> Found:
        """The run's first steps, from where all of its engine begin, and what is measured once."""
        training, is_silent, on_gpu = engine.training, RUNS[name].zipccl == SILENT, engine.training.device == "cuda"
        if snapshot is not None:
            snapshot.restore()
        before = training.allocated()
        way = engine.way(name)
        way.enter()
        found = Found(training.losses(self._args.warmup), snapshot.prints() if snapshot is not None and not is_silent else [])
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        way.try_steps(lambda: training.step(training.tokens(0)))
        counted = way.runtime.stats.snapshot() if way.runtime else {}
        training.losses(NUM_COUNTED)
        if way.runtime:
            found.ops = per_step(counted, way.runtime.stats.snapshot(), NUM_COUNTED)
        if on_gpu:
            others = before - (engine.steady_bytes - training.bytes_before)
            found.memory_bytes = torch.cuda.max_memory_allocated() - others
        way.leave()
        return found

    def _in_its_way(self, name: str, do: Callable[[Training], object], snapshot: Snapshot | None):
        """``do(training)`` while its collectives go as the run says; what is spoilt by leaving them out is put back."""
        engine = self._engines[RUNS[name].engine_key]
        way = engine.way(name)
        way.enter()
        try:
            return do(engine.training)
        finally:
            way.leave()
            if RUNS[name].zipccl == SILENT and snapshot is not None:
                snapshot.restore()
