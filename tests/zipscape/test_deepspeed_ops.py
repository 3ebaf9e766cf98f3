"""Our libraries as DeepSpeed sees them."""

import ctypes
import os
import re
import subprocess
import sys

import pytest

from zipscape.op_builder import zipccl

deepspeed_ops = pytest.importorskip("zipscape.op_builder.deepspeed_ops")


def report(**environment):
    """Lines of ds_report's op table in a fresh process that imports nothing of ours by itself."""
    code = "from deepspeed.env_report import op_report; op_report(verbose=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"\x1b\[\d+m", "", done.stdout).splitlines()


def test_ds_report_lists_our_ops():
    lines = report()
    for name in ("zipccl", "scape"):
        (line,) = [line for line in lines if line.startswith(f"{name}_cpu ")]
        assert line.endswith("[OKAY]")
        assert any(line.startswith(f"{name}_cuda ") for line in lines)


def test_ds_report_says_why_an_op_is_not_available():
    lines = report(ZIPSCAPE_CXX="no-such-compiler", ZIPSCAPE_CACHE=os.devnull)
    (number,) = [number for number, line in enumerate(lines) if line.startswith("zipccl_cpu ")]
    assert lines[number].endswith("[NO]") and "no-such-compiler" in lines[number - 1]


def test_disabled_means_not_listed():
    assert not any(line.startswith("zipccl") for line in report(ZIPSCAPE_DISABLE="1"))


def test_builder_loads_a_ctypes_handle_without_torch_headers():
    builder = deepspeed_ops.ZipcclCPUBuilder()
    assert builder.is_compatible()
    handle = builder.load(verbose=False)
    assert isinstance(handle, ctypes.CDLL) and handle is zipccl.ZIPCCL_CPU.load()
    assert all(os.path.isfile(path) for path in builder.sources())


def test_compatibility_table_that_exists_already_gets_our_rows(monkeypatch):
    import deepspeed.ops
    from deepspeed.ops.op_builder import all_ops
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", {})
    deepspeed_ops.register(all_ops)
    assert deepspeed.ops.__compatible_ops__["zipccl_cpu"] is True
    assert all_ops.ALL_OPS["zipccl_cpu"].name == "zipccl_cpu"
