"""The links of an engine's groups are measured when it is made: all its ranks are there, nothing is in flight, and no step waits for it.

What it will call follows from its configuration, alike on all ranks of a group. What else comes is measured at its first call: groups of
tensor, pipeline and sequence parallelism, hpZ's second partitions, collectives of the user's own. Source of the names:
deepspeed/runtime/engine.py (``DeepSpeedEngine``), deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, 0.19.8.
"""
import torch

from ds_zipccl.backend import zero3_writers, zero12
from ds_zipccl.backend.deepspeed_comm import live_runtime
from ds_zipccl.backend.deepspeed_native import resolve
from ds_zipccl.backend.policy import WORTHWHILE
from ds_zipccl.collectives.frame_ways import Ways

CACHED = "kept frames"                  # gathers of cache_params


def install(engine_class) -> None:
    """Patches chain. After ``zero3_params.install``, which says what has frames."""
    engine_class.__init__ = zero3_writers.after(engine_class.__init__, measure)


def measure(engine, *_args, **_kwargs) -> None:
    """All ranks at the same point. Models whose calls would all be below ``min_bytes`` have none to be measured."""
    runtime = live_runtime()
    if runtime is None or engine.device.type not in runtime.kernels:
        return
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters() if getattr(p, "allreduce", True))
    measured = False
    for op, dtype, group in calls_of(engine, runtime):
        group = resolve(group)
        if (group is not None and group.size() > 1 and dtype in WORTHWHILE and not getattr(group, "zips_itself", False)
                and numel * dtype.itemsize >= runtime.config.min_bytes):
            if op == CACHED:
                measured |= Ways(runtime, group, engine.device).measure(dtype)
            else:
                measured |= runtime.measure(op, dtype, group, engine.device)
    if measured and engine.device.type == "cuda":
        torch.cuda.empty_cache()                    # what test calls took is the model's now


def calls_of(engine, runtime) -> list[tuple]:
    """(collective or CACHED, dtype, group) of each kind that its steps make."""
    stage, zero, groups = engine.zero_optimization_stage(), engine.optimizer, [engine.seq_data_parallel_group]
    gradients = getattr(zero, "communication_data_type", engine.communication_data_type)
    weights = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else torch.float32
    if stage == 0:
        kinds = [("all_reduce", gradients)]
    elif stage == 3:                                # those that parameters are partitioned over, in the order of the model
        groups = list(dict.fromkeys(p.ds_process_group for p in engine.module.parameters() if hasattr(p, "ds_process_group")))
        frames = getattr(engine, zero3_writers.ATTRIBUTE, None)
        gather = CACHED if frames is not None and frames.groups else "all_gather_into_tensor"
        kinds = [("reduce_scatter_tensor", gradients), (gather, weights)]
    else:                                           # what does not go to its owners is all_reduced
        gradients = zero12.summed_dtype(zero, gradients)
        kinds = [("all_reduce", gradients), ("all_gather_into_tensor", weights)]
    calls = []
    for name in sorted(engine.expert_parallel_group) if engine.has_moe_layers else ():
        calls.append(("all_to_all_single", weights, engine.expert_parallel_group[name]))
        if stage < 3:
            groups.append(engine.expert_data_parallel_group[name])

    def to_owners(group) -> list[tuple]:
        names = zero12.kinds_of(zero, runtime, group, gradients, engine.pipeline_parallelism) if stage in (1, 2) else ()
        return [(name, gradients) for name in names]

    return [(*kind, group) for group in groups for kind in to_owners(group) + kinds] + calls
