"""reduce_scatter_tensor and reduce_scatter (list): a zipped all-to-all, then a local sum in rank order.

Arithmetic (design: the same for any transport): fp32 accumulator that starts as rank 0's value, ranks added in order,
one rounding to nearest even, NaN results canonical. At 2 ranks this equals native bit for bit, NaN payloads aside;
beyond, native's order differs.
"""
import torch
import torch.distributed as dist

from ds_zipccl.collectives.launch import frames_bytes
from ds_zipccl.collectives.parts import ranges
from ds_zipccl.collectives.registry import Call, CollectiveSpec, register
from ds_zipccl.collectives.transport import all_to_all_bytes, native_reduce_scatter
from ds_zipccl.collectives.views import as_rows, equal_numels, flat
from ds_zipccl.kernels.rank_order import sum_in_order

FIRST_SPILL = 1 / 32                  # gradients are mixtures of scales: this much room spares most first calls a resend


def _rows(call: Call) -> torch.Tensor:
    """[world size, n]: what goes to each rank. A copy where a list's tensors do not lie one after another."""
    if not isinstance(call.input, tuple):
        return flat(call.input).view(call.world_size, -1)
    pieces = [flat(t) for t in call.inputs]
    rows = as_rows(pieces)
    return torch.stack(pieces) if rows is None else rows


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
        codec.decode_reduce(received, rows[call.rank], call.rank, flat(call.output))
        launch.keep(rows)

    return work, finish


def _exchange_and_sum(call: Call, exchange) -> None:
    rows = _rows(call)
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    exchange(received.view(-1).view(torch.uint8), rows.contiguous().view(-1).view(torch.uint8))
    sum_in_order(received.unbind(0), flat(call.output))


def _resend(call: Call, launch) -> None:
    _exchange_and_sum(call, lambda out, rows: launch.bulk.all_to_all(out, rows).wait())


def _uncompressed(call: Call) -> None:
    """The same sum over an uncompressed exchange on the call's own group: what "always" means where the data does not
    compress."""
    _exchange_and_sum(call, lambda out, rows: all_to_all_bytes(out, rows, call.group).wait())


def _cut(call: Call, part: int) -> list[Call]:
    """The same ranges of every rank's piece, from where they lie."""
    numel, output = call.output.numel(), flat(call.output)
    rows = [flat(t) for t in call.inputs] if isinstance(call.input, tuple) else flat(call.input).view(call.world_size, -1).unbind(0)
    return [Call("reduce_scatter_uneven", output[start:end], tuple(row[start:end] for row in rows), call.group)
            for start, end in ranges(numel, -(-numel // part))]


def _op(call: Call):
    return call.reduce_op or dist.ReduceOp.SUM


def summable(rank: int, world_size: int, numel: int, dtype: torch.dtype, device) -> torch.Tensor:
    """Integers so small that every order of summation is exact."""
    generator = torch.Generator("cpu").manual_seed(2000 + rank)
    limit = max(1, 128 // world_size)
    return torch.randint(-limit, limit + 1, (numel,), generator=generator, device="cpu").to(dtype).to(device)


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
    raw_bytes=lambda call: call.output.nbytes * _others(call), frames_sent=_others,
    wire_bytes=lambda call: frames_bytes(call.dtype, call.output.numel(), _others(call), FIRST_SPILL),
    zipped=_zipped, resend=_resend, uncompressed=_uncompressed, cut=_cut, first_spill=FIRST_SPILL,
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
