"""Counters and the per-step log."""
import json
import os

import pytest

from ds_zipccl.stats import Stats, StepLog


def test_bytes_ratio_and_reasons():
    stats = Stats()
    stats.zipped("all_gather_into_tensor", raw_bytes=1000, wire_bytes=700)
    stats.native("all_gather_into_tensor", "min_bytes", 50)
    stats.overflow("all_gather_into_tensor", 1000)
    row = stats.snapshot()["all_gather_into_tensor"]
    assert (row["calls_zipped"], row["calls_native"], row["overflows"]) == (1, 1, 1)
    assert (row["raw_bytes"], row["wire_bytes"]) == (1050, 1750)
    assert row["native_reasons"] == {"min_bytes": 1} and row["ratio"] == round(1050 / 1750, 4)


def test_log_rows_hold_each_step_alone(tmp_path):
    stats, path = Stats(), tmp_path / "log.jsonl"
    log = StepLog(str(path), stats)
    stats.zipped("all_gather_into_tensor", 1000, 700)
    log.write()
    stats.zipped("all_gather_into_tensor", 2000, 1400)
    stats.native("all_reduce", "not_zipped", 8)
    log.write()
    log.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["step"] == 1 and first["ops"]["all_gather_into_tensor"]["raw_bytes"] == 1000
    assert second["step"] == 2 and second["ops"]["all_gather_into_tensor"]["raw_bytes"] == 2000
    assert second["ops"]["all_gather_into_tensor"]["calls_zipped"] == 1
    assert second["ops"]["all_reduce"]["native_reasons"] == {"not_zipped": 1} and second["time_s"] >= 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_a_full_disk_ends_the_log_and_not_the_training():
    log = StepLog("/dev/full", Stats())
    assert [log.write()["step"], log.write()["step"]] == [1, 2]
    log.close()
