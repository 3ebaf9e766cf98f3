"""Front (a): DeepSpeed's communication object becomes ours, in place, at any time after init_distributed.

``deepspeed.comm.comm.cdb`` keeps its groups (NCCL or gloo), its handles and its name; only its class changes, to a
subclass of what it was. Source of the seam: deepspeed/comm/comm.py (module global ``cdb``), deepspeed/comm/torch.py
(TorchBackend), 0.19.8.
"""
import contextlib
import functools
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.comm import mori
from deepspeed.comm.torch import TorchBackend, disable_compiler_collective

from ds_zipccl.backend import front
from ds_zipccl.backend.deepspeed_native import NativeCollectives, resolve
from ds_zipccl.collectives.all_to_all import elems_per_rank
from ds_zipccl.collectives.native_launch import ASK, LAUNCHES
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.runtime import Runtime

deepspeed_torch = sys.modules[TorchBackend.__module__]          # the package has another thing of that name
#: Where a reduce-scatter whose output lies in its input, as ZeRO-3's do, gets another output and a copy: calls that overwrite their input
#: cannot be prepared, nor decoded before their words are known (in place they took 56 to 106 us more on H200s).
APART = "cuda",


class CopiedBack:
    """The handle of a call that has ``result`` for its output: puts it into ``output``."""

    def __init__(self, work, result: torch.Tensor, output: torch.Tensor):
        self._work, self._result, self._output = work, result, output

    def wait(self) -> None:
        self._work.wait()
        self._output.copy_(self._result)


class ZippedCollectives(NativeCollectives):
    """Mixin over a TorchBackend class. ``zipccl`` is the Runtime, set when the class is swapped in.

    Every override keeps the base method's ``disable_compiler_collective``, arguments and return value: an async call
    returns a handle with ``wait()``, a sync one None. Calls that are not zipped go to the base method, counted with the
    reason. What is known to go native is launched before anything else is done (``collectives/native_calls.py``).
    """

    zipccl: Runtime
    zipccl_known: Callable          # its ``native_calls.find``
    zipccl_later: list[dist.Work] | None = None         # see ``waiting_later``
    zipccl_direct: bool             # what is known to go native may be launched as DeepSpeed's methods do, without these

    def _zipccl_run(self, op: str, output, data, group, async_op: bool, native, **fields):
        pg = resolve(group)
        if pg is None:
            self.zipccl.native(op, "not_in_group", 0)
            return native()
        if getattr(pg, "zips_itself", False):           # front (b)'s: never both on one call
            self.zipccl.native(op, "zips_itself", 0)
            return native()
        in_place = data is output
        output = front.detached(output)
        is_later = self.zipccl_later is not None and op == "reduce_scatter_tensor"
        data = output if in_place else front.detached(data)
        is_apart = op == "reduce_scatter_tensor" and not async_op and _lies_in(output, data)
        result = torch.empty_like(output) if is_apart else output
        work = front.run(self.zipccl, Call(op, result, data, pg, **fields), waits=not (async_op or is_later))
        if work is None:
            return native()
        if async_op:
            return work
        if is_apart:
            work = CopiedBack(work, result, output)
        if is_later:
            self.zipccl_later.append(work)
        else:
            work.wait()
        return None

    @disable_compiler_collective
    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        known = self.zipccl_known("all_gather_into_tensor", input_tensor, group)
        if known is not None:
            result = known.launch(output_tensor, input_tensor, group, async_op) if self.zipccl_direct else ASK
            if result is ASK:
                result = super().all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
            known.add()
            return result
        native = functools.partial(super().all_gather_into_tensor, output_tensor, input_tensor, group=group, async_op=async_op)
        return self._zipccl_run("all_gather_into_tensor", output_tensor, input_tensor, group, async_op, native)

    @disable_compiler_collective
    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        native = functools.partial(super().all_gather, tensor_list, tensor, group=group, async_op=async_op)
        return self._zipccl_run("all_gather", tensor_list, tensor, group, async_op, native)

    @disable_compiler_collective
    def reduce_scatter_tensor(self, output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        known = self.zipccl_known("reduce_scatter_tensor", input_tensor, group)
        if known is not None:
            result = known.launch(output_tensor, input_tensor, group, async_op, self._reduce_op(op)) if self.zipccl_direct else ASK
            if result is ASK:
                result = super().reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
            known.add(self._reduce_op(op))
            return result
        native = functools.partial(super().reduce_scatter_tensor, output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return self._zipccl_run("reduce_scatter_tensor", output_tensor, input_tensor, group, async_op, native,
                                reduce_op=self._reduce_op(op))

    @disable_compiler_collective
    def reduce_scatter(self, output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        native = functools.partial(super().reduce_scatter, output, input_list, op=op, group=group, async_op=async_op)
        return self._zipccl_run("reduce_scatter", output, input_list, group, async_op, native, reduce_op=self._reduce_op(op))

    @disable_compiler_collective
    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        known = self.zipccl_known("all_reduce", tensor, group)
        if known is not None:
            result = known.launch(tensor, tensor, group, async_op, self._reduce_op(op)) if self.zipccl_direct else ASK
            if result is ASK:
                result = super().all_reduce(tensor, op=op, group=group, async_op=async_op)
            known.add(self._reduce_op(op))
            return result
        native = functools.partial(super().all_reduce, tensor, op=op, group=group, async_op=async_op)
        return self._zipccl_run("all_reduce", tensor, tensor, group, async_op, native, reduce_op=self._reduce_op(op))

    @disable_compiler_collective
    def broadcast(self, tensor, src, group=None, async_op=False):
        known = self.zipccl_known("broadcast", tensor, group)
        if known is not None:
            root = _group_rank(group, src)
            is_direct = self.zipccl_direct and not deepspeed_torch.DS_COMM_BROADCAST_OFF
            result = known.launch(tensor, tensor, group, async_op, None, root) if is_direct else ASK
            if result is ASK:
                result = super().broadcast(tensor, src, group=group, async_op=async_op)
            known.add(root=root)
            return result
        native = functools.partial(super().broadcast, tensor, src, group=group, async_op=async_op)
        return self._zipccl_run("broadcast", tensor, tensor, group, async_op, native, root=_group_rank(group, src))

    @disable_compiler_collective
    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        known = None if output_split_sizes or input_split_sizes else self.zipccl_known("all_to_all_single", input, group)
        if known is not None:
            result = known.launch(output, input, group, async_op) if self.zipccl_direct else ASK
            if result is ASK:
                result = super().all_to_all_single(output, input, group=group, async_op=async_op)
            known.add()
            return result
        native = functools.partial(super().all_to_all_single, output, input, output_split_sizes, input_split_sizes, group=group,
                                   async_op=async_op)
        return self._zipccl_run("all_to_all_single", output, input, group, async_op, native,
                                output_splits=elems_per_rank(output, output_split_sizes),
                                input_splits=elems_per_rank(input, input_split_sizes))

    @disable_compiler_collective
    def all_to_all(self, output_tensor_list, input_tensor_list, group=None, async_op=False):
        native = functools.partial(super().all_to_all, output_tensor_list, input_tensor_list, group=group, async_op=async_op)
        return self._zipccl_run("all_to_all", output_tensor_list, input_tensor_list, group, async_op, native)

    def destroy_process_group(self, group=None):
        """Completes what is in flight on the groups that go away, then destroys as before, also if that failed. Without
        the world's group the object is DeepSpeed's own again: who initializes anew may do so with other settings."""
        pg = resolve(group)
        everything = pg is not None and pg is dist.group.WORLD
        try:
            if pg is not None:
                self.zipccl.close(None if everything else pg)
        finally:
            super().destroy_process_group(group=group)
            if everything:
                _restore(self)


def _lies_in(output: torch.Tensor, data: torch.Tensor) -> bool:
    return (output.device.type in APART and 0 <= output.data_ptr() - data.data_ptr() < data.nbytes and output.is_contiguous()
            and data.is_contiguous())


def _group_rank(group, src: int) -> int | None:
    """The rank in its group of global rank ``src``; None where that is wrong: the native call says so."""
    pg = resolve(group)
    try:
        return None if pg is None else dist.get_group_rank(pg, src)
    except ValueError:
        return None


@functools.cache
def _zipped_class(base: type) -> type:
    return type(f"Zip{base.__name__}", (ZippedCollectives, base), {})


def live_runtime() -> Runtime | None:
    """The Runtime of the process's communication object, or None where it is not ours."""
    return getattr(deepspeed_comm.cdb, "zipccl", None) if isinstance(deepspeed_comm.cdb, ZippedCollectives) else None


def _only_calls_torch(cdb) -> bool:
    """Whether the methods that ours stand for do nothing but call torch's functions: they are DeepSpeed's own, nothing is staged on the
    CPU, AMD's copy engines are not used."""
    base = type(cdb).__bases__[-1]
    files = {getattr(getattr(base.__dict__.get(name), "__code__", None), "co_filename", None) for name in LAUNCHES}
    return (base is TorchBackend and files == {deepspeed_torch.__file__} and cdb.all_gather_function is dist.all_gather_into_tensor
            and cdb.reduce_scatter_function is dist.reduce_scatter_tensor and not torch.backends.mps.is_available()
            and not mori.is_enabled())


@contextlib.contextmanager
def waiting_later():
    """The list of the zipped reduce-scatters that are called inside, synchronously too: the caller waits for them, and nobody looks at
    their outputs before. Empty where nothing was zipped."""
    cdb, works = deepspeed_comm.cdb, []
    if not isinstance(cdb, ZippedCollectives):
        yield works
        return
    cdb.zipccl_later = works
    try:
        yield works
    finally:
        cdb.zipccl_later = None


def install(runtime: Runtime) -> None:
    """Swaps the class of DeepSpeed's live communication object. Needs init_distributed; all ranks must do it at the
    same point."""
    cdb = deepspeed_comm.cdb
    if not isinstance(cdb, ZippedCollectives):
        cdb.__class__ = _zipped_class(type(cdb))
    cdb.zipccl, cdb.zipccl_known, cdb.zipccl_direct = runtime, runtime.native_calls.find, _only_calls_torch(cdb)


def uninstall() -> None:
    """Undoes ``install`` after completing what is in flight. All ranks must do it at the same point."""
    cdb = deepspeed_comm.cdb
    if isinstance(cdb, ZippedCollectives):
        cdb.zipccl.close()
        _restore(cdb)


def take_out() -> None:
    """Undoes ``install`` too, but the Runtime stays as it is and may be installed again. All ranks must do it at the same point."""
    cdb = deepspeed_comm.cdb
    if isinstance(cdb, ZippedCollectives):
        cdb.zipccl.settle_all()
        _restore(cdb)


def _restore(cdb) -> None:
    cdb.__class__ = type(cdb).__bases__[-1]
    del cdb.zipccl, cdb.zipccl_known, cdb.zipccl_direct
    cdb.__dict__.pop("zipccl_later", None)
