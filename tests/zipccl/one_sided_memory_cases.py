"""Cases run on every rank by test_one_sided.py: who has symmetric memory, for how long, and what is told of it; without GPUs."""
import torch
import torch.distributed as dist

from ds_zipccl.collectives import one_sided
from tests.helpers.ranks import needs_stand_ins
from tests.zipccl.collective_helpers import AG, RS, runtime
from tests.zipccl.collective_one_sided_cases import ways_taken
from tests.zipccl.one_sided_stand_in import LARGE, SLOW, measured_at_three_sizes, opened_with_memory

BF16 = torch.bfloat16
SETTINGS = {"transport": "adaptive", "collectives": "adaptive", "deterministic_reduce": False, "max_workspace_bytes": 1 << 25}


def told(live, world) -> dict:
    """What all ranks' logs say is held, the same."""
    found, section = [None] * world, live.stats.sections.get("symmetric_memory")
    dist.all_gather_object(found, None if section is None else section())
    assert all(each == found[0] for each in found), found
    return found[0] and found[0][1]


@needs_stand_ins
def case_a_rank_without_memory(rank, world):
    """When an engine is made: then no rank has any, all go the other ways, and say why. Measured again, with memory, it is taken; it is
    given back when nothing gains by it."""
    is_full = [rank == world - 1]
    ways = [(100, SLOW, 50), (100, SLOW, 50), (100, 50, 70), (100, SLOW, 50)]
    with (measured_at_three_sizes(lambda size, turn: ways[min(turn, 3)]), opened_with_memory(lambda: not is_full[0]) as held,
          runtime(reprobe_calls=3, **SETTINGS) as live):
        group = dist.group.WORLD
        assert live.measure(AG, BF16, group, torch.device("cpu"))
        assert live.stats.snapshot()[AG]["not_one_sided"] == {"no_memory": 1} and told(live, world) is None
        assert len(held) == (0 if is_full[0] else 1) and not any(ref() for ref in held), "given back where others have none"
        assert ways_taken(live, AG, rank, world, [LARGE] * 2) == ["native"] * 2
        is_full[0] = False
        assert ways_taken(live, AG, rank, world, [LARGE] * 3) == ["one-sided"] * 3              # measured again
        assert told(live, world) == {group.group_name: 1 << 25} and [ref() is not None for ref in held][-1]
        assert ways_taken(live, AG, rank, world, [LARGE] * 3) == ["zipped"] * 3
        assert told(live, world) == {} and not any(ref() for ref in held)
        assert live.stats.snapshot()[AG]["not_one_sided"] == {"no_memory": 1}
        assert live.measure(RS, BF16, group, torch.device("cpu")) and told(live, world) == {group.group_name: 1 << 25}
    assert not any(ref() for ref in held), "the end"


@needs_stand_ins
def case_what_others_may_need_is_left(rank, world):
    """While a rank has not LEFT_FREE times as much besides, nobody allocates."""
    kept, needed = one_sided.free_bytes, (1 + one_sided.LEFT_FREE) << 25
    try:
        with (measured_at_three_sizes(lambda size, turn: (100, SLOW, 50)), opened_with_memory(lambda: True) as held,
              runtime(**SETTINGS) as live):
            for op, free, is_held in ((AG, needed - (rank == 0), False), (RS, needed, True)):
                one_sided.free_bytes = lambda device, free=free: free
                assert live.measure(op, BF16, dist.group.WORLD, torch.device("cpu"))
                assert told(live, world) == ({dist.group.WORLD.group_name: 1 << 25} if is_held else None)
                assert any(ref() for ref in held) == is_held
                assert ways_taken(live, op, rank, world, [LARGE]) == ["one-sided" if is_held else "native"]
            assert live.stats.snapshot()[AG]["not_one_sided"] == {"no_memory": 1}
    finally:
        one_sided.free_bytes = kept
