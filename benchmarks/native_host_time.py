"""Host time that ds_zipccl adds to a call that goes native: microseconds from the front's entry to its "take the native one".

    python benchmarks/native_host_time.py

Two gloo ranks on this machine; the best of 20 means over 200 calls, on rank 0. No data moves: the native collective itself is not called.
"""
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ds_zipccl.backend import front
from ds_zipccl.cli.bench_collectives import make_call
from ds_zipccl.collectives.cost import Costs, Curve
from ds_zipccl.collectives.registry import specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader

SLOWER = Costs(Curve((1, 2), (1.0, 2.0)), Curve((1, 2), (5.0, 10.0)), 1.41)
CASES = (("never", 4 << 20, "all_gather_into_tensor"), ("adaptive", 64 << 10, "all_gather_into_tensor"),
         ("adaptive", 4 << 20, "all_gather_into_tensor"), ("adaptive", 4 << 20, "reduce_scatter_tensor"))


def measure(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for choice, size, op in CASES:
        runtime = Runtime(ZipcclConfig(enabled=True, collectives=choice), {"cpu": loader.resolve("best", "cpu")})
        call = make_call(specs()[op], size, torch.bfloat16, torch.device("cpu"), False)
        runtime.state(call.group, call.device).measured(op, torch.bfloat16).costs = SLOWER
        best = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(200):
                if front.run(runtime, call) is not None:
                    raise SystemExit("the call did not go native")
            best = min(best, (time.perf_counter() - start) / 200 * 1e6)
        reason, = runtime.stats.snapshot()[op]["native_reasons"]
        if rank == 0:
            print(f"{op:24s} {size >> 10:6d} KiB, {choice}: {reason:18s} {best:5.1f} us", flush=True)
        dist.barrier()
        runtime.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder,), nprocs=2)
