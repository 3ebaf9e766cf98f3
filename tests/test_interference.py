"""benchmarks/interference.py over gloo: every row compared and timed, and ours really ours."""
import json
import subprocess
import sys

import pytest

from benchmarks import interference


def rows(folder, settings):
    file = folder / "rows.json"
    command = [sys.executable, "benchmarks/interference.py", *settings.split(), "--device", "cpu", "--json", str(file)]
    subprocess.run(command, check=True, timeout=120)
    return json.loads(file.read_text())["rows"]


def test_kernels_alone_on_a_cpu(tmp_path):
    found = rows(tmp_path, "--ranks 1 --size 256K --side 64 --rounds 1 --ways copies,kernels")
    assert [(row["op"], row["impl"]) for row in found] == [(op, way) for op in ("all_gather_into_tensor", "reduce_scatter_tensor")
                                                           for way in ("copies", "kernels")]
    assert all(row["wrong"] == 0 and row["both_ms"] >= row["beside_ms"] > 0 for row in found)


def test_rows_on_a_cpu(tmp_path):
    native, zipped = rows(tmp_path, "--ranks 2 --size 256K --side 64 --rounds 1 --op reduce_scatter_tensor --ways native,zipped")
    assert (native["impl"], zipped["impl"]) == ("native", "zipped") and zipped["calls_zipped"] > 10 and zipped["calls_native"] == 0
    for row in (native, zipped):
        assert row["wrong"] == 0 and row["products_slower"] == row["beside_ms"] / row["products_ms"]
        assert row["both_ms"] >= row["beside_ms"] > 0


@pytest.mark.parametrize("settings, said", [("--ways one-sided,zipped", "one-sided: expected of native"),
                                            ("--ways copies --sms 32", "nothing to measure")])
def test_what_would_measure_something_else_or_nothing(settings, said, capsys):
    with pytest.raises(SystemExit) as error:
        interference.parse(settings.split())
    assert error.value.code == 2 and said in capsys.readouterr().err
