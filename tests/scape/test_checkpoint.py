"""Checkpoints of SCAPE under ZeRO 1 and 2."""
import pytest

from tests.helpers.ranks import assert_ok

MODULE = "tests.scape.checkpoint_cases"
CASES = ("case_full_resumes_bit_equal", "case_mean_keeps_the_mean", "case_flush_synchronises_everything_first",
         "case_other_density_starts_without_masks", "case_resumed_run_follows_the_rule", "case_state_of_another_optimizer_is_refused")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case):
    assert_ok(MODULE, CASES, 2, case)
