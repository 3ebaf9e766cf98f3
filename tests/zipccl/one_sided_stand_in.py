"""A one-sided transport without GPUs: a stand-in over the group's own collectives, and runtimes that use it where there are none."""
import contextlib
import math
import weakref
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.format import DEFAULT_SPILL_PER_TILE, OVERFLOW_BIT, STATUS_OFFSET
from ds_zipccl.collectives import one_sided, switch, symmetric, symmetric_plan
from ds_zipccl.collectives.transport import all_gather_bytes
from ds_zipccl.kernels import loader
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.helpers.ranks import DEVICE
from tests.zipccl.collective_helpers import runtime

ONE_SIDED = DEVICE == "cuda"            # the real one is there


class Sent:
    """A gather of rows: until somebody has waited for it, nobody may write frames or data."""

    def __init__(self, rows, sent_bytes):
        self.sent_bytes = sent_bytes
        self._seen = [(t, t.clone()) for row in rows for t in (row.frame, row.data) if t is not None]

    def wait(self):
        seen, self._seen = self._seen, []
        assert all(torch.equal(now.view(torch.uint8), then.view(torch.uint8)) for now, then in seen), "written while it is sent"
        return True

    join = wait


class Known:
    """As symmetric_known.KnownRows, on a CPU."""
    stream = None

    def __init__(self, stand_in, launch):
        self._stand_in, self.launch = stand_in, launch

    @property
    def is_open(self):
        return self._stand_in.is_open


class StandIn:
    """A transport over the group's own collectives. ``spoil(out)``: what it does to a result."""

    def __init__(self, group, spoil=lambda out: None):
        self.group, self.spoil, self.num_calls, self.num_overflows, self.is_open = group, spoil, 0, 0, True
        self.room, self.num_gathers, self.num_known = 1 << 30, 0, 0         # bytes of a row; gathers of rows; of these, known ones

    def _done(self, out, data):
        assert self.is_open
        self.num_calls += 1
        self.spoil(out)
        return SimpleNamespace(wait=lambda: True, sent_bytes=data.nbytes // 2)

    def all_gather(self, out, own):
        all_gather_bytes(out.view(torch.uint8), own.contiguous().view(torch.uint8), self.group).wait()
        return self._done(out, own)

    def all_to_all(self, out, data):
        dist.all_to_all_single(out, data, group=self.group)
        return self._done(out, data)

    def reduce_scatter(self, out, data):
        rows = torch.empty_like(data)
        dist.all_to_all_single(rows, data, group=self.group)
        sum_in_order(rows.view(self.group.size(), -1), out)
        return self._done(out, data)

    def plan(self, dtype, row_numel, same_for_all):
        return symmetric_plan.plan(dtype, row_numel, self.group.size(), same_for_all, DEFAULT_SPILL_PER_TILE, 1 << 30, 1 << 16, 1 << 18)

    def arrange(self, kinds):
        return kinds if all(2 * g.numel <= self.room for g, _, _ in kinds) else None

    def gather_rows(self, rows, arranged=None):
        """Frames are what receivers see, unless they overflowed."""
        world, num_bytes = self.group.size(), 0
        assert arranged is None or [row.kind for row in rows] == list(arranged)
        for data, out, g, frame, as_it_is in rows:
            assert g.level == 1 and (frame is None or not as_it_is) and data.numel() == g.numel
            raw = torch.empty(world, data.nbytes, dtype=torch.uint8)
            all_gather_bytes(raw.view(-1), data.contiguous().view(torch.uint8), self.group).wait()
            frames = torch.zeros(world, g.frame_bytes, dtype=torch.uint8)
            if frame is not None:
                all_gather_bytes(frames.view(-1), frame.view(-1), self.group).wait()
            for rank in range(world):
                overflowed = int(frames[rank, STATUS_OFFSET:STATUS_OFFSET + 4].view(torch.int32)) & OVERFLOW_BIT
                if frame is None or overflowed or rank == self.group.rank():
                    out[rank].copy_(raw[rank].view(data.dtype))
                else:
                    Codec(g, loader.resolve("best", DEVICE)).decode(frames[rank:rank + 1], out[rank:rank + 1])
            num_bytes += data.nbytes if as_it_is else g.frame_bytes
        for _, out, *_ in rows:
            self._done(out, out)
        self.num_gathers += 1
        return Sent(rows, num_bytes * (world - 1))

    def known_rows(self, rows, arranged, outputs):
        """Rows as they are seen by C: places of data and frames, and of what comes in its output."""
        assert all(out.is_contiguous() for out in outputs) and arranged is not None
        begins = [whole.data_ptr() for whole in outputs]
        at = [next(i for i, whole in enumerate(outputs) if 0 <= row.out.data_ptr() - begins[i] < whole.nbytes) for row in rows]
        offsets = [(row.out.data_ptr() - begins[i]) // row.out.element_size() for row, i in zip(rows, at, strict=True)]
        places = [(row.data.data_ptr(), None if row.frame is None else row.frame.data_ptr()) for row in rows]

        def launch(make_outputs):
            others = make_outputs()
            assert [(other.numel(), other.dtype) for other in others] == [(whole.numel(), whole.dtype) for whole in outputs]
            assert places == [(row.data.data_ptr(), None if row.frame is None else row.frame.data_ptr()) for row in rows]
            self.num_known += 1
            return self.gather_rows([row._replace(out=others[i].as_strided(row.out.shape, row.out.stride(), offset))
                                     for row, i, offset in zip(rows, at, offsets, strict=True)], arranged)

        return Known(self, launch)

    def close(self):
        self.is_open, self.keep_alive = False, None

    abort = close


class OnGpu:
    """A call as if its tensors were on a GPU."""
    device = torch.device("cuda")

    def __init__(self, call):
        self._call = call

    def __getattr__(self, name):
        return getattr(self._call, name)


SMALL, MIDDLE, LARGE = 1 << 16, 1 << 18, 1 << 20           # probed, in bytes of the whole tensor
SLOW = 1e6


@contextlib.contextmanager
def stand_ins(why_not=None, spoil=lambda out: None):
    """On a CPU groups' transports are stand-ins: their list, the last one opened last. ``spoil`` spoils their results; or a group has none,
    and ``why_not``."""
    opened, by_kind, real_open = [], one_sided.reason_by_kind, one_sided.OneSided.open

    def open_(self, group):
        if why_not is None:
            opened.append(StandIn(group, spoil))
            self.transport = opened[-1]
        self.why_not = why_not

    if not ONE_SIDED:
        one_sided.OneSided.open = open_
        one_sided.reason_by_kind = lambda config, kernels, name, call: by_kind(
            config, "cuda", name, OnGpu(call))
    try:
        yield opened
    finally:
        one_sided.OneSided.open, one_sided.reason_by_kind = real_open, by_kind


class Memory:
    """Of a rank, for ``opened_with_memory``."""


@contextlib.contextmanager
def opened_with_memory(has_memory):
    """On a CPU groups open their transports by what ranks say to each other, as on GPUs; what they open are stand-ins. ``has_memory()``:
    whether this rank can allocate. Yields the memory that is held, as weak references."""
    kept = {name: getattr(symmetric, name) for name in ("place_of", "kernels_of", "reserve", "open_transport")}
    by_kind, held = one_sided.reason_by_kind, []

    def reserve(device, num_bytes):
        if not has_memory():
            raise RuntimeError("CUDA driver error: out of memory")
        memory = Memory()
        held.append(weakref.ref(memory))
        return memory

    def open_transport(group, device, reserved, *_):
        transport = StandIn(group)
        transport.keep_alive = reserved
        return transport

    world, rank = dist.get_world_size(), dist.get_rank()
    symmetric.place_of = lambda device: {"host": "a", "uuid": str(rank), "peers": {str(peer): True for peer in range(world)}}
    symmetric.kernels_of, symmetric.reserve, symmetric.open_transport = dict, reserve, open_transport
    one_sided.reason_by_kind = lambda config, kernels, name, call: by_kind(config, "cuda", name, OnGpu(call))
    try:
        yield held
    finally:
        one_sided.reason_by_kind = by_kind
        for name, value in kept.items():
            setattr(symmetric, name, value)


@contextlib.contextmanager
def measured_at_three_sizes(times):
    """``times(size, num_measured)``: microseconds natively, zipped, one-sided; infinite ones stay."""
    kept = {name: getattr(switch, name) for name in ("PROBE_SIZES", "LARGER_SIZES", "PROBE_ROUNDS", "BURST_CALLS", "_medians")}
    num_measured = []

    def medians(spec, test, *runs):
        seen = kept["_medians"](spec, test, *runs)
        size = max(t.nbytes for t in (*test.inputs, *test.outputs))
        num_measured.append(size)
        made_up = times(min((SMALL, MIDDLE, LARGE), key=lambda probed: abs(probed - size)), (len(num_measured) - 1) // 3)
        return [b if math.isfinite(a) else a for a, b in zip(seen, made_up, strict=True)]

    switch.PROBE_SIZES, switch.PROBE_ROUNDS = dict.fromkeys(("cpu", "cuda"), (SMALL, MIDDLE, LARGE)), dict.fromkeys(("cpu", "cuda"), 1)
    switch.LARGER_SIZES, switch.BURST_CALLS = dict.fromkeys(("cpu", "cuda"), ()), dict.fromkeys(("cpu", "cuda"), 1)
    switch._medians = medians
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(switch, name, value)


@contextlib.contextmanager
def adaptive(times, why_not=None, spoil=lambda out: None, **settings):
    """A runtime that measures these times; see both above. ``live.opened``: the stand-ins."""
    settings = {"transport": "adaptive", "collectives": "adaptive", "deterministic_reduce": False, "split_lists": "all_or_none", **settings}
    with measured_at_three_sizes(times), stand_ins(why_not, spoil) as opened, runtime(**settings) as live:
        live.opened = opened
        yield live
