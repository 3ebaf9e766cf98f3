"""Who writes the shards of ZeRO-3 parameters: after each of them the frames of ``cache_params`` are stale.

``_version`` of a shard does not move on DeepSpeed's writes (they go through ``.data`` and flat buffers), so every writer is named here. A
writer that all ranks carry out together says ``changed``; one that a rank may carry out alone, or that only moves the shards, says
``changed_here``. Source: deepspeed/runtime/zero/stage3.py, partition_parameters.py, runtime/engine.py, 0.19.8. What nobody has announced is
found by the fingerprints of collectives/frame_cache.py.
"""
import functools
import inspect
from collections.abc import Callable

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

ATTRIBUTE = "zipccl_frames"             # of a parameter, an engine or an optimizer: the frames it belongs to
_installed = False
_forward_passes = 0


def forward_passes() -> int:
    """Passes begun so far by modules with ZeRO-3 hooks in this process: writes in the middle of one are not expected."""
    return _forward_passes


def after(method: Callable, then: Callable) -> Callable:
    """``method``, followed by ``then(self, *arguments)`` with the arguments it was called with."""

    @functools.wraps(method)
    def patched(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        then(self, *args, **kwargs)
        return result

    return patched


def _with_frames(then: Callable) -> Callable:
    """``then(frames, self, *arguments)`` for objects that have frames."""

    def called(self, *args, **kwargs):
        frames = getattr(self, ATTRIBUTE, None)
        if frames is not None:
            then(frames, self, *args, **kwargs)

    return called


def _sub_group_written(frames, optimizer, sub_group_id, *_args, **_kwargs) -> None:
    frames.changed(optimizer.fp16_groups[sub_group_id])


def _all_written(frames, _owner, *_args, **_kwargs) -> None:
    frames.changed()


def _step_ended(frames, _optimizer, *_args, **_kwargs) -> None:
    frames.refresh()


def _master_written(frames, optimizer, _value, param, optim_state_key=None) -> None:
    """Where master weights share memory with the shards (BF16 masters may); else the shard follows in the next step."""
    group = optimizer.grad_position[optimizer.get_param_id(param)][0] if param.requires_grad and optim_state_key is None else None
    if group is not None and _memory(optimizer.fp32_partitioned_groups_flat[group]) == _memory(param.ds_tensor):
        frames.changed_here([param])


def _memory(tensor: torch.Tensor) -> tuple:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _offloaded(frames, optimizer, *_args, **_kwargs) -> None:
    if OffloadStateTypeEnum.lp_params in optimizer.offloaded_states:
        frames.free()                   # whoever moves the shards away wants their memory


def _moved(frames, _optimizer, *_args, **_kwargs) -> None:
    frames.changed_here()


def _partitioned(_init, param, buffer=None, has_been_updated=False, free_data=True) -> None:
    """GatheredParameters with a modifier, and whoever else puts a changed parameter back into its shards."""
    frames = getattr(param, ATTRIBUTE, None)
    if has_been_updated and frames is not None:
        frames.changed([param])


def _forward_began(_coordinator) -> None:
    global _forward_passes
    _forward_passes += 1


WRITERS = (
    (DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", _with_frames(_sub_group_written)),
    (DeepSpeedZeroOptimizer_Stage3, "step", _with_frames(_step_ended)),
    (DeepSpeedZeroOptimizer_Stage3, "_rigid_load_state_dict", _with_frames(_all_written)),
    (DeepSpeedZeroOptimizer_Stage3, "load_hp_checkpoint_state_from_checkpoint_dir_stage3", _with_frames(_all_written)),
    (DeepSpeedZeroOptimizer_Stage3, "load_module_checkpoint_state_from_checkpoint_dir_stage3", _with_frames(_all_written)),
    (DeepSpeedEngine, "load_module_state_dict", _with_frames(_all_written)),                    # frozen parameters, shard by shard
    (DeepSpeedZeroOptimizer_Stage3, "set_full_hp_param", _with_frames(_master_written)),
    (DeepSpeedZeroOptimizer_Stage3, "set_local_hp_param", _with_frames(_master_written)),
    (DeepSpeedZeroOptimizer_Stage3, "offload_states", _with_frames(_offloaded)),
    (DeepSpeedZeroOptimizer_Stage3, "reload_states", _with_frames(_moved)),
    (Init, "_partition_param", _partitioned),
    (PartitionedParameterCoordinator, "reset_step", _forward_began),
)


def knows(optimizer) -> bool:
    """Whether the optimizer writes shards in the functions above only: it overrides none of them, or it has no step at all."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return all(getattr(type(optimizer), name) is getattr(cls, name) for cls, name, _ in WRITERS if cls is DeepSpeedZeroOptimizer_Stage3)
    return isinstance(optimizer, DeepSpeedZeRoOffload)


def install() -> None:
    """Patches the writers, once per process. Without frames the patches do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    for cls, name, then in WRITERS:
        setattr(cls, name, after(inspect.getattr_static(cls, name), then))
