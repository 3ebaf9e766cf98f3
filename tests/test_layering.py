"""Imports point one way: who may import whom, read from the source of every module, function-level imports included."""

import ast
import fnmatch
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Package -> folder in the checkout.
PACKAGES = {
    "zipscape": "zipscape", "zipscape.op_builder": "op_builder", "ds_zipccl": "ds_zipccl", "ds_scape": "ds_scape"}
MAX_LINES = 400

#: Rooms from the top down; a room may import rooms further down, and itself.
ORDER = {
    "ds_zipccl": ("cli", "backend", "collectives", "codec", "kernels"),
    "ds_scape": ("cli", "optimizer", "sync", "update", "kernels"),
}
#: Modules that every room of their package may import; they import no room.
LEAVES = {"config", "errors", "stats"}
#: Only these rooms reach the native libraries.
USE_OP_BUILDER = {"kernels", "cli"}
#: Files that may import deepspeed: the seams, the builders, and the benchmark that trains with it.
SEAMS = (
    "ds_zipccl/backend/deepspeed_*.py", "ds_zipccl/backend/zero12.py", "ds_zipccl/backend/zero3_*.py",
    "ds_scape/optimizer/deepspeed_hooks.py", "ds_scape/optimizer/zero_adapter.py", "op_builder/deepspeed_ops.py",
    "ds_zipccl/cli/step_run.py",
)
#: Loaded by every `import torch`: standard library only.
LIGHT = ("zipscape/__init__.py", "zipscape/activate.py")


def imported_modules(source: str, module: str, is_package: bool):
    """(line, full module name) of every import in the source, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if is_package else module.split(".")[:-1]
                parts = parts[:len(parts) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            # `from package import name`: the name may be a module, so it is judged too.
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def violations(path: str, module: str, source: str) -> list:
    """What is wrong with one file. path: relative to the root, with slashes; module: its full name."""
    is_package = path.endswith("__init__.py")
    found = []
    for line, target in imported_modules(source, module, is_package):
        reason = _forbidden(path, module, target)
        if reason:
            found.append(f"{path}:{line}: imports {target}: {reason}")
    if len(source.splitlines()) > MAX_LINES:
        found.append(f"{path}: {len(source.splitlines())} lines, more than {MAX_LINES}")
    return sorted(set(found))


def _forbidden(path, module, target) -> str:
    package, top = module.split(".")[0], target.split(".")[0]
    if path in LIGHT and top not in sys.stdlib_module_names and not (top == "zipscape" and path != LIGHT[1]):
        return "this file is loaded by every `import torch`: standard library only"
    if top == "deepspeed" and not any(fnmatch.fnmatchcase(path, seam) for seam in SEAMS):
        return "only the seams and the builders import deepspeed"
    if package == "zipscape":
        return "zipscape lies below both packages" if top in ORDER else ""
    if top in ORDER and top != package:
        return "the two packages never import each other"
    room = _room(module, package)
    if target.startswith("zipscape.op_builder") and room not in USE_OP_BUILDER:
        return f"only {', '.join(sorted(USE_OP_BUILDER))} reach the native libraries"
    return _upward(package, room, _room(target, package)) if top == package else ""


def _room(module, package) -> str:
    """"backend" for ds_zipccl.backend.policy, "" for the package itself or a name in it that is no known room."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (parts[1] in ORDER[package] or parts[1] in LEAVES) else ""


def _upward(package, room, target) -> str:
    if target in ("", room) or room == "":
        # The package's __init__ may offer names of any room; nobody else may take them from there.
        return "import the module, not the package" if target == "" and room else ""
    if target in LEAVES:
        return ""
    if room in LEAVES:
        return f"{room} is a leaf and imports no room"
    order = ORDER[package]
    return "" if order.index(target) > order.index(room) else f"{room} lies below {target}"


def package_files():
    for package, folder in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            inner = file.relative_to(ROOT / folder).with_suffix("")
            parts = [part for part in inner.parts if part != "__init__"]
            yield pytest.param(file, ".".join([package, *parts]), id=file.relative_to(ROOT).as_posix())


@pytest.mark.parametrize("file, module", package_files())
def test_imports_point_downwards(file, module):
    assert violations(file.relative_to(ROOT).as_posix(), module, file.read_text()) == []


def test_every_room_is_in_the_plan():
    """A new folder must be given its place in ORDER, or nothing would be checked about it."""
    for package, order in ORDER.items():
        rooms = {init.parent.name for init in (ROOT / package).glob("*/*.py")}
        modules = {file.stem for file in (ROOT / package).glob("*.py")} - {"__init__"}
        assert rooms <= set(order)
        assert modules <= LEAVES


def test_no_source_file_is_too_long():
    files = [file for pattern in ("*.cpp", "*.cu", "*.h", "*.cuh") for file in (ROOT / "csrc").rglob(pattern)]
    assert [f"{file}: {num}" for file in files if (num := len(file.read_text().splitlines())) > MAX_LINES] == []


PLANTED = [
    ("ds_zipccl/codec/codec.py", "from ds_zipccl.backend import policy", "codec lies below backend"),
    ("ds_zipccl/codec/codec.py", "from ds_zipccl import collectives", "codec lies below collectives"),
    ("ds_zipccl/codec/codec.py", "from ..collectives.work import Pending", "codec lies below collectives"),
    ("ds_zipccl/codec/codec.py", "from ds_zipccl import Frame", "import the module"),
    ("ds_zipccl/kernels/ops.py", "def f():\n    import ds_zipccl.codec.format", "kernels lies below codec"),
    ("ds_zipccl/kernels/ops.py", "import importlib\nimportlib.import_module('ds_zipccl.codec')", "kernels lies below"),
    ("ds_zipccl/stats.py", "from ds_zipccl.codec import codec", "stats is a leaf"),
    ("ds_zipccl/backend/policy.py", "import deepspeed.comm", "only the seams"),
    ("ds_zipccl/collectives/work.py", "def f():\n    from deepspeed import comm", "only the seams"),
    ("ds_zipccl/collectives/work.py", "from zipscape.op_builder.zipccl import ZIPCCL_CPU", "reach the native"),
    ("ds_zipccl/backend/policy.py", "from ds_scape.sync import mask", "never import each other"),
    ("ds_scape/sync/mask.py", "if True:\n    import ds_zipccl", "never import each other"),
    ("ds_scape/update/residual.py", "from ds_scape.sync import mask", "update lies below sync"),
    ("ds_scape/kernels/impl_reference.py", "from ds_scape.update import tables", "kernels lies below update"),
    ("ds_scape/sync/mask.py", "from zipscape.op_builder import scape", "reach the native"),
    ("zipscape/handshake.py", "import ds_zipccl.config", "lies below both packages"),
    ("op_builder/zipccl.py", "from ds_zipccl import kernels", "lies below both packages"),
    ("op_builder/base.py", "import deepspeed", "only the seams"),
    ("zipscape/activate.py", "def f():\n    import torch", "standard library only"),
    ("zipscape/activate.py", "from zipscape import errors", "standard library only"),
    ("ds_zipccl/config.py", "\n" * 401, "more than 400"),
]
ALLOWED = [
    ("ds_zipccl/backend/deepspeed_comm.py", "import deepspeed\nfrom ds_zipccl.collectives import work"),
    ("ds_zipccl/kernels/impl_cpu.py", "from zipscape.op_builder import zipccl\nfrom ds_zipccl import errors"),
    ("ds_zipccl/cli/report.py", "from ds_zipccl.backend import policy\nfrom ds_zipccl import config"),
    ("ds_zipccl/config.py", "from zipscape.errors import ConfigError\nimport pydantic"),
    ("ds_zipccl/__init__.py", "from zipscape.activate import autoload"),
    ("zipscape/activate.py", "import os\nHOOKS = {'deepspeed.runtime.engine': ['ds_zipccl.backend.x:install']}"),
]


def _module_of(path):
    folders = {folder: package for package, folder in PACKAGES.items()}
    top, _, rest = path.partition("/")
    return f"{folders[top]}.{rest[:-3]}".replace("/", ".").removesuffix(".__init__")


@pytest.mark.parametrize("path, source, expected", PLANTED)
def test_checker_catches_a_planted_violation(path, source, expected):
    found = violations(path, _module_of(path), source)
    assert len(found) == 1 and expected in found[0]


@pytest.mark.parametrize("path, source", ALLOWED)
def test_checker_lets_downward_imports_pass(path, source):
    assert violations(path, _module_of(path), source) == []
