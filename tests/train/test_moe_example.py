"""examples/moe.py as a user starts it: native and zipped runs have the same losses and weights, bit by bit."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers import late_threads

ROOT = Path(__file__).resolve().parents[2]
STEPS, LAYERS = 4, 2


def run(folder: Path, native: bool) -> str:
    """Standard output; the statistics of a zipped run are in the folder. The shipped configuration, but zipped whatever a probe finds."""
    config = json.loads((ROOT / "configs" / "moe_zipccl.json").read_text())
    config["zipccl"] |= {"collectives": "always", "min_bytes": 1 << 14, "log": str(folder / "log.jsonl")}
    (folder / "config.json").write_text(json.dumps(config))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | ({"ZIPSCAPE_DISABLE": "1"} if native else {})
    environment |= late_threads.environment(folder)         # examples/leave.py: gloo's must not end the process by an abort
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "examples" / "moe.py",
               "--config", folder / "config.json", "--steps", str(STEPS), "--layers", str(LAYERS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_losses_and_weights_are_the_same_to_the_last_bit(tmp_path):
    native = run(tmp_path, native=True)
    assert not (tmp_path / "log.jsonl").exists()
    zipped = run(tmp_path, native=False)
    results = re.findall(r"= (0x\S+)|weights (\S+ \S+)", native)
    assert len(results) == STEPS + 1 and results == re.findall(r"= (0x\S+)|weights (\S+ \S+)", zipped)
    first, second = results[-1][1].split()
    assert first != second, "the experts of the two ranks are the same"
    rows = [json.loads(line)["ops"]["all_to_all_single"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS
    for row in rows:
        assert row["calls_zipped"] == 4 * LAYERS and row["calls_native"] == 0, row      # there and back, forward and backward
    assert sum(row["raw_bytes"] for row in rows) > 1.2 * sum(row["wire_bytes"] for row in rows), rows


def test_the_example_is_short_and_ordinary():
    text = (ROOT / "examples" / "moe.py").read_text()
    assert len(text.splitlines()) < 130 and "import ds_zipccl" not in text
