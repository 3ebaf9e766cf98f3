"""``ds_zipccl bench step``: what it reads off a trace, what it refuses, and that its rows say what happened."""
import json
import random
import subprocess
import sys

import pytest

from ds_zipccl.cli import step_trace
from ds_zipccl.cli.bench_step import merged
from ds_zipccl.cli.main import main


def event(name, start, end):
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}


def test_exposed_is_what_no_arithmetic_hides():
    events = [event("gemm", 0, 100), event("ncclDevKernel_AllGather_RING_LL", 50, 300), event("zipccl_encode_bf16", 280, 320),
              event("gemm", 120, 150), event("ncclDevKernel_SendRecv", 310, 330), event("Memcpy DtoD", 400, 440),
              event("Memcpy HtoD (Pinned -> Device)", 90, 110), event("Memcpy DtoH (Device -> Pinned)", 320, 350)]
    found = step_trace.summarize(events, num_steps=2)
    # Busy: 0-350 and 400-440. Arithmetic: 0-100, 120-150, 400-440. NCCL: 50-300, 310-330.
    expected = {"communication_ms": 270 / 2e3, "codec_ms": 40 / 2e3, "copies_ms": 50 / 2e3, "compute_ms": 170 / 2e3,
                "exposed_ms": (330 - 130) / 2e3, "exposed_copies_ms": 20 / 2e3, "idle_ms": 50 / 2e3, "span_ms": 440 / 2e3}
    assert found == pytest.approx(expected)
    marks = [event(f"at::cuda::(anonymous namespace)::{step_trace.MARK}(long)", at, at + 1) for at in (390, 95, 145, 430)]
    # Between them: arithmetic 95-100, 120-145, 400-430; busy all of 95-145 and 400-430.
    expected |= {"optimizer_ms": 60 / 2e3, "exposed_in_optimizer_ms": 20 / 2e3, "idle_in_optimizer_ms": 10 / 2e3}
    assert step_trace.summarize([*events, *marks], num_steps=2) == pytest.approx(expected)
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
    ("--stages 4", "--stages. Got: 4"), ("--models huge", "--models. Got: huge"), ("--steps 0", "--steps, --warmup and --rounds"),
    ("--rounds 0", "--steps, --warmup and --rounds"), ("--transports host --device cpu", "before the ranks start"),
    ("--tokens 2048", "at least 2 ranks")])
def test_wrong_arguments_are_named_before_anything_runs(arguments, words, capsys):
    assert main(["bench", "step", "--device", "cpu", *arguments.split()]) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")


def rows_of(tmp_path, *arguments) -> tuple[dict, str]:
    """({(stage, run): row}, what was printed)"""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "ds_zipccl.cli.main", "bench", "step", "--device", "cpu", "--ranks", "2", "--models", "tiny",
               "--bucket-size", "1000000", "--seq-len", "32", "--tokens", "64", "--steps", "1", "--warmup", "1", "--choice", "always",
               "--min-bytes", "0", *arguments, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return {(row["stage"], row["run"]): row for row in json.loads(path.read_text())["rows"]}, done.stdout


def check_zipped(rows, stage):
    zipped = rows[stage, "zipped"]
    assert zipped["losses"] == "equal" and zipped["ratio"] > 1.1 and zipped["ops"]["all_gather_into_tensor"]["calls_zipped"] > 0
    assert zipped["speedup"] == pytest.approx(rows[stage, "native"]["step_ms"] / zipped["step_ms"])
    assert rows[stage, "native"]["ops"] == {} and len(zipped["times_ms"]) == 2
    native = rows[stage, "native"]
    assert native["wire_bytes"] == sum(native["sent_bytes"].values()) > zipped["wire_bytes"]


def test_rows_on_two_ranks(tmp_path):
    rows, said = rows_of(tmp_path, "--stages", "2", "--rounds", "2", "--runs", "native,zipped,adams,scape90")
    assert set(rows) == {(2, "native"), (2, "zipped"), (2, "adams"), (2, "scape90")}
    check_zipped(rows, 2)
    assert rows[2, "scape90"]["losses"] == "differ" and rows[2, "scape90"]["rival"] == "adams"
    numel = rows[2, "adams"]["num_parameters"]
    assert rows[2, "adams"]["wire_bytes"] == pytest.approx(3 * numel, rel=0.01)        # all reduced in 16 bits, its half of all gathered
    assert rows[2, "scape90"]["wire_bytes"] == pytest.approx(0.27 * numel, rel=0.1)      # densities of 0.1, and a bit for each coordinate
    assert "zipped" in said and "equal" in said
    rounds = [line.split()[-4] for line in said.splitlines() if line.startswith("round")]
    assert rounds == ["native", "zipped", "adams", "scape90", "scape90", "adams", "zipped", "native"]


@pytest.mark.slow
def test_rows_of_stage_3(tmp_path):
    rows, _ = rows_of(tmp_path, "--stages", "3", "--rounds", "1", "--steps", "2", "--runs", "native,zipped,adams,scape90")
    assert set(rows) == {(3, "native"), (3, "zipped"), (3, "adams")}
    check_zipped(rows, 3)


def test_rounds_are_put_together():
    rounds = [{"times_ms": [3.0, 9.0], "step_ms": 6.0, "memory_bytes": 7, "losses": ["a", "b"], "trace": {"x": 1}},
              {"times_ms": [5.0, 1.0], "step_ms": 3.0, "memory_bytes": 5, "losses": ["a", "c"], "trace": {"x": 2}}]
    assert merged(rounds) == {"times_ms": [3.0, 9.0, 5.0, 1.0], "step_ms": 4.0, "memory_bytes": 7, "losses": ["a", "b", "a", "c"],
                              "trace": {"x": 2}}
    assert merged([rounds[0] | {"memory_bytes": None}])["memory_bytes"] is None
