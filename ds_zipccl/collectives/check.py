"""Do the ranks of a group make the same call, do their sizes fit together, and are there NaNs in what they send? Asked before every call
where ``integrity`` or ``nan_check`` is not off: what otherwise hangs or gives wrong values is an error that names the ranks, the same one
on each."""
import zlib

import torch
import torch.distributed as dist

from ds_zipccl.collectives import streams
from ds_zipccl.collectives.all_to_all import numels
from ds_zipccl.collectives.registry import Call, CollectiveSpec, specs
from ds_zipccl.errors import CollectiveError
from zipscape.errors import describe

MAX_NAMED = 5                           # ranks, or pairs of them, in one message
_PIECE = 1 << 26                        # elements that are looked at at once: one byte each is needed beside them
_HEAD = 6                               # numbers of a rank's row before its sizes: what its call is, how many NaNs, where the first
_DTYPES = {zlib.crc32(str(dtype).encode()): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def check(spec: CollectiveSpec, call: Call, state, find_nans: bool = False) -> None:
    """All ranks of the group call this with their own ``call``. Raises CollectiveError, alike on every rank, where they do not fit, and
    with ``find_nans`` where a rank is about to send NaNs. Nothing can be asked of a call that a CUDA graph captures, which goes native."""
    if call.device.type == "cuda" and streams.is_capturing():
        return
    size, failure = call.world_size, None
    try:
        nans = _nans(call) if find_nans else (0, 0)
    except Exception as error:                          # of this rank alone, as when memory is short: the others wait for its row
        nans, failure = (-1, -1), error
    own = [sorted(specs(internal=True)).index(call.op), zlib.crc32(str(call.dtype).encode()),
           hash(call.reduce_op or dist.ReduceOp.SUM), -1 if call.root is None else call.root, *nans]
    own += [count for side in _exchanged(spec, call) for count in (side + [-1] * size)[:size]]
    rows = torch.empty(size * len(own), dtype=torch.int64, device=call.device)
    state.side.all_gather(rows, torch.tensor(own, dtype=torch.int64, device=call.device)).wait()
    rows = rows.view(size, -1).tolist()
    problems = _other_calls(rows) or _sizes_that_differ(rows, size)
    if problems:
        raise CollectiveError(describe("the ranks of a group do not make the same call", got=_named(problems),
                                       expected="the same collective, dtype, operation and root, and sizes that fit together",
                                       where=f"{sorted(specs(internal=True))[rows[0][0]]} on rank 0, group {call.group.group_name}"))
    unseen = [f"rank {rank}" for rank, row in enumerate(rows) if row[4] < 0]
    if unseen:
        raise CollectiveError(describe("ranks could not look for NaNs", got=_named(unseen),
                                       where=f"the input of {call.op}, {call.dtype}, group {call.group.group_name}",
                                       todo='see the error of these ranks; "nan_check": "off" does not look')) from failure
    nans = [f"{row[4]} on rank {rank}, the first at element {row[5]}" for rank, row in enumerate(rows) if row[4]]
    if nans:
        raise CollectiveError(describe("NaNs in what ranks are about to send", got=_named(nans), expected='none ("nan_check": "error")',
                                       where=f"the input of {call.op}, {call.dtype}, group {call.group.group_name}",
                                       todo='find what makes them on these ranks; "nan_check": "off" sends them as they are'))


def _named(problems: list[str]) -> str:
    return "; ".join(problems[:MAX_NAMED]) + (f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else "")


def _nans(call: Call) -> tuple[int, int]:
    """(how many elements of what this rank sends are NaN, where the first one is, of all its tensors one after another)."""
    count, first, before = 0, -1, 0
    for t in () if call.root is not None and call.root != call.rank else call.inputs:
        if t.is_floating_point() or t.is_complex():
            for piece in t.reshape(-1).split(_PIECE):
                is_nan = torch.isnan(piece.float() if piece.dtype.itemsize == 1 else piece)             # of float8 there is none
                found = int(is_nan.sum())
                if found and not count:
                    first = before + int(is_nan.to(torch.uint8).argmax())
                count, before = count + found, before + piece.numel()
        else:
            before += t.numel()
    return count, first


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
    return [f"rank {i} has {rows[i][_HEAD + j]} elements for rank {j}, which takes {rows[j][_HEAD + size + i]}"
            for i in range(size) for j in range(size) if rows[i][_HEAD + j] != rows[j][_HEAD + size + i]]
