"""What a collective is to the rest of the library. One file per collective registers one spec; tests and benchmarks
loop over them."""
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Call:
    """One call of a collective, as the user made it. ``group`` is never None here; tensors are detached."""
    op: str
    output: torch.Tensor
    input: torch.Tensor
    group: dist.ProcessGroup
    reduce_op: object = None

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()


@dataclass(frozen=True)
class CollectiveSpec:
    """A collective that can be zipped.

    ``family``: its key in the configuration's ``collectives``. ``reduces``: whether arithmetic is done.
    ``row_numel(call)``: elements that go to one peer, the size of one frame; ``whole_numel(call)``: elements of the
    whole tensor (gather output, scatter input). ``shapes_match(call)``: whether output and input fit together.
    ``native(call)``: the torch collective, asynchronous, returns a Work. ``zipped(call, launch, codec)``: encodes and
    queues the payload; returns its Work and the function that fills the output. ``resend(call, launch)``: the same
    result over the side channel without frames. ``uncompressed(call)``: the same result on the call's own group without
    frames, where that differs from native. ``bus_factor(world)``: busbw = algbw x factor, as in nccl-tests.
    ``make_tensors(rank, world, row_numel, dtype, device)``: (output, input) whose result is exact in any order of
    summation. ``first_spill``: room in the sub-pools before anything is known of the data, as a share of the raw bytes.
    """
    name: str
    family: str
    reduces: bool
    row_numel: Callable[[Call], int]
    whole_numel: Callable[[Call], int]
    shapes_match: Callable[[Call], bool]
    native: Callable[[Call], dist.Work]
    zipped: Callable
    resend: Callable
    bus_factor: Callable[[int], float]
    make_tensors: Callable
    uncompressed: Callable[[Call], None] | None = None
    first_spill: float = 0.0


_SPECS: dict[str, CollectiveSpec] = {}


def register(spec: CollectiveSpec) -> CollectiveSpec:
    _SPECS[spec.name] = spec
    return spec


def specs() -> dict[str, CollectiveSpec]:
    """All registered collectives by name."""
    return dict(_SPECS)
