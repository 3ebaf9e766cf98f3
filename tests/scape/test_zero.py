"""SCAPE under DeepSpeed's ZeRO 1 and 2, on gloo: bit-equal to the simulation, nothing dense on the wire, refusals that never hang."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.scape.zero_cases"
CASES = tuple(name for name in case_names(MODULE) if name != "case_single_process_without_zero")
BEYOND_TWO = ("case_fp32", "case_groups_clipping_accumulation_scheduler", "case_nan_on_one_rank_is_reported", "case_no_dense_collective",
              "case_density_one_is_dense_adams_of_stock_zero")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case):
    assert_ok(MODULE, CASES, 2, case)


@pytest.mark.parametrize("case", case_names("tests.scape.zero_setting_cases"))
def test_settings_on_two_ranks(case):
    module = "tests.scape.zero_setting_cases"
    assert_ok(module, case_names(module), 2, case)


@pytest.mark.parametrize("case", BEYOND_TWO)
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks(world_size, case):
    assert_ok(MODULE, BEYOND_TWO, world_size, case)


ALONE = ("case_fp32", "case_nan_on_one_rank_is_reported", "case_fp16_overflow_changes_nothing", "case_single_process_without_zero")


@pytest.mark.parametrize("case", ALONE)
def test_one_rank(case):
    assert_ok(MODULE, ALONE, 1, case)
