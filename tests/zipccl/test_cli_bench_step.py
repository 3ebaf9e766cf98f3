"""``ds_zipccl bench step``: what it reads off a trace, what it refuses, and that its rows say what happened."""
import json
import random
import subprocess
import sys

import pytest

from ds_zipccl.cli import step_trace
from ds_zipccl.cli.main import main


def event(name, start, end):
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}


def test_exposed_is_what_no_arithmetic_hides():
    events = [event("gemm", 0, 100), event("ncclDevKernel_AllGather_RING_LL", 50, 300), event("zipccl_encode_bf16", 280, 320),
              event("gemm", 120, 150), event("ncclDevKernel_SendRecv", 310, 330), event("Memcpy DtoD", 400, 440)]
    found = step_trace.summarize(events, num_steps=2)
    # Busy: 0-330 and 400-440. Arithmetic: 0-100, 120-150, 400-440. NCCL: 50-300, 310-330.
    assert found == pytest.approx({"communication_ms": 270 / 2e3, "codec_ms": 40 / 2e3, "compute_ms": 170 / 2e3,
                                   "exposed_ms": (330 - 130) / 2e3, "idle_ms": 70 / 2e3, "span_ms": 440 / 2e3})
    assert step_trace.summarize([], 1)["span_ms"] == 0


def test_union_against_single_points():
    rng = random.Random(3)
    for _ in range(200):
        intervals = [(a, a + rng.randrange(0, 9)) for a in (rng.randrange(60) for _ in range(rng.randrange(12)))]
        joined = step_trace.union(intervals)
        covered = {x for a, b in intervals for x in range(a, b)}
        assert {x for a, b in joined for x in range(a, b)} == covered and step_trace.length(joined) == len(covered)
        assert all(a[1] < b[0] for a, b in zip(joined, joined[1:], strict=False))


@pytest.mark.parametrize("arguments, words", [
    ("--runs zipped", "native before zipped"), ("--runs native,other", "--runs. Got: other"), ("--tokens 100", "multiples of --seq-len"),
    ("--stages 4", "--stages. Got: 4"), ("--models huge", "--models. Got: huge"), ("--steps 0", "--steps and --warmup"),
    ("--transports host --device cpu", "before the ranks start"), ("--tokens 2048", "at least 2 ranks")])
def test_wrong_arguments_are_named_before_anything_runs(arguments, words, capsys):
    assert main(["bench", "step", "--device", "cpu", *arguments.split()]) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")


def test_rows_on_two_ranks(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "ds_zipccl.cli.main", "bench", "step", "--device", "cpu", "--ranks", "2", "--models", "tiny",
               "--stages", "2,3", "--bucket-size", "1000000", "--seq-len", "32",
               "--tokens", "64", "--steps", "2", "--warmup", "1", "--choice", "always", "--min-bytes", "0",
               "--runs", "native,zipped,adams,scape90", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = {(row["stage"], row["run"]): row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {(2, "native"), (2, "zipped"), (2, "adams"), (2, "scape90"), (3, "native"), (3, "zipped"), (3, "adams")}
    for stage in (2, 3):
        zipped = rows[stage, "zipped"]
        assert zipped["losses"] == "equal" and zipped["ratio"] > 1.1 and zipped["ops"]["all_gather_into_tensor"]["calls_zipped"] > 0
        assert zipped["speedup"] == pytest.approx(rows[stage, "native"]["step_ms"] / zipped["step_ms"])
        assert rows[stage, "native"]["ops"] == {} and len(zipped["times_ms"]) == 2
    assert rows[2, "scape90"]["losses"] == "differ" and rows[2, "scape90"]["rival"] == "adams"
    assert "zipped" in done.stdout and "equal" in done.stdout
