"""What a collective is to the rest of the library. One file per collective registers its specs; tests and benchmarks
loop over them."""
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Tensors = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(slots=True, eq=False)           # not frozen: that takes 2 us a call
class Call:
    """One call of a collective, as the user made it. ``group`` is never None here; tensors are detached.

    ``output`` and ``input`` are tensors, or tuples of one tensor per rank where torch's form takes a list; in place: the same tensor.
    ``input_splits``, ``output_splits``: elements per rank of an uneven all_to_all_single, None: equal. ``root``: rank in the group that
    a broadcast starts from.
    """
    op: str
    output: Tensors
    input: Tensors
    group: dist.ProcessGroup
    reduce_op: object = None
    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    root: int | None = None

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.input if isinstance(self.input, tuple) else (self.input,)

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.output if isinstance(self.output, tuple) else (self.output,)

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device


@dataclass(frozen=True)
class CollectiveSpec:
    """A collective that can be zipped.

    ``family``: its key in the configuration's ``collectives``. ``reduces``: whether arithmetic is done.
    ``row_numel(call)``: elements in one frame (all_to_all: in the largest); ``whole_numel(call)``: elements of the whole tensor
    (gather output, scatter input). ``shapes_match(call)``: whether output and input fit together.
    ``raw_bytes(call)``: what this rank sends natively; ``wire_bytes(call)``: what it sends zipped, status words included, while the call's
    classes are new and nothing overflows.
    ``native(call)``: the torch collective, asynchronous, returns a Work.
    ``flight(call, launch, *codecs)``: what such calls need, made ready (``launch.Flight``), for frames of ``row_numel`` elements; a codec
    for each of the capacity ``classes`` (names; none: one, the collective's).
    ``start(spec, call, launch, kind)``: in place of these, where not all frames are alike: see ``launch.start``.
    ``uncompressed(call)``: the same result on the call's own group without frames, where that differs from native.
    ``pairwise``: what goes from one rank to another is those two ranks' affair alone (sizes, status, capacity, resend).
    ``bus_factor(world)``: busbw = algbw x factor, as in nccl-tests.
    ``make_tensors(rank, world, row_numel, dtype, device)``: new (output, input) whose result is exact in any order of summation, equal
    ones at every call; about ``row_numel`` elements go to one peer. ``rooted``: a call has a root. ``first_spill``: room in the
    sub-pools before anything is known of the data, as a share of the raw bytes.
    ``cut(call, part)``: smaller calls with the same result together, ``part`` elements of each row in each; None: cannot be cut.
    ``internal``: no torch collective, but what a seam uses in place of another one, which is what ``native`` runs; where it goes native the
    seam calls that, and its bytes are counted there. ``native_numel(call)``: elements of the whole tensor natively, if others.
    """
    name: str
    family: str
    reduces: bool
    row_numel: Callable[[Call], int]
    whole_numel: Callable[[Call], int]
    shapes_match: Callable[[Call], bool]
    raw_bytes: Callable[[Call], int]
    native: Callable[[Call], dist.Work]
    bus_factor: Callable[[int], float]
    make_tensors: Callable[..., tuple[Tensors, Tensors]]
    wire_bytes: Callable[[Call], int]
    flight: Callable | None = None
    classes: tuple[str, ...] = ()
    start: Callable | None = None
    uncompressed: Callable[[Call], None] | None = None
    pairwise: bool = False
    rooted: bool = False
    first_spill: float = 0.0
    cut: Callable[[Call, int], "list[Call]"] | None = None
    internal: bool = False
    native_numel: Callable[[Call], int] | None = None

    def make_call(self, group: dist.ProcessGroup, row_numel: int, dtype: torch.dtype, device) -> Call:
        """A call with new tensors of ``make_tensors``; the root is the last rank."""
        output, data = self.make_tensors(group.rank(), group.size(), row_numel, dtype, device)
        return Call(self.name, output, data, group, root=group.size() - 1 if self.rooted else None)


_SPECS: dict[str, CollectiveSpec] = {}


def register(spec: CollectiveSpec) -> CollectiveSpec:
    _SPECS[spec.name] = spec
    return spec


def specs(internal: bool = False) -> dict[str, CollectiveSpec]:
    """All registered collectives by name; ``internal``: also those that no host framework calls."""
    return {name: spec for name, spec in _SPECS.items() if internal or not spec.internal}
