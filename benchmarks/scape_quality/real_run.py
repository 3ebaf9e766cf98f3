"""Does a real run through DeepSpeed match its simulation? Trains a GPT with SCAPE from a ds_config, a process and a GPU for every rank
(NCCL; gloo on a CPU), then the same in this process alone with the optimizer of the benchmark, and compares every step bit by bit.

    python -m benchmarks.scape_quality.real_run --text runs/scape_quality/text --json benchmarks/results/scape_real_run.json

The simulation takes every worker's forward and backward pass by itself, as a rank does: the same operations on the same shapes give the
same bits. (The benchmark takes those of all workers in one batched pass, whose products round otherwise.)
"""
import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from benchmarks.scape_quality import text, workers
from benchmarks.scape_quality.model import Shape, _Embed, losses
from benchmarks.scape_quality.run import Job
from ds_scape.config import ScapeParams
from ds_scape.sync.partition import TensorSlot
from ds_scape.update import norms
from zipscape.machine import write_json

#: Of a rank: its copies of all weights, its residuals, and of its partition the rest.
TENSORS = ("copies", "residual", *workers.Scape.STATE)


class Gpt(nn.Module):
    """The benchmark's model for one worker, its tensors apart as DeepSpeed expects them. forward: tokens int64 [B, T + 1] -> mean loss."""

    def __init__(self, shape: Shape, seed: int, device: torch.device):
        super().__init__()
        self.shape, self.weights = shape, nn.ParameterList()
        initial = shape.initial(seed, shape.num_parameters)
        for slot, size in zip(shape.slots(), (size for _, count, size in shape.tensors() for _ in range(count)), strict=True):
            self.weights.append(nn.Parameter(initial[slot.offset:slot.offset + slot.numel].view(size).to(device, torch.bfloat16)))
        half = shape.dim // shape.heads // 2
        frequency = 10000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(shape.seq_len, device=device, dtype=torch.float32), frequency)
        self._rotary = angles.cos().bfloat16(), angles.sin().bfloat16()

    def forward(self, tokens):
        rest, stacked = iter(self.weights), []
        for _, count, _ in self.shape.tensors():
            stacked.append(torch.stack([next(rest) for _ in range(count)])[None])
        inputs, targets = tokens[:, :-1].reshape(1, -1), tokens[:, 1:].reshape(1, -1)
        x = _Embed.apply(stacked[0][:, 0], inputs)
        return losses(x, targets, *stacked, *self._rotary, self.shape.heads)[0]


class Sequences:
    """int64 [B, T + 1] of a step (from 1) and a worker."""

    def __init__(self, job: Job, train: torch.Tensor, device: torch.device):
        """train: uint16 tokens."""
        starts = text.places(train.numel(), job.steps * job.workers * job.batch, job.shape.seq_len, job.seed)
        self._starts, self._train, self._device = starts.view(job.steps, job.workers, job.batch), train.view(torch.int16), device
        self._along = torch.arange(job.shape.seq_len + 1, device="cpu")

    def of(self, step: int, worker: int) -> torch.Tensor:
        return (self._train[self._starts[step - 1, worker][:, None] + self._along].long() & 0xFFFF).to(self._device)


def ds_config(job: Job) -> dict:
    params = {"lr": job.lr, "betas": list(workers.BETAS), "eps": workers.EPS, "weight_decay": workers.WEIGHT_DECAY, "density": job.density,
              "dense_warmup_steps": job.dense_warmup_steps}
    return {"train_micro_batch_size_per_gpu": job.batch, "gradient_clipping": workers.MAX_NORM, "bf16": {"enabled": True},
            "optimizer": {"type": "SCAPE", "params": params}, "zero_optimization": {"stage": 1}, "steps_per_print": 10**9}


def checksums(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """int64 [number of tensors], where they are: nobody waits for it."""
    return torch.stack([checksum(tensor) for tensor in tensors.values()])


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits that depend on every bit and its place."""
    bits = tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(-1).long()
    odd = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return (bits * odd * 0x9E3779B97F4A7C1 + bits * bits * odd).sum()


def read(names, losses, norms, sums) -> list[dict]:
    """One row per step, from what was kept on the device."""
    numbers = zip(torch.stack(losses).tolist(), norms, torch.stack(sums).tolist(), strict=True)
    return [{"loss": loss, "norm": norm, **dict(zip(names, row, strict=True))} for loss, norm, row in numbers]


@contextlib.contextmanager
def same_bits(device: torch.device):
    """Equal calls give equal bits: no atomics, and one thread on a CPU."""
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_num_threads(1 if device.type == "cpu" else threads)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.set_num_threads(threads)


def train(job: Job, tokens: torch.Tensor, device: torch.device, folder: Path, rank: int, seconds: float = math.inf) -> None:
    """The real run, on every rank of the process group that is there. Leaves its rows and its last tensors in ``folder``. seconds: rank 0
    ends it after so long, with fewer steps."""
    import deepspeed

    import ds_scape  # noqa: F401       makes "SCAPE" known to DeepSpeed

    engine, *_ = deepspeed.initialize(model=Gpt(job.shape, job.seed, device), config=ds_config(job))
    zero, sequences = engine.optimizer, Sequences(job, tokens, device)
    flow, flat = zero.flow, zero.flow.flats[0]
    lost, found_norms, sums, times = [], [], [], [time.monotonic()]
    with same_bits(device):
        for step in range(1, job.steps + 1):
            zero.param_groups[0]["lr"] = job.lr_at(step)
            loss = engine(sequences.of(step, rank))
            engine.backward(loss)
            engine.step()
            lost.append(loss.detach())
            found_norms.append(float(zero._global_grad_norm))
            sums.append(checksums({name: getattr(flat, name) for name in TENSORS}))
            if step % 25 == 0:
                times.append(time.monotonic())
                is_late = torch.tensor(float(times[-1] - times[0] > seconds), device=device)
                torch.distributed.broadcast(is_late, 0)
                if rank == 0:
                    print(f"step {step}: {40 * (times[-1] - times[-2]):.1f} ms a step with checksums, loss {loss.item():.3f}", flush=True)
                if is_late.item():
                    break
    slots = [(offset, meta.numel(), meta.dim())
             for offset, meta in zip(zero.round_robin_bit16_offsets[0], zero.round_robin_bit16_meta[0], strict=True)]
    about = {"slots": slots, "numel": flat.copies.numel(), "gradients": str(zero.fresh_gradients[0].dtype), "kernels": flow.kernels.names,
             "optimizer": type(zero).__name__, "sent_bytes": dict(flow.transport.sent_bytes)}
    torch.save({name: getattr(flat, name).cpu() for name in TENSORS}, folder / f"tensors{rank}.pt")
    (folder / f"rank{rank}.json").write_text(json.dumps({"rows": read(TENSORS, lost, found_norms, sums), "about": about}))


def simulate(job: Job, tokens: torch.Tensor, device: torch.device, about: dict, num_steps: int) -> tuple[list[list[dict]], list[dict]]:
    """The same by one process: rows by rank and step, and the last tensors by rank. about: how the real run's buffer is laid out."""
    model = Gpt(job.shape, job.seed, device)
    numel, slots = about["numel"], [TensorSlot(*slot) for slot in about["slots"]]
    copies = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    for parameter, slot in zip(model.weights, slots, strict=True):
        place = copies[slot.offset:slot.offset + slot.numel].view_as(parameter)
        place.copy_(parameter.detach())
        parameter.data = place
    params = ScapeParams(lr=job.lr, density=job.density, dense_warmup_steps=job.dense_warmup_steps, betas=workers.BETAS, eps=workers.EPS,
                         weight_decay=workers.WEIGHT_DECAY)
    scape, sequences = workers.Scape(slots, copies, copies.float(), job.workers, params), Sequences(job, tokens, device)
    gradients = torch.zeros(job.workers, numel, dtype=getattr(torch, about["gradients"].removeprefix("torch.")), device=device)
    size, ranks = numel // job.workers, range(job.workers)
    lost, found_norms, sums = [[] for _ in ranks], [], [[] for _ in ranks]

    def tensors(rank):
        own = slice(rank * size, (rank + 1) * size)
        return {"copies": copies, "residual": scape.residual[rank],
                **{name: getattr(scape.flat, name)[own] for name in workers.Scape.STATE}}

    with same_bits(device):
        for step in range(1, num_steps + 1):
            for rank in ranks:
                loss = model(sequences.of(step, rank))
                for slot, made in zip(slots, torch.autograd.grad(loss, list(model.weights)), strict=True):
                    gradients[rank, slot.offset:slot.offset + slot.numel].copy_(made.reshape(-1))
                lost[rank].append(loss.detach())
            squares = torch.cat([norms.sum_of_squares([gradient], scape.kernels) for gradient in gradients]).tolist()
            scape.step(gradients, job.lr_at(step), squares)
            found_norms.append(math.sqrt(math.fsum(squares) / job.workers))
            for rank in ranks:
                sums[rank].append(checksums(tensors(rank)))
    rows = [read(TENSORS, lost[rank], found_norms, sums[rank]) for rank in ranks]
    return rows, [{name: tensor.cpu() for name, tensor in tensors(rank).items()} for rank in ranks]


def compare(job: Job, tokens: torch.Tensor, device: torch.device, folder: Path) -> dict:
    """What the ranks left in ``folder`` beside their simulation. "differences" is empty if all bits are the same."""
    real = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(job.workers)]
    num_steps = len(real[0]["rows"])
    rows, last = simulate(job, tokens, device, real[0]["about"], num_steps)
    differences = []
    for rank in range(job.workers):
        for step, (mine, theirs) in enumerate(zip(rows[rank], real[rank]["rows"], strict=True), 1):
            differences += [f"step {step}, rank {rank}: {name}" for name in mine if mine[name] != theirs[name]]
        saved = torch.load(folder / f"tensors{rank}.pt")
        for name, tensor in last[rank].items():
            ints = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
            num = int((tensor.view(ints) != saved[name].view(ints)).sum())
            differences += [f"at the end, rank {rank}: {num} elements of {name}"] if num else []
    curve = [{"step": step + 1, "real": [one["rows"][step]["loss"] for one in real], "simulated": [row[step]["loss"] for row in rows]}
             for step in range(num_steps)]
    num_compared = num_steps * job.workers * (len(TENSORS) + 2)
    return {"job": asdict(job), "steps": num_steps, "differences": differences, "num_compared": num_compared, "curve": curve,
            "norms": [row["norm"] for row in rows[0]], "ds_config": ds_config(job),
            "about": real[0]["about"] | {"slots": len(real[0]["about"]["slots"])},
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="what prepare.py made; none: random tokens")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--dense-warmup-steps", type=int, default=15)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--first-tokens", type=int, help="only so many of the text")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of training; fewer steps if it takes longer")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the ranks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)           # RANK:FOLDER, of a process that this one starts
    return parser.parse_args(argv)


def job_of(args) -> Job:
    shape = Shape(4096, args.dim, args.layers, max(1, args.dim // 64), args.seq_len)
    return Job("real", "scape", args.lr, density=args.density, dense_warmup_steps=args.dense_warmup_steps, steps=args.steps,
               workers=args.ranks, batch=args.batch, shape=shape)


def tokens_of(args) -> torch.Tensor:
    if args.text:
        return text.load(args.text)["train"][:args.first_tokens]
    return torch.randint(4096, (100_000,), generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(torch.int16).view(torch.uint16)


def be_a_rank(args) -> None:
    import deepspeed  # noqa: F401          first: meanwhile the text is unpacked

    rank, _, folder = args.rank.partition(":")
    if args.device == "cuda":
        torch.cuda.set_device(int(rank))
    store = torch.distributed.FileStore(f"{folder}/store", args.ranks)
    torch.distributed.init_process_group({"cuda": "nccl", "cpu": "gloo"}[args.device], store=store, rank=int(rank), world_size=args.ranks)
    train(job_of(args), tokens_of(args), torch.device(args.device), Path(folder), int(rank), args.seconds)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def start_ranks(args, argv: list[str], folder: str) -> list[subprocess.Popen]:
    common = {**os.environ, "WORLD_SIZE": str(args.ranks), "DS_ACCELERATOR": args.device, "MASTER_ADDR": "127.0.0.1",
              "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return [subprocess.Popen([sys.executable, "-m", "benchmarks.scape_quality.real_run", *argv, "--rank", f"{rank}:{folder}"],
                             env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(args.ranks)]


def wait_for(ranks: list[subprocess.Popen], end: float) -> None:
    """Until all are done, one fails or the time ``end`` has come; none is left. Raises SystemExit if they did not all end well."""
    try:
        while any(one.poll() is None for one in ranks) and not any(one.poll() for one in ranks) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        for one in ranks:
            one.kill()
        codes = [one.wait() for one in ranks]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes} (negative: stopped after an error elsewhere, or after --timeout)")


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.rank:
        be_a_rank(args)
        return 0
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    job, end = job_of(args), time.monotonic() + args.timeout
    with tempfile.TemporaryDirectory() as folder:
        ranks, tokens = start_ranks(args, argv, folder), None
        try:
            tokens = tokens_of(args)                # while they start
        finally:
            wait_for(ranks, end if tokens is not None else 0.0)
        found = compare(job, tokens, torch.device(args.device), Path(folder))
    first, last = found["curve"][0], found["curve"][-1]
    print(f"{job.workers} ranks, {found['steps']} steps, density {job.density}, {found['device']}:",
          f"losses {first['real']} -> {last['real']}")
    print(f"{found['num_compared']} losses, norms and checksums, and all tensors at the end:",
          f"{len(found['differences'])} DIFFERENCES: {found['differences'][:8]}" if found["differences"] else "the same bits", flush=True)
    if args.json:
        write_json(args.json, found, command=" ".join(["python -m benchmarks.scape_quality.real_run", *argv]))
    return bool(found["differences"])


if __name__ == "__main__":
    sys.exit(main())
