"""The collectives of DeepSpeed's communication object that have no zipped form: counted, and run as before.

A mixin below ``ZippedCollectives``; every override has the base method's signature and decorator (a test compares them).
Source of the seam: deepspeed/comm/torch.py (TorchBackend), 0.19.8.
"""
import torch.distributed as dist
from deepspeed.comm.torch import disable_compiler_collective

from ds_zipccl.backend import front


def _nbytes(tensors) -> int:
    return sum(t.nbytes for t in tensors)


def _all_but_own(tensors, group) -> int:
    return _nbytes(tensors) - tensors[dist.get_rank(group)].nbytes


def resolve(group) -> dist.ProcessGroup | None:
    """The process group that is meant, or None for "this rank is not in the group" and foreign group objects."""
    group = dist.group.WORLD if group is None else group
    return group if isinstance(group, dist.ProcessGroup) else None


class NativeCollectives:
    """Counts the bytes this rank sends, as a ring (gathers, reductions) or directly (the others) does."""

    def _zipccl_count(self, op: str, group, num_bytes=None) -> None:
        pg = resolve(group)
        if not getattr(pg, "zips_itself", False):       # front (b)'s counts for itself
            front.count_native(self.zipccl, op, pg, num_bytes)

    @disable_compiler_collective
    def all_reduce_coalesced(self, tensors, op=dist.ReduceOp.SUM, group=None, async_op=False):
        self._zipccl_count("all_reduce_coalesced", group, lambda world: 2 * _nbytes(tensors) * (world - 1) // world)
        return super().all_reduce_coalesced(tensors, op=op, group=group, async_op=async_op)

    def inference_all_reduce(self, tensor, op, group=None):
        self._zipccl_count("inference_all_reduce", group, lambda world: 2 * tensor.nbytes * (world - 1) // world)
        return super().inference_all_reduce(tensor, op, group=group)

    @disable_compiler_collective
    def reduce(self, tensor, dst, op=dist.ReduceOp.SUM, group=None, async_op=False):
        self._zipccl_count("reduce", group, lambda world: tensor.nbytes if dist.get_rank() != dst else 0)
        return super().reduce(tensor, dst, op=op, group=group, async_op=async_op)

    @disable_compiler_collective
    def all_gather_coalesced(self, output_tensors, input_tensors, group=None, async_op=False):
        self._zipccl_count("all_gather_coalesced", group, lambda world: _nbytes(input_tensors) * (world - 1))
        return super().all_gather_coalesced(output_tensors, input_tensors, group=group, async_op=async_op)

    @disable_compiler_collective
    def gather(self, tensor, gather_list=None, dst=0, group=None, async_op=False):
        self._zipccl_count("gather", group, lambda world: tensor.nbytes if dist.get_rank() != dst else 0)
        return super().gather(tensor, gather_list=gather_list, dst=dst, group=group, async_op=async_op)

    @disable_compiler_collective
    def scatter(self, tensor, scatter_list=None, src=0, group=None, async_op=False):
        self._zipccl_count("scatter", group, lambda world: _all_but_own(scatter_list, group) if dist.get_rank() == src else 0)
        return super().scatter(tensor, scatter_list=scatter_list, src=src, group=group, async_op=async_op)

    @disable_compiler_collective
    def barrier(self, group=None, async_op=False, device_ids=None):
        self._zipccl_count("barrier", group)
        return super().barrier(group=group, async_op=async_op, device_ids=device_ids)

    @disable_compiler_collective
    def monitored_barrier(self, group=None, timeout=None, wait_all_ranks=False):
        self._zipccl_count("monitored_barrier", group)
        return super().monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)

    @disable_compiler_collective
    def all_gather_object(self, object_list, obj, group=None):
        self._zipccl_count("all_gather_object", group)
        return super().all_gather_object(object_list, obj, group=group)

    @disable_compiler_collective
    def broadcast_object_list(self, object_list, src, group=None, device=None):
        self._zipccl_count("broadcast_object_list", group)
        return super().broadcast_object_list(object_list, src, group=group, device=device)
