"""What the host waits for in steady state; on GPUs also calls and steps on streams of the user's."""
import pytest

from tests.helpers.ranks import DEVICE, assert_ok, case_names

MODULE = "tests.train.stream_cases"
NAMES = case_names(MODULE)
CASES = tuple(case for case in NAMES if DEVICE == "cuda" or not case.endswith("_on_gpus"))


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in CASES else pytest.mark.skip(reason="needs two GPUs and "
                                  "ZIPSCAPE_TEST_DEVICE=cuda")) for case in NAMES])
def test_streams(case):
    assert_ok(MODULE, CASES, 2, case)
