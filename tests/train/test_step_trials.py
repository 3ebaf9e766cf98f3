"""``adaptive`` judged by whole training steps, on gloo: the same on all ranks, at the same steps, with native's bits."""
import pytest

from ds_zipccl.backend.step_trials import typical
from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.train.step_trial_cases"
CASES = case_names(MODULE)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case):
    assert_ok(MODULE, CASES, 2, case)


def test_three_ranks():
    assert_ok(MODULE, CASES[:1], 3, CASES[0])


def test_what_stands_out_is_not_counted():
    assert typical([1.0, 2.0, 100.0, 1.5]) == 1.5
