"""The demo's verdict on ScapeAdamS and SCAPE, on folders made by hand: every kind of wrong result must turn it red and be named, and the
verdict on the other three runs stays its own."""
import json

import pytest
import torch

from tests.train.demo_folders import DENSE, LAST_DENSE, SPARSE, scape_row, setting, write_lines, write_scape_runs

pytest.importorskip("matplotlib")
import demo_scape


@pytest.fixture
def out(tmp_path):
    write_scape_runs(tmp_path)
    return tmp_path


def judge(out, **params):
    """(ok, sentences as one text)"""
    ok, sentences = demo_scape.judge(demo_scape.load(out, _setting(out, params)))
    assert ok != sentences[0].startswith("FAILED")
    return ok, "\n".join(sentences)


def _setting(out, params):
    wanted = setting(out / "configs")
    wanted["configs"]["scape"]["optimizer"]["params"].update(params)
    return wanted


def edit_lines(path, change):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    write_lines(path, rows)


def edit_losses(out, name, change):
    path = out / name / "losses.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_good_runs_pass(out):
    ok, text = judge(out)
    assert ok and "7.1 times less" in text                                  # 4112 / (16 + 216 + 216 + 129)
    assert "SCAPE 2.2500, dense 2.0500, so +0.2000 nats" in text and "sanity bound of 0.5 nats" in text


def test_rows_are_the_numbers_worked_out_by_hand(out):
    runs = demo_scape.load(out, _setting(out, {}))
    rows = {row["what"]: row for row in demo_scape.byte_rows(runs)}
    assert (rows["dense ZeRO (formula)"]["wire_bytes"], rows["adams (counted)"]["wire_bytes"]) == (4112, 4117 + 2056)
    for what, sent, steps in (("scape: dense", LAST_DENSE, 1), ("scape: sparse", SPARSE, 2)):
        assert rows[what]["steps"] == steps and {k: rows[what][f"{k}_bytes"] for k in sent} == sent
    assert rows["scape: sparse"]["ratio"] == 4112 / 577
    assert rows["scape: whole run"]["wire_bytes"] == pytest.approx((sum(LAST_DENSE.values()) + 2 * 577) / 3)
    assert "synchronised about 0 times" in "".join(demo_scape.notes(runs)) and "short run" in "".join(demo_scape.notes(runs))


@pytest.mark.parametrize("kind", ["norm", "values", "weights", "mask"])
def test_one_byte_more_in_scapes_log(out, kind):
    def change(rows):
        rows[2][f"{kind}_bytes"] += 1
        rows[2]["sent_bytes"] += 1

    edit_lines(out / "scape" / "scape.jsonl", change)
    ok, text = judge(out)
    assert not ok and "bytes of step 3: SCAPE's log says" in text


@pytest.mark.parametrize("op", ["all_to_all_single", "all_gather_into_tensor"])
def test_one_byte_more_counted_outside(out, op):
    edit_lines(out / "scape" / "zipccl.jsonl", lambda rows: rows[1]["ops"][op].update(wire_bytes=rows[1]["ops"][op]["wire_bytes"] + 1))
    ok, text = judge(out)
    assert not ok and "bytes of step 2: counted were" in text


def test_a_collective_that_should_not_be_there(out):
    edit_lines(out / "scape" / "zipccl.jsonl", lambda rows: rows[2]["ops"].update(all_reduce=rows[2]["ops"]["all_to_all_single"]))
    ok, text = judge(out)
    assert not ok and "bytes of step 3: counted were" in text and "all_reduce" in text


@pytest.mark.parametrize("sent", [[DENSE, SPARSE, SPARSE], [LAST_DENSE, DENSE, SPARSE], [LAST_DENSE, SPARSE, LAST_DENSE]],
                         ids=["no first mask", "dense too long", "dense again"])
def test_phases_that_are_not_the_settings(out, sent):
    write_lines(out / "scape" / "scape.jsonl", [scape_row(step, row) for step, row in enumerate(sent, 1)])
    ok, text = judge(out)
    assert not ok and "SCAPE's log says" in text


@pytest.mark.parametrize("file", ["scape/scape.jsonl", "scape/zipccl.jsonl", "adams/zipccl.jsonl"])
def test_a_step_that_is_missing_in_a_log(out, file):
    edit_lines(out / file, lambda rows: rows.pop())
    ok, text = judge(out)
    assert not ok and "other numbers of rows" in text


def test_sparse_steps_that_are_not_smaller_than_dense(out):
    """At density 1 everything is as documented, and nothing is saved."""
    full = {"norm": 16, "values": 2056, "weights": 2056}
    write_lines(out / "scape" / "scape.jsonl", [scape_row(step, full) for step in (1, 2, 3)])
    edit_lines(out / "scape" / "zipccl.jsonl", lambda rows: [
        (row["ops"]["all_to_all_single"].update(wire_bytes=2056), row["ops"]["all_gather_into_tensor"].update(wire_bytes=2072))
        for row in rows])
    ok, text = judge(out, density=1.0)
    assert not ok and "4128, which is not less than dense (4112)" in text


def test_a_run_without_sparse_steps(out):
    write_lines(out / "scape" / "scape.jsonl", [scape_row(1, DENSE), scape_row(2, DENSE), scape_row(3, LAST_DENSE)])
    edit_lines(out / "scape" / "zipccl.jsonl", lambda rows: [
        (row["ops"]["all_to_all_single"].update(wire_bytes=2056), row["ops"]["all_gather_into_tensor"].update(
            wire_bytes=2072 + 129 * (row["step"] == 3))) for row in rows])
    ok, text = judge(out, dense_warmup_steps=7)
    assert not ok and "no step was sparse" in text


@pytest.mark.parametrize("name", ["adams", "scape"])
def test_a_copy_that_is_not_its_master(out, name):
    path = out / name / "masters.pt"
    masters = torch.load(path, weights_only=True)
    value = masters["embedding.weight"][63, 31]
    value += value.abs() / 2 ** 14                                            # far below bf16's rounding: the same copy, but for a tie
    torch.save(masters, path)
    assert judge(out)[0]
    value += value.abs() / 2 ** 7
    torch.save(masters, path)
    ok, text = judge(out)
    assert not ok and f"{name}: 1 of 2048 elements of embedding.weight are not their owner's rounded master" in text


@pytest.mark.parametrize("name", ["adams", "scape"])
def test_a_master_that_is_missing_or_not_a_number(out, name):
    path = out / name / "masters.pt"
    masters = torch.load(path, weights_only=True)
    torch.save({**masters, "norm.weight": masters["norm.weight"] * float("nan")}, path)
    assert "5 of 5 elements of norm.weight" in judge(out)[1]
    torch.save({key: value for key, value in masters.items() if key != "scale"}, path)
    ok, text = judge(out)
    assert not ok and "not of the same parameters" in text


def test_ranks_with_different_weights(out):
    edit_losses(out, "scape", lambda record: record["weights_sha256"].__setitem__(1, "0" * 64))
    ok, text = judge(out)
    assert not ok and "scape: the ranks hold different weights" in text


@pytest.mark.parametrize("name, val_losses, words", [
    ("scape", [2.6, 2.6], "0.5500 nats above dense, beyond the sanity bound"), ("scape", [2.9, 2.9], "scape did not learn"),
    ("adams", [3.0, 3.0], "adams did not learn")], ids=["too far apart", "scape did not learn", "adams did not learn"])
def test_losses_beyond_sanity(out, name, val_losses, words):
    edit_losses(out, name, lambda record: record.update(val_losses=val_losses))
    ok, text = judge(out)
    assert not ok and words in text


def test_what_is_missing_or_diverged_is_an_error(out):
    def error(match):
        with pytest.raises(demo_scape.DemoError, match=match):
            demo_scape.load(out, _setting(out, {}))

    edit_losses(out, "scape", lambda record: record["val_losses"].__setitem__(0, float("nan")))
    error("scape run diverged")
    write_scape_runs(out)
    edit_lines(out / "scape" / "scape.jsonl", lambda rows: rows[1].pop("sent_bytes"))
    error("no complete log")
    for file, words in (("scape/scape.jsonl", "no complete log"), ("adams/zipccl.jsonl", "no complete log"),
                        ("scape/masters.pt", "the optimizer's weights are missing")):
        write_scape_runs(out)
        (out / file).unlink()
        error(words)
