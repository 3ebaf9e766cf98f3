"""The demo's comparison, on run folders made by hand: it must see a single flipped bit, and name it."""
import json

import pytest
import torch

from tests.train.demo_folders import setting, write_lines, write_run, write_scape_runs

pytest.importorskip("matplotlib")
import demo_report


def log_row(step, raw=1000, wire=700, zipped=4, native=1):
    counts = {"calls_zipped": zipped, "calls_native": native, "raw_bytes": raw, "wire_bytes": wire,
              "native_reasons": {"below min_bytes": native} if native else {}, "overflows": 0}
    return {"step": step, "time_s": 0.1, "ops": {"all_gather_into_tensor": counts}}


def write_log(out, rows):
    write_lines(out / "zipped" / "zipccl.jsonl", rows)


@pytest.fixture
def runs(tmp_path):
    """Changes to losses or weights of a run, by name -> the folder of three runs that are equal but for them, and two good SCAPE runs."""
    def build(**changes):
        for name in ("native", "control", "zipped"):
            losses = [[3.0, 2.5, 2.0], [3.1, 2.6, 2.1]]
            weights = {"embedding.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
                       "norm.weight": torch.ones(5, dtype=torch.bfloat16), "scale": torch.tensor(0.5)}
            changes.get(name, lambda *_: None)(losses, weights)
            write_run(tmp_path / name, losses, weights)
        write_log(tmp_path, [log_row(step) for step in (1, 2, 3)])
        write_scape_runs(tmp_path)
        return tmp_path
    return build


def flip_bit(losses, weights):
    weights["embedding.weight"].view(torch.int16)[2, 1] ^= 1


def change_losses(losses, weights):
    losses[1][1] += 2.0 ** -50
    losses[0][2] += 1.0


def make_report(out):
    return demo_report.make_report(out, setting(out / "configs"))


def text_of(report):
    return "\n".join(report["verdict"])


def test_equal_runs_pass_and_all_files_are_written(runs):
    out = runs()
    report = make_report(out)
    assert report["ok"] and report["bit_equal"]
    assert all(len({report[kind][run] for run in ("native", "control", "zipped")}) == 1 for kind in ("losses_sha256", "weights_sha256"))
    assert json.loads((out / "report.json").read_text()) == report
    op = next(row for row in report["rows"] if row["op"] == "all_gather_into_tensor")
    assert (op["bytes"], op["wire_bytes"], op["native_reasons"]) == (1000, 700, {"below min_bytes": 3})
    assert op["ratio"] == pytest.approx(1000 / 700)
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    markdown = (out / "report.md").read_text()
    assert "bit-equal" in markdown and "pinned to `always`" in markdown and "short run" in markdown


def test_the_verdicts_are_two(runs):
    """Each stands for its own runs; both are in the report."""
    out = runs()
    write_lines(out / "scape" / "scape.jsonl", [])
    report = make_report(out)
    assert report["ok"] and not report["scape"]["ok"] and len(report["scape"]["rows"]) == 2
    markdown = (out / "report.md").read_text()
    assert f"**{report['verdict'][0]}**" in markdown and f"**{report['scape']['verdict'][0]}**" in markdown and "FAILED" in markdown
    report = make_report(runs(zipped=flip_bit))
    assert not report["ok"] and report["scape"]["ok"]
    assert [row["run"] for row in report["rows"] if row["op"] == "step"] == ["native", "control", "zipped", "adams", "scape"]


def test_one_flipped_bit_is_named(runs):
    report = make_report(runs(zipped=flip_bit))
    assert not report["ok"] and not report["bit_equal"]
    assert "embedding.weight[2, 1] (bfloat16): native 0x4110 (9), zipped 0x4111 (9.0625)" in text_of(report)
    assert "1 of its 12 elements differ" in text_of(report) and "first difference at step" not in text_of(report)
    assert report["weights_sha256"]["zipped"] != report["weights_sha256"]["native"]
    assert report["losses_sha256"]["zipped"] == report["losses_sha256"]["native"]


def test_signed_zero_and_nan_payload_count_as_differences(runs):
    def negative_zero(losses, weights):
        weights["embedding.weight"][0, 0] = -0.0

    report = make_report(runs(zipped=negative_zero))
    assert "embedding.weight[0, 0] (bfloat16): native 0x0000 (0), zipped 0x8000 (-0)" in text_of(report)


def test_first_differing_loss_is_named_even_one_ulp_away(runs):
    report = make_report(runs(zipped=change_losses))
    assert not report["ok"]
    assert f"first difference at step 2, rank 1: native {2.6.hex()} " in text_of(report)
    assert "2 values differ" in text_of(report)


def test_difference_in_a_scalar_or_in_dtype_is_named(runs):
    def other(losses, weights):
        weights["scale"] = torch.tensor(0.5, dtype=torch.bfloat16)

    report = make_report(runs(zipped=other))
    assert not report["ok"] and "parameter scale: native torch.float32 ()" in text_of(report)


def test_control_that_differs_is_said_and_sets_the_spread(runs):
    def noise(size):
        def change(losses, weights):
            losses[0][0] += size
            weights["norm.weight"] += size
        return change

    report = make_report(runs(control=noise(0.25), zipped=noise(0.5)))
    assert report["ok"] and not report["bit_equal"]
    assert "does not repeat itself" in text_of(report) and ": within 3 times the spread" in text_of(report)


def test_zipped_run_outside_the_control_spread_fails(runs):
    def control(losses, weights):
        losses[0][0] += 0.01

    report = make_report(runs(control=control, zipped=flip_bit))
    assert not report["ok"] and "NOT within 3 times" in text_of(report)


@pytest.mark.parametrize("rows, why", [
    ([], "no rows"),
    ([log_row(1, wire=1000)], "1000 bytes sent for 1000"),
    ([log_row(1, wire=1000, zipped=0, native=5)], "every call went native"),
], ids=["empty_log", "wire_equals_raw", "all_native"])
def test_nothing_compressed_is_a_failure(runs, rows, why):
    out = runs()
    write_log(out, rows)
    report = make_report(out)
    assert not report["ok"] and "nothing was compressed" in report["verdict"][0] and why in report["verdict"][0]


def test_missing_log_missing_run_and_divergence_are_errors(runs):
    out = runs(control=lambda losses, _: losses[0].__setitem__(0, float("nan")))
    with pytest.raises(demo_report.DemoError, match="control run diverged"):
        make_report(out)
    (out / "control" / "losses.json").unlink()
    with pytest.raises(demo_report.DemoError, match="no complete result of the control run"):
        make_report(out)
    with pytest.raises(demo_report.DemoError, match="nothing was compressed"):
        demo_report.read_traffic(out / "no.jsonl")
    (out / "bad.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(demo_report.DemoError, match="not a zipccl log"):
        demo_report.read_traffic(out / "bad.jsonl")
