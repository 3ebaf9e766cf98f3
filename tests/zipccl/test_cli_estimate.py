"""``ds_zipccl estimate``: numbers worked out by hand, and one clear error for what it cannot take."""
import json

import pytest

from ds_zipccl.cli import estimate
from ds_zipccl.cli.main import main


def rows(tmp_path, *arguments) -> dict[str, dict]:
    file = tmp_path / "rows.json"
    assert main(["estimate", *arguments, "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    assert {"meta", "settings", "left_out"} <= set(data)
    return {row["what"]: row for row in data["rows"]}


def test_bytes_by_hand(tmp_path, capsys):
    """4 million parameters on 4 ranks: 6 MB of 8 are others'. Stage 3 gathers twice and reduces once; stages 1 and 2 gather once and
    all_reduce, which sends as much as two reductions."""
    found = rows(tmp_path, "--params", "4M", "--ranks", "4", "--ratio", "1.5")
    assert [found[name]["wire_bytes"] for name in ("native", "zipped, adaptive", "zipped, always")] == [18e6, 8e6 + 6e6, 12e6]
    found = rows(tmp_path, "--params", "4M", "--ranks", "4", "--ratio", "1.5", "--stage", "2")
    assert [found[name]["wire_bytes"] for name in ("native", "zipped, adaptive", "zipped, always")] == [18e6, 4e6 + 12e6, 8e6]
    found = rows(tmp_path, "--params", "4M", "--ranks", "2", "--ratio", "1.5", "--all-to-all", "1M")         # 2 ranks: reductions too
    assert [found[name]["wire_bytes"] for name in ("native", "zipped, adaptive")] == [13e6, pytest.approx(13e6 / 1.5, abs=1)]
    assert all(row["step_s"] is None and row["speedup"] is None for row in found.values())
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing was run" in printed and all(" ".join(line.split()) in printed for line in estimate.LEFT_OUT)


def test_time_is_bytes_over_the_link_and_through_the_codec(tmp_path):
    """2 ranks, stage 3, 1 billion parameters: 3 GB sent. Coded: twice half to encode and half to decode, then half and half: 6 GB."""
    def timed(*more):
        return rows(tmp_path, "--params", "1B", "--ranks", "2", "--step-time", "0.5", "--ratio", "1.25", "--codec-speed", "100", *more)

    found = timed("--link", "4")
    assert found["native"]["step_s"] == pytest.approx(0.5 + 3 / 4)
    assert found["zipped, always"]["step_s"] == pytest.approx(0.5 + 3 / 1.25 / 4 + 6 / 100)
    assert found["zipped, adaptive"]["speedup"] == pytest.approx(1.25 / 1.16)
    found = timed("--link", "4", "--overlap", "0.5")
    assert found["native"]["exposed_s"] == pytest.approx(0.75 / 2)
    found = timed("--link", "1", "--overlap", "1")             # no more is hidden than there is arithmetic to hide behind
    assert found["native"]["exposed_s"] == pytest.approx(3 - 0.5)


def test_adaptive_loses_nothing_on_a_fast_link(tmp_path):
    found = rows(tmp_path, "--params", "1B", "--ranks", "2", "--step-time", "0.5", "--link", "400", "--codec-speed", "500")
    assert found["zipped, always"]["speedup"] < 1 and found["zipped, adaptive"]["speedup"] == 1


def test_one_rank_sends_nothing(tmp_path):
    found = rows(tmp_path, "--params", "1B", "--ranks", "1", "--link", "1", "--step-time", "1")
    assert all(row["wire_bytes"] == 0 and row["step_s"] == pytest.approx(1, rel=0.01) for row in found.values())


@pytest.mark.parametrize("arguments, named", [
    (["--params", "many"], "--params"), (["--params", "1B", "--ranks", "0"], "--ranks"), (["--params", "1B", "--link", "0"], "--link"),
    (["--params", "1B", "--overlap", "2"], "--overlap"), (["--params", "1B", "--ratio", "0.5"], "--ratio"),
    (["--params", "1B", "--all-to-all", "x"], "--all-to-all"), (["--params", "1B", "--codec-speed", "inf"], "--codec-speed")])
def test_bad_values_are_named(arguments, named, capsys):
    assert main(["estimate", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"ds_zipccl: {named}")
