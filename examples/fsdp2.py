"""Trains a small GPT with FSDP2 (fully_shard); an ordinary script without DeepSpeed.

    torchrun --nproc_per_node 2 fsdp2.py                      # gloo, or NCCL where there are GPUs
    torchrun --nproc_per_node 2 fsdp2.py --backend zipccl     # gathers and gradients are compressed; at 2 ranks every bit is the same

FP32 master weights, gathered and their gradients reduced in BF16. Prints the losses (rank 0's own), what was sent, a hash of the weights.
"""
import argparse
import hashlib
import os

import byte_text
import torch
import torch.distributed as dist
from gpt import GPT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy


def parse_args():
    parser = argparse.ArgumentParser(description="Train a small GPT with FSDP2.")
    parser.add_argument("--backend", choices=("native", "zipccl"), default="native")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=64)
    return parser.parse_args()


def init(backend) -> torch.device:
    """The process group, and this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if backend == "zipccl":
        import ds_zipccl
        ds_zipccl.configure(collectives="always", min_bytes=1 << 16)        # default: only what a probe finds faster, from 1 MiB
        dist.init_process_group("zipccl")
    else:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def shard(model, device):
    """Every block and the rest, over all ranks."""
    settings = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
                "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def report(backend, weights):
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.float().cpu().numpy().tobytes())
    print(f"weights {digest.hexdigest()[:16]}")
    if backend == "zipccl":
        import ds_zipccl
        for op, row in sorted(ds_zipccl.statistics().items()):
            print(f"{op}: {row['calls_zipped']} calls zipped, {row['calls_native']} native {row['native_reasons'] or ''}; "
                  f"{row['raw_bytes'] / 1e6:.2f} MB sent as {row['wire_bytes'] / 1e6:.2f} MB, ratio {row['ratio']}")


def main():
    args = parse_args()
    device = init(args.backend)
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    model = shard(GPT(byte_text.VOCAB_SIZE, args.dim, args.layers, num_heads=4).to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text, _ = byte_text.load(None, 1, args.seq_len)
    generator = torch.Generator().manual_seed(dist.get_rank())              # every rank reads other places
    for step in range(1, args.steps + 1):
        x, y = byte_text.batch(text, 4, args.seq_len, generator, device)
        loss = cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f} = {loss.item().hex()}", flush=True)
    weights = [parameter.full_tensor().detach() for parameter in model.parameters()]
    if dist.get_rank() == 0:
        report(args.backend, weights)
    dist.barrier()                      # no rank leaves while another still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
