"""The one-sided transport: ranks of one host whose GPUs see each other's memory exchange frames without a communicator.

A call is cut into parts of whole tiles. For each, a rank encodes what goes to its peers and sends it as a message: a frame in a slot of
the receiver's memory, or of its own where the receiver pulls. Peers decode (or decode and add up, in rank order) as messages arrive, beside
what is still encoded and on its way. All that ranks agree on goes from GPU to GPU (csrc/zipccl/symmetric.cuh): the host waits for
nothing, also where a frame overflows.

Ways (``Way``): ``copy`` the copy engines move frames, so that a link is used to its full and multiprocessors are free; ``store`` encode
writes into the peer's memory, which takes fewest steps; ``pull`` the receiver reads frames where they were made.
"""
import enum
import functools
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import BLOCK_ELEMS, DEFAULT_SPILL_PER_TILE, HEADER_BYTES, TILE_ELEMS, layout
from ds_zipccl.collectives import streams
from ds_zipccl.collectives.ring import Ring, align
from ds_zipccl.kernels.geometry import Geometry
from zipscape.errors import BuildError

LEAD = 3                    # messages sent before the first is received: what is on its way while one is encoded and one decoded
LANES = 2                   # streams on which copy engines take turns: one begins while another ends
NUM_IN_RING = 8             # messages of a call that have room: with LEAD in flight here, peers may be as far behind
MAX_KEPT = 32               # calls whose tensors are kept at most: beyond, the oldest is joined


class Way(enum.Enum):
    COPY = "copy"
    STORE = "store"
    PULL = "pull"


@dataclass(frozen=True)
class Part:
    """Elements ``start`` .. ``start + g.numel`` of each row, as one message. Bytes: ``slot`` of a slot, ``out`` of a frame beside them,
    ``slots``, ``outs``: how many."""
    start: int
    g: Geometry
    slot_bytes: int
    num_slots: int
    frame_stride: int
    num_frames: int

    @property
    def message_bytes(self) -> int:
        return self.num_slots * self.slot_bytes + self.num_frames * self.frame_stride


def slot_bytes(g: Geometry) -> int:
    """Room for a frame, or for the raw row in whole blocks behind a header."""
    return align(max(g.frame_bytes, HEADER_BYTES + -(-g.numel // BLOCK_ELEMS) * BLOCK_ELEMS * g.itemsize))


@functools.lru_cache(maxsize=1024)
def plan(dtype: torch.dtype, row_numel: int, world_size: int, same_for_all: bool, way: Way, spill_per_tile: int, part_bytes: int,
         room: int) -> tuple[Part, ...]:
    """The parts of rows of ``row_numel`` elements, each of at most about ``part_bytes`` raw bytes.

    NUM_IN_RING messages fit in ``room`` bytes; empty if not even a tile of each would. ``same_for_all``: peers get the same frame
    (all-gather). A function of what all ranks know.
    """
    row = BY_TORCH[dtype]
    others = 1 if world_size == 2 else world_size          # a rank's own place among more is left empty: addresses are then plain strides
    numel = row_numel

    def part(start: int, count: int) -> Part:
        g = layout(row, count, spill_per_tile=spill_per_tile)
        num_slots = 1 if way is Way.PULL and same_for_all else others
        num_frames = 0 if way is not Way.COPY else 1 if same_for_all else others
        return Part(start, g, slot_bytes(g), num_slots, align(g.frame_bytes), num_frames)

    if numel * row.itemsize > part_bytes:
        numel = max(1, part_bytes // (TILE_ELEMS * row.itemsize)) * TILE_ELEMS
    while part(0, numel).message_bytes > room // NUM_IN_RING:
        if numel <= TILE_ELEMS:
            return ()
        numel = max(1, numel // 2 // TILE_ELEMS) * TILE_ELEMS
    return tuple(part(start, min(numel, row_numel - start)) for start in range(0, row_numel, numel))


@dataclass(frozen=True)
class _Job:
    """A call by addresses. ``own``: the row that is added, 0 where nothing is summed; ``row_stride``, ``out_stride``: bytes, 0 where there
    is one row for all. ``made``: the parts' frames, where they were made beforehand (one row for all, ``Way.COPY``)."""
    rows: int
    row_stride: int
    out: int
    out_stride: int
    own: int = 0
    made: tuple[int, ...] = ()


class OneSided:
    """Messages of one rank over memory that is there (``memory``: addresses, of ``num_bytes`` each). No torch group, no allocation.

    ``encode(g, x, row_stride, frames, frame_stride, num_rows, skip, stream)``: queues encode, by addresses.
    """

    def __init__(self, engine, encode, rank: int, memory: list[int], first: int, num_bytes: int):
        self._engine, self._encode, self._rank, self._memory = engine, encode, rank, memory
        self._world_size, self.ring = len(memory), Ring(align(first), num_bytes - align(first))
        self._needed, self._claimed = 0, {}            # messages that must be read for all places to be free; by stream: known to be
        self._num_read = self._num_told = 0            # messages whose reception is queued; of which peers are told so

    def _row(self, offset: int, rank: int, stride: int) -> int:
        """Where row ``rank`` of the other ranks' rows is; of two ranks only the other one has a place."""
        return offset if self._world_size == 2 else offset + rank * stride

    def _row_0(self, offset: int, stride: int) -> int:
        """What rows count from: row r is ``r * stride`` further."""
        return offset - (1 - self._rank) * stride if self._world_size == 2 else offset

    def messages(self, job: _Job, parts: tuple[Part, ...], way: Way, stream: int):
        """Generates after each step that is queued: emulated peers take turns. A place is taken when its last message's reception is
        queued, so that ranks whose streams share one queue of the hardware cannot wait for each other in a circle."""
        waiting: deque = deque()
        for i, part in enumerate(parts):
            message, offset, before = self.ring.take(part.message_bytes)
            while waiting and (len(waiting) >= LEAD or before > self._num_told):
                yield self._receive(job, *waiting.popleft(), way)
            self._needed = max(self._needed, before)
            self._send(job, part, message, offset, way, stream, job.made[i] if job.made else 0)
            waiting.append((part, message, offset))
            yield
        while waiting:
            yield self._receive(job, *waiting.popleft(), way)

    def end(self, call: int) -> None:
        """After a call's messages; numbers of calls ascend."""
        self._num_told = self._num_read
        self._engine.end(self._num_read, call)

    def _send(self, job: _Job, part: Part, message: int, offset: int, way: Way, stream: int, made: int) -> None:
        g, here, same = part.g, self._memory[self._rank], job.row_stride == 0
        x = job.rows + part.start * g.itemsize
        if self._claimed.get(stream, 0) < self._needed:
            self._engine.claim(self._needed, stream)
            self._claimed[stream] = self._needed
        if way is Way.PULL:
            slot_stride = frame_stride = 0 if same else part.slot_bytes
            slot = self._row_0(offset, slot_stride)
            frames = here + slot
        else:
            slot, slot_stride = self._row(offset, self._rank, part.slot_bytes), 0
            frame_stride = 0 if same else part.frame_stride
            frames = made or here + self._row_0(offset + part.num_slots * part.slot_bytes, frame_stride)
        if made:
            pass
        elif way is Way.STORE:
            for peer, memory in enumerate(self._memory):
                if peer != self._rank:
                    self._encode(g, x + peer * job.row_stride, 0, memory + slot, part.slot_bytes, 1, -1, stream)
        elif same:
            self._encode(g, x, 0, frames, part.slot_bytes, 1, -1, stream)
        else:
            self._encode(g, x, job.row_stride, frames, frame_stride, self._world_size, self._rank, stream)
        self._engine.send(message, frames, frame_stride, g.frame_bytes, x, job.row_stride, g.numel * g.itemsize, slot, slot_stride,
                          way is Way.PULL, LANES if way is Way.COPY else 0, stream)

    def _receive(self, job: _Job, part: Part, message: int, offset: int, way: Way) -> None:
        g, at = part.g, part.start * part.g.itemsize
        if way is Way.PULL:
            slot, slot_stride = offset if job.row_stride == 0 else self._row(offset, self._rank, part.slot_bytes), 0
        else:
            slot, slot_stride = self._row_0(offset, part.slot_bytes), part.slot_bytes
        own = job.own + at if job.own else 0
        self._engine.receive(g, message, self._num_read, slot, slot_stride, way is Way.PULL, own, job.out + at, job.out_stride)
        self._num_told, self._num_read = self._num_read, message


class SymmetricWork(dist.Work):
    """The handle of a call. ``wait`` makes the current stream wait for the result; the host waits for nothing."""

    def __init__(self, transport: "SymmetricTransport", call: int, outputs: list[torch.Tensor]):
        super().__init__()
        self._transport, self._call, self._outputs = transport, call, outputs

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
        future.set_result(self._outputs)
        return future


class SymmetricTransport:
    """One group's. All ranks must make the same calls in the same order; tensors are dense, of one of the codec's dtypes.

    Made by ``open_transport``. ``part_bytes``: raw bytes of a row in one message.
    """

    def __init__(self, engine, kernels, rank: int, device: torch.device, memory: list[int], num_bytes: int, first: int, keep_alive):
        self.device, self.rank, self.world_size = device, rank, len(memory)
        self._engine, self._kernels, self._keep_alive = engine, kernels, keep_alive
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        self._status_at = self._status.data_ptr()
        self._one_sided = OneSided(engine, self._encode, rank, memory, first, num_bytes)
        self._num_calls, self._kept = 0, deque()
        self.part_bytes, self.spill_per_tile = 32 << 20, DEFAULT_SPILL_PER_TILE

    def _encode(self, g, x, row_stride, frames, frame_stride, num_rows, skip, stream) -> None:
        self._kernels.encode_at(g, x, row_stride, frames, frame_stride, num_rows, skip, self._status_at, self.device.index, stream)

    def _plan(self, dtype: torch.dtype, row_numel: int, same_for_all: bool, way: Way) -> tuple[Part, ...]:
        parts = plan(dtype, row_numel, self.world_size, same_for_all, way, self.spill_per_tile, self.part_bytes, self._one_sided.ring.room)
        if not parts:
            raise ValueError("not even one tile fits into the symmetric memory")
        return parts

    def _run(self, job: _Job, dtype: torch.dtype, row_numel: int, way: Way, own_copy, tensors) -> SymmetricWork:
        parts = self._plan(dtype, row_numel, job.row_stride == 0, way)
        stream = streams.current(self.device)
        self._engine.begin(stream)
        if own_copy is not None and own_copy[0] != own_copy[1]:
            self._engine.copy_own(*own_copy)
        for _ in self._one_sided.messages(job, parts, way, stream):
            pass
        self._num_calls += 1
        call = self._num_calls
        self._one_sided.end(call)
        self._kept.append((call, tensors))
        while self._kept and (len(self._kept) > MAX_KEPT or self._engine.is_done(self._kept[0][0])):
            done, _ = self._kept[0]
            if len(self._kept) > MAX_KEPT:
                self._engine.join(done, stream)             # nobody waited for it: its memory goes back in the order of this stream
            self._kept.popleft()
        return SymmetricWork(self, call, [tensors[0]])

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, way: Way = Way.COPY) -> SymmetricWork:
        """``out`` [world_size * n] from every rank's ``own`` [n]; ``own`` may be its place in ``out``."""
        n, item = own.numel(), own.element_size()
        to = out.data_ptr() + self.rank * n * item
        job = _Job(own.data_ptr(), 0, out.data_ptr(), n * item)
        return self._run(job, own.dtype, n, way, (to, own.data_ptr(), n * item), (out, own))

    def make_frames(self, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts' frames of ``own`` for ``all_gather_made``, on the current stream."""
        parts, frames, stream = self._plan(own.dtype, own.numel(), True, Way.COPY), [], streams.current(self.device)
        for part in parts:
            frames.append(torch.empty(align(part.g.frame_bytes), dtype=torch.uint8, device=self.device))
            x = own.data_ptr() + part.start * part.g.itemsize
            self._encode(part.g, x, 0, frames[-1].data_ptr(), frames[-1].numel(), 1, -1, stream)
        return tuple(frames)

    def all_gather_made(self, out: torch.Tensor, own: torch.Tensor, frames: tuple[torch.Tensor, ...]) -> SymmetricWork:
        """``all_gather`` of frames made before from ``own``, which must not have changed; none of them overflows."""
        n, item = own.numel(), own.element_size()
        job = _Job(own.data_ptr(), 0, out.data_ptr(), n * item, made=tuple(frame.data_ptr() for frame in frames))
        to = out.data_ptr() + self.rank * n * item
        return self._run(job, own.dtype, n, Way.COPY, (to, own.data_ptr(), n * item), (out, own, *frames))

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor, way: Way = Way.COPY) -> SymmetricWork:
        """``out``, ``data`` [world_size * n], equal pieces; they must not overlap."""
        n, item = data.numel() // self.world_size, data.element_size()
        at = self.rank * n * item
        job = _Job(data.data_ptr(), n * item, out.data_ptr(), n * item)
        return self._run(job, data.dtype, n, way, (out.data_ptr() + at, data.data_ptr() + at, n * item), (out, data))

    def reduce_scatter(self, out: torch.Tensor, data: torch.Tensor, way: Way = Way.COPY) -> SymmetricWork:
        """``out`` [n]: the sum in rank order of what ranks have for this one in ``data`` [world_size * n]; ``out`` may be this rank's
        place there."""
        n, item = out.numel(), out.element_size()
        job = _Job(data.data_ptr(), n * item, out.data_ptr(), 0, data.data_ptr() + self.rank * n * item)
        return self._run(job, data.dtype, n, way, None, (out, data))

    def join(self, call: int) -> None:
        self._engine.join(call, streams.current(self.device))

    def is_done(self, call: int) -> bool:
        return self._engine.is_done(call)

    def close(self) -> None:
        """All ranks at the same point; waits for the device, so that nothing is in flight when the memory goes."""
        torch.cuda.synchronize(self.device)
        self._engine.close()
        self._kept.clear()
        self._keep_alive = None


def why_not(records: list[dict], max_ranks: int) -> str | None:
    """Why a group cannot use the transport, from what each rank says of itself: ``host``, ``uuid`` of its GPU, ``peers``: for the other
    GPUs that it sees, by uuid, whether it can access their memory; ``error``: its kernels could not be built."""
    uuids = [record["uuid"] for record in records]
    if len(records) > max_ranks:
        return "too_many_ranks"
    if len({record["host"] for record in records}) > 1:
        return "hosts"
    if len(set(uuids)) < len(uuids):
        return "same_gpu"
    if any(record.get("error") for record in records):
        return "not_built"
    if not all(record["peers"].get(uuid) for record in records for uuid in uuids if uuid != record["uuid"]):
        return "no_peer_access"
    return None


def record_of(device: torch.device) -> dict:
    """What ``why_not`` needs of this rank."""
    from ds_zipccl.kernels import impl_cuda, symmetric_calls

    def uuid(index: int) -> str:
        return str(torch.cuda.get_device_properties(index).uuid)

    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    record = {"host": Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "uuid": uuid(device.index),
              "peers": {uuid(index): torch.cuda.can_device_access_peer(device.index, index) for index in others}}
    try:
        impl_cuda.load()
        symmetric_calls.load()
    except BuildError as error:
        record["error"] = str(error)
    return record


def open_transport(group: dist.ProcessGroup, device: torch.device, num_bytes: int, timeout: timedelta) -> SymmetricTransport:
    """Allocates and exchanges ``num_bytes`` of symmetric memory. All ranks of the group at the same point, once
    ``why_not`` of their records is None."""
    import torch.distributed._symmetric_memory as symmetric_memory

    from ds_zipccl.kernels import impl_cuda, symmetric_calls
    with torch.cuda.device(device):
        kernels, calls = impl_cuda.load(), symmetric_calls.load()
        memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        memory[:calls.words_bytes].zero_()
        scratch = torch.zeros(calls.scratch_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)                     # peers may write as soon as they know the address
        handle = symmetric_memory.rendezvous(memory, group)
        addresses = list(handle.buffer_ptrs)
        engine = calls.open(group.rank(), addresses, scratch.data_ptr(), kernels.error_word(device.index),
                            int(timeout.total_seconds() * 1e9))
        return SymmetricTransport(engine, kernels, group.rank(), device, addresses, num_bytes, calls.words_bytes,
                                  (memory, handle, scratch))
