"""The collectives layer on plain torch groups: bits, order, aliasing, overflow, faults, reasons; world sizes 2, 3 and 4."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

MODULES = ("tests.zipccl.collective_cases", "tests.zipccl.collective_fault_cases", "tests.zipccl.collective_window_cases")


def cases_of(module: str, world_size: int) -> tuple[str, ...]:
    """Without those that say something about two ranks only."""
    return tuple(case for case in case_names(module) if world_size == 2 or not case.endswith("_at_2"))


RUNS = [(world_size, module, case) for world_size in (2, 3, 4) for module in MODULES for case in cases_of(module, world_size)]


@pytest.mark.parametrize("world_size, module, case", RUNS, ids=[f"{world_size}-{case}" for world_size, _, case in RUNS])
def test_collectives(world_size, module, case):
    assert_ok(module, cases_of(module, world_size), world_size, case)
