"""broadcast: the root encodes once, its frame is broadcast, the others decode."""
import torch
import torch.distributed as dist

from ds_zipccl.codec.integrity import for_rank
from ds_zipccl.collectives.launch import frames_bytes
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import broadcast_bytes
from ds_zipccl.collectives.views import flat, gaussians


def _zipped(call: Call, launch, codec):
    """Phases: 1. the root encodes; 2. broadcast of the frame; 3. (finish) the others decode. The root's tensor is never written."""
    frame = launch.take_frames(codec, 1)
    if call.rank == call.root:
        launch.encode(codec, flat(call.input).view(1, -1), frame)
    work = broadcast_bytes(frame.view(-1), call.root, call.group)

    def finish():
        if call.rank != call.root:
            for_rank(codec, call.root).decode(frame, flat(call.output).view(1, -1))

    return work, finish


def _gather_words(call: Call, launch) -> tuple[torch.Tensor, dist.Work]:
    """The root's alone: nobody else has one, and the root must not wait for the others."""
    return launch.status, launch.side.broadcast(launch.status, call.root)


def _resend(call: Call, launch) -> None:
    launch.bulk.broadcast(flat(call.output).view(torch.uint8), call.root).wait()


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
    raw_bytes=lambda call: call.input.nbytes * _is_root(call), frames_sent=_is_root,
    wire_bytes=lambda call: frames_bytes(call.dtype, call.input.numel(), _is_root(call)),
    native=_native, zipped=_zipped, resend=_resend, gather_words=_gather_words,
    bus_factor=lambda world: 1.0, make_tensors=_make_tensors, rooted=True))
