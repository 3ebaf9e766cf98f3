"""Cases run on every rank by test_collectives.py: all-to-alls with equal and uneven splits, pair by pair."""
import random

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.collectives import all_to_all, transport
from ds_zipccl.collectives.all_to_all import elems_per_rank
from ds_zipccl.collectives.registry import Call, specs
from tests.helpers.bits import assert_same_bits, gaussian, random_bits, specials
from tests.zipccl.collective_helpers import A2A, Guarded, begin, carry_out, flip, payloads_by_torch, runtime, spoiled

LIST = "all_to_all"
WIDTH = 8                               # elements in a row of dim 0
BIG, SMALL = 300, 3                     # rows for one peer: zipped, and too few for a frame


def split_call(rank, matrix, make=gaussian, seed=0, none_on=(), out=None):
    """The call of this rank where ``matrix[i][j]`` rows go from i to j. On ranks in ``none_on`` with None for equal splits."""
    send, receive = list(matrix[rank]), [row[rank] for row in matrix]
    data = make(max(1, sum(send) * WIDTH), seed=seed + 100 * rank)[:sum(send) * WIDTH].view(-1, WIDTH)
    output = torch.full((sum(receive), WIDTH), 3.0, dtype=torch.bfloat16) if out is None else out.view(-1, WIDTH)
    splits = (None, None) if rank in none_on else (elems_per_rank(data, send), elems_per_rank(output, receive))
    return Call(A2A, output, data, dist.group.WORLD, input_splits=splits[0], output_splits=splits[1])


def expected_of(call):
    """What native makes of it."""
    native = torch.full_like(call.output, 4.0)
    all_to_all._native_single(Call(A2A, native, call.input.clone(), call.group, input_splits=call.input_splits,
                                   output_splits=call.output_splits)).wait()
    return native


def check(live, call, where):
    expected = expected_of(call)
    work, ours = begin(live, call)
    work.wait()
    assert_same_bits(call.output, expected, where)
    return ours


def matrices(world):
    """C36, C40: name -> rows that go from each rank to each."""
    ranks = range(world)
    numbers = random.Random(world)
    return {
        "equal": [[BIG] * world for _ in ranks],
        "equal and small": [[SMALL] * world for _ in ranks],
        "all zero": [[0] * world for _ in ranks],
        "a rank that sends nothing": [[0 if i == 0 else BIG + i + j for j in ranks] for i in ranks],
        "a rank that receives nothing": [[0 if j == world - 1 else BIG + i for j in ranks] for i in ranks],
        "an idle rank": [[0 if 1 in (i, j) else BIG + i + j for j in ranks] for i in ranks],
        "one receiver": [[BIG + 10 * i if j == 1 else 0 for j in ranks] for i in ranks],
        "one sender": [[BIG + 10 * j if i == world - 1 else 0 for j in ranks] for i in ranks],
        "only to itself": [[BIG if i == j else 0 for j in ranks] for i in ranks],
        "a ring": [[BIG + 5 * i if j == (i + 1) % world else 0 for j in ranks] for i in ranks],
        "frames beside raw pieces": [[BIG if (i + j) % 2 else SMALL for j in ranks] for i in ranks],
        "runs of equal pieces": [[BIG if j < 2 else 2 * BIG for j in ranks] for i in ranks],
        "random": [[numbers.choice((0, 1, SMALL, 130, BIG, 3 * BIG)) for _ in ranks] for _ in ranks],
        "very different": [[1 if i < j else 40 * BIG for j in ranks] for i in ranks],
    }


def case_all_to_all_bits(rank, world):
    with runtime() as live:
        for size in (0, 1, 257, 1024, 1025, 2047, 33000):
            for make in (gaussian, specials, random_bits):
                data, out = make(max(1, world * size), seed=17 * size + rank)[:world * size], Guarded(world * size)
                expected = torch.empty_like(data)
                dist.all_to_all_single(expected, data.clone())
                carry_out(live, A2A, out.tensor, data)
                assert_same_bits(out.tensor, expected, f"{make.__name__} {size}")
                out.check()
        row = live.stats.snapshot()[A2A]
        assert row["calls_zipped"] > 0 and row["overflows"] > 0


def case_all_to_all_list_bits(rank, world):
    """Tensors that are parts of one buffer and tensors that are not; different shapes."""
    with runtime() as live:
        for size in (0, 3, 1500, 33000):
            for make in (gaussian, random_bits):
                data = [make(max(1, size), seed=size + 10 * rank + peer)[:size] for peer in range(world)]
                if make is gaussian and size == 1500:
                    data = list(torch.cat(data).view(world, 30, 50).unbind(0))
                outs = [torch.empty_like(t) for t in data]
                expected = [torch.empty_like(t) for t in data]
                dist.all_to_all(expected, [t.clone() for t in data])
                carry_out(live, LIST, tuple(outs), tuple(data))
                for got, wanted in zip(outs, expected, strict=True):
                    assert_same_bits(got, wanted, f"{make.__name__} {size}")
        assert live.stats.snapshot()[LIST]["calls_zipped"] > 0


def case_uneven_splits(rank, world):
    """C36, C40."""
    for min_bytes in (0, 20000):
        with runtime(min_bytes=min_bytes) as live:
            for seed in range(2):
                for name, matrix in matrices(world).items():
                    guarded = Guarded(WIDTH * sum(row[rank] for row in matrix))
                    check(live, split_call(rank, matrix, seed=seed, out=guarded.tensor), f"{name} {min_bytes}")
                    guarded.check()
            row = live.stats.snapshot()[A2A]
            assert row["calls_zipped"] > 0 and row["calls_native"] > 0 and row["overflows"] == 0, row


def case_ranks_without_pairs_to_zip_go_native(rank, world):
    with runtime() as live:
        ours = check(live, split_call(rank, matrices(world)["an idle rank"]), "idle")
        assert ours == (rank != 1 and world > 2)
        ours = check(live, split_call(rank, matrices(world)["one receiver"]), "one receiver")
        assert ours
        assert not check(live, split_call(rank, matrices(world)["only to itself"]), "itself")
        assert not check(live, split_call(rank, matrices(world)["equal and small"]), "small")
        reasons = live.stats.snapshot()[A2A]["native_reasons"]
        assert reasons["min_bytes"] >= 1 and reasons["no_gain"] == 1, reasons


def case_equal_splits_as_none_or_as_lists(rank, world):
    """Ranks that leave the splits out meet ranks that spell them; also where others' pairs differ."""
    with runtime() as live:
        for none_on in ((0,), tuple(range(1, world))):
            for rows in (BIG, SMALL):
                check(live, split_call(rank, [[rows] * world for _ in range(world)], none_on=none_on), f"{none_on} {rows}")
        # Rank 0's pieces are all alike, the others exchange other sizes among themselves.
        matrix = [[BIG if 0 in (i, j) else 2 * BIG + i + j for j in range(world)] for i in range(world)]
        check(live, split_call(rank, matrix, none_on=(0,)), "equal for rank 0 only")
        matrix = [[SMALL if 0 in (i, j) else BIG for j in range(world)] for i in range(world)]
        check(live, split_call(rank, matrix, none_on=(0,)), "native on rank 0 only")
        assert live.stats.snapshot()[A2A]["calls_zipped"] > 0


def case_one_side_of_the_splits_left_out(rank, world):
    with runtime() as live:
        call = split_call(rank, [[BIG] * world for _ in range(world)])
        check(live, Call(A2A, call.output, call.input, call.group, input_splits=call.input_splits), "output_splits left out")
        check(live, Call(A2A, call.output, call.input, call.group, output_splits=call.output_splits), "input_splits left out")


def _spoiled(pairs):
    """Makes data that does not compress for some pairs: a maker for each (sender, receiver)."""

    def call(rank, matrix, seed):
        plain = split_call(rank, matrix, seed=seed)
        for peer, part in enumerate(plain.input.split([rows for rows in matrix[rank]])):
            if (rank, peer) in pairs:
                part.copy_(random_bits(part.numel(), seed=seed + peer).view_as(part))
        return plain

    return call


def case_pair_overflows(rank, world):
    """On one pair, on all of one rank, on all; each call is right and only the two ends send again."""
    last = world - 1
    ranks = range(world)
    for name, pairs in {"one pair": {(0, last)}, "both ways": {(0, last), (last, 0)}, "all of a rank": {(1, j) for j in ranks},
                        "all to a rank": {(i, 0) for i in ranks}, "all": {(i, j) for i in ranks for j in ranks}}.items():
        with runtime() as live:
            for matrix in ("equal", "frames beside raw pieces", "runs of equal pieces", "a ring"):
                rows = matrices(world)[matrix]
                before = live.stats.snapshot().get(A2A, {"overflows": 0})["overflows"]
                call = _spoiled(pairs)(rank, rows, seed=7)
                check(live, call, f"{name}, {matrix}")
                concerns_me = any(rank in (i, j) and i != j and rows[i][j] >= BIG for i, j in pairs)
                again = live.stats.snapshot()[A2A]["overflows"] - before
                assert again <= concerns_me, f"{name}, {matrix}: sent again on a rank that has no such pair"
                if matrix == "equal":
                    assert again == concerns_me, f"{name}, {matrix}"


def case_pair_overflows_alternate(rank, world):
    """Every other call, in flight together, waited for in another order on each rank, one handle dropped."""
    with runtime() as live:
        calls, works, expected = [], [], []
        for i in range(6):
            matrix = [[BIG * 2**i + s for s in range(world)] for _ in range(world)]         # classes of their own
            call = (_spoiled({(i % world, (i + 1) % world)}) if i % 2 else split_call)(rank, matrix, seed=i)
            expected.append(expected_of(call))
            calls.append(call)
            work, ours = begin(live, call)
            assert ours
            works.append(None if i == 2 else work)
            del work
        for i in (range(6) if rank % 2 else reversed(range(6))):
            if works[i] is not None:
                works[i].wait()
        live.settle(dist.group.WORLD)
        for i in range(6):
            assert_same_bits(calls[i].output, expected[i], f"call {i}")


def case_dropped_all_to_all_is_completed_by_another_collective(rank, world):
    with runtime() as live:
        call = _spoiled({(0, 1)})(rank, matrices(world)["equal"], seed=3)
        expected = expected_of(call)
        work, ours = begin(live, call)
        assert ours
        del work
        data = gaussian(2000, seed=rank)
        carry_out(live, "all_gather_into_tensor", torch.empty(world * 2000, dtype=data.dtype), data)
        assert_same_bits(call.output, expected, "dropped")


def case_pair_capacities_agree(rank, world):
    """Both ends of a pair keep the same state through overflows, growth, giving up and trying again, with sizes that change."""
    with runtime() as live:
        numbers = random.Random(5)
        for step in range(12):
            matrix = [[numbers.choice((0, SMALL, BIG, BIG + 7, 2 * BIG)) for _ in range(world)] for _ in range(world)]
            pairs = {(numbers.randrange(world), numbers.randrange(world)) for _ in range(2)} if step % 3 else set()
            check(live, _spoiled(pairs)(rank, matrix, seed=step), f"step {step}")
        state = live.state(dist.group.WORLD, torch.get_default_device())
        live.settle(dist.group.WORLD)
        mine = {key[1:]: vars(capacity) for key, capacity in state._pair_capacities.items()}
        everyones = [None] * world
        dist.all_gather_object(everyones, mine)
        compared = 0
        for sender in range(world):
            for (peer, outgoing, dtype, size), capacity in everyones[sender].items():
                if outgoing:
                    assert everyones[peer][sender, False, dtype, size] == capacity, (sender, peer, size)
                    compared += 1
        assert compared >= world


def case_all_to_all_strides_and_aliasing(rank, world):
    """C25, C26: transposed, sliced and expanded tensors; input and output in one buffer."""
    with runtime() as live:
        plain = gaussian(world * 2048, seed=rank).view(world * 32, 64)
        strided = {"transposed": plain.view(64, world * 32).t(), "expanded": gaussian(64, seed=rank).expand(world * 32, 64),
                   "sliced": gaussian(world * 4096, seed=rank).view(world * 32, 128)[:, 3:67]}
        for name, data in strided.items() if not plain.is_cuda else ():                 # NCCL refuses them
            expected = torch.empty(data.shape, dtype=data.dtype)
            dist.all_to_all_single(expected, data.contiguous())
            out = torch.empty(64, world * 32, dtype=data.dtype).t() if name == "transposed" else torch.empty(data.shape, dtype=data.dtype)
            assert carry_out(live, A2A, out, data), name
            assert_same_bits(out.contiguous(), expected, name)
        buffer = torch.cat([plain.view(-1), torch.zeros(plain.numel(), dtype=plain.dtype)])
        expected = torch.empty_like(plain.view(-1))
        dist.all_to_all_single(expected, plain.view(-1))
        assert carry_out(live, A2A, buffer[plain.numel():], buffer[:plain.numel()])
        assert_same_bits(buffer[plain.numel():], expected, "one buffer")
        assert_same_bits(buffer[:plain.numel()], plain.view(-1), "the input is as it was")


def case_all_to_all_under_autograd(rank, world):
    """C26: the gradient of a sum is expanded; forward and backward are exchanges."""
    with runtime() as live:

        class Exchange(torch.autograd.Function):

            @staticmethod
            def forward(ctx, data):
                out = torch.empty_like(data)
                carry_out(live, A2A, out, data)
                return out

            @staticmethod
            def backward(ctx, grad):
                assert not grad.is_contiguous()
                grad = grad.contiguous() if grad.is_cuda else grad          # NCCL refuses such tensors, and we as it
                out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)          # this thread has another default
                carry_out(live, A2A, out, grad)
                return out

        data = gaussian(world * 4096, seed=rank).view(-1, 16).requires_grad_()
        out = Exchange.apply(data)
        expected = torch.empty_like(data)
        dist.all_to_all_single(expected, data.detach())
        assert_same_bits(out, expected.detach(), "forward")
        (out.sum() * (rank + 1)).backward()
        wanted = torch.cat([torch.full((4096,), float(peer + 1), dtype=data.dtype) for peer in range(world)]).view_as(data)
        assert_same_bits(data.grad, wanted, "backward")
        assert live.stats.snapshot()[A2A]["calls_zipped"] == 2


def case_wrong_splits_fail_as_native(rank, world):
    """C37: the same error on every rank, and what native takes we take."""
    wrong = {"sum": [2] * world, "length": [3 * world], "negative": [3 * world + 1] + [0] * (world - 2) + [-1]}
    with runtime() as live:
        for name, rows in wrong.items():
            data, out = (torch.zeros(3 * world, 700, dtype=torch.bfloat16) for _ in range(2))
            assert front_reason(live, Call(A2A, out, data, dist.group.WORLD, input_splits=elems_per_rank(data, rows),
                                           output_splits=elems_per_rank(out, rows))) == "shape", name
            if name != "negative":               # gloo dies of those
                with pytest.raises((RuntimeError, ValueError)):
                    dist.all_to_all_single(out, data, rows, rows)
        for shape in ((3 * world + 1, 700), ()):
            data, out = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))
            assert front_reason(live, Call(A2A, out, data, dist.group.WORLD)) == "shape", shape
        data = torch.zeros(world * 2000, dtype=torch.bfloat16)
        assert front_reason(live, Call(A2A, torch.zeros(world * 2000), data, dist.group.WORLD)) == "shape"
        assert front_reason(live, Call(A2A, data[:-world], data, dist.group.WORLD)) == "shape"
        assert front_reason(live, Call(LIST, data.chunk(world)[1:], data.chunk(world), dist.group.WORLD)) == "shape"
        assert front_reason(live, Call(LIST, (), (), dist.group.WORLD)) == "shape"


def front_reason(live, call):
    from ds_zipccl.backend import front
    before = live.stats.snapshot().get(call.op, {"native_reasons": {}})["native_reasons"]
    assert front.run(live, call) is None
    after = live.stats.snapshot()[call.op]["native_reasons"]
    (reason,) = [r for r in after if after[r] != before.get(r, 0)]
    return reason


def case_adaptive_all_to_alls_agree(rank, world):
    """Sizes differ from rank to rank, so do reasons; nobody waits for a probe that another does not make."""
    with runtime(collectives="adaptive", min_bytes=1 << 22) as live:
        for rows in (SMALL, BIG):
            for seed in range(3):
                check(live, split_call(rank, [[rows] * world for _ in range(world)], seed=seed), f"nobody could zip {seed}")
        state = live.state(dist.group.WORLD, torch.get_default_device())
        assert state.measured("pair", torch.bfloat16).costs is None
        big = (1 << 22) // (2 * WIDTH * world) + 1
        for seed in range(4):
            matrix = [[big if (i, j) == (0, world - 1) else SMALL for j in range(world)] for i in range(world)]
            check(live, split_call(rank, matrix, seed=seed), f"one pair could {seed}")
        costs, everyones = state.measured("pair", torch.bfloat16).costs, [None] * world
        dist.all_gather_object(everyones, costs)
        assert costs is not None and all(other == costs for other in everyones), everyones


def case_bytes_on_the_wire_are_counted(rank, world):
    sent, original = [], all_to_all.exchange_bytes

    def measuring(received, pieces, *rest):
        sent.append(sum(piece.numel() for piece in pieces))
        return original(received, pieces, *rest)

    all_to_all.exchange_bytes = measuring
    try:
        with payloads_by_torch(), runtime() as live:
            for name in ("equal", "frames beside raw pieces", "random"):
                before = live.stats.snapshot().get(A2A, {"raw_bytes": 0, "wire_bytes": 0})
                matrix, calls = matrices(world)[name], len(sent)
                call = split_call(rank, matrix)
                ours = check(live, call, name)
                row = live.stats.snapshot()[A2A]
                raw, wire = (row[key] - before[key] for key in ("raw_bytes", "wire_bytes"))
                assert raw == sum(rows for peer, rows in enumerate(matrix[rank]) if peer != rank) * WIDTH * 2
                assert wire == specs()[A2A].wire_bytes(call) and len(sent) == calls + ours
                words = sum(rows >= BIG for peer, rows in enumerate(matrix[rank]) if peer != rank)
                assert not ours or wire == sent[-1] + 4 * words, name
    finally:
        all_to_all.exchange_bytes = original


def case_flipped_bit_in_an_exchange_is_seen(rank, world):
    """The comparisons above can fail: a bit of a frame and a bit of a raw piece."""
    original = transport.exchange_bytes
    for rows, at in ((BIG, 128 + 256 + 3 * 384 + 10), (SMALL, 5))[:world - 1]:      # of two ranks, a raw piece would be all

        def flipping(received, sent, *rest, at=at):
            return spoiled(original(received, sent, *rest), lambda: flip(received[(rank + 1) % world], at, 0x80))

        with payloads_by_torch(), runtime() as live:
            matrix = [[rows if j == (i - 1) % world else 2 * BIG for j in range(world)] for i in range(world)]
            call = split_call(rank, matrix)
            all_to_all.exchange_bytes = flipping
            try:
                work, ours = begin(live, call)
                work.wait()
            finally:
                all_to_all.exchange_bytes = original
            expected = expected_of(call)
            assert ours
            with pytest.raises(AssertionError, match="elements differ"):
                assert_same_bits(call.output, expected)
