"""Is a call eligible for compression, and if not, why: a pure function of what every rank of the group sees alike."""
import torch
import torch.distributed as dist

from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.codec.format import layout
from ds_zipccl.collectives.registry import Call, CollectiveSpec
from ds_zipccl.config import ZipcclConfig

WORTHWHILE = frozenset({torch.bfloat16})        # FP16 and FP32 would gain 14-18 % at best: raw
REASONS = {
    "not_in_group": "this rank is not in the group",
    "world_size_1": "nobody to send to",
    "never": "the configuration says never",
    "dtype": "only BF16 pays",
    "device": "no kernels for this device",
    "reduce_op": "only SUM",
    "layout": "input or output is not contiguous",
    "shape": "sizes do not fit together: the native call reports it",
    "min_bytes": "smaller than min_bytes",
    "no_gain": "what goes to one peer is so small that its frame would be larger",
    "max_workspace_bytes": "the frames would be larger than max_workspace_bytes",
    "graph_capture": "captured in a CUDA graph",
    "native_is_faster": "a probe found native faster",
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
    data, output = call.input, call.output
    if data.dtype not in WORTHWHILE or data.dtype not in BY_TORCH:
        return "dtype"
    if data.device.type not in ("cpu", "cuda") or output.device != data.device:
        return "device"
    if not spec.shapes_match(call):
        return "shape"
    if call.reduce_op is not None and call.reduce_op != dist.ReduceOp.SUM:
        return "reduce_op"
    if not (data.is_contiguous() and output.is_contiguous()) or data.layout != torch.strided:
        return "layout"
    whole_numel = spec.whole_numel(call)
    whole_bytes = whole_numel * data.element_size()
    if whole_bytes < max(config.min_bytes, 1):
        return "min_bytes"
    row_numel = whole_numel // world_size
    if layout(BY_TORCH[data.dtype], row_numel).frame_bytes >= row_numel * data.element_size():
        return "no_gain"
    if 2 * whole_bytes > config.max_workspace_bytes:        # two sets of frames, each no larger than the tensor
        return "max_workspace_bytes"
    if data.is_cuda and torch.cuda.is_current_stream_capturing():
        return "graph_capture"
    return None
