"""A step of SCAPE over gloo on 1 to 4 ranks: bit-equal to the single-process simulation, and what it promises beyond."""
import pytest

from tests.helpers.emulated import compile_for_host
from tests.helpers.processes import DEVICE
from tests.helpers.ranks import assert_ok, case_names
from tests.scape import kernel_flow_cases
from zipscape.op_builder.scape import SCAPE_CUDA

MODULE = "tests.scape.flow_cases"
CASES = case_names(MODULE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks(world_size, case):
    assert_ok(MODULE, CASES, world_size, case)


def test_cuda_kernels_in_steps(tmp_path_factory, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv(kernel_flow_cases.LIBRARY, str(compile_for_host(tmp_path_factory.mktemp("emulated"), SCAPE_CUDA)))
    assert_ok(kernel_flow_cases.__name__, case_names(kernel_flow_cases.__name__), 2, "case_cuda_kernels")
