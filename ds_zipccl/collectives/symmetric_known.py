"""Calls of the one-sided transport (symmetric.py) like an earlier one, each made again by one call of C: all but where its tensors are was
written down when it was first made."""
import ctypes
from collections.abc import Callable

import torch

from ds_zipccl.collectives import streams
from ds_zipccl.collectives.symmetric_plan import Arranged, Plan, Row
from ds_zipccl.kernels.symmetric_calls import NOT_SO, Exchange, Place, Regather, Repeat, refused


class _Again:
    """``stream``: on which such calls are made, its handle. ``sent_bytes``: of frames, to all peers."""
    __slots__ = ("transport", "stream", "sent_bytes", "_fire", "_address", "_kept")

    def __init__(self, transport, fire, described: ctypes.Structure, cut: Plan, stream: int):
        self.transport, self.stream, self.sent_bytes = transport, stream, cut.sent_bytes * (transport.world_size - 1)
        self._fire, self._address, self._kept = fire, ctypes.addressof(described), (described, cut)

    def _has(self, code: int) -> bool:
        """Whether the call is queued; else another device is current, or the stream is captured, and nothing has happened."""
        if code == NOT_SO:
            return False
        if code:
            refused("call", code)
        return True


class Known(_Again):
    """Of one tensor to another: ``repeats.Repeats``."""
    __slots__ = ()

    @classmethod
    def of(cls, transport, name: str, out: torch.Tensor, data: torch.Tensor) -> "Known | None":
        cut, row_stride, out_stride, *places, copy_bytes = transport.layout(name, out, data)
        if cut is None:
            return None
        stream = streams.current(transport.device)
        exchange = _exchange(transport, cut, stream, transport.carried_bytes, row_stride=row_stride, out_stride=out_stride,
                             copy_bytes=copy_bytes)
        repeat = Repeat(transport.engine.address, exchange, *places, transport.device.index or 0)
        return cls(transport, transport.engine.repeat, repeat, cut, stream)

    def launch(self, out: torch.Tensor, data: torch.Tensor):
        """Its work; None: see ``_has``."""
        transport = self.transport
        code = self._fire(self._address, data.data_ptr(), out.data_ptr(), max(1, transport.num_receivers // transport.num_sharing))
        return transport.launched((out, data), (), self.stream, self.sent_bytes) if self._has(code) else None


class KnownRows(_Again):
    """Of rows that stay where they are, to other outputs each time: ``frame_known.KnownGather``."""
    __slots__ = ("_others",)

    @classmethod
    def of(cls, transport, rows: list[Row], arranged: Arranged, outputs: list[torch.Tensor]) -> "KnownRows":
        begins, made, places, which = [whole.data_ptr() for whole in outputs], [], [], []
        for i in arranged.order:
            data, out, geometry, frame, _ = rows[i]
            at = next(at for at, whole in enumerate(outputs) if begins[at] <= out.data_ptr() < begins[at] + whole.nbytes)
            which.append(at)
            made.append(None if frame is None else frame.data_ptr())
            places.append((data.data_ptr(), out.data_ptr() - begins[at], out.stride(0) * geometry.itemsize))
        num, stream = len(made), streams.current(transport.device)
        exchange = _exchange(transport, arranged.cut, stream, transport.carried_made_bytes, made=(ctypes.c_void_p * num)(*made),
                             places=(Place * num)(*places))
        regather = Regather(transport.engine.address, exchange, (ctypes.c_int64 * num)(*which), transport.device.index or 0)
        self = cls(transport, transport.engine.gather, regather, arranged.cut, stream)
        self._others = tuple([t for i in arranged.order for t in (rows[i].data, rows[i].frame)])
        return self

    @property
    def is_open(self) -> bool:
        return self.transport.is_open

    def launch(self, make_outputs: Callable[[], list[torch.Tensor]]):
        """Its work; None: see ``_has``."""
        transport, outputs = self.transport, make_outputs()
        code = self._fire(self._address, max(1, transport.num_receivers // transport.num_sharing), *[t.data_ptr() for t in outputs])
        return transport.launched(tuple(outputs), self._others, self.stream, self.sent_bytes) if self._has(code) else None


def _exchange(transport, cut: Plan, stream: int, carried_bytes: int, **fields) -> Exchange:
    """Without what a call brings. ``carried_bytes``: of rows that kernels carry, at most."""
    return Exchange(num_lanes=transport.num_lanes, num_parts=cut.num_parts, parts=cut.parts, status=transport.status_at,
                    workspace=transport.workspace(stream, cut.words) if cut.words else 0, stream=stream,
                    num_senders=transport.num_senders if cut.raw_bytes <= carried_bytes else 0, num_groups=transport.num_groups, **fields)
