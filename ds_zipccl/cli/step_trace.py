"""How much of a training step is communication that no arithmetic hides, and how much is the optimizer's: from a profiler's trace."""
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

COMMUNICATION = ("nccldevkernel", "nccl_dev_kernel", "ncclkernel")
CODEC = ("zipccl_",)
COPIES = ("memcpy htod", "memcpy dtoh")
#: What ``mark`` runs.
MARK = "spin_kernel"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def mark() -> None:
    """Queues what ``summarize`` finds parts by: before the first step, and before and after the optimizer's part of every step."""
    torch.cuda._sleep(1)


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
    """Milliseconds a step: ``communication_ms`` (a kernel of NCCL's runs), ``codec_ms`` (one of ours), ``copies_ms`` (between host and
    device), ``compute_ms`` (any other), ``exposed_ms`` (one of NCCL's or ours and no other kernel), ``exposed_copies_ms`` (nothing but
    copies), ``idle_ms`` (none), ``span_ms`` (from the first's start to the last's end). Where every step was marked, also
    ``optimizer_ms``, ``exposed_in_optimizer_ms`` and ``idle_in_optimizer_ms``: the part of compute, exposed (copies included) and idle
    between a step's two marks. Nothing counts that began before the first of 2 * ``num_steps`` + 1 marks.

    A kernel of NCCL's that waits for another rank counts as running: what is exposed includes waiting.
    """
    kinds = {"communication": [], "codec": [], "copies": [], "compute": []}
    marks = sorted(event["ts"] for event in events if MARK in event["name"].lower())
    begin = marks.pop(0) if len(marks) == 2 * num_steps + 1 else float("-inf")
    for event in events:
        name, interval = event["name"].lower(), (event["ts"], event["ts"] + event["dur"])
        starts = {"communication": COMMUNICATION, "codec": CODEC, "copies": COPIES}
        if MARK not in name and event["ts"] >= begin:
            kinds[next((kind for kind, words in starts.items() if name.startswith(words)), "compute")].append(interval)
    joined = {kind: union(intervals) for kind, intervals in kinds.items()}
    kernels = union(joined["communication"] + joined["codec"] + joined["compute"])
    everything = union(kernels + joined["copies"])
    span = everything[-1][1] - everything[0][0] if everything else 0.0
    lengths = {f"{kind}_ms": length(intervals) for kind, intervals in joined.items()}
    lengths |= {"exposed_ms": length(kernels) - lengths["compute_ms"], "exposed_copies_ms": length(everything) - length(kernels),
                "idle_ms": span - length(everything), "span_ms": span}
    if len(marks) == 2 * num_steps:
        windows = list(zip(marks[::2], marks[1::2], strict=True))
        computing, busy = (length(_inside(intervals, windows)) for intervals in (joined["compute"], everything))
        lengths |= {"optimizer_ms": computing, "exposed_in_optimizer_ms": busy - computing,
                    "idle_in_optimizer_ms": length(windows) - busy}
    return {name: us / 1e3 / num_steps for name, us in lengths.items()}


def _inside(intervals: list[tuple[float, float]], windows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(max(a, begin), min(b, end)) for begin, end in windows for a, b in intervals if a < end and b > begin]


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
