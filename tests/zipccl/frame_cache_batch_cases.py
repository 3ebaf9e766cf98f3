"""Cases run on every rank by test_frame_cache.py: kept frames made, and their data compared, all at once, as on a GPU; on a CPU with the
CUDA kernels emulated."""
import ctypes
import functools
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from ds_zipccl.collectives import frame_batch, frame_cache
from ds_zipccl.collectives.fingerprint import fingerprint_bytes
from ds_zipccl.errors import CollectiveError, FrameError
from ds_zipccl.kernels.cuda_calls import CudaCalls
from tests.helpers.bits import assert_same_bits
from tests.helpers.emulated import compile_for_host
from tests.helpers.ranks import DEVICE
from tests.zipccl import frame_cache_cases, frame_cache_one_sided_cases
from tests.zipccl.emulated_launcher import launcher_of
from tests.zipccl.frame_cache_cases import World, data_of, device
from tests.zipccl.frame_cache_one_sided_cases import known_of, one_sided_only

ON_GPU = DEVICE == "cuda"


@functools.cache
def launcher():
    """All ranks at the same point."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if folder[0] is not None:
        compile_for_host(Path(folder[0]))
    dist.broadcast_object_list(folder)
    library = ctypes.CDLL(str(next(Path(folder[0]).glob("*.so"))))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return launcher_of(CudaCalls(library))


class Counting:
    """How often batches were made and ran, and comparisons."""

    def __init__(self):
        self.num_runs = self.num_compared = self.num_made = 0

    def __enter__(self):
        self._kept = frame_batch.Batch.run, frame_batch.Prints.compare, frame_cache.launcher_of, frame_batch.Batch.__init__
        run, compare, _, make = self._kept

        def counting_run(batch):
            self.num_runs += 1
            run(batch)

        def counting_compare(prints):
            self.num_compared += 1
            compare(prints)

        def counting_make(batch, *args):
            self.num_made += 1
            make(batch, *args)

        frame_batch.Batch.run, frame_batch.Prints.compare, frame_batch.Batch.__init__ = counting_run, counting_compare, counting_make
        if not ON_GPU:
            found = launcher()
            frame_cache.launcher_of = lambda runtime, device: found if runtime.config.integrity == "off" else None
        return self

    def __exit__(self, *_):
        frame_batch.Batch.run, frame_batch.Prints.compare, frame_cache.launcher_of, frame_batch.Batch.__init__ = self._kept


def at_once(case, num_runs: int = 1):
    """The case with what batches there are, so many at least."""

    @functools.wraps(case)
    def run(rank, world_size):
        with Counting() as seen:
            case(rank, world_size)
        assert seen.num_runs >= num_runs

    return run


case_one_encode_for_many_gathers = at_once(frame_cache_cases.case_one_encode_for_many_gathers)
case_overflow_on_one_rank = at_once(frame_cache_cases.case_overflow_on_one_rank)
case_no_memory_on_one_rank = at_once(frame_cache_cases.case_no_memory_on_one_rank)
case_unannounced_writes_found_later = at_once(frame_cache_cases.case_unannounced_writes_found_later)
case_one_sided_many_gathers = at_once(frame_cache_one_sided_cases.case_one_encode_for_many_gathers)
case_one_sided_like_an_earlier_one = at_once(frame_cache_one_sided_cases.case_gathers_like_an_earlier_one)
case_one_sided_what_does_not_fit = at_once(frame_cache_one_sided_cases.case_a_write_of_one_rank_that_does_not_fit_is_no_error, num_runs=0)
case_one_sided_frames_made_anew = at_once(frame_cache_one_sided_cases.case_frames_are_made_anew_behind_what_sends_them)


def case_over_the_group(rank, world_size):
    """Known gathers: frames of several parts of an output, what has none, and an empty row; writes of all, of one rank, and unannounced;
    outputs in use only when somebody waits, which may be in another order."""
    numels = (5000, 33, 70_001, 900)
    with Counting() as seen:
        world = World(world_size, numels)
        for step in range(4):
            assert known_of(world, 3) == (1 if step == 0 else 3), step          # the first one reads the ranks' words
            for i, n in enumerate(numels):
                world.write(i, lambda r, i=i, n=n, step=step: data_of(r, n, 100 + 10 * step + i))
            world.cache.changed(world.cache.slots)
            world.cache.refresh()
        world.gather()
        slots, known, made = world.cache.slots, world.cache.known(world.cache.slots), []
        works = [known.launch(lambda: (made.append(world.outs()), made[-1])[1]) for _ in range(3)]
        assert not made
        for work in works[::-1]:
            work.wait()
        for outs in made:
            for out, expected in zip(outs, world.expected, strict=True):
                assert_same_bits(out, expected, "three in flight")
        for work in works:
            assert work._buffer is None
        world.write(2, lambda r: data_of(r, numels[2], 900), on=1)
        if rank == 1:
            world.cache.changed_here([slots[2]])
        assert known_of(world) == (rank != 1) and known_of(world) == 1
        world.write(0, lambda r: data_of(r, numels[0], 901), on=0)
        world.forward += 1                                          # nobody has announced that: found here, on a CPU
        assert ON_GPU or known_of(world, 2) == 1
        world.cache.free()
        assert known_of(world, 3) == 1
        stats, row = world.stats, world.runtime.stats.snapshot()["all_gather_into_tensor"]
        assert stats.one_sided == 0 and row["calls_zipped"] == stats.gathers and row["wire_bytes"] == stats.wire_bytes
        assert row["raw_bytes"] == stats.raw_bytes and stats.shards == 3 * stats.gathers and stats.bypassed == {"no_gain": stats.gathers}
        # A frame that is damaged on its way is noted, as where it is decoded one by one.
        if not ON_GPU and rank == 0:
            slots[2].frame[:16] = 255
        outs = world.outs()
        world.cache.known(slots).launch(lambda: outs).wait()
        assert ON_GPU or bool(launcher().errors)
        world.close()
    assert seen.num_runs > 0


def case_what_does_not_fit_is_an_error_each_time(rank, world_size):
    """Over the group, of who wrote it alone."""
    with Counting():
        world = World(world_size)
        world.gather()
        world.gather()
        world.write(1, lambda r: data_of(r, seed=30, spread=9.0), on=0)
        if rank == 0:
            world.cache.changed_here([world.cache.slots[1]])
        for _ in range(3):
            outs, known = world.outs(), world.cache.known(world.cache.slots)
            assert known is not None
            gather = known.launch(lambda outs=outs: outs)
            assert (gather is None) == (rank == 0)
            try:
                gather = gather or world.cache.gather(world.cache.slots, lambda outs=outs: outs, world.shards)
            except FrameError as error:
                assert rank == 0 and "shard 1" in str(error)
        dist.barrier()
        world.close()


def case_parts_of_an_output(rank, world_size):
    """Rows of several slots, one behind the other in one output, as those of a large parameter."""
    numels, whole = (4000, 50, 33_000), [data_of(r, 37_050, 7) for r in range(2)]
    with Counting():
        world = World(world_size, numels)
        shard = whole[rank].clone()
        for slot, part in zip(world.cache.slots, shard.split(numels), strict=True):
            slot.source = lambda part=part: part
        for turn in range(4):
            out, known = torch.empty(world_size * 37_050, dtype=torch.bfloat16, device=device()), world.cache.known(world.cache.slots)
            work = known and known.launch(lambda out=out: [out])
            assert (work is not None) == (turn > 1)
            rows = out.view(world_size, -1)
            work = work or world.cache.gather(world.cache.slots, lambda rows=rows: rows.split(numels, dim=1), [shard])
            work.wait()
            for r in range(world_size):
                assert_same_bits(rows[r], whole[r], turn)
        assert world.cache.known(world.cache.slots).num_outputs == 1
        world.close()
        # Views that are made in inference mode do not tell of what they are parts.
        world = World(world_size, numels)
        for slot, part in zip(world.cache.slots, shard.split(numels), strict=True):
            slot.source = lambda part=part: part
        with torch.inference_mode():
            for turn in range(4):
                out = torch.empty(world_size * 37_050, dtype=torch.bfloat16, device=device())
                rows = out.view(world_size, -1)
                world.cache.gather(world.cache.slots, lambda rows=rows: rows.split(numels, dim=1), [shard]).wait()
                assert world.cache.known(world.cache.slots) is None
                for r in range(world_size):
                    assert_same_bits(rows[r], whole[r], turn)
        world.close()


@one_sided_only
def case_a_step_of_training(rank, world_size):
    """In steady state all frames of a step are made by one batch, every gather is known, also the first in a pass, which compares; and what
    nobody has announced is found by that."""
    numels = (5000, 33, 70_001, 20_000)
    with Counting() as seen:
        world = World(world_size, numels)
        world.cache.comparisons.on_host = False
        for step in range(6):
            if step == 3:
                seen.num_runs = seen.num_compared = world.num_known = 0
            for _ in range(2):
                world.forward += 1                                  # a pass that compares, and one of what was compared
                world.gather()
                world.gather()
            for i, n in enumerate(numels):
                world.write(i, lambda r, i=i, n=n, step=step: data_of(r, n, 100 + 10 * step + i))
            world.cache.changed(world.cache.slots)
            world.cache.refresh()
        assert (seen.num_runs, world.num_known) == (3, 3 * 4), (seen.num_runs, world.num_known)
        assert seen.num_compared == 3 * 2 and world.stats.encodes == 3 * 7 and world.stats.unknown_writes == 0
        world.gather()
        if rank == 1:
            world.shards[2].data.view(-1)[70_000] += 1              # nobody has announced that, nor sees it before the next words
        world.forward += 1
        outs = world.outs()
        world.cache.known(world.cache.slots).launch(lambda: outs).wait()
        world.cache.changed(world.cache.slots)
        world.cache.refresh()
        try:
            world.cache.settle()
            found = "nothing"
        except CollectiveError as error:
            found = str(error)
        assert "shard 2 on rank 1" in found and "shard 0" not in found, found
        world.close()


def case_rooms_that_change_are_not_made_as_before(rank, world_size):
    """A rank that has made a frame anew alone, in the layout that was agreed, still takes the next one with the others."""
    with Counting() as seen:
        world = World(world_size)
        world.gather()
        spreads = 2.0, 0.0, 0.0, 2.0, *[0.0] * 40, 2.0, 0.0
        for step, spread in enumerate(spreads):
            world.write(0, lambda r, step=step, spread=spread: data_of(r, seed=500 + step, spread=spread))
            world.cache.changed(world.cache.slots)
            world.cache.refresh()
            world.gather()
            if step % 3 == 2:
                world.write(1, lambda r, step=step: data_of(r, seed=900 + step), on=1)
                if rank == 1:
                    world.cache.changed_here([world.cache.slots[1]])
                    world.write(0, lambda r, step=step: data_of(r, seed=500 + step, spread=spreads[step]))
                    world.cache.changed_here([world.cache.slots[0]])
                world.gather()
            sizes = [None] * world_size
            dist.all_gather_object(sizes, [slot.codec and slot.codec.frame_bytes for slot in world.cache.slots])
            assert all(each == sizes[0] for each in sizes), (step, sizes)
        assert seen.num_runs > 10
        world.close()


def makes(world: World, seed: int, spreads=None) -> None:
    """Other data in all shards, and a refresh; ``spreads``: of the exponents, by shard and rank."""
    for i, slot in enumerate(world.cache.slots):
        world.write(i, lambda r, i=i, slot=slot: data_of(r, slot.numel, seed + i, (spreads or {}).get((i, r), 0.0)))
    world.cache.changed(world.cache.slots)
    world.cache.refresh()


def case_refused_frames_leave_the_others_their_batch(rank, world_size):
    """One shard, or several, beyond ``max_cache_bytes``: the others are made by one batch all the same, overflows among them, and nothing
    is built anew for that; each is gathered as it was, and counted."""
    numels = (5000, 3000, 70_001, 33_000, 4000)
    with Counting() as seen:
        for refused in ((3,), (2, 3)):
            world = World(world_size, numels)
            slots = world.cache.slots
            every = sum(slot.frame_bytes() + fingerprint_bytes(slot.numel) for slot in slots)
            world.stats.max_bytes = every - 40_000 if refused == (3,) else 30_000
            world.gather()
            world.gather()
            reasons = ["max_cache_bytes" if i in refused else None for i in range(5)]
            assert [slot.reason for slot in slots] == reasons
            seen.num_runs, seen.num_made = 0, 0
            before, encodes, held = world.stats.bypassed["max_cache_bytes"], world.stats.encodes, world.stats.held_bytes
            for step in range(6):
                makes(world, 1000 * len(refused) + 10 * step)
                world.gather()
                world.gather()
                assert [slot.reason for slot in slots] == reasons and world.stats.held_bytes == held <= world.stats.max_bytes
            assert (seen.num_runs, seen.num_made) == (6, 1), (seen.num_runs, seen.num_made)
            assert world.stats.encodes - encodes == 6 * (5 - len(refused))
            assert world.stats.bypassed["max_cache_bytes"] - before == 6 * 2 * len(refused)
            makes(world, 300, {(1, 1): 2.0})                                    # one overflows, on a rank
            assert seen.num_runs == 7
            world.gather()
            assert slots[1].room[0] > slots[0].room[0] and slots[1].reason is None
            world.close()


def case_a_frame_that_grows_beyond_the_bound_costs_no_other_than_it_must(rank, world_size):
    """Until then all shards lost their frames together: what one of them held was counted while the next ones were asked."""
    with Counting() as seen:
        world = World(world_size, (5000, 6000, 7000, 40_000))
        world.gather()
        world.stats.max_bytes = world.stats.held_bytes
        makes(world, 100, {(3, 0): 2.0})
        world.gather()
        assert world.stats.held_bytes > world.stats.max_bytes                   # in the same step, beyond the bound
        seen.num_runs = 0
        for step in range(3):
            makes(world, 200 + 10 * step)
            world.gather()
            assert [slot.reason for slot in world.cache.slots] == ["max_cache_bytes", None, None, None]
            assert world.stats.held_bytes <= world.stats.max_bytes and seen.num_runs == step + 1
        world.close()


def case_a_rank_alone_refuses_what_others_make_in_their_batch(rank, world_size):
    """Words are each slot's own, whatever else a rank's batch is of: the frame of that one is dropped everywhere, and comes back."""
    with Counting() as seen:
        world = World(world_size, (5000, 6000, 70_001, 40_000))
        world.gather()
        bound = world.stats.max_bytes
        for step in range(9):
            full = step % 3 == 1
            world.stats.max_bytes = world.stats.held_bytes - 1 if full and rank == 1 else bound
            makes(world, 100 + 10 * step, {(2, 0): 2.0} if step == 4 else None)          # shard 2 overflows on the other rank just then
            world.gather()
            assert [slot.reason for slot in world.cache.slots] == ["max_cache_bytes" if full else None, None, None, None], step
            held = [None] * world_size
            dist.all_gather_object(held, [slot.held_bytes for slot in world.cache.slots])
            assert all(each == held[0] for each in held), held
            world.gather()
        assert seen.num_runs == 9
        world.close()


def case_what_does_not_compress_leaves_the_others_their_batch(rank, world_size):
    """Nor does what lies elsewhere each time, or has just been made anew in another layout."""
    with Counting() as seen:
        world = World(world_size, (5000, 6000, 7000, 40_000))
        slots, seed = world.cache.slots, 0
        world.gather()
        for _ in range(70):                                                     # is given up, left out, and tried again
            seed += 10
            makes(world, seed, {(1, 1): 9.0})
            world.gather()
        assert slots[1].reason == "incompressible" and seen.num_runs == 70
        assert seen.num_made <= 6, seen.num_made
        seen.num_runs = seen.num_made = 0
        for _ in range(6):
            seed += 10
            world.shards[2] = world.shards[2].clone()
            slots[2].source = lambda shard=world.shards[2]: shard
            makes(world, seed, {(1, 1): 9.0})
            world.gather()
        assert seen.num_runs == 6 and seen.num_made <= 1 and slots[2].reason is None, (seen.num_runs, seen.num_made)
        world.close()


@one_sided_only
def case_what_is_compared_alone_leaves_the_others_their_kernel(rank, world_size):
    """A gather like an earlier one compares all shards but that whose fingerprint is not made by kernels, and finds what was written to
    this one too."""
    can = frame_batch.Prints.can
    frame_batch.Prints.can = staticmethod(lambda slot, data: slot.index != 1 and can(slot, data))
    try:
        with Counting() as seen:
            world = World(world_size, (5000, 6000, 7000))
            world.cache.comparisons.on_host = False
            for _ in range(4):
                world.gather()
            seen.num_compared = world.num_known = 0
            for _ in range(3):
                world.forward += 1
                world.gather()
            assert (seen.num_compared, world.num_known) == (3, 3)
            if rank == 1:
                world.shards[1].data.view(-1)[17] += 1
            world.forward += 1
            outs = world.outs()
            world.cache.known(world.cache.slots).launch(lambda: outs).wait()
            world.cache.changed(world.cache.slots)
            world.cache.refresh()
            assert seen.num_runs == 1
            try:
                world.cache.settle()
                found = "nothing"
            except CollectiveError as error:
                found = str(error)
            assert "shard 1 on rank 1" in found, found
            world.close()
    finally:
        frame_batch.Prints.can = can
