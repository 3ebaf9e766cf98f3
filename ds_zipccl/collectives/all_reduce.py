"""all_reduce: a reduce-scatter of equal parts, then an all-gather of the sums. In place, as torch's is.

Arithmetic: that of reduce_scatter.py, so every rank has the same bits. The tensor is cut into world-size parts of ceil(n / world size)
elements; where that does not come out even, the last parts are padded with zeros in scratch memory.
"""
import torch
import torch.distributed as dist

from ds_zipccl.collectives.launch import STATUS_BYTES, Launch, Started, everyones_words, frames_bytes, observe
from ds_zipccl.collectives.reduce_scatter import FIRST_SPILL, summable
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import all_gather_bytes, all_to_all_bytes
from ds_zipccl.collectives.views import flat
from ds_zipccl.errors import CollectiveError
from ds_zipccl.kernels.rank_order import sum_in_order
from zipscape.errors import ZipScapeError, describe

FAILED = -1                             # in place of a status word, whose sign bit is never set


def _part_numel(call: Call) -> int:
    return -(-call.input.numel() // call.world_size)


def _parts(call: Call) -> torch.Tensor:
    """[world size, part]: the input, padded with zeros; no copy where it comes out even."""
    data, shape = flat(call.input), (call.world_size, _part_numel(call))
    if data.numel() == shape[0] * shape[1]:
        return data.view(shape)
    parts = torch.zeros(shape, dtype=call.dtype, device=call.device)
    parts.view(-1)[:data.numel()] = data
    return parts


class _Reduction:
    """One call in flight.

    Phases: 1. encode each peer's part, exchange on the call's group; when the status words are known, in launch order: 2. sum the own
    part, encode the sums, gather them over the bulk channel, where nothing of it can mix with other calls; wait for that phase's status
    words, send again what overflowed; 3. (finish) decode the sums into the output, which is written here only.
    """

    def __init__(self, spec: CollectiveSpec, call: Call, launch: Launch):
        self._spec, self._call, self._launch = spec, call, launch
        self._numel = _part_numel(call)
        self._capacity, self._sums_capacity = (launch.capacity(name, call.dtype, self._numel, FIRST_SPILL)
                                               for name in (call.op, f"{call.op}, sums"))
        self._raw = None                               # of the sums

    def start(self) -> Started | str:
        call, launch = self._call, self._launch
        spills = self._capacity.next_call(), self._sums_capacity.next_call()
        if None in spills:
            return "incompressible"
        self._codec, self._sums_codec = (launch.codec(call.dtype, self._numel, spill) for spill in spills)
        self._parts = _parts(call)
        self._sums = torch.empty(self._numel, dtype=call.dtype, device=call.device)
        sent, self._received = (launch.take_frames(self._codec, call.world_size) for _ in range(2))
        launch.encode(self._codec, self._parts, sent, skip=call.rank)
        self._frames = launch.take_frames(self._sums_codec, call.world_size)
        self._payload_work = all_to_all_bytes(self._received.view(-1), sent.view(-1), call.group)
        words, status_work = everyones_words(call, launch)
        frame_bytes = self._codec.frame_bytes + self._sums_codec.frame_bytes
        return Started(words, status_work, self._payload_work, self._on_words, self._finish, self._spec.raw_bytes(call),
                       (frame_bytes + 2 * STATUS_BYTES) * (call.world_size - 1), two_phases=True)

    def _on_words(self, words: list[int]) -> int | None:
        call, launch = self._call, self._launch
        resent = failure = None
        if observe(self._capacity, words):
            resent = self._part_bytes
            _exchange_and_sum(self._parts, self._sums, lambda out, rows: launch.bulk.all_to_all(out, rows).wait())
        else:
            self._payload_work.wait()
            try:
                self._codec.decode_reduce(self._received, self._parts[call.rank], call.rank, self._sums)
            except ZipScapeError as error:          # the others must hear of it, not wait for this rank's sums
                failure = error
        launch.keep(self._parts, self._sums)
        launch.status = torch.full_like(launch.status, 0 if failure is None else FAILED)
        own = self._frames[call.rank]
        if failure is None:
            try:
                launch.encode(self._sums_codec, self._sums.view(1, -1), own.view(1, -1))
            except ZipScapeError as error:
                failure = error
                launch.status = torch.full_like(launch.status, FAILED)
        self._sums_work = launch.bulk.all_gather(self._frames.view(-1), own)
        words, work = everyones_words(call, launch)
        work.wait()
        words = words.tolist()
        if FAILED in words:
            raise failure or CollectiveError(describe("an all_reduce failed on another rank", got="a frame that it cannot decode",
                                                      where=f"rank {words.index(FAILED)} of group {call.group.group_name}"))
        if observe(self._sums_capacity, words):
            resent = (resent or 0) + self._part_bytes
            self._raw = torch.empty(call.world_size, self._numel, dtype=call.dtype, device=call.device)
            launch.bulk.all_gather(self._raw.view(-1).view(torch.uint8), self._sums.view(torch.uint8)).wait()
        return resent

    @property
    def _part_bytes(self) -> int:
        return self._numel * self._call.dtype.itemsize * (self._call.world_size - 1)

    def _finish(self) -> None:
        self._sums_work.wait()
        call, output = self._call, flat(self._call.output)
        whole = call.world_size * self._numel
        rows = output if output.numel() == whole else torch.empty(whole, dtype=call.dtype, device=call.device)
        if self._raw is not None:
            rows.copy_(self._raw.view(-1))
        else:
            self._sums_codec.decode(self._frames, rows.view(call.world_size, -1), skip=call.rank)
            rows.view(call.world_size, -1)[call.rank].copy_(self._sums)
        if rows is not output:
            output.copy_(rows[:output.numel()])
        self._launch.keep(self._sums, *([] if self._raw is None else [self._raw]))


def _exchange_and_sum(parts: torch.Tensor, sums: torch.Tensor, exchange) -> None:
    received = torch.empty_like(parts)
    exchange(received.view(-1).view(torch.uint8), parts.view(-1).view(torch.uint8))
    sum_in_order(received.unbind(0), sums)


def _start(spec: CollectiveSpec, call: Call, launch: Launch) -> Started | str:
    return _Reduction(spec, call, launch).start()


def _uncompressed(call: Call) -> None:
    """The same sums without frames, on the call's own group."""
    sums = torch.empty(_part_numel(call), dtype=call.dtype, device=call.device)
    _exchange_and_sum(_parts(call), sums, lambda out, rows: all_to_all_bytes(out, rows, call.group).wait())
    gathered = torch.empty(call.world_size * sums.numel(), dtype=call.dtype, device=call.device)
    all_gather_bytes(gathered.view(torch.uint8), sums.view(torch.uint8), call.group).wait()
    flat(call.output).copy_(gathered[:call.output.numel()])


def _native(call: Call) -> dist.Work:
    """In place, as torch's."""
    return dist.all_reduce(call.output, op=call.reduce_op or dist.ReduceOp.SUM, group=call.group, async_op=True)


def _make_tensors(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    """One element short of equal parts."""
    data = summable(rank, world_size, max(1, world_size * row_numel - 1), dtype, device)
    return data, data


SPEC = register(CollectiveSpec(
    name="all_reduce", family="all_reduce", reduces=True, row_numel=_part_numel, whole_numel=lambda call: call.input.numel(),
    shapes_match=lambda call: call.output.numel() == call.input.numel() and call.output.dtype == call.dtype,
    raw_bytes=lambda call: 2 * call.input.nbytes * (call.world_size - 1) // call.world_size,
    wire_bytes=lambda call: 2 * frames_bytes(call.dtype, _part_numel(call), call.world_size - 1, FIRST_SPILL),
    native=_native, start=_start, uncompressed=_uncompressed, first_spill=FIRST_SPILL,
    bus_factor=lambda world: 2 * (world - 1) / world, make_tensors=_make_tensors))
