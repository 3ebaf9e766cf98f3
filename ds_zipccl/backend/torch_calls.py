"""What torch asks of a process group, in our words: per method of ProcessGroup the collective it means, its tensors and its bytes.

Signatures: torch/csrc/distributed/c10d/init.cpp and PyProcessGroup.hpp, 2.11 and 2.13.
"""
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ds_zipccl.collectives.all_to_all import elems_per_rank


@dataclass
class Asked:
    """One call of a method. ``op``: the collective as torch spells it. ``num_bytes(rank, world_size)``: what this rank sends natively, in
    a ring (gathers, reductions) or directly (the others); None: nothing of the user's. ``output``, ``input``, ``fields``: those of a
    registry.Call; output None: this call has no zipped form."""
    op: str
    num_bytes: Callable[[int, int], int] | None
    output: torch.Tensor | tuple | None = None
    input: torch.Tensor | tuple | None = None
    fields: dict = field(default_factory=dict)


def _sum(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _others(tensors, rank: int) -> int:
    return _sum(tensors) - _sum(tensors[rank:rank + 1])


def _only(items):
    (item,) = items
    return item


def _all_gather_into_tensor(output, data, opts=None):
    return Asked("all_gather_into_tensor", lambda rank, world: data.nbytes * (world - 1), output, data)


def _reduce_scatter_tensor(output, data, opts=None):
    return Asked("reduce_scatter_tensor", lambda rank, world: data.nbytes * (world - 1) // world, output, data, _reduce_op(opts))


def _all_reduce(tensors, opts=None):
    tensor = _only(tensors)
    return Asked("all_reduce", lambda rank, world: 2 * tensor.nbytes * (world - 1) // world, tensor, tensor, _reduce_op(opts))


def _broadcast(tensors, opts):
    tensor = _only(tensors)
    return Asked("broadcast", lambda rank, world: tensor.nbytes if rank == opts.rootRank else 0, tensor, tensor, {"root": opts.rootRank})


def _all_gather(outputs, inputs, opts=None):
    data, pieces = _only(inputs), tuple(_only(outputs))
    return Asked("all_gather", lambda rank, world: data.nbytes * (world - 1), pieces, data)


def _reduce_scatter(outputs, inputs, opts=None):
    output, pieces = _only(outputs), tuple(_only(inputs))
    return Asked("reduce_scatter", lambda rank, world: _others(pieces, rank), output, pieces, _reduce_op(opts))


def _all_to_all_single(output, data, output_splits, input_splits, opts=None):

    sent = elems_per_rank(data, input_splits)

    def num_bytes(rank, world):
        own = sum(sent[rank:rank + 1]) if sent else data.numel() // world
        return (data.numel() - own) * data.element_size()

    return Asked("all_to_all_single", num_bytes, output, data,
                 {"output_splits": elems_per_rank(output, output_splits), "input_splits": sent})


def _all_to_all(outputs, inputs, opts=None):
    return Asked("all_to_all", lambda rank, world: _others(inputs, rank), tuple(outputs), tuple(inputs))


def _reduce_op(opts) -> dict:
    return {"reduce_op": dist.ReduceOp.SUM if opts is None else opts.reduceOp}


def _coalesced(single: Callable, op: str, whole_bytes: Callable):
    """Functional collectives of one tensor come as lists of one: they mean the plain collective. Longer lists have no zipped form."""

    def asked(*lists_and_opts):
        *lists, opts = lists_and_opts if not isinstance(lists_and_opts[-1], (list, tuple)) else (*lists_and_opts, None)
        if all(len(tensors) == 1 for tensors in lists):
            return single(*lists if single is _all_reduce else map(_only, lists), opts)
        return Asked(op, lambda rank, world: whole_bytes(_sum(lists[-1]), world))

    return asked


def _all_gather_coalesced(outputs, inputs, opts=None):
    return Asked("all_gather_coalesced", lambda rank, world: _sum(inputs) * (world - 1))


def _reduce(tensors, opts):
    return Asked("reduce", lambda rank, world: _sum(tensors) if rank != opts.rootRank else 0)


def _gather(outputs, inputs, opts):
    return Asked("gather", lambda rank, world: _sum(inputs) if rank != opts.rootRank else 0)


def _scatter(outputs, inputs, opts):
    return Asked("scatter", lambda rank, world: _others(_only(inputs), rank) if rank == opts.rootRank else 0)


def _barrier(*args, **kwargs):
    return Asked("barrier", None)


def understand(method: str, args, kwargs) -> Asked:
    """What a call of ``method`` means. Short forms of the methods (a tensor in place of a list, a root in place of options) are not
    understood: they have no zipped form here, and their bytes are not counted."""
    try:
        return METHODS[method](*args, **kwargs)
    except (TypeError, ValueError, AttributeError):
        return Asked(method, lambda rank, world: 0)


def _second(args):
    return args[1]


def _first_of_list(args):
    return args[0][0] if len(args[0]) == 1 else None


def _second_of_list(args):
    return args[1][0] if len(args[1]) == 1 else None


def _second_unsplit(args):
    return None if args[2] or args[3] else args[1]


#: Method -> (op, the input in its positional arguments, None: not a call of one tensor), for a look before everything else. Arguments of
#: other forms lead anywhere: what then is known to go native does.
SINGLE: dict[str, tuple[str, Callable]] = {
    "_allgather_base": ("all_gather_into_tensor", _second), "all_gather_single": ("all_gather_into_tensor", _second),
    "_reduce_scatter_base": ("reduce_scatter_tensor", _second), "reduce_scatter_single": ("reduce_scatter_tensor", _second),
    "alltoall_base": ("all_to_all_single", _second_unsplit), "all_to_all_single": ("all_to_all_single", _second_unsplit),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", _second_of_list),
    "all_gather_single_coalesced": ("all_gather_into_tensor", _second_of_list),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", _second_of_list),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", _second_of_list),
    "allreduce": ("all_reduce", _first_of_list), "allreduce_coalesced": ("all_reduce", _first_of_list),
    "broadcast": ("broadcast", _first_of_list),
}
_GATHERS = _coalesced(_all_gather_into_tensor, "all_gather_into_tensor_coalesced", lambda whole, world: whole * (world - 1))
_SCATTERS = _coalesced(_reduce_scatter_tensor, "reduce_scatter_tensor_coalesced", lambda whole, world: whole * (world - 1) // world)

#: Method of ProcessGroup -> what a call of it means. Both of torch 2.11's and 2.13's names.
METHODS: dict[str, Callable[..., Asked]] = {
    "_allgather_base": _all_gather_into_tensor, "all_gather_single": _all_gather_into_tensor,
    "_reduce_scatter_base": _reduce_scatter_tensor, "reduce_scatter_single": _reduce_scatter_tensor,
    "alltoall_base": _all_to_all_single, "all_to_all_single": _all_to_all_single,
    "allgather_into_tensor_coalesced": _GATHERS, "all_gather_single_coalesced": _GATHERS,
    "reduce_scatter_tensor_coalesced": _SCATTERS, "reduce_scatter_single_coalesced": _SCATTERS,
    "allreduce": _all_reduce,
    "allreduce_coalesced": _coalesced(_all_reduce, "all_reduce_coalesced", lambda whole, world: 2 * whole * (world - 1) // world),
    "allgather": _all_gather, "reduce_scatter": _reduce_scatter, "alltoall": _all_to_all, "broadcast": _broadcast,
    "allgather_coalesced": _all_gather_coalesced, "reduce": _reduce, "gather": _gather, "scatter": _scatter,
    "barrier": _barrier, "monitored_barrier": _barrier,
}
