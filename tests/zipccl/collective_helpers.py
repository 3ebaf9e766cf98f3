"""What the cases on plain torch groups share: a runtime, calls as a front makes them, expected results."""
import contextlib
from unittest import mock

import torch
import torch.distributed as dist

from ds_zipccl.backend import front
from ds_zipccl.collectives import completer, group_state, nccl_direct, transport
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.helpers.bits import assert_same_bits
from tests.helpers.ranks import DEVICE

AG, RS, A2A = "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"
SIGNS_OF_4096 = 128 + 256 + 4 * 384       # in a frame of 4 blocks: sign and mantissa of element 0
#: (``integrity``, words of the error) with which a frame of other bytes fails its call. Kernels on a GPU take note and do not raise.
SEES_DAMAGE = (*[("off", "corrupt")] * (DEVICE == "cpu"), ("checksum", "not a ZipCCL frame"))
SIZES = (1, 257, 1024, 1025, 2047, 33000)           # the first two are native: their frames would be larger


@contextlib.contextmanager
def runtime(**settings):
    """With ``transport: process_group`` by default: one-sided calls, which GPUs would make too, have cases of their own."""
    config = ZipcclConfig(enabled=True, **{"collectives": "always", "min_bytes": 0, "transport": "process_group", **settings})
    live = Runtime(config, {device: loader.resolve("best", device, config.level) for device in {"cpu", torch.get_default_device().type}})
    try:
        yield live
    finally:
        live.close()


def launch(live, op, output, data, group=None, reduce_op=None, **fields):
    """Launches as a front does; returns the Work, or None where the call must go native."""
    return front.run(live, Call(op, output, data, group or dist.group.WORLD, reduce_op, **fields))


def begin(live, call):
    """A call as a front carries it out: zipped, or native where the runtime says so. Returns (Work, whether it is ours)."""
    work = front.run(live, call)
    return (specs()[call.op].native(call), False) if work is None else (work, True)


def carry_out(live, op, output, data, group=None, **fields):
    """The same to its end. Returns whether it was ours."""
    work, ours = begin(live, Call(op, output, data, group or dist.group.WORLD, **fields))
    work.wait()
    return ours


def assert_same_sum(got, expected, ours, where):
    """Equal bits; where the sum was native, NaN payloads aside."""
    if not ours:
        assert torch.equal(got.isnan(), expected.isnan()), where
        got, expected = got[~got.isnan()], expected[~expected.isnan()]
    assert_same_bits(got, expected, where)


@contextlib.contextmanager
def payloads_by_torch():
    """Who looks at payloads on their way, or changes them, sees those of prepared calls too, and exchanges as exchanges."""
    original, nccl_direct.handle, transport.PAIRS_GATHER = nccl_direct.handle, lambda backend: 0, False
    try:
        yield
    finally:
        nccl_direct.handle, transport.PAIRS_GATHER = original, None


@contextlib.contextmanager
def sent_again_soon():
    """Of ranks whose hosts wait for each other: what overflowed is sent again by the group's thread on a GPU after a second, not after ten
    (on a CPU at once, as ever)."""
    with mock.patch.dict(group_state.RESEND_LOOKS, cuda=round(1 / completer.PATIENCE_S)):
        yield


def spoiled(work, spoil):
    """``work``, with what it brought changed by ``spoil()`` before anybody decodes it: on a GPU that happens on a stream of the group's,
    which waits for ``work`` and for nothing that is queued here."""
    work.wait()
    spoil()
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
    return work


def flip(data, at, bits):
    """Changes bits of one byte."""
    data[at] ^= bits


def finite(data):
    """Without NaNs, whose payloads native sums keep."""
    return torch.where(data.isnan(), torch.ones_like(data), data)


class Guarded:
    """An output between canaries."""

    def __init__(self, numel):
        self._whole = torch.full((numel + 512,), 3.0, dtype=torch.bfloat16)
        self.tensor = self._whole[256:256 + numel]

    def check(self):
        outside = torch.cat([self._whole[:256], self._whole[256 + self.tensor.numel():]])
        assert bool((outside == 3.0).all()), "written beside the output"


def gathered(data, world):
    out = torch.empty(world * data.numel(), dtype=data.dtype, device=data.device)
    transport.all_gather_bytes(out.view(torch.uint8), data.view(torch.uint8), dist.group.WORLD).wait()
    return out


def rank_order_sum(data, rank, world, divisor=1):
    """The documented result, from every rank's whole input. ``divisor``: the world size for an average."""
    rows = gathered(data, world).view(world, world, -1)[:, rank]
    out = torch.empty_like(rows[0])
    sum_in_order(rows, out, divisor)
    return out


def native_reduce_scatter(data, world):
    out = torch.empty(data.numel() // world, dtype=data.dtype)
    transport.native_reduce_scatter(out, data.clone(), dist.ReduceOp.SUM, dist.group.WORLD).wait()
    return out


def everyones_sum(data, world):
    """The documented all_reduce: all ranks' tensors, summed in rank order."""
    rows = gathered(data, world).view(world, -1)
    out = torch.empty_like(rows[0])
    sum_in_order(rows, out)
    return out
