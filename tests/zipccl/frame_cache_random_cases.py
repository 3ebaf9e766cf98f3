"""Cases run on every rank by test_frame_cache.py: anything that can happen to kept frames, in random order. Every gather has the right
bits, and all ranks agree afterwards, whatever each was short of."""
import random

import torch
import torch.distributed as dist

from tests.helpers.bits import assert_same_bits
from tests.zipccl.frame_cache_batch_cases import Counting
from tests.zipccl.frame_cache_cases import World, data_of
from tests.zipccl.frame_cache_one_sided_cases import one_sided_only

NUMELS = (5000, 33, 9001, 6000, 4000, 7001)
GATHERED = [0, 1, 2], [3], [4, 5], [0, 1, 2, 3, 4, 5], [2, 3]
NUM_SEEDS, NUM_STEPS = 2, 40


def agree(world: World, is_none: bool, where) -> None:
    mine = is_none, world.cache._ways.level, [
        (slot.reason, slot.codec and (slot.codec.frame_bytes, slot.codec.geometry.level), slot.stale, slot.used,
         slot.capacity.spill_per_tile, slot.capacity.calls_left_out) for slot in world.cache.slots]
    found = [None] * world.world_size
    dist.all_gather_object(found, mine)
    assert all(each == mine for each in found), (where, found)


def on_this_rank(world: World, chance: random.Random, whole: int) -> None:
    """What the others do not know of: another bound, frames that are given up, data that moves."""
    if chance.random() < 0.5:
        world.stats.max_bytes = chance.choice([0, whole // 4, whole // 2, whole * 3 // 4, 2 * whole, 2 * whole])
    if chance.random() < 0.15:
        world.cache.free()
    if chance.random() < 0.2:
        i = chance.randrange(len(NUMELS))
        world.shards[i] = moved = world.shards[i].clone()
        world.cache.slots[i].source = lambda: moved
        world.cache.changed_here([world.cache.slots[i]])


def write(world: World, chance: random.Random, seed: int) -> None:
    """On all ranks: all shards, some, or none; some do not fit."""
    some = chance.choice([len(NUMELS)] * 3 + [2, 0])
    which = chance.sample(range(len(NUMELS)), some)
    for i in which:
        spreads = [chance.choice([0.0, 0.0, 0.0, 0.0, 2.0]) for _ in range(world.world_size)]
        world.write(i, lambda r, i=i, spreads=spreads: data_of(r, NUMELS[i], seed + i, spreads[r]))
    if which:
        world.cache.changed([world.cache.slots[i] for i in which])


def gather(world: World, which: list[int], where) -> bool:
    """Whether it was launched like an earlier one."""
    slots, bases = [world.cache.slots[i] for i in which], [world.shards[i] for i in which]
    outs, known = [torch.empty_like(world.expected[i]) for i in which], world.cache.known(slots)
    if known and any(base is not shard for (base, *_), shard in zip(known._places, bases, strict=True)):
        known = None
    launched = known and known.launch(lambda: outs)
    is_known = launched is not None
    launched = launched or world.cache.gather(slots, lambda: outs, bases)
    if launched is not None:
        launched.wait()
        for i, out in zip(which, outs, strict=True):
            assert_same_bits(out, world.expected[i], (where, i))
    agree(world, launched is None, where)
    return is_known


def run(rank: int, world_size: int, on_host: bool) -> None:
    num_known, num_gathers = 0, 0
    with Counting() as seen:
        for seed in range(NUM_SEEDS):
            common, own = random.Random(seed), random.Random(1000 * seed + rank + 1)
            world = World(world_size, NUMELS)
            world.cache.comparisons.on_host = on_host
            whole = sum(2 * numel for numel in NUMELS)
            for step in range(NUM_STEPS):
                on_this_rank(world, own, whole)
                write(world, common, 31 * step + 7)
                if common.random() < 0.85:
                    world.cache.refresh()
                if common.random() < 0.3:
                    world.cache.settle()
                world.forward += common.random() < 0.7
                for _ in range(common.randrange(4)):
                    num_known += gather(world, common.choice(GATHERED), (seed, step))
                    num_gathers += 1
                assert world.stats.held_bytes == sum(slot.held_bytes for slot in world.cache.slots)
            world.close()
    assert seen.num_runs > 5 and 0 < num_known < num_gathers, (seen.num_runs, num_known, num_gathers)


def case_compared_on_the_host(rank, world_size):
    run(rank, world_size, True)


def case_compared_as_on_a_gpu(rank, world_size):
    run(rank, world_size, False)


case_one_sided = one_sided_only(case_compared_as_on_a_gpu)
