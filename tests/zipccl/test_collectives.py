"""The collectives layer on plain torch groups: bits, order, aliasing, overflow, reasons; world sizes 2, 3 and 4."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.zipccl.collective_cases"
CASES = case_names(MODULE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives(world_size, case):
    assert_ok(MODULE, CASES, world_size, case)
