"""ZeRO-3 with ``cache_params`` on gloo: the same bits as without, one encode per step, and every forgotten writer is found."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

EVENTS, MORE, ONE_SIDED = "tests.train.zero3_cache_cases", "tests.train.zero3_cache_more_cases", "tests.train.zero3_one_sided_cases"
TWO, MORE_TWO, ONE_SIDED_TWO = case_names(EVENTS), case_names(MORE), case_names(ONE_SIDED)
THREE = ("case_plain_training", "case_every_writer", "case_unannounced_write_on_one_rank")


@pytest.mark.parametrize("case", TWO)
def test_two_ranks(case):
    assert_ok(EVENTS, TWO, 2, case)


@pytest.mark.parametrize("case", MORE_TWO)
def test_two_ranks_more(case):
    assert_ok(MORE, MORE_TWO, 2, case)


@pytest.mark.parametrize("case", ONE_SIDED_TWO)
def test_one_sided(case):
    assert_ok(ONE_SIDED, ONE_SIDED_TWO, 2, case)


@pytest.mark.parametrize("case", THREE)
def test_three_ranks(case):
    assert_ok(EVENTS, THREE, 3, case)


def test_second_partition_inside_halves_of_the_ranks():
    case = "case_second_partition_is_gathered_natively"
    assert_ok(MORE, (case,), 4, case)
