"""``ds_zipccl bench collectives`` on tiny sizes (C133): its rows, its verification, its refusals, its launchers."""
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_zipccl.cli.bench_collectives import IN_PLACE, median_interval, slower
from ds_zipccl.cli.main import main
from ds_zipccl.collectives.registry import specs
from ds_zipccl.collectives.views import PERIOD, gaussians
from tests.helpers import ranks
from tests.zipccl import bench_cases

COMMAND = ["bench", "collectives", "-b", "64K", "-e", "128K", "-f", "2", "--iters", "2", "--device", "cpu"]


def check(rows: list[dict], ops) -> None:
    assert [row["op"] for row in rows if row["impl"] == "ours" and not row["in_place"]] == [op for op in ops for _ in range(2)]
    for row in rows:
        assert row["wrong"] == 0 and row["ranks"] == 2 and row["time_us"] > 0
        assert row["bytes"] == 2 * row["count"] and abs(row["bytes"] - (1 << 16 if row["bytes"] < 100000 else 1 << 17)) <= 4
        assert row["algbw"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * specs()[row["op"]].bus_factor(2))
        low, high = row["speedup_interval"]
        assert low <= row["speedup"] <= high
        if row["impl"] == "ours":
            assert row["path"] == row["decision"] == "zipped" and 1.25 < row["ratio"] < 1.42
        else:
            assert row["path"] == "native" and row["ratio"] == 1
    native = [row for row in rows if row["impl"] == "native"]
    assert all(row["speedup"] == 1 for row in native)
    for op in ops:
        assert {row["in_place"] for row in rows if row["op"] == op} == {False, op in IN_PLACE}, op


def test_every_collective_of_the_registry(tmp_path):
    """One-sided where that can be, which is on GPUs."""
    file = tmp_path / "rows.json"
    assert main([*COMMAND, "--ranks", "2", "--transport", "symmetric_memory", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert set(document) == {"meta", "settings", "rows", "slower", "left_out", "switch", "switch_times"}
    assert set(document["switch"]) == set(document["switch_times"]) == {"always"} and document["left_out"] == []
    assert document["slower"] == slower(document["rows"])
    assert document["settings"]["transport"] == "symmetric_memory"
    assert {row["transport"] for row in document["rows"]} == {"process_group"}
    check(document["rows"], list(specs()))


def run_under(launcher: list[str], tmp_path, **more) -> list[dict]:
    file = tmp_path / "rows.json"
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    done = subprocess.run([*launcher, *COMMAND, "--op", "all_gather_into_tensor", "--json", str(file)], env={**clean, **more},
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(file.read_text())["rows"]


def test_under_torchrun(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ds_zipccl.cli.main"]
    check(run_under(launcher, tmp_path), ["all_gather_into_tensor"])


def test_under_mpirun(tmp_path):
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("no mpirun here")
    launcher = [mpirun, "-n", "2", "--oversubscribe", sys.executable, "-m", "ds_zipccl.cli.main"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    check(run_under(launcher, tmp_path, **as_root), ["all_gather_into_tensor"])


@pytest.mark.slow
def test_under_deepspeed(tmp_path):
    port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port), "--module",
                "ds_zipccl.cli.main"]
    check(run_under(launcher, tmp_path, DS_ACCELERATOR="cpu"), ["all_gather_into_tensor"])


def test_wrong_elements_are_counted_and_times_divided():
    """One flipped bit, one element never written, one result that is right: what ``count_wrong`` sees of each; times, and how many there
    are, by another clock; rivals' results."""
    cases = ranks.case_names(bench_cases.__name__)
    assert ranks.outcomes(bench_cases.__name__, cases, 2) == dict.fromkeys(cases, ["ok", "ok"])


@pytest.mark.parametrize("arguments, message", [
    ([], "at least 2 ranks"), (["--ranks", "1"], "at least 2 ranks"), (["--ranks", "2", "--op", "gather"], "all_reduce"),
    (["--ranks", "2", "-b", "2M", "-e", "1M"], "-b <= -e"), (["--ranks", "2", "-f", "1"], "-f >= 2"), (["--ranks", "2", "-b", "x"], "64K"),
    (["--ranks", "2", "--calls", "1,0"], "--calls >= 1"), (["--ranks", "2", "--calls", "x"], "--calls >= 1"),
    (["--ranks", "2", "--choice", "adaptive,never"], "always, adaptive"), (["--ranks", "2", "--rivals", "sum,copy"], "sum, raw, frames")])
def test_refusals(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "collectives", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_large_inputs_are_repeated_and_no_row_is_like_another():
    data = gaussians(1, 1 << 23, torch.bfloat16, "cpu")
    assert torch.equal(data[:1 << 22][:PERIOD], data[PERIOD:2 * PERIOD]) and data.is_contiguous() and data.numel() == 1 << 23
    assert all((data[:n] == data[n:2 * n]).float().mean() < 0.1 for n in (1 << 22, 1 << 21, 1024))


def test_interval_of_the_median():
    values = [float(v) for v in (5, 1, 9, 3, 7, 11, 2, 8, 6, 4, 10)]
    assert median_interval(values) == (2, 10)              # 11 values: between the 2nd and the 10th with 98.8 %
    assert median_interval(values[:5]) == (1, 9)           # too few for 95 %: all of them
    assert median_interval([float(v) for v in range(1, 31)]) == (10, 21)


def test_a_row_is_slower_where_its_whole_interval_says_so():
    def row(path, median, high):
        return {"impl": path, "speedup": median, "speedup_interval": (0.5, high)}

    rows = [row("native", 0.5, 0.5), row("native again", 0.96, 0.98), row("ours", 0.9, 0.969), row("ours", 0.96, 0.97),
            row("ours", 0.98, 1.1)]
    assert slower(rows) == {"native again": {"rows": 1, "intervals": 0, "medians": 1}, "ours": {"rows": 3, "intervals": 1, "medians": 2}}


def test_both_choices_and_a_rival_within_their_time(tmp_path):
    """In one run, with fewer turns than asked for and without the bursts, which take too long; as JSON and as a table."""
    file, table = tmp_path / "rows.json", tmp_path / "table.md"
    assert main([*COMMAND, "--ranks", "2", "--op", "reduce_scatter_tensor,all_gather_into_tensor", "--place", "out", "--choice",
                 "adaptive,always", "--rivals", "sum,raw,frames", "--iters", "40", "--seconds", "1e-6", "--calls", "1,9", "--json",
                 str(file), "--markdown", str(table)]) == 0
    document = json.loads(file.read_text())
    ours, rows = ["ours, adaptive", "ours, always"], document["rows"]
    assert set(document["slower"]) == {"native again", *ours} and set(document["switch"]) == {"adaptive", "always"}
    for op, paths in (("reduce_scatter_tensor", [*ours, "all-to-all + sum"]), ("all_gather_into_tensor", ours)):
        assert [row["impl"] for row in rows if row["op"] == op] == ["native", "native again", *paths] * 2
    assert all(row["turns"] == 5 and row["calls"] == 1 and row["wrong"] == 0 and not row["in_place"] for row in rows)
    assert all(row["decision"] == "zipped" for row in rows if row["impl"] == "ours, always")
    lines = [line for line in table.read_text().splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 2 * 2 and "| reduce_scatter_tensor | 128 KiB | out | 1 | 5 |" in "".join(lines)
    assert main([*COMMAND, "--ranks", "2", "--op", "broadcast", "--limit", "0", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["rows"] == [] and document["left_out"] == ["broadcast of 64 KiB", "broadcast of 128 KiB"]


def test_calls_back_to_back(tmp_path):
    """Times are of one; bytes and decisions too."""
    file = tmp_path / "rows.json"
    assert main([*COMMAND, "--ranks", "2", "--op", "all_gather_into_tensor,all_reduce", "--calls", "1,3", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    for number in (1, 3):
        check([row for row in rows if row["calls"] == number], ["all_gather_into_tensor", "all_reduce"])
    assert {row["calls"] for row in rows} == {1, 3}
