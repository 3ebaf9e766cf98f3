"""ZeRO-3 under ``nan_check``: what DeepSpeed pads shards and buckets with is memory that nobody has written, and may look like NaNs.
It is zeroed, so that the check sees what the ranks mean to send.

The seams: ``DeepSpeedZeRoOffload._convert_to_zero_parameters``, after which all parameters of a model have shards, and
``reduce_scatter_coalesced``. Source: deepspeed/runtime/zero/parameter_offload.py, partition_parameters.py (``_partition_param``) and
runtime/comm/coalesced_collectives.py, 0.19.8, which zeroes the padding of hpZ's second shards itself.
"""
import functools

import torch
import torch.distributed as dist
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from ds_zipccl.backend.deepspeed_comm import live_runtime
from ds_zipccl.backend.zero3_writers import after


def install() -> None:
    """Patches chain. Without ``nan_check`` they do nothing."""
    DeepSpeedZeRoOffload._convert_to_zero_parameters = after(DeepSpeedZeRoOffload._convert_to_zero_parameters, _zero_the_ends_of_shards)
    for module in (stage3, coalesced_collectives):
        module.reduce_scatter_coalesced = _padded_with_zeros(module.reduce_scatter_coalesced)


def _looks() -> bool:
    runtime = live_runtime()
    return runtime is not None and runtime.config.nan_check != "off"


def _zero_the_ends_of_shards(_offload, _ds_config, module, *_args, **_kwargs) -> None:
    for p in module.parameters() if _looks() else ():
        shard = p.ds_tensor
        if shard is not None and shard.numel() and shard.is_floating_point():
            own = min(max(p.ds_numel - p.ds_zero_partition_rank * shard.numel(), 0), shard.numel())
            shard.data[own:].zero_()


def _padded_with_zeros(original):

    @functools.wraps(original)
    def reduce_scatter_coalesced(tensors, group=None):
        world = dist.get_world_size(group)
        if not _looks() or all(t.numel() % world == 0 for t in tensors):
            return original(tensors, group)
        rank, sizes = dist.get_rank(group), [-(-t.numel() // world) for t in tensors]
        whole = [torch.nn.functional.pad(t.reshape(-1), (0, world * size - t.numel())) for t, size in zip(tensors, sizes, strict=True)]
        return [part[:min(max(t.numel() - rank * size, 0), size)]
                for part, t, size in zip(original(whole, group), tensors, sizes, strict=True)]

    return reduce_scatter_coalesced
