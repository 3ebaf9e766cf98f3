"""docs/scape.md: every parameter is in its table with its default, its byte formula is the code's, its numbers are the results'."""
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.scape_quality import __main__ as benchmark
from benchmarks.scape_quality import picture
from benchmarks.scape_quality.__main__ import ROWS
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


#: Label and learning rate -> name of the run.
MAIN = {("dense AdamS", 5e-4): "adams", ("90 %", 2.5e-4): "scape90", ("90 %, 5 % of the steps dense first", 5e-4): "scape90_warm",
        ("99 %", 2.5e-4): "scape99", ("99 %, 5 % of the steps dense first", 5e-4): "scape99_warm", ("dense AdamW", 2e-3): "adamw"}
ASKED = {("dense AdamS", 2.5e-4): "adams", ("dense AdamS", 1e-3): "adams", ("dense AdamW", 1e-3): "adamw",
         ("dense AdamW", 4e-3): "adamw", ("90 %", 5e-4): "scape90",
         ("99 %, dense first, 8 workers of half as many sequences", 5e-4): "scape99_warm_w8",
         ("99 %, dense first, residuals rounded to bf16 after every step", 5e-4): "scape99_warm_bf16",
         ("99 %, dense first, AdamW's denominator", 1e-3): "scape99_warm_v", ("99.9 %, dense first", 5e-4): "scape999_warm"}


class Quality:
    """The finished runs of the results, and what the page says of them."""

    def __init__(self):
        self.results = json.loads((RESULTS / "scape_quality_h200.json").read_text())
        self.rows = self.results["rows"]
        self.last = picture.last_steps(self.rows)
        self.runs = {(row["job"]["name"], row["job"]["lr"], row["job"]["seed"]): row for row in self.rows}
        self.page = TEXT[TEXT.index("## How well it learns"):TEXT.index("### A real run")]

    def end(self, name, lr, seed=1, part="report", number="loss") -> float:
        return picture.end(self.runs[name, lr, seed], part, self.last[seed, 15_000], number)

    def gap(self, run, base=("adams", 5e-4), seed=1, part="report") -> float:
        return self.end(*run, seed, part) - self.end(*base, seed, part)

    def gap_at(self, step, run, part="report", seed=1, base=("adams", 5e-4)) -> float:
        """At one point of the curves."""
        found = []
        for name, lr in (run, base):
            point = next(point for point in self.runs[name, lr, seed]["curve"] if point["step"] == step)
            found.append(point["train"] if part == "train" else point[part]["loss"])
        return found[0] - found[1]

    def cells(self, run, seeds) -> list[str]:
        """Of a row of a table: the losses with their distances to dense AdamS, then the accuracies."""
        cells = []
        for seed in seeds:
            for part in ("train", "report"):
                distance = "" if run == ("adams", 5e-4) else f" ({self.gap(run, seed=seed, part=part):+.3f})"
                cells.append(f"{self.end(*run, seed, part):.4f}{distance}")
        return [*cells, " / ".join(f"{self.end(*run, seed, number='accuracy'):.3f}" for seed in seeds)]


@pytest.fixture(scope="module")
def quality():
    return Quality()


def test_the_tables_of_how_well_it_learns_are_the_results(quality):
    """Every number, from the points of the curves; every finished run; learning rates chosen by the part of the text that is for it; at
    most two epochs."""
    chosen = picture.chosen(quality.rows)
    assert {name: chosen[name] for name in ROWS} == {name: settings["lr"] for name, settings in ROWS.items()}
    assert {name: lr for (_, lr), name in MAIN.items()} == {name: chosen[name] for name in ROWS}
    assert all(row["step"] == row["job"]["steps"] >= 15_000 and row["epochs"] <= 2 and row["verified"] for row in quality.rows)
    shown = re.findall(r"^\| ([^|]+) \| ([\d.e-]+) \| (\d.*) \|$", quality.page, re.M)
    assert [(label, float(lr)) for label, lr, _ in shown] == [*MAIN, *ASKED]
    expected = [quality.cells((name, lr), (1, 2)) for (_, lr), name in MAIN.items()]
    expected += [quality.cells((name, lr), (1,)) for (_, lr), name in ASKED.items()]
    assert [cells.split(" | ") for _, _, cells in shown] == expected
    found = {(name, lr, seed) for (_, lr), name in MAIN.items() for seed in (1, 2)} | {(name, lr, 1) for (_, lr), name in ASKED.items()}
    assert found == set(quality.runs)


def test_the_sentences_of_how_well_it_learns_are_the_results(quality):
    """The numbers that are not in the tables, and what is concluded from those that are."""
    page, gap = " ".join(quality.page.split()), quality.gap
    warm, cold, adams, adamw = ("scape99_warm", 5e-4), ("scape99", 2.5e-4), ("adams", 5e-4), ("adamw", 2e-3)
    both = [(seed, part) for seed in (1, 2) for part in ("train", "report")]

    def shares(*names):
        return [row["share_clipped"] for (name, lr, _), row in quality.runs.items() if name in names and lr == ROWS[name]["lr"]]

    def numbers(values, digits=3):
        return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    assert all(gap(run, seed=seed, part=part) < 0 for run in (("scape90", 2.5e-4), ("scape90_warm", 5e-4), warm) for seed, part in both)
    behind = {run: {part: [gap(run, adamw, seed, part) for seed in (1, 2)] for part in ("train", "report")} for run in (warm, cold, adams)}
    spread = max(abs(quality.end(*run, 1, part) - quality.end(*run, 2, part)) for run in
                 ((name, settings["lr"]) for name, settings in ROWS.items()) for part in ("train", "report"))
    accuracies = [quality.end(name, ROWS[name]["lr"], seed, number="accuracy") for name in ROWS if "scape" in name for seed in (1, 2)]
    tokens = {part: about["tokens"] for part, about in quality.results["text"]["parts"].items()}
    rare, rounded, rows = ("scape999_warm", 5e-4), ("scape99_warm_bf16", 5e-4), quality.runs
    clipped = shares("scape90_warm", "scape99_warm")
    for sentence in (
        f"99 % is at most {max(gap(cold, seed=seed, part=part) for seed, part in both):.3f} worse without",
        "99 % with dense steps first is {:.3f} and {:.3f} behind in training and {:.3f} and {:.3f} on held-out books".format(
            *behind[warm]["train"], *behind[warm]["report"]),
        f"without, {numbers(behind[cold]['train'])} and {numbers(behind[cold]['report'])}.",
        f"AdamS itself trails AdamW by {numbers(behind[adams]['train'] + behind[adams]['report'], 2)}",
        f"SCAPE {numbers(accuracies)}.",
        f"differs by up to {spread:.3f} between seeds",
        f"(by {gap(('adams', 2.5e-4), part='tune'):.3f} and {gap(('adams', 1e-3), part='tune'):.3f};",
        f"by {gap(('adamw', 1e-3), adamw, part='tune'):.3f} and {gap(('adamw', 4e-3), adamw, part='tune'):.3f}).",
        "8 workers are {:.3f} worse in training and {:.3f} on held-out books".format(
            *(gap(("scape99_warm_w8", 5e-4), warm, part=part) for part in ("train", "report"))),
        f"clipped in {100 * rows['scape99_warm_w8', 5e-4, 1]['share_clipped']:.0f} % of the steps in place of "
        f"{100 * rows[(*warm, 1)]['share_clipped']:.0f} %",
        "{:.3f} and {:.3f} better than in fp32".format(*(-gap(rounded, warm, part=part) for part in ("train", "report"))),
        f"about {(15_000 - 750) * rows[(*rare, 1)]['share_sent']:.0f} times since the dense steps",
        f"{quality.gap_at(2_000, rare):.3f} after 2,000 steps, {quality.gap_at(5_000, rare):.3f} after 5,000",
        f"{quality.gap_at(10_000, rare):.3f} after 10,000, {quality.gap_at(15_000, rare):.3f} at the end",
        f"({rows[(*adams, 1)]['epochs']:.2f} epochs)",
        f"{sum(len(about['files']) for about in quality.results['text']['parts'].values())} books",
        f"{tokens['train'] / 1e6:.1f}M training tokens, of which a run sees {15_000 * 4096 / 1e6:.1f}M",
        f"clipped in {100 * min(clipped):.0f} to {100 * max(clipped):.0f} % of",
        f"at 1e-3 AdamS is {gap(('adams', 1e-3), part='train'):.2f} worse in training,",
        f"at 2.5e-4 {gap(('adams', 2.5e-4), part='train'):.2f}), so",
        f"0.1 % was {gap(rare, part='train'):.2f} behind",
    ):
        assert sentence in page, sentence
    assert min(shares("scape90", "scape99")) > 0.99                                                 # "in nearly all"
    slow = {run: [step for step in range(1_000, 8_000, 1_000) if max(quality.gap_at(step, run, "train", seed) for seed in (1, 2)) > 0.02]
            for run in (("scape90", 2.5e-4), cold)}
    assert slow == {("scape90", 2.5e-4): [1_000, 2_000], cold: [1_000, 2_000, 3_000, 4_000, 5_000]}
    commands = " ".join(call["command"] for call in quality.results["meta"]["calls"])
    assert all(name in commands for name in ROWS) and not quality.results["meta"]["unfinished"]


def test_the_results_jobs_are_what_the_benchmark_makes_today(quality):
    for (name, lr, seed), row in quality.runs.items():
        job, = benchmark.jobs(benchmark.parse(["--runs", f"{name}@{lr:g}", "--seeds", str(seed)]))
        assert asdict(job) == {"denominator": "adams"} | row["job"], "denominator: rows before it was a field"
    made = [(job.name, job.lr, job.seed) for job in benchmark.jobs(benchmark.parse([]))]
    assert set(made) <= set(quality.runs)


def test_the_bytes_that_crossed_are_the_results():
    rows = {(row["run"], row["ranks"]): row for row in json.loads((RESULTS / "scape_bytes.json").read_text())["rows"]}
    for label, run in (("dense, as DeepSpeed does it", "dense"), ("0.1", "scape90"), ("0.01", "scape99")):
        crossed = [f"{rows[run, ranks]['crossed_per_weight']:.3f}" for ranks in (2, 4)]
        counted = ", ".join(f"{rows[run, ranks]['counted_per_weight']:.3f}" for ranks in (2, 4)) if run != "dense" else ""
        assert f"| {label} | {' | '.join(crossed)} | {counted}".rstrip() in TEXT


def test_the_owner_pass_is_the_results():
    rows = json.loads((RESULTS / "scape_kernels_h200.json").read_text())["rows"]
    taken = {(row["numel"], row["density"]): f"{row['of_dense_step']:.2f}" for row in rows if row["op"] == "owner pass"}
    one, ten = ([taken[numel, density] for numel in (16_000_000, 50_000_000, 350_000_000)] for density in (0.01, 0.1))
    page = " ".join(TEXT.split())
    assert f"takes {one[0]}, {one[1]} and {one[2]} dense AdamS steps at density 0.01 and 16, 50 and 350 million elements" in page
    assert f"at 0.1 {ten[0]}, {ten[1]} and {ten[2]}." in page


def test_the_real_run_is_the_results():
    run = json.loads((RESULTS / "scape_real_run_h200x2.json").read_text())
    page = " ".join(TEXT.split())
    assert run["differences"] in (0, []) and f"all {run['num_compared']:,} numbers and all tensors at the end had the same bits" in page
    assert f"{run['steps']} steps of {run['job']['workers']} x {run['job']['batch']} x {run['job']['shape']['seq_len']} tokens" in page
