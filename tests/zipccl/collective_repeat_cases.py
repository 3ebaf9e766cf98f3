"""Cases run on every rank by test_collectives.py: what is made ready for one call serves the next of its kind (collectives/launch.py)."""
import contextlib
import random
from unittest import mock

import torch
import torch.distributed as dist

from ds_zipccl.collectives import launch as launching
from ds_zipccl.collectives import streams, switch
from ds_zipccl.collectives.cost import Costs, Curve
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import loader, ops
from tests.helpers.bits import assert_same_bits, gaussian, random_bits
from tests.helpers.ranks import stands_for_a_gpu
from tests.zipccl.collective_helpers import AG, RS, begin, everyones_sum, gathered, rank_order_sum, runtime, sent_again_soon

OPS = tuple(specs(internal=True))
BF16 = torch.bfloat16


def call_and_result(op, rank, world, row, seed, noise=False, group=None):
    """A call with new tensors, and what its outputs must become, from torch's own collectives and the documented sum."""
    numel = row if op in (AG, "all_gather") else world * row - (op == "all_reduce")
    data = random_bits(numel, seed=seed + rank) if noise and rank == world - 1 else gaussian(numel, seed=1000 * rank + seed)
    data = torch.where(data.isfinite(), data, torch.ones_like(data))        # the sum of a NaN is another matter
    group, root, output, sent = group or dist.group.WORLD, None, None, data
    if op in (AG, "all_gather"):
        result, output = gathered(data, world), torch.empty(world * row, dtype=BF16)
    elif op in (RS, "reduce_scatter", "reduce_scatter_uneven"):
        result, output = rank_order_sum(data, rank, world), torch.empty(row, dtype=BF16)
    elif op == "reduce_to_owner":               # rank 0
        result = everyones_sum(data, world)[:numel if rank == 0 else 0]
        output, sent = torch.empty_like(result), (data, *[data[:0]] * (world - 1))
    elif op in ("all_to_all_single", "all_to_all"):
        result, output = gathered(data, world).view(world, world, row)[:, rank].reshape(-1), torch.empty_like(data)
    elif op == "all_reduce":
        result, output = everyones_sum(data, world), data
    else:
        result, output, root = gathered(data, world).view(world, -1)[-1].clone(), data, world - 1
    if op in ("all_gather", "all_to_all"):
        output = output.split(row)
    if op in ("reduce_scatter", "reduce_scatter_uneven", "all_to_all"):
        sent = data.split(row)
    return Call(op, output, sent, group, root=root), result


def check(call, ours, result, where):
    """A reduction that went native beyond two ranks is another sum."""
    if ours or not specs(internal=True)[call.op].reduces or call.world_size == 2:
        assert_same_bits(torch.cat([t.view(-1) for t in call.outputs]), result, where)


def begin_ours(live, call):
    """A call as ``begin`` carries it out, also of an internal form."""
    if call.op in specs():
        return begin(live, call)
    work = live.run(call)
    return (specs(internal=True)[call.op].native(call), False) if work is None else (work, True)


@contextlib.contextmanager
def counted():
    """A list that grows with every flight that is made."""
    made, original = [], launching.Flight.__init__

    def counting(self, *args):
        made.append(type(self).__name__)
        original(self, *args)

    launching.Flight.__init__ = counting
    try:
        yield made
    finally:
        launching.Flight.__init__ = original


def repeat(live, rank, world, made):
    """Calls of all forms with new data in each, two sizes in turns, three in flight and waited for in an order of the rank's own; one
    overflows in the middle, after which the next has more room. Says how many flights the second half made."""
    for turn in range(12):
        flying = []
        for i, op in enumerate(OPS):
            noise = turn == 4 and i % 3 == 0
            call, result = call_and_result(op, rank, world, (3000, 5000)[(turn + i) % 2], 50 * turn + i, noise)
            flying.append((*begin_ours(live, call), call, result))
            if len(flying) == 3:
                for work, ours, call, result in reversed(flying) if (rank + turn) % 2 else flying:
                    work.wait()
                    check(call, ours, result, f"{call.op}, turn {turn}")
                flying = []
        for work, ours, call, result in flying:
            work.wait()
            check(call, ours, result, f"{call.op}, turn {turn}")
        if turn == 7:
            before = len(made)
    return len(made) - before


def case_repeated_calls(rank, world):
    with runtime() as live, counted() as made:
        assert repeat(live, rank, world, made) <= 2 * 12, made          # lists of all_to_all are made anew for each call
        stats = live.stats.snapshot()
        assert sum(row["overflows"] for row in stats.values()) >= 2
        assert all(stats[op]["calls_zipped"] >= 6 for op in OPS), stats
        assert made.count("_Gather") <= 8 and made.count("_Broadcast") <= 4, made


def case_repeated_calls_with_little_memory(rank, world):
    """What is idle stays within the bound; what was used last is what stays."""
    with runtime(max_workspace_bytes=1 << 20) as live, counted() as made:
        repeat(live, rank, world, made)
        for turn in range(4):
            for row in (3000, 20000):
                call, result = call_and_result(AG, rank, world, row, turn)
                work, ours = begin(live, call)
                work.wait()
                check(call, ours, result, row)
                assert live.workspace.held_bytes <= 1 << 20
        held = sum(item.num_bytes if isinstance(item, launching.Flight) else item.numel()
                   for stack in live.workspace._idle.values() for item in stack)
        assert held == live.workspace.held_bytes > 0
        before = len(made)
        for turn in range(3):
            call, result = call_and_result(AG, rank, world, 20000, turn)
            begin(live, call)[0].wait()
            assert_same_bits(call.output, result, "again")
        assert len(made) == before


@stands_for_a_gpu
def case_filled_early(rank, world):
    """As on a GPU: the output is filled before the status words are known, and again after an overflow. (Here with kernels that do not
    raise for a frame that overflowed, as CUDA's.)"""
    original, chosen = launching.Launch.__init__, ops.kernel_set(loader.resolve("best", "cpu"))

    def quiet(name):
        def run(*args):
            with contextlib.suppress(FrameError):
                return getattr(chosen, name)(*args)
        return run

    def bind(name):
        def binder(*args):
            bound = getattr(chosen, f"bind_{name}")(*args)

            def run(*tensors):
                with contextlib.suppress(FrameError):
                    bound(*tensors)
            return run
        return binder

    class Quiet:
        encode, bind_encode, decode, decode_reduce = chosen.encode, chosen.bind_encode, quiet("decode"), quiet("decode_reduce")
        bind_decode, bind_decode_reduce = bind("decode"), bind("decode_reduce")

    def early(self, **fields):
        original(self, **fields)
        self.may_be_early = True

    ops.register("quiet", vars_of(Quiet), ("cpu",))
    known, loader.load = loader.load, lambda name: None if name == "quiet" else known(name)
    launching.Launch.__init__ = early
    try:
        with runtime() as live, counted() as made:
            live.kernels = {"cpu": "quiet"}
            repeat(live, rank, world, made)
            assert sum(row["overflows"] for row in live.stats.snapshot().values()) >= 2
            flights = [item for stack in live.workspace._idle.values() for item in stack if isinstance(item, launching.Flight)]
            assert flights and all(flight.is_early or type(flight).__name__ == "_Reduction" for flight in flights)
            data = random_bits(world * 3500, seed=rank + 40)
            data = torch.where(data.isfinite(), data, torch.ones_like(data))
            in_place, before = data.clone(), live.stats.snapshot()[RS]["overflows"]
            work, _ = begin(live, Call(RS, in_place.view(world, -1)[rank], in_place, dist.group.WORLD))
            work.wait()
            assert_same_bits(in_place.view(world, -1)[rank], rank_order_sum(data, rank, world), "in place, sent again")
            assert live.stats.snapshot()[RS]["overflows"] == before + 1
    finally:
        launching.Launch.__init__, loader.load = original, known


def vars_of(functions):
    class Plain:
        pass

    for name in ("encode", "decode", "decode_reduce", "bind_encode", "bind_decode", "bind_decode_reduce"):
        setattr(Plain, name, staticmethod(vars(functions)[name]))
    return Plain


@contextlib.contextmanager
def streams_by_name():
    """(on, name_of, joined): ``on(name)`` is a context in which the stream "a", "b" or "c" is current, of which a CPU has the names alone;
    ``name_of(handle)``; a list of (stream, the one at which a mark that it joined was set)."""
    now, joined, on_gpu = ["a"], [], torch.get_default_device().type == "cuda"
    real = {name: torch.cuda.Stream() for name in "abc"} if on_gpu else {}
    names = {stream.cuda_stream: name for name, stream in real.items()}

    @contextlib.contextmanager
    def on(name):
        before, now[0] = now[0], name
        with torch.cuda.stream(real.get(name)):
            yield
        now[0] = before
        if on_gpu:
            torch.cuda.synchronize()            # tensors of this stream are read on others

    class Mark(streams.Mark):
        __slots__ = ()

        def join(self):
            mine = streams.current(self._device)
            if self.stream not in (None, mine):
                joined.append((names.get(mine, mine), names.get(self.stream, self.stream)))
            super().join()

    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(streams, "Mark", Mark))
        if not on_gpu:
            patched.enter_context(mock.patch.object(streams, "current", lambda device: now[0]))
            patched.enter_context(mock.patch.object(streams, "join", lambda device, other: None))
        yield on, lambda handle: names.get(handle, handle), joined


def case_every_stream_has_its_own(rank, world):
    """Calls of one kind on two streams never share what is in flight or idle; one that ended on a third comes back to its own stream, which
    first waits for the end."""
    with streams_by_name() as (on, name_of, joined), runtime() as live, counted() as made:
        for turn in range(6):
            with on("ab"[turn % 2]):
                call, result = call_and_result(AG, rank, world, 4000, turn)
                work, _ = begin(live, call)
                if turn != 4:
                    work.wait()
            if turn == 4:
                with on("c"):
                    work.wait()
            assert_same_bits(call.output, result, turn)
        idle = {key: stack for key, stack in live.workspace._idle.items() if stack and isinstance(stack[-1], launching.Flight)}
        assert len(made) == 2 and {name_of(key[1]) for key in idle} == {"a", "b"}, (made, list(idle))
        joined.clear()
        with on("a"):
            call, result = call_and_result(AG, rank, world, 4000, 99)
            begin(live, call)[0].wait()
        assert_same_bits(call.output, result, "after")
        assert len(made) == 2 and ("a", "c") in joined, (made, joined)


def case_kinds_are_told_apart(rank, world):
    """Calls that differ in one thing only, after one of each has been made ready."""
    with runtime() as live:
        for turn in range(3):
            data = gaussian(world * 3000, seed=turn + 10 * rank)
            for root in range(world):
                tensor = data.clone()
                begin(live, Call("broadcast", tensor, tensor, dist.group.WORLD, root=root))[0].wait()
                assert_same_bits(tensor, gathered(data, world).view(world, -1)[root], f"root {root}")
            whole = torch.empty(world, world * 3000, dtype=BF16)
            whole[rank] = data
            begin(live, Call(AG, whole, whole[rank], dist.group.WORLD))[0].wait()
            assert_same_bits(whole.view(-1), gathered(data, world), "in place")
            if data.device.type == "cpu":              # NCCL takes tensors in one piece only
                apart = torch.empty(world * 3000, world, dtype=BF16).t()         # as many elements, not in one piece
                begin(live, Call(AG, apart, data, dist.group.WORLD))[0].wait()
                assert_same_bits(apart.reshape(-1), gathered(data, world), "strided output")
                strided = torch.stack([data, data], 1)[:, 0]
                out = torch.empty(world * data.numel(), dtype=BF16)
                begin(live, Call(AG, out, strided, dist.group.WORLD))[0].wait()
                assert_same_bits(out, gathered(data, world), "strided input")
            for reduce_op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, None):
                out = torch.empty(3000, dtype=BF16)
                work, ours = begin(live, Call(RS, out, data, dist.group.WORLD, reduce_op))
                work.wait()
                if ours:
                    divisor = world if reduce_op == dist.ReduceOp.AVG else 1
                    assert_same_bits(out, rank_order_sum(data, rank, world, divisor), reduce_op)


def case_a_group_takes_its_calls_with_it(rank, world):
    """After its end nothing that was made ready for it is kept; another group of the same ranks starts anew."""
    with runtime() as live, counted() as made:
        for turn in range(2):
            group = dist.new_group(list(range(world)))
            for _ in range(2):
                call, result = call_and_result(AG, rank, world, 3000, turn, group=group)
                begin(live, call)[0].wait()
                assert_same_bits(call.output, result, turn)
            assert len(made) == turn + 1 and live.workspace.held_bytes > 0
            live.close(group)
            assert live.workspace.held_bytes == 0 and not live._kinds
            dist.destroy_process_group(group)


def case_probes_are_not_counted_as_calls(rank, world):
    """Also where calls like theirs are known to go native: ranks forget such calls at different times, and must count alike."""
    with runtime(collectives="adaptive") as live:
        call, _ = call_and_result(AG, rank, world, 20000, 1)
        state = live.state(call.group, call.device)
        measured = state.measured(AG, BF16)
        measured.costs = Costs(Curve((1, 2), (1.0, 2.0)), Curve((1, 2), (5.0, 10.0)), 1.41)
        for count in (1, 2):                # the second time it is known
            assert not begin(live, call)[1] and measured.num_calls == count
        kinds = {}
        for _ in range(3):
            assert live._run_to_end(specs()[AG], call, state, kinds)
        assert measured.num_calls == 2 and len(kinds) == 1


@contextlib.contextmanager
def repeats_as_on_a_gpu(live):
    """A list that grows with every call that is launched like an earlier one, without a decision."""
    hits, launch, init, capturing = [], live.repeats.launch, launching.Kind.__init__, streams.is_capturing

    def made(self, *args):
        init(self, *args)
        self.on_gpu = True

    def counting(call):
        kind, flight = launch(call)
        hits.extend([call.op] * (flight is not None))
        return kind, flight

    live.repeats.launch, launching.Kind.__init__ = counting, made
    if torch.get_default_device().type == "cpu":
        streams.is_capturing = lambda: False
    try:
        yield hits
    finally:
        launching.Kind.__init__, streams.is_capturing = init, capturing


def forget_something(live, own):
    """Of what no rank tells the others, whether it knows it."""
    tables = [table for _, table in live.native_calls._tables.values()]
    for known in own.sample([live.repeats._known, live._kinds, *tables], 2):
        known.clear()
    live.workspace.drop(lambda flight: own.random() < 0.5)


def case_data_that_gets_better_is_zipped_again(rank, world):
    """Natively nobody sees it: what had no zipped call since the last look is zipped anew, by ranks that forget at different times."""
    own, original = random.Random(rank), switch.measure
    costs = Costs(Curve((1, 1 << 20), (1.0, 1000.0)), Curve((1, 1 << 20), (0.95, 950.0)), 1.41)       # little, and at this ratio alone
    switch.measure = lambda *_: costs
    try:
        with (mock.patch.object(ZipcclConfig, "look_calls", 10), runtime(collectives="adaptive", reprobe_calls=1000) as live,
              repeats_as_on_a_gpu(live)):
            ways = []
            for turn in range(90):
                data = gaussian(40960 if turn % 3 == 0 else 32768, seed=100 * turn + rank)
                if 11 <= turn < 55 and turn % 3:
                    data[::8] *= torch.exp2(torch.arange(len(data[::8])) % 90 - 45.0).to(data.dtype)
                out = torch.empty(world * len(data), dtype=BF16)
                work, ours = begin(live, Call(AG, out, data, dist.group.WORLD))
                work.wait()
                assert_same_bits(out, gathered(data, world), turn)
                ways.append(ours)
                if rank and turn % 10 == 8:
                    live.repeats._known.clear()
                    live._kinds.clear()
                elif rank and own.random() < 0.2:
                    forget_something(live, own)
            everyones = [None] * world
            dist.all_gather_object(everyones, ways)
            assert all(each == ways for each in everyones), everyones
            assert all(ways[::3]) and all(ways[:20]), ways
            ways = [ours for turn, ours in enumerate(ways) if turn % 3]
            assert ways[20:36].count(False) >= 10 and any(ways[20:36]) and all(ways[-6:]), ways
    finally:
        switch.measure = original


@sent_again_soon()
def case_ranks_forget_at_different_times(rank, world):
    """Rank 0 remembers all calls, the others do not: the same decisions, also where costs are measured anew, and the same bits."""
    common, own, turns, original = random.Random(3), random.Random(rank), (), switch.measure
    slower = iter([0.7, 0.95, 0.7, 1.2] * 20)

    def measure(*_):
        return Costs(Curve((1, 1 << 20), (1.0, 1000.0)), Curve((1, 1 << 20), (factor := next(slower), 1000.0 * factor)), 1.41)

    switch.measure = measure
    try:
        for choice in ("always", "adaptive"):
            with runtime(collectives=choice, reprobe_calls=8, deterministic_reduce=False) as live, repeats_as_on_a_gpu(live) as hits:
                flying = []
                for turn in range(80):
                    noisy = {30: AG, 50: RS}.get(turn)                  # from the next one on that are incompressible
                    op = noisy or common.choice((AG, RS, "broadcast", "all_reduce", "all_to_all_single"))
                    call, result = call_and_result(op, rank, world, 3000, turn, bool(noisy))
                    flying.append((*begin_ours(live, call), call, result))
                    if rank and own.random() < 0.2:
                        forget_something(live, own)
                    while len(flying) > own.randrange(3):
                        work, ours, call, result = flying.pop(own.randrange(len(flying)))
                        work.wait()
                        check(call, ours, result, f"{call.op}, {choice}, turn {turn}")
                for work, ours, call, result in flying:
                    work.wait()
                    check(call, ours, result, f"{call.op}, {choice}, at the end")
                state = live.state(dist.group.WORLD, torch.get_default_device())
                rooms = [(key, capacity.spill_per_tile) for key, capacity in state.capacities.items()]
                mine = ({op: row["calls_zipped"] for op, row in live.stats.snapshot().items()}, rooms,
                        {key: measured.num_calls for key, measured in state._measured.items()})
                everyones = [None] * world
                dist.all_gather_object(everyones, mine)
                assert all(each == mine for each in everyones), everyones
                assert rank or len(hits) >= 3, hits
                turns = *turns, sum(mine[0].values())
    finally:
        switch.measure = original
    assert turns[0] > turns[1] > 15, turns
