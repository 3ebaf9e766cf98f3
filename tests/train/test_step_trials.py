"""``adaptive`` judged by whole training steps, on gloo: the same on all ranks, at the same steps, with native's bits."""
from types import SimpleNamespace

import pytest

from ds_zipccl.backend import step_trials
from ds_zipccl.backend.step_trials import StepTrials, typical
from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.train.step_trial_cases"
CASES = case_names(MODULE)
AT_3 = ("case_slower_on_one_rank_is_slower", "case_links_are_measured_when_an_engine_is_made")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case):
    assert_ok(MODULE, CASES, 2, case)


@pytest.mark.parametrize("case", AT_3)
def test_three_ranks(case):
    assert_ok(MODULE, AT_3, 3, case)


def test_what_stands_out_is_not_counted():
    assert typical([1.0, 2.0, 100.0, 1.5]) == 1.5


def test_an_engine_of_some_ranks_alone_is_not_tried(monkeypatch):
    """All ranks would wait for those whose engine makes fewer steps, or whose steps need theirs."""
    monkeypatch.setattr(step_trials.dist, "get_world_size", lambda: 4)
    trials, runtime = StepTrials(5, talk=SimpleNamespace()), SimpleNamespace()
    for dp_world_size in (2, 1):
        engine = SimpleNamespace(dp_world_size=dp_world_size)
        for _ in range(40):
            trials.step_ended(engine, runtime)
    assert not trials.has_answer and trials._engine is None
