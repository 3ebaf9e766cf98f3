"""A CUDA toolkit beside torch: minor releases mix, major ones do not (C127)."""
import sys
from types import SimpleNamespace

import pytest

from zipscape.errors import BuildError
from zipscape.op_builder import base, cuda_arch, cuda_toolkit, prebuilt


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A CUDA library and an nvcc 13.0 that writes its arguments in place of code."""
    (tmp_path / "a.cu").write_text("// nothing\n")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\ncase \"$*\" in *--version*) echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit;; esac\n"
                    'for last; do :; done\necho "$@" > "$last"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("ZIPSCAPE_NVCC", str(nvcc))
    monkeypatch.setenv("ZIPSCAPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(cuda_arch.VARIABLE, raising=False)
    monkeypatch.setattr(cuda_arch, "visible", lambda: [(9, 0)])
    monkeypatch.setattr(prebuilt, "folder", lambda: tmp_path / "prebuilt")
    return base.NativeLibrary("a", ["a.cu"], compiler="nvcc", csrc=tmp_path)


def torch_of(monkeypatch, cuda):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_the_same_release_or_a_torch_without_cuda(library, monkeypatch, caplog, cuda):
    torch_of(monkeypatch, cuda)
    assert library.available() == (True, "") and library.build().exists() and not caplog.records


def test_another_minor_release_is_said_once(library, monkeypatch, caplog):
    """C127"""
    torch_of(monkeypatch, "13.2")
    cuda_toolkit._say_once.cache_clear()
    assert library.build().exists() and library.available()[0]
    (record,) = caplog.records
    assert "13.0" in record.getMessage() and "13.2" in record.getMessage() and record.levelname == "WARNING"


def test_another_major_release_is_refused(library, monkeypatch):
    """C127: with both releases and what to do; nothing is compiled."""
    torch_of(monkeypatch, "12.8")
    available, reason = library.available()
    assert not available and "13.0" in reason and "12.x" in reason and "ZIPSCAPE_NVCC" in reason
    with pytest.raises(BuildError, match="another major release"):
        library.load()
    assert library.state()["compatible"] is False and library.built() is None


def test_prebuilt_library_of_another_major_release_is_passed_over(library, monkeypatch, tmp_path):
    """C127, C128"""
    path = library.prebuild()
    assert prebuilt.Record.of(path).toolkit == "13.0" and library.build() == path
    state = library.state()
    assert (state["installed"], state["compiler"], state["arches"], state["reason"]) == ("prebuilt", "nvcc 13.0", "8.0, 9.0+PTX", None)
    torch_of(monkeypatch, "12.8")
    later = base.NativeLibrary("a", ["a.cu"], compiler="nvcc", csrc=tmp_path)
    with pytest.raises(BuildError, match="another major release.*prebuilt library was passed over"):
        later.load()


def test_prebuilt_library_without_code_for_this_gpu_is_compiled_anew(library, monkeypatch, tmp_path):
    """C126, C128"""
    monkeypatch.setenv(cuda_arch.VARIABLE, "8.0")
    path = library.prebuild()
    monkeypatch.delenv(cuda_arch.VARIABLE)
    later = base.NativeLibrary("a", ["a.cu"], compiler="nvcc", csrc=tmp_path)
    assert later.build() != path and cuda_arch.text(later.arches()) == "9.0"
    assert "not built for a GPU of this machine" in later.state()["reason"]
    monkeypatch.setattr(cuda_arch, "visible", lambda: [(7, 5), (8, 6)])         # one that is too old for any build does not count
    assert base.NativeLibrary("a", ["a.cu"], compiler="nvcc", csrc=tmp_path).build() == path


def test_a_record_that_is_missing_is_said(library):
    library.prebuild().with_suffix(".json").unlink()
    assert "no record" in library.state()["reason"]
    assert library.build().parent == base.cache_dir()
