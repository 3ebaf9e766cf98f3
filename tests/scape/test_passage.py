"""Residuals in host memory on their way through a device whose streams run whenever they like: nothing but the waits keeps the order."""
import random

import pytest
import torch

from ds_scape.kernels.loader import choose
from ds_scape.optimizer.offload import enter
from ds_scape.optimizer.passage import Passage, host_residual
from tests.helpers.bits import assert_same_bits

CPU = torch.device("cpu")


class UnrulyStreams:
    """Copies run late: at a random later call, or when somebody waits for them. What the caller computes itself ("work") runs at once."""

    def __init__(self, seed):
        self.haste = ((0, 0, 1, 3), (0, 0, 0, 0, 0, 0, 1))[seed % 2]
        self.random, self.queues, self.num_run = random.Random(seed), {"in": [], "out": []}, {"in": 0, "out": 0}

    def copy(self, side, target, source):
        self.queues[side].append(lambda: target.copy_(source))
        self._run_some()

    def mark(self, side):
        return None if side == "work" else (side, len(self.queues[side]))

    def wait(self, side, event):
        if event is not None:
            if side == "work":
                self.finish(event)
            else:
                self.queues[side].append(lambda: self.finish(event))
        self._run_some()

    def finish(self, event):
        side, number = event if event is not None else ("in", 0)
        while self.num_run[side] < number:
            self.num_run[side] += 1
            self.queues[side][self.num_run[side] - 1]()

    def _run_some(self):
        for side in self.random.sample(("in", "out"), 2):
            for _ in range(self.random.choice(self.haste)):
                self.finish((side, min(self.num_run[side] + 1, len(self.queues[side]))))


def test_the_streams_run_late():
    streams = UnrulyStreams(0)
    hosts = [torch.zeros(10) for _ in range(40)]
    for host in hosts:
        streams.copy("out", host, torch.ones(10))
    assert not all(host.any() for host in hosts) and any(host.any() for host in hosts)
    streams.finish(streams.mark("out"))
    assert all(host.all() for host in hosts)


@pytest.mark.parametrize("num_buffers", [2, 3, 5])
@pytest.mark.parametrize("seed", range(30))
def test_any_order_that_the_waits_allow_gives_the_same_bits(num_buffers, seed):
    """One or two residuals over many steps, pieces of 100: begun early or not, skipped steps, settled now and then. (Found by this:
    leaving out any of the waits for a buffer to be free, for a piece to have come, for the last pass to be written back.)"""
    kernels, choice = choose("reference", "cpu"), random.Random(seed)
    numbers = torch.Generator().manual_seed(seed)
    passage = Passage(CPU, 100, num_buffers, UnrulyStreams(seed))
    sizes = choice.choice(((730, 260), (260,), (90, 150), (1050,)))
    hosts, plain = ([host_residual(n, torch.float32, CPU) for n in sizes] for _ in range(2))
    for _ in range(12):
        if choice.random() < 0.7:
            passage.begin(hosts[0])
        if choice.random() < 0.2:
            passage.settle()
            for host, expected in zip(hosts, plain, strict=True):
                assert_same_bits(host, expected, "settled")
            if choice.random() < 0.5:
                for a, b in zip(hosts, plain, strict=True):     # who has settled may write, as loading a checkpoint does
                    a.mul_(0.5)
                    b.mul_(0.5)
        if choice.random() < 0.2:
            continue                                            # a step that is skipped
        for host, expected in zip(hosts, plain, strict=True):
            n = len(host)
            gradient = torch.randn(n, generator=numbers)
            index = None if choice.random() < 0.2 else torch.randperm(n, generator=numbers)[:n // 7].sort().values
            values, _, after = enter(host, passage, gradient, 0.7, index, torch.bfloat16, slice(40, 85), False, kernels)
            sent = torch.empty(n if index is None else len(index), dtype=torch.bfloat16)
            kernels.enter(expected, gradient, 0.7, index, sent)
            assert_same_bits(values, sent, "values")
            assert_same_bits(after, expected[40:85], "own part")
    passage.settle()
    for host, expected in zip(hosts, plain, strict=True):
        assert_same_bits(host, expected, "residual")


def test_nothing_waits_on_the_host_at_the_end_of_a_pass():
    """The last pieces are written back later: only settle() waits for them."""
    streams = UnrulyStreams(1)
    streams._run_some = lambda: None
    passage, host = Passage(CPU, 100, 2, streams), torch.zeros(450)
    for _, piece in passage.pieces(host):
        piece += 1
    assert not host[-150:].any() and host[:200].all()
    passage.settle()
    assert host.all()
