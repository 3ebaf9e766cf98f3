"""Cases run on every rank by test_collectives.py (see tests/helpers/ranks.py)."""
import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.backend.policy import reason_for_native
from ds_zipccl.collectives import all_gather, transport
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import loader, ops
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.helpers.bits import assert_same_bits, gaussian, random_bits, specials

AG, RS = "all_gather_into_tensor", "reduce_scatter_tensor"
SIGNS_OF_4096 = 128 + 256 + 4 * 384       # in a frame of 4 blocks: sign and mantissa of element 0
SIZES = (1, 257, 1024, 1025, 2047, 33000)           # the first two are native: their frames would be larger


@contextlib.contextmanager
def runtime(**settings):
    config = ZipcclConfig(enabled=True, **{"collectives": "always", "min_bytes": 0, **settings})
    live = Runtime(config, {device: loader.resolve("best", device) for device in {"cpu", torch.get_default_device().type}})
    try:
        yield live
    finally:
        live.close()


def launch(live, op, output, data, group=None, reduce_op=None):
    """Launches as a front does; returns the Work, or None where the call must go native."""
    call = Call(op, output, data, group or dist.group.WORLD, reduce_op)
    spec = specs()[op]
    choice = getattr(live.config.collectives, spec.family)
    reason = reason_for_native(live.config, choice, world_size=call.world_size, output=output, data=data,
                               whole_numel=spec.whole_numel(call), shapes_match=spec.shapes_match(call), reduce_op=reduce_op)
    return live.run(call, reason)


def carry_out(live, op, output, data):
    """A call as a front carries it out: zipped, or native where the runtime says so. Returns whether it was ours."""
    work = launch(live, op, output, data)
    ours = work is not None
    if not ours:
        work = specs()[op].native(Call(op, output, data, dist.group.WORLD))
    work.wait()
    return ours


def assert_same_sum(got, expected, ours, where):
    """Equal bits; where the sum was native, NaN payloads aside."""
    if not ours:
        assert torch.equal(got.isnan(), expected.isnan()), where
        got, expected = got[~got.isnan()], expected[~expected.isnan()]
    assert_same_bits(got, expected, where)


class Guarded:
    """An output between canaries."""

    def __init__(self, numel):
        self._whole = torch.full((numel + 512,), 3.0, dtype=torch.bfloat16)
        self.tensor = self._whole[256:256 + numel]

    def check(self):
        outside = torch.cat([self._whole[:256], self._whole[256 + self.tensor.numel():]])
        assert bool((outside == 3.0).all()), "written beside the output"


def gathered(data, world):
    out = torch.empty(world * data.numel(), dtype=data.dtype)
    transport.all_gather_bytes(out.view(torch.uint8), data.view(torch.uint8), dist.group.WORLD).wait()
    return out


def rank_order_sum(data, rank, world):
    """The documented result, from every rank's whole input."""
    rows = gathered(data, world).view(world, world, -1)[:, rank]
    out = torch.empty_like(rows[0])
    sum_in_order(rows, out)
    return out


def native_reduce_scatter(data, world):
    out = torch.empty(data.numel() // world, dtype=data.dtype)
    transport.native_reduce_scatter(out, data.clone(), dist.ReduceOp.SUM, dist.group.WORLD).wait()
    return out


def case_all_gather_bits(rank, world):
    with runtime() as live:
        for size in SIZES:
            for make in (gaussian, specials, random_bits):
                data = make(size, seed=17 * size + rank)
                out = Guarded(world * size)
                carry_out(live, AG, out.tensor, data)
                assert_same_bits(out.tensor, gathered(data, world), f"{make.__name__} {size}")
                out.check()
        assert live.stats.snapshot()[AG]["calls_zipped"] > 0


def case_all_gather_in_place(rank, world):
    """C28: the input is a slice of the output; sync and async."""
    with runtime() as live:
        for size in SIZES:
            data = specials(size, seed=size + rank)
            out = random_bits(world * size, seed=5)
            out.view(world, size)[rank].copy_(data)
            carry_out(live, AG, out, out.view(world, size)[rank])
            assert_same_bits(out, gathered(data, world), f"in place {size}")


def case_reduce_scatter_bits(rank, world):
    with runtime() as live:
        for size in SIZES:
            for make in (gaussian, specials, random_bits):
                data = make(world * size, seed=31 * size + rank)
                guarded = Guarded(size)
                out = guarded.tensor
                ours = carry_out(live, RS, out, data)
                guarded.check()
                expected = rank_order_sum(data, rank, world)
                if ours or world == 2:                  # beyond, the native order is another
                    assert_same_sum(out, expected, ours, f"{make.__name__} {size}")
                if world == 2 and make is gaussian:
                    assert_same_bits(out, native_reduce_scatter(data, world), f"native {size}")


def case_reduce_scatter_special_values_as_native_at_2(rank, world):
    """-0 + -0, denormal sums, Inf - Inf, NaN payloads: equal to native at 2 ranks, NaNs canonical (C29, C32)."""
    with runtime() as live:
        data = specials(2 * 5000, seed=rank + 7)
        data.view(2, 5000)[:, ::7] = -0.0
        out = torch.empty(5000, dtype=data.dtype)
        carry_out(live, RS, out, data)
        expected = native_reduce_scatter(data, world)
        assert torch.equal(out.isnan(), expected.isnan())
        assert set(out[out.isnan()].view(torch.int16).tolist()) <= {0x7FC0}
        clean = ~out.isnan()
        assert_same_bits(out[clean], expected[clean], "special values")
        assert bool((out[clean].view(torch.int16) == -32768).any()), "no -0 in the result: the case tests nothing"


def case_reduce_scatter_in_place_with_garbage_padding(rank, world):
    """C27: output is the rank's slice of the input, the input's padding is uninitialised."""
    with runtime() as live:
        size, real = 5000, 4321
        data = gaussian(world * size, seed=rank)
        for r in range(world):
            data.view(world, size)[r, real:] = random_bits(size - real, seed=rank + 100)
        expected = rank_order_sum(data, rank, world)
        out = data.view(world, size)[rank]
        carry_out(live, RS, out, data)
        assert_same_bits(out[:real].clone(), expected[:real], "real elements")


def case_exactly_summable_inputs_equal_native(rank, world):
    with runtime() as live:
        for op, spec in specs().items():
            out, data = spec.make_tensors(rank, world, 3000, torch.bfloat16, torch.get_default_device())
            carry_out(live, op, out, data)
            native = torch.empty_like(out)
            spec.native(Call(op, native, data.clone(), dist.group.WORLD)).wait()
            assert_same_bits(out, native, op)


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
    """FrameError at every wait of that call; neither the next call nor close() stumbles over it. (Kernels on a GPU note
    corrupt frames and do not raise.)"""
    if torch.get_default_device().type == "cuda":
        return
    original = transport.all_gather_bytes

    def corrupting(out, own, group):
        work = original(out, own, group)
        work.wait()
        if rank == 0:
            out.fill_(7)
        return work

    with runtime() as live:
        data = gaussian(4000, seed=rank)
        out = torch.empty(world * 4000, dtype=data.dtype)
        all_gather.all_gather_bytes = corrupting
        try:
            work = launch(live, AG, out, data)
        finally:
            all_gather.all_gather_bytes = original
        for _ in range(2):
            with pytest.raises(FrameError) if rank == 0 else contextlib.nullcontext():
                work.wait()
        assert work.is_success() == (rank != 0)
        del work
        carry_out(live, AG, out, data)
        assert_same_bits(out, gathered(data, world), "the call after")


def case_side_channel_has_the_groups_timeout(rank, world):
    """A rank that does not come is noticed when the group would notice it, not after torch's default of half an hour."""
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=2))
    side = transport.SideChannel(group, torch.get_default_device())
    words, word = torch.empty(world, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    if rank == 0 and word.device.type == "cpu":        # NCCL would end the process
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="[Tt]imed out"):
            side.all_gather(words, word).wait()
        assert time.monotonic() - start < 30
    dist.barrier()


def case_overflows_on_all_and_alternating(rank, world):
    with runtime() as live:
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


def case_native_reasons_are_counted(rank, world):
    with runtime(min_bytes=4096, max_workspace_bytes=1 << 20) as live:
        def reason_of(op, out, data, **kwargs):
            before = live.stats.snapshot().get(op, {"native_reasons": {}})["native_reasons"]
            assert launch(live, op, out, data, **kwargs) is None
            after = live.stats.snapshot()[op]["native_reasons"]
            return [reason for reason in after if after[reason] != before.get(reason, 0)]

        bf16 = dict(dtype=torch.bfloat16)
        assert reason_of(AG, torch.empty(world * 4096), torch.empty(4096)) == ["dtype"]
        assert reason_of(AG, torch.empty(world * 8, **bf16), torch.empty(8, **bf16)) == ["min_bytes"]
        assert reason_of(AG, torch.empty(world * 850, **bf16), torch.empty(850, **bf16)) == (["no_gain"] if world > 2 else ["min_bytes"])
        assert reason_of(AG, torch.empty(world, 4096, **bf16), torch.empty(64, 64, **bf16).t()) == ["layout"]
        assert reason_of(AG, torch.empty(world * 4096 + 1, **bf16), torch.empty(4096, **bf16)) == ["shape"]
        assert reason_of(AG, torch.empty(world << 20, **bf16), torch.empty(1 << 20, **bf16)) == ["max_workspace_bytes"]
        assert reason_of(RS, torch.empty(4096, **bf16), torch.empty(world * 4096, **bf16), reduce_op=dist.ReduceOp.MAX) == ["reduce_op"]
        assert reason_of(AG, torch.empty(0, **bf16), torch.empty(0, **bf16)) == ["min_bytes"]


def case_adaptive_agrees_on_all_ranks(rank, world):
    with runtime(collectives="adaptive") as live:
        for op in (AG, RS):
            for size in (2000, 300000):
                data = gaussian(size if op == AG else world * size, seed=rank)
                out = torch.empty(world * size if op == AG else size, dtype=data.dtype)
                work = launch(live, op, out, data)
                choices = [None] * world
                dist.all_gather_object(choices, work is None)
                assert len(set(choices)) == 1, f"{op} {size}: {choices}"
                if work is not None:
                    work.wait()
                    assert_same_bits(out, gathered(data, world) if op == AG else rank_order_sum(data, rank, world), op)
        if world > 2:
            assert live.stats.snapshot()[RS]["native_reasons"] == {"deterministic_reduce": 2}


def case_subgroups(rank, world):
    """A group of some ranks beside the world: own side channel, own capacities; ranks outside take no part."""
    group = dist.new_group([0, world - 1])
    with runtime() as live:
        for round_ in range(2):
            if rank in (0, world - 1):
                data = gaussian(3000, seed=round_ + rank)
                out, native = torch.empty(6000, dtype=data.dtype), torch.empty(6000, dtype=data.dtype)
                launch(live, AG, out, data, group=group).wait()
                transport.native_all_gather(native, data, group).wait()
                assert_same_bits(out, native, "subgroup")
            data = gaussian(2000, seed=round_ + rank)
            out = torch.empty(world * 2000, dtype=data.dtype)
            carry_out(live, AG, out, data)
            assert_same_bits(out, gathered(data, world), "world after subgroup")


def case_flipped_bit_in_the_transport_is_seen(rank, world):
    """The equality checks above can fail: one bit flipped on the way changes the result or is found corrupt."""
    original = transport.all_to_all_bytes

    def flipping(out, rows, group):
        work = original(out, rows, group)
        work.wait()
        peer = (rank + 1) % world
        out.view(world, -1)[peer, SIGNS_OF_4096 + 50] ^= 0x80        # a sign bit of the peer's frame
        return work

    from ds_zipccl.collectives import reduce_scatter
    with runtime() as live:
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
    flip = []

    def flipping(out, own, group):
        work = original(out, own, group)
        if flip:
            work.wait()
            out.view(world, -1)[(rank + 1) % world, SIGNS_OF_4096 + 77] ^= 1
        return work

    with runtime(integrity="checksum") as live:
        all_gather.all_gather_bytes = flipping
        try:
            data, out = gaussian(4096, seed=rank + 50), torch.empty(world * 4096, dtype=torch.bfloat16)
            assert carry_out(live, AG, out, data)
            assert_same_bits(out, gathered(data, world), "clean")
            flip.append(1)
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
        live.kernels = {"cpu": "reference"}
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


def case_wire_bytes_are_what_is_sent(rank, world):
    with runtime() as live:
        size = 100000
        data, out = gaussian(size, seed=rank), torch.empty(world * size, dtype=torch.bfloat16)
        sent = []
        original = transport.all_gather_bytes
        all_gather.all_gather_bytes = lambda o, own, group: (sent.append(own.numel()), original(o, own, group))[1]
        try:
            carry_out(live, AG, out, data)
        finally:
            all_gather.all_gather_bytes = original
        row = live.stats.snapshot()[AG]
        assert row["wire_bytes"] == (sent[0] + 4) * (world - 1)
        assert row["raw_bytes"] == 2 * size * (world - 1)
        assert row["ratio"] > 1.35
