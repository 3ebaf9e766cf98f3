"""What all fronts share: from a user's call to a zipped launch, or to the native collective with its reason counted.

A front makes a ``Call`` of what its host framework was asked for and hands it to ``run``. Everything else it counts with
``count_native``.
"""
from collections.abc import Callable

import torch
import torch.distributed as dist

from ds_zipccl.backend.policy import reason_for_native
from ds_zipccl.collectives.native_calls import key_of
from ds_zipccl.collectives.native_launch import ASK
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.work import Waiter

SPECS = specs(internal=True)


def run(runtime: Runtime, call: Call, native: Callable[[Call], object] | None = None, waits: bool = False):
    """Launches ``call`` zipped and returns its Work (contract: collectives/work.py). Or counts it with the reason, and returns the Work of
    ``native(call)``, torch's own asynchronous collective, or of what does the same in less time (collectives/native_launch.py); or None
    without ``native``: the front calls its native collective then. ``waits``: the caller will wait for the call at once, and asks for no
    more than ``wait()``.

    ``call.op`` is a registered collective. All ranks of the group must call this in the same order, also for calls that go native. A front
    that has no Call yet may ask ``runtime.native_calls.find``, which is what this begins with: see there why it is so short.
    """
    table = runtime.known_native.get(id(call.group))
    if table is not None:
        data = call.input
        try:
            known = table.get((call.op, data.numel(), data.dtype, data.is_cuda))
        except AttributeError:                          # a list
            known = None
        if known is None and (isinstance(data, tuple) or isinstance(call.output, tuple)):
            known = table.get(key_of(call))
        if known is not None and call.input_splits is None and call.output_splits is None:
            result = None if native is None else known.launch(call.output, data, call.group, True, call.reduce_op, call.root)
            if result is ASK:
                result = native(call)
            known.add(call.reduce_op, call.root)
            return result
    work = runtime.again(call, None, Waiter) if waits else runtime.again(call)
    if work is not None:
        return work
    if isinstance(call.input, tuple) and not (call.inputs or call.outputs):
        count_native(runtime, call.op, call.group, lambda world: 0, "shape")
        return None if native is None else native(call)
    work = runtime.decide(call, lambda: reason_for_native(runtime.config, SPECS[call.op], call))
    return native(call) if work is None and native is not None else work


def detached(tensors):
    """A tensor, or a tuple of those of a list, as a ``Call`` has them."""
    if isinstance(tensors, torch.Tensor):
        return tensors.detach() if tensors.requires_grad else tensors           # which costs as much as the rest of a native call
    return tuple([t.detach() for t in tensors])


def count_native(runtime: Runtime, op: str, group: dist.ProcessGroup | None, num_bytes=None, reason: str = "not_zipped") -> None:
    """For calls that have no zipped form: settles the group, so that no rank waits in such a call for one that waits for a resend, and
    counts the call.

    ``num_bytes(world_size)``: what this rank sends; None: not counted (no tensors of the user's). ``group`` None: this rank is not in it.
    """
    sent = 0
    if group is None:
        reason = "not_in_group"
    elif group.size() == 1:
        reason = "world_size_1"
    else:
        runtime.settle(group)
        sent = num_bytes(group.size()) if num_bytes else 0
    if num_bytes:
        runtime.native(op, reason, sent)
