"""all_to_all_single (equal and uneven splits) and all_to_all (lists): every pair of ranks for itself (pairs.py).

A piece that is not zipped travels as its raw bytes in the same exchange, so a rank that has nothing to zip makes a plain native call
and meets the others. Status words, capacities and resends concern the two ends of a zipped pair alone.
"""
import functools
import math

import torch
import torch.distributed as dist

from ds_zipccl.codec.format import STATUS_OFFSET
from ds_zipccl.codec.integrity import for_rank
from ds_zipccl.collectives import pairs
from ds_zipccl.collectives.launch import STATUS_BYTES, Launch, Started, frames_bytes, observe
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import exchange_bytes
from ds_zipccl.collectives.views import as_rows, flat, gaussians
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


class _Exchange:
    """One call in flight."""

    def __init__(self, call: Call, launch: Launch, sent: pairs.Side, received: pairs.Side):
        self._call, self._launch, self._sent, self._received = call, launch, sent, received
        counts_in, counts_out = numels(call)
        self._inputs = _flat_pieces(call, call.inputs, counts_in)
        self._outputs = _flat_pieces(call, call.outputs, counts_out)
        self._resent: dict[int, torch.Tensor] = {}       # by peer: raw bytes that came in place of an overflowed frame

    def start(self) -> Started:
        """Phases: 1. encode what is zipped, run by run; 2. exchange frames and raw pieces; 3. (finish) decode, copy the own."""
        frames, places = self._frames(self._sent, self._inputs)
        for run in self._sent.runs:
            for _, rows, part in self._batches(run, self._inputs, frames[run.first]):
                self._launch.encode(run.codec, rows, part)
        self._arriving, arrivals = self._frames(self._received, self._outputs)
        payload_work = exchange_bytes(arrivals, places, self._call.group)
        words, status_work = self._exchange_words(frames)
        wire_bytes = self._sent.wire_bytes + STATUS_BYTES * sum(self._sent.word_counts)
        return Started(words, status_work, payload_work, self._on_words, self._finish, _raw_bytes(self._call), wire_bytes)

    def _frames(self, side: pairs.Side, pieces) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
        """({first peer of a run: its frames [count, frame_bytes]}, the bytes on the wire of every rank's piece)."""
        buffer = self._launch.take_bytes(side.frame_bytes)
        frames, places, end = {}, [piece.view(torch.uint8) for piece in pieces], 0
        places[self._call.rank] = buffer[:0]
        for run in side.runs:
            start, end = end, end + run.count * run.codec.frame_bytes
            frames[run.first] = buffer[start:end].view(run.count, run.codec.frame_bytes)
            places[run.first:run.peers.stop] = frames[run.first].unbind(0)
        return frames, places

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

    def _exchange_words(self, frames: dict[int, torch.Tensor]) -> tuple[torch.Tensor, dist.Work]:
        """(own words, then the peers'). From the frames' headers: one kernel call encodes for many peers, each of whom needs his own."""
        counts, counts_in = self._sent.word_counts, self._received.word_counts
        words = torch.empty(sum(counts) + sum(counts_in), dtype=torch.int32, device=self._launch.device)
        own, theirs = words.split([sum(counts), sum(counts_in)])
        in_headers = [f[:, STATUS_OFFSET:STATUS_OFFSET + STATUS_BYTES].contiguous().view(-1) for f in frames.values()]
        if in_headers:
            own.copy_((in_headers[0] if len(in_headers) == 1 else torch.cat(in_headers)).view(torch.int32))
        return words, self._launch.side.exchange_words(theirs, own, counts_in, counts)

    def _on_words(self, words: list[int]) -> int | None:
        words = iter(words)
        again = {peer: self._inputs[peer].view(torch.uint8) for peer in _overflowed(self._sent, words)}
        self._resent = {peer: torch.empty_like(self._outputs[peer]) for peer in _overflowed(self._received, words)}
        if not (again or self._resent):
            return None
        self._launch.bulk.exchange_pairs({peer: data.view(torch.uint8) for peer, data in self._resent.items()}, again)
        return sum(data.numel() for data in again.values())

    def _finish(self) -> None:
        rank = self._call.rank
        if self._outputs[rank].data_ptr() != self._inputs[rank].data_ptr():
            self._outputs[rank].copy_(self._inputs[rank])
        for run in self._received.runs:
            leave_out = [peer for peer in run.peers if peer in self._resent]
            for first, rows, part in self._batches(run, self._outputs, self._arriving[run.first], leave_out):
                for_rank(run.codec, first).decode(part, rows)
        for peer, data in self._resent.items():
            self._outputs[peer].copy_(data)
            self._launch.keep(data)


def _overflowed(side: pairs.Side, words) -> list[int]:
    """The peers whose piece must go again; keeps the capacities. Takes one of ``words`` for each zipped piece."""
    return [peer for peer, piece in enumerate(side.pieces) if piece.codec is not None and observe(piece.capacity, [next(words)])]


def _start(spec: CollectiveSpec, call: Call, launch: Launch) -> Started | str:
    counts_in, counts_out = numels(call)

    @functools.cache
    def reason(numel: int) -> str | None:
        why = pairs.reason_for_raw(numel, call.dtype, numel * call.world_size, launch.config)
        return why or launch.slower_pair(call.dtype, numel, call.world_size)

    def side(counts, outgoing: bool) -> pairs.Side:
        return pairs.plan(counts, call.rank, call.dtype.itemsize, reason,
                          lambda peer, numel: launch.pair_capacity(call.op, peer, outgoing, call.dtype, numel, spec.first_spill),
                          functools.cache(lambda numel, spill: launch.codec(call.dtype, numel, spill)))

    launch.state.connect_pairs()
    others = {n for counts in (counts_in, counts_out) for peer, n in enumerate(counts) if peer != call.rank}
    if not all(map(reason, others)):
        sent, received = side(counts_in, True), side(counts_out, False)
        if sent.runs or received.runs:
            return _Exchange(call, launch, sent, received).start()
    launch.side.exchange_no_words(call.world_size)      # others may have pairs to zip
    return reason(max(others)) or "incompressible"


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
