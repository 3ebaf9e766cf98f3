"""A step of SCAPE over gloo on 1 to 4 ranks: bit-equal to the single-process simulation, and what it promises beyond."""
import pytest

from tests.helpers.emulated import compile_for_host
from tests.helpers.processes import DEVICE
from tests.helpers.ranks import assert_ok, case_names
from tests.scape import kernel_flow_cases
from zipscape.op_builder.scape import SCAPE_CUDA

MODULE = "tests.scape.flow_cases"
CASES = case_names(MODULE)


#: Four ranks go the ways of three, on twice as many processes as cores, and one rank talks to nobody: there one case for each kind of state
#: and message, and what asks for more than three ranks. `make test-all` has the others.
FEW = ("case_fp32", "case_bf16", "case_offload", "case_offload_where_own_residuals_are_ranked_as_they_pass",
           "case_kernels_change_nothing", "case_nothing_to_do", "case_masks_are_equal_on_all_ranks", "case_bytes_are_the_formulas")
OTHERS = tuple(case for case in CASES if case not in FEW)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks(world_size, case):
    assert_ok(MODULE, CASES, world_size, case)


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("world_size", [1, 4])
def test_one_and_four_ranks(world_size, case):
    assert_ok(MODULE, FEW, world_size, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_one_and_four_ranks_more(world_size, case):
    assert_ok(MODULE, OTHERS, world_size, case)


def test_cuda_kernels_in_steps(tmp_path_factory, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv(kernel_flow_cases.LIBRARY, str(compile_for_host(tmp_path_factory.mktemp("emulated"), SCAPE_CUDA)))
    assert_ok(kernel_flow_cases.__name__, case_names(kernel_flow_cases.__name__), 2, "case_cuda_kernels")
