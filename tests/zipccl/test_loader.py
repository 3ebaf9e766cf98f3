"""Choosing kernels on a machine without a compiler: reference kernels, said once and shown in the report; a named set is an error."""
import json
import os
import subprocess
import sys

SCRIPT = """
import json, logging, sys
logging.basicConfig(stream=sys.stderr, format="LOG %(message)s")
from ds_zipccl.errors import KernelError
from ds_zipccl.kernels import loader
best = [loader.resolve("best", "cpu") for _ in range(3)]
try:
    loader.resolve("cpu", "cpu")
    explicit = None
except KernelError as error:
    explicit = str(error)
print(json.dumps({"best": best, "explicit": explicit, "report": loader.report()["cpu"]}))
"""


def run_without_compiler(tmp_path):
    empty = tmp_path / "bin"
    empty.mkdir()
    env = {key: value for key, value in os.environ.items() if key not in ("CXX", "CC", "CUDA_HOME")}
    env.update(PATH=str(empty), ZIPSCAPE_CACHE=str(tmp_path / "cache"), HOME=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_without_a_compiler(tmp_path):
    """C121, C124: nothing breaks, nothing is silent."""
    result, log = run_without_compiler(tmp_path)
    assert result["best"] == ["reference"] * 3
    assert log.count("'cpu' are not available") == 1, log
    assert not result["report"]["available"] and "compiler" in result["report"]["reason"]
    assert "were asked for" in result["explicit"] and "compiler" in result["explicit"]
