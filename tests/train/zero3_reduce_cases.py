"""Cases run on every rank by test_zero.py: when ZeRO-3's buckets are delivered. Bits are compared with native training."""
from unittest import mock

from torch import nn

from ds_zipccl.backend import deepspeed_comm, zero3_reduce
from tests.train.zero_cases import WIDTH, ZIPPED, Net, settings, train


class WithoutBias(Net):
    """Each layer is a bucket of one tensor, which is reduced where it lies; the next one's gradients come there."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.head.bias = None


def trained(bucket_size: int, model, late: int = 1, **more) -> list[tuple[str, int]]:
    """What became of each bucket, in order: "late": delivered when later ones were launched; "end": at the end of the pass; "lent"; and how
    many had been launched and not delivered then."""
    config, found = settings(3, "bf16", **more), []
    config["zero_optimization"]["reduce_bucket_size"] = bucket_size
    native = train(config, 3, model=model)
    deliver_but = zero3_reduce.Delay.deliver_but

    def spied(self, optimizer, num):
        num_kept, launched = len(self.kept), list(self.kept)
        deliver_but(self, optimizer, num)
        assert list(self.kept) == launched[num_kept - len(self.kept):] and len(self.kept) <= num
        found.extend(("end" if self.is_last else "lent" if self.works else "late", num_kept) for _ in range(num_kept - len(self.kept)))

    with mock.patch.object(zero3_reduce.Delay, "deliver_but", spied), mock.patch.object(zero3_reduce, "LATE", late):
        zipped = train(config | {"zipccl": ZIPPED}, 3, model=model)
    assert zipped[2]["reduce_scatter_tensor"]["calls_zipped"] > 0
    assert native[:2] == zipped[:2], "losses or parameters differ from native"
    return found


def case_one_bucket_behind(rank, world_size):
    found = trained(20000, Net)
    assert found.count(("late", 2)) >= 4 and found.count(("end", 1)) == 8 and len(set(found)) == 2, found      # 4 steps of 2 passes each


def case_two_buckets_behind(rank, world_size):
    found = trained(5000, Net, late=2)
    assert found.count(("late", 3)) >= 8 and found.count(("end", 2)) == 2 * 8 and len(set(found)) == 2, found


def case_no_more_than_memory_allows(rank, world_size):
    with mock.patch.object(zero3_reduce, "MAX_KEPT_BYTES", 1):
        found = trained(5000, Net, late=2)
    assert {num for how, num in found if how == "late"} == {2} and found.count(("end", 1)) == 8, found


def case_sums_have_memory_of_their_own(rank, world_size):
    """As on GPUs: ZeRO-3's outputs lie in their inputs."""
    copied = []

    class Spied(deepspeed_comm.CopiedBack):
        def wait(self):
            copied.append(self._result.data_ptr() != self._output.data_ptr())
            super().wait()

    for late in (0, 2):
        with mock.patch.object(deepspeed_comm, "APART", ("cpu", "cuda")), mock.patch.object(deepspeed_comm, "CopiedBack", Spied):
            trained(5000, Net, late=late)
        assert len(copied) > 20 and all(copied), (late, copied)
        copied.clear()


def case_one_bucket_for_all(rank, world_size):
    """It is the pass's last one, the first time too."""
    assert trained(1 << 20, Net) == []


def case_lent_memory_is_not_waited_for(rank, world_size):
    found = trained(WIDTH * WIDTH + 1, WithoutBias)
    assert [how for how, _ in found].count("lent") >= 8 * 3, found
    found = trained(WIDTH * WIDTH + 1, WithoutBias, late=3)
    assert [how for how, _ in found].count("lent") >= 8 * 3, found


def case_sums_of_another_type_are_not_late(rank, world_size):
    """They are converted by DeepSpeed as soon as the call has returned."""
    assert trained(20000, Net, data_types={"grad_accum_dtype": "fp32"}) == []


def case_large_buckets_are_not_late(rank, world_size):
    with mock.patch.object(zero3_reduce, "MAX_BYTES", 20000):
        assert trained(20000, Net) == []

