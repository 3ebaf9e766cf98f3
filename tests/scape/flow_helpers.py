"""A small problem for SCAPE without a host framework: flat buffers with padding, gradients with every awkward feature."""
import torch

from ds_scape.config import ScapeParams
from ds_scape.optimizer.flow import Flow
from ds_scape.optimizer.passage import Passage, host_zeros
from ds_scape.optimizer.state import FlatState, sync_steps
from ds_scape.sync.partition import TensorSlot, flat_layout
from ds_scape.sync.transport import Transport
from tests.helpers.bits import assert_same_bits
from tests.scape.simulation import Simulation

#: Per buffer: shapes of its tensors. The gap behind every tensor is alignment padding.
SHAPES = [[(37, 11), (11,), (0, 4), (5, 50), (1, 3)], [(64,), (7,)], [(90, 4)]]
GAP = 3


def slots_of(shapes):
    slots, offset = [], 0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        slots.append(TensorSlot(offset, numel, len(shape)))
        offset += numel + GAP
    return slots, offset


class Problem:
    """Buffers, groups and gradients; equal on all ranks, from seeds."""

    def __init__(self, world_size, *, dtype=torch.float32, densities=(0.1, 0.1, 0.03), seed=0, shapes=SHAPES, piece=100, elsewhere=False,
                 **params):
        self.piece = piece                  # elements that an offloaded residual moves at a time
        self.elsewhere = elsewhere          # they move, on a CPU, through one that does not count as the weights' device
        self.world_size, self.dtype, self.seed = world_size, dtype, seed
        self.wire = torch.float64 if dtype == torch.float64 else {"bf16": torch.bfloat16, "fp32": torch.float32}[
            params.get("values_dtype", "bf16")]
        self.params = ScapeParams(density=min(densities), **params)
        self.slots, self.buffers, self.groups = [], [], []
        for i, (tensors, density) in enumerate(zip(shapes, densities, strict=True)):
            slots, numel = slots_of(tensors)
            buffer = torch.zeros(-(-numel // (2 * world_size)) * 2 * world_size, dtype=dtype)
            for slot in slots:
                buffer[slot.offset:slot.offset + slot.numel] = self.random(slot.numel, 1000 + i, slot.offset) * 0.02
            self.slots.append(slots)
            self.buffers.append(buffer)
            self.groups.append({"lr": 0.01 * (i + 1), "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": (0.1, 0.0, 0.3)[i],
                                "density": density, "max_age": self.params.age_limit(density)})

    def random(self, numel, *seed):
        number = self.seed
        for part in seed:
            number = number * 1009 + part
        return torch.randn(numel, generator=torch.Generator("cpu").manual_seed(number), dtype=torch.float64,
                           device="cpu").to(torch.get_default_device(), self.dtype)

    def gradient(self, worker, step):
        """Zero in padding; a third of the coordinates rarely used, some used on one worker alone, many equal values (ties)."""
        result = []
        for i, (slots, buffer) in enumerate(zip(self.slots, self.buffers, strict=True)):
            g = torch.zeros_like(buffer)
            for slot in slots:
                x = self.random(slot.numel, 7 + i, slot.offset, worker, step) * 1e-3 + self.random(slot.numel, 5, slot.offset) * 5e-4
                position = torch.arange(slot.numel)
                x[(position % 3 == 0) & (step % 9 != 1)] = 0
                x[(position % 7 == 0) & (worker != self.world_size - 1)] = 0
                x[position % 5 == 0] = 2e-3
                g[slot.offset:slot.offset + slot.numel] = x
            result.append(g)
        return result

    def lr(self, step):
        return [group["lr"] * (1 if step < 20 else 0.5) for group in self.groups]

    def state_dtype(self):
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def flow(self, comm=None, rank=0) -> Flow:
        flats, device = [], self.buffers[0].device
        through = torch.device("cpu:0") if self.elsewhere and device.type == "cpu" else device
        passage = Passage(through, self.piece, self.params.offload.buffers) if self.params.offload.residual == "cpu" else None
        for slots, buffer, group in zip(self.slots, self.buffers, self.groups, strict=True):
            layout = flat_layout(slots, buffer.numel(), self.world_size, group["density"])
            part = buffer.to(self.state_dtype()).split(layout.partition_numel)[rank].clone()
            residual = torch.zeros(buffer.numel(), dtype=part.dtype)
            residual = host_zeros(len(residual), part.dtype, buffer.device) if passage else residual
            flats.append(FlatState(layout, buffer.clone(), residual, part, torch.zeros_like(part), torch.zeros_like(part),
                                   sync_steps(part, self.params, group["density"], passage), dict(group), self.params, passage))
        flow = Flow(flats, self.params, Transport(comm, None, rank, self.world_size))
        flow._wire = self.wire
        return flow

    def simulation(self) -> Simulation:
        return Simulation(self.buffers, self.slots, [dict(g) for g in self.groups], self.world_size, state_dtype=self.state_dtype(),
                          wire=self.wire, warmup=self.params.dense_warmup_steps, catch_up=self.params.catch_up,
                          statistic=self.params.mask_statistic)


def same(got: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """By bits, wherever they are: states may be on the host."""
    assert_same_bits(got.to(expected.device), expected, where)


def mask_of(positions: torch.Tensor | None, numel: int) -> torch.Tensor:
    """bool [numel]; None: all."""
    mask = torch.ones(numel, dtype=torch.bool) if positions is None else torch.zeros(numel, dtype=torch.bool)
    if positions is not None:
        mask[positions] = True
    return mask


def compare(flow: Flow, simulation: Simulation, where: str) -> None:
    """Every tensor of this rank against the simulated worker's, by bits."""
    rank = flow.transport.rank
    for f, flat in enumerate(flow.flats):
        owner = simulation.owners[f][rank]
        same(flat.copies, simulation.copies[rank][f], f"{where} copies of buffer {f}")
        same(flat.weight, owner.w, f"{where} master weights of buffer {f}")
        same(flat.momentum, owner.m, f"{where} momentum of buffer {f}")
        same(flat.residual, simulation.residual[rank][f], f"{where} residual of buffer {f}")
        if not flat.layout.is_full:
            same(flat.square, owner.q, f"{where} square of buffer {f}")
        assert torch.equal(flat.ages(flow.num_steps).to(owner.age), owner.age), f"{where} ages of buffer {f}"
        assert torch.equal(flat.own(flat.copies, rank), flat.weight.to(flat.copies)), f"{where}: copies are not the masters'"
        if not flow.is_dense(flow.num_steps + 1):
            mask = torch.cat([mask_of(own[f], flat.layout.partition_numel) for own in flow._peek_positions().of])
            assert torch.equal(mask, simulation.mask[f]), f"{where} next mask of buffer {f}"


def run(problem: Problem, steps: int, comm=None, rank=0, **step_kwargs):
    """Flow and simulation side by side, compared after every step; residuals pass ahead if they may. Returns both."""
    flow, simulation = problem.flow(comm, rank), problem.simulation()
    for step in range(1, steps + 1):
        gradients = [problem.gradient(worker, step) for worker in range(problem.world_size)]
        for flat, group, lr in zip(flow.flats, simulation.groups, problem.lr(step), strict=True):
            flat.group["lr"] = group["lr"] = lr
        expected = simulation.step([[g.clone() for g in own] for own in gradients], **step_kwargs)
        for i, slot in ((i, slot) for i, slots in enumerate(problem.slots) for slot in slots if flow._ahead):
            flow.gradient_is_complete(gradients[rank], i, slot.offset, slot.offset + slot.numel, step_kwargs.get("loss_scale", 1.0))
        result = flow.step(gradients[rank], may_overwrite=True, **step_kwargs)
        assert (result.applied, result.grad_norm) == expected, f"step {step}: {result}, expected {expected}"
        compare(flow, simulation, f"step {step}:")
    return flow, simulation
