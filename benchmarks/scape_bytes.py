"""What a training step through DeepSpeed really sends: bytes that cross the network interface, dense and with SCAPE, on several ranks.

    python -m benchmarks.scape_bytes --json benchmarks/results/scape_bytes.json

Linux. The ranks (gloo, ZeRO 1) live in a network namespace of their own, whose loopback interface nobody else uses: its counter has every
byte that one rank sends to another, with TCP's headers and acknowledgements. Beside it: what SCAPE counts, and docs/scape.md's formula.
"""
import argparse
import ctypes
import fcntl
import os
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.scape_quality.model import Shape
from benchmarks.scape_quality.real_run import Gpt
from zipscape.machine import write_json

PARAMS = {"lr": 5e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
RUNS = {"dense": ("ScapeAdamS", {}), "scape90": ("SCAPE", {"density": 0.1}), "scape99": ("SCAPE", {"density": 0.01})}


def own_network() -> None:
    """Takes this process, and those that it starts, into a network of their own: one loopback interface. Raises OSError where the system
    does not allow that."""
    new_user, new_network, set_flags, up = 0x10000000, 0x40000000, 0x8914, 1
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_network) and libc.unshare(new_user | new_network):
        raise OSError(ctypes.get_errno(), "unshare: no network namespace can be made here")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", up))


def crossed() -> int:
    """Bytes that the loopback interface has sent so far."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def work(rank: int, world_size: int, args, store: str, barrier, found) -> None:
    """All runs on one rank; puts (run, its row) into ``found``."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29561")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for name in args.runs:
        found.put((name, train(rank, world_size, name, args, barrier)))
        barrier.wait()
    dist.destroy_process_group()


def train(rank: int, world_size: int, name: str, args, barrier) -> dict:
    import deepspeed

    import ds_scape  # noqa: F401       makes "SCAPE" known to DeepSpeed
    from ds_scape.sync.traffic import dense_zero_bytes, step_bytes

    kind, fields = RUNS[name]
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0, "steps_per_print": 10**9,
              "optimizer": {"type": kind, "params": PARAMS | fields}, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=Gpt(args.shape, 1, torch.device("cpu")), config=config)
    flow, generator = getattr(engine.optimizer, "flow", None), torch.Generator().manual_seed(rank)

    def steps(number: int) -> None:
        for _ in range(number):
            engine.backward(engine(torch.randint(args.vocab, (1, args.seq_len + 1), generator=generator)))
            engine.step()

    def marks() -> tuple[int, int]:
        barrier.wait()                      # of processes, not of the network
        time.sleep(0.2)                     # the last mask is on its way
        seen = crossed(), sum(flow.transport.sent_bytes.values()) if flow else 0
        barrier.wait()
        return seen

    steps(2)                                # SCAPE's first is dense
    before = marks()
    steps(args.steps)
    after = marks()
    row = {"crossed_bytes": (after[0] - before[0]) / args.steps / world_size}
    if flow:
        row |= {"counted_bytes": (after[1] - before[1]) / args.steps, "mask": flow.codec.encoding,
                "formula": step_bytes(flow.layout, rank, dense=False, value_bytes=2, weight_bytes=2),
                "dense_zero_bytes": dense_zero_bytes(flow.layout, 2)}
    engine.destroy()
    return row


def measure(world_size: int, args) -> list[dict]:
    """Rows: bytes per rank and step, means over the ranks."""
    context, rows = mp.get_context("spawn"), []
    barrier, found = context.Barrier(world_size), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(work, (world_size, args, f"{folder}/store", barrier, found), nprocs=world_size, join=False)
        made = []
        while not ranks.join(timeout=0.1):
            while not found.empty():
                made.append(found.get())
        while len(made) < world_size * len(args.runs):
            made.append(found.get(timeout=10))
    share = args.shape.num_parameters * (world_size - 1) / world_size
    for name in args.runs:
        own = [row for run, row in made if run == name]
        row = {"run": name, "ranks": world_size, "num_parameters": args.shape.num_parameters, "steps": args.steps, **own[0]}
        row["crossed_per_weight"] = row["crossed_bytes"] / share
        if "counted_bytes" in row:
            row["counted_bytes"] = sum(one["counted_bytes"] for one in own) / world_size
            row["formula"] = {what: sum(one["formula"][what] for one in own) / world_size for what in row["formula"]}
            row["counted_per_weight"] = row["counted_bytes"] / share
        rows.append(row)
    return rows


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=lambda text: [int(number) for number in text.split(",")], default=[2, 4])
    parser.add_argument("--runs", type=lambda text: text.split(","), default=list(RUNS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.shape = Shape(args.vocab, args.dim, args.layers, max(1, args.dim // 64), args.seq_len)
    return args


def main(argv=None) -> int:
    args, rows = parse(argv), []
    own_network()
    print("Bytes a step and rank, in millions and per weight n (W-1)/W\n\n| run | ranks | crossed | counted | crossed | counted |\n"
          "|---|---|---|---|---|---|")
    for world_size in args.ranks:
        for row in measure(world_size, args):
            rows.append(row)
            counted = (f"{row['counted_bytes'] / 1e6:.3f}", f"{row['counted_per_weight']:.4f}") if "counted_bytes" in row else ("-", "-")
            seen = f"{row['crossed_bytes'] / 1e6:.3f}", f"{row['crossed_per_weight']:.4f}"
            print(f"| {row['run']} | {world_size} | {seen[0]} | {counted[0]} | {seen[1]} | {counted[1]} |", flush=True)
    if args.json:
        command = " ".join(["python -m benchmarks.scape_bytes", *(sys.argv[1:] if argv is None else argv)])
        write_json(args.json, {"rows": rows}, command=command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
