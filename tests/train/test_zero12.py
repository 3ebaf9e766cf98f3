"""ZeRO 1 and 2 with reduce-scattered gradients: bit-equal to native at 2 ranks, the documented rank-order sum beyond."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.train.zero12_cases"
CASES = {2: case_names(MODULE), 3: tuple(case for case in case_names(MODULE) if not case.endswith("_at_2"))}


@pytest.mark.parametrize("world_size, case", [(size, case) for size, cases in CASES.items() for case in cases])
def test_zero12(world_size, case):
    assert_ok(MODULE, CASES[world_size], world_size, case)
