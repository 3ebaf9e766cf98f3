"""Cases run on every rank by test_collectives.py: a transport that does something wrong is noticed by the comparisons that all other cases
make. Every mutation against every collective of the registry; each is carried out right once before."""
import contextlib

import torch
import torch.distributed as dist

from ds_zipccl.collectives import transport
from ds_zipccl.collectives.registry import specs
from ds_zipccl.collectives.words import Words
from ds_zipccl.collectives.work import DoneWork
from tests.helpers.bits import assert_same_bits, random_bits
from tests.zipccl.collective_helpers import begin, finite, payloads_by_torch, runtime, spoiled
from zipscape.errors import ZipScapeError

ROW = 5000


def _lost(rows, rank):
    rows.zero_()


def _from_another_rank(rows, rank):
    rows[1:] = rows[:-1].clone()            # not merely in another order, which no sum would see


def _damaged(rows, rank):
    rows[:, ::16] ^= 0x55


def _shifted(rows, rank):
    rows.copy_(rows.roll(1, 1))


def _cut_short(rows, rank):
    rows[:, rows.shape[1] // 2:] = 0


class Channel:
    """A group's backend, or a side channel, whose messages are spoiled when they arrive: ``spoil(rows [world size, n], rank)``."""

    def __init__(self, channel, spoil, rank, world):
        self._channel, self._spoil, self._rank, self._world = channel, spoil, rank, world

    def __getattr__(self, name):
        method = getattr(self._channel, name)

        def call(first, *args):
            work = method(first, *args)
            outs = first.values() if isinstance(first, dict) else first if isinstance(first, list) else (first,)
            spoiled(DoneWork() if work is None else work, lambda: self._spoil_all(outs))
            return work

        return call if callable(method) and name not in ("close", "connect", "abort", "exchange_no_words") else method

    def _spoil_all(self, outs):
        for out in outs:
            rows = out.view(-1).view(torch.uint8)
            if rows.numel():                    # without the rank's own in some exchanges
                self._spoil(rows.view(self._world if rows.numel() % self._world == 0 else 2, -1), self._rank)


@contextlib.contextmanager
def payloads(live, spoil, rank, world):
    original = transport.direct
    transport.direct = lambda group, device: Channel(original(group, device), spoil, rank, world)
    try:
        yield
    finally:
        transport.direct = original


@contextlib.contextmanager
def resends(live, spoil, rank, world):
    state = live.state(dist.group.WORLD, torch.get_default_device())
    original = state.bulk
    state.__dict__["bulk"] = Channel(original, spoil, rank, world)
    try:
        yield
    finally:
        state.__dict__["bulk"] = original


@contextlib.contextmanager
def status_words(live, spoil, rank, world):
    """On all ranks, in both ways to ask for them: ranks that see different words would wait for each other."""
    originals = Words.tolist, Words.at_once
    Words.tolist, Words.at_once = [lambda words, ask=ask: (seen := ask(words)) and [0] * len(seen) for ask in originals]
    try:
        yield
    finally:
        Words.tolist, Words.at_once = originals


MUTATIONS = [(where, spoil, noisy) for where, noisy in ((payloads, False), (resends, True)) for spoil in (
    _lost, _from_another_rank, _damaged, _shifted, _cut_short)] + [(status_words, _lost, True)]


def _call(spec, rank, world, noisy):
    """(call, expected outputs): sums are exact in any order. ``noisy``: data that overflows."""
    call = spec.make_call(dist.group.WORLD, ROW, torch.bfloat16, torch.get_default_device())
    if noisy:
        for i, t in enumerate(call.inputs):
            noise = finite(random_bits(t.numel(), seed=10 * rank + i))
            if spec.reduces:                    # no two ranks have something at the same place
                noise[torch.arange(t.numel()) % world != rank] = 0
            t.copy_(noise.view_as(t))
    saved = [t.clone() for t in call.inputs]
    spec.native(call).wait()
    expected = [t.clone() for t in call.outputs]
    for out in call.outputs:
        out.fill_(3.0)
    for t, data in zip(call.inputs, saved, strict=True):
        t.copy_(data)
    return call, expected


def _is_right(live, call, expected) -> bool:
    try:
        work, ours = begin(live, call)
        assert ours, "the case tests nothing"
        work.wait()
        for got, wanted in zip(call.outputs, expected, strict=True):
            assert_same_bits(got, wanted, call.op)
    except (ZipScapeError, RuntimeError):
        return False
    except AssertionError as error:
        assert "tests nothing" not in str(error)
        return False
    return True


def _verdicts(live, spec, rank, world, noisy) -> list[bool]:
    """Whether a call's outputs are right, on every rank."""
    verdicts = [None] * world
    dist.all_gather_object(verdicts, _is_right(live, *_call(spec, rank, world, noisy)))
    return verdicts


def _forget_what_was_needed(live) -> None:
    """So that the next noisy call overflows again. Channels to connect once more would take a GPU a second each time."""
    live.settle(dist.group.WORLD)
    state = live.state(dist.group.WORLD, torch.get_default_device())
    state.capacities.clear()
    state._pair_capacities.clear()
    live._kinds.clear()                     # which know those of their pairs
    live.repeats.forget(state)


def case_mutations_of_the_transport_are_noticed(rank, world):
    with payloads_by_torch(), runtime() as live:
        for op, spec in specs(internal=True).items():
            for noisy in (False, True):
                before = live.stats.snapshot().get(op, {}).get("overflows", 0)
                assert all(_verdicts(live, spec, rank, world, noisy)), f"{op}: wrong without a mutation"
                assert (live.stats.snapshot()[op]["overflows"] > before) == noisy, op
                _forget_what_was_needed(live)
            for where, spoil, noisy in MUTATIONS:
                if where is status_words and spec.pairwise:
                    continue                        # the two ends would wait for each other
                with where(live, spoil, rank, world):
                    assert not all(_verdicts(live, spec, rank, world, noisy)), f"{op}: {where.__name__} {spoil.__name__} went unseen"
                _forget_what_was_needed(live)
