"""Front (b): a process group of torch.distributed's backend "zipccl": its eligible calls are compressed. Needs no DeepSpeed.

It is a Python ProcessGroup around a plain one with gloo (CPU tensors) and, where there are GPUs, NCCL. What the seam demands
(torch/csrc/distributed/c10d/PyProcessGroup.hpp, torch/distributed/distributed_c10d.py; 2.11 and 2.13):

* Every method that communicates goes to the inner group. ``super().method`` recurses for ever where C++ looks the method up in Python,
  and an inherited method that is called from Python may keep the GIL that another rank's thread needs.
* The native backends are registered in both groups: group name, devices, sequence numbers and functional collectives are asked of
  the outer one.
* 2.13 renamed five methods. The old names stay: for 2.11, and for those who call them.
"""
import re

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ds_zipccl.backend import front, torch_calls, torch_session
from ds_zipccl.backend.torch_batch import batch_through_coalescing
from ds_zipccl.collectives.native_calls import Known
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.transport import abort_backend

NAME = "zipccl"
FORWARDED = ("send", "recv", "recv_anysource")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class ZipProcessGroup(ProcessGroup):
    """``zips_itself`` tells other fronts of ours that calls on this group need nothing more."""
    zips_itself = True

    def __init__(self, options, native_options=None):
        """``options``: torch's _DistributedBackendOptions. ``native_options``: the user's ``pg_options``, for NCCL.

        All ranks of the group construct it together. Raises HandshakeError, alike on all of them, where they do not agree.
        """
        super().__init__(options.group_rank, options.group_size)
        self._store = options.store
        self._coalescing = False
        self._specs = specs()
        self._inner: ProcessGroup | None = None
        self._joined = False
        self._zipccl = torch_session.join(options)
        self._shown, self._number = self._zipccl.known_native, 0           # what goes native, by the inner group's id
        try:
            self._connect(options, native_options)
        except BaseException:
            torch_session.leave(None)
            raise
        self._joined = True

    def _connect(self, options, native_options) -> None:
        inner = ProcessGroup(options.store, options.group_rank, options.group_size)
        backends = self._backends = list(_native_backends(options, native_options))
        for group in (self, inner):
            group._set_default_backend(backends[-1][1])
            for device, backend_type, backend in backends:
                group._register_backend(torch.device(device), backend_type, backend)
        inner._set_group_name(options.group_id)
        self._inner, self._number = inner, id(inner)

    def _ask(self, method: str, *args, **kwargs) -> dist.Work:
        """A collective: zipped if it may be, else native and counted with the reason."""
        asked = torch_calls.understand(method, args, kwargs)
        call = None if self._coalescing or not self._joined else self._call(asked)
        if call is not None:
            work = front.run(self._zipccl, call)
        else:
            work = None
            self._count_native(asked)
        return getattr(self._inner, method)(*args, **kwargs) if work is None else work

    def _count_native(self, asked: torch_calls.Asked) -> None:
        rank = self.rank()
        front.count_native(self._zipccl, asked.op, self._inner, asked.num_bytes and (lambda world: asked.num_bytes(rank, world)))

    def _count_known(self, known: Known, method: str, args) -> None:
        """After the launch of a call of one tensor which was to go native."""
        if self._coalescing or not self._joined:
            self._count_native(torch_calls.understand(method, args, {}))
        else:
            known.add(None if known.count_other is None else getattr(args[-1], "reduceOp", None),
                      None if known.rank is None else getattr(args[-1], "rootRank", None))

    def _call(self, asked: torch_calls.Asked) -> Call | None:
        output, data = asked.output, asked.input
        if output is None or asked.op not in self._specs or not (_is_plain(output) and _is_plain(data)):
            return None
        in_place, output = data is output, front.detached(output)
        return Call(asked.op, output, output if in_place else front.detached(data), self._inner, **asked.fields)

    def _forward(self, method: str, *args, **kwargs) -> dist.Work:
        """Point to point: nothing to compress, and not every rank takes part, so nothing may be settled here."""
        return getattr(self._inner, method)(*args, **kwargs)

    def _start_coalescing(self, device):
        self._inner._start_coalescing(device)
        self._coalescing = True

    def _end_coalescing(self, device):
        self._coalescing = False
        return self._inner._end_coalescing(device)

    def getBackendName(self):
        return NAME

    def get_group_store(self):
        return self._store

    def shutdown(self):
        """Completes what is in flight, then ends the connections, also if that failed."""
        try:
            self._leave()
        finally:
            self._inner.shutdown()

    def abort(self):
        """Ends the connections at once, on this rank alone. What is in flight fails: the waits for it say so, not this call."""
        ending = [abort_backend(backend, device) for device, _, backend in self._backends]
        self._leave(at_once=True)
        for thread in filter(None, ending):
            thread.join()

    def _leave(self, at_once: bool = False) -> None:
        if self._joined:
            self._joined = False
            torch_session.leave(self._inner, at_once)


def _native_backends(options, native_options):
    """(device type, backend type, backend), made as torch makes them."""
    rank, size = options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", options.store), rank, size, timeout=options.timeout)
    gloo.options.global_ranks_in_group, gloo.options.group_name = options.global_ranks_in_group, options.group_id
    gloo._set_sequence_number_for_group()
    yield "cpu", ProcessGroup.BackendType.GLOO, gloo
    if torch.cuda.is_available() and dist.is_nccl_available():
        settings = native_options or dist.ProcessGroupNCCL.Options()
        settings._timeout = options.timeout
        settings.global_ranks_in_group, settings.group_name = options.global_ranks_in_group, options.group_id
        source = _split_source(options)
        if source is not None:
            settings.split_from, settings.split_color = source, c10d._process_group_color(list(options.global_ranks_in_group))
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", options.store), rank, size, settings)
        nccl._set_sequence_number_for_group()
        if source is not None:
            nccl.eager_connect_single_device(c10d._get_default_group().bound_device_id)
        yield "cuda", ProcessGroup.BackendType.NCCL, nccl


def _split_source(options):
    """Of a subgroup, the world's NCCL backend, if the world is bound to a device: torch has ranks outside of the subgroup take part in a
    split of its communicator, whatever the subgroup's backend, and there they wait for those inside. None: no such world."""
    if not dist.is_initialized() or not list(options.global_ranks_in_group):
        return None
    if re.fullmatch("[0-9a-f]{40}", options.group_id):
        return None                                     # a hashed name, of ``use_local_synchronization``: nobody outside takes part
    world = c10d._get_default_group()
    source = c10d._get_split_source(world) if world.bound_device_id is not None else None
    return source if isinstance(source, dist.ProcessGroupNCCL) else None


def _is_plain(tensors) -> bool:
    """Fake tensors and other subclasses have no bytes of their own to encode."""
    return all(map(_is_plain, tensors)) if isinstance(tensors, tuple) else type(tensors) in _PLAIN


def _method(name: str, body):

    def method(self, *args, **kwargs):
        return body(self, name, *args, **kwargs)

    method.__name__ = name
    return method


def _single(name: str, op: str, data_of):
    """A method that is mostly of one tensor: known to go native, it does before anything else is done."""

    def method(self, *args, **kwargs):
        table = self._shown.get(self._number)
        if table is not None and not kwargs:
            try:
                data = data_of(args)
                known = table.get((op, data.numel(), data.dtype, data.is_cuda)) if type(data) in _PLAIN else None
            except (IndexError, TypeError):             # short forms
                known = None
            if known is not None:
                work = getattr(self._inner, name)(*args)
                self._count_known(known, name, args)
                return work
        return self._ask(name, *args, **kwargs)

    method.__name__ = name
    return method


for _name in torch_calls.METHODS:
    if hasattr(ProcessGroup, _name):
        setattr(ZipProcessGroup, _name, _single(_name, *torch_calls.SINGLE[_name]) if _name in torch_calls.SINGLE
                else _method(_name, ZipProcessGroup._ask))
for _name in FORWARDED:
    setattr(ZipProcessGroup, _name, _method(_name, ZipProcessGroup._forward))


def create(options, native_options=None) -> ZipProcessGroup:
    """What torch calls for ``init_process_group("zipccl")`` and ``new_group(backend="zipccl")``; torch takes what is returned as the group
    itself."""
    batch_through_coalescing(ZipProcessGroup)
    return ZipProcessGroup(options, native_options)
