"""What users install: the wheel, made from the sdist, in a fresh environment and outside the checkout."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.helpers.wheels import ROOT, build, copy_of_checkout, fresh_environment, run


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return copy_of_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    sdist = build("build_sdist", checkout, folder)
    shutil.unpack_archive(sdist, folder)
    return build("build_wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return fresh_environment(tmp_path_factory.mktemp("fresh") / "venv", wheel)


def test_wheel_holds_the_three_packages_and_nothing_else(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"zipscape", "ds_zipccl", "ds_scape"}, "no op_builder, csrc or tests at top level"


def test_wheel_holds_every_source_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"zipscape/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "csrc").rglob("*")
                if path.suffix in (".cpp", ".cu", ".h", ".cuh")}
    expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "ds_zipccl").rglob("*.cu")}
    expected |= {f"{'zipscape/' if folder == 'op_builder' else ''}{path.relative_to(ROOT).as_posix()}"
                 for folder in ("zipscape", "op_builder", "ds_zipccl", "ds_scape")
                 for path in (ROOT / folder).rglob("*.py")}
    assert expected and expected <= names, sorted(expected - names)


def test_no_kind_of_source_is_forgotten():
    """A new suffix in csrc must be added to package_data in setup.py."""
    suffixes = {path.suffix for path in (ROOT / "csrc").rglob("*") if path.is_file() and not path.name.startswith(".")}
    assert suffixes <= {".cpp", ".cu", ".h", ".cuh", ".md"}


def test_every_module_imports_from_the_wheel(installed, tmp_path):
    code = """
import importlib, json, pkgutil
found = {}
for name in ("zipscape", "ds_zipccl", "ds_scape"):
    package = importlib.import_module(name)
    for info in [None, *pkgutil.walk_packages(package.__path__, name + ".", onerror=print)]:
        try:
            module = importlib.import_module(info.name) if info else package
        except ModuleNotFoundError as error:
            # Kernels for accelerators may need what only a machine with one has.
            if error.name not in ("triton", "cupy") or ".kernels." not in info.name:
                raise
            continue
        if getattr(module, "__file__", None):
            found[module.__name__] = module.__file__
print(json.dumps(found))
"""
    found = json.loads(run(installed, "-c", code, cwd=tmp_path).splitlines()[-1])
    assert "zipscape.op_builder.base" in found and "ds_zipccl.config" in found
    elsewhere = {name: file for name, file in found.items() if installed.parent.parent not in Path(file).parents}
    assert not elsewhere


def test_native_library_builds_from_the_wheel(installed, tmp_path):
    code = """
from zipscape.op_builder.zipccl import ZIPCCL_CPU
print(ZIPCCL_CPU.csrc); print(ZIPCCL_CPU.build()); ZIPCCL_CPU.load()
"""
    csrc, built = run(installed, "-c", code, cwd=tmp_path, ZIPSCAPE_CACHE=str(tmp_path / "cache")).splitlines()
    assert Path(csrc).parts[-2:] == ("zipscape", "csrc") and installed.parent.parent in Path(csrc).parents
    assert tmp_path in Path(built).parents


def test_the_codec_bench_runs_from_the_wheel(installed, tmp_path):
    run(installed, "-m", "ds_zipccl.cli.main", "bench", "codec", "--device", "cpu", "--size", "64K", "--dtype", "bf16", "--dist", "normal",
        "--impl", "cpu,reference", "--repeat", "1", "--json", "rows.json", cwd=tmp_path, ZIPSCAPE_CACHE=str(tmp_path / "cache"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["impl"], row["op"], row["wrong"]) for row in rows] == [
        (impl, op, 0) for impl in ("cpu", "reference") for op in ("compress", "decompress")]
    assert len({row["wire_bytes"] for row in rows}) == 1 and rows[0]["ratio"] > 1.4


def test_entry_points_and_version(installed, tmp_path):
    code = """
import json, sys
from importlib.metadata import entry_points, requires, version
(backend,) = entry_points(group="torch.backends", name="zipscape")
scripts = [script for name in ("ds_scape", "ds_zipccl") for script in entry_points(group="console_scripts", name=name)]
import torch, zipscape
armed = any(type(finder).__module__ == "zipscape.activate" for finder in sys.meta_path)
print(json.dumps([backend.value, [s.value for s in scripts], all(callable(s.load()) for s in scripts), armed, version("zipscape") ==
                  zipscape.__version__, requires("zipscape")]))
"""
    backend, scripts, are_callable, armed, same_version, requires = json.loads(
        run(installed, "-c", code, cwd=tmp_path).splitlines()[-1])
    assert (backend, scripts) == ("zipscape.activate:autoload", ["ds_scape.cli.main:main", "ds_zipccl.cli.main:main"])
    assert are_callable and armed and same_version
    assert "torch<2.14,>=2.11" in requires and "deepspeed==0.19.8" in requires
    assert (installed.parent / "ds_zipccl").exists()


def test_editable_install_finds_the_renamed_folders(checkout, tmp_path):
    python = fresh_environment(tmp_path / "venv", "--no-build-isolation", "-e", checkout)
    code = """
import zipscape, zipscape.op_builder.zipccl as zipccl, ds_zipccl, ds_scape
print(zipscape.__file__, zipccl.__file__, zipccl.ZIPCCL_CPU.csrc, ds_scape.__file__, sep="\\n")
"""
    files = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert files == [str(checkout / part) for part in (
        "zipscape/__init__.py", "op_builder/zipccl.py", "csrc", "ds_scape/__init__.py")]
