"""The collectives layer on plain torch groups: bits, order, aliasing, overflow, faults, reasons; worlds of 2 to 5 ranks."""
import pytest

from tests.helpers.ranks import assert_ok, case_names

#: Module -> world sizes. Loops over the registry are in the first.
MODULES = {f"tests.zipccl.collective_{name}cases": sizes for name, sizes in {
    "": (2, 3, 4, 5), "fault_": (2, 3, 4), "form_": (2, 3, 4), "all_reduce_": (2, 3, 4), "pair_": (2, 3, 4, 5), "window_": (2, 3, 4),
    "level_": (2, 3), "repeat_": (2, 3, 5), "check_": (2, 3), "mutation_": (2, 3), "order_": (2, 3), "parts_": (2, 3, 4),
    "one_sided_": (2, 3), "deepspeed_": (2, 3), "mailbox_": (2, 3)}.items()}

#: (ranks, module): what they do there, three do too. `make test-all` has them.
SLOW = {(ranks, f"tests.zipccl.collective_{name}cases") for ranks, name in ((4, "pair_"), (4, "fault_"), (4, "form_"), (5, "repeat_"))}


def cases_of(module: str, world_size: int) -> tuple[str, ...]:
    """Without those that say something about two ranks only."""
    return tuple(case for case in case_names(module) if world_size == 2 or not case.endswith("_at_2"))


RUNS = [pytest.param(world_size, module, case, id=f"{world_size}-{case}",
                     marks=[pytest.mark.slow] if (world_size, module) in SLOW else [])
        for module, sizes in MODULES.items() for world_size in sizes for case in cases_of(module, world_size)]


@pytest.mark.slow
def test_six_and_seven_ranks():
    assert_ok("tests.zipccl.collective_cases", ("six_and_seven_ranks",), 7, "six_and_seven_ranks")


@pytest.mark.parametrize("world_size, module, case", RUNS)
def test_collectives(world_size, module, case):
    assert_ok(module, cases_of(module, world_size), world_size, case)
