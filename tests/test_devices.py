"""Every tensor that the packages make says on which device: torch's default device is the user's to change, and a CPU kernel that is handed
a GPU's memory ends the process."""
import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FACTORIES = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "scalar_tensor", "tensor",
             "zeros"}
FILES = sorted(path for package in ("ds_zipccl", "ds_scape", "zipscape") for path in (ROOT / package).rglob("*.py"))


def without_device(source: str) -> list[int]:
    """Lines that call one of torch's factories without naming a device."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return [call.lineno for call in calls if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
            and call.func.attr in FACTORIES and "device" not in {keyword.arg for keyword in call.keywords}]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_tensor_has_its_device(path):
    assert without_device(path.read_text()) == []


def test_the_test_sees_one():
    assert without_device("import torch\nx = torch.empty(3)\ny = torch.zeros(2, device='cpu')\n") == [2]
