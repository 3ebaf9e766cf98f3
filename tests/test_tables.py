"""benchmarks/tables.py and commands.py: what they run is what the commands take, and a part that fails is a row and not a gap."""
import argparse
import json
import os
import runpy
import sys
import time

import pytest

from benchmarks import commands, tables
from ds_zipccl.cli import main, ranks


class Accepted(Exception):
    """The command has understood its arguments."""


def accept(part: tables.Part, monkeypatch) -> None:
    """Raises Accepted if the command of ``part`` takes its arguments. Those with ranks check them until these would start, others while
    they are read."""
    parse, arguments = argparse.ArgumentParser.parse_args, [*part.arguments, "--json", "rows.json"]

    def stop(*_):
        raise Accepted

    def parse_only(self, argv=None, namespace=None):
        parse(self, argv, namespace)
        raise Accepted

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "run", stop)
        if part.name == "interference:kernels" or not part.name.startswith(("links:", "steps:", "trace:", "interference:")):
            patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        for name, value in part.environment.items() if part.ranks else ():
            patch.setenv(name, value)
        if part.ranks:
            patch.setenv("RANK", "0")
        if tuple(arguments[:2]) == commands.DS_ZIPCCL:
            assert main.main(arguments[2:]) == 0            # not reached: Accepted, or an error's status
        else:
            patch.setattr(sys, "argv", arguments)
            patch.setattr(sys, "path", [str(commands.ROOT / "benchmarks"), *sys.path])
            runpy.run_path(arguments[0], run_name="__main__")


@pytest.mark.parametrize("options", ["--device cuda", "--device cuda --one-gpu", "--device cuda --dry-run", "--device cpu"])
def test_every_command_is_accepted(options, monkeypatch):
    parts = list(tables.Plan(tables.parse(options.split())))
    names = [part.name for part in parts]
    assert len(set(names)) == len(names) >= 12 and {name.split(":")[0] for name in names} >= {"links", "steps", "trace", "codec"}
    for part in parts:
        with pytest.raises(Accepted):
            accept(part, monkeypatch)
            pytest.fail(f"not a command: {part}")


def test_list_and_order(capsys):
    assert tables.main(["--device", "cuda", "--list", "codec:bench", "steps:3/1.3b", "links:sockets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["codec:bench", *(f"steps:3/1.3b/{name}" for name in ("sockets", "host", "as_is")),
                                                   "links:sockets"]
    assert "NCCL_P2P_DISABLE=1 ds_zipccl bench step --cells 1.3b/3/2048,8192,32768/native," in lines[2] and "[240 s]" in lines[2]
    assert "one_sided" in lines[3] and "one_sided" not in lines[2]
    assert str(commands.ROOT) not in "".join(lines)
    with pytest.raises(SystemExit, match="linkz"):
        tables.main(["--list", "linkz"])


def cells_of(*arguments) -> list[list[str]]:
    """Of each part, what it asks ``bench step`` for."""
    args = tables.parse(["--device", "cuda", *arguments])
    parts = tables.chosen(list(tables.Plan(args)), args.parts)
    return [part.arguments[part.arguments.index("--cells") + 1:part.arguments.index("--transports")] for part in parts]


def test_all_token_counts_are_in_one_part():
    """Where engines side by side would not fit they are fewer; trials of whole steps come last."""
    assert cells_of("steps:3/1.3b/sockets") == [["1.3b/3/2048,8192,32768/native,zipped,cached,again,silent", "1.3b/3/2048/native,adaptive"]]
    [[small, large]] = cells_of("steps:scape99/1.3b/host")
    assert small.startswith("1.3b/1/2048,8192/adams,scape99,adams_again,") and "scape99_offload_zipped,scape99_ahead," in small
    assert large == "1.3b/1/32768/adams,scape99,adams_silent"
    [[small, large, tried]] = cells_of("steps:1/350m/as_is")
    assert small == "350m/1/2048,8192/native,zipped,one_sided,again,silent,native_late,zipped_late"
    assert large == "350m/1/32768/native,zipped,one_sided,again,silent"
    assert tried == "350m/1/2048/native,adaptive,native_late,adaptive_late"
    assert cells_of("--one-gpu", "steps:3late/1.3b") == [["1.3b/3/2048/native,zipped,again"]]


def test_token_counts_and_runs_that_are_asked_for_are_in_the_names(capsys):
    """Their files are then others than those of all."""
    assert cells_of("steps:scape90/1.3b/host", "--tokens", "32768") == [["1.3b/1/32768/adams,scape90,adams_silent"]]
    assert cells_of("steps:2/1.3b/host", "--tokens", "32768,8192")[0][-1] == "1.3b/2/8192/native,adaptive,native_late,adaptive_late"
    runs = "adams,adams_late,scape99_ahead"
    assert cells_of("steps:1/1.3b/host", "--tokens", "8192,32768", "--runs", runs) == [[f"1.3b/1/8192,32768/{runs}"]]
    assert cells_of("steps:3/1.3b", "--tokens", "2048", "--runs", "native,always,always_one_sided,native_late") == [
        ["1.3b/3/2048/native,always"]] * 2 + [["1.3b/3/2048/native,always,always_one_sided"]]
    assert tables.main(["--device", "cuda", "--list", "--tokens", "8192", "--runs", "native,zipped", "steps:3/1.3b/host"]) == 0
    assert capsys.readouterr().out.startswith("steps:3/1.3b/host/8192/native,zipped  [240 s]")
    names = {part.name for part in tables.Plan(tables.parse(["--device", "cuda", "--runs", "cached"]))}     # of ZeRO-3 alone
    assert "steps:3/1.3b/host/cached" in names and not any(name.startswith(("steps:1/", "steps:scape")) for name in names)
    for arguments in (["--tokens", "2048,many"], ["--tokens", "0"], ["--runs", "native,zapped"]):
        with pytest.raises(SystemExit):
            tables.parse(arguments)
        assert "expected a list of" in capsys.readouterr().err


@pytest.mark.parametrize("how", [[], ["--one-gpu"]], ids=["spawned", "launched"])
def test_a_small_part_over_gloo(how, tmp_path):
    assert tables.main(["--device", "cpu", "--out", str(tmp_path), *how, "links"]) == 0
    found = json.loads((tmp_path / "links_as_is.json").read_text())
    assert found["part"] == "links:as_is" and found["meta"]["command"].startswith("ds_zipccl bench collectives")
    assert found["meta"]["versions"]["torch"] and "revision" in found and found["environment"]["NCCL_NVLS_ENABLE"] == "0"
    rows = found["rows"]
    assert {row["op"] for row in rows} == {"all_gather_into_tensor", "reduce_scatter_tensor"} and {row["wrong"] for row in rows} == {0}
    assert {"native", "native again", "ours, adaptive", "ours, always"} < {row["impl"] for row in rows}


def test_a_failed_part_is_kept_and_the_next_one_runs(tmp_path, monkeypatch, capfd):
    arguments = [*commands.DS_ZIPCCL, "bench", "step", "--device", "cpu", "--ranks", "2", "--models", "huge"]
    broken = tables.Part("broken:a/b,c", arguments, {}, 60)
    script = ("import json, os, sys; print('as it comes'); late = os.environ['ZIPCCL_LATE']; "
              "rows = [{'op': 'step', 'transport': 'host', 'late': late}, {'mode': 'plain'}]; "
              "left_out = ['host tiny/3/32/native: native', 'host tiny/3/64/native']; "
              "json.dump({'meta': {}, 'rows': rows, 'left_out': left_out}, open(sys.argv[-1], 'w'))")
    good = tables.Part("steps:good", ["-c", script], {"ZIPCCL_LATE": "1"}, 60)
    monkeypatch.setattr(tables.Plan, "__iter__", lambda self: iter([broken, good]))
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--revision", "abc"]
    assert tables.main(arguments) == 1 and "as it comes" in capfd.readouterr().out
    [row] = json.loads((tmp_path / "broken_a_b-c.json").read_text())["rows"]
    assert row["op"] == "broken:a/b,c" and row["error"].startswith("status 2") and "huge" in row["error"]
    assert row["command"].startswith("ds_zipccl bench step")
    found = json.loads((tmp_path / "steps_good.json").read_text())
    assert found["rows"] == [{"op": "step", "transport": "host, ZIPCCL_LATE=1", "late": "1"}, {"mode": "plain"}]
    assert found["left_out"] == ["host, ZIPCCL_LATE=1 tiny/3/32/native: native", "host, ZIPCCL_LATE=1 tiny/3/64/native"]
    assert found["revision"] == "abc"

    (tmp_path / "steps_good.json").unlink()
    assert tables.main([*arguments, "--resume", "--seconds", "59"]) == 0 and not (tmp_path / "steps_good.json").exists()
    assert tables.main([*arguments, "--resume"]) == 0 and (tmp_path / "steps_good.json").exists()
    out = capfd.readouterr().out
    assert "left out, 59 s" in out and out.count("broken:a/b,c") == 2 and "good.json is there" not in out


def test_an_interruption_leaves_no_file_of_its_part(tmp_path, monkeypatch):
    stuck = tables.Part("stuck", ["-c", "import time; time.sleep(100)"], {}, 60)
    monkeypatch.setattr(tables.Plan, "__iter__", lambda self: iter([stuck]))

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tables.main(["--device", "cpu", "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_does_not_end_leaves_its_rows_and_no_process(tmp_path):
    script = ("import subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); open(sys.argv[1], 'w').write(str(child.pid)); "
              "open(sys.argv[-1], 'w').write('{\"rows\": [{\"op\": \"first\"}]}'); time.sleep(600)")
    start, pid_file = time.monotonic(), tmp_path / "pid"
    first, last = commands.measure("all", ["-c", script, str(pid_file)], {}, 5)["rows"]
    assert first == {"op": "first"} and last["op"] == "all" and last["error"] == "not done after 5 s"
    assert time.monotonic() - start < 30
    for _ in range(100):                                    # init has yet to take note of its end
        try:
            os.kill(int(pid_file.read_text()), 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("its child is still there")


def test_a_checkout_that_is_not_installed_is_told_what_to_do(monkeypatch):
    script = str(commands.ROOT / "benchmarks" / "tables.py")
    for missing, error in (("ds_zipccl.cli.step_runs", SystemExit), ("psutil", ModuleNotFoundError)):
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "commands", raising=False)
            patch.setitem(sys.modules, missing, None)
            with pytest.raises(error, match="pip install -e" if error is SystemExit else missing):
                runpy.run_path(script, run_name="__main__")


def test_a_command_that_no_time_is_left_for_is_a_row_with_its_reason():
    [row] = commands.measure("step", [*commands.DS_ZIPCCL, "report"], {}, 0)["rows"]
    assert row == {"op": "step", "error": "left out: the time was over", "command": "ds_zipccl report"}
