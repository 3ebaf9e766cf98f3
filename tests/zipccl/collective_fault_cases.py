"""Cases run on every rank by test_collectives.py: calls in flight, overflows, dropped handles, damage, integrity."""
import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.collectives import all_gather, transport
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import ops
from tests.helpers.bits import assert_same_bits, gaussian, random_bits
from tests.zipccl.collective_helpers import (
    AG,
    RS,
    SEES_DAMAGE,
    SIGNS_OF_4096,
    carry_out,
    flip,
    gathered,
    launch,
    native_reduce_scatter,
    payloads_by_torch,
    rank_order_sum,
    runtime,
    spoiled,
)


def case_many_in_flight_waited_in_reverse(rank, world):
    """Out-of-order waits, different on each rank, with an overflow on one rank in the middle."""
    with runtime() as live:
        outs, works, datas = [], [], []
        for i in range(6):
            size = 2000 + 500 * i
            data = random_bits(size, seed=i) if i == 2 and rank == world - 1 else gaussian(size, seed=10 * i + rank)
            outs.append(torch.empty(world * size, dtype=data.dtype))
            datas.append(data)
            works.append(launch(live, AG, outs[-1], data))
        order = range(6) if rank % 2 else reversed(range(6))
        for i in order:
            works[i].wait()
        for i in range(6):
            assert_same_bits(outs[i], gathered(datas[i], world), f"call {i}")
        assert live.stats.snapshot()[AG]["overflows"] == 1


def case_native_call_between_launch_and_wait(rank, world):
    """One rank waits before a native call of the group, the others after it: a resend needs them all, so nobody may sit
    in the native call."""
    with runtime(min_bytes=1024) as live:
        data, out = random_bits(4000, seed=rank), torch.empty(world * 4000, dtype=torch.bfloat16)
        small, small_out = gaussian(4, seed=rank), torch.empty(world * 4, dtype=torch.bfloat16)
        work = launch(live, AG, out, data)
        if rank == 0:
            work.wait()
        assert not carry_out(live, AG, small_out, small)
        work.wait()
        assert_same_bits(out, gathered(data, world), "sent again")
        assert live.stats.snapshot()[AG]["overflows"] == 1


def case_corrupt_frame_fails_its_own_call_only(rank, world):
    """FrameError at every wait of that call; neither the next call nor close() stumbles over it."""
    original = transport.all_gather_bytes

    def corrupting(out, own, group):
        return spoiled(original(out, own, group), lambda: rank == 0 and out.fill_(7))

    for integrity, words in SEES_DAMAGE:
        with runtime(integrity=integrity) as live:
            data = gaussian(4000, seed=rank)
            out = torch.empty(world * 4000, dtype=data.dtype)
            all_gather.all_gather_bytes = corrupting
            try:
                work = launch(live, AG, out, data)
            finally:
                all_gather.all_gather_bytes = original
            for _ in range(2):
                with pytest.raises(FrameError, match=words) if rank == 0 else contextlib.nullcontext():
                    work.wait()
            assert work.is_success() == (rank != 0)
            del work
            carry_out(live, AG, out, data)
            assert_same_bits(out, gathered(data, world), f"the call after, integrity {integrity}")


def case_side_channel_has_the_groups_timeout(rank, world):
    """A rank that does not come is noticed when the group would notice it, not after torch's default of half an hour."""
    group, device = dist.new_group(list(range(world))), torch.get_default_device()
    if device.type == "cpu":                # only now: ranks that make a group of so short a timeout might miss each other in that
        group._get_backend(device).options._timeout = timedelta(seconds=0.3)
    side = transport.SideChannel(group, device)
    assert side.timeout == transport.group_timeout(group, device) and group.group_name in side.where and f"rank {rank} of" in side.where
    words, word = torch.empty(world, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    if rank == 0 and device.type == "cpu":             # NCCL would end the process
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="[Tt]ime"):
            side.all_gather(words, word).wait()
        assert time.monotonic() - start < 30
    dist.barrier()


def case_side_channels_made_at_different_times(rank, world):
    """Nobody waits in making one: a fast rank has made, and ended, several of a group before a slow one makes its first."""
    group = dist.new_group(list(range(world)))
    channels = []
    for turn in range(world):
        if turn == rank:
            for _ in range(3):
                channels.append(transport.SideChannel(group, torch.get_default_device()))
        dist.barrier()
    for i, channel in enumerate(channels):
        words = torch.empty(2 * world, dtype=torch.int32)
        channel.all_gather(words, torch.tensor([rank, i], dtype=torch.int32)).wait(timedelta(seconds=50))
        assert words.tolist() == [x for peer in range(world) for x in (peer, i)]
    dist.barrier()
    for channel in channels:
        channel.close()


def case_overflows_on_all_and_alternating(rank, world):
    """The channel for what is sent again is made when first needed, on GPUs before the first payload."""
    with runtime() as live:
        data = gaussian(5000, seed=rank)
        launch(live, AG, data.new_empty(5000 * world), data).wait()
        assert ("bulk" in live.state(dist.group.WORLD, data.device).__dict__) == data.is_cuda
        for i in range(8):
            for op in (AG, RS):
                bad = i % 2 == 0 or (i == 5 and rank == 0)
                numel = 40000 if op == AG else 40000 * world
                data = random_bits(numel, seed=i + rank) if bad else gaussian(numel, seed=i + rank)
                out = torch.empty(40000 * world if op == AG else 40000, dtype=data.dtype)
                work = launch(live, op, out, data)
                if work is None:        # the class gave up on compressing this: native, counted
                    continue
                work.wait()
                assert_same_bits(out, gathered(data, world) if op == AG else rank_order_sum(data, rank, world), f"{op} {i}")
        snapshot = live.stats.snapshot()
        assert snapshot[AG]["overflows"] >= 1 and snapshot[RS]["overflows"] >= 1
        assert snapshot[AG]["native_reasons"].get("incompressible", 0) >= 1


def case_incompressible_reduction_keeps_its_arithmetic(rank, world):
    """Beyond 2 ranks "always" means the rank-order sum even where the data does not compress."""
    with runtime() as live:
        for i in range(3):
            data = random_bits(world * 3000, seed=50 + i + rank)
            data = torch.where(data.isnan(), torch.ones_like(data), data)
            expected, out = rank_order_sum(data, rank, world), torch.empty(3000, dtype=data.dtype)
            work = launch(live, RS, out, data)
            if work is None:
                assert world == 2
                out = native_reduce_scatter(data, world)
            else:
                work.wait()
            assert_same_bits(out, expected, f"call {i}")
        assert live.stats.snapshot()[RS]["native_reasons"]["incompressible"] == 2


def case_many_calls_each_from_the_last(rank, world):
    """C49: the next call's data is the last one's result, 300 times, on GPUs 10,000 times (on one that ranks share, where a call takes
    milliseconds, 1,000 times) with nobody waiting in between; now and then a rank or its GPU pauses. Nothing stale."""
    on_gpu = torch.get_default_device().type == "cuda"
    num_calls = (10_000 if torch.cuda.device_count() >= world else 1000) if on_gpu else 300
    with runtime() as live:
        data = gaussian(4096, seed=rank)
        mine = [gaussian(4096, seed=r) for r in range(world)]           # what every rank has, by arithmetic alone
        wrong = torch.zeros(num_calls, dtype=torch.int64)
        for i in range(len(wrong)):
            out = torch.empty(world * 4096, dtype=data.dtype)
            carry_out(live, AG, out, data)
            wrong[i:i + 1].copy_((out.view(torch.int16) != torch.cat(mine).view(torch.int16)).sum())
            if i % 97 == 0 and rank == i // 97 % world:
                if on_gpu and i % 2:
                    torch.cuda._sleep(20_000_000)
                else:
                    time.sleep(0.02)
            by = {19: 2.0, 39: 0.5}.get(i % 40, 1.0)
            data = out.view(world, -1)[(rank + 1) % world].roll(1) * by
            mine = [mine[(r + 1) % world].roll(1) * by for r in range(world)]
        assert not wrong.any(), f"calls {wrong.nonzero().view(-1).tolist()[:5]}"
        assert live.stats.snapshot()[AG]["calls_zipped"] == len(wrong)


def case_memory_may_go_after_wait(rank, world):
    """C44, C46: the input's storage is given up right after wait(), as ZeRO-3 does with partitions, and its memory written anew."""
    with runtime() as live:
        for op in (AG, RS):
            for make in (gaussian, random_bits):
                numel = 40000 if op == AG else world * 40000
                data = make(numel, seed=rank)
                data = torch.where(data.isnan(), torch.ones_like(data), data)
                expected = gathered(data, world) if op == AG else rank_order_sum(data, rank, world)
                out = torch.empty_like(expected)
                work = launch(live, op, out, data)
                work.wait()
                data.untyped_storage().resize_(0)
                for seed in range(3):
                    random_bits(numel, seed=seed)
                assert_same_bits(out, expected, f"{op} {make.__name__}")


def case_dropped_handle_is_completed(rank, world):
    with runtime() as live:
        data = gaussian(4000, seed=rank)
        out = torch.zeros(world * 4000, dtype=data.dtype)
        launch(live, AG, out, data)                      # handle dropped at once
        other = torch.empty(world * 4000, dtype=data.dtype)
        launch(live, AG, other, data).wait()             # the next call completes it
        assert_same_bits(out, gathered(data, world), "dropped handle")


def case_polling_completes(rank, world):
    """is_completed() becomes true without wait()."""
    with runtime() as live:
        data = gaussian(4000, seed=rank)
        out = torch.zeros(world * 4000, dtype=data.dtype)
        work = launch(live, AG, out, data)
        while not work.is_completed():
            pass
        assert_same_bits(out, gathered(data, world), "polled")


def case_flipped_bit_in_the_transport_is_seen(rank, world):
    """The equality checks above can fail: one bit flipped on the way changes the result or is found corrupt."""
    original = transport.all_to_all_bytes

    def flipping(out, rows, group, *more):
        frames = out.view(world, -1)
        return spoiled(original(out, rows, group, *more), lambda: flip(frames[(rank + 1) % world], SIGNS_OF_4096 + 50, 0x80))     # a sign

    from ds_zipccl.collectives import reduce_scatter
    with payloads_by_torch(), runtime() as live:
        data = gaussian(world * 4096, seed=rank, sigma=0.5)
        out = torch.empty(4096, dtype=data.dtype)
        reduce_scatter.all_to_all_bytes = flipping
        try:
            carry_out(live, RS, out, data)
        finally:
            reduce_scatter.all_to_all_bytes = original
        try:
            assert_same_bits(out, rank_order_sum(data, rank, world))
        except AssertionError as error:
            assert "1 of 4096 elements differ" in str(error)
        else:
            raise AssertionError("a flipped bit went unseen")


def case_integrity_checksum_names_the_rank(rank, world):
    """C11: any flipped bit of a payload is found, also in a remainder, where nothing but a checksum can see it."""
    from ds_zipccl.collectives import all_gather
    original = all_gather.all_gather_bytes
    damaging = []

    def flipping(out, own, group):
        work, frames = original(out, own, group), out.view(world, -1)
        return spoiled(work, lambda: flip(frames[(rank + 1) % world], SIGNS_OF_4096 + 77, 1)) if damaging else work

    with runtime(integrity="checksum") as live:
        all_gather.all_gather_bytes = flipping
        try:
            data, out = gaussian(4096, seed=rank + 50), torch.empty(world * 4096, dtype=torch.bfloat16)
            assert carry_out(live, AG, out, data)
            assert_same_bits(out, gathered(data, world), "clean")
            damaging.append(1)
            work = launch(live, AG, out, data)
            try:
                work.wait()
            except FrameError as error:
                assert "checksum" in str(error) and f"from rank {(rank + 1) % world} " in str(error), error
            else:
                raise AssertionError("a flipped bit went unseen")
        finally:
            all_gather.all_gather_bytes = original
        rows = gaussian(world * 4096, seed=rank)
        out = torch.empty(4096, dtype=torch.bfloat16)
        assert carry_out(live, RS, out, rows)                # the group goes on, and sums are sealed too
        assert_same_bits(out, rank_order_sum(rows, rank, world), "sum")


def case_integrity_roundtrip_finds_wrong_kernels(rank, world):
    kernels = ops.kernel_set("reference")
    right = kernels.encode

    def wrong_encode(x, frames, status, g, skip=-1):
        right(x, frames, status, g, skip)
        for row in range(x.shape[0]):
            if row != skip:
                frames[row, SIGNS_OF_4096 + 9] ^= 4

    data, out = gaussian(4096, seed=rank), torch.empty(world * 4096, dtype=torch.bfloat16)
    with runtime(integrity="roundtrip") as live:
        live.kernels = dict.fromkeys(live.kernels, "reference")
        assert carry_out(live, AG, out, data)
        assert_same_bits(out, gathered(data, world), "right kernels")
        kernels.encode = wrong_encode
        try:
            launch(live, AG, out, data)
        except FrameError as error:
            assert "got: element 9 differs" in str(error).lower() and "'reference'" in str(error), error
        else:
            raise AssertionError("a wrong kernel went unseen")
        finally:
            kernels.encode = right
