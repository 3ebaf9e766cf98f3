"""Is what the benchmark trains with the product? The same gradients through the product's flow, a thread for every rank, and through
``workers.Scape``: every tensor of every rank is compared bit by bit after every step.

    python -m benchmarks.scape_quality.verify
"""
import tempfile
from pathlib import Path

import torch

from benchmarks.scape_quality import text, workers
from benchmarks.scape_quality.model import Model, Shape, squares
from benchmarks.scape_quality.run import Held, Job, Run
from benchmarks.scape_quality.threads import Ranks, ThreadTransport
from ds_scape.config import ScapeParams
from ds_scape.optimizer.flow import Flow
from ds_scape.optimizer.state import FlatState, sync_steps
from ds_scape.sync.partition import flat_layout
from ds_scape.update import norms

SMALL = Shape(vocab=64, dim=32, layers=2, heads=2, seq_len=16)
#: Changes that make a job one of a few steps with and without masks.
SHORT = {"optimizer": "scape", "density": 0.1, "dense_warmup_steps": 2, "steps": 24}


def _flow(slots, initial: torch.Tensor, rank: int, ranks: Ranks, num_workers: int, params: ScapeParams, group: dict) -> Flow:
    layout = flat_layout(slots, initial.numel(), num_workers, params.density)
    own = initial.view(num_workers, -1)[rank].clone()
    flat = FlatState(layout, initial.bfloat16(), torch.zeros_like(initial), own, torch.zeros_like(own), torch.zeros_like(own),
                     sync_steps(own, params, params.density), group, params)
    return Flow([flat], params, ThreadTransport(ranks.meeting, rank, num_workers))


def differences(shape: Shape, device: torch.device, steps: int, num_workers: int = 4, **params) -> list[str]:
    """What differs, if anything; empty: the same bits in every tensor, after every step."""
    numel, slots, found = workers.padded(shape.num_parameters, num_workers), shape.slots(), []
    params = ScapeParams(eps=workers.EPS, betas=workers.BETAS, weight_decay=workers.WEIGHT_DECAY, **params)
    initial = shape.initial(1, numel).to(device)
    lockstep = workers.Scape(slots, initial.bfloat16(), initial.clone(), num_workers, params)
    ranks, groups = Ranks(num_workers), [dict(lockstep.group) for _ in range(num_workers)]
    flows = [_flow(slots, initial, rank, ranks, num_workers, params, groups[rank]) for rank in range(num_workers)]
    generator = torch.Generator(device).manual_seed(7)
    scale = torch.rand(numel, generator=generator, device=device).pow(3) * 3 * numel ** -0.5        # norms around 1: some are clipped
    for step in range(1, steps + 1):
        gradients = torch.randn(num_workers, numel, generator=generator, device=device)
        gradients = (gradients + gradients[0]).mul_(scale).bfloat16()
        gradients[:, ::3] *= float(step % 4 == 1)                   # used rarely
        lr = 1e-3 / step
        for group in groups:
            group["lr"] = lr
        known = [float(norms.sum_of_squares([gradient])) for gradient in gradients]
        lockstep.step(gradients, lr, known)
        ranks.run(lambda rank, given=gradients: flows[rank].step([given[rank]], max_norm=workers.MAX_NORM))
        others = torch.tensor(known, dtype=torch.float64, device="cpu")
        if not torch.allclose(squares(gradients).cpu(), others, rtol=1e-13, atol=0.0):
            found.append(f"step {step}: norms")
        for rank, flow in enumerate(flows):
            flat, own = flow.flats[0], slice(rank * numel // num_workers, (rank + 1) * numel // num_workers)
            pairs = {"copies": (lockstep.copies, flat.copies), "residual": (lockstep.residual[rank], flat.residual)}
            pairs |= {name: (getattr(lockstep.flat, name)[own], getattr(flat, name)) for name in workers.Scape.STATE}
            found += [f"step {step}, rank {rank}: {name}" for name, (mine, theirs) in pairs.items() if not _same(mine, theirs)]
    return found


def resumption(jobs: list[Job], device: torch.device, compiled: bool) -> list[str]:
    """What differs between runs of these jobs and the same ones stopped in their middle, saved and loaded; empty: no bit."""
    generator, found = torch.Generator("cpu").manual_seed(9), []
    drawn = torch.randint(min(job.shape.vocab for job in jobs), (200_000,), generator=generator, device="cpu").to(torch.int16)
    tokens = {part: drawn.to(device) for part in text.PARTS}

    def go(job: Job, start: int, stop: int, folder: Path) -> Run:
        run = Run(job, tokens["train"], Held(tokens, job.shape.seq_len, device, batches=1), device, compiled)
        if start:
            run.load(folder)
        for step in range(start, stop):
            run.begin()
            run.finish()
            if step % 3 == 0:
                run.look()
        run.save(folder)
        return run

    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            whole = go(job, 0, job.steps, Path(folder))
            go(job, 0, job.steps // 2, Path(folder))
            part = go(job, job.steps // 2, job.steps, Path(folder))
        pairs = {"copies": (part.model.copies, whole.model.copies)}
        pairs |= {name: (mine, whole.optimizer.state()[name]) for name, mine in part.optimizer.state().items() if torch.is_tensor(mine)}
        found += [f"{job.name}: {name}" for name, (mine, other) in pairs.items() if not _same(mine, other)]
        found += [f"{job.name}: losses"] * (part.row["curve"] != whole.row["curve"])
    return found


def model_error(shape: Shape, device: torch.device, batch: int = 4, num_workers: int = 4) -> tuple[float, bool]:
    """|compiled - plain| / |plain| of all workers' gradients; bf16 arithmetic in both, so about 0.01. And whether the compiled model
    gives the same bits when it is asked again."""
    numel = workers.padded(shape.num_parameters, num_workers)
    generator = torch.Generator("cpu").manual_seed(3)
    tokens = torch.randint(shape.vocab, (num_workers * batch, shape.seq_len + 1), generator=generator, device="cpu")
    plain, compiled = (Model(shape, num_workers, batch, numel, device, compiled) for compiled in (False, True))
    for model in (plain, compiled):
        model.copies.copy_(shape.initial(1, numel))
        model.forward_backward(tokens.to(device))
    first = compiled.gradients.clone()
    compiled.forward_backward(tokens.to(device))
    return float((first.float() - plain.gradients.float()).norm() / plain.gradients.float().norm()), _same(first, compiled.gradients)


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def main(shape: Shape | None = None) -> bool:
    """Prints what was compared; False if anything differs. shape: compared too, if not None."""
    device, good = torch.device("cuda" if torch.cuda.is_available() else "cpu"), True
    cases = [(SMALL, 12, {"density": 0.1}), (SMALL, 12, {"density": 0.01}), (SMALL, 12, {"density": 0.01, "dense_warmup_steps": 3})]
    if shape is not None:
        cases += [(shape, 4, {"density": 0.1}), (shape, 4, {"density": 0.01})]
    for what, steps, fields in cases:
        found = differences(what, device, steps, **fields)
        good &= not found
        print(f"against the product's flow, {fields}, {steps} steps, {what.num_parameters:,} parameters, {device.type}:",
              "the same bits" if not found else f"{len(found)} DIFFERENCES: {found[:4]}", flush=True)
    return good


if __name__ == "__main__":
    raise SystemExit(not main())
