"""Cases run on every rank by test_collectives.py: ``window: sigma``, each rank with a given window of its own."""
import contextlib

import torch
import torch.distributed as dist

from ds_zipccl.codec import window
from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.collectives import capacity, windows
from ds_zipccl.collectives import launch as launching
from ds_zipccl.kernels import ops
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.helpers.bits import assert_same_bits, gaussian, random_bits
from tests.zipccl.collective_helpers import AG, RS, carry_out, gathered, rank_order_sum, runtime

SIZE = 70_000
BF16 = torch.bfloat16


def scaled(size: int, seed: int, sigma: float) -> torch.Tensor:
    return (gaussian(size, seed, torch.float32, 1.0) * sigma).to(BF16)


@contextlib.contextmanager
def watched():
    """Lists, filled while inside: the given windows of the frames that are encoded, and the windows that are measured. Nothing is encoded
    by prepared launches, which pass here by."""
    encode, encoder, measure, given, measured = Codec.encode, Codec.encoder, window.measured_lo, [], []
    prepared, launching.PREPARED = launching.PREPARED, False

    def spy(self, rows, frames, status, skip=-1):
        encode(self, rows, frames, status, skip)
        given.extend(int(frames[i, 7]) - 1 for i in range(frames.shape[0]) if i != skip)

    def spy_on_measure(x):
        measured.append(measure(x))
        return measured[-1]

    def bound_to_spy(self, frames, status, skip=-1, offset=0):
        return lambda x: self.encode(ops.rows_of(x, offset, frames.shape[0], self.geometry), frames, status, skip)

    Codec.encode, Codec.encoder, windows.measured_lo = spy, bound_to_spy, spy_on_measure
    try:
        yield given, measured
    finally:
        Codec.encode, Codec.encoder, windows.measured_lo, launching.PREPARED = encode, encoder, measure, prepared


def check_gather(live, data, world, where):
    out = torch.empty(world * data.numel(), dtype=BF16)
    assert carry_out(live, AG, out, data), where
    assert_same_bits(out, gathered(data, world), where)


def case_scales_that_differ_by_rank(rank, world):
    """Bit-exact, with another window in every rank's frames, under every setting of integrity."""
    sigma = 1e-4 * 30.0 ** rank
    for integrity in ("off", "checksum", "roundtrip"):
        with runtime(window="sigma", integrity=integrity) as live, watched() as (given, _):
            for turn in range(2):
                check_gather(live, scaled(SIZE, 10 * turn + rank, sigma), world, f"{integrity} {turn}")
                data = scaled(world * SIZE, 50 + 10 * turn + rank, sigma)
                out = torch.empty(SIZE, dtype=BF16)
                assert carry_out(live, RS, out, data)
                assert_same_bits(out, rank_order_sum(data, rank, world), f"sum, {integrity} {turn}")
            stats = live.stats.snapshot()
            assert stats[AG]["calls_zipped"] == stats[RS]["calls_zipped"] == 2 and stats[AG]["overflows"] == stats[RS]["overflows"] == 0
            assert set(given) == {window.lo_for_sigma(sigma, BY_TORCH[BF16])} and len(given) == 2 * world
    windows = gathered(torch.tensor([given[0]], dtype=torch.int32).view(BF16), world).view(torch.int32).tolist()
    assert len(set(windows)) == world, "the ranks' windows must differ, or this says nothing"


def case_the_other_collectives(rank, world):
    """broadcast, all_to_all_single (equal and uneven), and both phases of all_reduce, whose sums have a window of their own."""
    sigma = 1e-3 * 20.0 ** rank
    with runtime(window="sigma") as live, watched() as (given, measured):
        data = scaled(SIZE, rank, sigma)
        tensor = data.clone()
        assert carry_out(live, "broadcast", tensor, tensor, root=world - 1)
        assert_same_bits(tensor, gathered(data, world)[-SIZE:], "broadcast")
        data = scaled(world * SIZE, 20 + rank, sigma)
        out = torch.empty_like(data)
        assert carry_out(live, "all_to_all_single", out, data)
        assert_same_bits(out, gathered(data, world).view(world, world, SIZE)[:, rank].reshape(-1), "all_to_all_single")
        splits = [(SIZE, SIZE + 2000)[(rank + peer) % 2] for peer in range(world)]           # symmetric: i sends j what j sends i
        data = scaled(sum(splits), 40 + rank, sigma)
        out = torch.empty_like(data)
        assert carry_out(live, "all_to_all_single", out, data, input_splits=tuple(splits), output_splits=tuple(splits))
        expected = torch.empty_like(data)
        dist.all_to_all_single(expected.view(torch.uint8), data.view(torch.uint8), [2 * n for n in splits], [2 * n for n in splits])
        assert_same_bits(out, expected, "uneven")
        data = scaled(world * SIZE - 1, 60 + rank, sigma)
        expected = torch.empty_like(data)
        sum_in_order(gathered(data, world).view(world, -1), expected)
        assert carry_out(live, "all_reduce", data, data)
        assert_same_bits(data, expected, "all_reduce")
        own, sums = window.lo_for_sigma(sigma, BY_TORCH[BF16]), given[-1]
        assert set(given[:-1]) == {own} and (sums > own or rank == world - 1), (given, own)
        assert len(measured) == 3 + (rank == world - 1), "broadcast (the root), all-to-alls (one class of sizes), parts, sums"


def case_what_cannot_be_measured(rank, world):
    """Infinities and NaNs: nothing can be measured, so the blocks' means are used, call by call."""
    with runtime(window="sigma") as live, watched() as (given, measured):
        for turn in range(2):
            data = scaled(SIZE, turn + rank, 0.02)
            data[::9999], data[5::9999] = float("inf"), float("nan")
            check_gather(live, data, world, turn)
        assert set(given) == {-1} and measured == [-1, -1]


def case_measured_once_per_class_and_again_after_an_overflow(rank, world):
    """All ranks' scales move together by 9 octaves: one call is sent again, the next has a new window, and none goes native."""
    lo = [window.lo_for_sigma(sigma, BY_TORCH[BF16]) for sigma in (0.02, 10.0)]
    with runtime(window="sigma") as live, watched() as (given, measured):
        for turn, sigma in enumerate((0.02, 0.02, 0.02, 10.0, 10.0, 10.0)):
            check_gather(live, scaled(SIZE, turn + 7 * rank, sigma), world, turn)
        assert measured == lo and given == [lo[0]] * 4 + [lo[1]] * 2
        stats = live.stats.snapshot()[AG]
        assert (stats["calls_zipped"], stats["calls_native"], stats["overflows"]) == (6, 0, 1)
        check_gather(live, scaled(SIZE // 2, rank, 0.02), world, "another class")
        assert measured == [*lo, lo[0]]


def case_data_that_never_compresses_is_still_given_up(rank, world):
    with runtime(window="sigma") as live:
        noise = random_bits(SIZE, seed=rank)
        for turn in range(3):
            out = torch.empty(world * SIZE, dtype=BF16)
            carry_out(live, AG, out, noise)
            assert_same_bits(out, gathered(noise, world), turn)
        assert live.stats.snapshot()[AG]["native_reasons"] == {"incompressible": 2}
        assert capacity.RETRY_AFTER > 2


def case_block_windows_measure_nothing(rank, world):
    with runtime() as live, watched() as (given, measured):
        check_gather(live, scaled(SIZE, rank, 0.02), world, "block")
        assert given == [-1] and measured == []
