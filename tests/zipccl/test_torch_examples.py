"""examples/ddp.py and examples/fsdp2.py as a user starts them: native and zipped runs have the same losses and weights, bit by bit."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import late_threads

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, backend: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", EXAMPLES / name,
                           "--backend", backend, "--steps", "4"], capture_output=True, text=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1"} | late_threads.environment(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name, zipped_op", [("ddp.py", "all_reduce"),
                         pytest.param("fsdp2.py", "all_gather_into_tensor", marks=pytest.mark.slow)])      # torch_pg_train_cases has it
def test_losses_and_weights_are_the_same_to_the_last_bit(name, zipped_op, tmp_path):
    native, zipped = run(name, "native", tmp_path), run(name, "zipccl", tmp_path)
    results = re.findall(r"= (0x\S+)|weights (\S+)", native)
    assert len(results) == 5 and results == re.findall(r"= (0x\S+)|weights (\S+)", zipped)
    calls, raw, wire = re.search(rf"^{zipped_op}: (\d+) calls zipped.*; (\S+) MB sent as (\S+) MB", zipped, re.MULTILINE).groups()
    assert int(calls) >= 4 and float(raw) > 1.2 * float(wire), zipped


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py", "torch_run.py"])
def test_examples_stay_short_and_need_no_deepspeed(name):
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 100 and "import deepspeed" not in text
