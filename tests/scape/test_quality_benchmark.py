"""The benchmark of SCAPE's quality: what it trains with is the product's flow, bit for bit; a stopped run goes on as if it had not been;
every worker's gradient is its own; no held-out text is trained on."""
import json
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.scape_quality import __main__ as benchmark
from benchmarks.scape_quality import lane, picture, run, text, verify, workers
from benchmarks.scape_quality.adamw_style import AdamWStyle
from benchmarks.scape_quality.model import Model, Shape, losses
from benchmarks.scape_quality.threads import Ranks, ThreadTransport
from tests.helpers.bits import assert_same_bits
from tests.helpers.ranks import assert_ok, case_names
from tests.scape.flow_helpers import Problem, compare
from tests.scape.stream_recorder import Recorder

CPU = torch.device("cpu")
SHAPE = Shape(vocab=64, dim=32, layers=1, heads=2, seq_len=16)


@pytest.fixture(autouse=True)
def on_the_host():
    """These simulations are small ones of one process: they run there whatever the other tests run on."""
    with torch.device("cpu"):           # setting the default device to what it was would leave a function mode to all later tests
        yield


@pytest.mark.parametrize("world_size", [2, 4])
def test_threads_equal_the_simulation(world_size):
    problem, ranks = Problem(world_size, dtype=torch.bfloat16), Ranks(world_size)
    flows = [problem.flow(rank=rank) for rank in range(world_size)]
    for rank, flow in enumerate(flows):
        flow.transport = ThreadTransport(ranks.meeting, rank, world_size)
    simulation = problem.simulation()
    for step in range(1, 8):
        gradients = [problem.gradient(worker, step) for worker in range(world_size)]
        expected = simulation.step([[g.clone() for g in own] for own in gradients], max_norm=0.01)
        results = ranks.run(lambda rank, given=gradients: flows[rank].step(given[rank], max_norm=0.01))
        assert all((result.applied, result.grad_norm) == expected for result in results)
        for flow in flows:
            compare(flow, simulation, f"step {step}:")


def test_an_error_of_one_thread_ends_all():
    ranks = Ranks(3)

    def work(rank):
        if rank == 1:
            raise ValueError("no")
        ranks.meeting.swap(rank, rank)

    with pytest.raises(ValueError, match="no"):
        ranks.run(work)


@pytest.mark.parametrize("params", [{"density": 0.1}, {"density": 0.01, "dense_warmup_steps": 3}, {"density": 0.3, "max_age": 8}])
def test_what_is_trained_with_is_the_product(params):
    assert verify.differences(verify.SMALL, CPU, 12, **params) == []


@pytest.mark.parametrize("name", ["residual", "square", "last_sync", "copies"])
def test_a_difference_is_seen(name, monkeypatch):
    step = workers.Scape.step

    def wrong(self, *arguments):
        step(self, *arguments)
        changed = {"residual": self.residual[1], "copies": self.copies}.get(name)
        (getattr(self.flat, name) if changed is None else changed).view(-1)[77] += 1

    monkeypatch.setattr(workers.Scape, "step", wrong)
    assert any(name in difference for difference in verify.differences(verify.SMALL, CPU, 1, density=0.1))


def job(**fields):
    small = {"name": "x", "optimizer": "scape", "lr": 1e-3, "density": 0.1, "steps": 8, "workers": 2, "batch": 2, "shape": SHAPE}
    return run.Job(**small | fields)


@pytest.fixture
def tokens():
    generator = torch.Generator("cpu").manual_seed(5)
    return {name: torch.randint(64, (3000,), generator=generator).to(torch.int16) for name in text.PARTS}


def made(jobs, tokens):
    held = run.Held(tokens, SHAPE.seq_len, CPU, batches=2, size=3)
    return [run.Run(one, tokens["train"], held, CPU) for one in jobs]


def test_bias_correction_is_told_apart(tokens):
    plain, corrected = made([job(name="a", optimizer="adams"), job(name="b", optimizer="adams_corrected")], tokens)
    before = plain.optimizer.weight.clone()
    for one in (plain, corrected):
        one.begin()
        one.finish()
    moved = [(one.optimizer.weight - before).norm() for one in (plain, corrected)]
    assert float(moved[1] / moved[0]) == pytest.approx(10, rel=0.01)           # 1 / (1 - b1)


def test_rounded_residuals(tokens):
    exact, rounded = made([job(name="a"), job(name="b", residual="bf16")], tokens)
    run.side_by_side([exact, rounded], 4, time.monotonic() + 600)
    assert_same_bits(rounded.optimizer.residual, rounded.optimizer.residual.bfloat16().float(), "residual")
    assert not torch.equal(exact.optimizer.residual, exact.optimizer.residual.bfloat16().float())


JOBS = [job(name="adams", optimizer="adams"), job(name="adamw", optimizer="adamw"), job(name="s"), job(name="w", dense_warmup_steps=5)]


@pytest.mark.parametrize("stopped_at", [4, 5])
def test_stopped_runs_go_on_as_if_they_had_not_been(stopped_at, tokens, tmp_path, monkeypatch):
    whole = made(JOBS, tokens)
    assert run.side_by_side(whole, 4, time.monotonic() + 600) == []
    part = made(JOBS, tokens)
    ticks = iter([0.0] * (stopped_at - 1) + [99.0] * 9)             # the deadline passes in the round before: the next step has begun
    with monkeypatch.context() as patch:
        patch.setattr(run.time, "monotonic", lambda: next(ticks))
        assert sorted(run.side_by_side(part, 4, 50.0), key=part.index) == part
    assert {one.row["step"] for one in part} == {stopped_at}
    for one in part:
        one.save(tmp_path)
    rest = made(JOBS, tokens)
    for one in rest:
        one.load(tmp_path)
    assert run.side_by_side(rest, 4, time.monotonic() + 600) == []
    for mine, theirs in zip(rest, whole, strict=True):
        assert mine.settle() == theirs.settle() and [point["step"] for point in mine.row["curve"]] == [4, 8]
        assert_same_bits(mine.model.copies, theirs.model.copies, mine.job.name)
    with pytest.raises(ValueError, match="another job"):
        made([job(name="s", density=0.2)], tokens)[0].load(tmp_path)


def test_what_a_checkpoint_lacks_is_seen(monkeypatch):
    jobs = [job(**verify.SHORT), job(**verify.SHORT | {"denominator": "adamw"})]
    assert verify.resumption(jobs, CPU, False) == []
    load = workers.Scape.load
    monkeypatch.setattr(workers.Scape, "load", lambda self, saved: load(self, saved | {"residual": torch.zeros_like(saved["residual"])}))
    assert any("residual" in line for line in verify.resumption(jobs[:1], CPU, False))


def test_calls_that_end_too_early_make_the_rows_of_one_call(tokens, tmp_path, monkeypatch):
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setattr(text, "load", lambda folder: {name: part.view(torch.uint16) for name, part in tokens.items()})
    monkeypatch.setattr(benchmark.Chunk, "_beside", lambda self, *command: SimpleNamespace(wait=lambda: 0))

    def call(folder, ticks=()):
        common = "--steps 8 --workers 2 --batch 2 --dim 32 --layers 1 --seq-len 16 --vocab 64 --eval-every 4 --no-verify --whole"
        runs, ticks = "--runs scape90_warm:2,scape99_warm_v,adamw@1e-3 --seeds 1", iter(ticks)
        with monkeypatch.context() as patch:
            if ticks:
                patch.setattr(run, "time", SimpleNamespace(monotonic=lambda: next(ticks, 1e9)))
            assert benchmark.main([*common.split(), *runs.split(), "--folder", str(tmp_path / folder), "--text", str(tmp_path),
                                   "--json", str(tmp_path / "x.json")]) == 0
        found = json.loads((tmp_path / "x.json").read_text())
        return {row["job"]["name"]: row for row in found["rows"]}, {row["job"]["name"]: row for row in found["stopped"]}

    whole, none = call("whole", [0.0] * 99)
    assert none == {} and {name: row["job"]["seed"] for name, row in whole.items()} == {"scape90_warm": 2, "scape99_warm_v": 1, "adamw": 1}
    rows, stopped = call("part", [0.0] * 5)
    assert rows == {} and {row["step"] for row in stopped.values()} == {6} and all(len(row["curve"]) == 1 for row in stopped.values())
    assert call("part", [0.0] * 99) == (whole, {})
    assert not list((tmp_path / "part").glob("*.pt"))


def test_adamws_denominator(tokens):
    """The owner's step beside one of another form, in double precision: all steps that a coordinate waited for, one by one."""
    scape, = (one.optimizer for one in made([job(denominator="adamw", density=0.3, lr=0.01)], tokens))
    assert type(scape) is AdamWStyle
    numel, generator = scape.copies.numel(), torch.Generator("cpu").manual_seed(2)
    w, m, v = scape.flat.weight.double(), torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    b1, b2 = workers.BETAS
    last, oldest = torch.zeros(numel), 0
    for step in range(1, 7):
        scape.receive()
        at = torch.arange(numel) if scape.positions is None else scape.positions.long()
        gradients = (torch.randn(2, numel, generator=generator) * 1e-3).bfloat16()
        sent = (scape.residual + gradients).bfloat16().double().mean(0)
        scape.step(gradients, 0.01, [1e-4, 1e-4])
        age = step - last
        oldest = max(oldest, int(age[at].max()))
        for waited in range(1, int(age.max()) + 1):
            which = at[age[at] == waited]
            g, left = sent[which] / waited, b2 ** waited
            w[which] *= (1 - 0.01 * workers.WEIGHT_DECAY) ** waited
            v[which] = left * v[which] + (1 - left) * sent[which] ** 2 / waited
            for _ in range(waited):
                m[which] = b1 * m[which] + (1 - b1) * g
                w[which] -= 0.01 * m[which] / ((v[which] / (1 - b2 ** step)).sqrt() + 1e-8)
        last[at] = step
        for mine, other, least in ((scape.flat.weight, w, 1e-8), (scape.flat.momentum, m, 1e-10), (scape.second, v, 1e-14)):
            torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=least)
    assert oldest > 2


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(lane, "streams_of", lambda device: made.module)
    return made


def test_the_recorder_sees_what_is_not_ordered(recorder):
    one, other = (lane.Lane(CPU) for _ in range(2))
    with recorder:
        with one.joined():
            x = torch.zeros(3)
        x.tolist()                                                  # after a seam
        with one.within():
            x.add_(1)                                               # the host has read it: in order too
        assert recorder.races == []
        x.tolist()
        with other.within():
            x.add_(1)
    assert [race[1:] for race in recorder.races] == [("default", "s1"), ("s2", "s1")]


def test_runs_side_by_side_touch_nothing_in_no_order(recorder, tokens, tmp_path):
    """Made, trained, looked at, stopped and dropped, loaded by others and trained to the end."""
    jobs = [JOBS[0], JOBS[1], JOBS[3]]
    with recorder:
        runs = made(jobs, tokens)
        for _ in range(5):
            for one in runs:
                one.begin()
            for one in runs:
                run._finish(one, 4)
        for one in runs:
            one.save(tmp_path)
        runs = made(jobs, tokens)
        for one in runs:
            one.load(tmp_path)
        rows = []
        assert run.side_by_side(runs, 4, time.monotonic() + 600, done=lambda one: rows.append(one.settle())) == []
    assert [len(row["curve"]) for row in rows] == [2, 2, 2]
    assert recorder.races == []


def test_the_least_important_run_stops_where_time_is_short(tokens, monkeypatch):
    seconds = iter(range(1000))                                     # a round a second: 8 rounds, and time for 6 of four runs
    monkeypatch.setattr(run.time, "monotonic", lambda: float(next(seconds)))
    runs = made(JOBS, tokens)
    stopped = run.side_by_side(runs, 4, 6.0, whole=True, seconds=1.0)
    assert runs[-1] in stopped and runs[0] not in stopped and runs[0].is_done
    assert all(one.row["step"] == one.optimizer.num_steps for one in runs)


def test_every_worker_has_its_own_gradient():
    numel, generator = workers.padded(SHAPE.num_parameters, 2), torch.Generator("cpu").manual_seed(1)
    model = Model(SHAPE, 2, 3, numel, CPU, compiled=False)
    model.copies.copy_(SHAPE.initial(1, numel))
    sequences = torch.randint(64, (6, SHAPE.seq_len + 1), generator=generator)
    found, squares = model.forward_backward(sequences)
    for worker in range(2):
        weights = [part[None].float().requires_grad_() for part in model._parts(model.copies)]
        own = sequences[3 * worker:3 * worker + 3]
        inputs, targets = own[:, :-1].reshape(1, -1), own[:, 1:].reshape(1, -1)
        rotary = [half.float() for half in model._rotary]
        loss = losses(torch.nn.functional.embedding(inputs, weights[0][0, 0]), targets, *weights, *rotary, SHAPE.heads)
        gradients = torch.cat([g.flatten() for g in torch.autograd.grad(loss.sum(), weights)])
        mine = model.gradients[worker, :SHAPE.num_parameters].float()
        # bf16 against fp32: 8 bits through a dozen operations
        assert float(loss.detach()) == pytest.approx(float(found[worker]), rel=0.01)
        assert float((mine - gradients).norm() / gradients.norm()) < 0.03
        assert float(squares[worker]) == pytest.approx(float(mine.double().square().sum()), rel=1e-12)


def test_density_1_is_dense_adams_but_for_the_wire():
    """Same start, same gradients: with nothing lost on the wire and no clipping both are AdamS on the mean."""
    numel = workers.padded(SHAPE.num_parameters, 2)
    initial = SHAPE.initial(1, numel)
    scape = workers.Scape(SHAPE.slots(), initial.bfloat16(), initial.clone(), 2, workers.ScapeParams(density=1.0))
    dense = workers.Dense("adams", initial.bfloat16(), initial.clone())
    scape._values, generator = torch.zeros(2, numel), torch.Generator("cpu").manual_seed(3)
    for _ in range(4):
        gradients = (torch.randn(2, numel, generator=generator) * 1e-4).bfloat16()
        scape.step(gradients, 1e-3, [1e-6, 1e-6])
        dense.step(gradients, 1e-3)
        assert_same_bits(scape.copies, dense.copies, "copies")


@pytest.mark.parametrize("case", case_names("tests.scape.quality_cases"))
def test_real_runs(case):
    assert_ok("tests.scape.quality_cases", case_names("tests.scape.quality_cases"), 2, case)


def test_places_take_every_token_once_an_epoch():
    places = text.places(1000, 200, 16, seed=3)
    phase = int(places[:61].min())
    first = places[:(999 - phase) // 16]
    in_order = first.sort().values
    assert 0 <= phase < 16 and torch.equal(in_order, torch.arange(phase, 1000 - 16, 16)) and not torch.equal(first, in_order)
    assert places.max() + 17 <= 1000 and len(places) == 200
    assert torch.equal(places, text.places(1000, 200, 16, seed=3)) and not torch.equal(places, text.places(1000, 200, 16, seed=4))


def test_text_is_cut_by_file_and_near_copies_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "HELD_OUT", 4)
    monkeypatch.setattr(text, "MAX_FILE", 9000)
    words = "time house river stone light garden window winter answer shadow journey morning".split()
    generator = torch.Generator("cpu").manual_seed(1)

    def sentence():
        return " ".join(words[i] for i in torch.randint(len(words), (9,), generator=generator).tolist())

    for i in range(40):
        told = [sentence() for _ in range(60)]
        (tmp_path / f"f{i}.txt").write_text(". ".join(told))
        (tmp_path / f"copy{i}.txt").write_text("A new preface. " + ".\n".join(told[5:]))
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "long.txt").write_text(". ".join(sentence() for _ in range(300))[:9001])
    kept = text.distinct(text.read(tmp_path, (".txt",)))
    assert len(kept) == 40 and "long.txt" not in kept
    names = {part: {name.replace("copy", "f") for name in kept if text.part_of(name) == part} for part in text.PARTS}
    assert len(names["tune"]) > 3 and len(names["report"]) > 3 and sum(map(len, names.values())) == 40
    assert not names["train"] & (names["tune"] | names["report"])


def test_packed_text_comes_back_and_a_changed_one_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    for i in range(90):
        words = ("".join(chr(97 + n % 26) for n in (i * j, i + j, j // 7)) for j in range(900))
        (tmp_path / f"f{i}.txt").write_text("\r\n".join(words) + "\0\u00e9 end.")
    manifest = text.pack(tmp_path, tmp_path / "packed", (".txt",), 1 << 20, 300, "a test")
    tokens = text.load(tmp_path / "packed")
    assert {name: part.numel() for name, part in tokens.items()} == {name: part["tokens"] for name, part in manifest["parts"].items()}
    assert torch.equal(text.load(tmp_path / "packed")["train"], tokens["train"]) and int(tokens["train"].to(torch.int32).max()) < 300
    other = json.loads((tmp_path / "packed" / "tokenizer.json").read_text())
    other["model"]["merges"].pop()
    (tmp_path / "packed" / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="not those"):
        text.unpack(tmp_path / "packed")


def test_the_jobs_are_the_issues():
    args = benchmark.parse([])
    made = benchmark.jobs(args)
    assert len(made) == 12 and {one.steps for one in made} == {15_000} and {one.workers for one in made} == {4}
    assert [one.seed for one in made] == [1] * 6 + [2] * 6 and 10e6 <= made[0].shape.num_parameters <= 25e6
    assert {(one.optimizer, one.density, one.dense_warmup_steps) for one in made} == {
        ("adams", 1.0, 0), ("adamw", 1.0, 0), ("scape", 0.1, 0), ("scape", 0.1, 750), ("scape", 0.01, 0), ("scape", 0.01, 750)}
    tried = benchmark.jobs(benchmark.parse(["--seeds", "2", "--runs", "adams@1e-3,scape99_warm,adams@2.5e-4"]))
    assert [(one.name, one.lr, one.seed, one.dense_warmup_steps) for one in tried] == [
        ("adams", 1e-3, 2, 0), ("scape99_warm", benchmark.ROWS["scape99_warm"]["lr"], 2, 750), ("adams", 2.5e-4, 2, 0)]
    assert len({one.key for one in tried}) == 3
    asked = benchmark.jobs(benchmark.parse(["--seeds", "1", "--runs", ",".join(benchmark.QUESTIONS)]))
    assert {one.tokens_per_step for one in asked} == {made[0].tokens_per_step}
    with pytest.raises(SystemExit):
        benchmark.parse(["--runs", "adam"])


def test_learning_rates_are_chosen_on_the_part_for_that():
    def row(name, lr, seed, tune, report):
        held = {part: {"loss": loss, "accuracy": 0.0} for part, loss in (("tune", tune), ("report", report))}
        return {"job": {"name": name, "lr": lr, "seed": seed, "steps": 9}, "step": 9, "epochs": 1.0,
                "curve": [{"step": 9, "train": report} | held]}

    rows = [row("adams", 1.0, 1, 3.0, 2.0), row("adams", 2.0, 1, 2.9, 2.5), row("adams", 1.0, 2, 2.0, 1.5), row("adams", 2.0, 2, 2.7, 2.75),
            row("scape", 4.0, 2, 5.0, 2.0)]
    assert picture.chosen(rows) == {"adams": 2.0}
    shown = picture.table(rows)
    assert "| 2 * | 1.00 |" in shown and "| 1 | 1.00 |" in shown and "| -0.7500 / -0.7500 | - |" in shown
    rows[0]["curve"].append(rows[0]["curve"][0] | {"step": 8, "train": 9.0})        # a point that the others do not have
    assert picture.table(rows) == shown


def test_table_and_curves(tokens, tmp_path):
    runs = made([JOBS[0], JOBS[2]], tokens)
    run.side_by_side(runs, 4, time.monotonic() + 600)
    rows = [one.settle() for one in runs]
    shown = picture.table(rows)
    assert "| adams | 1 | 0.001 * | 0.17 |" in shown and f"{rows[1]['curve'][-1]['report']['loss']:.4f}" in shown
    picture.plot(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
