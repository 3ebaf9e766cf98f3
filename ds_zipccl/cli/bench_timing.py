"""Times of functions that are measured side by side, in microseconds."""
import time

import torch

_FLUSH_BYTES = 256 << 20                     # larger than any GPU's L2
_MIN_US = 1000                               # shorter calls on a CPU are repeated within one measurement


def interleaved(functions: dict, device: str, repeat: int, warmup: int = 2) -> dict[str, list[float]]:
    """``repeat`` times of each function, taken in turns so that a disturbance meets all of them. ``warmup`` 0: each function is called
    exactly ``repeat`` times.

    On a CPU the data stays where the turn before left it (in the caches, as far as they reach). On a GPU the L2 is flushed before
    each call and the time is the device's own, between two events.
    """
    if device != "cuda":
        inner = {name: _inner_calls(function, warmup) for name, function in functions.items()}
        times = {name: [] for name in functions}
        for _ in range(repeat):
            for name, function in functions.items():
                times[name].append(_cpu_us(function, inner[name]))
        return times
    return _on_gpu(functions, repeat, warmup)


def _cpu_us(function, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) * 1e6 / calls


def _inner_calls(function, warmup: int) -> int:
    if warmup == 0:
        return 1
    fastest = min(_cpu_us(function, 1) for _ in range(warmup))
    return max(1, min(100, round(_MIN_US / max(fastest, 1))))


def _on_gpu(functions: dict, repeat: int, warmup: int) -> dict[str, list[float]]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    pairs = {name: [] for name in functions}
    for turn in range(warmup + repeat):
        for name, function in functions.items():
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            function()
            end.record()
            if turn >= warmup:
                pairs[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: [begin.elapsed_time(end) * 1e3 for begin, end in events] for name, events in pairs.items()}
