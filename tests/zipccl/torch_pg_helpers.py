"""What the cases on groups of backend "zipccl" share: the same call on such a group and on a native one, and what was counted."""
import torch
import torch.distributed as dist

import ds_zipccl
from ds_zipccl.collectives.registry import specs
from ds_zipccl.collectives.work import DoneWork

AG, RS = "all_gather_into_tensor", "reduce_scatter_tensor"
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor            # torch 2.13's names, else 2.11's
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ZIPPED = {"collectives": "always", "min_bytes": 0, "transport": "process_group"}
_native = {}


def init_process_group(backend, **kwargs):
    """For tests/helpers/ranks.py: the world is a zipccl group, ``backend`` is what native groups have."""
    ds_zipccl.configure(**ZIPPED)
    dist.init_process_group("zipccl", **kwargs)
    _native["backend"], _native["group"] = backend, None


def native_group() -> dist.ProcessGroup:
    """A native group over all ranks, one for all cases."""
    if _native["group"] is None:
        _native["group"] = dist.new_group(backend=_native["backend"])
    return _native["group"]


def torchs_collectives() -> dict:
    """The registry without what only seams of other hosts use."""
    return {op: spec for op, spec in specs().items() if not spec.internal}


def count(op: str, what: str = "calls_zipped") -> int:
    return ds_zipccl.statistics().get(op, {}).get(what, 0)


def launch(collective: str, output, data, group, async_op=True, **options):
    """The call as a user of torch.distributed writes it. all_reduce and broadcast are in place: the input is ``output``."""
    kwargs = dict(group=group, async_op=async_op)
    if collective == AG:
        return ALL_GATHER(output, data, **kwargs)
    if collective == RS:
        return REDUCE_SCATTER(output, data, **kwargs, **options)
    if collective == "all_reduce":
        return dist.all_reduce(output, **kwargs, **options)
    if collective == "broadcast":
        return dist.broadcast(output, group_src=options["root"], **kwargs)
    if collective == "all_gather":
        return dist.all_gather(list(output), data, **kwargs)
    if collective == "reduce_scatter":
        return dist.reduce_scatter(output, list(data), **kwargs, **options)
    if collective == "all_to_all_single":
        return dist.all_to_all_single(output, data, options.get("output_splits"), options.get("input_splits"), **kwargs)
    if collective == "all_to_all":
        return _all_to_all(list(output), list(data), **kwargs)
    raise ValueError(f"{collective}: say here how a user of torch.distributed calls it")


def _all_to_all(outputs, inputs, **kwargs):
    try:
        return dist.all_to_all(outputs, inputs, **kwargs)
    except RuntimeError as error:
        if "does not support alltoall" not in str(error):               # torch 2.11's gloo: the same with pieces of equal size
            raise
    received = torch.empty_like(torch.cat(outputs))
    dist.all_to_all_single(received, torch.cat(inputs), group=kwargs["group"])
    torch._foreach_copy_(outputs, list(received.split(outputs[0].numel())))
    return DoneWork(tuple(outputs)) if kwargs["async_op"] else None


def pieces(tensors) -> tuple:
    return tuple(tensors) if isinstance(tensors, (tuple, list)) else (tensors,)


def like(tensors):
    """Fresh tensors of the same shapes, full of something that is not the result."""
    made = [torch.full_like(t, 3) for t in pieces(tensors)]
    return made if isinstance(tensors, (tuple, list)) else made[0]
