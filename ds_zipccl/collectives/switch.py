"""Native or zipped: measured once per group, collective, dtype and size class, and agreed by all ranks."""
import logging
import statistics
import time
from dataclasses import replace

import torch

from ds_zipccl.collectives.pairs import reason_for_raw
from ds_zipccl.collectives.registry import Call, CollectiveSpec

log = logging.getLogger("ds_zipccl")
PROBE_ROUNDS = 3
MAX_PROBE_BYTES = 32 << 20         # larger messages are judged by a probe of this size
MIN_PROBE_BYTES = 1 << 16          # smaller pieces of an all-to-all are never worth a probe
ASK_EACH_CALL = 8                  # all-to-alls in which the ranks ask each other whether anyone could zip; then ever fewer
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
    whole_bytes = spec.whole_numel(call) * call.dtype.itemsize
    return _probe(spec, call, run_zipped, side, min(whole_bytes, MAX_PROBE_BYTES))


def _probe(spec: CollectiveSpec, call: Call, run_zipped, side, whole_bytes: int) -> bool:
    device = call.device
    row_numel = max(1, whole_bytes // call.dtype.itemsize // (1 if call.root is not None else call.world_size))
    test = replace(spec.make_call(call.group, row_numel, call.dtype, device), reduce_op=call.reduce_op)
    for t in test.inputs:
        t.normal_(0, 0.02, generator=torch.Generator(device=device).manual_seed(call.rank))
    times = {"native": [], "zipped": []}
    if not run_zipped(test):
        return False
    for _ in range(1 + PROBE_ROUNDS):
        times["native"].append(_timed(lambda: spec.native(test).wait(), device))
        times["zipped"].append(_timed(lambda: run_zipped(test), device))
    mine = torch.tensor([statistics.median(t[1:]) for t in times.values()], dtype=torch.float64, device=device)
    gathered = torch.empty(2 * call.world_size, dtype=torch.float64, device=device)
    side.all_gather(gathered, mine).wait()
    native, zipped = gathered.view(-1, 2).amax(0).tolist()
    return native > MIN_GAIN * zipped


def pair_key(dtype: torch.dtype, num_bytes: int) -> tuple:
    """Of the decision for pieces of an all-to-all; ``num_bytes``: world size times the piece."""
    return "pair", dtype, size_class(num_bytes)


def any_pair_is_faster(spec: CollectiveSpec, call: Call, run_zipped, state, config) -> bool:
    """Whether pieces of any size are to be zipped in the group's all-to-alls of the call's dtype.

    Sizes differ from pair to pair, so ranks could not agree later when to probe which: once somebody has a piece that could be zipped, all
    size classes are probed, the largest first until zipped loses.
    """
    key = pair_key(call.dtype, MAX_PROBE_BYTES)
    if key not in state.decisions:
        numel = spec.row_numel(call)
        if not _somebody_asks(call, state, reason_for_raw(numel, call.dtype, numel * call.world_size, config)):
            return False
        faster = True
        for bits in range(size_class(MAX_PROBE_BYTES), size_class(max(config.min_bytes, MIN_PROBE_BYTES)) - 1, -1):
            faster = faster and _probe(spec, call, run_zipped, state.side, 1 << bits - 1)
            state.decisions["pair", call.dtype, bits] = faster
            log.info("all-to-all pieces of 1/%d of %d bytes on group %s: %s", call.world_size, 1 << bits - 1, call.group.group_name,
                     "zipped" if faster else "native")
    return state.decisions.get(key, False)


def _somebody_asks(call: Call, state, why_not: str | None) -> bool:
    """Whether on any rank of the group ``why_not`` was None in an earlier call; the same answer on every rank, without waiting: each
    call (later: calls that are powers of two) asks, and the next one reads the answers."""
    answers, state.answers, state.num_asked = state.answers, None, state.num_asked + 1
    if answers is not None:
        flags, work = answers
        with torch.cuda.stream(state.status_stream):
            work.wait()
            if any(flags.tolist()):
                return True
    if state.num_asked <= ASK_EACH_CALL or state.num_asked & state.num_asked - 1 == 0:
        flags = torch.empty(call.world_size, dtype=torch.int32, device=call.device)
        own = torch.full((1,), int(why_not is None), dtype=torch.int32, device=call.device)
        state.answers = flags, state.side.all_gather(flags, own)
    return False
