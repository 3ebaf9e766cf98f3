"""Native or zipped: measured once per group, collective, dtype and size class, and agreed by all ranks."""
import statistics
import time

import torch

from ds_zipccl.collectives.registry import Call, CollectiveSpec

PROBE_ROUNDS = 3
MAX_PROBE_BYTES = 32 << 20         # larger messages are judged by a probe of this size
MIN_GAIN = 1.03                    # zipped must be this much faster: below it, noise would decide


def size_class(num_bytes: int) -> int:
    """Calls of one class share a decision: powers of two, everything above MAX_PROBE_BYTES together."""
    return min(num_bytes, MAX_PROBE_BYTES).bit_length()


def _timed(run, device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def probe(spec: CollectiveSpec, call: Call, run_zipped, side) -> bool:
    """Whether zipped beat native on synthetic Gaussian tensors of the call's size class.

    Runs 2 x (1 + PROBE_ROUNDS) collectives on the call's group, interleaved; the slowest rank's median counts,
    exchanged over ``side``, so every rank gets the same answer. ``run_zipped(call)`` carries out a zipped call to its
    end.
    """
    device, dtype = call.input.device, call.input.dtype
    whole_bytes = spec.whole_numel(call) * call.input.element_size()
    row_numel = max(1, min(whole_bytes, MAX_PROBE_BYTES) // call.input.element_size() // call.world_size)
    output, data = spec.make_tensors(call.rank, call.world_size, row_numel, dtype, device)
    data.normal_(0, 0.02, generator=torch.Generator(device=device).manual_seed(call.rank))
    test = Call(call.op, output, data, call.group, call.reduce_op)
    times = {"native": [], "zipped": []}
    for _ in range(1 + PROBE_ROUNDS):
        times["native"].append(_timed(lambda: spec.native(test).wait(), device))
        times["zipped"].append(_timed(lambda: run_zipped(test), device))
    mine = torch.tensor([statistics.median(t[1:]) for t in times.values()], dtype=torch.float64, device=device)
    gathered = torch.empty(2 * call.world_size, dtype=torch.float64, device=device)
    side.all_gather(gathered, mine).wait()
    native, zipped = gathered.view(-1, 2).amax(0).tolist()
    return native > MIN_GAIN * zipped
