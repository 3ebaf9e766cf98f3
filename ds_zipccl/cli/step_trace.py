"""How much of a training step is communication that no arithmetic hides: read off a profiler's trace of a GPU."""
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

COMMUNICATION = ("nccldevkernel", "nccl_dev_kernel", "ncclkernel")
CODEC = ("zipccl_",)
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def record(steps: Callable[[], None]) -> list[dict]:
    """The events on this process's GPU while ``steps`` runs; waits for the device before and after."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") in ON_DEVICE]


def summarize(events: list[dict], num_steps: int) -> dict[str, float]:
    """Milliseconds a step: ``communication_ms`` (a kernel of NCCL's runs), ``codec_ms`` (one of ours), ``compute_ms`` (any other),
    ``exposed_ms`` (one of NCCL's or ours and no other), ``idle_ms`` (none), ``span_ms`` (from the first's start to the last's end).

    A kernel of NCCL's that waits for another rank counts as running: what is exposed includes waiting.
    """
    kinds = {"communication": [], "codec": [], "compute": []}
    for event in events:
        name = event["name"].lower()
        kind = "communication" if name.startswith(COMMUNICATION) else "codec" if name.startswith(CODEC) else "compute"
        kinds[kind].append((event["ts"], event["ts"] + event["dur"]))
    ours = union(kinds["communication"] + kinds["codec"])
    everything = union(ours + kinds["compute"])
    span = everything[-1][1] - everything[0][0] if everything else 0.0
    lengths = {f"{kind}_ms": length(union(intervals)) for kind, intervals in kinds.items()}
    lengths |= {"exposed_ms": length(everything) - lengths["compute_ms"], "idle_ms": span - length(everything), "span_ms": span}
    return {name: us / 1e3 / num_steps for name, us in lengths.items()}


def union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same points as disjoint intervals, in order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(intervals: list[tuple[float, float]]) -> float:
    """Of disjoint intervals."""
    return sum(end - start for start, end in intervals)
