"""``ds_scape estimate``: numbers worked out by hand, what the time model does, and one clear error for what it cannot take."""
import json
import re
from pathlib import Path

import pytest

from ds_scape.cli import estimate
from ds_scape.cli.main import main
from ds_scape.optimizer.memory import kept_bytes


def rows(tmp_path, *arguments) -> dict[str, dict]:
    file = tmp_path / "rows.json"
    assert main(["estimate", *arguments, "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    assert {"meta", "settings", "left_out"} <= set(data) and data["settings"]["params"] == arguments[1]
    return {row["what"]: row for row in data["rows"]}


def bytes_of(row) -> tuple:
    return tuple(row[f"{kind}_bytes"] for kind in ("norm", "values", "weights", "mask", "wire"))


def test_bytes_and_memory_by_hand(tmp_path, capsys):
    """10 parameters more than 4 ranks can share evenly: partitions of 250,004, of which the last owns 249,998."""
    found = rows(tmp_path, "--params", "1000010", "--ranks", "4", "--density", "0.1,0.01")
    assert bytes_of(found["dense, reduce-scatter"]) == (0, 2 * 250_004 * 3, 2 * 250_004 * 3, 0, 4 * 250_004 * 3)
    assert found["dense, all-reduce"]["wire_bytes"] == 6 * 250_004 * 3
    # 25,000 coordinates of every rank; 0.1: bits, 250,004 / 8; 0.01: 4 blocks of indices, 2,500 coordinates.
    assert bytes_of(found["SCAPE 0.1"])[:4] == (16 * 3, 2 * 25_000 * 3, 2 * 25_000 * 3, 31_251 * 3)
    assert bytes_of(found["SCAPE 0.01"])[:4] == (16 * 3, 2 * 2_500 * 3, 2 * 2_500 * 3, (4 * 4 + 2 * 2_500) * 3)
    assert found["SCAPE 0.1"]["ratio"] == 4 * 250_004 * 3 / found["SCAPE 0.1"]["wire_bytes"]
    # Residual, ages, masks of 4 ranks and one's own; then positions and values, when the masks of the 4 are not needed any more.
    kept, step = 4 * 1_000_016 + 2 * 250_004 + 5 * 31_251, (4 + 2) * 100_000 - 4 * 31_251
    assert (found["SCAPE 0.1"]["device_bytes"], found["SCAPE 0.1"]["host_bytes"]) == (kept + step, 0)
    assert all(row["step_s"] is None and row["speedup"] is None for row in found.values())
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing was run" in printed and all(" ".join(line.split()) in printed for line in estimate.LEFT_OUT)


def test_settings_change_what_they_should(tmp_path):
    plain = rows(tmp_path, "--params", "350M", "--ranks", "8")
    fp32 = rows(tmp_path, "--params", "350M", "--ranks", "8", "--values-dtype", "fp32")
    assert fp32["SCAPE 0.1"]["values_bytes"] == 2 * plain["SCAPE 0.1"]["values_bytes"]
    assert fp32["dense, reduce-scatter"] == plain["dense, reduce-scatter"]
    bits = rows(tmp_path, "--params", "350M", "--ranks", "8", "--mask-encoding", "bits")
    assert bits["SCAPE 0.01"]["mask_bytes"] == 350_000_000 / 8 / 8 * 7 > plain["SCAPE 0.01"]["mask_bytes"]
    offload = rows(tmp_path, "--params", "350M", "--ranks", "8", "--offload")
    stored = 4 * 350_000_000 + 2 * 350_000_000 // 8            # residual, ages
    assert (plain["SCAPE 0.1"]["host_bytes"], offload["SCAPE 0.1"]["host_bytes"]) == (0, stored)
    assert plain["SCAPE 0.1"]["device_bytes"] - offload["SCAPE 0.1"]["device_bytes"] == stored - (128 << 20)


def test_time_is_bytes_over_the_link(tmp_path):
    def timed(step_time, *more):
        return rows(tmp_path, "--params", "800M", "--ranks", "2", "--link", "0.5", "--density", "0.1", "--step-time", step_time, *more)

    found = timed("0.7")
    dense, scape = found["dense, reduce-scatter"], found["SCAPE 0.1"]
    assert dense["exposed_s"] == pytest.approx(1600e6 / 0.5e9) and dense["step_s"] == pytest.approx(0.7 + 3.2)
    # Values and weights are exposed; the mask (50 MB, 0.1 s) is behind the next step's arithmetic, as long as that lasts.
    assert scape["exposed_s"] == pytest.approx(2 * 80e6 / 0.5e9, rel=1e-6) and scape["mask_bytes"] == 50_000_000
    assert scape["speedup"] == pytest.approx((0.7 + 3.2) / (0.7 + 0.32), rel=1e-6)
    assert timed("0.04")["SCAPE 0.1"]["exposed_s"] == pytest.approx(0.32 + 0.06, rel=1e-6)
    half = timed("0.7", "--overlap", "0.25")
    assert half["dense, reduce-scatter"]["exposed_s"] == pytest.approx(3.2 - 0.25 * 1.6)
    assert half["dense, all-reduce"]["exposed_s"] == pytest.approx(4.8 - 0.7)                  # no more than there is time for
    assert half["SCAPE 0.1"]["exposed_s"] == scape["exposed_s"]
    # Residual and ages; where much is sent those of the own half once more, to be ranked.
    link = "--offload", "--host-link", "16"
    for density, again in ((0.1, 0), (0.3, 1600e6 + 800e6)):
        plain, moved = (timed("0.7", "--density", str(density), *more)[f"SCAPE {density}"] for more in ((), link))
        assert moved["exposed_s"] - plain["exposed_s"] == pytest.approx((3200e6 + 800e6 + again) / 16e9)
    plain, moved = (timed("0.7", "--ranks", "4", *more)["SCAPE 0.1"] for more in ((), link))
    assert moved["exposed_s"] - plain["exposed_s"] == pytest.approx((3200e6 + 400e6) / 16e9)


def test_the_example_of_the_docs(tmp_path):
    text = (Path(__file__).resolve().parents[2] / "docs" / "scape.md").read_text()
    (arguments,) = re.findall(r"`(--params [^`]*--step-time [^`]*)`", text)
    for what, row in rows(tmp_path, *arguments.split()).items():
        traffic, times = estimate._traffic_cells(row), estimate._time_cells(row)
        assert f"| {' | '.join([what, *traffic[-2:], times[0], *times[2:]])} |" in text


def test_one_rank_sends_nothing(tmp_path, capsys):
    found = rows(tmp_path, "--params", "7B", "--ranks", "1", "--link", "1", "--step-time", "1")
    assert all(row["wire_bytes"] == 0 and row["ratio"] is None and row["step_s"] == 1 for row in found.values())
    assert "-" in capsys.readouterr().out


def test_counts_are_read_as_people_write_them():
    assert [estimate.parse_count(text) for text in ("350M", "1.8B", "124439808", "7b", "0.5k", "2T")] == [
        350_000_000, 1_800_000_000, 124_439_808, 7_000_000_000, 500, 2_000_000_000_000]


@pytest.mark.parametrize("option, value", [
    ("--params", "many"), ("--params", "0"), ("--params", "-3M"), ("--params", "9999T"), ("--density", "0"), ("--density", "0.1,x"),
    ("--density", "nan"), ("--ranks", "0"), ("--link", "0"), ("--link", "nan"), ("--step-time", "inf"), ("--host-link", "-1"),
    ("--overlap", "1.5")])
def test_what_it_cannot_take_is_one_clear_error(capsys, option, value):
    assert main(["estimate", f"{option}={value}", *([] if option == "--params" else ["--params", "1M"])]) == 2
    out, error = capsys.readouterr()
    assert error.startswith("ds_scape: ") and option in error and out == "" and error.strip().count("\n") == 0


def test_wrong_arguments_have_status_2():
    for arguments in ([], ["nonsense"], ["estimate"], ["estimate", "--params", "1M", "--values-dtype", "fp8"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2


def test_density_one_has_no_masks():
    layout = estimate.layout_of(1000, 2, 1.0)
    assert kept_bytes(layout) == {"residual": 4000, "ages": 1000, "masks": 0, "q": 2000}
