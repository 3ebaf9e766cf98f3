"""Cases run on every rank by test_zero3_cache.py: ``cache_params`` over symmetric memory; without GPUs over a stand-in."""
import contextlib
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from ds_zipccl.backend import zero3_params
from ds_zipccl.collectives import one_sided
from ds_zipccl.collectives.symmetric_plan import words_bytes
from tests.helpers.ranks import needs_a_gpu_each, needs_stand_ins
from tests.train.zero3_cache_cases import Eventful, shared_folder
from tests.train.zero3_cache_helpers import CACHED, STEPS, compare
from tests.train.zero_cases import WIDTH, Net
from tests.zipccl.one_sided_stand_in import ONE_SIDED, stand_ins

SECTION = {**CACHED, "transport": "symmetric_memory"}
BUCKETS = {"zero_optimization": {"reduce_bucket_size": 200_000}}


class Wide(Net):
    """With a layer that has several frames in ``small_messages``."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(4 * WIDTH, 4 * WIDTH)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = hidden + self.wide(hidden.repeat(1, 1, 4)).unflatten(-1, (4, WIDTH)).sum(-2)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


@contextlib.contextmanager
def small_messages():
    """Of one tile at most."""
    kept = one_sided.memory_bytes
    one_sided.memory_bytes = lambda config: words_bytes(2) + 8 * 120_000
    try:
        yield
    finally:
        one_sided.memory_bytes = kept


def num_frames(seen: list):
    """Notes how many slots the wide layer's shard has."""
    def between(step, engine):
        if step == 1:
            frames = getattr(engine, zero3_params.ATTRIBUTE, None)
            seen.append(frames and len(frames._slots[engine.module.wide.weight][1]))
    return between


@needs_a_gpu_each
def case_frames_come_one_sided(rank, world_size):
    """The bits of training without the cache, and of native; a shard of several frames; and every writer."""
    seen = []
    with stand_ins() as opened, small_messages():
        run = compare(num_frames(seen), world_size=world_size, section=SECTION, make=Wide, steps=3, extra=BUCKETS)
        assert ONE_SIDED or opened and seen[0] == 3, seen
        assert run.cache["one_sided"] == run.cache["gathers"] > 0 and run.cache["repairs"] == 0, run.cache
        with tempfile.TemporaryDirectory() as own:
            run = compare(Eventful(shared_folder(own)), world_size=world_size, section=SECTION)
            dist.barrier()
        assert run.cache["one_sided"] == run.cache["gathers"] > 0 and run.cache["refreshes"] == STEPS + 5, run.cache
        if not ONE_SIDED:
            assert all(stand_in.num_known > stand_in.num_gathers // 10 for stand_in in opened if stand_in.num_gathers)
            assert not any(stand_in.is_open for stand_in in opened)


@needs_stand_ins
def case_shards_of_several_frames_over_the_group(rank, world_size):
    """Where the transport was wished for, and the group has none."""
    seen = []
    with stand_ins(why_not="no_peer_access"), small_messages():
        run = compare(num_frames(seen), world_size=world_size, section=SECTION, make=Wide, steps=2, extra=BUCKETS)
    assert seen[0] == 3 and run.cache["one_sided"] == 0 < run.cache["gathers"], (seen, run.cache)


@needs_a_gpu_each
def case_little_memory_for_frames(rank, world_size):
    """What is beyond ``max_cache_bytes`` is encoded on its way."""
    with stand_ins():
        run = compare(world_size=world_size, section={**SECTION, "max_cache_bytes": 20000}, steps=2)
    assert run.cache["bypassed"]["max_cache_bytes"] > 0 and run.cache["one_sided"] == run.cache["gathers"] > 0, run.cache
