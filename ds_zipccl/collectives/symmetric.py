"""The one-sided transport: ranks of one host whose GPUs see each other's memory exchange frames without a communicator.

A call is cut into parts of whole tiles. For each, a rank encodes what goes to its peers and sends it as a message: a frame in a slot of
the receiver's memory. Peers decode (or decode and add up, in rank order) as messages arrive, beside what is still encoded and on its way.
All that ranks agree on goes from GPU to GPU (csrc/zipccl/symmetric.cuh): the host waits for nothing, also where a frame overflows, and
queues a whole call at once (csrc/zipccl/symmetric.cu).
"""
import ctypes
import functools
import os
import weakref
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import _SymmetricMemory

from ds_zipccl.codec.format import DEFAULT_SPILL_PER_TILE
from ds_zipccl.collectives import streams, symmetric_plan
from ds_zipccl.collectives.symmetric_known import Known, KnownRows
from ds_zipccl.collectives.symmetric_plan import FIRST_PART_BYTES, LAST_PART_BYTES, Arranged, Layout, Plan, Row, words_bytes
from ds_zipccl.errors import KernelError
from ds_zipccl.kernels.geometry import Geometry
from ds_zipccl.kernels.symmetric_calls import MAX_OUTPUTS, Exchange, Place
from zipscape.errors import ZipScapeError

NUM_LANES = 2               # streams on which copy engines take turns: one begins while another ends
# Of a rank's rows that kernels carry rather than copy engines; of those whose frames are made beforehand. They need a third of the host's
# calls, but of 512 MiB between two H200s they reach 270 GB/s, copy engines 340.
MAX_CARRIED_BYTES, MAX_CARRIED_MADE_BYTES = 32 << 20, 128 << 20
NUM_SENDERS, RECEIVERS_PER_MULTIPROCESSOR = 128, 4         # CTAs of a kernel that carries
RECEIVER_BYTES = 20 << 10   # of shared memory that one of the smallest takes at most; of larger ones there are fewer (carried.h)
NUM_GROUPS = 1              # of blocks that a receiver decodes in one go: 2 and 4 are no faster
MAX_RANKS = 64              # of a group: its words have room for no more (kMaxRanks)
MAX_KEPT = 32               # calls at most whose tensors are kept until they are done: beyond, the oldest is joined
KEPT_UNASKED = 4            # who looks which are done calls CUDA: only once in so many


class SymmetricWork(dist.Work):
    """The handle of a call. ``wait`` makes the current stream wait for the result; the host waits for nothing."""

    @classmethod
    def of(cls, transport: "SymmetricTransport", call: int, output: torch.Tensor, sent_bytes: int) -> "SymmetricWork":
        """``sent_bytes``: of frames, to all peers."""
        self = cls()
        self._transport, self._call, self._output, self.sent_bytes = transport, call, output, sent_bytes
        return self

    @property
    def join(self):
        """``wait``, for who need not keep the outputs."""
        return functools.partial(self._transport.join, self._call)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._transport.join(self._call)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._transport.is_done(self._call)

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self):
        return None

    def get_future(self) -> torch.futures.Future:
        future = torch.futures.Future(devices=[self._transport.device])
        self.wait()
        future.set_result([self._output])
        return future


class SymmetricTransport:
    """One group's. All ranks must make the same calls in the same order; tensors are flat, of one of the codec's dtypes. Calls return None
    on all ranks, and do nothing, where the memory has no room for a tile of each row.

    Made by ``open_transport``. ``first_bytes``, ``largest_bytes``, ``carried_bytes``, ``carried_made_bytes``,
    ``num_lanes``, ``num_senders``, ``num_groups``: see the constants; ``num_receivers``: CTAs, of all transports of the device.
    """

    def __init__(self, engine, workspace, rank: int, device: torch.device, world_size: int, room: int, overflows: torch.Tensor, keep_alive):
        """``workspace(stream, num_words)``: the address of encode's workspace."""
        self.device, self.rank, self.world_size = device, rank, world_size
        self.engine, self.workspace, self._room, self._overflows, self._keep_alive = engine, workspace, room, overflows, keep_alive
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        self.status_at = self._status.data_ptr()
        self.num_calls, self._ended = 0, False
        self.kept: dict[int, tuple] = {}                   # tensors by call, of those that may not be done
        self.first_bytes, self.largest_bytes = FIRST_PART_BYTES, LAST_PART_BYTES
        self.num_lanes, self.spill_per_tile = NUM_LANES, DEFAULT_SPILL_PER_TILE
        self.carried_bytes, self.carried_made_bytes = MAX_CARRIED_BYTES, MAX_CARRIED_MADE_BYTES
        self.num_senders, self.num_receivers = NUM_SENDERS, _receivers_of(device)
        self.num_groups = NUM_GROUPS
        # Receivers wait on the GPU. However many groups do so at once, there is room beside them for what they wait for.
        self._open_here = _OPEN.setdefault(device, weakref.WeakSet())
        self._open_here.add(self)
        _share(self._open_here)

    def plan(self, dtype: torch.dtype, row_numel: int, same_for_all: bool) -> Plan | None:
        """None: not even a tile of each row fits into the memory."""
        return symmetric_plan.plan(dtype, row_numel, self.world_size, same_for_all, self.spill_per_tile, self._room, self.first_bytes,
                                   self.largest_bytes)

    @property
    def num_overflows(self) -> int:
        """Frames that this rank has sent raw, as far as the GPU has come."""
        return int(self._overflows.sum())

    def _run(self, cut: Plan | None, rows: int, row_stride: int, out: int, out_stride: int, tensors, own: int = 0, copy=(0, 0, 0),
             made=None, places=None, others=()) -> SymmetricWork | None:
        """``tensors``: used by the call, its output first; ``others`` too, which are about anyway."""
        if cut is None:
            return None
        if torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self._run(cut, rows, row_stride, out, out_stride, tensors, own, copy, made, places, others)
        stream = streams.current(self.device)
        if copy[0] == copy[1]:
            copy = (0, 0, 0)
        is_carried = cut.raw_bytes <= (self.carried_bytes if made is None else self.carried_made_bytes)
        workspace = self.workspace(stream, cut.words) if cut.words else 0
        self.engine.run(Exchange(rows, row_stride, out, out_stride, own, *copy, self.num_lanes, cut.num_parts,
                                  cut.parts, made, places, self.status_at, workspace, stream,
                                  self.num_senders if is_carried else 0, max(1, self.num_receivers // self.num_sharing),
                                  self.num_groups))
        return self.launched(tensors, others, stream, cut.sent_bytes * (self.world_size - 1))

    def launched(self, tensors: tuple[torch.Tensor, ...], others: tuple, stream: int, sent_bytes: int) -> SymmetricWork:
        """The engine has queued a call on ``stream`` that uses ``tensors``, its output first, and ``others``, which are about anyway."""
        call = self.num_calls = self.num_calls + 1
        self.kept[call] = tensors, others, stream
        if call % KEPT_UNASKED == 0:
            self.drop_done(stream)
        return SymmetricWork.of(self, call, tensors[0], sent_bytes)

    def drop_done(self, stream: int) -> None:
        """Forgets what calls that are done used, and that of the oldest ones where too many are not: ``stream`` waits for those."""
        calls = list(self.kept)[:-1]                       # they end in this order
        last = next((call for call in (calls[-1], calls[len(calls) // 2], calls[0]) if self.engine.is_done(call)), 0) if calls else 0
        if not last and len(calls) >= MAX_KEPT:
            last = calls[len(calls) - MAX_KEPT]
            self.engine.join(last, stream)
            for call in range(calls[0], last + 1):
                self._give_back(call, stream)
        for call in range(calls[0] if calls else 1, last + 1):
            self.kept.pop(call, None)

    def all_gather(self, out: torch.Tensor, own: torch.Tensor) -> SymmetricWork | None:
        """``out`` [world_size * n] from every rank's ``own`` [n]; ``own`` may be its place in ``out``."""
        return self._run_laid_out("all_gather", out, own)

    def arrange(self, kinds: tuple[tuple[Geometry, bool, bool], ...]) -> Arranged | None:
        """For ``gather_rows`` of rows of these kinds, as often as they come; None: there is no room for them."""
        order = symmetric_plan.in_turn([geometry.numel * geometry.itemsize for geometry, _, _ in kinds])
        cut = symmetric_plan.plan_of_rows(tuple([kinds[i] for i in order]), self.world_size, self._room)
        return cut and Arranged(order, cut)

    def gather_rows(self, rows: list[Row], arranged: Arranged | None = None) -> SymmetricWork | None:
        """Every row's ``out`` from all ranks' data. The ranks' rows are of the same kinds in the same order; frames and data must stay as
        they are until the call is done. ``arranged``: of their kinds."""
        if arranged is None:
            arranged = self.arrange(tuple([row.kind for row in rows]))
            if arranged is None:
                return None
        made, places, outs, others = [], [], {}, []
        for i in arranged.order:
            data, out, geometry, frame, _ = rows[i]
            made.append(None if frame is None else frame.data_ptr())
            places.append((data.data_ptr(), out.data_ptr(), out.stride(0) * geometry.itemsize))
            whole = out if out._base is None else out._base
            outs[id(whole)] = whole
            others += (data, frame)
        return self._run(arranged.cut, 0, 0, 0, 0, tuple(outs.values()), made=(ctypes.c_void_p * len(made))(*made),
                         places=(Place * len(made))(*places), others=others)

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor) -> SymmetricWork | None:
        """``out``, ``data`` [world_size * n], equal pieces; they must not overlap."""
        return self._run_laid_out("all_to_all", out, data)

    def reduce_scatter(self, out: torch.Tensor, data: torch.Tensor) -> SymmetricWork | None:
        """``out`` [n]: the sum in rank order of what ranks have for this one in ``data`` [world_size * n]; ``out`` may be this rank's
        place there."""
        return self._run_laid_out("reduce_scatter", out, data)

    def layout(self, name: str, out: torch.Tensor, data: torch.Tensor) -> Layout:
        numel, item, world = data.numel(), data.element_size(), self.world_size
        if name == "all_gather":
            return Layout(self.plan(data.dtype, numel, True), 0, numel * item, -1, self.rank * numel * item, 0, numel * item)
        cut, row = self.plan(data.dtype, numel // world, False), numel // world * item
        if name == "all_to_all":
            return Layout(cut, row, row, -1, self.rank * row, self.rank * row, row)
        return Layout(cut, row, 0, self.rank * row, 0, 0, 0)

    def _run_laid_out(self, name: str, out: torch.Tensor, data: torch.Tensor) -> SymmetricWork | None:
        cut, row_stride, out_stride, own, copy_to, copy_from, copy_bytes = self.layout(name, out, data)
        x, to = data.data_ptr(), out.data_ptr()
        return self._run(cut, x, row_stride, to, out_stride, (out, data), own=0 if own < 0 else x + own,
                         copy=(to + copy_to, x + copy_from, copy_bytes) if copy_bytes else (0, 0, 0))

    def known(self, name: str, out: torch.Tensor, data: torch.Tensor) -> Known | None:
        """What it takes to make such calls again on the current stream; of flat tensors of these sizes. None: they cannot be made."""
        return Known.of(self, name, out, data) if self._may_be_known() else None

    def known_rows(self, rows: list[Row], arranged: Arranged, outputs: list[torch.Tensor]) -> KnownRows | None:
        """What it takes to gather these rows, whose data and frames stay where they are, again on the current stream. ``outputs``: what the
        rows' ``out`` are parts of, dense; the next ones will be others of the same sizes."""
        return KnownRows.of(self, rows, arranged, outputs) if self._may_be_known() and len(outputs) <= MAX_OUTPUTS else None

    def _may_be_known(self) -> bool:
        return not self._ended and torch.cuda.current_device() == self.device.index

    def join(self, call: int) -> None:
        if self._ended:
            return
        if streams.current_device() != self.device.index:               # CUDA would take its default stream
            with torch.cuda.device(self.device):
                return self.join(call)
        stream = streams.current(self.device)
        self.engine.join(call, stream)
        self._give_back(call, stream)

    def _give_back(self, call: int, stream: int) -> None:
        """The memory of what it used, once ``stream``, the current one, waits for its end: who runs ahead of the GPU must not need more for
        that."""
        tensors, others, launched_on = self.kept.get(call, _NOTHING)
        if tensors:
            if stream != launched_on:               # else who launched is in charge, as natively
                for t in tensors:
                    streams.keep(t)
            self.kept[call] = (), others, launched_on

    @property
    def is_open(self) -> bool:
        return not self._ended

    def is_done(self, call: int) -> bool:
        return self._ended or self.engine.is_done(call)

    def close(self) -> None:
        """All ranks at the same point; waits for the calls in flight, of which none may be captured."""
        torch.cuda.synchronize(self.device)
        self._end()

    def abort(self) -> None:
        """At once, on this rank alone. Memory that a call in flight uses is never freed: its kernels wait until their limit. Never raises
        for what such a limit leaves behind, a lost CUDA context: others of the group are to be ended too."""
        try:
            is_idle = self.num_calls == 0 or self.engine.is_done(self.num_calls)
        except KernelError:
            is_idle = False
        if is_idle:
            self._end()
        else:
            _NEVER_FREED.append((self, self.engine, self._keep_alive, self.kept, self._status))

    def _end(self) -> None:
        """Nothing is in flight: who waits for a call afterwards need not."""
        self._ended = True
        self._open_here.discard(self)
        _share(self._open_here)
        self.engine.close()
        self.kept.clear()
        self._keep_alive = None


def _share(transports) -> None:
    """Those that are open on a device share its receivers."""
    for transport in transports:
        transport.num_sharing = len(transports)


_NOTHING = (), (), 0
_NEVER_FREED: list = []
_OPEN: dict[torch.device, "weakref.WeakSet[SymmetricTransport]"] = {}


def _receivers_of(device: torch.device) -> int:
    """CTAs of the smallest kernels that take no more than half of the registers (kCarryCtas fit) and of the shared memory."""
    if device.type != "cuda":
        return RECEIVERS_PER_MULTIPROCESSOR
    gpu = torch.cuda.get_device_properties(device)
    most = gpu.shared_memory_per_multiprocessor // (2 * RECEIVER_BYTES)
    return gpu.multi_processor_count * max(1, min(RECEIVERS_PER_MULTIPROCESSOR, most))


def why_not(records: list[dict]) -> str | None:
    """Why a group cannot use the transport, from what each rank says of itself, as far as they were asked: ``host``, ``uuid`` of its GPU,
    ``peers``: for the other GPUs that it sees, by uuid, whether it can access their memory; ``error``: its kernels could not be built;
    ``no_memory``: it could not allocate; ``not_opened``: torch could not show it the others' memory."""
    if "uuid" in records[0]:
        uuids = [record["uuid"] for record in records]
        if len({record["host"] for record in records}) > 1:
            return "hosts"
        if len(set(uuids)) < len(uuids):
            return "same_gpu"
        if not all(record["peers"].get(uuid) for record in records for uuid in uuids if uuid != record["uuid"]):
            return "no_peer_access"
    found = {reason for record in records for reason in record if record[reason]}
    return "not_built" if "error" in found else "no_memory" if "no_memory" in found else "not_opened" if "not_opened" in found else None


def place_of(device: torch.device) -> dict:
    """What ``why_not`` needs to know of this rank's host and GPU."""
    def uuid(index: int) -> str:
        return str(torch.cuda.get_device_properties(index).uuid)

    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    return {"host": Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "uuid": uuid(device.index),
            "peers": {uuid(index): torch.cuda.can_device_access_peer(device.index, index) for index in others}}


def kernels_of() -> dict:
    """The same of its kernels, which are built if they must be."""
    from ds_zipccl.kernels import impl_cuda, symmetric_calls
    try:
        if impl_cuda.load().c_encode() is None:
            return {"error": "the CUDA kernels were compiled by NVRTC, which has no C launchers"}
        symmetric_calls.load()
    except ZipScapeError as error:
        return {"error": str(error)}
    return {}


class Reserved(NamedTuple):
    """A rank's memory for a transport: ``memory`` [num_bytes] is what peers will see, ``scratch`` what its own kernels need, ``overflows``
    int32 of the host's, where they count."""
    memory: torch.Tensor
    scratch: torch.Tensor
    overflows: torch.Tensor


def reserve(device: torch.device, num_bytes: int) -> Reserved:
    """All that ``open_transport`` needs on this rank: what is missing is told before anybody waits for the others' memory. Raises
    RuntimeError if there is none."""
    import torch.distributed._symmetric_memory as symmetric_memory

    from ds_zipccl.kernels import symmetric_calls
    calls = symmetric_calls.load()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")         # torch would set it up, and nothing here uses it
    with torch.cuda.device(device):
        memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        memory[:words_bytes(MAX_RANKS)].zero_()
        scratch = torch.zeros(calls.scratch_bytes, dtype=torch.uint8, device=device)
        overflows = torch.zeros(calls.overflows_bytes // 4, dtype=torch.int32, device="cpu", pin_memory=True)
        torch.cuda.synchronize(device)                     # peers may write as soon as they know the address
    return Reserved(memory, scratch, overflows)


def known_group(group: dist.ProcessGroup, store: dist.Store, name: str) -> tuple[str, dist.ProcessGroup]:
    """(name by which torch's symmetric memory finds a group of the same ranks, that group, to be kept): ``group`` itself where torch knows
    it by its name, else one without a backend, called ``name``, on ``store``."""
    try:
        if c10d._resolve_process_group(group.group_name) is group:
            return group.group_name, group
    except RuntimeError:
        pass
    ours = dist.ProcessGroup(store, group.rank(), group.size())
    c10d._register_process_group(name, ours)
    _SymmetricMemory.set_group_info(name, group.rank(), group.size(), store)
    return name, ours


def open_transport(group: dist.ProcessGroup, device: torch.device, reserved: Reserved, store: dist.Store, name: str,
                   timeout: timedelta) -> SymmetricTransport:
    """Exchanges the ranks' memory (``reserve``, as much on each). All ranks of a group at the same point, once ``why_not`` of their
    records is None; ``store`` and ``name`` are for this alone."""
    import torch.distributed._symmetric_memory as symmetric_memory

    from ds_zipccl.kernels import impl_cuda, symmetric_calls
    with torch.cuda.device(device):
        kernels, calls, (memory, scratch, overflows) = impl_cuda.load(), symmetric_calls.load(), reserved
        name, ranks = known_group(group, store, name)
        handle = symmetric_memory.rendezvous(memory, name)
        addresses = list(handle.buffer_ptrs)
        engine = calls.open(group.rank(), addresses, memory.numel(), scratch.data_ptr(), overflows.data_ptr(),
                            kernels.error_word(device.index), int(timeout.total_seconds() * 1e9), kernels.c_encode())
        return SymmetricTransport(engine, functools.partial(kernels.workspace, device.index), group.rank(), device, group.size(),
                                  memory.numel() - words_bytes(group.size()), overflows, (memory, handle, scratch, ranks))
