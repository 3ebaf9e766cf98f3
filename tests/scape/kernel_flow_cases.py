"""Steps with the CUDA kernels, on a CPU emulated, against the simulation: what they need beside their arguments is in lent memory, what
they keep for the next step is used."""
import ctypes
import os
from unittest import mock

import torch
import torch.distributed as dist

from ds_scape.kernels import impl_cuda, ops
from ds_scape.optimizer import ranking, workspace
from tests.helpers.processes import DEVICE
from tests.scape.flow_helpers import Problem, compare
from tests.scape.test_passage import UnrulyStreams

#: Where test_flow.py has them compiled.
LIBRARY = "SCAPE_EMULATED"
SHAPES = [[(100, 60)] * 9 + [(333,)], [(64,), (7,)], [(90, 61)] * 4 + [(10, 10)]]


def case_cuda_kernels(rank, world_size):
    """On the device; under offload ahead, with own residuals that are ranked as they pass, and where there is no room for that."""
    kernels = impl_cuda.load() if DEVICE == "cuda" else impl_cuda.CudaKernels(ctypes.CDLL(os.environ[LIBRARY]), "emulated", emulated=3)
    ops.register("cuda as tested", kernels, (DEVICE,))
    for offload, density, as_they_pass in ((False, 0.03, None), ({"ahead": True}, 0.03, None), (True, 0.03, True), (True, 0.2, False)):
        problem = Problem(world_size, dtype=torch.bfloat16, offload=offload, shapes=SHAPES, piece=5000, densities=(density,) * 3)
        flow, simulation, found = problem.flow(dist, rank), problem.simulation(), []
        flow.kernels = flow.codec._kernels = ops.Kernels({DEVICE: "cuda as tested"}, "cuda as tested")
        if offload and DEVICE == "cpu":
            flow.flats[0].passage._streams = UnrulyStreams(rank)
        with mock.patch.object(ranking, "SEGMENT_BYTES", 64), mock.patch.object(
                ranking, "as_they_pass", side_effect=lambda *given, of=ranking.as_they_pass, no=found.append: of(*given) or no(1)) as asked:
            for step in range(1, 4):
                gradients = [problem.gradient(worker, step) for worker in range(world_size)]
                simulation.step([[g.clone() for g in own] for own in gradients])
                fresh = workspace.joined(gradients[rank], torch.bfloat16)[1]
                torch._foreach_copy_(fresh, gradients[rank])
                flow.prefetch()
                for i, slot in ((i, slot) for i, slots in enumerate(problem.slots) for slot in slots):
                    flow.gradient_is_complete(fresh, i, slot.offset, slot.offset + slot.numel)
                flow.step(fresh, may_overwrite=True)
                compare(flow, simulation, f"offload {offload}, density {density}, step {step}:")
        assert asked.called == (as_they_pass is not None) and len(found) == (2 if as_they_pass is False else 0)
        assert flow.uses_gradients == isinstance(offload, dict)
        assert offload or all("keys" in flat.hints for flat in flow.flats if not flat.layout.is_full)
