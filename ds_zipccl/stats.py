"""Counters of what went where: calls, bytes, reasons. One object per process, read by reports, logs and tests."""
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from zipscape.row_file import RowFile

log = logging.getLogger("ds_zipccl")


@dataclass(slots=True)
class NativeCount:
    """Calls of one collective that went uncompressed for one reason. ``add`` takes no lock: CPython switches threads at calls and jumps
    alone."""
    num_calls: int = 0
    num_bytes: int = 0

    def add(self, raw_bytes: int) -> None:
        self.num_calls += 1
        self.num_bytes += raw_bytes


@dataclass(slots=True)
class ZippedCount:
    """Calls of one collective that went compressed and are alike: bytes of one, sent natively and really. Adding to ``num_calls`` takes no
    lock either."""
    raw_bytes: int
    wire_bytes: int
    one_sided: bool
    num_calls: int = 0


@dataclass
class OpStats:
    """Sums for one collective. Bytes are what this rank sends: native size (raw) and really sent (wire, with headers
    and flags)."""
    calls_zipped: int = 0
    calls_native: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    zipped_raw_bytes: int = 0
    zipped_wire_bytes: int = 0
    overflows: int = 0
    native_reasons: Counter = field(default_factory=Counter)
    calls_one_sided: int = 0                    # of those zipped: over symmetric memory, not the process group
    not_one_sided: Counter = field(default_factory=Counter)         # why not, of calls that were to go there

    def as_dict(self, natives: dict[str, NativeCount], zipped=()) -> dict:
        """``natives``: by reason. ``zipped``: ZippedCounts."""
        row = {key: dict(value) if isinstance(value, Counter) else value for key, value in self.__dict__.items()}
        for count in zipped:
            num_calls = count.num_calls
            row["calls_zipped"] += num_calls
            row["calls_one_sided"] += num_calls * count.one_sided
            for kind in ("", "zipped_"):
                row[f"{kind}raw_bytes"] += num_calls * count.raw_bytes
                row[f"{kind}wire_bytes"] += num_calls * count.wire_bytes
        for reason, native in natives.items():
            row["calls_native"] += native.num_calls
            row["native_reasons"][reason] = native.num_calls
            row["raw_bytes"] += native.num_bytes
            row["wire_bytes"] += native.num_bytes
        row["ratio"] = round(row["raw_bytes"] / row["wire_bytes"], 4) if row["wire_bytes"] else None
        return row


class Stats:
    """Thread-safe counters per collective, cumulative; ``StepLog`` turns them into rows per step."""

    def __init__(self):
        self._lock = threading.Lock()
        self._ops: dict[str, OpStats] = {}
        self._natives: dict[str, dict[str, NativeCount]] = {}               # by collective and reason
        self._zipped: dict[str, dict[tuple, ZippedCount]] = {}              # by collective and bytes
        self.sections: dict[str, Callable[[], tuple[dict, dict]]] = {}      # further keys of a step's row: (counters so far, gauges)

    def _op(self, op: str) -> OpStats:
        row = self._ops.get(op)
        return self._ops.setdefault(op, OpStats()) if row is None else row

    def native(self, op: str, reason: str, raw_bytes: int) -> None:
        """Counts a call that went uncompressed, with its reason."""
        self.native_count(op, reason).add(raw_bytes)

    def native_count(self, op: str, reason: str) -> NativeCount:
        """For callers that count many."""
        with self._lock:
            self._op(op)
            return self._natives.setdefault(op, {}).setdefault(reason, NativeCount())

    def zipped_count(self, op: str, raw_bytes: int, wire_bytes: int, one_sided: bool = False) -> ZippedCount:
        """For callers that count many."""
        with self._lock:
            self._op(op)
            counts, key = self._zipped.setdefault(op, {}), (raw_bytes, wire_bytes, one_sided)
            if key not in counts:
                counts[key] = ZippedCount(*key)
            return counts[key]

    def zipped(self, op: str, raw_bytes: int, wire_bytes: int, one_sided: bool = False) -> None:
        """Counts a compressed call."""
        with self._lock:
            row = self._op(op)
            row.calls_zipped += 1
            row.calls_one_sided += one_sided
            row.raw_bytes += raw_bytes
            row.wire_bytes += wire_bytes
            row.zipped_raw_bytes += raw_bytes
            row.zipped_wire_bytes += wire_bytes

    def not_one_sided(self, op: str, reason: str) -> None:
        """Counts a call that goes over its process group although one-sided was wanted."""
        with self._lock:
            self._op(op).not_one_sided[reason] += 1

    def overflow(self, op: str, extra_wire_bytes: int) -> None:
        """Counts a compressed call that had to be sent again uncompressed."""
        with self._lock:
            row = self._op(op)
            row.overflows += 1
            row.wire_bytes += extra_wire_bytes
            row.zipped_wire_bytes += extra_wire_bytes

    def snapshot(self) -> dict[str, dict]:
        """{op: counters} so far, a copy."""
        with self._lock:
            return {op: row.as_dict(self._natives.get(op, {}), list(self._zipped.get(op, {}).values())) for op, row in self._ops.items()}


def difference(now: dict, before: dict) -> dict:
    """The counters of one collective since an earlier row of ``Stats.snapshot``."""
    return {key: dict(Counter(value) - Counter(before.get(key, {}))) if isinstance(value, dict) else value - before.get(key, 0)
            for key, value in now.items() if key != "ratio"}


class StepLog:
    """One row per optimizer step: what that step's collectives did. With a path, each is appended there as a JSON line."""

    def __init__(self, path: str | None, stats: Stats):
        self._file = RowFile(path, log)
        self._stats = stats
        self._before = stats.snapshot()
        self._sections_before: dict[str, dict] = {}
        self._time = time.perf_counter()
        self._step = 0

    def write(self) -> dict:
        """Ends a step; returns its row."""
        now, clock = self._stats.snapshot(), time.perf_counter()
        self._step += 1
        ops = {op: difference(row, self._before.get(op, {})) for op, row in now.items()}
        row = {"step": self._step, "time_s": round(clock - self._time, 6), "ops": ops}
        for name, read in self._stats.sections.items():
            counters, gauges = read()
            before = self._sections_before.get(name, {})
            row[name] = {key: value - before.get(key, 0) for key, value in counters.items()} | gauges
            self._sections_before[name] = counters
        self._file.write(row)
        self._before, self._time = now, clock
        return row

    def close(self) -> None:
        self._file.close()
