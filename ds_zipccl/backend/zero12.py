"""ZeRO 1 and 2: gradients are reduce-scattered to the partitions' owners. DeepSpeed, also with ``"reduce_scatter": true``, all_reduces
every bucket and keeps the owned slices.

The seam is one method, ``allreduce_and_scatter(bucket)``: its slices, their owners and the places that take the sums. What is sent where:
zero12_plan.py. In stage 1 all gradients are there when the first is reduced (unless ``overlap_comm``), so the order in which buckets are
filled is free: ``reduce_gradients`` takes the one in which each bucket belongs to all ranks about equally. Partitions, averaging and
everything after the sum are DeepSpeed's own; whatever cannot be reduced so goes to its methods, counted with the reason. Source of the
seam: deepspeed/runtime/zero/stage_1_and_2.py (``DeepSpeedZeroOptimizer``: ``average_tensor``, ``reduce_ipg_grads``), 0.19.8.
"""
import functools
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage_1_and_2

from ds_zipccl.backend import front, policy
from ds_zipccl.backend.deepspeed_comm import live_runtime
from ds_zipccl.backend.deepspeed_native import resolve
from ds_zipccl.backend.zero12_plan import Bucket, all_reduce_numel, balanced_order, filled
from ds_zipccl.collectives.all_to_all import SINGLE as ALL_TO_ALL
from ds_zipccl.collectives.reduce_scatter_uneven import SPEC, TO_OWNER, spec_for, spec_of
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.transport import adjoining

REASONS = {
    "divide": "the caller wants the average made here, which DeepSpeed 0.19.8 does before",
    "several_owners": "a matrix that Muon orthogonalizes is needed whole on more than one rank",
    "zenflow": "ZenFlow also reads what the other ranks own",
    "unbalanced": "few ranks own the bucket, so it would take two phases, which adaptive does not measure",
    "switch": "measured slower than native, or recent gradients did not compress",
    "reduce_scatter_false": "the configuration asks for whole gradients on every rank",
    "use_multi_rank_bucket_allreduce_false": "DeepSpeed then reduces each slice to its owner by itself",
    "contiguous_gradients_false": "DeepSpeed then keeps whole reduced gradients",
}                                                   # besides those of policy.py


@dataclass
class ReduceStats:
    """Counters of this process. ``all_reduce_bytes``: what DeepSpeed's ring all_reduces would have sent of the buckets that were
    reduce-scattered; what was sent is counted under the collectives reduce_scatter_uneven, reduce_to_owner (of two ranks) and (second
    phases) all_to_all_single. ``busiest_bytes``: of these buckets, uncompressed, what the rank with most of each one sends or receives: the
    time that links need."""
    straight: int = 0                               # buckets whose slices went straight to their owners
    two_phase: int = 0
    all_reduce_bytes: int = 0
    busiest_bytes: int = 0
    native: Counter = field(default_factory=Counter)        # buckets left to DeepSpeed, by reason

    def section(self) -> tuple[dict, dict]:
        """(counters, gauges) for ``stats.Stats.sections``."""
        counters = {"straight": self.straight, "two_phase": self.two_phase, "all_reduce_bytes": self.all_reduce_bytes,
                    "busiest_bytes": self.busiest_bytes}
        return counters | {f"native_{reason}": count for reason, count in self.native.items()}, {}


_stats: "weakref.WeakKeyDictionary[Runtime, ReduceStats]" = weakref.WeakKeyDictionary()


def stats_of(runtime: Runtime) -> ReduceStats:
    stats = _stats.get(runtime)
    if stats is None:
        stats = _stats[runtime] = ReduceStats()
        runtime.stats.sections["zero12"] = stats.section
    return stats


def install() -> None:
    """Patches DeepSpeed's optimizer of stages 1 and 2. Patches chain."""
    cls = stage_1_and_2.DeepSpeedZeroOptimizer
    cls.allreduce_and_scatter = _scattering(cls.allreduce_and_scatter)
    cls.reduce_gradients = _in_balanced_order(cls.reduce_gradients)
    cls.gradient_reduction_w_predivide = _counting(cls.gradient_reduction_w_predivide, lambda **_: "reduce_scatter_false")
    cls.allreduce_no_retain = _counting(cls.allreduce_no_retain, lambda rank=None, **_: "contiguous_gradients_false" if rank is None
                                        else "use_multi_rank_bucket_allreduce_false")
    cls._allreduce_noncontiguous_bucket_preserving_fp32 = _counting(cls._allreduce_noncontiguous_bucket_preserving_fp32,
                                                                    lambda **_: "contiguous_gradients_false")


def _counting(method, reason):

    @functools.wraps(method)
    def patched(self, *args, **kwargs):
        runtime = live_runtime()
        if runtime is not None:
            stats_of(runtime).native[reason(**kwargs)] += 1
        return method(self, *args, **kwargs)

    return patched


def _scattering(method):

    @functools.wraps(method)
    def allreduce_and_scatter(self, bucket, communication_data_type, numel_per_bucket=500000000, log=None, divide=True, process_group=None):
        runtime = live_runtime()
        if runtime is not None:
            group = resolve(self.dp_process_group if process_group is None else process_group)
            reduction = Reduction(self, runtime, group, bucket, communication_data_type)
            reason = "divide" if divide else reduction.run()
            if reason is None:
                return
            stats_of(runtime).native[reason] += 1
        method(self, bucket, communication_data_type, numel_per_bucket=numel_per_bucket, log=log, divide=divide,
               process_group=process_group)

    return allreduce_and_scatter


def _in_balanced_order(method):

    @functools.wraps(method)
    def reduce_gradients(self, pipeline_parallel=False):
        runtime = live_runtime()
        if runtime is None or pipeline_parallel or not _order_is_free(self, runtime):
            return method(self, pipeline_parallel=pipeline_parallel)
        for i, index in _order(self):
            param = self.bit16_groups[i][index]
            if self.get_gradient_for_reduction(param) is not None:
                self.reduce_ready_partitions_and_remove_grads(param, i)
        self.overlapping_partition_gradients_reduce_epilogue()

    return reduce_gradients


class Reduction:
    """One bucket of an optimizer (``zero``): a list of (owner or set of owners, flat slice, place that its sum is added to or None).
    ``dtype``: what is sent and summed."""

    def __init__(self, zero, runtime: Runtime, group, bucket, dtype: torch.dtype):
        self._zero, self._runtime, self._group = zero, runtime, group
        self._dtype = summed_dtype(zero, dtype)
        self._owners = [owner if isinstance(owner, frozenset) else frozenset((owner,)) for owner, *_ in bucket]
        self._slices = [tensor for _, tensor, *_ in bucket]
        self._places = [rest[0] if rest else None for _, _, *rest in bucket]

    def run(self) -> str | None:
        """Leaves the sums where ``allreduce_and_scatter`` does, or returns the reason why that must: then nothing was changed."""
        reason = self._why_native()
        if reason is not None:
            return reason
        layout = Bucket(tuple(next(iter(owner)) for owner in self._owners), tuple(t.numel() for t in self._slices), self._group.size())
        reason = _why_left(layout, self._runtime, self._dtype)
        if reason is not None:
            return reason
        two_phases = layout.wants_two_phases()
        sums, reason = (self._two_phases if two_phases else self._straight)(layout)
        if reason is not None:
            return reason
        self._deliver(layout, sums)
        stats = stats_of(self._runtime)
        stats.two_phase += two_phases
        stats.straight += not two_phases
        stats.all_reduce_bytes += all_reduce_numel(layout.numel, self._group.size()) * self._dtype.itemsize
        stats.busiest_bytes += (layout.two_phase_load() if two_phases else layout.straight_load()) * self._dtype.itemsize
        return None

    def _why_native(self) -> str | None:
        if self._group is None:
            return "not_in_group"
        if getattr(self._group, "zips_itself", False):
            return "zips_itself"
        if self._zero.zenflow:
            return "zenflow"
        if any(len(owner) != 1 for owner in self._owners):
            return "several_owners"
        return _arithmetic_reason(self._runtime, self._group, self._dtype)

    def _straight(self, layout: Bucket):
        """(this rank's sums, None) or (None, reason). Every slice goes to its owner, who sums in rank order."""
        by_owner = [[] for _ in range(layout.world_size)]
        for owner, tensor in zip(layout.owners, self._slices, strict=True):
            by_owner[owner].append(tensor)
        return self._reduce_scatter([self._joined(tensors) for tensors in by_owner])

    def _two_phases(self, layout: Bucket):
        """The same by way of equal chunks: whoever has a chunk sums it, then the sums go to the owners."""
        rank = self._group.rank()
        chunks = list(self._joined(self._slices).split(layout.chunks()))
        chunks[rank] = chunks[rank].clone()             # takes the sums: the bucket itself keeps this rank's gradients
        sums, reason = self._reduce_scatter(chunks)
        if reason is not None:
            return None, reason
        by_owner = [[] for _ in range(layout.world_size)]
        pieces = layout.pieces()[rank]
        for (owner, _), piece in zip(pieces, sums.split([numel for _, numel in pieces]) if pieces else (), strict=True):
            by_owner[owner].append(piece)
        matrix = layout.exchange()
        takes = tuple(row[rank] for row in matrix)
        out = torch.empty(sum(takes), dtype=self._dtype, device=sums.device)
        call = Call(ALL_TO_ALL.name, out, self._joined([piece for pieces in by_owner for piece in pieces]), self._group,
                    input_splits=tuple(matrix[rank]), output_splits=takes)
        work = front.run(self._runtime, call)
        (ALL_TO_ALL.native(call) if work is None else work).wait()
        return out, None

    def _reduce_scatter(self, inputs: list[torch.Tensor]):
        spec = spec_for(tuple(inputs))
        call = Call(spec.name, inputs[self._group.rank()], tuple(inputs), self._group)
        reason = policy.reason_for_native(self._runtime.config, spec, call)
        if reason is not None:
            return None, reason
        work = self._runtime.run(call, None)
        if work is None:
            return None, "switch"
        work.wait()
        return call.output, None

    def _joined(self, tensors) -> torch.Tensor:
        """[n] of the dtype that is sent; the tensors' own memory where they lie one after another in it."""
        if not tensors:
            return torch.empty(0, dtype=self._dtype, device=self._slices[0].device)
        flats = [t.detach().reshape(-1) for t in tensors]
        if all(t.dtype == self._dtype for t in flats):
            whole = adjoining(flats)
            return torch.cat(flats) if whole is None else whole
        return torch.cat([t.to(self._dtype) for t in flats])

    def _deliver(self, layout: Bucket, sums: torch.Tensor) -> None:
        """As DeepSpeed's ``allreduce_and_copy_with_multiple_ranks``."""
        mine = [i for i, owner in enumerate(layout.owners) if owner == self._group.rank()]
        zero, other_stream = self._zero, self._zero.overlap_comm and not get_accelerator().resolves_data_dependency()
        for i, part in zip(mine, sums.split([layout.numels[i] for i in mine]) if mine else (), strict=True):
            tensor = self._slices[i]
            zero._add_to_grad_partition_buffer(self._places[i], part)
            if part.data_ptr() != tensor.data_ptr():
                tensor.copy_(part.view(tensor.shape))
            if other_stream:
                tensor.record_stream(zero.reduction_stream)


def kinds_of(zero, runtime: Runtime, group, dtype: torch.dtype, pipeline_parallel: bool) -> list[str]:
    """Names of the collectives by which the optimizer's buckets of ``dtype`` will go to their owners on ``group``, if a gradient comes of
    every parameter; alike on all its ranks. Of several buckets in an order that is not ours (a backward pass's, which nobody knows, or a
    pipeline's), those that may be."""
    group, both = resolve(group), [SPEC.name, TO_OWNER.name]
    if group is None or not isinstance(zero, stage_1_and_2.DeepSpeedZeroOptimizer) or zero.zenflow or not _are_scattered(zero):
        return []
    is_ours = not pipeline_parallel and _order_is_free(zero, runtime)
    order = _order(zero) if is_ours else [(i, index) for i, params in enumerate(zero.bit16_groups) for index in range(len(params))]
    params = [(i, zero.bit16_groups[i][index]) for i, index in order]
    params = [(i, param) for i, param in params if zero.get_param_comm_dtype(param) == dtype]
    buckets = filled([param.numel() for _, param in params], zero.reduce_bucket_size)
    if not is_ours and len(buckets) > 1:
        return both if group.size() == 2 else [SPEC.name]
    found = set()
    for bucket in buckets:
        owned = [item for i, param in (params[at] for at in bucket) if resolve(zero.real_dp_process_group[i]) is group
                 for item in _owned(zero, i, param).items()]
        layout = Bucket(*zip(*owned, strict=True), group.size()) if owned else None
        if layout is not None and _why_left(layout, runtime, dtype) is None:
            found.add(spec_of(layout.owned()).name)
    return [name for name in both if name in found]


def _are_scattered(zero) -> bool:
    """Whether DeepSpeed hands buckets to ``allreduce_and_scatter``."""
    return zero.contiguous_gradients and zero.reduce_scatter and zero.use_multi_rank_bucket_allreduce


def _why_left(layout: Bucket, runtime: Runtime, dtype: torch.dtype) -> str | None:
    """The reason why such a bucket is DeepSpeed's."""
    if layout.numel * dtype.itemsize < max(runtime.config.min_bytes, 1):
        return "min_bytes"
    if layout.wants_two_phases() and runtime.config.collectives.reduce_scatter != "always":
        return "unbalanced"
    return None


def summed_dtype(zero, communication_data_type: torch.dtype) -> torch.dtype:
    """In which DeepSpeed has ZeRO-1/2 reduce gradients."""
    return torch.float32 if stage_1_and_2.pg_correctness_test or getattr(zero, "sequence_parallel_size", 1) > 1 else communication_data_type


def _arithmetic_reason(runtime: Runtime, group, dtype: torch.dtype) -> str | None:
    """Why no bucket of the dtype is reduced by us on the group, whatever its size: the same on every rank."""
    choice = runtime.config.collectives.reduce_scatter
    if group.size() == 1:
        return "world_size_1"
    if choice == "never":
        return "never"
    if dtype not in policy.WORTHWHILE:
        return "dtype"
    if runtime.held is not None:
        return runtime.held
    if choice != "always" and group.size() > 2 and runtime.config.deterministic_reduce:
        return "deterministic_reduce"
    return None


def _order_is_free(zero, runtime: Runtime) -> bool:
    """Whether the buckets are filled from gradients that are all there, and reduced by us."""
    if zero.partition_gradients or zero.overlap_comm or zero.zenflow:
        return False
    if not _are_scattered(zero):
        return False
    group = resolve(zero.dp_process_group)
    if group is None or any(resolve(other) is not group for other in zero.real_dp_process_group):       # MoE's experts
        return False
    return all(_arithmetic_reason(runtime, group, summed_dtype(zero, dtype)) is None for dtype in zero.ipg_buckets)


def _order(zero) -> list[tuple[int, int]]:
    """(group, index in it) of all parameters, kept on the optimizer: a function of its partitions."""
    order = getattr(zero, "_zipccl_order", None)
    if order is None:
        items = [((i, index), _owned(zero, i, param)) for i, group in enumerate(zero.bit16_groups) for index, param in enumerate(group)]
        order = zero._zipccl_order = balanced_order(items, resolve(zero.dp_process_group).size())
    return order


def _owned(zero, i: int, param) -> dict[int, int]:
    """{rank: elements of the parameter in its partition}."""
    if param.numel() == 0:
        return {}
    param_id = zero.get_param_id(param)
    starts = sorted((int(zero.grad_start_offset[i][rank][param_id]), rank) for rank in zero.param_to_partition_ids[i][param_id])
    ends = [start for start, _ in starts[1:]] + [param.numel()]
    return {rank: end - start for (start, rank), end in zip(starts, ends, strict=True)}
