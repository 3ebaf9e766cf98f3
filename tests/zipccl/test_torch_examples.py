"""examples/ddp.py and examples/fsdp2.py as a user starts them: native and zipped runs have the same losses and weights, bit by bit."""
import functools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@functools.cache
def run(name: str, backend: str) -> str:
    done = _run(name, backend)
    if backend == "native" and "terminate called without an active exception" in done.stderr:
        # A rank of the native run, whose bits are only what ours are compared with, aborts now and then on a busy machine, also under
        # ZIPSCAPE_DISABLE=1 (1 of 14 runs, 1 of 20 with a barrier at the end). Never repeated for ours.
        warnings.warn(f"the native run of {name} aborted and was repeated: {done.stderr[-500:]}", stacklevel=1)
        done = _run(name, backend)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _run(name: str, backend: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", EXAMPLES / name,
                           "--backend", backend, "--steps", "4"], capture_output=True, text=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("name, zipped_op", [("ddp.py", "all_reduce"), ("fsdp2.py", "all_gather_into_tensor")])
def test_losses_and_weights_are_the_same_to_the_last_bit(name, zipped_op):
    native, zipped = run(name, "native"), run(name, "zipccl")
    results = re.findall(r"= (0x\S+)|weights (\S+)", native)
    assert len(results) == 5 and results == re.findall(r"= (0x\S+)|weights (\S+)", zipped)
    calls, raw, wire = re.search(rf"^{zipped_op}: (\d+) calls zipped.*; (\S+) MB sent as (\S+) MB", zipped, re.MULTILINE).groups()
    assert int(calls) >= 4 and float(raw) > 1.2 * float(wire), zipped


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py", "torch_run.py"])
def test_examples_stay_short_and_need_no_deepspeed(name):
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 100 and "import deepspeed" not in text
