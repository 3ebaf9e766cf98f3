"""ZeRO-3: a bucket of gradients is delivered when the next ones are on their way.

DeepSpeed reduce-scatters each bucket by a call that returns at once, on a stream that waits for the backward pass of the bucket's layers.
A zipped call's ``wait()`` holds the host until the GPU has encoded, so right after the launch it would cost all the lead that the host has.
LATE buckets later it costs what is more than these. Until then the buckets' sums lie in buffers of their own; they go where they belong in
the same order and by the same arithmetic, and all of them before the end of the backward pass.

The seam: ``__reduce_and_partition_ipg_grads``, in it ``partition_grads``, and ``independent_gradient_partition_epilogue``. Source:
deepspeed/runtime/zero/stage3.py, 0.19.8.
"""
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_zipccl.backend.deepspeed_comm import waiting_later
from zipscape import environment

LATE = environment.number("ZIPCCL_LATE")     # buckets; not the default: one was no faster on two GPUs, more were not timed
MAX_BYTES = 256 << 20       # of a bucket: it takes this much memory longer, and few large calls hold the host seldom
MAX_KEPT_BYTES = 1 << 30    # of all that are launched and not delivered
ATTRIBUTE = "zipccl_reduce"             # of an optimizer: its Delay
_REDUCE = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


@dataclass
class Bucket:
    """Launched, and not delivered yet: its parameters, this rank's parts of the sums, and the calls that make them."""
    params: list
    partitions: list[torch.Tensor]
    works: list[dist.Work]
    num_bytes: int


@dataclass
class Delay:
    """Of an optimizer. ``works``, ``num_bytes``: the calls and the size of the bucket that is being reduced, if it may be delivered
    later."""
    deliver: Callable
    works: list[dist.Work] | None = None
    num_bytes: int = 0
    kept: deque[Bucket] = field(default_factory=deque)              # in the order in which they were launched
    is_last: bool = False                       # the bucket at hand is the pass's last one

    def deliver_but(self, optimizer, num: int) -> None:
        """All but the ``num`` launched last, as DeepSpeed does right after its call."""
        while len(self.kept) > num or len(self.kept) > 1 and sum(bucket.num_bytes for bucket in self.kept) > MAX_KEPT_BYTES:
            bucket = self.kept.popleft()
            with get_accelerator().stream(optimizer.reduce_and_partition_stream):
                for work in bucket.works:
                    work.wait()
                self.deliver(optimizer, bucket.params, bucket.partitions)


def install() -> None:
    """Patches DeepSpeed's optimizer of stage 3. Patches chain. Without zipped calls they do nothing."""
    cls = DeepSpeedZeroOptimizer_Stage3
    deliver = cls.partition_grads
    setattr(cls, _REDUCE, _behind(getattr(cls, _REDUCE), deliver))
    cls.independent_gradient_partition_epilogue = _ending(cls.independent_gradient_partition_epilogue, deliver)
    cls.partition_grads = _keeping(deliver)


def _delay_of(zero, deliver: Callable) -> Delay:
    delay = zero.__dict__.get(ATTRIBUTE)
    if delay is None:
        delay = zero.__dict__[ATTRIBUTE] = Delay(deliver)
    return delay


def _behind(method, partition_grads):

    @functools.wraps(method)
    def reduce_and_partition(self, communication_data_type):
        delay = _delay_of(self, partition_grads)
        if not _may_be_late(self, delay, communication_data_type):
            delay.deliver_but(self, 0)
            return method(self, communication_data_type)
        delay.num_bytes = _bytes_of(self, communication_data_type)
        with waiting_later() as delay.works:
            try:
                method(self, communication_data_type)
            finally:
                delay.works = None
        delay.deliver_but(self, LATE)

    return reduce_and_partition


def _keeping(method):

    @functools.wraps(method)
    def partition_grads(self, params_to_release, grad_partitions):
        delay = self.__dict__.get(ATTRIBUTE)
        if delay is None or not delay.works:            # nothing was launched that is waited for later
            return method(self, params_to_release, grad_partitions)
        delay.kept.append(Bucket(list(params_to_release), grad_partitions, delay.works, delay.num_bytes))
        if _is_lent(self, grad_partitions):
            delay.deliver_but(self, 0)
        return []

    return partition_grads


def _ending(method, partition_grads):

    @functools.wraps(method)
    def independent_gradient_partition_epilogue(self):
        delay = _delay_of(self, partition_grads)
        delay.is_last = True
        try:
            delay.deliver_but(self, 0)
            return method(self)
        finally:
            delay.is_last = False

    return independent_gradient_partition_epilogue


def _may_be_late(zero, delay: Delay, communication_data_type: torch.dtype) -> bool:
    """Whether nothing but ``partition_grads`` looks at the sums, and another bucket follows."""
    bucket = zero.ipg_buckets[communication_data_type]
    if not LATE or delay.is_last or not bucket.params or zero.zenflow or zero.offload_optimizer:
        return False
    num_ranks = dist.get_world_size(bucket.process_group)
    return (communication_data_type == zero.gradient_accumulation_dtype
            and not (zero.postscale_gradients and zero.gradient_predivide_factor != 1.0)
            and zero._gradient_averaging_world_size(bucket.params, num_ranks) == num_ranks
            and (zero.reduce_scatter or not zero.contiguous_gradients)
            and _bytes_of(zero, communication_data_type) <= MAX_BYTES)


def _bytes_of(zero, communication_data_type: torch.dtype) -> int:
    return zero.ipg_buckets[communication_data_type].elements * communication_data_type.itemsize


def _is_lent(zero, partitions: list[torch.Tensor]) -> bool:
    """Whether the next bucket's gradients come into the same memory: a bucket of one tensor is reduced where it lies."""
    buffers = {bucket.buffer.untyped_storage().data_ptr() for bucket in zero.ipg_buckets.values() if bucket.buffer is not None}
    return any(t.untyped_storage().data_ptr() in buffers for t in partitions)
