"""all_reduce: a reduce-scatter of equal parts, then an all-gather of the sums. In place, as torch's is.

Arithmetic: that of reduce_scatter.py, so every rank has the same bits. The tensor is cut into world-size parts of ceil(n / world size)
elements; where that does not come out even, the last parts are padded with zeros in scratch memory.
"""
import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.collectives import streams
from ds_zipccl.collectives.flight import NO_MAIL, Flight, observe
from ds_zipccl.collectives.launch import STATUS_BYTES, Launch, frames_bytes
from ds_zipccl.collectives.plans import Plan, Recipe, Rows
from ds_zipccl.collectives.reduce_scatter import FIRST_SPILL, RowExchange, summable, summing
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import all_gather_bytes, all_to_all_bytes
from ds_zipccl.collectives.views import divisor, flat
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


class _Reduction(Flight):
    """Phases: 1. encode each peer's part, exchange on the call's group; when the status words are known, in launch order: 2. sum the own
    part, encode the sums, gather them over the bulk channel, where nothing of it can mix with other calls; wait for that phase's status
    words, send again what overflowed; 3. decode the sums into the output, of which only the own part was written before.
    """
    two_phases = True

    def __init__(self, call: Call, launch: Launch, codec: Codec, sums_codec: Codec):
        super().__init__(call, launch)
        self._numel = numel = _part_numel(call)
        itemsize, world_size = call.dtype.itemsize, call.world_size
        self._part_bytes = numel * itemsize * (world_size - 1)
        self._exchange, sums_frames = RowExchange(self, codec, numel), self.take_frames(sums_codec, world_size)
        self._sums = self.take_bytes(numel * itemsize).view(call.dtype)
        self._padded = None if call.input.numel() == world_size * numel else self.take_bytes(world_size * numel * itemsize).view(call.dtype)
        self._frames, self._own = sums_frames.view(-1), sums_frames[call.rank]
        self.words, self._sums_words, self._sums_status = self.everyones_words(), self.everyones_words(), torch.empty_like(self.status)
        self._sum = summing(codec, self._exchange.received, call, offset=call.rank * numel)
        self._encode_sums = self.encoder(sums_codec, sums_frames[call.rank:call.rank + 1], status=self._sums_status, phase="sums")
        self._decode_sums = sums_codec.decoder(sums_frames, skip=call.rank)
        self._parts = self._sums_work = self._raw = self._failure = None
        if self._padded is None:
            self.recipe = Recipe([self._exchange.rows], None, anywhere=True, payload=self._exchange.payload)
            own = Rows(sums_codec, sums_frames[call.rank:call.rank + 1])
            self._sums_recipe = Recipe([own], [Rows(sums_codec, sums_frames, call.rank)], copy=(0, call.rank * numel, numel))
        self._sums_plan: Plan | None = None
        self.wire_bytes = (codec.frame_bytes + sums_codec.frame_bytes + 2 * STATUS_BYTES) * (world_size - 1)

    def prepare(self, call: Call) -> None:
        self._parts, self._raw = self._pad(call), None

    def encode(self, call: Call) -> None:
        self._exchange.encode(self._parts)

    def send(self, call: Call) -> dist.Work:
        return self._exchange.send(self.channel)

    def _pad(self, call: Call) -> torch.Tensor:
        """The input, padded with zeros; no copy where it comes out even."""
        if self._padded is None:
            return call.input
        numel = call.input.numel()
        self._padded[:numel].copy_(flat(call.input))
        self._padded[numel:].zero_()
        return self._padded

    def can_fill_early(self, call: Call) -> bool:
        return True                                 # not the output, see ``queue_early``

    def queue_early(self, call: Call) -> None:
        """The second phase. The output, which is the input, waits until the first is known to have gone well."""
        self._sum(self._parts, self._sums)
        if not self._goes_by_plan:
            self._gather_sums()
            return
        plan, launch = self._sums_plan, self.launch
        if plan is None:
            plan = self._sums_plan = Plan(self._sums_recipe, launch.launcher, self._sums, call.output, self._sums_status,
                                          launch.state.decode_stream, self.filled)
        posted = launch.side.post_to_all(self._sums_words)
        plan.begin(self._sums.data_ptr(), *(posted or NO_MAIL))
        self._sums_work = launch.bulk.all_gather(self._frames, self._own)
        if posted is None:
            self._tell_of_sums()

    def _gather_sums(self, failure: ZipScapeError | None = None) -> None:
        """``failure``: why there are none; the others must hear of it, not wait for this rank's."""
        if failure is None:
            try:
                self._encode_sums(self._sums)
            except ZipScapeError as error:
                failure = error
        if failure is not None:
            self._sums_status.fill_(FAILED)
        self._failure = failure
        self._sums_work = self.launch.bulk.all_gather(self._frames, self._own)
        self._tell_of_sums()

    def _tell_of_sums(self) -> None:
        self._sums_words.exchange(self.launch.side.gather_words, self._sums_status)
        self._sums_words.fetch()

    def settle(self, words: list[int]) -> int | None:
        call, launch = self.call, self.launch
        sent_again = None
        if observe(self.needs[0], words):
            sent_again = self._part_bytes
            self.after_early()
            self.is_early = False
            _exchange_and_sum(flat(self._parts).view(call.world_size, -1), self._sums, divisor(call),
                              lambda out, rows: launch.bulk.all_to_all(out, rows).wait())
            self._gather_sums()
        elif not self.is_early:
            self.payload_work.wait()
            failure = None
            try:
                self._sum(self._parts, self._sums)
            except ZipScapeError as error:
                failure = error
            self._gather_sums(failure)
        by_plan = self.is_early and self._goes_by_plan
        with streams.On(launch.state.decode_stream if self.is_early else None):
            if by_plan:
                self._fill_by_plan(call)
            else:
                flat(self._rows(call))[self.rank * self._numel:(self.rank + 1) * self._numel].copy_(self._sums)
            if self.is_early and not by_plan:
                self._fill_from_sums(call)
                self.filled.set()
        self._sums_words.wait()
        words = self._sums_words.tolist()
        if FAILED in words:
            raise self._failure or CollectiveError(describe(
                "an all_reduce failed on another rank", got="a frame that it cannot decode",
                where=f"rank {words.index(FAILED)} of group {call.group.group_name}"))
        if observe(self.needs[1], words):
            sent_again = (sent_again or 0) + self._part_bytes
            self.after_early()
            self._raw = torch.empty(call.world_size, self._numel, dtype=call.dtype, device=call.device)
            launch.bulk.all_gather(self._raw.view(-1).view(torch.uint8), self._sums.view(torch.uint8)).wait()
        return sent_again

    def fill(self, call: Call) -> None:
        if self._raw is None:
            self._fill_from_sums(call)
            return
        flat(call.output).copy_(self._raw.view(-1)[:call.output.numel()])
        self.keep(self._raw)

    def _fill_from_sums(self, call: Call) -> None:
        rows = self._rows(call)
        self._sums_work.wait()
        self._decode_sums(rows)
        if rows is not call.output:
            flat(call.output).copy_(rows[:call.output.numel()])

    def _fill_by_plan(self, call: Call) -> None:
        """All of it, marked as ``filled``."""
        sums, out = self._sums.data_ptr(), call.output.data_ptr()
        self._sums_plan.beside(sums, out)
        self._sums_work.wait()
        self._sums_plan.end(sums, out)

    def _rows(self, call: Call) -> torch.Tensor:
        """Where all sums come: the output, where they come out even. The parts that lie there are summed by then."""
        return call.output if self._padded is None else self._padded

    def release(self) -> None:
        self._parts = self._sums_work = self._raw = self._failure = None
        super().release()


def _exchange_and_sum(parts: torch.Tensor, sums: torch.Tensor, by: int, exchange) -> None:
    received = torch.empty_like(parts)
    exchange(received.view(-1).view(torch.uint8), parts.view(-1).view(torch.uint8))
    sum_in_order(received.unbind(0), sums, by)


def _uncompressed(call: Call) -> None:
    """The same sums without frames, on the call's own group."""
    sums = torch.empty(_part_numel(call), dtype=call.dtype, device=call.device)
    _exchange_and_sum(_parts(call), sums, divisor(call), lambda out, rows: all_to_all_bytes(out, rows, call.group).wait())
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
    native=_native, flight=_Reduction, classes=("all_reduce", "all_reduce, sums"), uncompressed=_uncompressed, first_spill=FIRST_SPILL,
    bus_factor=lambda world: 2 * (world - 1) / world, make_tensors=_make_tensors))
