"""DeepSpeed's MoE layers through the zipped front, on gloo: every bit as native, whatever the expert-parallel groups."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.train.moe_cases"
TWO_RANKS = case_names(MODULE)


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks(case):
    assert_ok(MODULE, TWO_RANKS, 2, case)
