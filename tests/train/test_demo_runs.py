"""The demo's table of runs, its progress and exit status; and (slow) the demo as a user starts it."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.train.demo_folders import demo_runs

pytest.importorskip("matplotlib")
import demo
import demo_report

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["native", "control", "zipped", "adams", "scape"]


def test_configurations_differ_in_what_is_compared_and_nothing_else(tmp_path):
    (tmp_path / "scape").mkdir()
    (tmp_path / "scape" / "scape.jsonl").write_text("of an earlier run")
    configs = demo_runs.write_configs(tmp_path, 2, 50)
    assert list(configs) == NAMES and not (tmp_path / "scape" / "scape.jsonl").exists()
    assert all(json.loads((tmp_path / name / "ds_config.json").read_text()) == config for name, config in configs.items())
    assert configs["native"] == configs["control"] == {k: v for k, v in configs["zipped"].items() if k != "zipccl"}
    adams, scape = configs["adams"], configs["scape"]
    assert {key for key in scape if scape[key] != adams[key]} == {"optimizer", "zipccl"}
    assert adams["zipccl"] | {"log": None} == scape["zipccl"] | {"log": None} and scape["zipccl"]["collectives"] == "never"
    params = scape["optimizer"]["params"]
    assert adams["optimizer"]["type"] == "ScapeAdamS" and scape["optimizer"]["type"] == "SCAPE"
    assert adams["optimizer"]["params"].items() <= params.items()
    assert (params["density"], params["dense_warmup_steps"], scape["zero_optimization"]["stage"]) == (0.1, 15, 1)


def test_reductions_stay_native_beyond_two_ranks(tmp_path):
    assert demo_runs.write_configs(tmp_path, 3, 10)["zipped"]["zipccl"]["collectives"] == {
        "all_gather": "always", "reduce_scatter": "never"}


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--quick", "--out", str(tmp_path)])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def test_progress_counts_every_run_to_its_own_end(arguments, monkeypatch, capsys):
    commands = []

    def run(args, spec, env, on_step):
        command = demo.launch_command(args, spec)
        commands.append(command)
        num_steps = int(command[command.index("--steps") + 1])
        for step in range(1, num_steps + 1):
            on_step(step, f"{9 - step / 100:.4f}")
        return 1.0

    monkeypatch.setattr(demo, "run", run)
    assert demo.run_all(demo.parse_args(), {}, Console()) == dict.fromkeys(NAMES, 1.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("starting")] == [f"{name}: starting" for name in NAMES]
    for name, num_steps in zip(NAMES, (8, 8, 8, 24, 24), strict=True):
        own = [line for line in lines if line.startswith(f"{name}: step")]
        assert own[-1] == f"{name}: step {num_steps}/{num_steps} loss {9 - num_steps / 100:.4f}" and 8 <= len(own) <= 12
    assert ["--masters" in command for command in commands] == [False, False, False, True, True]


@pytest.mark.parametrize("ok, scape_ok, status", [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_exit_status(arguments, monkeypatch, ok, scape_ok, status):
    monkeypatch.setattr(demo, "run_all", lambda *_: {})
    monkeypatch.setattr(demo_report, "make_report", lambda out, setting: {"ok": ok, "scape": {"ok": scape_ok}})
    monkeypatch.setattr(demo_report, "print_tables", lambda *_: None)
    with pytest.raises(SystemExit) as stopped:
        demo.main()
    assert stopped.value.code == status


def test_the_trained_script_knows_nothing_of_us():
    text = (ROOT / "examples" / "train_gpt.py").read_text()
    assert not any(word in text for word in ("zipscape", "zipccl", "ds_scape", "SCAPE"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quick_demo_from_start_to_end(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "examples" / "demo.py", "--quick", "--out", tmp_path], capture_output=True, text=True,
                          timeout=1100, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["bit_equal"] and report["scape"]["ok"]
    assert [row["run"] for row in report["rows"] if row["op"] == "step"] == NAMES
    assert {row["what"]: row["steps"] for row in report["scape"]["rows"]} == {
        "dense ZeRO (formula)": 24, "adams (counted)": 24, "scape: dense": 2, "scape: sparse": 22, "scape: whole run": 24}
