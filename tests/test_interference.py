"""benchmarks/interference.py over gloo: every row compared and timed, and ours really ours."""
import json
import subprocess
import sys


def test_rows_on_a_cpu(tmp_path):
    file = tmp_path / "rows.json"
    settings = "--ranks 2 --device cpu --size 256K --side 64 --rounds 1 --op reduce_scatter_tensor --ways native,zipped"
    command = [sys.executable, "benchmarks/interference.py", *settings.split(), "--json", str(file)]
    subprocess.run(command, check=True, timeout=120)
    native, zipped = json.loads(file.read_text())["rows"]
    assert (native["impl"], zipped["impl"]) == ("native", "zipped") and zipped["calls_zipped"] > 10 and zipped["calls_native"] == 0
    for row in (native, zipped):
        assert row["wrong"] == 0 and row["products_slower"] == row["beside_ms"] / row["products_ms"]
        assert row["both_ms"] >= row["beside_ms"] > 0
