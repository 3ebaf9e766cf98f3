"""reduce_scatter_tensor: a zipped all-to-all, then a local sum in rank order.

Arithmetic (design: the same for any transport): fp32 accumulator that starts as rank 0's value, ranks added in order,
one rounding to nearest even, NaN results canonical. At 2 ranks this equals native bit for bit, NaN payloads aside;
beyond, native's order differs.
"""
import torch
import torch.distributed as dist

from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import all_to_all_bytes, native_reduce_scatter
from ds_zipccl.kernels.rank_order import sum_in_order


def _rows(call: Call) -> torch.Tensor:
    return call.input.view(-1).view(call.world_size, call.output.numel())


def _zipped(call: Call, launch, codec):
    """Phases: 1. encode each peer's piece; 2. exchange frames; 3. (finish) decode and sum in rank order.

    In-place calls (output is this rank's slice of the input) are safe: the output is written in phase 3 only, after the
    own piece is read.
    """
    rows = _rows(call)
    sent, received = launch.take_frames(codec, call.world_size), launch.take_frames(codec, call.world_size)
    launch.encode(codec, rows, sent, skip=call.rank)
    work = all_to_all_bytes(received.view(-1), sent.view(-1), call.group)

    def finish():
        codec.decode_reduce(received, rows[call.rank], call.rank, call.output.view(-1))

    return work, finish


def _exchange_and_sum(call: Call, exchange) -> None:
    rows = _rows(call)
    received = torch.empty_like(rows)
    exchange(received.view(-1).view(torch.uint8), rows.contiguous().view(-1).view(torch.uint8))
    sum_in_order(received.unbind(0), call.output.view(-1))


def _resend(call: Call, launch) -> None:
    _exchange_and_sum(call, lambda out, rows: launch.side.all_to_all(out, rows).wait())


def _uncompressed(call: Call) -> None:
    """The same sum over an uncompressed exchange on the call's own group: what "always" means where the data does not
    compress."""
    _exchange_and_sum(call, lambda out, rows: all_to_all_bytes(out, rows, call.group).wait())


def _native(call: Call) -> dist.Work:
    return native_reduce_scatter(call.output, call.input, call.reduce_op or dist.ReduceOp.SUM, call.group)


def _make_tensors(rank: int, world_size: int, row_numel: int, dtype: torch.dtype, device):
    """(output, input) with integers so small that every order of summation is exact."""
    generator = torch.Generator("cpu").manual_seed(2000 + rank)
    limit = max(1, 128 // world_size)
    data = torch.randint(-limit, limit + 1, (world_size * row_numel,), generator=generator, device="cpu").to(dtype).to(device)
    return torch.empty(row_numel, dtype=dtype, device=device), data


SPEC = register(CollectiveSpec(
    name="reduce_scatter_tensor", family="reduce_scatter", reduces=True,
    row_numel=lambda call: call.output.numel(),
    whole_numel=lambda call: call.input.numel(),
    shapes_match=lambda call: call.input.numel() == call.output.numel() * call.world_size and call.output.dtype == call.input.dtype,
    native=_native, zipped=_zipped, resend=_resend,
    bus_factor=lambda world: (world - 1) / world, make_tensors=_make_tensors, uncompressed=_uncompressed,
    first_spill=1 / 32))                       # gradients are mixtures of scales: this much room spares most first calls a resend
