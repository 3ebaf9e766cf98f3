"""Which kernels run: the best that there are, said once where that is not the first choice; a named set never gives way."""
import json
import logging
import os
import subprocess
import sys

import pytest
import torch

import ds_scape
from ds_scape.cli.main import main
from ds_scape.errors import KernelError
from ds_scape.kernels import impl_reference, loader, ops
from zipscape.errors import ConfigError

SCRIPT = """
import json, logging, sys
logging.basicConfig(stream=sys.stderr, format="LOG %(message)s")
from ds_scape.cli.main import main
from ds_scape.errors import KernelError
from ds_scape.kernels import loader
best = [loader.choose("best", "cpu").names["cpu"] for _ in range(3)]
try:
    loader.choose("cpu", "cpu")
    explicit = None
except KernelError as error:
    explicit = str(error)
print(json.dumps({"best": best, "explicit": explicit, "report": loader.report()["cpu"]}))
"""


def test_without_a_compiler(tmp_path):
    env = {key: value for key, value in os.environ.items() if key not in ("CXX", "CC", "CUDA_HOME")}
    env.update(PATH=str(tmp_path), ZIPSCAPE_CACHE=str(tmp_path / "cache"), HOME=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["best"] == ["reference"] * 3
    assert done.stderr.count("'cpu' are not available") == 1, done.stderr
    assert not result["report"]["available"] and "compiler" in result["report"]["reason"]
    assert "were asked for" in result["explicit"] and "compiler" in result["explicit"]


def test_with_a_compiler_the_cpu_kernels_are_the_best():
    assert loader.choose("best", "cpu").names == {"cpu": "cpu"}
    assert loader.choose("reference", "cpu").names == {"cpu": "reference"}
    assert loader.report()["cpu"]["built"] in ("baseline", "avx2", "avx512")
    with pytest.raises(KernelError, match="serves cuda tensors|no CUDA device"):
        loader.choose("cuda", "cpu")


def test_the_report_says_what_is_built(tmp_path, capsys):
    assert main(["report", "--json", str(tmp_path / "report.json")]) == 0
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["kernels"]["cpu"]["available"] and data["best_kernels"]["cpu"] == "cpu"
    assert data["kernels"]["cuda"]["available"] or "CUDA" in data["kernels"]["cuda"]["reason"]
    assert {row["name"] for row in data["libraries"]} == {"scape_cpu", "scape_cuda"}
    assert "best here" in capsys.readouterr().out


def step(kernels, dtype=torch.float64):
    w, m, g = (torch.randn(5, generator=torch.Generator().manual_seed(i), dtype=dtype) for i in range(3))
    kernels.dense_step(w, m, g, lr=0.1, kept=0.9, taken=0.1, beta2=0.95, eps=1e-6, decay=1.0)
    return w


def test_what_they_cannot_take_the_reference_does_and_it_is_said_once_and_counted(caplog, monkeypatch):
    monkeypatch.setattr(ops, "fallbacks", ops.Counter())
    with caplog.at_level(logging.WARNING, "ds_scape"):
        results = [step(loader.choose("best", "cpu")) for _ in range(3)]
    assert torch.equal(results[0], step(ops.REFERENCE)) and torch.equal(results[0], results[2])
    assert len([r for r in caplog.records if "dense_step" in r.message and "float64" in r.message]) == 1
    ((operation, reason),), (count,) = zip(*ops.fallbacks.items(), strict=True)
    assert (operation, count) == ("dense_step", 3) and "float64" in reason
    with pytest.raises(KernelError, match="'cpu' were asked for and cannot do dense_step.*float64"):
        step(loader.choose("cpu", "cpu"))


@pytest.mark.parametrize("make", [ds_scape.SCAPE, ds_scape.ScapeAdamS])
def test_the_setting_is_checked(make):
    with pytest.raises(ConfigError, match="kernels = 'fast'"):
        make([torch.nn.Parameter(torch.zeros(2))], kernels="fast")


def test_the_setting_decides_for_scape_adams(monkeypatch):
    used = []
    monkeypatch.setattr(impl_reference, "dense_step", lambda *args: used.append(1))
    for kernels in ("reference", "cpu"):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        optimizer = ds_scape.ScapeAdamS([p], kernels=kernels)
        optimizer.step()
        assert "kernels" not in optimizer.state_dict()["param_groups"][0]
    assert len(used) == 1
