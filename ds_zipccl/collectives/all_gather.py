"""all_gather_into_tensor: every rank encodes its own piece once; all gather frames and decode the others' pieces."""
import torch

from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import all_gather_bytes, native_all_gather


def _rows(call: Call) -> torch.Tensor:
    return call.output.view(-1).view(call.world_size, call.input.numel())


def _zipped(call: Call, launch, codec):
    """Phases: 1. encode the own piece into its place among the frames; 2. gather frames; 3. (finish) decode the others'
    rows, copy the own.

    In-place gathers (input is this rank's slice of the output) are safe: the output is written in phase 3 only.
    """
    frames = launch.take_frames(codec, call.world_size)
    own = frames[call.rank]
    launch.encode(codec, call.input.view(1, -1), own.view(1, -1))
    work = all_gather_bytes(frames.view(-1), own, call.group)

    def finish():
        rows = _rows(call)
        codec.decode(frames, rows, skip=call.rank)
        _copy_own(call, rows)

    return work, finish


def _copy_own(call: Call, rows: torch.Tensor) -> None:
    own = rows[call.rank]
    if own.data_ptr() != call.input.data_ptr():
        own.copy_(call.input.view(-1))


def _resend(call: Call, launch) -> None:
    gathered = torch.empty_like(call.output).view(-1)
    launch.side.all_gather(gathered.view(torch.uint8), call.input.contiguous().view(-1).view(torch.uint8)).wait()
    call.output.view(-1).copy_(gathered)


def _native(call: Call):
    return native_all_gather(call.output, call.input, call.group)


def _make_tensors(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    """(output, input) whose gather is known: random bits seeded by the rank."""
    generator = torch.Generator("cpu").manual_seed(1000 + rank)
    data = (torch.randn(row_numel, generator=generator, device="cpu") * 0.02).to(dtype).to(device)
    return torch.empty(world_size * row_numel, dtype=dtype, device=device), data


SPEC = register(CollectiveSpec(
    name="all_gather_into_tensor", family="all_gather", reduces=False,
    row_numel=lambda call: call.input.numel(),
    whole_numel=lambda call: call.output.numel(),
    shapes_match=lambda call: call.output.numel() == call.input.numel() * call.world_size and call.output.dtype == call.input.dtype,
    native=_native, zipped=_zipped, resend=_resend,
    bus_factor=lambda world: (world - 1) / world, make_tensors=_make_tensors))
