"""The DeepSpeed front against the base class it subclasses: same methods, same signatures, same decorators."""
import ast
import inspect
import textwrap

import pytest
from deepspeed.comm.torch import TorchBackend

from ds_zipccl.backend.deepspeed_comm import ZippedCollectives
from ds_zipccl.backend.deepspeed_native import NativeCollectives
from ds_zipccl.collectives.registry import specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import FAMILIES, CollectiveChoices

OVERRIDES = [name for cls in (ZippedCollectives, NativeCollectives) for name, value in vars(cls).items()
             if inspect.isfunction(value) and not name.startswith("_")]
POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}
assert Runtime                          # importing it registers the collectives


def test_every_registered_collective_is_overridden_and_configurable():
    assert {spec.family for spec in specs().values()} == set(FAMILIES) == set(CollectiveChoices.model_fields)
    assert set(specs()) <= set(OVERRIDES)


def methods(cls) -> dict[str, ast.FunctionDef]:
    """The methods as written: the base class wraps them, so that inspect sees only the wrapper."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {node.name: node for node in tree.body[0].body if isinstance(node, ast.FunctionDef)}


OURS, BASE = methods(NativeCollectives) | methods(ZippedCollectives), methods(TorchBackend)


def test_no_collective_passes_by_uncounted():
    """Whatever the base class marks for the compiler communicates; all_gather_base is broken there (no such attribute)."""
    communicates = {name for name, node in BASE.items() if "disable_compiler_collective" in map(ast.unparse, node.decorator_list)}
    helpers = {"get_all_gather_function", "get_reduce_scatter_function", "all_gather_base"}
    assert communicates - helpers - POINT_TO_POINT <= set(OVERRIDES)


@pytest.mark.parametrize("name", OVERRIDES)
def test_override_has_the_base_signature(name):
    ours, base = OURS[name].args, BASE[name].args
    assert [a.arg for a in ours.args] == [a.arg for a in base.args]
    assert len(ours.defaults) == len(base.defaults)


@pytest.mark.parametrize("name", OVERRIDES)
def test_override_keeps_the_compiler_decorator(name):
    """Methods that torch.compile must not trace are marked on the base class; an override that drops the mark would be traced."""
    def marked(node):
        return "disable_compiler_collective" in [ast.unparse(d) for d in node.decorator_list]

    assert marked(OURS[name]) == marked(BASE[name])
    assert marked(BASE["all_reduce"]), "the base class no longer marks its methods this way"
