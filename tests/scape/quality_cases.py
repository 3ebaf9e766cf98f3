"""Cases run on every rank by test_quality_benchmark.py."""
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.scape_quality import real_run
from benchmarks.scape_quality.model import Shape
from benchmarks.scape_quality.run import Job


def run_really(rank, world_size, seconds=math.inf, **changes):
    """Trains; rank 0 gets a function that compares with the simulation of a job with such changes, and all wait until it is done."""
    job = Job("real", "scape", 1e-3, density=0.1, dense_warmup_steps=2, steps=9, workers=world_size, batch=2,
              shape=Shape(vocab=64, dim=32, layers=2, heads=2, seq_len=16))
    job = replace(job, **changes)
    device, folder = torch.empty(0).device, tempfile.TemporaryDirectory() if rank == 0 else None
    tokens = torch.randint(64, (3000,), generator=torch.Generator("cpu").manual_seed(4), device="cpu").to(torch.int16).view(torch.uint16)
    name = [folder.name if rank == 0 else None]
    dist.broadcast_object_list(name, 0)
    real_run.train(job, tokens, device, Path(name[0]), rank, seconds)
    dist.barrier()
    if rank == 0:
        yield lambda **others: real_run.compare(replace(job, **others), tokens, device, Path(name[0]))
        folder.cleanup()
    dist.barrier()


def case_a_real_run_matches_its_simulation(rank, world_size):
    for compare in run_really(rank, world_size):
        found = compare()
        assert found["differences"] == [] and found["num_compared"] == 9 * world_size * 8, found["differences"]
        assert found["about"]["optimizer"] == "ScapeZeroOptimizer" and found["curve"][0]["real"] != found["curve"][8]["real"]
        other = compare(density=0.11)["differences"]
        assert other[0].startswith("step 3, ") and any(line.startswith("at the end, rank 1: ") for line in other), other


def case_a_late_run_has_fewer_steps(rank, world_size):
    for compare in run_really(rank, world_size, seconds=-1.0, steps=40):
        found = compare()
        assert found["differences"] == [] and found["steps"] == len(found["curve"]) == 25
