"""Cases run on every rank by test_collectives.py: all_reduce, its two phases, and the arithmetic of all reductions."""
import pytest
import torch
import torch.distributed as dist

from ds_zipccl.collectives import reduce_scatter, transport
from ds_zipccl.collectives.registry import Call
from ds_zipccl.errors import CollectiveError, FrameError
from tests.helpers.bits import as_ints, assert_same_bits, gaussian, random_bits, specials
from tests.zipccl.collective_helpers import (
    AG,
    RS,
    SEES_DAMAGE,
    SIGNS_OF_4096,
    Guarded,
    assert_same_sum,
    begin,
    carry_out,
    everyones_sum,
    finite,
    flip,
    gathered,
    launch,
    payloads_by_torch,
    runtime,
    spoiled,
)

SIZES = (0, 1, 1025, 3000, 33000)
MAKERS = (gaussian, specials, random_bits)


def case_all_reduce_bits(rank, world):
    """Sizes that do not come out even; every rank has the same bits, which are the documented sum."""
    with runtime() as live:
        for size in (*SIZES, world * 2000, world * 2000 + 1, world * 2000 - 1):
            for make in MAKERS:
                out = Guarded(size)
                out.tensor.copy_(make(max(1, size), seed=31 * size + rank)[:size])
                expected = everyones_sum(out.tensor, world) if size else out.tensor.clone()
                ours = carry_out(live, "all_reduce", out.tensor, out.tensor)
                out.check()
                if ours or world == 2:
                    assert_same_sum(out.tensor, expected, ours, f"{make.__name__} {size}")
        row = live.stats.snapshot()["all_reduce"]
        assert row["calls_zipped"] > 0 and row["overflows"] > 0


def case_all_reduce_overflows_in_either_phase(rank, world):
    """The parts compress and the sums do not, the parts of one rank do not, neither does."""
    size = world * 4096
    with runtime() as live:
        for i, name in enumerate(("sums", "one rank", "all", "sums", "none")):
            n = size + world * i                # classes of their own
            if name == "sums":                  # every rank's tensor is zeros and one scale, the sum is of all scales
                scale = torch.zeros(n)
                scale[rank::world] = 1.0
                data = (gaussian(n, seed=rank + i).float() * scale * torch.exp2(torch.tensor(20.0 * rank))).bfloat16()
            else:
                bad = name == "all" or (name == "one rank" and rank == 1)
                data = finite(random_bits(n, seed=i + rank)) if bad else gaussian(n, seed=i + rank)
            expected = everyones_sum(data, world)
            work, ours = begin(live, Call("all_reduce", data, data, dist.group.WORLD))
            work.wait()
            assert ours
            assert_same_bits(data, expected, name)
            capacity, of_sums = (live.state(dist.group.WORLD, data.device).capacity(op, data.dtype, n // world, 0.0)
                                 for op in ("all_reduce", "all_reduce, sums"))
            parts, sums = (each.overdue().overflow for each in (capacity, of_sums))
            assert (parts, sums) == {"sums": (False, True), "none": (False, False)}.get(name, (True, sums)), name


def case_all_reduces_in_flight(rank, world):
    """Waited for in another order on each rank, with other collectives between them; one handle dropped."""
    with runtime() as live:
        tensors, works, wanted = [], [], []
        for i in range(5):
            size = world * (2500 + i)
            data = finite(random_bits(size, seed=i + rank)) if i == 2 else gaussian(size, seed=10 * i + rank)
            wanted.append(everyones_sum(data, world))
            tensors.append(data)
            work = launch(live, "all_reduce", data, data)
            assert work is not None
            works.append(None if i == 3 else work)
            if i == 1:
                carry_out(live, AG, torch.empty(world * 2000, dtype=data.dtype), data[:2000].clone())
        del work
        for i in (range(5) if rank % 2 else reversed(range(5))):
            if works[i] is not None:
                works[i].wait()
        live.settle(dist.group.WORLD)
        for i in range(5):
            assert_same_bits(tensors[i], wanted[i], f"call {i}")


def case_incompressible_all_reduce_keeps_its_arithmetic(rank, world):
    with runtime() as live:
        for i in range(3):
            data = finite(random_bits(world * 3000 + 1, seed=50 + i + rank))
            expected = everyones_sum(data, world)
            ours = carry_out(live, "all_reduce", data, data)
            assert ours or world == 2
            assert_same_bits(data, expected, f"call {i}")
        assert live.stats.snapshot()["all_reduce"]["native_reasons"]["incompressible"] == 2


def case_reductions_are_repeatable(rank, world):
    """C33: the same bits in 100 calls, in parts of other sizes, and on a new group."""
    data = gaussian(world * 6000, seed=rank, sigma=3.0)
    first = None
    for group in (dist.group.WORLD, dist.new_group(list(range(world)))):
        with runtime() as live:
            for _ in range(100 if group is dist.group.WORLD else 5):
                out = data.clone()
                assert carry_out(live, "all_reduce", out, out, group=group)
                first = out if first is None else first
                assert_same_bits(out, first, "again")
            for parts in (2, 3):
                out = data.clone()
                for part in out.chunk(parts):
                    assert carry_out(live, "all_reduce", part, part, group=group)
                assert_same_bits(out, first, f"{parts} parts")
            part = torch.empty(6000, dtype=data.dtype)
            assert carry_out(live, RS, part, data, group=group)
            assert_same_bits(part, first.view(world, -1)[rank], "reduce_scatter")


def case_reductions_at_the_ends_of_the_range(rank, world):
    """C32: largest values, tiny beside huge; never further from the exact sum than one rounding of the fp32 sum."""
    big = torch.finfo(torch.bfloat16).max
    data = torch.empty(world * 4096, dtype=torch.bfloat16)
    values = torch.tensor([big, -big, 1e-38, -1e-38, 9e-41, 1.0, 2**-100, 0.0], dtype=torch.float32, device="cpu")
    data.copy_(values[(torch.arange(data.numel(), device="cpu") * 7 + rank * 3) % 8].to(data.device))
    with runtime() as live:
        for op in ("all_reduce", RS):
            out = data.clone() if op == "all_reduce" else torch.empty(4096, dtype=data.dtype)
            work, _ = begin(live, Call(op, out, out if op == "all_reduce" else data, dist.group.WORLD))
            work.wait()
            exact = gathered(data, world).view(world, -1).double().sum(0)
            exact = exact if op == "all_reduce" else exact.view(world, -1)[rank]
            in_range = exact.abs() <= big
            step = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(2.0**-126))) - 7)
            error = (out.double() - exact).abs()
            # half a step of BF16, and the fp32 sum's own rounding of world size terms
            slack = world * gathered(data, world).view(world, -1).double().abs().amax(0) * 2.0**-24
            slack = slack if op == "all_reduce" else slack.view(world, -1)[rank]
            assert bool((error[in_range] <= (0.5 * step + slack)[in_range]).all()), op


def case_corrupt_part_of_an_all_reduce_fails_on_all_ranks(rank, world):
    """The rank that cannot sum its part says so; nobody waits for it, and the group goes on."""
    original = transport.all_to_all_bytes

    def corrupting(out, rows, group, *more):
        return spoiled(original(out, rows, group, *more), lambda: rank == 1 and out.fill_(7))

    for integrity, words in SEES_DAMAGE:
        with payloads_by_torch(), runtime(integrity=integrity) as live:
            data = gaussian(world * 3000, seed=rank)
            reduce_scatter.all_to_all_bytes = corrupting
            try:
                works = [launch(live, "all_reduce", t, t) for t in (data.clone(), data.clone())]
            finally:
                reduce_scatter.all_to_all_bytes = original
            for work in works:
                with pytest.raises((FrameError, CollectiveError), match=words if rank == 1 else "rank 1 of group"):
                    work.wait()
            expected = everyones_sum(data, world)
            assert carry_out(live, "all_reduce", data, data)
            assert_same_bits(data, expected, f"the call after, integrity {integrity}")


def case_flipped_bits_in_either_phase_of_an_all_reduce_are_seen(rank, world):
    """The comparisons above can fail."""
    original = transport.all_to_all_bytes

    def flipped(work, out):
        return spoiled(work, lambda: flip(out.view(world, -1)[(rank + 1) % world], SIGNS_OF_4096 + 50, 0x80))

    for phase in ("parts", "sums"):
        with payloads_by_torch(), runtime() as live:
            data = gaussian(world * 4096, seed=rank, sigma=0.5)
            expected = everyones_sum(data, world)
            state = live.state(dist.group.WORLD, data.device)
            state.connect()                         # on a GPU by small messages of its own, which nobody is to change
            bulk = state.bulk
            if phase == "sums":
                bulk.all_gather = lambda out, own, gather=bulk.all_gather: flipped(gather(out, own), out)
            else:
                reduce_scatter.all_to_all_bytes = lambda out, rows, group, *more: flipped(original(out, rows, group, *more), out)
            try:
                assert carry_out(live, "all_reduce", data, data)
            finally:
                reduce_scatter.all_to_all_bytes = original
            assert not torch.equal(as_ints(data), as_ints(expected)), phase


def case_training_with_the_rank_order_sum(rank, world):
    """C34: gradients summed in BF16 natively, by us, and in fp32; ours ends no further from fp32's loss than native, within 2 %."""

    def train(reduce_gradients) -> float:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 192), torch.nn.Tanh(), torch.nn.Linear(192, 64))
        generator = torch.Generator(torch.get_default_device()).manual_seed(rank)
        goal = torch.randn(64, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(99)) / 8
        optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
        for _ in range(60):
            x = torch.randn(32, 64, generator=generator)
            loss = torch.nn.functional.mse_loss(net(x), x @ goal)
            optimizer.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.view(-1) for p in net.parameters()])
            reduced = reduce_gradients(flat).float() / world
            for p, part in zip(net.parameters(), reduced.split([p.numel() for p in net.parameters()]), strict=True):
                p.grad.copy_(part.view_as(p))
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / world

    with runtime() as live:

        def ours(grads):
            grads = grads.bfloat16()
            assert carry_out(live, "all_reduce", grads, grads)
            return grads

        def native(grads):
            dist.all_reduce(grads)
            return grads

        exact, zipped, plain = train(native), train(ours), train(lambda grads: native(grads.bfloat16()))
        assert exact < 0.5 * train(torch.zeros_like), "nothing is learned"
        assert abs(zipped - exact) <= abs(plain - exact) + 0.02 * exact, (exact, zipped, plain)
