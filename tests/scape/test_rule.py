"""The rule as built follows the rule as measured."""
import pytest
import torch

from tests.scape.prototype_rule import Prototype
from tests.scape.simulation import Simulation


@pytest.mark.parametrize("density", [1.0, 0.1, 0.01])
def test_simulation_follows_the_measured_rule(density):
    """test_flow.py ties ds_scape to the simulation by bits; this ties the simulation to the evidence: fp64, no max_age, as it was run."""
    world_size, n, lr = 4, 2000, 1e-3
    random = torch.Generator().manual_seed(0)
    w0 = torch.randn(n, generator=random, dtype=torch.float64) * .02
    mu = torch.randn(n, generator=random, dtype=torch.float64) * 1e-3 * torch.rand(n, generator=random, dtype=torch.float64) ** 3
    prototype = Prototype(w0, world_size, density)
    group = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "density": density, "max_age": 10 ** 6}
    simulation = Simulation([w0], [[(0, n, 2)]], [group], world_size, state_dtype=torch.float64, wire=torch.float64)
    for step in range(20 if density == 1 else 120):
        scale = torch.rand(n, generator=random, dtype=torch.float64)
        g = [mu + 2e-3 * scale * torch.randn(n, generator=random, dtype=torch.float64) for _ in range(world_size)]
        prototype.step([x.clone() for x in g], lr)
        simulation.step([[x] for x in g])
        if step == 0 or density == 1:
            # After a dense step all residuals and scores are 0: the measured rule then sent nothing, exact counts take the lowest indices.
            prototype.mask = simulation.mask[0].clone()
        else:
            assert torch.equal(prototype.mask, simulation.mask[0]), step
        assert float((prototype.copy[1] - simulation.copies[1][0]).abs().max()) < 1e-12, step
