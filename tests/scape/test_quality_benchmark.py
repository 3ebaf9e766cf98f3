"""The benchmark of SCAPE's quality: its threads are the product's ranks, bit for bit; a stopped run goes on as if it had not been."""
import time

import pytest
import torch

from benchmarks.scape_quality import text, train
from benchmarks.scape_quality.threads import Ranks, ThreadTransport
from tests.helpers.bits import assert_same_bits
from tests.scape.flow_helpers import Problem, compare


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


def job(**fields):
    return train.Job(**{"name": "x", "optimizer": "scape", "lr": 1e-3, "seed": 1, "density": 0.1, "steps": 8, "workers": 2, "batch": 2,
                        "seq_len": 16, "dim": 32, "layers": 1, "heads": 2, "vocab": 256} | fields)


@pytest.mark.parametrize("optimizer", ["scape", "adams", "adamw"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(optimizer, tmp_path, monkeypatch):
    tokens = {name: torch.randint(256, (4000,), generator=torch.Generator().manual_seed(5)) for name in ("train", "tune", "report")}
    monkeypatch.setattr(train, "EVAL_BATCHES", 2)
    whole = train.run(job(optimizer=optimizer), tokens, torch.device("cpu"), tmp_path, time.time() + 600, eval_every=4)
    clock = iter([0.0] * 4 + [99.0] * 50)               # the start, three steps, then past the deadline
    with monkeypatch.context() as patch:
        patch.setattr(train.time, "time", lambda: next(clock))
        part = train.run(job(optimizer=optimizer), tokens, torch.device("cpu"), tmp_path, 50.0, eval_every=4)
    assert 0 < part["step"] < 8
    rest = train.run(job(optimizer=optimizer), tokens, torch.device("cpu"), tmp_path, time.time() + 600, eval_every=4)
    assert rest["step"] == 8 and [point["step"] for point in rest["curve"]] == [4, 8]
    assert rest["curve"] == whole["curve"] and not list(tmp_path.glob("*.pt"))


def test_density_1_is_dense_adams_but_for_the_wire():
    """Same data, same start: with exact values on the wire and no clipping both are AdamS on the mean."""
    def final(optimizer):
        made = job(optimizer=optimizer, density=1.0)
        model = train.Model(made, torch.device("cpu"))
        runner = train.Scape(made, model) if optimizer == "scape" else train.Dense(made, model)
        if optimizer == "scape":
            for flow in runner.flows:
                flow._wire = torch.float32
        generator = torch.Generator().manual_seed(3)
        for step in range(1, 5):
            fresh = [[torch.randn(c.numel(), generator=generator).to(torch.bfloat16) * 1e-4 for c in model.copies] for _ in range(2)]
            runner.step(fresh, made.lr_at(step))
        return model.copies

    for mine, theirs in zip(final("scape"), final("adams"), strict=True):
        assert_same_bits(mine, theirs, "copies")


def test_text_is_cut_by_file_and_copies_stay_on_one_side(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "HELD_OUT", 4)
    for i in range(60):
        (tmp_path / f"f{i}.py").write_text(f"file {i} " * 60)
        (tmp_path / f"copy{i}.py").write_text(f"file {i} " * 60)
    parts = text._read([str(tmp_path)], [".py"], 1 << 30)
    assert sum(map(len, parts.values())) == 60 and len(parts["tune"]) > 3 and len(parts["report"]) > 3
    tokens = text.load(tmp_path / "t.npz", [str(tmp_path)], [".py"], 1 << 30, 256)
    assert tokens["train"].numel() == sum(len(t) + 1 for t in parts["train"]) - 1
    batch = text.batch(tokens["train"], 5, 11, torch.Generator().manual_seed(1))
    assert batch.shape == (5, 12) and batch.dtype == torch.long
    assert text.load(tmp_path / "t.npz", [], [], 0, 256)["train"].equal(tokens["train"])
