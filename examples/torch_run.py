"""What ddp.py and fsdp2.py share: their arguments, the process group, the loop over a text, and what is printed at the end."""
import argparse
import hashlib
import os

import byte_text
import torch
import torch.distributed as dist
from leave import leave
from torch.nn.functional import cross_entropy


def parse_args(description):
    parser = argparse.ArgumentParser(description=description)
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
    torch.manual_seed(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")             # what CUDA asks for with the next line
    torch.use_deterministic_algorithms(True)
    return device


def train(model, args, device):
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


def end(backend, weights):
    """Prints a hash of the weights and what was sent (rank 0), and ends the process group."""
    if dist.get_rank() == 0:
        digest = hashlib.sha256()
        for weight in weights:
            digest.update(weight.detach().float().cpu().numpy().tobytes())
        print(f"weights {digest.hexdigest()[:16]}")
        if backend == "zipccl":
            import ds_zipccl
            for op, row in sorted(ds_zipccl.statistics().items()):
                print(f"{op}: {row['calls_zipped']} calls zipped, {row['calls_native']} native {row['native_reasons'] or ''}; "
                      f"{row['raw_bytes'] / 1e6:.2f} MB sent as {row['wire_bytes'] / 1e6:.2f} MB, ratio {row['ratio']}")
    leave(dist)
