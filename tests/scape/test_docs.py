"""docs/scape.md: every parameter is in its table with its default, its byte formula is the code's, its numbers are the results'."""
import json
import re
from pathlib import Path

import pytest

from benchmarks.scape_quality import picture
from benchmarks.scape_quality.__main__ import KNOWN, ROWS
from ds_scape.config import ScapeParams
from ds_scape.sync.mask import MaskCodec
from ds_scape.sync.partition import Layout, TensorSlot, flat_layout
from ds_scape.sync.traffic import dense_zero_bytes, step_bytes

ROOT = Path(__file__).resolve().parents[2]
TEXT, RESULTS = (ROOT / "docs" / "scape.md").read_text(), ROOT / "benchmarks" / "results"


def test_every_parameter_is_documented_with_its_default():
    rows = {name: json.loads(value) for name, value in re.findall(r"^\| `(\w+)` \| (\S.*?) \| ", TEXT, re.M)}
    assert set(rows) == set(ScapeParams.model_fields) and ScapeParams(**rows) == ScapeParams()


@pytest.mark.parametrize("density, expected", [(0.1, 0.525), (0.01, 0.06)])
def test_the_shares_of_the_text(density, expected):
    """A model of 8 matrices; the 1-D tensors are left out of the text's numbers."""
    world_size, numel = 4, 1 << 20
    layout = Layout((flat_layout([TensorSlot(i * numel, numel, 2) for i in range(8)], 8 * numel, world_size, density),), world_size)
    ring = 8 * numel * (world_size - 1) / world_size
    sent = step_bytes(layout, 0, dense=False, value_bytes=2, weight_bytes=2)
    assert sum(sent.values()) / ring == pytest.approx(expected, rel=0.01)
    assert sum(step_bytes(layout, 0, dense=True, value_bytes=2, weight_bytes=2).values()) / ring == pytest.approx(4, rel=1e-4)
    assert dense_zero_bytes(layout, 2) / ring == 4 and dense_zero_bytes(layout, 2, reduce_scatter=False) / ring == 6
    assert f"{expected}n" in TEXT


def test_the_formula_of_the_text():
    world_size = 3
    slots = [TensorSlot(0, 70_001, 2), TensorSlot(70_001, 5_000, 1), TensorSlot(75_001, 130_000, 2)]
    layout = Layout((flat_layout(slots, 205_002, world_size, 0.02), flat_layout([TensorSlot(0, 50, 1)], 54, world_size, 0.02)), world_size)
    k, p = layout.splits(dense=False), 68_334
    s = max(sum(x.num_sent for x in own if not x.is_dense) for own in layout.flats[0].segments)
    mask = min(-(-p // 8), 4 * -(-p // 65536) + 2 * s)
    for rank in range(world_size):
        assert step_bytes(layout, rank, dense=False, value_bytes=4, weight_bytes=2) == {
            "norm": 16 * 2, "values": 4 * sum(n for o, n in enumerate(k) if o != rank), "weights": 2 * max(k) * 2, "mask": mask * 2}
    assert MaskCodec(layout).num_bytes == mask


ROWS_OF_THE_TABLE = {"dense AdamS": "adams", "90 %": "scape90", "90 %, 5 % of the steps dense first": "scape90_warm", "99 %": "scape99",
                     "99 %, 5 % of the steps dense first": "scape99_warm", "dense AdamW": "adamw"}


def test_the_table_of_how_well_it_learns_is_the_results():
    """Every number, from the points of the curves; learning rates chosen by the part of the text that is for it; at most two epochs."""
    rows = json.loads((RESULTS / "scape_quality_h200.json").read_text())["rows"]
    chosen = picture.chosen(rows)
    assert {name: chosen[name] for name in ROWS} == {name: settings["lr"] for name, settings in ROWS.items()}
    assert all(row["step"] == row["job"]["steps"] >= 15_000 and row["epochs"] <= 2 and row["verified"] for row in rows)
    last, by_key = picture.last_steps(rows), {(row["job"]["name"], row["job"]["seed"]): row for row in rows
                                              if row["job"]["lr"] == KNOWN[row["job"]["name"]]["lr"]}
    shown = re.findall(r"^\| ([^|]+) \| ([\d.e-]+) \| (\d.*) \|$", TEXT[TEXT.index("## How well it learns"):TEXT.index("### ")], re.M)
    assert [label for label, _, _ in shown] == list(ROWS_OF_THE_TABLE)
    for label, lr, cells in shown:
        name, expected = ROWS_OF_THE_TABLE[label], []
        assert float(lr) == ROWS[name]["lr"]
        for seed in (1, 2):
            row, base = by_key.get((name, seed)), by_key["adams", seed]
            for part in ("train", "report"):
                steps = last[seed, 15_000]
                loss = picture.end(row, part, steps) if row else None
                gap = "" if name == "adams" or not row else f" ({loss - picture.end(base, part, steps):+.3f})"
                expected.append(f"{loss:.4f}{gap}" if row else "not finished")
        accuracies = [by_key[name, seed] for seed in (1, 2) if (name, seed) in by_key]
        expected.append(" / ".join(f"{picture.end(row, 'report', last[row['job']['seed'], 15_000], 'accuracy'):.3f}" for row in accuracies))
        assert cells.split(" | ") == expected, label
