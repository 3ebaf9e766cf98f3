"""Do the ranks of a group make the same call, and do their sizes fit together? Asked before every call where ``integrity`` is not off: what
otherwise hangs or gives wrong values is an error that names the ranks, the same one on each."""
import zlib

import torch
import torch.distributed as dist

from ds_zipccl.collectives import streams
from ds_zipccl.collectives.all_to_all import numels
from ds_zipccl.collectives.registry import Call, CollectiveSpec, specs
from ds_zipccl.errors import CollectiveError
from zipscape.errors import describe

MAX_NAMED = 5                           # pairs of ranks in one message
_DTYPES = {zlib.crc32(str(dtype).encode()): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def check(spec: CollectiveSpec, call: Call, state) -> None:
    """All ranks of the group call this with their own ``call``. Raises CollectiveError, alike on every rank, where they do not fit. Nothing
    can be asked of a call that a CUDA graph captures, which goes native."""
    if call.device.type == "cuda" and streams.is_capturing():
        return
    size = call.world_size
    own = [sorted(specs(internal=True)).index(call.op), zlib.crc32(str(call.dtype).encode()),
           hash(call.reduce_op or dist.ReduceOp.SUM), -1 if call.root is None else call.root]
    own += [count for side in _exchanged(spec, call) for count in (side + [-1] * size)[:size]]
    rows = torch.empty(size * len(own), dtype=torch.int64, device=call.device)
    state.side.all_gather(rows, torch.tensor(own, dtype=torch.int64, device=call.device)).wait()
    rows = rows.view(size, -1).tolist()
    problems = _other_calls(rows) or _sizes_that_differ(rows, size)
    if problems:
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise CollectiveError(describe("the ranks of a group do not make the same call", got="; ".join(problems[:MAX_NAMED]) + more,
                                       expected="the same collective, dtype, operation and root, and sizes that fit together",
                                       where=f"{sorted(specs(internal=True))[rows[0][0]]} on rank 0, group {call.group.group_name}"))


def _exchanged(spec: CollectiveSpec, call: Call) -> tuple[list[int], list[int]]:
    """(elements for each rank, elements from each rank)."""
    if spec.pairwise:
        return numels(call)
    size = call.world_size

    def counts(tensors, is_list: bool, in_parts: bool) -> list[int]:
        if is_list:
            return [t.numel() for t in tensors]
        return [tensors[0].numel() // size if in_parts else tensors[0].numel()] * size

    return (counts(call.inputs, isinstance(call.input, tuple), spec.family == "reduce_scatter"),
            counts(call.outputs, isinstance(call.output, tuple), spec.family == "all_gather"))


def _other_calls(rows) -> list[str]:
    names = sorted(specs(internal=True))
    tellers = (lambda row: names[row[0]], lambda row: str(_DTYPES.get(row[1])), lambda row: f"reduce operation {row[2]:#x}",
               lambda row: f"root {row[3]}")
    for i, tell in enumerate(tellers):
        if len({row[i] for row in rows}) > 1:
            return [f"rank {rank}: {tell(row)}" for rank, row in enumerate(rows)]
    return []


def _sizes_that_differ(rows, size: int) -> list[str]:
    return [f"rank {i} has {rows[i][4 + j]} elements for rank {j}, which takes {rows[j][4 + size + i]}"
            for i in range(size) for j in range(size) if rows[i][4 + j] != rows[j][4 + size + i]]
