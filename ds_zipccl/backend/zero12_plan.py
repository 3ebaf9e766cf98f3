"""How a bucket of gradients comes to its owners: pure functions of layout tables that all ranks share.

A bucket is a run of slices, each owned by one rank, which alone needs its sum. Partitions are contiguous ranges of the flat parameters,
so a bucket often belongs to few ranks, and sending each slice straight to its owner would load the owner's link with (W - 1) B bytes.
Then it goes in two phases: a reduce-scatter of equal chunks, wherever they belong, and an exchange of the sums.
"""
import heapq
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

CHUNK_ELEMS = 1024          # chunks are whole blocks of the codec
MIN_GAIN = 1.1              # a second phase must save this much on the busiest link: it costs latency too


@dataclass(frozen=True)
class Bucket:
    """``owners[i]``, ``numels[i]``: rank in the group that owns slice i of the bucket, and the elements of that slice."""
    owners: tuple[int, ...]
    numels: tuple[int, ...]
    world_size: int

    @property
    def numel(self) -> int:
        return sum(self.numels)

    def owned(self) -> list[int]:
        """Elements per owner."""
        counts = [0] * self.world_size
        for owner, numel in zip(self.owners, self.numels, strict=True):
            counts[owner] += numel
        return counts

    def chunks(self) -> list[int]:
        """Elements per rank of the first of two phases: equal, but for the last ones."""
        step = -(-self.numel // (self.world_size * CHUNK_ELEMS)) * CHUNK_ELEMS
        return [max(0, min(step, self.numel - rank * step)) for rank in range(self.world_size)]

    def pieces(self) -> list[list[tuple[int, int]]]:
        """Per chunk: (owner, elements) of its consecutive pieces."""
        slices = deque((owner, numel) for owner, numel in zip(self.owners, self.numels, strict=True) if numel)
        result = []
        for room in self.chunks():
            result.append([])
            while room:
                owner, numel = slices.popleft()
                taken = min(room, numel)
                result[-1].append((owner, taken))
                room -= taken
                if taken < numel:
                    slices.appendleft((owner, numel - taken))
        return result

    def exchange(self) -> list[list[int]]:
        """``[c][r]``: elements of chunk c that rank r owns: what the second phase sends from rank c to rank r."""
        matrix = [[0] * self.world_size for _ in range(self.world_size)]
        for row, pieces in zip(matrix, self.pieces(), strict=True):
            for owner, numel in pieces:
                row[owner] += numel
        return matrix

    def straight_load(self) -> int:
        """Elements that the busiest rank sends or receives if each slice goes straight to its owner."""
        return max(max((self.world_size - 1) * numel, self.numel - numel) for numel in self.owned())

    def two_phase_load(self) -> int:
        """The same in two phases, one after the other."""
        chunks, matrix, ranks = self.chunks(), self.exchange(), range(self.world_size)
        first = max(max((self.world_size - 1) * numel, self.numel - numel) for numel in chunks)
        second = max(max(sum(matrix[r]), sum(matrix[c][r] for c in ranks)) - matrix[r][r] for r in ranks)
        return first + second

    def wants_two_phases(self) -> bool:
        """Never for 2 ranks: what the owner receives is then the same, and it is one exchange less."""
        return self.world_size > 2 and self.straight_load() > MIN_GAIN * self.two_phase_load()


def filled(numels: Iterable[int], max_numel: int) -> list[list[int]]:
    """Which of the items are in each bucket, where items that come one after another fill buckets of at most ``max_numel`` elements; a
    larger item has one to itself. Empty ones are in none."""
    buckets, room = [], 0
    for i, numel in enumerate(numels):
        if not numel:
            continue
        if not buckets or numel > room:
            buckets.append([])
            room = max_numel
        buckets[-1].append(i)
        room -= numel
    return buckets


def all_reduce_numel(numel: int, world_size: int) -> int:
    """Elements that each rank sends in a ring all_reduce."""
    return 2 * (world_size - 1) * numel // world_size


def balanced_order(items: Iterable[tuple[Hashable, dict[int, int]]], world_size: int) -> list:
    """An order of the items in which every beginning belongs to all ranks about equally, so buckets that are filled in it do.

    ``items``: (key, {rank: elements it owns}). Items of one main owner stay in order. Returns the keys.
    """
    waiting = [deque() for _ in range(world_size)]
    for key, owned in items:
        waiting[max(owned, key=lambda rank: (owned[rank], -rank)) if owned else 0].append((key, owned))
    out, emitted = [], [0] * world_size
    heap = [(0, rank) for rank in range(world_size)]
    while heap:
        seen, rank = heapq.heappop(heap)
        if not waiting[rank]:
            continue
        if seen == emitted[rank]:
            key, owned = waiting[rank].popleft()
            out.append(key)
            for owner, numel in owned.items():
                emitted[owner] += numel
        heapq.heappush(heap, (emitted[rank], rank))
    return out
