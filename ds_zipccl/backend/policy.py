"""Is a call eligible for compression, and if not, why: a pure function of what every rank of the group sees alike."""
import torch
import torch.distributed as dist

from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.collectives.pairs import reason_for_raw
from ds_zipccl.collectives.parts import can_fit
from ds_zipccl.collectives.registry import Call, CollectiveSpec
from ds_zipccl.collectives.views import averages, is_dense
from ds_zipccl.config import ZipcclConfig

WORTHWHILE = frozenset({torch.bfloat16})        # FP16 and FP32 would gain 14-18 % at best: raw
REASONS = {
    "not_in_group": "this rank is not in the group",
    "world_size_1": "nobody to send to",
    "zips_itself": "the group is of torch's backend zipccl, which compresses and counts by itself",
    "never": "the configuration says never",
    "dtype": "only BF16 pays",
    "device": "no kernels for this device",
    "reduce_op": "only SUM and AVG",
    "layout": "not contiguous, and the backend refuses that (NCCL), or sparse",
    "shape": "sizes do not fit together: the native call reports it",
    "min_bytes": "smaller than min_bytes",
    "no_gain": "what goes to one peer is so small that its frame would be larger",
    "max_workspace_bytes": "the frames would be larger than max_workspace_bytes",
    "graph_capture": "captured in a CUDA graph",
    "native_is_faster": "a probe found native faster",
    "step_trial": "this step is a native one of a trial (step_trials.py)",
    "steps_are_not_faster": "a trial found whole training steps not faster by zipped calls",
    "deterministic_reduce": "adaptive may not choose a reduction's arithmetic by timing",
    "incompressible": "recent data did not compress",
    "not_zipped": "this collective has no zipped form",
}


def reason_for_native(config: ZipcclConfig, spec: CollectiveSpec, call: Call) -> str | None:
    """None if the call may be zipped, else a key of REASONS.

    Only shapes, dtypes and settings decide: all ranks of a group come to the same answer, without talking.
    """
    world_size = call.world_size
    if world_size == 1:
        return "world_size_1"
    if getattr(config.collectives, spec.family) == "never":
        return "never"
    if not call.inputs or not call.outputs:
        return "shape"
    if call.dtype not in WORTHWHILE or call.dtype not in BY_TORCH:
        return "dtype"
    tensors = (*call.inputs, *call.outputs)
    if call.device.type not in ("cpu", "cuda") or any(t.device != call.device for t in tensors):
        return "device"
    if any(t.layout != torch.strided for t in tensors):
        return "layout"
    if not spec.shapes_match(call):
        return "shape"
    if call.reduce_op is not None and call.reduce_op != dist.ReduceOp.SUM and not averages(call):
        return "reduce_op"
    if not all(map(is_dense, tensors)) and not _copies_do(call):
        return "layout"
    if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "graph_capture"
    if spec.pairwise:
        return None
    reason = reason_for_raw(spec.row_numel(call), call.dtype, spec.whole_numel(call), config)
    return None if reason == "max_workspace_bytes" and can_fit(spec, call, config) else reason


def _copies_do(call: Call) -> bool:
    """Gloo takes tensors of any strides, so copies stand in for them; NCCL refuses them. Elements that share memory cannot be written."""
    writable = (stride or size < 2 for t in call.outputs for stride, size in zip(t.stride(), t.shape, strict=True))
    return call.device.type == "cpu" and all(writable)
