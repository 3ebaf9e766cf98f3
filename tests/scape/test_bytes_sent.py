"""benchmarks/scape_bytes.py: what crosses the network interface is what SCAPE counts and docs/scape.md's formula says."""
import json
import subprocess
import sys

import pytest


def test_bytes_that_cross_the_network(tmp_path):
    settings = "--ranks 2 --runs scape90,scape99 --dim 128 --layers 2 --steps 4 --json"
    done = subprocess.run([sys.executable, "-m", "benchmarks.scape_bytes", *settings.split(), str(tmp_path / "rows.json")],
                          capture_output=True, text=True, timeout=120)
    if "no network namespace" in done.stderr:
        pytest.skip("no network namespace can be made here")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["run"], row["mask"]) for row in rows] == [("scape90", "bits"), ("scape99", "indices")]
    for row, allowed in zip(rows, (0.55, 0.07), strict=True):
        assert row["counted_bytes"] == sum(row["formula"].values())
        # TCP's headers and gloo's: about 1 % and some hundred bytes a message, of a few thousand here
        assert 0 < row["crossed_bytes"] - row["counted_bytes"] < 0.03 * row["counted_bytes"] + 6000
        assert row["counted_per_weight"] < allowed
