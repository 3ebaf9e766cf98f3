"""broadcast: the root encodes once, its frame is broadcast, the others decode."""
import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.integrity import for_rank
from ds_zipccl.collectives.flight import Flight
from ds_zipccl.collectives.launch import STATUS_BYTES, Launch, frames_bytes
from ds_zipccl.collectives.plans import Recipe, Rows
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import broadcast_bytes
from ds_zipccl.collectives.views import flat, gaussians
from ds_zipccl.collectives.words import Words


class _Broadcast(Flight):
    """Phases: 1. the root encodes; 2. broadcast of the frame; 3. the others decode. The root's tensor is never written."""
    is_for_all = False

    def __init__(self, call: Call, launch: Launch, codec: Codec):
        super().__init__(call, launch)
        frame, self._root, self._is_root = self.take_frames(codec, 1), call.root, call.rank == call.root
        self._bytes = frame.view(-1)
        self.words = Words(self.status, launch.state)
        self._encode = self.encoder(codec, frame)
        self._decode = for_rank(codec, call.root).decoder(frame)
        rows = [Rows(codec, frame)]
        self.recipe = Recipe(rows if self._is_root else [], [] if self._is_root else rows, anywhere=True)
        self.wire_bytes = (codec.frame_bytes + STATUS_BYTES) * self._is_root

    def encode(self, call: Call) -> None:
        if self._is_root:
            self._encode(call.input)

    def send(self, call: Call) -> dist.Work:
        return broadcast_bytes(self._bytes, self._root, self.channel)

    def can_fill_early(self, call: Call) -> bool:
        return True

    def send_words(self) -> None:
        """The root's alone: nobody else has one, and the root must not wait for the others."""
        self.words.exchange(self.launch.side.broadcast_word, self.status, self._root)

    def post_words(self) -> tuple[int, int] | None:
        return self.launch.side.post_from(self.words, self._root)

    def fill(self, call: Call) -> None:
        if not self._is_root:
            self._decode(call.output)

    def resend(self, call: Call) -> None:
        self.launch.bulk.broadcast(flat(call.output).view(torch.uint8), call.root).wait()


def _native(call: Call) -> dist.Work:
    return dist.broadcast(call.output, group=call.group, async_op=True, group_src=call.root)


def _is_root(call: Call) -> int:
    return int(call.rank == call.root)


def _make_tensors(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    data = gaussians(4000 + rank, row_numel, dtype, device)
    return data, data


SPEC = register(CollectiveSpec(
    name="broadcast", family="broadcast", reduces=False,
    row_numel=lambda call: call.input.numel(), whole_numel=lambda call: call.input.numel(),
    shapes_match=lambda call: call.root is not None and 0 <= call.root < call.world_size,
    raw_bytes=lambda call: call.input.nbytes * _is_root(call),
    wire_bytes=lambda call: frames_bytes(call.dtype, call.input.numel(), _is_root(call)),
    native=_native, flight=_Broadcast,
    bus_factor=lambda world: 1.0, make_tensors=_make_tensors, rooted=True))
