"""dist.batch_isend_irecv on groups that are no plain ProcessGroup but have NCCL inside.

torch coalesces a batch only if ``type(group) is ProcessGroup``, and else sends one by one; over NCCL two ranks that both send first
then wait for each other. Source of the seam: distributed_c10d.batch_isend_irecv, 2.11 and 2.13.
"""
import functools

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def batch_through_coalescing(group_class: type) -> None:
    """From now on batches on groups of this class are coalesced where their backend can; all others go torch's way. Idempotent."""
    original = c10d.batch_isend_irecv
    if getattr(original, "coalesces", None) is group_class:
        return

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list):
        first = p2p_op_list[0] if p2p_op_list else None
        group = getattr(first, "group", None) or (c10d.GroupMember.WORLD if first else None)
        if not isinstance(group, group_class) or not group._get_backend(first.tensor.device).supports_coalescing:
            return original(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        with c10d._coalescing_manager(group, first.tensor.device, async_ops=True) as batch:
            for op in p2p_op_list:
                peer = {"group_dst" if op.op is c10d.isend else "group_src": op.group_peer}
                op.op(op.tensor, group=op.group, tag=op.tag, **peer)
        return batch.works

    batch_isend_irecv.coalesces = group_class
    c10d.batch_isend_irecv = batch_isend_irecv
    if dist.batch_isend_irecv is original:
        dist.batch_isend_irecv = batch_isend_irecv
