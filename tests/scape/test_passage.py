"""Residuals in host memory on their way through a device whose streams run whenever they like: nothing but the waits keeps the order."""
import random
from unittest import mock

import pytest
import torch

from ds_scape.optimizer import spans, workspace
from ds_scape.optimizer.passage import Passage, host_zeros, piece_for
from ds_scape.sync.partition import Layout, TensorSlot, flat_layout
from tests.helpers.bits import assert_same_bits
from tests.scape.flow_helpers import Problem
from tests.scape.stream_recorder import Recorder

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
    """One to three residuals over many steps, in pieces of 100 or less that begin and end anywhere, numbers of 2 bytes with some of them:
    begun early or not (perhaps with other pieces than those that follow), only looked at, skipped steps, settled now and then. (Found by
    this: leaving out any of the waits for a piece to have come, for it to have been worked on, for the last ones to be written back.)"""
    choice, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    passage = Passage(CPU, 100, num_buffers, UnrulyStreams(seed))
    sizes = choice.choice(((730, 260), (260,), (90, 150, 40), (1050,)))
    hosts, plain = ([host_zeros(n, torch.float32, CPU) for n in sizes] for _ in range(2))

    ages, plain_ages = (torch.zeros(sizes[0], dtype=torch.int16) for _ in range(2))

    def views(tensors, ways):
        """With ages where a piece is short enough and of the first residual alone."""
        short = ages if tensors is hosts else plain_ages
        return [[*(tensors[span.flat][span.start:span.stop] for span in piece),
                 *(short[span.start:span.stop] for span in piece if len(piece) == 1 and span.flat == 0 and span.numel <= 66)]
                for piece in ways]

    wholes = [spans.Span(i, 0, 0, n) for i, n in enumerate(sizes)]
    ways = [spans.pieces(wholes, 100), spans.pieces(reversed(wholes), 100), spans.pieces(wholes, 33)]
    for _ in range(12):
        if choice.random() < 0.7 and not passage.has_begun:
            passage.begin(views(hosts, choice.choice(ways)))
        if choice.random() < 0.2:
            passage.settle()
            for host, expected in zip(hosts, plain, strict=True):
                assert_same_bits(host, expected, "settled")
            if choice.random() < 0.5:
                for tensor in (*hosts, *plain):                 # who has settled may write, as loading a checkpoint does
                    tensor.mul_(0.5)
        if choice.random() < 0.2:
            continue                                            # a step that is skipped
        way, is_kept = choice.choice(ways), choice.random() < 0.7
        for parts, expected in zip(passage.pass_through(views(hosts, way), is_kept), views(plain, way), strict=True):
            for part, same in zip(parts, expected, strict=True):
                assert_same_bits(part, same, "a piece")
                if part.dtype == torch.int16:
                    part.add_(7)
                    same.add_(7 if is_kept else 0)
                    continue
                if not is_kept:
                    part.fill_(-1)
                    continue
                gradient = torch.randn(len(part), generator=numbers)
                part.mul_(0.9).add_(gradient)
                same.mul_(0.9).add_(gradient)
    passage.settle()
    for host, expected in zip((*hosts, ages), (*plain, plain_ages), strict=True):
        assert_same_bits(host, expected, "residual")


def test_nothing_waits_on_the_host_at_the_end_of_a_pass():
    """The last pieces are written back later: only settle() waits for them."""
    streams = UnrulyStreams(1)
    streams._run_some = lambda: None
    passage, host = Passage(CPU, 100, 2, streams), torch.zeros(450)
    for parts in passage.pass_through([[part] for part in host.split(100)]):
        parts[0].add_(1)
    assert not host[-150:].any() and host[:200].all()
    passage.settle()
    assert host.all()


@pytest.mark.parametrize("age", [0, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 1000])
def test_pieces_of_tiny_models_fit_the_buffers(world_size, age):
    """However few elements there are: a piece has a coordinate of every partition, and of own ones its age."""
    for partition in (1, 2, 3, 4, 5, 50):
        numel = world_size * partition
        layout = Layout((flat_layout([TensorSlot(0, numel, 2)], numel, world_size, 0.1),), world_size)
        passage = Passage(CPU, piece_for(numel))
        assert spans.fitting(passage.piece, 4, age) > 0, "pieces of nothing never end"
        columns, partitions, _ = spans.of_steps(layout, 0, passage, 4, age, 2)
        for pieces in (columns, partitions):
            assert sum(span.numel for piece in pieces for span in piece) == numel
            assert max(sum(4 * s.numel + age * s.numel * (s.owner == 0) for s in piece) for piece in pieces) <= passage.num_bytes(4) // 2


class Echo:
    """Collectives of one of two ranks, whose peer sends what it sends."""

    def all_gather_into_tensor(self, out, own, **kwargs):
        out.view(2, -1).copy_(own.expand(2, -1))
        return mock.Mock()

    def all_to_all_single(self, out, own, **kwargs):
        out.view(2, -1).copy_(own[:out.numel() // 2].expand(2, -1))


@pytest.mark.parametrize("without", [None, "join", "prefetch"])
def test_two_streams_share_no_memory_in_no_order(without):
    """The pass ahead, and the next mask that is found beside the forward pass, on a stream of their own, in the gradients' memory too: who
    writes there next waits for it. Without that, this sees it. (Both ranks have the same masks here: their partitions are cut alike.)"""
    problem = Problem(2, dtype=torch.bfloat16, offload={"ahead": True}, shapes=[[(40, 20)] * 8], densities=(0.05,), kernels="best")
    flow, recorder = problem.flow(Echo()), Recorder()
    flow._ahead._stream = recorder.module.Stream(None)
    whole, fresh = workspace.joined(problem.buffers, torch.bfloat16)
    beside = set()
    with mock.patch.object(torch.cuda, "current_stream", recorder.module.current_stream), mock.patch.object(
            torch.cuda, "stream", recorder.module.stream), mock.patch.object(
            flow, "_start_mask", side_effect=lambda *given, of=flow._start_mask: beside.add(recorder.current.name) or of(*given)), recorder:
        for step in range(1, 7):
            flow.flats[0].copies.to(torch.float32)                      # forward
            if without != "prefetch":
                flow.prefetch()
            whole.zero_()
            found = len(recorder.races)
            for slot in reversed(problem.slots[0]):
                fresh[0][slot.offset:slot.offset + slot.numel] += problem.gradient(0, step)[0][slot.offset:slot.offset + slot.numel]
                flow.gradient_is_complete(fresh, 0, slot.offset, slot.offset + slot.numel)
            del recorder.races[found:]                                  # other parts of the gradients' memory
            with mock.patch.object(flow._ahead, "join", (lambda: None) if without == "join" else flow._ahead.join):
                flow.step(fresh, may_overwrite=True)
            assert flow.uses_gradients == (step > 1)
    assert beside == {"default", "s1"} and bool(recorder.races) == (without is not None), recorder.races[:3]
