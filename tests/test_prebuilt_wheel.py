"""ZIPSCAPE_PREBUILD: a wheel with the libraries in it, for machines without a compiler (C121, C128)."""
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.helpers.wheels import build, copy_of_checkout, fresh_environment, run
from zipscape.errors import BuildError
from zipscape.op_builder import toolchain

LOAD = """
import json, sys
from ds_zipccl.cli import report
from ds_zipccl.kernels import loader
import torch
from ds_zipccl.codec.codec import compress, decompress
x = torch.randn(5000).to(torch.bfloat16)
assert torch.equal(decompress(compress(x, kernels="cpu"), torch.empty_like(x), kernels="cpu").view(torch.int16), x.view(torch.int16))
json.dump({"best": loader.resolve("best", "cpu"), "libraries": report._libraries()}, sys.stdout)
"""


def _has_nvcc() -> bool:
    try:
        toolchain.find("nvcc")
    except BuildError:
        return False
    return True


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return copy_of_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    """Both architectures of every CUDA source are compiled, beside each other, and a warning is an error."""
    return build("build_wheel", checkout, tmp_path_factory.mktemp("dist"), ZIPSCAPE_PREBUILD="1", TORCH_CUDA_ARCH_LIST="",
                 NVCC_APPEND_FLAGS="--threads 2 -Werror all-warnings")


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return fresh_environment(tmp_path_factory.mktemp("fresh") / "venv", wheel)


def prebuilt(wheel) -> dict:
    with zipfile.ZipFile(wheel) as archive:
        return {Path(name).name.split("-")[0]: json.loads(archive.read(name)) for name in archive.namelist()
                if "/prebuilt/" in name and name.endswith(".json")}


def without_compilers(tmp_path) -> dict:
    """Variables of a machine without a compiler; the cache cannot be written."""
    (tmp_path / "bin").mkdir()
    return dict(PATH=str(tmp_path / "bin"), ZIPSCAPE_CACHE="/dev/null/cache", HOME=str(tmp_path), CXX="", CUDA_HOME="")


def test_wheel_is_for_this_system_and_every_python(wheel):
    assert "-py3-none-linux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    libraries = ("scape_cpu", "scape_cuda", "zipccl_cpu", "zipccl_cuda", "zipccl_symmetric") if _has_nvcc() else ("scape_cpu", "zipccl_cpu")
    found = sorted((Path(name).name.split("-")[0], Path(name).suffix) for name in names if "/prebuilt/" in name)
    assert found == [(library, suffix) for library in libraries for suffix in (".json", ".so")]


def test_cuda_library_is_for_both_architectures_and_later_ones(wheel):
    if not _has_nvcc():
        pytest.skip("nvcc is not installed: the wheel has the C++ library alone")
    record = prebuilt(wheel)["zipccl_cuda"]
    assert record["arches"] == "8.0;9.0+PTX" and record["compiler"] == f"nvcc {record['toolkit']}"


def test_prebuilt_library_is_used_where_there_is_no_compiler(python, tmp_path):
    """C121, C128: no compiler, no cache; the report says what is in use."""
    data = json.loads(run(python, "-c", LOAD, cwd=tmp_path, **without_compilers(tmp_path)).splitlines()[-1])
    assert data["best"] == "cpu"
    rows = {row["name"]: row for row in data["libraries"]}
    assert rows["zipccl_cpu"]["installed"] == "prebuilt" and rows["zipccl_cpu"]["compatible"] and not rows["zipccl_cpu"]["reason"]
    assert Path(rows["zipccl_cpu"]["path"]).is_relative_to(python.parent.parent)
    if _has_nvcc():
        assert rows["zipccl_cuda"]["installed"] == "prebuilt" and rows["zipccl_cuda"]["arches"] == "8.0, 9.0+PTX"


def test_damaged_or_foreign_libraries_are_passed_over_and_said(python, tmp_path):
    """C125, C128: what cannot be loaded, or is of other sources, is compiled anew; without a compiler both reasons are told."""
    folder = next(python.parent.parent.rglob("op_builder/prebuilt"))
    (library,) = folder.glob("zipccl_cpu-*.so")
    kept = tmp_path / "kept.so"
    shutil.copy(library, kept)
    code = """
import json
from zipscape.errors import BuildError
from zipscape.op_builder.zipccl import ZIPCCL_CPU
try:
    ZIPCCL_CPU.load()
    error = None
except BuildError as caught:
    error = str(caught)
print(json.dumps([error, ZIPCCL_CPU.state()]))
"""
    nothing = without_compilers(tmp_path)
    try:
        library.write_bytes(b"not a library")
        error, state = json.loads(run(python, "-c", code, cwd=tmp_path, **nothing).splitlines()[-1])
        assert "No c++ compiler was found" in error and "passed over: it cannot be loaded" in error
        assert not state["compatible"] and state["reason"] == error
        error, state = json.loads(run(python, "-c", code, cwd=tmp_path, ZIPSCAPE_CACHE=str(tmp_path / "cache")).splitlines()[-1])
        assert error is None and state["installed"] == "compiled" and "cannot be loaded" in state["reason"]
    finally:
        shutil.copy(kept, library)
    moved = library.with_name("zipccl_cpu-0123456789.so")
    library.rename(moved)
    try:
        error, state = json.loads(run(python, "-c", code, cwd=tmp_path, **nothing).splitlines()[-1])
        assert "No c++ compiler was found" in error and "of other sources" in error
    finally:
        moved.rename(library)


def test_no_wheel_without_what_was_asked_for(checkout, tmp_path):
    """C128: an installation that succeeds has what was asked for."""
    for wanted, words in (("cuda", "nvcc"), ("gpu", "names no library of ours")):
        with pytest.raises(AssertionError, match=words):
            build("build_wheel", checkout, tmp_path, ZIPSCAPE_PREBUILD=wanted, ZIPSCAPE_NVCC="/no/such/nvcc")
    assert not list(tmp_path.glob("*.whl"))


def test_plain_wheel_after_a_prebuilt_one_has_no_library(wheel, checkout, tmp_path):
    plain = build("build_wheel", checkout, tmp_path)
    assert plain.name.endswith("-py3-none-any.whl") and prebuilt(wheel) and not prebuilt(plain)
