"""A step of SCAPE over gloo on 1 to 4 ranks: bit-equal to the single-process simulation, and what it promises beyond."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.scape.flow_cases"
CASES = case_names(MODULE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks(world_size, case):
    assert_ok(MODULE, CASES, world_size, case)
