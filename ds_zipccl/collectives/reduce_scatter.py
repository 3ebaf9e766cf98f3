"""reduce_scatter_tensor and reduce_scatter (list): a zipped all-to-all, then a local sum in rank order.

Arithmetic (design: the same for any transport): fp32 accumulator that starts as rank 0's value, ranks added in order,
one rounding to nearest even, NaN results canonical. At 2 ranks this equals native bit for bit, NaN payloads aside;
beyond, native's order differs. AVG: the accumulator divided by the world size, then rounded.
"""
import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.collectives.flight import Flight
from ds_zipccl.collectives.launch import STATUS_BYTES, Launch, frames_bytes
from ds_zipccl.collectives.parts import ranges
from ds_zipccl.collectives.plans import Recipe, Rows, Transfer, exchange
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import all_but, all_gather_bytes, all_to_all_bytes, native_reduce_scatter
from ds_zipccl.collectives.views import PERIOD, as_rows, divisor, equal_numels, flat, repeated
from ds_zipccl.kernels.rank_order import sum_in_order

FIRST_SPILL = 1 / 32                  # gradients are mixtures of scales: this much room spares most first calls a resend


def _rows(call: Call) -> torch.Tensor:
    """[world size, n]: what goes to each rank. A copy where a list's tensors do not lie one after another."""
    if not isinstance(call.input, tuple):
        return flat(call.input).view(call.world_size, -1)
    pieces = [flat(t) for t in call.inputs]
    rows = as_rows(pieces)
    return torch.stack(pieces) if rows is None else rows


class RowExchange:
    """Every rank's row for every other one, zipped: frames of what this rank sends, and of what it ``received`` [world size, bytes], in
    which its own row is nobody's. ``rows``: what is to be encoded, ``encode(x)`` does, of ``x`` [world size, n]. ``payload``: for a
    ``Recipe``."""

    def __init__(self, flight: Flight, codec: Codec, numel: int):
        rank, world = flight.rank, flight.world_size
        self.received = flight.take_frames(codec, world)
        self._whole, self._own, self._sent = self.received.view(-1), None, None
        if flight.launch.side.pair_gathers():
            self._own = self.received[rank]
            self.rows = Rows(codec, self.received[rank:rank + 1], offset=(1 - rank) * numel)
            self.payload = Transfer(self._own, self._whole),
        else:
            sent = flight.take_frames(codec, world)
            self._sent, self._pieces = sent.view(-1), all_but(rank, self.received, sent)
            first, end = int(rank == 0), world - (rank == world - 1)            # without the own row, where that is at an end
            self.rows = Rows(codec, sent[first:end], rank if end - first == world else -1, first * numel)
            self.payload = exchange(*reversed(self._pieces))
        self.encode = flight.encoder(codec, self.rows.frames, self.rows.skip, self.rows.offset)

    def send(self, channel) -> dist.Work:
        if self._own is not None:
            return all_gather_bytes(self._whole, self._own, channel)
        return all_to_all_bytes(self._whole, self._sent, channel, self._pieces)


class _Scatter(Flight):
    """Phases: 1. encode each peer's piece; 2. exchange frames; 3. decode and sum in rank order.

    In-place calls (output is this rank's slice of the input) are safe: the output is written in phase 3 only, after the
    own piece is read.
    """

    def __init__(self, call: Call, launch: Launch, codec: Codec):
        super().__init__(call, launch)
        numel = call.output.numel()
        self._exchange = RowExchange(self, codec, numel)
        received, self.words = self._exchange.received, self.everyones_words()
        self._sum = summing(codec, received, call, offset=call.rank * numel)
        self._rows: torch.Tensor | None = None
        if isinstance(call.input, torch.Tensor) and divisor(call) == 1:
            self.recipe = Recipe([self._exchange.rows], [Rows(codec, received, call.rank, call.rank * numel)], sums=True,
                                 payload=self._exchange.payload)
        self.wire_bytes = (codec.frame_bytes + STATUS_BYTES) * (call.world_size - 1)

    def prepare(self, call: Call) -> None:
        self._rows = _rows(call) if isinstance(call.input, tuple) else call.input

    def encode(self, call: Call) -> None:
        self._exchange.encode(self._rows)

    def send(self, call: Call) -> dist.Work:
        return self._exchange.send(self.channel)

    def fill(self, call: Call) -> None:
        self._sum(self._rows, call.output)
        if self._rows is not call.input:
            self.keep(self._rows)

    def resend(self, call: Call) -> None:
        _exchange_and_sum(call, lambda out, rows: self.launch.bulk.all_to_all(out, rows).wait())

    def release(self) -> None:
        self._rows = None
        super().release()


def _exchange_and_sum(call: Call, exchange) -> None:
    rows = _rows(call)
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    exchange(received.view(-1).view(torch.uint8), rows.contiguous().view(-1).view(torch.uint8))
    sum_in_order(received.unbind(0), flat(call.output), divisor(call))


def summing(codec: Codec, received: torch.Tensor, call: Call, offset: int = 0):
    """``Codec.reducer`` for this rank's part of what ``call`` makes of the ranks' pieces. Averages of other than powers of two of ranks
    take memory for all pieces: kernels sum, and do not divide."""
    if divisor(call) == 1:
        return codec.reducer(received, call.rank, offset)
    by, decode, numel, dtype = divisor(call), codec.decoder(received, skip=call.rank), codec.geometry.numel, call.dtype

    def run(x: torch.Tensor, out: torch.Tensor, rank: int = call.rank, world_size: int = call.world_size) -> None:
        rows = torch.empty(world_size, numel, dtype=dtype, device=out.device)
        decode(rows)
        rows[rank].copy_(flat(x)[offset:offset + numel])
        sum_in_order(rows.unbind(0), flat(out), by)

    return run


def _uncompressed(call: Call) -> None:
    """The same sum over an uncompressed exchange on the call's own group: what "always" means where the data does not
    compress."""
    _exchange_and_sum(call, lambda out, rows: all_to_all_bytes(out, rows, call.group).wait())


def _cut(call: Call, part: int) -> list[Call]:
    """The same ranges of every rank's piece, from where they lie."""
    numel, output = call.output.numel(), flat(call.output)
    rows = [flat(t) for t in call.inputs] if isinstance(call.input, tuple) else flat(call.input).view(call.world_size, -1).unbind(0)
    return [Call("reduce_scatter_uneven", output[start:end], tuple(row[start:end] for row in rows), call.group, call.reduce_op)
            for start, end in ranges(numel, -(-numel // part))]


def _op(call: Call):
    return call.reduce_op or dist.ReduceOp.SUM


def summable(rank: int, world_size: int, numel: int, dtype: torch.dtype, device) -> torch.Tensor:
    """Integers so small that every order of summation is exact."""
    generator = torch.Generator("cpu").manual_seed(2000 + rank)
    limit = max(1, 128 // world_size)
    made = torch.randint(-limit, limit + 1, (min(numel, PERIOD),), generator=generator, device="cpu").to(dtype).to(device)
    return repeated(made, numel)


def _make_tensors(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    return torch.empty(row_numel, dtype=dtype, device=device), summable(rank, world_size, world_size * row_numel, dtype, device)


def _make_lists(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    output, data = _make_tensors(rank, world_size, row_numel, dtype, device)
    return output, data.split(row_numel)


def _others(call: Call) -> int:
    return call.world_size - 1


_COMMON = dict(
    family="reduce_scatter", reduces=True, row_numel=lambda call: call.output.numel(),
    whole_numel=lambda call: call.output.numel() * call.world_size,
    raw_bytes=lambda call: call.output.nbytes * _others(call),
    wire_bytes=lambda call: frames_bytes(call.dtype, call.output.numel(), _others(call), FIRST_SPILL),
    flight=_Scatter, uncompressed=_uncompressed, cut=_cut, first_spill=FIRST_SPILL,
    bus_factor=lambda world: (world - 1) / world)

SPEC = register(CollectiveSpec(
    name="reduce_scatter_tensor",
    shapes_match=lambda call: call.input.numel() == call.output.numel() * call.world_size and call.output.dtype == call.input.dtype,
    native=lambda call: native_reduce_scatter(call.output, call.input, _op(call), call.group),
    make_tensors=_make_tensors, **_COMMON))

LIST = register(CollectiveSpec(
    name="reduce_scatter",
    shapes_match=lambda call: equal_numels(call.inputs, call, call.output.numel()) and call.output.dtype == call.dtype,
    native=lambda call: dist.reduce_scatter(call.output, list(call.inputs), op=_op(call), group=call.group, async_op=True),
    make_tensors=_make_lists, **_COMMON))
