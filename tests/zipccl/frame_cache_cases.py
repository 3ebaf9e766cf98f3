"""Cases run on every rank by test_frame_cache.py: gathers of ready frames, and who agrees on what."""
import torch
import torch.distributed as dist

from ds_zipccl.codec.codec import Codec
from ds_zipccl.collectives.cached import Piece, PieceGather
from ds_zipccl.collectives.cost import Costs, Curve
from ds_zipccl.collectives.frame_cache import FrameCache
from ds_zipccl.collectives.frame_slot import CacheStats, Slot
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.workspace import Workspace
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.errors import CollectiveError, FrameError
from ds_zipccl.kernels import loader
from tests.helpers.bits import assert_same_bits
from tests.helpers.ranks import DEVICE

NUMEL = 5000
SETTINGS: dict = {}             # of every World, for who runs these cases in another way


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")


def data_of(rank: int, numel: int = NUMEL, seed: int = 0, spread: float = 0.0) -> torch.Tensor:
    """Of any rank, on every rank. ``spread``: of the exponents."""
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    scale = torch.randn(numel, generator=generator, device="cpu").mul(spread).exp2()
    return (torch.randn(numel, generator=generator, device="cpu") * scale * 0.02).to(torch.bfloat16).to(device())


def specials(data: torch.Tensor) -> torch.Tensor:
    data[:6] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, -float("inf"), 0.0], device=data.device)
    return data


class World:
    """A FrameCache over shards whose contents all ranks know."""

    def __init__(self, world_size: int, numels=(NUMEL, NUMEL), **settings):
        config = ZipcclConfig(**{"enabled": True, "collectives": "always", "min_bytes": 0, "cache_params": True, **SETTINGS, **settings})
        self.runtime = Runtime(config, {DEVICE: loader.resolve("best", DEVICE)})
        self.stats, self.forward, self.world_size = CacheStats(config.max_cache_bytes), 0, world_size
        self.cache = FrameCache(self.runtime, dist.group.WORLD, device(), self.stats, lambda: self.forward)
        self.num_known = 0                  # gathers that were launched like an earlier one
        self.shards = [data_of(dist.get_rank(), n, i) for i, n in enumerate(numels)]
        self.expected = [torch.stack([data_of(r, n, i) for r in range(world_size)]) for i, n in enumerate(numels)]
        for i, shard in enumerate(self.shards):
            self.cache.add(Slot(f"shard {i}", lambda shard=shard: shard, shard.numel(), shard.dtype))

    def write(self, index: int, make, on=None) -> None:
        """``make(rank)`` is what every rank's shard holds from now on; ``on``: the only rank that writes."""
        for r in range(self.world_size):
            if on in (None, r):
                self.expected[index][r] = make(r)
        if on in (None, dist.get_rank()):
            self.shards[index].data.copy_(make(dist.get_rank()))

    def outs(self) -> list[torch.Tensor]:
        return [torch.empty_like(e) for e in self.expected]

    def gather(self):
        """Gathers all shards and compares bits; None if the cache would rather not."""
        outs, known = self.outs(), self.cache.known(self.cache.slots)
        if known and any(base is not shard for (base, *_), shard in zip(known._places, self.shards, strict=True)):
            known = None
        gather = known and known.launch(lambda: outs)
        self.num_known += gather is not None
        gather = gather or self.cache.gather(self.cache.slots, lambda: outs, self.shards)
        if gather is None:
            return None
        gather.wait()
        for out, expected in zip(outs, self.expected, strict=True):
            assert_same_bits(out, expected, "cached gather")
        return gather

    def close(self) -> None:
        self.cache.close()
        assert self.stats.held_bytes == 0
        self.runtime.close()


def case_pieces_with_and_without_frames(rank, world_size):
    """Odd sizes and addresses, other dtypes, special values, an empty piece; received rows are decoded in place."""
    pieces, expected = [], []
    for i, (numel, framed) in enumerate([(33, False), (NUMEL, True), (0, False), (1, False), (40000, True), (1023, False)]):
        wholes = [data_of(r, numel + 1, i) for r in range(world_size)]
        rows = torch.stack([(specials(whole) if numel > 5 else whole)[1:] for whole in wholes])
        expected.append(rows)
        own = torch.empty(numel + 1, dtype=torch.bfloat16, device=device())[1:].copy_(rows[rank])
        codec = Codec.of(torch.bfloat16, numel, DEVICE, spill_per_tile=512) if framed else None
        frame = None
        if framed:
            frame, status = codec.empty_frames(1, device())[0], torch.zeros(1, dtype=torch.int32, device=device())
            codec.encode(own.view(1, -1), frame.view(1, -1), status)
        pieces.append(Piece(own, frame, codec))
    doubles = torch.arange(7, dtype=torch.float64, device=device()) + rank
    pieces.append(Piece(doubles))
    expected.append(torch.stack([torch.arange(7, dtype=torch.float64, device=device()) + r for r in range(world_size)]))
    outs = [torch.empty_like(e) for e in expected]
    workspace = Workspace(1 << 24)
    for _ in range(2):
        PieceGather(pieces, lambda: outs, dist.group.WORLD, workspace).wait()
        for out, rows in zip(outs, expected, strict=True):
            assert torch.equal(out.view(torch.uint8), rows.view(torch.uint8))
    assert workspace.held_bytes > 0


def case_one_encode_for_many_gathers(rank, world_size):
    world = World(world_size, (NUMEL, 100, NUMEL))
    for step in range(3):
        for _ in range(4):
            world.forward += 1
            world.gather()
        world.write(0, lambda r, step=step: data_of(r, seed=50 + step))
        world.write(1, lambda r, step=step: data_of(r, 100, seed=60 + step))
        world.cache.changed(world.cache.slots)
        world.cache.refresh()
    world.gather()
    assert world.stats.encodes == 2 + 3 * 2 and world.stats.shards == 13 * 2 and world.stats.unknown_writes == 0, world.stats
    assert world.stats.bypassed == {"no_gain": 13}
    world.close()


def case_outputs_are_made_when_somebody_waits(rank, world_size):
    """Over the group, where what is in flight takes memory enough; once, where a gather is described, earlier."""
    world = World(world_size)
    for _ in range(4):
        made = []
        gather = world.cache.gather(world.cache.slots, lambda made=made: (made.append(world.outs()), made[-1])[1], world.shards)
        assert DEVICE == "cuda" or not made
        gather.wait()
        assert len(made) == 1
        for out, expected in zip(made[0], world.expected, strict=True):
            assert_same_bits(out, expected, "made late")
    world.close()


def case_overflow_on_one_rank(rank, world_size):
    """All ranks learn of it in the one exchange and take larger frames; what does not compress travels as it is, and is tried again."""
    world = World(world_size)
    world.gather()
    small = world.cache.slots[0].codec.frame_bytes
    world.write(0, lambda r: data_of(r, seed=7, spread=2.0 if r == 1 else 0.0))
    world.cache.changed(world.cache.slots)
    world.cache.refresh()
    world.gather()
    assert world.cache.slots[0].codec.frame_bytes > small == world.cache.slots[1].codec.frame_bytes
    world.write(0, lambda r: data_of(r, seed=8, spread=9.0 if r == 1 else 0.0))
    for _ in range(70):
        world.cache.changed(world.cache.slots)
        world.cache.refresh()
        world.gather()
    assert world.cache.slots[0].reason == "incompressible" and world.cache.slots[0].frame is None
    world.write(0, lambda r: data_of(r, seed=9))
    for _ in range(64):
        world.cache.changed(world.cache.slots)
        world.cache.refresh()
        world.gather()
    assert world.cache.slots[0].codec is not None
    world.close()


def case_no_memory_on_one_rank(rank, world_size):
    """Every rank leaves out what one of them has no room for, and takes it up again when there is some."""
    world = World(world_size)
    if rank == world_size - 1:
        world.stats.held_bytes = world.stats.max_bytes - world.cache.slots[0].frame_bytes() - 2500
    world.gather()
    assert [s.reason for s in world.cache.slots] == [None, "max_cache_bytes"]
    if rank == world_size - 1:
        world.stats.held_bytes = world.cache.slots[0].held_bytes
    world.cache.changed(world.cache.slots)
    world.gather()
    assert [s.reason for s in world.cache.slots] == [None, None]
    world.close()


def case_slots_out_of_use_lose_their_frames(rank, world_size):
    world = World(world_size)
    world.gather()
    for _ in range(3):
        world.cache.changed(world.cache.slots)
        world.cache.refresh()
    assert world.stats.held_bytes == 0 and world.stats.encodes == 4, world.stats
    world.gather()
    assert world.stats.encodes == 6
    world.close()


def case_switch(rank, world_size):
    """Measured with ready frames, then decided: where native wins nothing is encoded and nothing kept. What was measured back to back, as
    on a GPU, goes with the rest."""
    world = World(world_size, collectives="adaptive")
    world.gather()
    measured = world.runtime.state(dist.group.WORLD, device()).measured("cached_all_gather", torch.bfloat16)
    costs = measured.costs
    assert costs is not None
    curves = Curve((1 << 18, 1 << 24), (9.0, 9.0)), Curve((1 << 18, 1 << 24), (1.0, 1.0))
    for native, zipped, wins in ((*curves, True), (*curves[::-1], False)):
        other = World(world_size, collectives="adaptive")
        measured = other.runtime.state(dist.group.WORLD, device()).measured("cached_all_gather", torch.bfloat16)
        measured.costs = Costs(native, zipped, costs.ratio)
        seen = other.gather() is not None, other.stats.encodes > 0, other.stats.held_bytes > 0
        assert seen == (wins,) * 3, (wins, seen, measured.costs)
        other.close()
    world.close()


def case_announced_writes_of_one_rank(rank, world_size):
    """Between gathers, and while a refresh is under way: the others take no notice."""
    world = World(world_size)
    world.gather()
    for turn in range(6):
        if turn % 3 == 0:
            world.cache.changed(world.cache.slots)
            world.cache.refresh()
        world.write(1, lambda r, turn=turn: data_of(r, seed=20 + turn), on=0)
        if rank == 0:
            world.cache.changed_here([world.cache.slots[1]])
        world.forward += 1
        world.gather()
    assert world.stats.repairs == (6 if rank == 0 else 0) and world.stats.unknown_writes == 0, world.stats
    world.close()


def case_unannounced_writes_of_one_rank(rank, world_size):
    """Where the host may compare, the frame is made again before it is sent."""
    world = World(world_size)
    world.cache.comparisons.on_host = True
    world.gather()
    for turn in range(3):
        world.write(1, lambda r, turn=turn: data_of(r, seed=20 + turn), on=0)
        world.forward += 1
        world.gather()
    assert world.stats.repairs == world.stats.unknown_writes == (3 if rank == 0 else 0), world.stats
    world.close()


def case_unannounced_writes_found_later(rank, world_size):
    """Where the host must not wait (GPU), all ranks hear of it with the next exchange, by name."""
    world = World(world_size)
    world.cache.comparisons.on_host = False
    for _ in range(2):
        world.gather()
        world.forward += 1
        world.gather()
        world.cache.changed(world.cache.slots)
        world.cache.refresh()
    if rank == world_size - 1:
        world.shards[1].data[77] += 1
    world.forward += 1
    world.cache.gather(world.cache.slots, world.outs).wait()
    world.cache.changed(world.cache.slots)
    world.cache.refresh()
    try:
        world.cache.gather(world.cache.slots, world.outs)
    except CollectiveError as error:
        assert f"shard 1 on rank {world_size - 1}" in str(error) and "shard 0" not in str(error), error
    else:
        raise AssertionError("not raised")
    world.write(1, lambda r: data_of(r, seed=90))
    world.cache.changed(world.cache.slots)
    world.gather()
    world.close()


def case_write_of_one_rank_that_does_not_fit(rank, world_size):
    """Every rank raises, none waits. Must be last: the gather is lost. On a GPU the other ranks' kernels note it for ``raise_on_error``."""
    world = World(world_size)
    world.gather()
    world.write(1, lambda r: data_of(r, seed=30, spread=9.0), on=0)
    if rank == 0:
        world.cache.changed_here([world.cache.slots[1]])
    try:
        world.cache.gather(world.cache.slots, world.outs).wait()
        world.cache.slots[1].codec.raise_on_error(device())
    except FrameError as error:
        assert rank != 0 or "shard 1" in str(error)
    else:
        raise AssertionError("not raised")
    world.close()


def agreed(world: World) -> None:
    """All ranks have the same layouts and reasons."""
    mine = [(slot.reason, slot.codec and slot.codec.frame_bytes) for slot in world.cache.slots]
    found = [None] * world.world_size
    dist.all_gather_object(found, mine)
    assert all(each == mine for each in found), found


def case_no_memory_in_the_middle_of_a_refresh(rank, world_size):
    """Every rank runs out of it at another shard, all go on: layouts are the same everywhere afterwards, though frames became smaller."""
    world = World(world_size, (NUMEL,) * 4)
    slots = world.cache.slots

    def renewed(seed, spread=0.0):
        for i in range(4):
            world.write(i, lambda r, i=i: data_of(r, NUMEL, 10 * seed + i, spread))
        world.cache.changed(slots)

    world.gather()
    renewed(1, 2.0)
    world.cache.refresh()
    world.gather()
    for seed in range(2, 80):
        renewed(seed)
        world.cache.settle()
        if all(slot.capacity.spill_per_tile != slot.room[0] for slot in slots):
            break
        world.cache.refresh()
        world.gather()
    else:
        raise AssertionError("no shard needs less room")
    encode, num_calls = FrameCache._encode, 0

    def failing(cache, slot, codec, status):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1 + 2 * min(rank, 1):
            raise torch.OutOfMemoryError("no memory")
        encode(cache, slot, codec, status)

    FrameCache._encode = failing
    try:
        world.cache.refresh()
        raise AssertionError("no rank ran out of memory")
    except torch.OutOfMemoryError:
        pass
    finally:
        FrameCache._encode = encode
    world.cache.changed(slots)
    world.cache.refresh()
    world.cache.settle()
    agreed(world)
    world.gather()
    world.close()


def case_words_that_one_rank_has_read_before_a_refresh(rank, world_size):
    """What is not gathered between two refreshes loses its frame on all ranks, also where one has settled in between."""
    world = World(world_size)
    world.gather()
    for seed in (1, 2):
        for i in range(2):
            world.write(i, lambda r, i=i, seed=seed: data_of(r, NUMEL, 10 * seed + i))
        world.cache.changed(world.cache.slots)
        world.cache.refresh()
        if rank == 0:
            world.cache.settle()
    world.cache.settle()
    agreed(world)
    assert [slot.reason for slot in world.cache.slots] == ["not_gathered"] * 2
    world.gather()
    world.close()
