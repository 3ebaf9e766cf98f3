"""tests/run_cases.py: each case has an outcome of its own, whatever those before it did; nothing is taken for passed that has not run."""
import ast
import contextlib
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests import run_cases
from tests.helpers import processes, ranks

ROOT = Path(__file__).resolve().parents[1]
MODULE = "tests.helpers.ending_cases"
on_cpu = pytest.mark.skipif(processes.DEVICE != "cpu", reason="the cases are of tensors on the CPU")


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """(exit status, {case: row}, what was printed) of a run of these cases, in their order."""
    for name in ("ZIPSCAPE_TEST_DEVICE", "SCAPE_TEST_FOLDER", "ZIPCCL_MAILBOX_LAG"):          # set by the run: undone by this
        monkeypatch.setenv(name, "cpu" if name == "ZIPSCAPE_TEST_DEVICE" else "1")

    def run(*cases, options=()):
        file = tmp_path / "cases.json"
        status = run_cases.main([*options, "--json", str(file), *[f"{MODULE}:{','.join(cases)}"] * bool(cases)])
        found = json.loads(file.read_text())
        assert found["meta"]["machine"] and found["device"] == "cpu"
        return status, {row["case"]: row for row in found["rows"]}, capfd.readouterr().out

    return run


@on_cpu
def test_cases_behind_one_that_failed_run_all_the_same(run):
    status, rows, printed = run("case_fine", "case_raises_on_rank_1", "case_sum", "case_ends_badly", options=["--ranks", "3"])
    assert status == 1 and [row["outcome"] for row in rows.values()] == ["passed", "failed", "passed", "failed"]
    assert all(len(row["seconds"]) == 3 and row["module"] == MODULE for row in rows.values())
    assert all(0 < seconds < 60 for seconds in rows["case_fine"]["seconds"])
    assert "what rank 1 did not like" in rows["case_raises_on_rank_1"]["texts"][1] and "texts" not in rows["case_sum"]
    assert "rank 1: ValueError: what rank 1 did not like" in printed and "rank 1: process 1 ended by exit status 3" in printed
    assert printed.rstrip().endswith("2 passed, 2 failed, 0 left out")
    assert re.search(rf"^passed +\d+\.\d s  {re.escape(MODULE)}:case_sum$", printed, re.MULTILINE)


@on_cpu
def test_a_hang_is_cut_by_its_own_time_and_says_where_it_was(run):
    start = time.monotonic()
    status, rows, printed = run("case_takes_two_seconds", "case_hangs", "case_fine", options=["--case-seconds", "5"])
    assert status == 1 and [row["outcome"] for row in rows.values()] == ["passed", "failed", "passed"]
    assert all("without progress" in text and "in case_hangs" in text for text in rows["case_hangs"]["texts"])
    assert rows["case_hangs"]["seconds"] == [None, None] and min(rows["case_takes_two_seconds"]["seconds"]) >= 2
    assert re.search(r"rank 1: .*line \d+ in case_hangs", printed)
    assert time.monotonic() - start < 150           # the case sleeps for 600 s


@on_cpu
def test_what_is_left_out_is_counted_and_never_passed(run):
    status, rows, printed = run("case_left_out", "case_sum")
    assert status == 0 and [row["outcome"] for row in rows.values()] == ["left out", "passed"]
    assert rows["case_left_out"]["texts"] == ["left out: needs a third hand"] * 2
    assert ":case_left_out: needs a third hand" in printed and "1 passed, 0 failed, 1 left out" in printed
    status, rows, _ = run("case_left_out_on_rank_1", "case_sum")
    assert status == 1 and [row["outcome"] for row in rows.values()] == ["failed", "passed"]


@on_cpu
def test_nothing_begins_after_the_time_of_the_run(run):
    status, rows, _ = run("case_fine", "case_sum", options=["--seconds", "0"])
    assert status == 0 and [row["outcome"] for row in rows.values()] == ["left out"] * 2
    found = ranks.results(MODULE, ("case_fine", "case_sum"), 2, ends_at=time.time() + 1e-3)          # over when its processes have begun
    assert [outcome.texts for outcome in found.values()] == [[f"left out: {ranks.TIME_IS_OVER}"] * 2] * 2
    assert _asked((0, 10**10)) == ["begins", "over"]


def _asked(times) -> list[str]:
    """What rank 0's clock says to all."""
    store, told = torch.distributed.HashStore(), []
    for i, now in enumerate(times):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda now=now: now)
            for rank in range(2):
                try:
                    ranks._raise_if_over(store, f"case {i}", rank, 5 if rank == 0 else 10**11)
                    told.append("begins")
                except ranks.LeftOut:
                    told.append("over")
    assert told[::2] == told[1::2]
    return told[::2]


@on_cpu
def test_modules_beside_each_other(run, monkeypatch):
    asked = {f"{MODULE}": ("case_takes_two_seconds",), "tests.helpers.ending_cases_again": ("case_takes_two_seconds", "case_left_out")}
    monkeypatch.setattr(run_cases, "asked_for", lambda *_: asked)
    both, real = [], ranks.results

    def results(module, *args, **options):
        both.append(module)
        deadline = time.monotonic() + 60
        while len(both) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        return real(MODULE, *args, **options)

    monkeypatch.setattr(ranks, "results", results)
    status, rows, printed = run(options=["--jobs", "2"])
    assert status == 0 and set(both) == set(asked) and "2 passed, 0 failed, 1 left out" in printed
    assert rows["case_takes_two_seconds"]["outcome"] == "passed"


def test_left_out_is_a_skip_to_pytest():
    with pytest.raises(ranks.LeftOut, match="^needs a third hand$") if processes.DEVICE == "cpu" else pytest.skip("CPU"):
        ranks.assert_ok(MODULE, ("case_left_out", "case_fine"), 2, "case_left_out")
    ranks.assert_ok(MODULE, ("case_left_out", "case_fine"), 2, "case_fine")


def test_every_case_is_run_at_some_number_of_ranks():
    """And what is said of single ones is of cases that there are, each in one module."""
    modules = run_cases.all_modules()
    everywhere = Counter(case for module in modules for case in ranks.case_names(module))
    special = {*run_cases.ONLY_AT, *run_cases.ONLY_IN_TESTS, *run_cases.ON_GPUS, *run_cases.ALONE}
    assert [case for case in special if everywhere[case] != 1] == []
    found = {case for module in modules for world_size in (1, 2, 4) for case in run_cases.cases_for(module, world_size, "cuda")}
    assert set(everywhere) - found == run_cases.ONLY_IN_TESTS
    on_a_cpu = {case for module in modules for case in run_cases.cases_for(module, 2, "cpu")}
    assert "case_cuda_kernels" not in on_a_cpu and not any(case.endswith("_on_gpus") for case in on_a_cpu) and len(on_a_cpu) > 300
    assert MODULE not in modules and not {"tests.zipccl.triton_cases", "tests.zipccl.parity_cases"} & {*modules}


def test_of_stacks_the_cases_own_thread_is_shown():
    first = "(most recent call first):"
    stacks = f"was ended\nThread 0x1 {first}\n  a\n  b\n\nCurrent thread 0x2 {first}\n  case\n  main\n  up"
    assert run_cases.shortened(stacks, 3) == ["was ended", "  case", "  main"]
    assert run_cases.shortened("Traceback (most recent call last):\n  a\nError: b\n", 2) == ["  a", "Error: b"]


def test_names_are_of_modules_or_paths_and_wrong_ones_end_the_run(monkeypatch):
    asked = run_cases.asked_for(["tests/helpers/ending_cases.py:case_sum", f"{MODULE}:case_fine,case_sum"], 2, "cpu")
    assert asked == {MODULE: ("case_sum", "case_fine")}
    with pytest.raises(SystemExit, match="has no case_of_nobody"):
        run_cases.asked_for([f"{MODULE}:case_of_nobody"], 2, "cpu")
    assert run_cases.asked_for([MODULE], 2, "cpu")[MODULE] == ranks.case_names(MODULE)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("ZIPSCAPE_TEST_DEVICE", "cpu")       # the run sets it: undone by this
    monkeypatch.setenv("ZIPCCL_MAILBOX_LAG", "1")
    with pytest.raises(SystemExit, match="no GPU"):
        run_cases.main(["--device", "cuda"])


def test_a_checkout_that_is_not_installed_is_told_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "zipscape.op_builder", None)
    with pytest.raises(SystemExit, match="zipscape.op_builder.*pip install -e"):
        run_cases.main([])


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_ranks_share_a_gpu_where_there_are_too_few(num_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    found = [ranks.gpu_of(rank, 2) for rank in range(2)]
    if num_gpus > 1:
        assert found == [(0, {}), (1, {})]
    else:
        assert [gpu for gpu, _ in found] == [0, 0]
        assert len({settings["NCCL_HOSTID"] for _, settings in found}) == 2
        assert all(settings["NCCL_SOCKET_IFNAME"] == "lo" for _, settings in found)


@pytest.mark.parametrize("device, num_gpus, is_left_out", [("cpu", 0, False), ("cuda", 1, True), ("cuda", 2, False)])
def test_one_sided_cases_are_left_out_where_ranks_share_a_gpu(device, num_gpus, is_left_out, monkeypatch):
    monkeypatch.setattr(ranks, "DEVICE", device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    ran = []
    with pytest.raises(ranks.LeftOut, match="a GPU for each rank") if is_left_out else contextlib.nullcontext():
        ranks.needs_a_gpu_each(lambda rank, world_size: ran.append((rank, world_size)))(1, 2)
    assert ran == [(1, 2)] * (not is_left_out)


@pytest.mark.parametrize("mark, device, world_size, why", [
    (ranks.stands_for_a_gpu, "cuda", 2, "a CPU does in it"), (ranks.needs_stand_ins, "cuda", 2, "symmetric memory is real"),
    (ranks.needs_peers, "cpu", 1, "no peers")])
def test_what_cases_need(mark, device, world_size, why, monkeypatch):
    ran = []
    case = mark(lambda rank, world_size: ran.append(world_size))
    monkeypatch.setattr(ranks, "DEVICE", device)
    with pytest.raises(ranks.LeftOut, match=why):
        case(0, world_size)
    monkeypatch.setattr(ranks, "DEVICE", "cpu")
    case(0, 2)
    assert ran == [2]


DEVICES = re.compile(r"DEVICE|device|cuda|gpu", re.IGNORECASE)


def silent_returns(source: str) -> list[str]:
    """Cases that return on some device before they have asserted anything: they would count as passed."""
    found = []
    for case in ast.walk(ast.parse(source)):
        if not isinstance(case, ast.FunctionDef) or not case.name.startswith("case_"):
            continue
        asserts = [node.lineno for node in ast.walk(case) if isinstance(node, ast.Assert)
                   or isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith(("assert_", "check", "compare"))]
        for branch in ast.walk(case):
            ends = isinstance(branch, ast.If) and isinstance(branch.body[-1], ast.Return) and branch.body[-1].value is None
            if ends and DEVICES.search(ast.unparse(branch.test)) and not any(line < branch.body[-1].lineno for line in asserts):
                found.append(f"{case.name}:{branch.lineno}")
    return found


def test_no_case_passes_on_some_device_without_doing_anything():
    files = sorted(ROOT.glob("tests/*/*_cases.py"))
    found = {path.name: where for path in files if (where := silent_returns(path.read_text()))}
    assert not found, f"they should raise LeftOut, see tests/helpers/ranks.py: {found}"
    assert silent_returns("def case_a(rank, world):\n    n = 1\n    if DEVICE == 'cuda':\n        return\n    assert n") == ["case_a:3"]
    assert silent_returns("def case_a(rank, world):\n    assert rank\n    if x.is_cuda:\n        return\n    assert n") == []
