"""The collectives layer on plain torch groups: bits, order, aliasing, overflow, faults, reasons; worlds of 2 to 5 ranks."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

#: Module -> world sizes.
MODULES = {"tests.zipccl.collective_cases": (2, 3, 4), "tests.zipccl.collective_fault_cases": (2, 3, 4),
           "tests.zipccl.collective_form_cases": (2, 3, 4), "tests.zipccl.collective_pair_cases": (2, 3, 4, 5),
           "tests.zipccl.collective_window_cases": (2, 3, 4), "tests.zipccl.collective_level_cases": (2, 3),
           "tests.zipccl.collective_repeat_cases": (2, 3, 5),
           "tests.zipccl.collective_check_cases": (2, 3), "tests.zipccl.collective_order_cases": (2, 3),
           "tests.zipccl.collective_deepspeed_cases": (2, 3), "tests.zipccl.collective_parts_cases": (2, 3, 4)}


def cases_of(module: str, world_size: int) -> tuple[str, ...]:
    """Without those that say something about two ranks only."""
    return tuple(case for case in case_names(module) if world_size == 2 or not case.endswith("_at_2"))


RUNS = [(world_size, module, case) for module, sizes in MODULES.items() for world_size in sizes for case in cases_of(module, world_size)]


@pytest.mark.parametrize("world_size, module, case", RUNS, ids=[f"{world_size}-{case}" for world_size, _, case in RUNS])
def test_collectives(world_size, module, case):
    assert_ok(module, cases_of(module, world_size), world_size, case)
