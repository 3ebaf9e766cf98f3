"""What SCAPE does not work with: one clear error on all ranks, never a hang."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.scape.refusal_cases"
CASES = case_names(MODULE)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case):
    assert_ok(MODULE, CASES, 2, case)
