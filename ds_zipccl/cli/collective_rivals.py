"""What ``bench collectives --rivals`` puts beside native calls and ours: other ways to the same result."""
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.collectives import symmetric
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.views import flat

RIVALS = {"sum": "reduce_scatter_tensor: native all-to-all, then the sum",
          "raw": "one-sided copies, or reads that add up, of the data as they are, over torch's symmetric memory; out of place, on GPUs "
                 "that access each other's memory",
          "frames": "all_gather_into_tensor of frames that were made before, one-sided"}
_ONE_SIDED = "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"


class Rival(NamedTuple):
    """``run()`` launches one call. ``prepare()`` once the inputs have other values; ``collect()``: the result to the call's outputs, if it
    lies elsewhere. ``wire_bytes``: what this rank sends."""
    run: Callable[[], object]
    prepare: Callable[[], object]
    collect: Callable[[], object]
    wire_bytes: int
    transport: str


def rivals(names: list[str], call: Call, in_place: bool, runtime: Runtime, raw_bytes: int) -> dict[str, Rival]:
    """Of ``names``, keys of RIVALS, those that there are for ``call``, by what their rows are called. All ranks at the same point.
    ``runtime``: whose one-sided transport takes frames."""
    found = {}
    if "sum" in names and call.op == "reduce_scatter_tensor":
        found["all-to-all + sum"] = _sum(call, raw_bytes)
    if "raw" in names and call.op in _ONE_SIDED and not in_place and _see_each_other(call):
        found["raw copy"] = _raw(call, raw_bytes)
    if "frames" in names and call.op == "all_gather_into_tensor":
        made = _frames(call, runtime)
        if made is not None:
            found["frames made before"] = made
    return found


def _nothing() -> None:
    pass


def _sum(call: Call, raw_bytes: int) -> Rival:
    received, out, data = torch.empty_like(flat(call.input)), flat(call.output), flat(call.input)
    rows = received.view(call.world_size, -1)

    def run() -> None:
        dist.all_to_all_single(received, data, group=call.group)
        if call.world_size == 2:
            torch.add(rows[0], rows[1], out=out)
        else:
            torch.sum(rows, 0, out=out)

    return Rival(run, _nothing, _nothing, raw_bytes, "process_group")


def _see_each_other(call: Call) -> bool:
    """Whether all ranks' GPUs access each other's memory."""
    if call.device.type != "cuda":
        return False
    places = [None] * call.world_size
    dist.all_gather_object(places, symmetric.place_of(call.device), group=call.group)
    return symmetric.why_not(places) is None


def _raw(call: Call, raw_bytes: int) -> Rival:
    """Copies go to where the others want them, by copy engines, the own row meanwhile on another stream; sums read where the others have
    them, by multiprocessors. Ranks meet on the GPU: after copies, before and after reads."""
    import torch.distributed._symmetric_memory as symmetric_memory

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    world, rank, reads = call.world_size, call.rank, call.op == "reduce_scatter_tensor"
    data, out, side = flat(call.input), flat(call.output), torch.cuda.Stream(call.device)
    seen = symmetric_memory.empty(data.numel() if reads else out.numel(), dtype=call.dtype, device=call.device)     # by the others
    handle = symmetric_memory.rendezvous(seen, call.group)
    peers = [handle.get_buffer(peer, (seen.numel(),), call.dtype).view(world, -1) for peer in range(world)]
    others = [(rank + i) % world for i in range(1, world)]
    rows = data.view(1, -1).expand(world, -1) if call.op == "all_gather_into_tensor" else data.view(world, -1)

    def copy() -> None:
        stream = torch.cuda.current_stream(call.device)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            peers[rank][rank].copy_(rows[rank])
        for peer in others:
            peers[peer][rank].copy_(rows[peer])
        stream.wait_stream(side)
        handle.barrier(channel=0)

    def read() -> None:
        handle.barrier(channel=0)
        if world == 2:
            torch.add(peers[rank][rank], peers[others[0]][rank], out=out)
        else:
            torch.sum(torch.stack([peers[peer][rank] for peer in range(world)]), 0, out=out)
        handle.barrier(channel=1)

    if reads:
        return Rival(read, lambda: seen.copy_(data), _nothing, raw_bytes, "symmetric_memory")
    return Rival(copy, _nothing, lambda: out.copy_(seen), raw_bytes, "symmetric_memory")


def _frames(call: Call, runtime: Runtime) -> Rival | None:
    """None: the group has no one-sided transport."""
    state = runtime.state(call.group, call.device)
    transport, _ = runtime.router.for_rows(call, state, again=True)
    cut = None if transport is None else transport.plan(call.dtype, call.input.numel(), True)
    if cut is None:
        return None
    data, out, status = flat(call.input), flat(call.output).view(call.world_size, -1), torch.zeros(1, dtype=torch.int32, device=call.device)
    rows, encoders, ends = [], [], (*cut.starts[1:], data.numel())
    for start, end, geometry in zip(cut.starts, ends, cut.geometries, strict=True):
        codec = Codec(geometry, runtime.kernels[call.device.type])
        frame = codec.empty_frames(1, call.device)
        rows.append(symmetric.Row(data[start:end], out[:, start:end], geometry, frame[0]))
        encoders.append((codec, data[start:end].view(1, -1), frame))
    arranged = transport.arrange(tuple([row.kind for row in rows]))
    if arranged is None:
        return None

    def prepare() -> None:
        for codec, part, frame in encoders:
            codec.encode(part, frame, status)

    def run() -> None:
        now, _ = runtime.router.for_rows(call, state)           # measuring again may have closed it
        (transport if now is None else now).gather_rows(rows, arranged).wait()

    return Rival(run, prepare, _nothing, sum(g.frame_bytes for g in cut.geometries) * (call.world_size - 1), "symmetric_memory")
