"""What the host does for a zipped call in steady state, by torch's profiler: every call of CUDA by name, what of it blocks, the waits for
status words, and the kernels.

    python benchmarks/call_trace.py --ranks 2 [--op LIST] [--sizes 4M,64M] [--transport process_group] [--in-flight 1] [--json FILE]

Per collective and size, means over --calls calls, of rank 0, after as many as it takes until nothing is new (memory is there, rooms follow
the data): ``host``: calls of CUDA's runtime and driver, us in them; ``blocking``: those of them that hold the host for the GPU or may
(synchronization, allocation, copies that are not asynchronous); ``words``: waits for the ranks' status words, the overflow flag among them,
which is what the host is meant to block for, and nothing else; ``device``: kernels and copies, us of the GPU; ``launch``, ``wait``: us
until the call returns its handle, of wait(). The profiler makes all of the host's times longer. --in-flight: so many calls are launched
before the first is waited for. The GPU is waited for (by this script) before the first call and after the last, not in between.
"""
import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ds_zipccl.backend import front
from ds_zipccl.cli import ranks
from ds_zipccl.cli.bench_codec import parse_size
from ds_zipccl.cli.bench_collectives import make_call
from ds_zipccl.collectives import work
from ds_zipccl.collectives.capacity import SHRINK_AFTER
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from zipscape.machine import write_json

HOST, DEVICE = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
#: Parts of names, in lower case; with ``Async`` at the end they do not block.
BLOCKING = ("synchronize", "malloc", "free", "hostalloc", "memalloc", "hostregister", "cudamemcpy", "cumemcpy", "cudamemset")
OPS = "all_gather_into_tensor,reduce_scatter_tensor,all_to_all_single,all_reduce"


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=None, help="spawn so many here instead of using a launcher")
    parser.add_argument("--op", default=OPS)
    parser.add_argument("--sizes", default="4M,64M", help="of the whole tensor")
    parser.add_argument("--transport", choices=("process_group", "symmetric_memory"), default="process_group")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


class Waits:
    """Counts and times the host's waits for status words: looks that find them there are none."""

    def __init__(self):
        self.count, self.seconds, self._await = 0, 0.0, work.Pending.await_words

    def __enter__(self) -> "Waits":
        def timed(pending):
            if pending.has_words():
                return self._await(pending)
            start = time.perf_counter()
            words = self._await(pending)
            self.count, self.seconds = self.count + 1, self.seconds + time.perf_counter() - start
            return words

        work.Pending.await_words = timed
        return self

    def __exit__(self, *exc) -> None:
        work.Pending.await_words = self._await


def run_calls(runtime: Runtime, call: Call, count: int, in_flight: int) -> tuple[float, float]:
    """us of a launch, of a wait."""
    flying, launches, waits = [], 0.0, 0.0
    for i in range(count + in_flight):
        if i < count:
            start = time.perf_counter()
            flying.append(front.run(runtime, call))
            launches += time.perf_counter() - start
        if i >= in_flight - 1 and flying:
            start = time.perf_counter()
            flying.pop(0).wait()
            waits += time.perf_counter() - start
    return launches / count * 1e6, waits / count * 1e6


def is_blocking(name: str) -> bool:
    name = name.lower()
    return any(word in name for word in BLOCKING) and not name.removesuffix("_v2").endswith("async")


def summarize(events: list[dict], count: int) -> dict:
    """Of a chrome trace: {"host", "blocking", "device": {name: [times a call, us a call]}}."""
    found = {"host": {}, "blocking": {}, "device": {}}
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        is_host = category in HOST
        for kind, wanted in (("host", is_host), ("blocking", is_host and is_blocking(name)), ("device", category in DEVICE)):
            if wanted:
                short = name.removeprefix("void ").split("(")[0].split("<")[0][:60]
                row = found[kind].setdefault(short, [0, 0.0])
                row[0], row[1] = row[0] + 1, row[1] + event.get("dur", 0)
    return {kind: {name: [round(n / count, 3), round(us / count, 2)] for name, (n, us) in sorted(rows.items(), key=lambda r: -r[1][1])}
            for kind, rows in found.items()}


def traced(runtime: Runtime, call: Call, args) -> dict:
    settle = torch.cuda.synchronize if call.device.type == "cuda" else lambda: None
    run_calls(runtime, call, 2 * SHRINK_AFTER, args.in_flight)
    dist.barrier()
    settle()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if call.device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        run_calls(runtime, call, 2, args.in_flight)                 # the profiler's own beginning
        settle()
        with torch.profiler.record_function("zipped calls"), Waits() as waits:
            launch, wait = run_calls(runtime, call, args.calls, args.in_flight)
        settle()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if "dur" in event]
    begin, end = next((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "zipped calls")
    # What the GPU did for them: all after the script's own wait, which is before the first.
    inside = [e for e in events if e["ts"] >= begin and (e.get("cat") in DEVICE or e["ts"] + e["dur"] <= end)]
    return {**summarize(inside, args.calls), "words": [waits.count / args.calls, round(waits.seconds / args.calls * 1e6, 2)],
            "launch_us": round(launch, 1), "wait_us": round(wait, 1)}


def main(args) -> int:
    config = ZipcclConfig(enabled=True, collectives="always", min_bytes=0, transport=args.transport, deterministic_reduce=False,
                          split_lists="all_or_none")
    runtime = Runtime(config, {args.device: loader.resolve("best", args.device)})
    device = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None)
    rows = []
    for op in args.op.split(","):
        for size in map(parse_size, args.sizes.split(",")):
            call = make_call(specs()[op], size, torch.bfloat16, device, False)
            before = runtime.stats.snapshot().get(op, {})
            row = {"op": op, "bytes": size, **traced(runtime, call, args)}
            seen = runtime.stats.snapshot()[op]
            row |= {key: seen[key] - before.get(key, 0) for key in ("calls_zipped", "calls_native", "calls_one_sided", "overflows")}
            rows.append(row)
            if dist.get_rank() == 0:
                print(f"{op} {size >> 10} KiB: blocks for {row['blocking'] or 'nothing'} and for words {row['words'][0]:g} times, "
                      f"{row['words'][1]} us a call; launch {row['launch_us']}, wait {row['wait_us']} us; "
                      f"host {row['host']}; device {row['device']}", flush=True)
    words = runtime.stats.sections["words"]()[1]
    runtime.close()
    if args.json and dist.get_rank() == 0:
        settings = {key: getattr(args, key) for key in ("device", "transport", "calls", "in_flight")}
        write_json(args.json, {"settings": settings | {"kernels": runtime.kernels, "words": words}, "rows": rows},
                   command="python benchmarks/call_trace.py " + " ".join(sys.argv[1:]))
    return 0


if __name__ == "__main__":
    options = parse()
    sys.exit(ranks.run(main, options.ranks, options.device, options))
