"""The collectives of DeepSpeed's communication object that have no zipped form yet: counted, and run as before.

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
        front.count_native(self.zipccl, op, resolve(group), num_bytes)

    @disable_compiler_collective
    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        self._zipccl_count("all_reduce", group, lambda world: 2 * tensor.nbytes * (world - 1) // world)
        return super().all_reduce(tensor, op=op, group=group, async_op=async_op)

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
    def reduce_scatter(self, output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        self._zipccl_count("reduce_scatter", group, lambda world: _all_but_own(input_list, group))
        return super().reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)

    @disable_compiler_collective
    def broadcast(self, tensor, src, group=None, async_op=False):
        self._zipccl_count("broadcast", group, lambda world: tensor.nbytes if dist.get_rank() == src else 0)
        return super().broadcast(tensor, src, group=group, async_op=async_op)

    @disable_compiler_collective
    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        self._zipccl_count("all_gather", group, lambda world: tensor.nbytes * (world - 1))
        return super().all_gather(tensor_list, tensor, group=group, async_op=async_op)

    @disable_compiler_collective
    def all_gather_coalesced(self, output_tensors, input_tensors, group=None, async_op=False):
        self._zipccl_count("all_gather_coalesced", group, lambda world: _nbytes(input_tensors) * (world - 1))
        return super().all_gather_coalesced(output_tensors, input_tensors, group=group, async_op=async_op)

    @disable_compiler_collective
    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):

        def num_bytes(world):
            if not input_split_sizes:
                return input.nbytes * (world - 1) // world
            own = input_split_sizes[dist.get_rank(group)]
            return input.nbytes - input.nbytes * own // max(1, input.shape[0])

        self._zipccl_count("all_to_all_single", group, num_bytes)
        return super().all_to_all_single(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)

    @disable_compiler_collective
    def all_to_all(self, output_tensor_list, input_tensor_list, group=None, async_op=False):
        self._zipccl_count("all_to_all", group, lambda world: _all_but_own(input_tensor_list, group))
        return super().all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)

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
