"""reduce_scatter_uneven: what a reduce-scatter is where the ranks own pieces of different sizes. Same arithmetic as reduce_scatter.py.

No torch collective (``internal``): ZeRO-1/2's seam calls it in place of an all_reduce of which every rank keeps its piece, and large
reduce-scatters are cut into calls of it. ``input``: a tuple of one tensor per rank, of the same sizes on every rank, at least one of
them not empty. ``output``: this rank's sum; it may be this rank's own input.
"""
import functools
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import align, layout
from ds_zipccl.collectives.capacity import Capacity
from ds_zipccl.collectives.flight import Flight, largest_word
from ds_zipccl.collectives.launch import STATUS_BYTES, Launch
from ds_zipccl.collectives.parts import ranges
from ds_zipccl.collectives.reduce_scatter import FIRST_SPILL, summable, summing
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import Pieces, all_gather_bytes, broadcast_bytes, exchange_bytes
from ds_zipccl.collectives.views import as_rows, divisor, flat
from ds_zipccl.kernels.rank_order import sum_in_order

PAIR_WASTE = 1.1        # of an all-gather that pads a piece: NCCL's ring moves 6 to 25 % more in a second than its send and receive


def _numels(call: Call) -> list[int]:
    return [t.numel() for t in call.inputs]


def _row_numel(call: Call) -> int:
    return max(_numels(call))


class _Exchange:
    """What goes between the ranks, ``sizes[r]`` bytes to rank r: ``places[r]`` for what this rank sends there, ``arriving`` [world size,
    bytes] for what comes; its own row is nobody's."""

    def __init__(self, flight: Flight, sizes: list[int]):
        rank, world = flight.rank, flight.world_size
        self.places = flight.take_bytes(sum(sizes)).split(sizes)
        self.arriving = flight.take_bytes(world * sizes[rank]).view(world, sizes[rank])
        self.wire_bytes = sum(sizes) - sizes[rank]
        self._sent, self._received = Pieces(self.places), Pieces(self.arriving.unbind(0))

    def send(self, channel) -> dist.Work:
        return exchange_bytes(self._received, self._sent, channel)


class _PairExchange:
    """The same of two ranks over what carries a ring faster than sends (``SideChannel.pair_gathers``): a broadcast where one of them owns
    everything, else an all-gather, in rows of the larger piece."""

    def __init__(self, flight: Flight, sizes: list[int]):
        rank, peer, row = flight.rank, 1 - flight.rank, max(sizes)
        self._root = None if min(sizes) else sizes.index(0)                 # who owns nothing sends
        if self._root is None:
            self._whole = flight.take_bytes(2 * row)
            rows = self._whole.view(2, row)
            self._own, self.wire_bytes = rows[rank], row
            self.places, self.arriving = [rows[rank, :sizes[r] if r == peer else 0] for r in range(2)], rows[:, :sizes[rank]]
        else:
            self._own = flight.take_bytes(row)
            self.wire_bytes, nothing = row if rank == self._root else 0, self._own[:0]
            self.places = [self._own if r == peer and rank == self._root else nothing for r in range(2)]
            self.arriving = self._own.expand(2, row) if rank != self._root else nothing.view(2, 0)

    def send(self, channel) -> dist.Work:
        if self._root is None:
            return all_gather_bytes(self._whole, self._own, channel)
        return broadcast_bytes(self._own, self._root, channel)


def _suits_pair(sizes: list[int], launch: Launch) -> bool:
    """Whether ``_PairExchange`` has no more bytes to carry, or not many."""
    return len(sizes) == 2 and (not min(sizes) or max(sizes) <= PAIR_WASTE * min(sizes)) and launch.side.pair_gathers()


class _Reduction(Flight):
    """Pieces for the same rank have one size on every rank, so one layout: a piece whose frame would be no smaller goes raw, from every
    rank.

    Phases: 1. encode each peer's piece; 2. exchange; 3. decode and sum in rank order. The output is written in phase 3 only, after the own
    piece is read.
    """

    def __init__(self, call: Call, launch: Launch, codec: Codec):
        super().__init__(call, launch)
        spill = codec.geometry.spill_per_tile
        codec_of = functools.cache(lambda numel: launch.codec(call.dtype, numel, spill))
        self._codecs: list[Codec | None] = []
        sizes: list[int] = []                            # bytes on the wire of the piece for each rank
        for numel in _numels(call):
            raw = align(numel * call.dtype.itemsize)
            zipped = numel > 0 and codec_of(numel).frame_bytes < raw
            self._codecs.append(codec_of(numel) if zipped else None)
            sizes.append(codec_of(numel).frame_bytes if zipped else raw)
        self._exchange = (_PairExchange if _suits_pair(sizes, launch) else _Exchange)(self, sizes)
        places, self._arriving = self._exchange.places, self._exchange.arriving
        self.words, own = self.everyones_words(), self._codecs[call.rank]
        self._each_word = torch.zeros(call.world_size, dtype=torch.int32, device=self.device)
        self._encoders = [None if codec is None or rank == call.rank else
                          self.encoder(codec, place.view(1, -1), status=self._each_word[rank:rank + 1])
                          for rank, (codec, place) in enumerate(zip(self._codecs, places, strict=True))]
        together = as_rows(places) if self._codecs[0] is not None and places[0].numel() else None
        self._encode_all = None if together is None else self.encoder(self._codecs[0], together, skip=call.rank)
        self._sum = None if own is None else summing(own, self._arriving, call)
        self._raw: list[torch.Tensor] | None = None      # what was sent again
        self.wire_bytes = self._exchange.wire_bytes + STATUS_BYTES * (call.world_size - 1)

    def encode(self, call: Call) -> None:
        self._raw, pieces = None, [flat(t) for t in call.inputs]
        rows = None if self._encode_all is None else as_rows(pieces)
        if rows is not None:
            self._encode_all(rows)
            return
        for rank, (piece, encode) in enumerate(zip(pieces, self._encoders, strict=True)):
            if encode is not None:
                encode(piece)
            elif rank != self.rank:
                self._exchange.places[rank][:piece.nbytes].copy_(piece.view(torch.uint8))
        self.status.copy_(largest_word(self._each_word))

    def send(self, call: Call) -> dist.Work:
        return self._exchange.send(self.channel)

    def resend(self, call: Call) -> None:
        self._raw = _buffers(call)

        def bytes_of(tensors) -> dict[int, torch.Tensor]:
            return {rank: flat(t).view(torch.uint8) for rank, t in enumerate(tensors) if rank != call.rank and t.numel()}

        self.launch.bulk.exchange_pairs(bytes_of(self._raw), bytes_of(call.inputs))

    def finish(self) -> None:
        self.resent = False                              # what was sent again must be summed still
        super().finish()

    def fill(self, call: Call) -> None:
        own = flat(call.inputs[call.rank])
        if not own.numel():
            return
        if self._raw is None and self._sum is not None:
            self._sum(own, call.output)
            return
        rows = self._raw or [place[:own.nbytes].view(call.dtype) for place in self._arriving.unbind(0)]
        sum_in_order([own if rank == call.rank else row for rank, row in enumerate(rows)], flat(call.output), divisor(call))
        self.keep(*(self._raw or ()))

    def release(self) -> None:
        self._raw = None
        super().release()


def _buffers(call: Call) -> list[torch.Tensor]:
    """Room for every rank's piece for this rank."""
    return [torch.empty(call.output.numel(), dtype=call.dtype, device=call.device) for _ in range(call.world_size)]


def _uncompressed(call: Call) -> None:
    """The same sum over an exchange of raw bytes on the call's own group."""
    received = _buffers(call)
    exchange_bytes([t.view(torch.uint8) for t in received], [flat(t).view(torch.uint8) for t in call.inputs], call.group).wait()
    if call.output.numel():
        sum_in_order(received, flat(call.output), divisor(call))


class _OwnPiece(dist.Work):
    """An all_reduce of the whole, of which this rank keeps its piece."""

    def __init__(self, call: Call):
        super().__init__()
        self._call, self._whole = call, torch.cat([flat(t) for t in call.inputs])
        self._work = dist.all_reduce(self._whole, group=call.group, async_op=True)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        flat(self._call.output).copy_(self._whole.split(_numels(self._call))[self._call.rank])
        return True


def _cut(call: Call, part: int) -> list[Call]:
    """Every piece in as many ranges as the largest has parts."""
    count = -(-_row_numel(call) // part)
    pieces = [[piece[start:end] for start, end in ranges(piece.numel(), count)] for piece in map(flat, call.inputs)]
    outputs = [flat(call.output)[start:end] for start, end in ranges(call.output.numel(), count)]
    return [Call(call.op, output, inputs, call.group, call.reduce_op)
            for output, inputs in zip(outputs, zip(*pieces, strict=True), strict=True)]


def _native(call: Call) -> dist.Work:
    return _OwnPiece(call)


def _raw_bytes(call: Call) -> int:
    return call.dtype.itemsize * (sum(_numels(call)) - call.output.numel())


def _wire_bytes(call: Call) -> int:
    spill = Capacity.of(_row_numel(call), call.dtype.itemsize, FIRST_SPILL).spill_per_tile
    sizes = [min(layout(BY_TORCH[call.dtype], n, spill_per_tile=spill).frame_bytes if n else 0, align(n * call.dtype.itemsize))
             for n in _numels(call)]
    return sum(sizes) - sizes[call.rank] + STATUS_BYTES * (call.world_size - 1)


def _fits(call: Call) -> bool:
    return (isinstance(call.input, tuple) and len(call.inputs) == call.world_size and all(t.dtype == call.output.dtype for t in call.inputs)
            and call.output.numel() == call.inputs[call.rank].numel())


def _make_tensors(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    """Equal pieces."""
    data = summable(rank, world_size, world_size * row_numel, dtype, device)
    return torch.empty(row_numel, dtype=dtype, device=device), data.split(row_numel)


def _make_one_owners_tensors(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    """As many elements as of equal pieces, all of them rank 0's."""
    data = summable(rank, world_size, world_size * row_numel, dtype, device)
    return torch.empty(data.numel() if rank == 0 else 0, dtype=dtype, device=device), (data, *[data[:0]] * (world_size - 1))


SPEC = register(CollectiveSpec(
    name="reduce_scatter_uneven", family="reduce_scatter", reduces=True, internal=True, row_numel=_row_numel,
    # As if every rank owned as much as the one with most: the busiest link, and the memory there.
    whole_numel=lambda call: _row_numel(call) * call.world_size, native_numel=lambda call: sum(_numels(call)),
    shapes_match=_fits, raw_bytes=_raw_bytes, wire_bytes=_wire_bytes, native=_native, flight=_Reduction,
    uncompressed=_uncompressed, cut=_cut,
    bus_factor=lambda world: (world - 1) / world, first_spill=FIRST_SPILL, make_tensors=_make_tensors))
#: The same of two ranks of which one owns everything, as it does most buckets of a backward pass: known to the switch, and counted, by
#: itself, since one way of a link takes another time than both.
TO_OWNER = register(replace(SPEC, name="reduce_to_owner", whole_numel=lambda call: sum(_numels(call)), native_numel=None,
                            make_tensors=_make_one_owners_tensors))


def spec_for(inputs: tuple[torch.Tensor, ...]) -> CollectiveSpec:
    """Of pieces for all ranks, in order."""
    return spec_of([t.numel() for t in inputs])


def spec_of(numels: list[int]) -> CollectiveSpec:
    """The same of the pieces' elements."""
    return TO_OWNER if len(numels) == 2 and not all(numels) else SPEC
