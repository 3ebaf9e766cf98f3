"""The collectives layer on plain torch groups: bits, order, aliasing, overflow, reasons; world sizes 2, 3 and 4."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.zipccl.collective_cases"
CASES = case_names(MODULE)


def cases_of(world_size: int) -> tuple[str, ...]:
    """Without those that say something about two ranks only."""
    return tuple(case for case in CASES if world_size == 2 or not case.endswith("_at_2"))


@pytest.mark.parametrize("world_size, case", [(world_size, case) for world_size in (2, 3, 4) for case in cases_of(world_size)])
def test_collectives(world_size, case):
    assert_ok(MODULE, cases_of(world_size), world_size, case)
