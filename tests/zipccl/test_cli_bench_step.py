"""``ds_zipccl bench step``: what it reads off a trace, what it refuses, and that its rows say what happened."""
import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from ds_zipccl.cli import step_rows, step_trace
from ds_zipccl.cli.main import main
from ds_zipccl.cli.step_rows import gain_alone
from ds_zipccl.cli.step_runs import RUNS, engine_config
from ds_zipccl.cli.step_switch import print_of


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
    before = [event("gemm", -90, -50), event("ncclDevKernel_AllReduce", -50, 400), event(step_trace.MARK, -20, -19)]
    assert step_trace.summarize([*before, *events, *marks], num_steps=2) == pytest.approx(expected)
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
    ("--stages 4", "--stages. Got: 4"), ("--models huge", "--models. Got: huge"), ("--steps 0", "--steps, --rounds, --warmup"),
    ("--rounds 0", "--steps, --rounds, --warmup"), ("--cells tiny/2/2048", "--cells. Got: tiny/2/2048"), ("--warmup 1", ">= 2"),
    ("--cells tiny/2/2048/native/x", "--cells. Got: tiny/2/2048/native/x"), ("--cells tiny/1/2048/scape90", "adams before scape90"),
    ("--transports host --device cpu", "before the ranks start"),
    ("--tokens 2048", "at least 2 ranks")])
def test_wrong_arguments_are_named_before_anything_runs(arguments, words, capsys):
    assert main(["bench", "step", "--device", "cpu", *arguments.split()]) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")


def rows_of(tmp_path, *arguments) -> tuple[list[dict], str]:
    """(the rows, what was printed)"""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "ds_zipccl.cli.main", "bench", "step", "--device", "cpu", "--ranks", "2", "--bucket-size", "50000",
               "--seq-len", "32", "--rounds", "2", "--steps", "1", "--warmup", "2", "--choice", "always", "--min-bytes", "0", *arguments,
               "--json", str(path), "--markdown", str(tmp_path / "rows.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(path.read_text())["rows"], done.stdout


def test_rows_on_two_ranks(tmp_path):
    """Stage 2 twice on one engine, of two batch sizes; stage 3 with kept frames; engines of other optimizers side by side in stage 1."""
    rows, said = rows_of(tmp_path, "--cells", "tiny/2/32,64/native,zipped,again,silent",
                         "tiny/3/32/native,zipped,cached,silent,adams,scape90", "tiny/1/32/adams,scape90,scape90_zipped",
                         "tiny/3/64/native,adaptive,zeropp/3")
    names = [(row["stage"], row["tokens"], row["run"]) for row in rows]
    assert names == [*((2, tokens, run) for tokens in (32, 64) for run in ("native", "zipped", "again", "silent")),
                     *((3, 32, run) for run in ("native", "zipped", "cached", "silent", "adams")),
                     *((1, 32, run) for run in ("adams", "scape90", "scape90_zipped")), (3, 64, "native"), (3, 64, "adaptive")]
    by_name = dict(zip(names, rows, strict=True))
    tried = by_name[3, 64, "adaptive"]
    if "trial" in tried:                            # else the switch has found nothing to zip
        assert tried["times_ms"] == tried["trial"][f"{tried['trial']['choice']}_ms"] and len(tried["times_ms"]) == 12
        assert by_name[3, 64, "native"]["times_ms"] == tried["trial"]["native_ms"]
    assert tried["losses"] == "equal" and len(tried["times_ms"]) in (3, 12)
    for stage, tokens, run in names[:-2]:
        row, native = by_name[stage, tokens, run], by_name.get((stage, tokens, "native"))
        assert len(row["times_ms"]) == 2 and set(row["host_ms"]) == {"forward", "backward", "optimizer"}
        if run in ("zipped", "cached"):
            assert row["losses"] == "equal" and row["ratio"] > 1.02 and native["wire_bytes"] > row["wire_bytes"] and native["ops"] == {}
            assert row["ops"]["all_gather_into_tensor"]["calls_zipped"] > 0
            assert row["speedup"] == pytest.approx(native["step_ms"] / row["step_ms"]) and 0 <= row["f_alone"] < 1
        if run == "again":
            assert row["losses"] == "equal" and row["wire_bytes"] == native["wire_bytes"] == sum(native["sent_bytes"].values())
        if run == "silent":
            assert row["losses"] == "" and row["wire_bytes"] == 0
    dense, sparse = by_name[1, 32, "adams"], by_name[1, 32, "scape90"]
    numel = dense["num_parameters"]
    assert dense["wire_bytes"] == pytest.approx(3 * numel, rel=0.01)        # all reduced in 16 bits, its half of all gathered
    assert sparse["wire_bytes"] == pytest.approx(0.27 * numel, rel=0.1)     # densities of 0.1, and a bit for each coordinate
    assert sparse["rival"] == "adams" and sparse["losses"] == ""
    tables = (tmp_path / "rows.md").read_text()
    assert tables.count("## ZeRO-") == 3 and tables.count("| tiny |") == len(rows) and "exposed ms" not in tables
    file = json.loads((tmp_path / "rows.json").read_text())
    assert "left out: " in said and len(file["left_out"]) == 1
    assert "tiny/3/64/native,adaptive,zeropp: zeropp (ValueError: " in file["left_out"][0]
    merged = tmp_path / "merged.json"
    assert main(["bench", "step", "--merge", *[str(tmp_path / "rows.json")] * 2, "--json", str(merged)]) == 0
    assert json.loads(merged.read_text())["rows"] == rows * 2


@pytest.mark.slow                           # scape/test_ahead.py has the steps
def test_steps_taken_ahead_are_in_the_rows(tmp_path):
    """All steps are, as nothing is clipped: two first ones, one whose bytes are counted, two rounds of two; the second size's are not
    counted again."""
    rows, _ = rows_of(tmp_path, "--cells", "tiny/1/32,64/adams,scape90_offload,scape90_ahead")
    ahead = [(row["tokens"], row["run"], row["ahead"]) for row in rows if "ahead" in row]
    assert len(rows) == 6 and ahead == [(32, "scape90_ahead", {"ahead_taken": 7}), (64, "scape90_ahead", {"ahead_taken": 6})]


def test_runs_share_an_engine_only_where_all_settings_are_the_same():
    clipped, free, adams = RUNS["scape90_offload"], RUNS["scape90_ahead"], RUNS["adams"]
    assert len({run.engine_key for run in (clipped, free, replace(free, config={}), adams)}) == 4
    assert RUNS["scape90_offload_zipped"].engine_key == clipped.engine_key
    named = {name for name, run in RUNS.items() if "gradient_clipping" in engine_config(run, 1, 1, 50000)}
    assert named == {"scape90_ahead", "scape99_ahead"}
    assert engine_config(free, 1, 1, 50000) == engine_config(replace(free, config={}), 1, 1, 50000) | {"gradient_clipping": 0.0}


def test_prints_of_a_state_tell_single_bits():
    torch.manual_seed(0)
    for dtype, numel in ((torch.float32, 1000), (torch.bfloat16, 1001), (torch.float32, 1)):
        tensor = torch.randn(numel).to(dtype)
        before = print_of(tensor, chunk=64)
        for index in {0, numel // 2, numel - 1}:
            flipped = tensor.clone()
            flipped.view(torch.uint8)[index] ^= 16
            assert print_of(flipped, chunk=64) != before
        assert print_of(tensor.clone(), chunk=1 << 20) == before


def test_what_a_trial_says():
    trial = {"choice": "native", "zipped_ms": [10.0, 30.0, 20.0], "native_ms": [12.0, 18.0, 16.0]}
    found = step_rows._tried(trial)
    assert found["speedup"] == 1 and found["if_zipped"] == 16 / 20 and found["trial"] is trial
    found = step_rows._tried(trial | {"choice": "zipped"})
    assert found["speedup"] == found["if_zipped"] == 16 / 20 and found["speedup_interval"] == found["if_zipped_interval"]


def test_nothing_begins_when_the_time_is_over(tmp_path):
    """But what was left out is said."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "ds_zipccl.cli.main", "bench", "step", "--device", "cpu", "--ranks", "2", "--seq-len", "32",
               "--cells", "tiny/2/32/native,zipped", "tiny/3/64/native", "--seconds", "0", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(path.read_text())
    assert found["rows"] == [] and found["left_out"] == ["as_is tiny/2/32/native,zipped", "as_is tiny/3/64/native"]


def test_gain_of_collectives_alone():
    alone = {"native all_gather_into_tensor": 10.0, "ours all_gather_into_tensor": 8.0, "native reduce_scatter_tensor": 10.0,
             "ours reduce_scatter_tensor": 12.0, "native all_reduce": 20.0, "ours all_reduce": 16.0}
    assert gain_alone({}, alone) == 1
    assert gain_alone({"all_gather_into_tensor": 5}, alone) == pytest.approx(10 / 8)
    both = {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 5}
    assert gain_alone(both, alone) == pytest.approx(20 / 18)                # native where that is faster
    reduced = {"all_reduce": 10, "all_gather_into_tensor": 5}
    assert gain_alone(reduced, alone, left_reduced=10) == pytest.approx(30 / (8 + 16))              # zipped as it is
    assert gain_alone(reduced, alone, scattered=5) == pytest.approx(30 / (8 + 12))                  # every bucket owned by both halves
    assert gain_alone(reduced, alone, scattered=10) == pytest.approx(30 / (8 + 24))                 # each by one rank
    assert gain_alone(reduced, alone, left_reduced=4, scattered=3) == pytest.approx(30 / (8 + 0.4 * 16 + 0.6 * 12))
