"""benchmarks/scape_offload.py: that it runs, that it would see a wrong bit, and what it makes of a trace."""
import argparse
import json
from unittest import mock

import pytest
import torch

from benchmarks import scape_offload as benchmark
from tests.helpers.processes import DEVICE


@pytest.mark.skipif(DEVICE != "cpu", reason="a trace of a GPU takes it alone")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_rows_with_and_without_a_wrong_bit(tmp_path, is_wrong):
    args = argparse.Namespace(ranks=2, numel=80_000, runs="0.05:plain,0.05:offload,0.05:ahead", forward_ms=1, backward_ms=1, repeat=2,
                              host_threads="1", echo=True, json=str(tmp_path / "rows.json"))
    make = benchmark.Bench.flow

    def flow(bench, density, mode):
        made, slots = make(bench, density, mode)
        if is_wrong and mode == "ahead":
            made.flats[0].weight[70] += 1
        return made, slots

    with mock.patch.object(benchmark.Bench, "flow", flow):
        if is_wrong:
            with pytest.raises(SystemExit, match="differ"):
                benchmark.measure(0, args, 0, False)
        else:
            benchmark.measure(0, args, 0, False)
    plain, offload, ahead, host = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["wrong"] > 0 for row in (plain, offload, ahead)] == [False, False, is_wrong]
    assert [row["host_bytes"] for row in (plain, offload, ahead)] == [0, 5 * 80_000, 10 * 80_000] and host["ready_ms"] > 0
    assert torch.get_num_threads() > 0


def test_a_summary_of_a_trace():
    """Two steps: a gap within a pass is none between steps; what is behind the passes is hidden; what is under a kernel is the kernel's."""
    ms, events = 1000.0, []

    def put(start, end, name):
        events.append((start * ms, end * ms, name))

    put(0, 20, "nvjet_gemm")
    put(21, 40, "nvjet_gemm")
    put(10, 45, "Memcpy HtoD (Pinned -> Device)")
    put(41, 42, "void scape::lanes_kernel<1>")
    put(44, 47, "void scape::enter_kernel<1, true>")
    put(46, 52, "Memcpy DtoH (Device -> Pinned)")
    put(50, 53, "ncclDevKernel_AllGather")
    put(55, 90, "nvjet_gemm")
    put(54, 60, "ncclDevKernel_AllGather")
    row = benchmark.summarize(events, 2)
    expected = {"window": 15, "norm": 1, "enter": 3, "communication": 4, "copies": 1 + 2 + 3, "nothing": 1, "choose": 0,
                "copies in, all": 17.5, "copies in, hidden": 15, "copies out, all": 3, "copies out, hidden": 0, "communication, all": 4.5,
                "communication, hidden": 2.5}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
