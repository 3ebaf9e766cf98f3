"""DeepSpeed's MoE layers through the zipped front, on gloo: every bit as native, whatever the expert-parallel groups."""
import pytest

from tests.helpers.ranks import assert_ok, case_names, outcomes

MODULE = "tests.train.moe_cases"
TWO_RANKS = case_names(MODULE)


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks(case):
    assert_ok(MODULE, TWO_RANKS, 2, case)


GRID = "tests.train.moe_grid_cases"
FOUR_RANKS = ("case_expert_gradients_are_those_of_one_process", "case_grids_equal_native")


@pytest.mark.parametrize("case", FOUR_RANKS)
def test_four_ranks(case):
    assert_ok(GRID, FOUR_RANKS, 4, case)


@pytest.mark.parametrize("case", ["case_beside_tensor_parallelism", "case_experts_in_tensor_parallel_parts"])
def test_beside_tensor_parallelism(case):
    """In processes of their own: DeepSpeed keeps the groups."""
    assert_ok(GRID, (case,), 4, case)


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_splits(world_size):
    assert_ok(GRID, ("case_uneven_splits",), world_size, "case_uneven_splits")


def test_capacities_that_differ_are_named():
    assert_ok(GRID, ("case_capacities_that_differ_are_named",), 2, "case_capacities_that_differ_are_named")


@pytest.mark.parametrize("how", ["natively", "zipped"])
def test_capacities_that_differ_end_the_run(how):
    """C53: zipped as natively, gloo ends a process; nobody hangs."""
    case = f"case_capacities_that_differ_fail_{how}"
    texts = outcomes(GRID, (case,), 2)[case]
    assert "ok" not in texts and any(word in text for word in ("SIGABRT", "gloo", "FrameError") for text in texts), texts
