"""Calls of the one-sided transport like an earlier one, made again by one call of C (collectives/symmetric_known.py): emulated ranks, as in
test_symmetric.py."""
import ctypes
import functools
import itertools

import pytest
import torch

from ds_zipccl.codec.dtypes import TABLE
from ds_zipccl.codec.format import TILE_ELEMS, layout
from ds_zipccl.collectives.symmetric import SymmetricTransport
from ds_zipccl.collectives.symmetric_plan import NUM_IN_RING, Row
from ds_zipccl.errors import KernelError
from ds_zipccl.kernels.symmetric_calls import NOT_SO, Place, Regather
from tests.zipccl.symmetric_ranks import (
    CARRIED,
    FIRST,
    LARGEST,
    NUM_RECEIVERS,
    NUM_SENDERS,
    InTurn,
    Ranks,
    gaussians,
    random_bits,
    same_bits,
)

KINDS = ("frame", "made on the way", "as it is")


@pytest.mark.parametrize("num_lanes", [2, CARRIED + 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_known_rows_come_to_other_outputs(libraries, num_lanes, world_size, monkeypatch):
    """Rows that stay where they are, with new data and frames in place, by one call of C that is given the new outputs alone. Of an output
    several rows are parts, one behind the other; they are sent in another order."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    ranks = Ranks(libraries, world_size, NUM_IN_RING * 8 * world_size * TILE_ELEMS, num_lanes)
    transports = [SymmetricTransport(InTurn(ranks.calls.library), lambda stream, words: ranks.workspace.data_ptr(), r, torch.device("cpu"),
                                     world_size, ranks.room, ranks.overflows[r], None) for r in range(world_size)]
    numels, kinds = ((5003, TILE_ELEMS + 8), (64,), (40_001, 16)), itertools.cycle(KINDS)
    of_row = [(whole, n, next(kinds)) for whole, parts in enumerate(numels) for n in parts]
    data = [[torch.empty(n, dtype=torch.bfloat16) for _, n, _ in of_row] for _ in range(world_size)]
    frames = [[torch.zeros(layout(TABLE[0], n, spill_per_tile=64).frame_bytes, dtype=torch.uint8) if kind == "frame" else None
               for _, n, kind in of_row] for _ in range(world_size)]
    known = []
    for turn in range(4):
        outs = [[torch.full((world_size, sum(parts)), 3, dtype=torch.bfloat16) for parts in numels] for _ in range(world_size)]
        for r, transport in enumerate(transports):
            transport.num_lanes, transport.carried_made_bytes = num_lanes % CARRIED, 1 << 30 if num_lanes > CARRIED else 0
            transport.num_senders, transport.num_receivers, rows, at = NUM_SENDERS, 5, [], [0] * len(numels)
            for i, (whole, n, kind) in enumerate(of_row):
                data[r][i].copy_((random_bits if turn == 3 and i == 3 else gaussians)(100 * turn + 10 * i + r, (n,), torch.bfloat16))
                g = layout(TABLE[0], n, spill_per_tile=64)
                if kind == "frame":
                    ranks.codec.encode(g, data[r][i].data_ptr(), 0, frames[r][i].data_ptr(), 0, 1, -1, ranks.status.data_ptr(),
                                       ranks.workspace.data_ptr(), 0)
                rows.append(Row(data[r][i], outs[r][whole][:, at[whole]:at[whole] + n], g, frames[r][i], kind == "as it is"))
                at[whole] += n
            arranged = transport.arrange(tuple(row.kind for row in rows))
            assert list(arranged.order) != sorted(arranged.order)
            work = transport.gather_rows(rows, arranged) if turn == 0 else known[r].launch(functools.partial(outs.__getitem__, r))
            known.append(transport.known_rows(rows, arranged, outs[r]))
            assert work.sent_bytes == known[r].sent_bytes and transport.num_calls == turn + 1 and len(transport.kept) == turn + 1
        ranks.run([transport.engine.calls[-1] for transport in transports])
        for out in outs:
            for whole, parts in enumerate(numels):
                assert all(same_bits(out[whole][q], torch.cat([x for (at, *_), x in zip(of_row, data[q], strict=True) if at == whole]))
                           for q in range(world_size)), (turn, whole, parts)
    assert ranks.overflows.sum() == world_size * (world_size - 1) and not ranks.errors.any()
    known[0]._fire = lambda *_: NOT_SO
    assert known[0].launch(lambda: outs[0]) is None and transports[0].num_calls == 4
    assert transports[0].known_rows(rows, arranged, outs[0] * 200) is None, "too many"


def test_a_known_gather_as_a_function_of_pythons(libraries):
    """Its outputs are as many as it says; ``gather`` queues all of it, so the other rank is to send first."""
    ranks, n = Ranks(libraries, 2, NUM_IN_RING * 24 * TILE_ELEMS, CARRIED + 1), 5003
    cut = ranks.plan(torch.bfloat16, n, True)
    for gather in (ranks.calls.gather, ranks.calls._gather_of_few):
        data = [gaussians(r, (n,), torch.bfloat16) for r in range(2)]
        outs = [torch.full((3, n), 3, dtype=torch.bfloat16) for _ in range(2)]
        calls = []
        for r in range(2):
            places = (Place * 1)((data[r].data_ptr(), 2 * n * (r == 0), 2 * n))              # of rank 0 from its second row on
            calls.append(ranks.exchange(cut, 0, 0, 0, 0))
            calls[r].places = places
            calls[r].places[0].out = calls[r].places[0].out if r == 0 else outs[1].data_ptr()
        ranks.engines[1].start(calls[1])
        assert ranks.engines[1].step()
        regather = Regather(ranks.engines[0].address, calls[0], (ctypes.c_int64 * 1)(1), 0)
        assert gather(ctypes.addressof(regather), NUM_RECEIVERS, data[0].data_ptr(), outs[0].data_ptr()) == 0
        while ranks.engines[1].step():
            pass
        for r in range(2):
            assert same_bits(outs[0][1 + r], data[r]) and same_bits(outs[1][r], data[r])
        assert bool((outs[0][0] == 3).all()) and bool((outs[1][2] == 3).all())


@pytest.mark.parametrize("num_lanes", [2, CARRIED + 2])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter"])
def test_known_calls_are_the_same_calls(libraries, num_lanes, world_size, name, monkeypatch):
    """... of other tensors, also in place; by one call of C that is given their addresses."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    n, room = 5 * TILE_ELEMS + 77, NUM_IN_RING * 8 * world_size * TILE_ELEMS
    ranks, others = (Ranks(libraries, world_size, room, num_lanes) for _ in range(2))
    transports = [SymmetricTransport(InTurn(ranks.calls.library), lambda stream, words: ranks.workspace.data_ptr(), r, torch.device("cpu"),
                                     world_size, ranks.room, ranks.overflows[r], None) for r in range(world_size)]
    shape = (n,) if name == "all_gather" else (world_size, n)
    known = []
    for turn in range(3):
        data = [gaussians(10 * turn + r, shape, torch.bfloat16) for r in range(world_size)]
        expected = getattr(others, name)(data)
        outs = [torch.full_like(each, 5).contiguous() for each in expected]
        if turn == 2 and name != "all_to_all":                          # in place
            for r in range(world_size):
                if name == "all_gather":
                    outs[r][r] = data[r]
                    data[r] = outs[r][r]
                else:
                    outs[r] = data[r][r]
        for r, transport in enumerate(transports):
            transport.first_bytes, transport.largest_bytes, transport.num_lanes = FIRST, LARGEST, num_lanes % CARRIED
            transport.num_senders, transport.num_receivers, transport.carried_bytes = NUM_SENDERS, 5, 1 << 30 if num_lanes > CARRIED else 0
            out, x = outs[r].view(-1), data[r].view(-1)
            work = known[r].launch(outs[r], data[r]) if turn else getattr(transport, name)(out, x)
            known.append(transport.known(name, out, x))
            assert work.sent_bytes == known[r].sent_bytes > n and transport.num_calls == turn + 1 and len(transport.kept) == turn + 1
        ranks.run([transport.engine.calls[-1] for transport in transports])
        assert all(same_bits(out, right) for out, right in zip(outs, expected, strict=True)), turn
    monkeypatch.setattr(transports[0].engine, "repeat", lambda *_: NOT_SO)
    known[0]._fire = transports[0].engine.repeat
    assert known[0].launch(outs[0], data[0]) is None and transports[0].num_calls == 3
    known[0]._fire = lambda *_: 700
    with pytest.raises(KernelError, match="700"):
        known[0].launch(outs[0], data[0])
    assert transports[0].known(name, outs[0].view(-1), data[0].view(-1)) is not None
    transports[0]._end()
    assert transports[0].known(name, outs[0].view(-1), data[0].view(-1)) is None
