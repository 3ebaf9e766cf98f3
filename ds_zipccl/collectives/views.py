"""Tensors as the collectives see them: flat in memory, and rows that lie one after another as one matrix. No copies."""
from dataclasses import replace

import torch
import torch.distributed as dist

from ds_zipccl.collectives.registry import Call

PERIOD = (1 << 22) - 3              # elements of test data, of which there may be more


def is_dense(t: torch.Tensor) -> bool:
    """Contiguous, or in the channels-last order that NCCL sends as it lies in memory (gloo takes elements in their logical order)."""
    if t.is_contiguous():
        return True
    if not t.is_cuda or t.dim() not in (4, 5):
        return False
    return t.is_contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)


def contiguous(call: Call):
    """(the call with dense tensors in place of others, None or a function that fills the call's outputs from it). Copies where it must."""
    if all(map(is_dense, (*call.inputs, *call.outputs))):
        return call, None
    copies = {}

    def dense(tensors, with_contents: bool):
        made = tuple(t if is_dense(t) else copies.setdefault(id(t), t.contiguous() if with_contents else torch.empty_like(
            t, memory_format=torch.contiguous_format)) for t in (tensors if isinstance(tensors, tuple) else (tensors,)))
        return made if isinstance(tensors, tuple) else made[0]

    inner = replace(call, input=dense(call.input, True), output=dense(call.output, False))

    def store() -> None:
        for theirs, ours in zip(call.outputs, inner.outputs, strict=True):
            if theirs is not ours:
                theirs.copy_(ours)

    return inner, store


def is_plain(tensors) -> bool:
    """Contiguous, all of them."""
    return tensors.is_contiguous() if isinstance(tensors, torch.Tensor) else all([t.is_contiguous() for t in tensors])


def averages(call: Call) -> bool:
    return call.reduce_op is not None and call.reduce_op == dist.ReduceOp.AVG


def divisor(call: Call) -> int:
    """What the sum is divided by before it is rounded."""
    return call.world_size if averages(call) else 1


def as_sum(call: Call) -> Call:
    """An average over a power of two of ranks as a sum over a scaled copy of its inputs, which is exact (but for denormals) and takes the
    kernels that sum; any other call as it is."""
    if not averages(call) or call.world_size & (call.world_size - 1):
        return call
    scale = 1 / call.world_size
    scaled = tuple(t * scale for t in call.inputs)
    return replace(call, input=scaled if isinstance(call.input, tuple) else scaled[0], reduce_op=dist.ReduceOp.SUM)


def simplified(call: Call):
    """(the call as a sum over dense tensors, function that fills the user's tensors from its, or None)."""
    inner, store = contiguous(call)
    return as_sum(inner), store


def flat(t: torch.Tensor) -> torch.Tensor:
    """The elements in the order they have in memory; ``t`` is dense there."""
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,))


def as_rows(tensors) -> torch.Tensor | None:
    """[len(tensors), n] over the memory of flat tensors of n elements each that are consecutive parts of one buffer, else None."""
    first, numel = tensors[0], tensors[0].numel()
    storage = first.untyped_storage().data_ptr()
    for i, t in enumerate(tensors):
        if t.numel() != numel or t.storage_offset() != first.storage_offset() + i * numel or t.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(tensors), numel), (numel, 1))


def gaussians(seed: int, numel: int, dtype: torch.dtype, device) -> torch.Tensor:
    """Test data, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return repeated((torch.randn(min(numel, PERIOD), generator=generator, device="cpu") * 0.02).to(dtype).to(device), numel)


def repeated(data: torch.Tensor, numel: int) -> torch.Tensor:
    """``numel`` elements, ``data`` again and again: a host that makes test data of 1 GiB takes seconds. No two rows, parts or blocks are
    alike where ``data`` has PERIOD elements, a prime number."""
    return data if data.numel() == numel else data.repeat(-(-numel // data.numel()))[:numel]


def equal_numels(tensors, call: Call, numel: int) -> bool:
    """One tensor per rank, each of ``numel`` elements and the call's dtype."""
    return len(tensors) == call.world_size and all(t.numel() == numel and t.dtype == call.dtype for t in tensors)
