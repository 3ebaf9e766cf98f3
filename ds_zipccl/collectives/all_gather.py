"""all_gather_into_tensor and all_gather (list): every rank encodes its own piece once; all gather frames and decode the others'
pieces."""
import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.integrity import for_rank
from ds_zipccl.collectives.flight import Flight
from ds_zipccl.collectives.launch import STATUS_BYTES, Launch, frames_bytes
from ds_zipccl.collectives.parts import ranges
from ds_zipccl.collectives.plans import Recipe, Rows, Transfer
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import all_gather_bytes, native_all_gather
from ds_zipccl.collectives.views import as_rows, equal_numels, flat, gaussians


def _rows(call: Call) -> list[torch.Tensor]:
    """The place of every rank's piece in the output."""
    if isinstance(call.output, tuple):
        return [flat(t) for t in call.outputs]
    return list(flat(call.output).view(call.world_size, -1).unbind(0))


class _Gather(Flight):
    """Phases: 1. encode the own piece into its place among the frames; 2. gather frames, meanwhile copy the own piece; 3. decode the
    others' rows.

    In-place gathers (input is this rank's slice of the output) are safe: the others' rows are written in phase 3 only.
    """

    def __init__(self, call: Call, launch: Launch, codec: Codec):
        super().__init__(call, launch)
        frames, self._numel = self.take_frames(codec, call.world_size), call.input.numel()
        self._whole, self._own = frames.view(-1), frames[call.rank]
        self.words = self.everyones_words()
        self._encode = self.encoder(codec, frames[call.rank:call.rank + 1])
        self._decode = codec.decoder(frames, skip=call.rank)
        self._decode_row = {} if isinstance(call.output, torch.Tensor) else {
            rank: for_rank(codec, rank).decoder(frames[rank:rank + 1]) for rank in range(call.world_size) if rank != call.rank}
        if isinstance(call.output, torch.Tensor):
            self.recipe = Recipe([Rows(codec, frames[call.rank:call.rank + 1])], [Rows(codec, frames, call.rank)],
                                 copy=(0, call.rank * self._numel, self._numel), own_in_place=True,
                                 payload=(Transfer(self._own, self._whole),))
        self.wire_bytes = (codec.frame_bytes + STATUS_BYTES) * (call.world_size - 1)

    def encode(self, call: Call) -> None:
        self._encode(call.input)

    def send(self, call: Call) -> dist.Work:
        return all_gather_bytes(self._whole, self._own, self.channel)

    def _own_place(self, call: Call) -> tuple[torch.Tensor, int]:
        """(tensor, its element at which this rank's piece begins)"""
        if isinstance(call.output, tuple):
            return call.output[self.rank], 0
        return call.output, self.rank * self._numel

    def beside(self, call: Call) -> None:
        self.copy_own(*self._own_place(call), call.input)

    def can_fill_early(self, call: Call) -> bool:
        return self.lies_there(*self._own_place(call), call.input) or super().can_fill_early(call)

    def fill(self, call: Call) -> None:
        if not self._decode_row:
            self._decode(call.output)
            return
        rows = _rows(call)
        whole = as_rows(rows)
        if whole is not None:
            self._decode(whole)
        else:
            for rank, decode in self._decode_row.items():
                decode(rows[rank])

    def resend(self, call: Call) -> None:
        gathered = torch.empty(call.world_size, call.input.numel(), dtype=call.dtype, device=call.device)
        self.launch.bulk.all_gather(gathered.view(-1).view(torch.uint8), flat(call.input).view(torch.uint8)).wait()
        for row, data in zip(_rows(call), gathered, strict=True):
            row.copy_(data)


def _cut(call: Call, part: int) -> list[Call]:
    """Lists of the same ranges of all ranks' pieces. In place is safe: a part's output does not overlap what later parts send."""
    rows, own = _rows(call), flat(call.input)
    return [Call(LIST.name, tuple(row[start:end] for row in rows), own[start:end], call.group)
            for start, end in ranges(own.numel(), -(-own.numel() // part))]


def _make_tensors(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    return torch.empty(world_size * row_numel, dtype=dtype, device=device), gaussians(1000 + rank, row_numel, dtype, device)


def _make_lists(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    output, data = _make_tensors(rank, world_size, row_numel, dtype, device)
    return output.split(row_numel), data


def _others(call: Call) -> int:
    return call.world_size - 1


_COMMON = dict(
    family="all_gather", reduces=False, row_numel=lambda call: call.input.numel(),
    whole_numel=lambda call: call.input.numel() * call.world_size,
    raw_bytes=lambda call: call.input.nbytes * _others(call),
    wire_bytes=lambda call: frames_bytes(call.dtype, call.input.numel(), _others(call)),
    flight=_Gather, cut=_cut, bus_factor=lambda world: (world - 1) / world)

SPEC = register(CollectiveSpec(
    name="all_gather_into_tensor",
    shapes_match=lambda call: call.output.numel() == call.input.numel() * call.world_size and call.output.dtype == call.input.dtype,
    native=lambda call: native_all_gather(call.output, call.input, call.group),
    make_tensors=_make_tensors, **_COMMON))

LIST = register(CollectiveSpec(
    name="all_gather",
    shapes_match=lambda call: equal_numels(call.outputs, call, call.input.numel()),
    native=lambda call: dist.all_gather(list(call.outputs), call.input, group=call.group, async_op=True),
    make_tensors=_make_lists, **_COMMON))
