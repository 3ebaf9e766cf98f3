"""``ds_zipccl report``: what it says as JSON, and its one clear error for a configuration it cannot read."""
import json

import pytest
import torch

from ds_zipccl.cli import bench
from ds_zipccl.cli import report as cli_report
from ds_zipccl.cli.main import main
from ds_zipccl.kernels import loader
from ds_zipccl.stats import Stats, StepLog


def report(tmp_path, *arguments) -> dict:
    file = tmp_path / "report.json"
    assert main(["report", "--json", str(file), *arguments]) == 0
    return json.loads(file.read_text())


def test_content(tmp_path, capsys):
    data = report(tmp_path)
    assert {"meta", "rows", "kernels", "best_kernels", "dtypes", "machine", "activation", "settings"} <= set(data)
    versions = {row["name"]: row for row in data["rows"]}
    assert versions["torch"]["version"] == torch.__version__ and versions["zipscape"]["compatible"] is True
    assert set(data["kernels"]) == set(loader.NAMES)
    assert data["kernels"]["reference"] == {"available": True, "devices": ["cpu", "cuda"], "built": None, "reason": None}
    for kernels in data["kernels"].values():
        assert kernels["available"] == (kernels["reason"] is None)       # whatever is not there has its reason
    assert data["best_kernels"]["cuda" if torch.cuda.is_available() else "cpu"] in loader.NAMES
    assert data["dtypes"] == ["bfloat16", "float16", "float32"] and data["settings"] is None
    printed = capsys.readouterr().out
    assert "kernels: reference" in printed and "torch" in printed


def test_settings_of_a_configuration(tmp_path, capsys):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"bf16": {"enabled": True}, "zipccl": {"enabled": True, "min_bytes": 4096}}))
    settings = report(tmp_path, "--config", str(config))["settings"]
    assert settings["enabled"] is True and settings["min_bytes"] == 4096 and "kernels" in settings
    assert "min_bytes = 4096" in capsys.readouterr().out
    config.write_text("{}")
    assert report(tmp_path, "--config", str(config))["settings"] is None
    assert "no zipccl section" in " ".join(capsys.readouterr().out.split())


def test_what_a_run_did(tmp_path, capsys):
    """Of a log as ``StepLog`` writes it: sums over the steps, the decisions of the last."""
    stats, file = Stats(), tmp_path / "log.jsonl"
    decisions = {}
    stats.sections["switch"] = lambda: ({}, {"0": dict(decisions)})
    news = iter([{"0": {"broadcast bfloat16": {"bytes": [1], "native": [9]}}}, {"0": {"all_gather_into_tensor bfloat16": {
        "bytes": [1 << 20, 1 << 22], "native": [1.5, 2], "zipped": [None, 4], "native_burst": [5, 6]}}}, {}])
    stats.sections["switch_times"] = lambda: ({}, next(news))
    stats.sections["step_trials"] = lambda: ({"kept_native": 1}, {"choice": "native", "zipped_ms": 3.5, "native_ms": 2.5})
    held = iter([{"0": 5, "1": 6}, {"0": 5}, {"0": 1 << 30}])
    stats.sections["symmetric_memory"] = lambda: ({}, next(held))
    log = StepLog(str(file), stats)
    for step in range(3):
        stats.zipped("all_gather_into_tensor", 1000 + step, 700)
        if step:
            stats.native("broadcast", "dtype", 50)
            stats.overflow("all_gather_into_tensor", 1000)
        decisions.update({"all_gather_into_tensor bfloat16": 1 << 20 << step, "broadcast bfloat16": None})
        log.write()
    log.close()
    run = report(tmp_path, "--log", str(file))["run"]
    gather = {"calls_zipped": 3, "calls_native": 0, "raw_bytes": 3003, "wire_bytes": 4100, "overflows": 2, "native_reasons": {}}
    assert run["steps"] == 3 and run["ops"]["all_gather_into_tensor"] == gather
    assert run["ops"]["broadcast"]["native_reasons"] == {"dtype": 2} and run["ops"]["broadcast"]["raw_bytes"] == 100
    assert run["switch"] == {"0": {"all_gather_into_tensor bfloat16": 4 << 20, "broadcast bfloat16": None}}
    printed = " ".join(capsys.readouterr().out.split())
    assert f"all_gather_into_tensor bfloat16 zipped at {4 << 20} bytes, the smallest" in printed and "broadcast bfloat16 never" in printed
    assert run["symmetric_memory"] == {"0": 1 << 30} and f"symmetric memory, group 0: {1 << 30} bytes on each GPU" in printed
    assert "zipped 3.5 ms, native 2.5 ms: all calls go native" in printed
    assert "…" not in printed.partition("log.jsonl")[2], "a name that was cut off"
    assert list(run["switch_times"]["0"]) == ["broadcast bfloat16", "all_gather_into_tensor bfloat16"]
    assert f"all_gather_into_tensor bfloat16, {1 << 20} bytes, us: native 1.5, zipped None, native back to back 5" in printed
    file.write_text("[]\n")
    assert main(["report", "--log", str(file)]) == 2 and "cannot read the log" in capsys.readouterr().err


@pytest.mark.parametrize("text, words", [
    ("{ not json", "cannot read"), (None, "cannot read"), ('{"zipccl": {"enabled": true, "min_byte": 1}}', "min_byte"),
    ('{"zipccl": {"enabled": true, "min_bytes": -1}}', "min_bytes"), ('{"zipccl": 3}', "zipccl"), ("[1]", "must be a JSON object")],
    ids=("not json", "no file", "unknown key", "out of range", "section is no object", "no object"))
def test_a_bad_configuration_is_one_clear_error(tmp_path, capsys, text, words):
    config = tmp_path / "ds_config.json"
    if text is not None:
        config.write_text(text)
    assert main(["report", "--config", str(config)]) == 2
    out, error = capsys.readouterr()
    assert error.startswith("ds_zipccl: ") and words in error and "Traceback" not in error and out == ""
    assert error.strip().count("\n") == 0


def test_a_report_that_cannot_be_written_is_one_clear_error(tmp_path, capsys):
    path = tmp_path / "nowhere" / "report.json"
    assert main(["report", "--json", str(path)]) == 2
    assert capsys.readouterr().err == (f"ds_zipccl: the results cannot be written. Got: No such file or directory. Where: {path}. "
                                       "What to do: make its folder, or name another file.\n")


@pytest.mark.parametrize("variable", ["RANK", "OMPI_COMM_WORLD_RANK"])
def test_only_the_rank_that_writes_needs_the_folder(variable, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("ds_zipccl.cli.main.check_files", lambda *names: asked.append(names))
    for rank in "10":
        monkeypatch.setenv(variable, rank)
        main(["report", "--json", str(tmp_path / "report.json")])
    assert len(asked) == 1


@pytest.mark.parametrize("flag", ["--json", "--markdown"])
def test_a_benchmark_measures_nothing_for_a_file_that_cannot_be_written(tmp_path, capsys, monkeypatch, flag):
    monkeypatch.setattr(bench, "run", lambda args: pytest.fail("measured"))
    for path, words in ((tmp_path / "nowhere" / "x", "No such file"), (tmp_path, "Is a directory")):
        assert main(["bench", "collectives", "--ranks", "2", flag, str(path)]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "nowhere").exists()
    monkeypatch.setattr(bench, "run", lambda args: 0)
    assert main(["bench", "collectives", "--ranks", "2", flag, str(tmp_path / "x")]) == 0 and not (tmp_path / "x").exists()


def test_activation_that_does_not_work_has_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(cli_report.importlib.metadata, "entry_points", lambda group: [])
    activation = report(tmp_path)["activation"]
    assert activation["entry_point"] is False and "not installed" in activation["reason"]
    monkeypatch.setenv("ZIPSCAPE_DISABLE", "1")
    assert "ZIPSCAPE_DISABLE" in report(tmp_path)["activation"]["reason"]


def test_wrong_arguments_have_status_2(capsys):
    for arguments in ([], ["nonsense"], ["report", "--nonsense"], ["bench"], ["bench", "nonsense"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
