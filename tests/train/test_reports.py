"""DeepSpeed's monitor and comms_logger show our calls."""
import pytest

from ds_zipccl.backend.deepspeed_reports import summary
from ds_zipccl.stats import Stats
from tests.helpers.ranks import assert_ok

CASES = ("case_monitor_gets_our_series", "case_comms_logger_shows_our_calls")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case):
    assert_ok("tests.train.report_cases", CASES, 2, case)


def test_table_names_wire_bytes_ratio_and_reasons():
    stats = Stats()
    stats.zipped("all_gather_into_tensor", 1410, 1000)
    stats.native("all_gather_into_tensor", "min_bytes", 10)
    stats.native("barrier", "not_zipped", 0)
    head, gather, barrier = summary(stats.snapshot()).splitlines()
    assert head.split()[-2:] == ["native", "because"]
    assert gather.split() == ["all_gather_into_tensor", "1", "1", "1420", "1010", "1.406", "0", "min_bytes", "(1)"]
    assert barrier.split() == ["barrier", "0", "1", "0", "0", "-", "0", "not_zipped", "(1)"]
