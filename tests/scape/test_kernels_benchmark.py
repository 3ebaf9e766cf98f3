"""benchmarks/scape_kernels.py: what it refuses, before anything is measured, and its layout of a partition."""
import sys

import pytest

from benchmarks import scape_kernels as benchmark


@pytest.mark.parametrize("arguments, told", [
    ("--numel 16M,100000", "Got: 100000, of which the tensors of 24 layers would take 100008. Expected: 209K or more."),
    ("--density 0.1,2", "--density. Got: 2.0. Expected: a number above 0, at most 1."),
    ("--impl reference,nothing", "kernels 'nothing' were asked for"),
])
def test_wrong_arguments_are_one_error(arguments, told, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "measure", None)
    monkeypatch.setattr(sys, "argv", ["scape_kernels.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2 and told in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("numel", [209_000, 1_000_003, 16_000_000])
def test_slots_fill_a_partition(numel):
    slots = benchmark.slots_of(numel)
    assert len(slots) == 1 + 8 * benchmark.LAYERS and all(slot.numel > 0 for slot in slots)
    assert slots[-1].offset + slots[-1].numel in range(numel - len(slots), numel + 1)
