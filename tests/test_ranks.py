"""tests/helpers/ranks.py: however a rank ends, the run ends soon and says what each rank did."""
import time

import pytest

from tests.helpers import processes
from tests.helpers.ranks import outcomes

MODULE = "tests.helpers.ending_cases"
pytestmark = pytest.mark.skipif(processes.DEVICE != "cpu", reason="the cases are of tensors on the CPU")


def texts(*names, world_size=2):
    result = outcomes(MODULE, names, world_size)
    assert list(result) == list(names)
    return list(result.values())


@pytest.mark.parametrize("world_size", [1, 3])
def test_cases_that_pass(world_size, monkeypatch):
    monkeypatch.setenv("ZIPSCAPE_TEST_WORD", "seen")
    assert texts("case_fine", "case_sum", "case_sees_the_environment", world_size=world_size) == [["ok"] * world_size] * 3


def test_an_error_is_told_and_nothing_runs_after_it():
    before, failed, after = texts("case_fine", "case_raises_on_rank_1", "case_sum")
    assert before == ["ok", "ok"]
    assert "case_raises_on_rank_1" in failed[1] and "what rank 1 did not like" in failed[1]
    assert failed[0] == "ok" or "barrier" in failed[0]
    assert after == ["not run: case_raises_on_rank_1 failed before it"] * 2


def test_a_rank_that_dies_is_named_with_the_signal_and_its_stack():
    (failed,) = texts("case_dies_on_rank_1")
    assert "SIGABRT" in failed[1] and "in case_dies_on_rank_1" in failed[1]
    assert "barrier" in failed[0]


def test_a_rank_that_runs_on_is_ended_and_says_where_it_was(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 1)
    start = time.monotonic()
    (failed,) = texts("case_rank_0_is_busy_when_rank_1_fails")
    assert "what rank 1 did not like" in failed[1]
    assert "was ended" in failed[0] and "in case_rank_0_is_busy_when_rank_1_fails" in failed[0]
    assert time.monotonic() - start < 100           # the case sleeps for 600 s


def test_a_run_without_progress_is_ended(monkeypatch):
    monkeypatch.setattr(processes, "STALLED_S", 8)
    before, failed = texts("case_fine", "case_hangs")
    assert before == ["ok", "ok"]
    assert all("without progress" in text and "in case_hangs" in text for text in failed)


def test_an_end_that_fails_fails_the_last_case():
    before, last = texts("case_fine", "case_ends_badly")
    assert before == ["ok", "ok"] and last[0] == "ok" and "exit status 3" in last[1]
