"""Cases run on every rank by test_torch_pg.py, where the world is a group of backend "zipccl": every operation against a native group."""
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_zipccl
from ds_zipccl.backend.torch_pg import ZipProcessGroup
from ds_zipccl.collectives import transport
from tests.helpers.bits import assert_same_bits, gaussian, random_bits, specials
from tests.helpers.ranks import needs_peers
from tests.zipccl.torch_pg_helpers import (
    AG,
    ALL_GATHER,
    REDUCE_SCATTER,
    count,
    init_process_group,
    launch,
    like,
    native_group,
    pieces,
    torchs_collectives,
)

assert init_process_group               # used by tests/helpers/ranks.py
BF16 = torch.bfloat16
ALL_GATHER_DIM = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor              # 2.13's names, else 2.11's
REDUCE_SCATTER_DIM = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
ALL_GATHER_COALESCED = getattr(functional, "all_gather_single_coalesced", None) or functional.all_gather_into_tensor_coalesced

SPAWNED = True         # without DeepSpeed, which forked ranks have


def case_the_group_is_ours(rank, world):
    assert dist.get_backend() == "zipccl" and isinstance(dist.group.WORLD, ZipProcessGroup)
    assert (dist.get_rank(), dist.get_world_size(), dist.group.WORLD.size()) == (rank, world, world)
    assert dist.group.WORLD.group_name and dist.group.WORLD.zips_itself


def case_every_registered_collective_equals_native(rank, world):
    """On exactly summable inputs, sync and async; and it is really zipped."""
    for op, spec in torchs_collectives().items():
        output, data = spec.make_tensors(rank, world, 3000, BF16, torch.get_default_device())
        in_place = op in ("all_reduce", "broadcast")
        options = {"root": world - 1} if op == "broadcast" else {}
        before, results = count(op), []
        for group in (None, native_group()):
            for async_op in (True, False):
                out = data.clone() if in_place else like(output)
                work = launch(op, out, data, group, async_op, **options)
                if async_op:
                    work.wait()
                results.append(out)
        for result in results[:3]:
            for got, expected in zip(pieces(result), pieces(results[3]), strict=True):
                assert_same_bits(got, expected, op)
        assert count(op) == before + 2 * (world > 1), f"{op}: {ds_zipccl.statistics()[op]}"


def case_all_gather_bits(rank, world):
    for size in (1, 1025, 33000):
        for make in (gaussian, specials, random_bits):
            data = make(size, seed=17 * size + rank)
            results = [torch.empty(world * size, dtype=BF16) for _ in range(2)]
            for result, group in zip(results, (None, native_group()), strict=True):
                ALL_GATHER(result, data, group=group)
            assert_same_bits(*results, f"{make.__name__} {size}")


def case_reduce_ops_and_dtypes(rank, world):
    """C29, C31: whatever is not zipped equals native, errors included."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT,
                   dist.ReduceOp.BAND, dist._make_nccl_premul_sum(0.5), dist._make_nccl_premul_sum(1 / 3)):
            for call in ("reduce_scatter_tensor", "all_reduce"):
                outcomes = [_reduced(call, op, dtype, rank, world, group) for group in (None, native_group())]
                if isinstance(outcomes[1], torch.Tensor):
                    assert_same_bits(*outcomes, f"{call} {op} {dtype}")
                else:
                    assert outcomes[0] == outcomes[1], f"{call} {op} {dtype}: {outcomes}"


def _reduced(call, op, dtype, rank, world, group):
    """The result, or the kind of the error. Multiples of the world size: every order and every division is exact."""
    generator = torch.Generator("cpu").manual_seed(rank)
    data = (world * torch.randint(0, 8, (world * 4000,), generator=generator, device="cpu")).to(dtype).to(torch.get_default_device())
    out = data if call == "all_reduce" else torch.empty(4000, dtype=dtype)
    try:
        launch(call, out, data, group, op=op).wait()
    except (RuntimeError, TypeError, ValueError) as error:          # NCCL refuses a scaled sum of integers
        return type(error).__name__
    return out


def case_every_other_operation(rank, world):
    """What is never zipped: rooted ones, lists of unequal sizes, objects, point to point."""
    results = [_other_operations(rank, world, group) for group in (None, native_group())]
    assert results[0].keys() == results[1].keys()
    for name, expected in results[1].items():
        for got, want in zip(pieces(results[0][name]), pieces(expected), strict=True):
            if isinstance(want, torch.Tensor):
                assert_same_bits(got, want, name)
            else:
                assert got == want, name


def _other_operations(rank, world, group):
    data, last, device = gaussian(world * 700, seed=rank), world - 1, torch.get_default_device()
    done = {}

    def fresh(numel=700):
        return torch.zeros(numel, dtype=BF16)

    done["reduce"] = data.float().clone()
    dist.reduce(done["reduce"], dst=last, group=group)
    if rank != last:
        done["reduce"] = fresh()                    # unspecified there
    done["gather"] = [fresh(world * 700) for _ in range(world)] if rank == last else []
    dist.gather(data, done["gather"] or None, dst=last, group=group)
    done["scatter"] = fresh()
    dist.scatter(done["scatter"], list(data.chunk(world)) if rank == last else None, src=last, group=group)
    done["broadcast"] = data.clone()
    dist.broadcast(done["broadcast"], src=last, group=group)
    done["broadcast of integers"] = torch.arange(9) * rank
    dist.broadcast(done["broadcast of integers"], src=last, group=group)
    sent = [((2 * rank + peer) % 3) * 1500 for peer in range(world)]                # not what is received; nothing for some
    received = [((2 * peer + rank) % 3) * 1500 for peer in range(world)]
    done["uneven all_to_all_single"] = fresh(sum(received))
    dist.all_to_all_single(done["uneven all_to_all_single"], gaussian(sum(sent), seed=rank), received, sent, group=group)
    done["all_to_all of integers"] = [torch.zeros(5, dtype=torch.int64) for _ in range(world)]
    try:
        dist.all_to_all(done["all_to_all of integers"], [torch.arange(5) + 10 * rank + peer for peer in range(world)], group=group)
    except RuntimeError as error:               # torch 2.11's gloo has none
        done["all_to_all of integers"] = str(error)
    done["objects"] = [None] * world
    dist.all_gather_object(done["objects"], {"rank": rank}, group=group)
    done["broadcast of objects"] = [rank, "x" * rank]
    dist.broadcast_object_list(done["broadcast of objects"], src=last, group=group)
    done["gather of objects"] = [None] * world if rank == last else [rank]
    dist.gather_object(rank, done["gather of objects"] if rank == last else None, dst=last, group=group)
    scattered = [None]
    dist.scatter_object_list(scattered, list(range(world)) if rank == 0 else None, src=0, group=group)
    done["scatter of objects"] = scattered
    if world > 1:
        done["point to point"] = _point_to_point(data, rank, world, group, device)
    dist.barrier(group=group)
    return done


def _point_to_point(data, rank, world, group, device):
    after, before = (rank + 1) % world, (rank - 1) % world
    received = [torch.zeros_like(data) for _ in range(3)]
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, data, after, group=group),
                                    dist.P2POp(dist.irecv, received[0], before, group=group)])
    for work in works:
        work.wait()
    if device.type == "cpu":
        works = [dist.isend(2 * data, after, group=group), dist.irecv(received[1], before, group=group)]
        for work in works:
            work.wait()
    if rank == 0:
        dist.send(data, 1, group=group)
    elif rank == 1:
        dist.recv(received[2], 0, group=group)
        if device.type == "cpu":                    # from anyone
            assert received[2].any()
    if device.type == "cpu":
        if rank == 1:
            dist.send(data, 0, group=group)
        elif rank == 0:
            assert dist.recv(received[2], group=group) == 1
    return received


@needs_peers
def case_point_to_point_while_an_overflow_waits_to_be_sent_again(rank, world):
    """Natively legal: rank 0 first receives from rank 1, which first waits for a gather in flight. Its data overflowed, so rank 0 has to
    send again while it waits."""
    group = dist.new_group()
    for size in (150000, 170000):                   # two classes: each overflows at its first call
        data, out = random_bits(size, seed=rank), torch.empty(world, size, dtype=BF16)
        before, message = count(AG, "overflows"), torch.full((5,), float(rank))
        work = ALL_GATHER(out.view(-1), data, group=group, async_op=True)
        if rank == 0:
            dist.recv(message, 1)
            work.wait()
        else:
            work.wait()
            if rank == 1:
                dist.send(message, 0)
        assert count(AG, "overflows") == before + 1, "the case tests nothing"
        assert rank or bool((message == 1).all())
        assert_same_bits(out[rank], data, "own row")
    dist.destroy_process_group(group)


def case_calls_are_counted(rank, world):
    """Zipped and native, with reasons and bytes; the same words as under DeepSpeed."""
    before = ds_zipccl.statistics()
    data, out = gaussian(3000, seed=rank), torch.empty(world * 3000, dtype=BF16)
    ALL_GATHER(out, data)
    ALL_GATHER(out.float(), data.float())
    dist.gather(data, [like(data) for _ in range(world)] if rank == 0 else None)
    after = ds_zipccl.statistics()

    def change(op, what):
        return after[op][what] - before.get(op, {}).get(what, 0)

    assert change(AG, "calls_zipped") == (world > 1) and change(AG, "calls_native") == 2 - (world > 1)
    assert change(AG, "raw_bytes") == 3 * data.nbytes * (world - 1)
    assert change(AG, "wire_bytes") <= 2.8 * data.nbytes * (world - 1)
    reason = "dtype" if world > 1 else "world_size_1"
    assert after[AG]["native_reasons"][reason] > before.get(AG, {}).get("native_reasons", {}).get(reason, 0)
    assert change("gather", "calls_native") == 1 and change("gather", "raw_bytes") == (data.nbytes if rank else 0)
    assert set(after["gather"]["native_reasons"]) == {"not_zipped" if world > 1 else "world_size_1"}


class _WireDtypes(TorchDispatchMode):
    """What the native groups, or their backends, are given to send, by dtype."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def _see(self, args) -> None:
        self.seen |= {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._see(args)
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._direct = transport.direct
        transport.direct = lambda group, device: _Seen(self._direct(group, device), self._see)
        return super().__enter__()

    def __exit__(self, *exc):
        transport.direct = self._direct
        return super().__exit__(*exc)


class _Seen:
    """A backend whose collectives' arguments are looked at."""

    def __init__(self, backend, see):
        self._backend, self._see = backend, see

    def __getattr__(self, name):
        def run(*args):
            self._see(args)
            return getattr(self._backend, name)(*args)
        return run


def case_what_is_known_to_go_native_is_not_asked_again(rank, world):
    """And counted by its reduction and root, as the first call is."""
    SUM, MAX, ours = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.group.WORLD
    asked, ask = [], ZipProcessGroup._ask
    data, before = gaussian(6 * world, seed=rank), ds_zipccl.statistics()

    def since(op: str, key: str):
        now, then = (row.get(op, {}).get(key, 0) for row in (ds_zipccl.statistics(), before))
        return {reason: n - (then or {}).get(reason, 0) for reason, n in now.items()} if isinstance(now, dict) else now - then

    ZipProcessGroup._ask = lambda self, method, *args, **kwargs: (asked.append(method), ask(self, method, *args, **kwargs))[1]
    try:
        for op in (SUM, MAX, SUM, SUM, MAX):
            mine, native = data.clone(), data.clone()
            dist.all_reduce(mine, op)
            dist.all_reduce(native, op, group=native_group())
            assert_same_bits(mine, native, op)
        roots = (0, world - 1, 0)
        for root in roots:
            mine = data.clone()
            dist.broadcast(mine, root)
            assert_same_bits(mine, gaussian(6 * world, seed=root), root)
        outs = [like(data[:6]) for _ in range(3)]
        for out in outs:
            dist.reduce_scatter_tensor(out, data)
        assert_same_bits(outs[0], outs[2], "reduce_scatter")
    finally:
        ZipProcessGroup._ask = ask
    assert len(asked) == 3, asked
    assert ours._shown[ours._number]
    reason = "no_gain" if world > 1 else "world_size_1"
    wanted = {"no_gain": 3, "reduce_op": 2} if world > 1 else {reason: 5}
    assert {reason: n for reason, n in since("all_reduce", "native_reasons").items() if n} == wanted
    assert since("reduce_scatter_tensor", "native_reasons")[reason] == 3
    assert since("broadcast", "raw_bytes") == data.nbytes * roots.count(rank)


@needs_peers
def case_only_bytes_are_on_the_wire(rank, world):
    """C50: a NaN checker below us (TORCH_NCCL_NAN_CHECK) sees uint8, whatever NaNs or placeholders the user's tensors hold."""
    for op, spec in torchs_collectives().items():
        output, data = spec.make_tensors(rank, world, 3000, BF16, torch.get_default_device())
        in_place = op in ("all_reduce", "broadcast")
        for tensor in (*pieces(output), *pieces(data)):
            tensor.view(-1)[::7] = float("nan")
        before = count(op)
        for group, dtypes in ((None, {torch.uint8}), (native_group(), {BF16})):
            with _WireDtypes() as wire:
                launch(op, data if in_place else output, data, group, async_op=False, **({"root": 0} if op == "broadcast" else {}))
            assert wire.seen == dtypes, f"{op}: {wire.seen}"
        assert count(op) == before + 1


def case_functional_collectives(rank, world):
    """C35: equal to native along every dimension; by name of the group, with a mesh, and with autograd."""
    data = gaussian(world * 4096, seed=rank).view(world * 16, 256)
    mesh = init_device_mesh(torch.get_default_device().type, (world,))
    zipped = count(AG)
    for theirs in (dist.group.WORLD, (mesh, 0)):
        for dim in (0, 1):
            got = ALL_GATHER_DIM(data, dim, theirs)
            assert_same_bits(functional.wait_tensor(got), functional.wait_tensor(
                ALL_GATHER_DIM(data, dim, native_group())), f"all_gather {dim}")
            for op in ("sum", "avg", "max"):
                got = REDUCE_SCATTER_DIM(_summable(rank, world), op, dim, theirs)
                want = REDUCE_SCATTER_DIM(_summable(rank, world), op, dim, native_group())
                assert_same_bits(functional.wait_tensor(got), functional.wait_tensor(want), f"reduce_scatter {op} {dim}")
        got = functional.all_reduce(_summable(rank, world), "sum", theirs)
        want = functional.all_reduce(_summable(rank, world), "sum", native_group())
        assert_same_bits(functional.wait_tensor(got), functional.wait_tensor(want), "all_reduce")
        got = functional.all_to_all_single(data, None, None, theirs)
        assert_same_bits(functional.wait_tensor(got), functional.wait_tensor(
            functional.all_to_all_single(data, None, None, native_group())), "all_to_all")
        got = functional.broadcast(data, 0, theirs)
        assert_same_bits(functional.wait_tensor(got), functional.wait_tensor(functional.broadcast(data, 0, native_group())), "broadcast")
    gathered = ALL_GATHER_COALESCED([data, data + 1], dist.group.WORLD)
    for got, sent in zip(gathered, (data, data + 1), strict=True):
        assert_same_bits(functional.wait_tensor(got)[rank * world * 16:(rank + 1) * world * 16], sent, "coalesced")
    gradients = []
    for group in (dist.group.WORLD, native_group()):
        leaf = data.clone().requires_grad_()
        (functional.all_to_all_single_autograd(leaf, None, None, group) * (1 + rank)).sum().backward()       # C26: an expanded gradient
        gradients.append(leaf.grad)
    assert_same_bits(*gradients, "gradient of all_to_all")
    assert count(AG) == zipped + 4 * (world > 1), ds_zipccl.statistics()[AG]


def _summable(rank, world):
    generator = torch.Generator("cpu").manual_seed(rank)
    data = world * torch.randint(-8, 9, (world * 16, world * 256), generator=generator, device="cpu")
    return data.to(BF16).to(torch.get_default_device())


def case_coalescing(rank, world):
    """Without a device: torch collects the calls and makes one of them. (With one, gloo refuses here as it does natively.)"""
    before = count("all_gather_into_tensor_coalesced", "calls_native")
    data = [gaussian(1500, seed=rank + 10 * i) for i in range(3)]
    for group in (None, native_group()):
        outs = [torch.zeros(world * 1500, dtype=BF16) for _ in data]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for out, own in zip(outs, data, strict=True):
                ALL_GATHER(out, own, group=group)
        manager.wait()
        for out, own in zip(outs, data, strict=True):
            assert_same_bits(out.view(world, -1)[rank], own, "all_gather")
        sums = [torch.full((2000,), float(1 + i), dtype=BF16) for i in range(3)]
        with dist._coalescing_manager(group):
            for tensor in sums:
                dist.all_reduce(tensor, group=group)
        assert [tensor.unique().item() for tensor in sums] == [world * 1.0, world * 2.0, world * 3.0]
        rows = torch.ones(world, 800, dtype=BF16)
        outs = [torch.zeros(800, dtype=BF16) for _ in range(2)]
        with dist._coalescing_manager(group):
            for out in outs:
                REDUCE_SCATTER(out, rows.view(-1), group=group)
        assert all(bool((out == world).all()) for out in outs)
    assert count("all_gather_into_tensor_coalesced", "calls_native") == before + 1


def case_works_may_be_waited_for_in_any_order_and_have_futures(rank, world):
    works = []
    for i in range(6):
        data = gaussian(3000 + 100 * i, seed=i + 10 * rank)
        out = torch.empty(world, data.numel(), dtype=BF16)
        works.append((ALL_GATHER(out.view(-1), data, async_op=True), out, data))
    for i in (3, 0, 5):
        works[i][0].wait()
        assert_same_bits(works[i][1][rank], works[i][2], str(i))
    value = works[1][0].get_future().wait()
    assert isinstance(value, list) and all(isinstance(t, torch.Tensor) for t in value)
    assert value[0].data_ptr() == works[1][1].data_ptr()
    for i in (4, 2, 1):
        works[i][0].wait()
        assert works[i][0].is_completed()
        assert_same_bits(works[i][1][rank], works[i][2], str(i))
