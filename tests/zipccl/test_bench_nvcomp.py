"""nvCOMP as a rival of the codec bench: found, compiled against, and measured, or a row that says why not. It runs on a GPU only; here a
stand-in with the launcher's interface takes its place."""
import ctypes
import json
import os
from types import SimpleNamespace

import pytest
import torch

from ds_zipccl.cli import bench_codec, bench_nvcomp, bench_subjects
from ds_zipccl.cli.bench_nvcomp import NvcompAns
from ds_zipccl.cli.main import main
from ds_zipccl.errors import KernelError
from tests.helpers.bits import gaussian
from zipscape.errors import BuildError
from zipscape.op_builder import base, toolchain

INSTALLED = bench_nvcomp.find()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """As much of an nvCOMP as can be found."""
    (tmp_path / "include" / "nvcomp").mkdir(parents=True)
    (tmp_path / "lib64").mkdir()
    (tmp_path / "include" / "nvcomp" / "ans.h").write_text("#error not nvCOMP\n")
    (tmp_path / "include" / "nvcomp" / "version.h").write_text("".join(
        f"#define NVCOMP_VER_{name} {value}\n" for name, value in (("MAJOR", 6), ("MINOR", 0), ("PATCH", 1), ("BUILD", 12))))
    (tmp_path / "lib64" / "libnvcomp.so.6").write_bytes(b"not a library")
    monkeypatch.setenv(bench_nvcomp.VARIABLE, str(tmp_path))
    monkeypatch.setenv("ZIPSCAPE_CACHE", str(tmp_path / "cache"))
    return tmp_path


class StandIn:
    """The launcher's functions, with a plain copy for a compressor."""

    def nvcomp_ans_open(self, source, target, num_bytes, chunk, stream, handle):
        self.source, self.target, self.num_bytes, self.frame = source, target, num_bytes, None
        handle._obj.value = 1
        return 0

    def nvcomp_ans_compress(self, handle, stream):
        self.frame = ctypes.string_at(self.source, self.num_bytes)
        return 0

    def nvcomp_ans_decompress(self, handle, stream):
        ctypes.memmove(self.target, self.frame, self.num_bytes)
        return 0

    def nvcomp_ans_compressed_bytes(self, handle, stream, total):
        total._obj.value = len(self.frame) // 2
        return 0

    def nvcomp_ans_close(self, handle):
        self.frame = None


@pytest.fixture
def stand_in(folder, monkeypatch):
    library = StandIn()
    monkeypatch.setattr(bench_nvcomp, "_load", lambda headers, nvcomp: library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return library


def test_found_where_the_variable_says(folder):
    assert bench_nvcomp.find() == (folder / "include", folder / "lib64" / "libnvcomp.so.6")
    assert NvcompAns.version() == "6.0.1.12"


def test_a_variable_that_names_nothing_is_an_error(folder, monkeypatch):
    monkeypatch.setenv(bench_nvcomp.VARIABLE, str(folder / "lib64"))
    with pytest.raises(KernelError, match="NVCOMP_HOME names no nvCOMP.*lib64"):
        bench_nvcomp.find()
    assert "NVCOMP_HOME" in NvcompAns.absent()


def test_what_cannot_be_used_has_its_reason(folder):
    assert "cannot be loaded" in NvcompAns.absent()


def test_rows_that_say_why(monkeypatch):
    monkeypatch.delenv(bench_nvcomp.VARIABLE, raising=False)
    monkeypatch.setattr(bench_nvcomp.importlib.util, "find_spec", lambda name: None)
    (row,) = bench_codec._absent(SimpleNamespace(device="cuda", dtype="bf16,fp32"))
    assert row["impl"] == "nvcomp" and row["path"] == "absent" and "pip install nvidia-nvcomp-cu13" in row["reason"]
    monkeypatch.setattr(NvcompAns, "absent", staticmethod(lambda: None))
    (row,) = bench_codec._absent(SimpleNamespace(device="cuda", dtype="bf16,fp32"))
    assert row["dtype"] == "fp32" and "16-bit" in row["reason"]


def test_absent_rivals_are_in_the_json_and_below_the_table(tmp_path, monkeypatch, capsys):
    for rival in bench_codec.bench_rivals.RIVALS.values():
        monkeypatch.setattr(rival, "absent", staticmethod(lambda: "not installed (as a test says)"))
    file = tmp_path / "rows.json"
    assert main(["bench", "codec", "--device", "cpu", "--repeat", "1", "--size", "64K", "--dtype", "bf16", "--dist", "normal", "--json",
                 str(file)]) == 0
    absent = [row for row in json.loads(file.read_text())["rows"] if row["path"] == "absent"]
    assert [row["impl"] for row in absent] == ["zipnn", "zstd"] and all("as a test says" in row["reason"] for row in absent)
    assert "zipnn: not measured: not installed (as a test says)" in capsys.readouterr().out


def test_asked_for_where_it_cannot_be(capsys):
    assert main(["bench", "codec", "--device", "cpu", "--impl", "nvcomp"]) == 2
    assert "--device cuda" in capsys.readouterr().err


def test_measured_and_verified_like_the_others(stand_in):
    x = gaussian(70_000, 3)
    subject = bench_subjects.rival(x, "nvcomp", 1)
    rows = bench_codec.measure(x, subject, 2, False)
    assert [row["op"] for row in rows] == ["compress", "decompress"]
    assert all(row["wrong"] == 0 and row["ratio"] == 2 and row["path"] == "zipped" for row in rows)
    right = stand_in.nvcomp_ans_decompress
    stand_in.nvcomp_ans_decompress = lambda *a: right(*a) or ctypes.memset(stand_in.target + 10, 0xFF, 4) * 0
    assert bench_codec.measure(x, subject, 1, False)[0]["wrong"] == 2
    subject.close()
    assert stand_in.frame is None


def test_a_failure_is_an_error(stand_in):
    stand_in.nvcomp_ans_compress = lambda *a: 100010
    with pytest.raises(KernelError, match="nvCOMP's ANS failed: compress.*100010"):
        bench_subjects.rival(gaussian(1000, 3), "nvcomp", 1)


def test_compiles_against_the_installed_one(tmp_path, monkeypatch):
    if INSTALLED is None:
        pytest.skip(f"nvCOMP is {NvcompAns.absent()}")
    try:
        toolchain.find("nvcc")
    except BuildError as error:
        pytest.skip(f"nvcc is not installed: {error}")
    monkeypatch.setenv("ZIPSCAPE_CACHE", str(tmp_path))
    bench_nvcomp._load.cache_clear()
    assert NvcompAns.absent() is None
    assert list(base.cache_dir().glob("nvcomp_ans-*.so")) and os.environ["ZIPSCAPE_CACHE"] == str(tmp_path)
