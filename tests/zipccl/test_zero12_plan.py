"""How buckets of gradients come to their owners: pure functions of the layout."""
import random

import pytest

from ds_zipccl.backend.zero12_plan import Bucket, all_reduce_numel, balanced_order, filled


def random_bucket(seed: int, world: int) -> Bucket:
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    numels = tuple(rng.choice((0, 1, 700, 5000, 40000)) for _ in range(count))
    return Bucket(tuple(rng.randrange(world) for _ in range(count)), numels, world)


@pytest.mark.parametrize("world", [2, 3, 6, 7, 8, 64])
@pytest.mark.parametrize("seed", range(20))
def test_second_phase_brings_every_element_to_its_owner(seed, world):
    """Followed element by element: chunk by chunk, piece by piece, in the bucket's order."""
    bucket = random_bucket(seed, world)
    owner_of = [owner for owner, numel in zip(bucket.owners, bucket.numels, strict=True) for _ in range(numel)]
    chunks, pieces, matrix = bucket.chunks(), bucket.pieces(), bucket.exchange()
    assert sum(chunks) == bucket.numel and len(chunks) == len(pieces) == world
    position, received = 0, [[] for _ in range(world)]
    for chunk, room, row in zip(pieces, chunks, matrix, strict=True):
        assert sum(numel for _, numel in chunk) == room
        for owner, numel in chunk:
            assert numel > 0 and owner_of[position:position + numel] == [owner] * numel
            received[owner] += range(position, position + numel)
            position += numel
        assert [sum(numel for owner, numel in chunk if owner == rank) for rank in range(world)] == row
    assert received == [[i for i, owner in enumerate(owner_of) if owner == rank] for rank in range(world)]
    assert [len(r) for r in received] == bucket.owned() == [sum(row[rank] for row in matrix) for rank in range(world)]


def test_loads():
    """Of one owner among 8: 7 B straight, 7/8 B + 7/8 B in two phases; evenly owned: 7/8 B straight."""
    numel = 8 * 1024 * 100
    one, even = Bucket((5,), (numel,), 8), Bucket(tuple(range(8)), (numel // 8,) * 8, 8)
    assert (one.straight_load(), one.two_phase_load()) == (7 * numel, 2 * numel * 7 // 8) and one.wants_two_phases()
    assert even.straight_load() == numel * 7 // 8 and not even.wants_two_phases()
    assert one.two_phase_load() == all_reduce_numel(numel, 8)
    half = Bucket((0, 1), (numel // 2,) * 2, 8)
    assert half.two_phase_load() < all_reduce_numel(numel, 8) < half.straight_load()
    assert not Bucket((0,), (numel,), 2).wants_two_phases(), "of 2 ranks the owner receives B either way"


@pytest.mark.parametrize("world", [3, 6, 7, 8])
@pytest.mark.parametrize("seed", range(30))
def test_never_busier_than_a_ring_all_reduce(seed, world):
    """But for the chunks' whole blocks."""
    bucket = random_bucket(seed, world)
    load = bucket.two_phase_load() if bucket.wants_two_phases() else bucket.straight_load()
    assert load <= 1.1 * (all_reduce_numel(bucket.numel, world) + 2 * world * 1024)


def parameters(world: int, count: int, seed: int):
    """(key, {rank: elements}) of parameters that lie one after another in equal partitions, as DeepSpeed's."""
    rng = random.Random(seed)
    sizes = [rng.choice((96, 300, 9216, 20000)) for _ in range(count)]
    partition, start, items = -(-sum(sizes) // world), 0, []
    for key, size in enumerate(sizes):
        owned = {}
        while size:
            rank = start // partition
            taken = min(size, (rank + 1) * partition - start)
            owned[rank] = taken
            start, size = start + taken, size - taken
        items.append((key, owned))
    return items


@pytest.mark.parametrize("world", [2, 3, 6, 7, 8])
@pytest.mark.parametrize("seed", range(5))
def test_balanced_order(world, seed):
    """Every parameter once, and every beginning belongs to all ranks alike, up to one large parameter."""
    items = parameters(world, 200, seed)
    order = balanced_order(items, world)
    assert sorted(order) == list(range(200))
    emitted, owned_of, total = [0] * world, dict(items), sum(sum(owned.values()) for _, owned in items)
    for key in order:
        for rank, numel in owned_of[key].items():
            emitted[rank] += numel
        assert max(emitted) - min(emitted) <= 2 * 20000
    assert sum(emitted) == total
    assert balanced_order(items, world) == order


def test_balanced_order_takes_parameters_without_elements_or_owners():
    assert sorted(balanced_order([("a", {}), ("b", {1: 5}), ("c", {0: 0}), ("d", {})], 2)) == ["a", "b", "c", "d"]
    assert balanced_order([], 3) == []


def test_buckets_filled_in_balanced_order_need_no_second_phase():
    world, items = 8, parameters(8, 600, 1)
    owned_of = dict(items)

    def two_phases(order) -> int:
        buckets, owners, numels = [], [], []
        for key in order:
            owners += owned_of[key].keys()
            numels += owned_of[key].values()
            if sum(numels) > 10**6:
                buckets.append(Bucket(tuple(owners), tuple(numels), world))
                owners, numels = [], []
        return sum(bucket.wants_two_phases() for bucket in buckets)

    assert two_phases(key for key, _ in items) > 2 and two_phases(balanced_order(items, world)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_filled_as_deepspeed_does(seed):
    """By its own arithmetic: what would come to more than the limit is reduced before the next parameter comes in."""
    rng = random.Random(seed)
    numels, limit = [rng.choice((0, 1, 96, 300, 999, 1000, 1001, 5000)) for _ in range(60)], 1000
    buckets, at_hand, elements = [], [], 0
    for i, numel in enumerate(numels):
        if numel == 0:
            continue
        if elements + numel > limit:
            buckets, at_hand, elements = [*buckets, at_hand], [], 0
        at_hand.append(i)
        elements += numel
    assert filled(numels, limit) == [bucket for bucket in [*buckets, at_hand] if bucket]


def test_no_bucket_of_nothing():
    assert filled([], 1000) == filled([0, 0], 1000) == [] and filled([5000, 0, 1], 1000) == [[0], [2]]
