"""Trains a small GPT on bytes of real text; an ordinary DeepSpeed script.

    deepspeed --num_gpus 2 train_gpt.py --deepspeed_config ds_config.json --out runs/mine
    torchrun --nproc_per_node 2 train_gpt.py --deepspeed_config ds_config.json
    mpirun -n 2 python train_gpt.py --deepspeed_config ds_config.json

Writes to --out: losses.json (every rank's loss per step, exact as hex floats; step times) and weights.pt
(the full weights in the training dtype); with --masters also masters.pt (the optimizer's fp32 weights, ZeRO 1 and 2).
The loss of a step is the mean over its micro batches, per rank.
"""
import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace

import byte_text
import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from gpt import GPT
from leave import leave
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy


def parse_args():
    parser = argparse.ArgumentParser(description="Train a small GPT on bytes of text with DeepSpeed.")
    parser.add_argument("--data", help="file or folder of text (default: the Python standard library's sources)")
    parser.add_argument("--max-mb", type=float, default=8, help="read at most this many MB of text (default 8)")
    parser.add_argument("--out", type=Path, help="folder for losses.json and weights.pt (default: nothing is written)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default 100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--untied", action="store_true", help="give the head weights of its own")
    parser.add_argument("--masters", action="store_true", help="also write the optimizer's fp32 weights (ZeRO 1 and 2)")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def load_text(args):
    """Training and validation text; checks the arguments on every rank, and all stop together with one message."""
    text, problem = None, None
    try:
        for name in ("steps", "layers", "dim", "heads", "seq_len", "max_mb"):
            if getattr(args, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be greater than 0, got {getattr(args, name)}")
        if args.dim % (2 * args.heads):
            raise ValueError(f"--dim must be a multiple of 2 * --heads = {2 * args.heads}, got {args.dim}")
        if not args.deepspeed_config or not Path(args.deepspeed_config).is_file():
            raise ValueError(f"--deepspeed_config: no such file: {args.deepspeed_config}")
        text = byte_text.load(args.data, args.max_mb, args.seq_len)
    except (ValueError, OSError) as error:
        problem = str(error)
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        if dist.get_rank() == 0:
            print(f"train_gpt.py: error: {next(filter(None, problems))}", file=sys.stderr, flush=True)
        dist.barrier()  # so that no launcher ends rank 0 before it has spoken
        sys.exit(2)
    return text


def validation_loss(engine, text, args, num_batches=4):
    """Mean loss over a few batches of unseen text, this rank's own."""
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank())
    engine.eval()
    with torch.no_grad():
        losses = []
        for _ in range(num_batches):
            x, y = byte_text.batch(text, engine.train_micro_batch_size_per_gpu(), args.seq_len, generator,
                                   engine.device)
            losses.append(cross_entropy(engine(x).float().flatten(0, 1), y.flatten()).item())
    return sum(losses) / num_batches


def gather_weights(model):
    """The full weights on the CPU, one parameter at a time (all ranks must call it)."""
    weights = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().cpu().clone()
    return weights


def digest(weights):
    """sha256 over names and bytes: ranks that hold the same weights have the same."""
    sha = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        sha.update(name.encode() + weight.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def main():
    args = parse_args()
    deepspeed.init_distributed(verbose=False)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    train_text, val_text = load_text(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    model = GPT(byte_text.VOCAB_SIZE, args.dim, args.layers, args.heads, tied=not args.untied)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    generator = torch.Generator().manual_seed(1000 * args.seed + rank)  # every rank reads other places
    micro_steps, losses, times = engine.gradient_accumulation_steps(), [], []
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=rank != 0 or not console.is_terminal) as progress:
        task = progress.add_task("training", total=args.steps)
        for step in range(1, args.steps + 1):
            start, total = time.perf_counter(), 0.0
            for _ in range(micro_steps):
                x, y = byte_text.batch(train_text, engine.train_micro_batch_size_per_gpu(), args.seq_len, generator,
                                       engine.device)
                loss = cross_entropy(engine(x).float().flatten(0, 1), y.flatten())
                engine.backward(loss)
                engine.step()
                total += loss.item()
            losses.append(total / micro_steps)
            times.append(time.perf_counter() - start)
            progress.update(task, advance=1, description=f"loss {losses[-1]:.4f}  {times[-1]:.2f} s/step")
            if rank == 0 and not console.is_terminal:
                print(f"step {step}/{args.steps} loss {losses[-1]:.4f} {times[-1]:.3f} s", flush=True)

    val_loss = validation_loss(engine, val_text, args)
    per_rank = [None] * world_size
    dist.all_gather_object(per_rank, {"losses": losses, "val_loss": val_loss})
    weights = gather_weights(model)
    digests = [None] * world_size
    dist.all_gather_object(digests, digest(weights))
    masters = {}
    if args.masters:
        masters = {name: safe_get_full_fp32_param(parameter).cpu() for name, parameter in model.named_parameters()}
    if rank == 0:
        print(f"validation loss {sum(r['val_loss'] for r in per_rank) / world_size:.4f} (mean over ranks)", flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            torch.save(weights, args.out / "weights.pt")
            if masters:
                torch.save(masters, args.out / "masters.pt")
            record = {"losses": [r["losses"] for r in per_rank],
                      "losses_hex": [[x.hex() for x in r["losses"]] for r in per_rank],
                      "val_losses": [r["val_loss"] for r in per_rank],
                      "val_losses_hex": [r["val_loss"].hex() for r in per_rank],
                      "weights_sha256": digests, "step_times_s": times,
                      "num_parameters": sum(w.numel() for w in weights.values())}
            (args.out / "losses.json").write_text(json.dumps(record, indent=1) + "\n")
    leave(dist)


if __name__ == "__main__":
    main()
