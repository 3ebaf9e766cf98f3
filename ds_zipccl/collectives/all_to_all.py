"""all_to_all_single (equal and uneven splits) and all_to_all (lists): every pair of ranks for itself (pairs.py).

A piece that is not zipped travels as its raw bytes in the same exchange, so a rank that has nothing to zip makes a plain native call
and meets the others. Status words, capacities and resends concern the two ends of a zipped pair alone.
"""
import functools
import math

import torch
import torch.distributed as dist

from ds_zipccl.codec.format import STATUS_OFFSET, spill_need_bytes
from ds_zipccl.codec.integrity import for_rank
from ds_zipccl.collectives import pairs
from ds_zipccl.collectives.flight import Flight, observe
from ds_zipccl.collectives.launch import STATUS_BYTES, Kind, Launch, frames_bytes, ready
from ds_zipccl.collectives.plans import Recipe, Rows, Transfer, exchange
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import Pieces, exchange_bytes
from ds_zipccl.collectives.views import as_rows, flat, gaussians
from ds_zipccl.collectives.words import Words
from ds_zipccl.config import ZipcclConfig


def elems_per_rank(t: torch.Tensor, splits) -> tuple[int, ...] | None:
    """Torch's split sizes (rows of dim 0) in elements, as a ``Call`` has them; None where torch splits equally."""
    return tuple(int(rows) * math.prod(t.shape[1:]) for rows in splits) if splits else None


def _numels(call: Call, tensors, splits) -> list[int]:
    if isinstance(call.input, tuple):
        return [t.numel() for t in tensors]
    return list(splits) if splits is not None else [tensors[0].numel() // call.world_size] * call.world_size


def numels(call: Call) -> tuple[list[int], list[int]]:
    """(elements that go to each rank, elements that come from each rank)."""
    return _numels(call, call.inputs, call.input_splits), _numels(call, call.outputs, call.output_splits)


def _flat_pieces(call: Call, tensors, counts) -> list[torch.Tensor]:
    return [flat(t) for t in tensors] if isinstance(call.input, tuple) else list(flat(tensors[0]).split(counts))


class _Exchange(Flight):
    """Phases: 1. encode what is zipped, run by run; 2. exchange frames and raw pieces, meanwhile copy the own piece; 3. decode.

    Where both are single tensors and nothing goes raw, kernels are bound to the tensors' parts, and the bytes on the wire lie always in the
    same place; otherwise both are found for each call.
    """

    def __init__(self, call: Call, launch: Launch, sent: pairs.Side, received: pairs.Side):
        super().__init__(call, launch)
        self._sent, self._received, self._resent = sent, received, {}       # by peer: raw bytes in place of an overflowed frame
        self._whole = self._whole_of_two(sent, received)
        if self._whole is None:
            self._frames, self._arriving = self._buffers(sent), self._buffers(received)
        else:
            peer, rows = 1 - self.rank, self._whole.view(2, -1)
            self._frames, self._arriving = {peer: rows[self.rank:self.rank + 1]}, {peer: rows[peer:peer + 1]}
        self._classes = [[(peer, piece.capacity) for peer, piece in enumerate(side.pieces) if piece.codec is not None]
                         for side in (sent, received)]
        counts, counts_in = sent.word_counts, received.word_counts
        self.is_for_all = self._whole is not None           # each of the two has a word for the other
        self.words = self.everyones_words() if self.is_for_all else Words(
            torch.empty(sum(counts) + sum(counts_in), dtype=torch.int32, device=self.device), launch.state)
        own, theirs = self.words.data.split([sum(counts), sum(counts_in)])
        self._word_exchange = theirs, own, counts_in, counts
        # One kernel call encodes for many peers, each of whom needs his own word: from the frames' headers. A single one is the call's.
        self._headers = []
        if sum(counts) == 1:
            self.status = self.status if self.is_for_all else own
        else:
            headers = [f.view(torch.int32)[:, STATUS_OFFSET // STATUS_BYTES] for f in self._frames.values()]
            self._headers = list(zip(own.split([len(h) for h in headers]), headers, strict=True))
        self.wire_bytes, self.raw_bytes = sent.wire_bytes + STATUS_BYTES * sum(counts), _raw_bytes(call)
        self._bind(call)

    def _whole_of_two(self, sent: pairs.Side, received: pairs.Side) -> torch.Tensor | None:
        """Where two ranks exchange frames of one size by an all-gather: its memory."""
        frames = [run.codec.frame_bytes for side in (sent, received) for run in side.runs]
        if self.world_size != 2 or len(frames) < 2 or frames[0] != frames[1] or not self.launch.side.pair_gathers():
            return None
        return self.take_bytes(sum(frames))

    def _buffers(self, side: pairs.Side) -> dict[int, torch.Tensor]:
        """{first peer of a run: its frames [count, frame_bytes]}."""
        buffer, frames, end = self.take_bytes(side.frame_bytes), {}, 0
        for run in side.runs:
            start, end = end, end + run.count * run.codec.frame_bytes
            frames[run.first] = buffer[start:end].view(run.count, run.codec.frame_bytes)
        return frames

    def _bind(self, call: Call) -> None:
        everything = all(piece.codec is not None or piece.numel == 0 or peer == self.rank
                         for side in (self._sent, self._received) for peer, piece in enumerate(side.pieces))
        self._bound = isinstance(call.input, torch.Tensor) and everything
        if self._bound or self._whole is not None:
            nothing = [torch.empty(0, dtype=torch.uint8, device=self.device)] * self.world_size
            self._places, self._arrivals = (Pieces(self._wire(side, frames, nothing)) for side, frames in (
                (self._sent, self._frames), (self._received, self._arriving)))
        if not self._bound:
            return

        def offset(side: pairs.Side, peer: int) -> int:
            return sum(piece.numel for piece in side.pieces[:peer])

        self._encoders = [self.encoder(run.codec, self._frames[run.first], offset=offset(self._sent, run.first)) for run in self._sent.runs]
        self._decoders = [for_rank(run.codec, run.first).decoder(self._arriving[run.first], offset=offset(self._received, run.first))
                          for run in self._received.runs]
        self._own = offset(self._sent, self.rank), offset(self._received, self.rank), self._sent.pieces[self.rank].numel
        self.recipe = Recipe(
            [Rows(run.codec, self._frames[run.first], offset=offset(self._sent, run.first)) for run in self._sent.runs],
            [Rows(run.codec, self._arriving[run.first], offset=offset(self._received, run.first)) for run in self._received.runs],
            copy=self._own, payload=exchange(self._places, self._arrivals) if self._whole is None else (
                Transfer(self._places[1 - self.rank], self._whole),))

    def _wire(self, side: pairs.Side, frames: dict[int, torch.Tensor], pieces) -> list[torch.Tensor]:
        """The bytes on the wire of every rank's piece."""
        places = [piece.view(torch.uint8) for piece in pieces]
        places[self.rank] = places[self.rank][:0]
        for run in side.runs:
            places[run.first:run.peers.stop] = frames[run.first].unbind(0)
        return places

    def prepare(self, call: Call) -> None:
        self._resent = {}
        self._needs = [{peer: capacity.launched() for peer, capacity in side} for side in self._classes]

    def encode(self, call: Call) -> None:
        if self._bound:
            for encode in self._encoders:
                encode(call.input)
        else:
            inputs = self._inputs()
            for run in self._sent.runs:
                for _, rows, part in self._batches(run, inputs, self._frames[run.first]):
                    self.encoder(run.codec, part)(rows)

    def send(self, call: Call) -> dist.Work:
        if self._whole is not None:
            return exchange_bytes(self._arrivals, self._places, self.channel, self._whole)
        if self._bound:
            return exchange_bytes(self._arrivals, self._places, self.channel)
        return exchange_bytes(self._wire(self._received, self._arriving, self._outputs()),
                              self._wire(self._sent, self._frames, self._inputs()), self.channel)

    def beside(self, call: Call) -> None:
        if not self._bound:
            self.copy_own(self._outputs()[self.rank], 0, self._inputs()[self.rank])
        elif self._own[2]:
            start, place, numel = self._own
            self.copy_own(call.output, place, call.input.as_strided((numel,), (1,), call.input.storage_offset() + start))

    def _inputs(self) -> list[torch.Tensor]:
        return _flat_pieces(self.call, self.call.inputs, numels(self.call)[0])

    def _outputs(self) -> list[torch.Tensor]:
        return _flat_pieces(self.call, self.call.outputs, numels(self.call)[1])

    @staticmethod
    def _batches(run: pairs.Run, pieces, frames: torch.Tensor, leave_out=()):
        """(first peer, rows, frames) for as few kernel calls as the memory allows."""
        rows = None if leave_out else as_rows(pieces[run.first:run.peers.stop])
        if rows is not None:
            yield run.first, rows, frames
            return
        for i, peer in enumerate(run.peers):
            if peer not in leave_out:
                yield peer, pieces[peer].view(1, -1), frames[i:i + 1]

    def send_words(self) -> None:
        """To each peer with whom this rank has a zipped piece, and from it: (own words, then the peers')."""
        if self.is_for_all:
            return super().send_words()
        for own, headers in self._headers:
            own.copy_(headers)
        self.words.exchange(self.launch.side.exchange_words, *self._word_exchange)

    def post_words(self) -> tuple[int, int] | None:
        if self.is_for_all:
            return super().post_words()
        _, _, counts_in, counts = self._word_exchange
        return None if self._headers else self.launch.side.post_to_one(self.words, counts_in, counts)

    def look(self, words: list[int]) -> None:
        self._overflows(words)

    def _overflows(self, words: list[int]) -> tuple[list[int], list[int]]:
        """Peers: to which frames overflowed, and from which. Fills in what they needed."""
        words = iter(words if not self.is_for_all or self.rank == 0 else reversed(words))           # the own one first
        return tuple([peer for peer, need in needs.items() if observe(need, [next(words)])] for needs in self._needs)

    def settle(self, words: list[int]) -> int | None:
        again, missing = self._overflows(words)
        if not (again or missing):
            return None
        self.after_early()
        inputs, outputs = self._inputs(), self._outputs()
        again = {peer: inputs[peer].view(torch.uint8) for peer in again}
        self._resent = {peer: torch.empty_like(outputs[peer]) for peer in missing}
        self.launch.bulk.exchange_pairs({peer: data.view(torch.uint8) for peer, data in self._resent.items()}, again)
        return sum(data.numel() for data in again.values())

    def note(self, words) -> None:
        for needs, word in zip(self._needs, (words[self.rank], words[1 - self.rank]), strict=True):
            for need in needs.values():
                need.num_bytes = spill_need_bytes(word)

    def fill(self, call: Call) -> None:
        if self._bound and not self._resent:
            for decode in self._decoders:
                decode(call.output)
            return
        outputs = self._outputs()
        for run in self._received.runs:
            leave_out = [peer for peer in run.peers if peer in self._resent]
            for first, rows, part in self._batches(run, outputs, self._arriving[run.first], leave_out):
                for_rank(run.codec, first).decode(part, rows)
        for peer, data in self._resent.items():
            outputs[peer].copy_(data)
            self.keep(data)

    def release(self) -> None:
        self._resent = {}
        super().release()


class _Rooms:
    """Which pieces of calls of one kind may be zipped, and their classes, which a group never forgets; every call asks them."""

    def __init__(self, spec: CollectiveSpec, call: Call, launch: Launch):
        self.counts, self._launch, self._dtype, self._world_size = numels(call), launch, call.dtype, call.world_size
        self._costs, self._reasons = None, None
        others = {n for side in self.counts for peer, n in enumerate(side) if peer != call.rank}
        self._raw = {n: pairs.reason_for_raw(n, call.dtype, n * call.world_size, launch.config) for n in others}
        self._classes = [[None if peer == call.rank or self._raw[n] else
                          (n, launch.pair_capacity(call.op, peer, outgoing, call.dtype, n, spec.first_spill))
                          for peer, n in enumerate(side)] for side, outgoing in zip(self.counts, (True, False), strict=True)]

    def reasons(self) -> dict[int, str | None]:
        """Why pieces of so many elements go raw in this call: found once for the switch's present costs."""
        costs = self._launch.state.measured("pair", self._dtype).costs
        if self._reasons is None or costs is not self._costs:
            self._costs = costs
            self._reasons = {n: why or self._launch.slower_pair(self._dtype, n, self._world_size) for n, why in self._raw.items()}
        return self._reasons

    def ask(self, reasons: dict[int, str | None]) -> list[list[tuple | None]]:
        """Per side what ``pairs.plan`` wants to know; counts a call of every class that is used."""
        return [[None if piece is None or reasons[piece[0]] else (piece[1], self._launch.up_to_date(piece[1]).next_call())
                 for piece in side] for side in self._classes]


def _start(spec: CollectiveSpec, call: Call, launch: Launch, kind: Kind | None) -> Flight | str:
    rooms = None if kind is None else kind.memo
    if rooms is None:
        rooms = _Rooms(spec, call, launch)
        if kind is not None:
            kind.memo = rooms
    launch.state.connect()
    reasons = rooms.reasons()
    if not all(reasons.values()):
        found = rooms.ask(reasons)

        def make() -> Flight | None:
            codec = functools.cache(lambda numel, spill: launch.codec(call.dtype, numel, spill))
            sent, received = (pairs.plan(counts, call.rank, call.dtype.itemsize, side, codec)
                              for counts, side in zip(rooms.counts, found, strict=True))
            return _Exchange(call, launch, sent, received) if sent.runs or received.runs else None

        flight = ready(kind, launch, tuple([room and room[1] for side in found for room in side]), make)
        if flight is not None:
            flight.rooms = tuple([room for side in found for room in side if room])
            flight.begin(call)
            return flight
    launch.side.exchange_no_words(call.world_size)      # others may have pairs to zip
    if not launch.trial:
        launch.state.count_call()
    return reasons[max(reasons)] or "incompressible"


def _splits_fit(t: torch.Tensor, splits, world_size: int) -> bool:
    if splits is None:
        return t.dim() > 0 and t.shape[0] % world_size == 0
    return t.dim() > 0 and len(splits) == world_size and min(splits) >= 0 and sum(splits) == t.numel()


def _single_matches(call: Call) -> bool:
    if call.output.dtype != call.input.dtype or not (_splits_fit(call.input, call.input_splits, call.world_size)
                                                     and _splits_fit(call.output, call.output_splits, call.world_size)):
        return False
    counts_in, counts_out = numels(call)
    return counts_in[call.rank] == counts_out[call.rank]


def _list_matches(call: Call) -> bool:
    """Sizes may differ on GPUs alone: gloo's list form refuses that."""
    tensors = (*call.inputs, *call.outputs)
    return (len(call.inputs) == len(call.outputs) == call.world_size and all(t.dtype == call.dtype for t in tensors)
            and call.inputs[call.rank].numel() == call.outputs[call.rank].numel()
            and (call.device.type == "cuda" or len({t.numel() for t in tensors}) == 1))


def _raw_bytes(call: Call) -> int:
    return call.dtype.itemsize * sum(n for peer, n in enumerate(numels(call)[0]) if peer != call.rank)


def _wire_bytes(call: Call) -> int:
    """With ``min_bytes`` 0."""
    config = ZipcclConfig(min_bytes=0, max_workspace_bytes=1 << 44)
    total = 0
    for peer, numel in enumerate(numels(call)[0]):
        if peer != call.rank:
            raw = pairs.reason_for_raw(numel, call.dtype, numel * call.world_size, config)
            total += numel * call.dtype.itemsize if raw else frames_bytes(call.dtype, numel, 1)
    return total


def _row_numel(call: Call) -> int:
    counts = [n for side in numels(call) for peer, n in enumerate(side) if peer != call.rank]
    return max(counts, default=0)


def _native_single(call: Call) -> dist.Work:
    def rows(t, splits):
        width = math.prod(t.shape[1:])
        return [n // width if width else 0 for n in splits] if splits is not None else None

    return dist.all_to_all_single(call.output, call.input, rows(call.output, call.output_splits), rows(call.input, call.input_splits),
                                  group=call.group, async_op=True)


def _native_list(call: Call) -> dist.Work:
    return dist.all_to_all(list(call.outputs), list(call.inputs), group=call.group, async_op=True)


def _make_tensors(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    data = gaussians(3000 + rank, world_size * row_numel, dtype, device)
    return torch.empty_like(data), data


def _make_lists(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    output, data = _make_tensors(rank, world_size, row_numel, dtype, device)
    return output.split(row_numel), data.split(row_numel)


_COMMON = dict(family="all_to_all", reduces=False, row_numel=_row_numel, raw_bytes=_raw_bytes, wire_bytes=_wire_bytes, start=_start,
               pairwise=True, whole_numel=lambda call: sum(numels(call)[0]), bus_factor=lambda world: (world - 1) / world)

SINGLE = register(CollectiveSpec(name="all_to_all_single", shapes_match=_single_matches, native=_native_single, make_tensors=_make_tensors,
                                 **_COMMON))
LIST = register(CollectiveSpec(name="all_to_all", shapes_match=_list_matches, native=_native_list, make_tensors=_make_lists, **_COMMON))
