"""What DeepSpeed's own tools show of our calls: the monitor's series and the summary of comms_logger.

comms_logger times and counts our calls as it does native ones (same names, logical sizes); what it cannot know is added below its
table: bytes really sent, ratio, how many calls went which way and why. Source of the seams: deepspeed/monitor/monitor.py
(``write_events``), deepspeed/utils/comms_logging.py (``log_all``, ``reset_data``), 0.19.8.
"""
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.utils import logger

from ds_zipccl.stats import Stats, difference

_TABLE = "{:<28}{:>10}{:>10}{:>16}{:>16}{:>8}{:>11}  {}"


def to_monitor(engine, row: dict) -> None:
    """Writes a step's row of ``StepLog`` as series ``zipccl/...`` over the number of samples, as DeepSpeed's own. Rank 0."""
    if not engine.monitor.enabled:
        return
    totals = {key: sum(op[key] for op in row["ops"].values())
              for key in ("raw_bytes", "wire_bytes", "calls_zipped", "calls_native", "overflows")}
    if totals["wire_bytes"]:
        totals["ratio"] = totals["raw_bytes"] / totals["wire_bytes"]
    engine.monitor.write_events([(f"zipccl/{key}", value, engine.global_samples) for key, value in totals.items()])


def summary(rows: dict[str, dict]) -> str:
    """The table of ``Stats.snapshot()``-like rows."""
    lines = [_TABLE.format("ds_zipccl: collective", "zipped", "native", "raw bytes", "wire bytes", "ratio", "overflows", "native because")]
    for op, row in rows.items():
        reasons = ", ".join(f"{reason} ({count})" for reason, count in row["native_reasons"].items())
        ratio = f"{row['raw_bytes'] / row['wire_bytes']:.3f}" if row["wire_bytes"] else "-"
        lines.append(_TABLE.format(op, row["calls_zipped"], row["calls_native"], row["raw_bytes"], row["wire_bytes"], ratio,
                                   row["overflows"], reasons).rstrip())
    return "\n".join(lines)


class CommsLoggerReport:
    """Adds our table to DeepSpeed's live comms_logger, until ``remove``. Its dictionary form gains the key "zipccl"."""

    def __init__(self, stats: Stats):
        self._stats, self._before = stats, {}
        self._logger = deepspeed_comm.comms_logger
        self._logger.log_all, self._logger.reset_data = self._log_all, self._reset_data

    def remove(self) -> None:
        for name in ("log_all", "reset_data"):
            self._logger.__dict__.pop(name, None)

    def _rows(self) -> dict[str, dict]:
        rows = {op: difference(row, self._before.get(op, {})) for op, row in self._stats.snapshot().items()}
        for row in rows.values():
            row["ratio"] = round(row["raw_bytes"] / row["wire_bytes"], 4) if row["wire_bytes"] else None
        return rows

    def _log_all(self, print_log=True, show_straggler=False, return_dict=False):
        result = type(self._logger).log_all(self._logger, print_log=print_log, show_straggler=show_straggler, return_dict=return_dict)
        rows = self._rows()
        if print_log and rows:
            logger.info("\n" + summary(rows))
        if return_dict and result is not None:
            result["zipccl"] = rows
        return result

    def _reset_data(self) -> None:
        self._before = self._stats.snapshot()
        type(self._logger).reset_data(self._logger)
