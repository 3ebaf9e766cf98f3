"""Two hosts with a slow link between them, made on this machine (benchmarks/hosts.py), ranks started by torchrun."""
import functools
import os
import tempfile
from pathlib import Path

import pytest

from benchmarks import hosts

ROOT = Path(__file__).resolve().parents[2]
BOTH = ("case_there_are_two_hosts", "case_words_cross_hosts_by_the_channel", "case_torch_backend_equals_native",
        "case_scape_trains_alike_everywhere")
LAST = "case_zero_3_equals_native"
#: {ranks a host: (rate of the link, cases in order)}
RUNS = {1: ("100mbit", (*BOTH, "case_adaptive_zips_on_a_slow_link", "case_settings_that_differ_are_one_error", LAST)),
        2: ("1gbit", (*BOTH, LAST))}
LIMIT_S = 120
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "ZIPCCL_MAILBOX_LAG": "1", "PYTHONPATH": str(ROOT)}


@functools.cache
def why_not() -> str | None:
    return hosts.why_not()


@pytest.fixture(autouse=True)
def two_hosts():
    """A container without rights makes none. CI installs the commands: that one is missing there is a failure."""
    if why_not() is not None:
        (pytest.fail if os.environ.get("CI") and "need the command" in why_not() else pytest.skip)(why_not())


@functools.cache
def outcomes(ranks: int) -> dict[str, list[str]]:
    """{case: "ok", a traceback, or what the rank's host said last}."""
    rate, names = RUNS[ranks]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:           # a host has a /dev/shm of its own
        commands = hosts.torchrun(2, ranks, ["-m", "tests.train.two_hosts_cases", folder, *names])
        statuses = hosts.run(commands, rate, seconds=LIMIT_S, logs=Path(folder), environment=ENVIRONMENT)
        found = {}
        for name in names:
            files = [Path(folder, f"{name}.{rank}") for rank in range(2 * ranks)]
            found[name] = [file.read_text() if file.exists() else f"not run, or not to its end; status {statuses[rank // ranks]}"
                           for rank, file in enumerate(files)]
        if any(statuses) and all(text == "ok" for text in found[names[-1]]):
            found[names[-1]] = [f"status {status}: {Path(folder, f'host{host}.log').read_text(errors='replace')[-3000:]}"
                                for host, status in enumerate(statuses)]
    return found


@pytest.mark.parametrize("ranks, case", [(ranks, case) for ranks, (_, cases) in RUNS.items() for case in cases])
def test_two_hosts(ranks, case):
    failures = [f"--- rank {rank}\n{text}" for rank, text in enumerate(outcomes(ranks)[case]) if text != "ok"]
    assert not failures, "\n".join(failures)


def test_statuses_rates_and_what_runs_on(tmp_path):
    """Of several hosts at once, in one network each; nothing of them stays."""
    names = [["sh", "-c", f"hostname; sleep {0 if host else 60}; exit {host}"] for host in range(3)]
    assert hosts.run(names, "1gbit", seconds=1, logs=tmp_path) == [137, 1, 2]
    assert [(tmp_path / f"host{host}.log").read_text() for host in range(3)] == ["host0\n", "host1\n", "host2\n"]
    assert hosts.bits_per_second("2.5gbit") == 2_500_000_000
    for wrong in ("fast", "0mbit", "10"):
        with pytest.raises(ValueError, match="such as 100mbit"):
            hosts.bits_per_second(wrong)
