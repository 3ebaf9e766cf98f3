"""Cases run on every rank by test_collectives.py: ranks that wait in different orders. All of it is legal with native collectives, and none
of it may take much longer here: a call that needs this rank's host gets it, whatever the host waits for."""
import contextlib
import random
import time
from datetime import timedelta
from itertools import combinations

import torch
import torch.distributed as dist

from ds_zipccl.collectives import all_to_all, group_state, reduce_scatter, reduce_scatter_uneven, transport
from ds_zipccl.collectives.capacity import CALM_AFTER, LAG
from ds_zipccl.collectives.completer import RESEND_PATIENCE_S
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.transport import SideChannel
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.helpers.bits import assert_same_bits, gaussian, random_bits
from tests.zipccl import collective_all_reduce_cases, collective_cases, collective_pair_cases, collective_parts_cases
from tests.zipccl.collective_helpers import A2A, AG, RS, assert_same_sum, begin, finite, payloads_by_torch, runtime, sent_again_soon

LIMIT_S = 40                            # of a case's calls; alone they take milliseconds, and a deadlock the group's 60 s
N = 20000


@contextlib.contextmanager
def in_time():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < LIMIT_S, "ranks waited for each other"


def everyone(world, count):
    """``count`` new groups over all ranks."""
    return [dist.new_group(list(range(world))) for _ in range(count)]


class Started:
    """A call on ``group`` that needs every member's host after its launch: an all_reduce, or one that overflows. ``check`` waits for it."""

    def __init__(self, live, kind, group, seed, numel=N, make=None, may_be_native=False):
        self.rank, self.world, self.kind, self.group = group.rank(), group.size(), kind, group
        make = make or (gaussian if kind == "all_reduce" else random_bits)
        # Every rank's data is known to all: what was expected must not need a collective of its own.
        datas = [make(self.world * numel, seed=100 * seed + r) for r in range(self.world)]
        datas = [torch.where(data.isnan(), torch.ones_like(data), data) for data in datas]
        data = datas[self.rank].clone()
        if kind == "all_reduce":
            self.output = data
            self.expected = torch.cat([_sum([d.view(self.world, -1)[r] for d in datas]) for r in range(self.world)])
        elif kind == AG:
            data = data[:numel]
            self.output, self.expected = torch.empty(self.world * numel, dtype=data.dtype), torch.cat([d[:numel] for d in datas])
        elif kind == "all_to_all_single":
            self.output, self.expected = torch.empty_like(data), torch.cat([d.view(self.world, -1)[self.rank] for d in datas])
        else:
            assert kind == "reduce_scatter_tensor"
            self.output = torch.empty(numel, dtype=data.dtype)
            self.expected = _sum([d.view(self.world, -1)[self.rank] for d in datas])
        _load_comparison(self.expected)
        self.work, self.is_ours = begin(live, Call(kind, self.output, data, group))
        assert self.is_ours or may_be_native, "the case tests nothing"

    def check(self):
        self.work.wait()
        assert_same_bits(self.output, self.expected, f"{self.kind} on rank {self.rank} of {self.world}")


def _load_comparison(data):
    """CUDA loads a kernel when it is launched first, and lets no other thread of the process into the driver until the GPU is idle: a host
    that did so here could send nothing again, and its peer would wait for that."""
    assert_same_bits(data, data.clone())


def _sum(rows):
    out = torch.empty_like(rows[0])
    sum_in_order(rows, out)
    return out


KINDS = (AG, "all_reduce", "all_to_all_single", "reduce_scatter_tensor")


def _overflowed(live, kinds):
    for kind in set(kinds) - {"all_reduce"}:
        assert live.stats.snapshot()[kind]["overflows"] >= 1, "the case tests nothing"


@sent_again_soon()
def case_two_groups_waited_for_in_different_orders(rank, world):
    """Launched in one order; the first rank waits for the first group's call first, the others for the second group's."""
    for number, kinds in enumerate([*((kind, kind) for kind in KINDS), (AG, "all_reduce"), ("all_reduce", "all_to_all_single")]):
        with runtime() as live:
            groups = everyone(world, 2)
            with in_time():
                calls = [Started(live, kind, group, 10 * number + i) for i, (kind, group) in enumerate(zip(kinds, groups, strict=True))]
                for call in calls if rank == 0 else reversed(calls):
                    call.check()
            _overflowed(live, kinds)


def case_two_groups_waited_for_with_all_patience(rank, world):
    """The same once, with nothing hurried: on a GPU what overflowed is sent again when a host is stuck, not when it is late."""
    with runtime() as live:
        with in_time():
            calls = [Started(live, AG, group, 5 + i) for i, group in enumerate(everyone(world, 2))]
            start = time.monotonic()
            for call in calls if rank == 0 else reversed(calls):
                call.check()
            took = time.monotonic() - start
        _overflowed(live, [AG])
    if torch.get_default_device().type == "cuda":
        assert took > RESEND_PATIENCE_S / 2, f"{took:.1f} s: sent again while the hosts might still have been on their way"


@sent_again_soon()
def case_two_groups_launched_in_different_orders(rank, world):
    """Also the groups' first calls, which make their channels (on a GPU NCCL itself wants those in one order); and waited for in yet
    another order."""
    for turn, kind in enumerate(KINDS):
        with runtime() as live:
            groups = everyone(world, 2)
            if torch.get_default_device().type == "cuda":
                for group in groups:
                    Started(live, kind, group, 9, N // 4).check()
            with in_time():
                for again in range(2):          # the second time everything is there
                    order = (0, 1) if rank == 0 else (1, 0)
                    calls = {i: Started(live, kind, groups[i], 20 * turn + 2 * again + i, N << again) for i in order}
                    for i in reversed(order) if rank == world - 1 else order:
                        calls[i].check()
            _overflowed(live, [kind])


@sent_again_soon()
def case_a_ring_of_groups_of_two(rank, world):
    """Every pair of ranks has a group, and every rank waits for its own in an order of its own: from 3 ranks on they form rings."""
    for turn, kind in enumerate(KINDS):
        with runtime() as live:
            groups = {pair: dist.new_group(list(pair)) for pair in combinations(range(world), 2)}
            with in_time():
                calls = {pair: Started(live, kind, group, 30 * turn + sum(pair)) for pair, group in groups.items() if rank in pair}
                for pair in sorted(calls, key=lambda pair: sum(pair) if rank else -sum(pair)):
                    calls[pair].check()
            _overflowed(live, [kind])


def _natively(rank, world, group, native):
    """What a rank may block in natively, until all others have come to it too."""
    word = torch.ones(3)
    if native == "barrier":
        dist.barrier(group=group)
    elif native == "all_reduce":
        dist.all_reduce(word, group=group)
    elif native == "an awaited Work":
        dist.all_gather([torch.empty(3) for _ in range(world)], word, group=group, async_op=True).wait()
    elif native == "objects":
        dist.all_gather_object([None] * world, rank, group=group)
    elif native == "point to point":
        for peer in range(1, world):
            if rank == 0:
                dist.recv(word, peer, group=group)
            elif rank == peer:
                dist.send(word, 0, group=group)
    elif native == "the store":
        store = dist.distributed_c10d._get_default_store()
        key = f"order/{next(_keys)}"
        if rank:
            store.set(f"{key}/{rank}", "here")
        else:
            store.wait([f"{key}/{peer}" for peer in range(1, world)], timedelta(seconds=50))
    else:
        raise ValueError(native)


_keys = iter(range(1 << 30))


@sent_again_soon()
def case_one_rank_is_in_a_native_call_while_the_others_wait(rank, world):
    """Calls that do not come through this library, so nothing could be done before them."""
    natives = ("barrier", "all_reduce", "an awaited Work", "objects", "point to point", "the store")
    for turn, (kind, native) in enumerate((kind, native) for kind in (AG, "all_reduce") for native in natives):
        with runtime() as live:
            group, other = everyone(world, 2)
            with in_time():
                call = Started(live, kind, group, 40 * turn)
                if rank == 0:
                    _natively(rank, world, other, native)
                    call.check()
                else:
                    call.check()
                    _natively(rank, world, other, native)


@sent_again_soon()
def case_one_rank_dropped_its_handle(rank, world):
    for turn, kind in enumerate(KINDS):
        with runtime() as live:
            group, other = everyone(world, 2)
            with in_time():
                call = Started(live, kind, group, 50 * turn)
                if rank == 0:
                    call.work = None
                    dist.barrier(group=other)
                else:
                    call.check()
                    dist.barrier(group=other)
                live.settle(group)
            assert_same_bits(call.output, call.expected, kind)


@sent_again_soon()
def case_one_rank_ends_a_group_while_the_others_wait(rank, world):
    for turn, kind in enumerate(KINDS):
        with runtime() as live:
            group, other = everyone(world, 2)
            with in_time():
                calls = [Started(live, kind, group, 60 * turn), Started(live, kind, other, 60 * turn + 1)]
                if rank == 0:
                    live.close(other)               # completes its call, which needs the others
                    calls[0].check()
                else:
                    calls[0].check()
                    live.close(other)
                calls[1].check()


@sent_again_soon()
def case_a_call_is_there_before_later_ones_were_launched_everywhere(rank, world):
    """A thread of the group's waits for a second call, which the others launch when they have heard from this rank's first."""
    with runtime() as live:
        group, other = everyone(world, 2)
        small = torch.ones(1)
        with in_time():
            first = Started(live, AG, group, 1)
            if rank == 0:
                second = Started(live, AG, group, 2, 2 * N)
                second.work.get_future()
                time.sleep(0.1)
                first.check()
                dist.broadcast(small, 0, group=other)
            else:
                first.check()
                dist.broadcast(small, 0, group=other)
                second = Started(live, AG, group, 2, 2 * N)
            second.check()


@sent_again_soon()
def case_launches_wait_for_no_other_rank(rank, world):
    """Of classes that have been calm: one rank has launched all its calls before any other launches its first."""
    small = torch.ones(1)
    for turn, kind in enumerate(kind for kind in KINDS if kind != "all_reduce"):
        with runtime() as live:
            group, other = everyone(world, 2)
            for i in range(CALM_AFTER + 1):
                Started(live, kind, group, 70 * turn + i, make=gaussian).check()
            with in_time():
                if rank:
                    dist.broadcast(small, 0, group=other)
                calls = [Started(live, kind, group, 70 * turn + 10 + i, make=gaussian) for i in range(LAG)]
                if rank == 0:
                    dist.broadcast(small, 0, group=other)
                for call in calls if rank else reversed(calls):
                    call.check()


@sent_again_soon()
def case_capacities_agree_however_ranks_wait(rank, world):
    """Calls of several kinds and sizes, of which some overflow, on one rank or on all, some go native, some are dropped; every rank waits
    when it likes. A room that differed between ranks would be a frame of another size."""
    for seed in range(3):
        common, own = random.Random(seed), random.Random(100 * seed + rank)
        with runtime() as live:
            group, flying, dropped, kinds = everyone(world, 1)[0], [], [], set()
            for i in range(150):
                kind, numel = common.choices(KINDS, (20, 1, 20, 20))[0], common.choice((N, 1024))
                bad = common.choice([None] * 30 + [-1, *range(world)])
                makes = iter([random_bits if bad in (-1, r) else gaussian for r in range(world)])
                call = Started(live, kind, group, 1000 * seed + i, numel, make=lambda n, seed, makes=makes: next(makes)(n, seed=seed),
                               may_be_native=True)
                kinds.add((kind, call.is_ours))
                if not call.is_ours:
                    call.check()
                elif own.random() < 0.9:
                    flying.append(call)
                else:
                    call.work = None
                    dropped.append(call)
                while len(flying) > own.randrange(1, 20):
                    flying.pop(own.randrange(len(flying))).check()
                if own.random() < 0.05:
                    time.sleep(0.03)
                if common.random() < 0.05:
                    dist.all_reduce(torch.ones(1), group=group)          # past us
            for call in flying:
                call.check()
            live.settle(group)
            for call in dropped:
                assert_same_bits(call.output, call.expected, f"{call.kind}, its handle dropped")
            assert {kind for kind, is_ours in kinds if is_ours} == set(KINDS)
            state = live.state(group, torch.get_default_device())
            rooms = [(key, capacity.spill_per_tile, capacity.calls_left_out) for key, capacity in state.capacities.items()]
            assert len(rooms) >= 5 or live.config.transport == "adaptive"           # one-sided calls have none
            everyones = [None] * world
            dist.all_gather_object(everyones, rooms)
            assert all(each == rooms for each in everyones), everyones


def uneven_exchange(i, rank, world):
    """An all-to-all with splits of its own for every pair, new ones at each ``i``, some too small to be zipped: (call, result). Of each
    piece a share, which grows with ``i``, has exponents that a class has no room for until it has seen them."""
    def piece(source, target):
        low, high = sorted((source, target))
        numel = 0 if low == high else 64 if (i + low + high) % 3 <= i % 2 else 6000 + 512 * ((i * (1 + low + 2 * high)) % 11)
        data = gaussian(numel, seed=90 * i + 7 * source + target)
        wide = numel * ((i + 3 * low + high) % 23) // 100
        data[:wide] = finite(random_bits(wide, seed=i))
        return data

    pieces = [[piece(r, peer) for peer in range(world)] for r in range(world)]
    splits = tuple(len(piece) for piece in pieces[rank])
    data = torch.cat(pieces[rank])
    call = Call(A2A, torch.empty_like(data), data, dist.group.WORLD, input_splits=splits, output_splits=splits)
    return call, torch.cat([pieces[r][rank] for r in range(world)])


def case_resends_have_one_place_among_launches(rank, world):
    """Of one program on all ranks, each of which is slow at other points, words come at other times: what is queued has one order all the
    same. Streams share a GPU's queues, where a resend before a payload on one rank and behind it on another may wait for ever (seen on
    H200s). Pairs of ranks have classes and overflows of their own, and ranks that have nothing to zip count calls as well."""
    shared, own, looks = random.Random(5), random.Random(rank), dict(group_state.RESEND_LOOKS)
    before_native, exchange_pairs = Runtime.before_native, SideChannel.exchange_pairs
    group_state.RESEND_LOOKS["cpu"], Runtime.before_native = looks["cuda"], lambda *_: None             # as on GPUs
    try:
        with runtime(max_workspace_bytes=world << 19, min_bytes=4096) as live:
            order, overflow, flying = [], live.stats.overflow, []

            def counting(op, raw_bytes):
                if op != A2A:
                    order.append(f"again: {op} of {raw_bytes} bytes")
                overflow(op, raw_bytes)

            def with_peers(self, out, data):
                order.append({*out, *data})
                return exchange_pairs(self, out, data)

            live.stats.overflow, SideChannel.exchange_pairs = counting, with_peers
            for i in range(60):
                op, makes = shared.choice((AG, RS, A2A)), [shared.choice((gaussian, random_bits)) for _ in range(world)]
                numel = 7000 + 64 * i + (300_000 if i % 8 == 5 else 0)              # each a class of its own; some in parts
                datas = [finite(make(world * numel if op == RS else numel, seed=50 * i + r)) for r, make in enumerate(makes)]
                if op == A2A:
                    call, result = uneven_exchange(i, rank, world)
                elif op == AG:
                    result = torch.cat(datas)
                    call = Call(AG, torch.empty_like(result), datas[rank], dist.group.WORLD)
                else:
                    result = torch.empty(numel, dtype=torch.bfloat16)
                    call = Call(RS, torch.empty_like(result), datas[rank], dist.group.WORLD)
                    sum_in_order([data.view(world, -1)[rank] for data in datas], result)
                time.sleep(own.choice((0, 0, 1e-3, 4e-3)))
                order.append(f"launch {i}")
                flying.append((i, *begin(live, call), call.output, result))
                while len(flying) > shared.randrange(6) + 18 * (20 < i < 40):
                    time.sleep(own.choice((0, 0, 2e-3)))
                    i_waited, work, ours, out, result = flying.pop(shared.randrange(len(flying)))
                    order.append(f"wait {i_waited}")
                    work.wait()
                    assert_same_sum(out, result, ours, f"call {i_waited}")
            for *_, work, _, _, _ in flying:
                work.wait()
            everyones = [None] * world
            dist.all_gather_object(everyones, order)
    finally:
        group_state.RESEND_LOOKS.update(looks)
        Runtime.before_native, SideChannel.exchange_pairs = before_native, exchange_pairs
    counts = sum("again" in line for line in order), sum(isinstance(line, set) for line in order)
    assert min(counts) > 5, counts
    for peer, other in enumerate(everyones):
        mine, theirs = ([line for line in lines if isinstance(line, str) or of in line] for lines, of in ((order, peer), (other, rank)))
        mine, theirs = ([line if isinstance(line, str) else "the pair" for line in lines] for lines in (mine, theirs))
        assert peer == rank or theirs == mine, (peer, [pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]][:3])


def case_exchanges_by_gathers_at_2(rank, world):
    """As two GPUs without a direct link make them: the same bits where all pieces have one size, where they have not, after overflows."""
    gathers, original = [], (all_to_all.exchange_bytes, reduce_scatter.all_gather_bytes)
    uneven = {name: getattr(reduce_scatter_uneven, name) for name in ("all_gather_bytes", "broadcast_bytes", "exchange_bytes")}

    def exchange(received, sent, group, whole=None):
        gathers.append(A2A if whole is not None else "not")
        return original[0](received, sent, group, whole)

    def gather(*args):
        gathers.append(RS)
        return original[1](*args)

    def counted(name):
        def send(*args):
            gathers.append(name)
            return uneven[name](*args)

        return send

    all_to_all.exchange_bytes, reduce_scatter.all_gather_bytes = exchange, gather
    for name in uneven:
        setattr(reduce_scatter_uneven, name, counted(name))
    try:
        with payloads_by_torch():
            transport.PAIRS_GATHER = True
            for case in (collective_pair_cases.case_all_to_all_bits, collective_pair_cases.case_uneven_splits,
                         collective_pair_cases.case_pair_overflows, collective_cases.case_reduce_scatter_bits,
                         collective_cases.case_reduce_scatter_in_place_with_garbage_padding, collective_parts_cases.case_uneven_bits,
                         collective_parts_cases.uneven_bytes_of_a_pair, collective_all_reduce_cases.case_all_reduce_bits,
                         collective_all_reduce_cases.case_all_reduce_overflows_in_either_phase):
                case(rank, world)
    finally:
        all_to_all.exchange_bytes, reduce_scatter.all_gather_bytes = original
        for name, function in uneven.items():
            setattr(reduce_scatter_uneven, name, function)
    assert {A2A, RS, "not", *uneven} == set(gathers)
