"""Native calls of one tensor, launched by the group's own method, as torch's Python functions do: without what these do besides.

They look for overrides, coalescing, complex tensors and wrong arguments, below one or two wrappers. That takes longer than all that we
add to a native call: with cold caches 10 us, while an idle GPU waits. What is known to go native (native_calls.py) needs little of it: here
the same method gets the same tensors and options, so that dispatch modes, profilers and the backend see the same, and what torch's function
would return is returned. Where that is not certain the answer is ASK: call torch's function. One thing differs: that 2.13 finds two names
deprecated is said by calls that are not known yet.

Source: torch/distributed/distributed_c10d.py, 2.11 and 2.13; other versions are always asked.
"""
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as options
from torch.distributed import ProcessGroup, c10d_logger
from torch.distributed import distributed_c10d as c10d
from torch.overrides import has_torch_function_unary

from ds_zipccl.collectives.registry import Call

ASK = object()
SEEN = ("2.11.", "2.13.")
#: Neither complex nor of 8 bits in floating point: torch has other kernels take those.
PLAIN = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
                   torch.int64})
SUM = dist.ReduceOp.SUM


def ask(*_) -> object:
    return ASK


def _is_torchs(function) -> bool:
    """Not one that somebody has put into its place already."""
    return getattr(getattr(function, "__code__", None), "co_filename", None) == c10d_logger.__file__


def _method(*names: str) -> str:
    """The newest one that torch has, which is the one that its functions call."""
    return next(name for name in names if hasattr(ProcessGroup, name))


def _options(kind: type, **fields) -> tuple:
    """For calls that wait, and for those that do not. Made once: groups only read them."""
    both = kind(), kind()
    for made, is_async in zip(both, (False, True), strict=True):
        made.asyncOp = is_async
        for name, value in fields.items():
            setattr(made, name, value)
    return both


def _log(name: str, error: Exception, group: ProcessGroup) -> None:
    """What torch's functions raise they log."""
    message = c10d_logger._get_msg_dict(name, group=group)
    message["error"] = f"{error}"
    c10d_logger._c10d_logger.debug(message)


def _from_one_to_another(name: str, method: str, prepared: tuple, reduces: type | None = None, more: tuple = ()) -> Callable:
    """``prepared``: options, of sums where it ``reduces``. ``more``: arguments before them."""
    inner = method if method.endswith("_single") else name              # in 2.13 the function of this name is one around that
    seen, seen_inner = getattr(dist, name), getattr(c10d, inner)

    def launch(out, data, group, async_op, reduce_op=None, root=None):
        if (getattr(dist, name) is not seen or getattr(c10d, inner) is not seen_inner or has_torch_function_unary(data)
                or not isinstance(data, Tensor) or not isinstance(out, Tensor) or out.dtype is not data.dtype
                or c10d._world.pg_coalesce_state):
            return ASK
        given = prepared if reduce_op is None or reduce_op is SUM else _options(reduces, reduceOp=reduce_op)
        if group is None:
            group = c10d._world.default_pg
        try:
            work = getattr(group, method)(out, data, *more, given[1 if async_op else 0])
            if async_op:
                return work
            if work is not None:
                work.wait()
        except Exception as error:
            _log(name, error, group)
            raise
        return None

    return launch if _is_torchs(seen) and _is_torchs(seen_inner) else ask


def _in_place(name: str, prepare: Callable[..., tuple]) -> Callable:
    """``prepare(reduce_op, root)``: options."""
    seen, method = getattr(dist, name), name.replace("_", "")

    def launch(tensor, _, group, async_op, reduce_op=None, root=None):
        if (getattr(dist, name) is not seen or has_torch_function_unary(tensor) or not isinstance(tensor, Tensor)
                or c10d._world.pg_coalesce_state):
            return ASK
        given = prepare(reduce_op, root)
        if given is None:
            return ASK
        if group is None:
            group = c10d._world.default_pg
        try:
            work = getattr(group, method)([tensor], given[1 if async_op else 0])
            if async_op:
                return work
            if work is not None:
                work.wait()
        except Exception as error:
            _log(name, error, group)
            raise
        return None

    return launch if _is_torchs(seen) else ask


_SUMS, _ROOTS = _options(options.AllreduceOptions, reduceOp=SUM), {}


def _reduction(reduce_op, root) -> tuple:
    return _SUMS if reduce_op is None or reduce_op is SUM else _options(options.AllreduceOptions, reduceOp=reduce_op)


def _rooted(reduce_op, root) -> tuple | None:
    """None without a root: torch's function says what is wrong."""
    if root is None:
        return None
    known = _ROOTS.get(root)
    return _ROOTS.setdefault(root, _options(options.BroadcastOptions, rootRank=root, rootTensor=0)) if known is None else known


#: launch(output, input, group, async_op, reduce_op=None, root=None) by collective: what torch's function of that name returns, or ASK.
#: ``group`` None: the world. ``root``: rank in the group.
LAUNCHES: dict[str, Callable] = {
    "all_gather_into_tensor": _from_one_to_another(
        "all_gather_into_tensor", _method("all_gather_single", "_allgather_base"), _options(options.AllgatherOptions)),
    "reduce_scatter_tensor": _from_one_to_another(
        "reduce_scatter_tensor", _method("reduce_scatter_single", "_reduce_scatter_base"),
        _options(options.ReduceScatterOptions, reduceOp=SUM), options.ReduceScatterOptions),
    "all_to_all_single": _from_one_to_another(
        "all_to_all_single", _method("all_to_all_single", "alltoall_base"), _options(options.AllToAllOptions), more=((), ())),
    "all_reduce": _in_place("all_reduce", _reduction), "broadcast": _in_place("broadcast", _rooted)}


def launch_of(call: Call) -> Callable:
    """What launches calls like this one, if it is known to go native: one of LAUNCHES, or ``ask``."""
    is_plain = type(call.group) is ProcessGroup and not isinstance(call.input, tuple) and call.dtype in PLAIN
    return LAUNCHES.get(call.op, ask) if is_plain and torch.__version__.startswith(SEEN) and call.device.type in ("cpu", "cuda") else ask
