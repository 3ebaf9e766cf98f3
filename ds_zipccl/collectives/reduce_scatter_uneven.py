"""reduce_scatter_uneven: what a reduce-scatter is where the ranks own pieces of different sizes. Same arithmetic as reduce_scatter.py.

No torch collective (``internal``): ZeRO-1/2's seam calls it in place of an all_reduce of which every rank keeps its piece, and large
reduce-scatters are cut into calls of it. ``input``: a tuple of one tensor per rank, of the same sizes on every rank, at least one of
them not empty. ``output``: this rank's sum; it may be this rank's own input.
"""
import functools
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import align, layout
from ds_zipccl.collectives.capacity import Capacity
from ds_zipccl.collectives.launch import STATUS_BYTES, Launch, Started, everyones_words, largest_word, observe
from ds_zipccl.collectives.parts import ranges
from ds_zipccl.collectives.reduce_scatter import FIRST_SPILL, summable
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import exchange_bytes
from ds_zipccl.collectives.views import as_rows, flat
from ds_zipccl.kernels.rank_order import sum_in_order


def _numels(call: Call) -> list[int]:
    return [t.numel() for t in call.inputs]


def _row_numel(call: Call) -> int:
    return max(_numels(call))


class _Reduction:
    """One call in flight. Pieces for the same rank have one size on every rank, so one layout: a piece whose frame would be no smaller
    goes raw, from every rank. All pieces lie one after another in one buffer, raw ones too."""

    def __init__(self, spec: CollectiveSpec, call: Call, launch: Launch, capacity, spill: int):
        self._spec, self._call, self._launch, self._capacity = spec, call, launch, capacity
        codec = functools.cache(lambda numel: launch.codec(call.dtype, numel, spill))
        self._codecs: list[Codec | None] = []
        self._sizes: list[int] = []                      # bytes on the wire of the piece for each rank
        for numel in _numels(call):
            raw = align(numel * call.dtype.itemsize)
            zipped = numel > 0 and codec(numel).frame_bytes < raw
            self._codecs.append(codec(numel) if zipped else None)
            self._sizes.append(codec(numel).frame_bytes if zipped else raw)
        self._resent: list[torch.Tensor] | None = None

    def start(self) -> Started:
        """Phases: 1. encode each peer's piece; 2. exchange; 3. (finish) decode and sum in rank order. The output is written in phase 3
        only, after the own piece is read."""
        call, launch = self._call, self._launch
        sent = launch.take_bytes(sum(self._sizes)).split(self._sizes)
        self._received = launch.take_bytes(call.world_size * self._sizes[call.rank]).view(call.world_size, -1)
        self._encode(sent)
        payload_work = exchange_bytes(list(self._received.unbind(0)), list(sent), call.group)
        words, status_work = everyones_words(call, launch)
        wire_bytes = sum(self._sizes) - self._sizes[call.rank] + STATUS_BYTES * (call.world_size - 1)
        return Started(words, status_work, payload_work, self._on_words, self._finish, self._spec.raw_bytes(call), wire_bytes)

    def _encode(self, places) -> None:
        call, launch = self._call, self._launch
        pieces, codec = [flat(t) for t in call.inputs], self._codecs[0]
        rows = as_rows(pieces) if codec is not None else None
        if rows is not None:
            launch.encode(codec, rows, as_rows(places), skip=call.rank)
            return
        words = torch.zeros(call.world_size, dtype=torch.int32, device=call.device)
        for rank, (piece, place, codec) in enumerate(zip(pieces, places, self._codecs, strict=True)):
            if rank == call.rank:
                continue
            if codec is None:
                place[:piece.nbytes].copy_(piece.view(torch.uint8))
            else:
                launch.status = words[rank:rank + 1]
                launch.encode(codec, piece.view(1, -1), place.view(1, -1))
        launch.status = largest_word(words)

    def _on_words(self, words: list[int]) -> int | None:
        if not observe(self._capacity, words):
            return None
        call, self._resent = self._call, _buffers(self._call)

        def bytes_of(tensors) -> dict[int, torch.Tensor]:
            return {rank: flat(t).view(torch.uint8) for rank, t in enumerate(tensors) if rank != call.rank and t.numel()}

        self._launch.bulk.exchange_pairs(bytes_of(self._resent), bytes_of(call.inputs))
        return self._spec.raw_bytes(call)

    def _finish(self) -> None:
        call, codec = self._call, self._codecs[self._call.rank]
        own = flat(call.inputs[call.rank])
        if not own.numel():
            return
        if self._resent is None and codec is not None:
            codec.decode_reduce(self._received, own, call.rank, flat(call.output))
            return
        rows = self._resent or [place[:own.nbytes].view(call.dtype) for place in self._received.unbind(0)]
        sum_in_order([own if rank == call.rank else row for rank, row in enumerate(rows)], flat(call.output))
        self._launch.keep(*(self._resent or ()))


def _buffers(call: Call) -> list[torch.Tensor]:
    """Room for every rank's piece for this rank."""
    return [torch.empty(call.output.numel(), dtype=call.dtype, device=call.device) for _ in range(call.world_size)]


def _start(spec: CollectiveSpec, call: Call, launch: Launch) -> Started | str:
    capacity = launch.capacity(call.op, call.dtype, _row_numel(call), FIRST_SPILL)
    spill = capacity.next_call()
    return "incompressible" if spill is None else _Reduction(spec, call, launch, capacity, spill).start()


def _uncompressed(call: Call) -> None:
    """The same sum over an exchange of raw bytes on the call's own group."""
    received = _buffers(call)
    exchange_bytes([t.view(torch.uint8) for t in received], [flat(t).view(torch.uint8) for t in call.inputs], call.group).wait()
    if call.output.numel():
        sum_in_order(received, flat(call.output))


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
    return [Call(call.op, output, inputs, call.group) for output, inputs in zip(outputs, zip(*pieces, strict=True), strict=True)]


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


SPEC = register(CollectiveSpec(
    name="reduce_scatter_uneven", family="reduce_scatter", reduces=True, internal=True, row_numel=_row_numel,
    # As if every rank owned as much as the one with most: the busiest link, and the memory there.
    whole_numel=lambda call: _row_numel(call) * call.world_size, native_numel=lambda call: sum(_numels(call)),
    shapes_match=_fits, raw_bytes=_raw_bytes, wire_bytes=_wire_bytes, native=_native, start=_start, uncompressed=_uncompressed, cut=_cut,
    bus_factor=lambda world: (world - 1) / world, first_spill=FIRST_SPILL, make_tensors=_make_tensors))
