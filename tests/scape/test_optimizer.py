"""SCAPE and ScapeAdamS as torch optimizers in one process, without DeepSpeed."""
import copy
import io

import pytest
import torch
from torch import nn

import ds_scape
from ds_scape.update.adams import dense_step
from tests.helpers.bits import assert_same_bits
from zipscape.errors import ConfigError


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 50)).to(dtype)


def backward(net, step):
    x = torch.randint(0, 50, (8, 5), generator=torch.Generator().manual_seed(step))
    net.zero_grad()
    loss = nn.functional.cross_entropy(net(x).float().flatten(0, 1), x.flatten())
    loss.backward()
    return loss.item()


def train(net, optimizer, steps):
    losses = []
    for step in steps:
        losses.append(backward(net, step))
        optimizer.step()
    return losses


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_density_one_is_scape_adams(dtype):
    """fp64 to 1e-12; fp32: the same bits; bf16: SCAPE keeps fp32 masters, ScapeAdamS is given fp32 masters by hand."""
    first, second = model(dtype), model(dtype)
    values = {"values_dtype": "fp32"}
    scape = ds_scape.SCAPE(first.parameters(), lr=0.01, density=1.0, **values)
    masters = [p.detach().to(torch.float64 if dtype == torch.float64 else torch.float32).clone() for p in second.parameters()]
    momenta = [torch.zeros_like(m) for m in masters]
    for step in range(20):
        backward(first, step)
        scape.step()
        backward(second, step)
        with torch.no_grad():
            for p, w, m in zip(second.parameters(), masters, momenta, strict=True):
                gradient = p.grad.to(torch.float32).to(w.dtype)             # the wire
                dense_step(w, m, gradient, lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
                p.copy_(w)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        if dtype == torch.float64:          # the wire's rounding stays in the residual, so it moves from step to step
            assert float((a - b).detach().abs().max()) < 1e-4
        else:
            assert_same_bits(a, b, str(dtype))


def test_scape_adams_resumes_bit_equal():
    net = model()
    optimizer = ds_scape.ScapeAdamS(net.parameters(), lr=0.01, bias_correction=True)
    train(net, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    assert file.tell() < 2.5 * sum(p.numel() * 4 for p in net.parameters()), "the zeros take room"
    file.seek(0)
    saved, other = torch.load(file, weights_only=True), model()
    other.load_state_dict(saved["net"])
    resumed = ds_scape.ScapeAdamS(other.parameters())
    resumed.load_state_dict(saved["optimizer"])
    assert set(next(iter(resumed.state.values()))) == {"step", "exp_avg"}
    train(net, optimizer, range(4, 9))
    train(other, resumed, range(4, 9))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())


def test_scape_adams_is_the_rule():
    net, reference = model(), model()
    optimizer = ds_scape.ScapeAdamS(net.parameters(), lr=0.01, bias_correction=True)
    momenta = [torch.zeros_like(p) for p in reference.parameters()]
    for step in range(5):
        backward(net, step)
        optimizer.step()
        backward(reference, step)
        with torch.no_grad():
            for p, m in zip(reference.parameters(), momenta, strict=True):
                dense_step(p, m, p.grad, lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, bias_correction_step=step + 1)
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_down(dtype):
    net = model(dtype)
    losses = train(net, ds_scape.SCAPE(net.parameters(), lr=0.003, density=0.1, dense_warmup_steps=5), range(120))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"dense_warmup_steps": 30}, {"values_dtype": "fp32", "density": 0.02}])
def test_resume_is_bit_equal(dtype, settings):
    """C101: state_dict through a file, into a fresh model and optimizer."""
    net = model(dtype)
    optimizer = ds_scape.SCAPE(net.parameters(), lr=0.01, **settings)
    train(net, optimizer, range(10))
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    train(net, optimizer, range(10, 60))
    other = model(dtype)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(saved["net"])
    resumed = ds_scape.SCAPE(other.parameters(), lr=0.5, **settings)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.01
    train(other, resumed, range(10, 60))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())
    for a, b in zip(optimizer.flow.flats, resumed.flow.flats, strict=True):
        assert_same_bits(a.residual, b.residual)
        assert a.last_sync.dtype == b.last_sync.dtype and torch.equal(a.last_sync, b.last_sync)


def test_groups_have_their_own_settings():
    net = model()
    optimizer = ds_scape.SCAPE([{"params": net[0].parameters(), "density": 1.0, "lr": 0.0},
                                {"params": net[1].parameters(), "sparsity": 0.5}, {"params": net[3].parameters()}], lr=0.01, density=0.1)
    assert [group["density"] for group in optimizer.param_groups] == [1.0, 0.5, 0.1]
    before = copy.deepcopy(net.state_dict())
    train(net, optimizer, range(3))
    assert torch.equal(net[0].weight, before["0.weight"])
    sent = [[s.num_sent for s in flat.layout.segments[0]] for flat in optimizer.flow.flats]
    assert sent == [[1200], [396], [33], [165], [50]]
    changed = net[1].weight.detach().clone()
    train(net, optimizer, range(3, 4))
    assert int((net[1].weight != changed).sum()) <= 396


def test_unused_and_frozen_parameters():
    net = model()
    net[3].bias.requires_grad_(False)
    extra = nn.Parameter(torch.ones(6, 6))
    optimizer = ds_scape.SCAPE([*net.parameters(), extra], lr=0.01, weight_decay=0.0)
    frozen = net[3].bias.detach().clone()
    train(net, optimizer, range(50))
    assert torch.equal(extra, torch.ones(6, 6)) and torch.equal(net[3].bias, frozen)


def test_a_step_without_gradients_does_nothing():
    """C106."""
    net = model()
    optimizer = ds_scape.SCAPE(net.parameters(), lr=0.01)
    optimizer.step()
    assert optimizer.last_result is None and not optimizer.state


def test_nonfinite_gradient_skips_the_step(caplog):
    net = model()
    optimizer = ds_scape.SCAPE(net.parameters(), lr=0.01)
    train(net, optimizer, range(3))
    before = copy.deepcopy(net.state_dict())
    backward(net, 3)
    net[1].weight.grad[0, 0] = float("inf")
    optimizer.step()
    assert not optimizer.last_result.applied and "not finite" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))


@pytest.mark.parametrize("settings, expected", [
    ({"densty": 0.1}, "densty: unknown field (known: lr, betas"),
    ({"density": 0.0}, "density = 0.0: input should be greater than 0"),
    ({"density": 1.5}, "density = 1.5"),
    ({"density": 0.1, "sparsity": 0.9}, "density and sparsity are the same setting"),
    ({"sparsity": 1.0}, "sparsity = 1.0: must be a number in [0, 1)"),
    ({"sparsity": "much"}, "sparsity = 'much'"),
    ({"max_age": 19}, "max_age = 19: must be at least 2 / density = 20"),
    ({"betas": [0.9, 1.0]}, "betas = (0.9, 1.0): each must be"),
    ({"betas": [0.9]}, "betas"),
    ({"lr": -1.0, "eps": 0.0}, "lr = -1.0"),
    ({"offload": "yes"}, "offload = 'yes'"),
    ({"offload": {"residual": "gpu"}}, "offload.residual = 'gpu'"),
    ({"offload": {"buffers": 1}}, "offload.buffers = 1: input should be greater than or equal to 2"),
    ({"offload": {"bufers": 2}}, "offload.bufers: unknown field (known: residual, buffers, pin_memory, ahead)"),
    ({"values_dtype": "fp16"}, "values_dtype = 'fp16'"),
    ({"dense_warmup_steps": -1}, "dense_warmup_steps = -1"),
    ({"density": "0.1"}, "density = '0.1': input should be a number"),
    ({"density": True}, "density = True: input should be a number"),
    ({"betas": [0.9, "0.95"]}, "betas = [0.9, '0.95']: input should be numbers"),
    ({"offload": {"buffers": "2"}}, "offload.buffers = '2': input should be a number"),
    ({"catch_up": "no"}, "catch_up = 'no': input should be a valid boolean"),
])
def test_wrong_settings_are_one_clear_error(settings, expected):
    with pytest.raises(ConfigError) as error:
        ds_scape.SCAPE(model().parameters(), **settings)
    assert expected in str(error.value), error.value


def test_wrong_group_settings_are_errors():
    net = model()
    with pytest.raises(ConfigError, match="density = 2"):
        ds_scape.SCAPE([{"params": net.parameters(), "density": 2}])
    with pytest.raises(ConfigError, match="max_age = 40"):
        ds_scape.SCAPE([{"params": net.parameters(), "density": 0.01}], max_age=40)
    with pytest.raises(ConfigError, match="unknown field"):
        ds_scape.ScapeAdamS(net.parameters(), density=0.1)
    optimizer = ds_scape.SCAPE(net[0].parameters())
    train(net, optimizer, range(1))
    with pytest.raises(ConfigError, match="after its first step"):
        optimizer.add_param_group({"params": net[1].parameters()})


@pytest.mark.parametrize("optimizer", [ds_scape.SCAPE, ds_scape.ScapeAdamS])
@pytest.mark.parametrize("keyword", ["foreach", "fused", "amsgrad", "maximize", "capturable", "momentum"])
def test_settings_of_other_optimizers_are_refused_by_name(optimizer, keyword):
    with pytest.raises(ConfigError, match=f"{keyword}: unknown field"):
        optimizer(model().parameters(), **{keyword: True})


@pytest.mark.parametrize("optimizer", [ds_scape.SCAPE, ds_scape.ScapeAdamS])
def test_complex_parameters_and_sparse_gradients_are_refused(optimizer):
    with pytest.raises(ConfigError, match="real floating-point parameters"):
        optimizer(iter([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]))
    whole = optimizer([nn.Parameter(torch.ones(4, 4))], lr=0.1)
    with pytest.raises(ConfigError, match="complex64"):
        whole.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=torch.complex64))]})
    assert len(whole.param_groups) == 1
    embedding = nn.Embedding(10, 4, sparse=True)
    before = embedding.weight.detach().clone()
    chosen = optimizer(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match="sparse gradients"):
        chosen.step()
    assert torch.equal(embedding.weight, before)


def test_freezing_after_the_first_step_is_an_error():
    """Otherwise its residual and decay would go on moving it, or state would be mistaken for another parameter's."""
    for later in (False, True):
        net = model()
        net[3].bias.requires_grad_(not later)
        optimizer = ds_scape.SCAPE(net.parameters(), lr=0.01)
        train(net, optimizer, range(2))
        net[3].bias.requires_grad_(later)
        with pytest.raises(ConfigError, match="frozen or unfrozen"):
            train(net, optimizer, range(2, 3))


@pytest.mark.parametrize("offload", [True, {"residual": "cpu", "buffers": 3, "pin_memory": False}])
def test_offloaded_residuals_resume_and_give_the_same_bits(offload):
    net, other = model(), model()
    first, second = ds_scape.SCAPE(net.parameters(), lr=0.01), ds_scape.SCAPE(other.parameters(), lr=0.01, offload=offload)
    assert train(net, first, range(6)) == train(other, second, range(6))
    third, resumed = model(), None
    third.load_state_dict(other.state_dict())
    resumed = ds_scape.SCAPE(third.parameters(), lr=0.01, offload=offload)
    resumed.load_state_dict(copy.deepcopy(second.state_dict()))
    assert train(net, first, range(6, 50)) == train(other, second, range(6, 50)) == train(third, resumed, range(6, 50))


def test_a_scheduler_that_moves_the_betas():
    """OneCycleLR: beta1 falls and rises with the learning rate; the tables by age follow."""
    net = model()
    optimizer = ds_scape.SCAPE(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=30)
    seen = set()
    for step in range(20):
        train(net, optimizer, range(step, step + 1))
        scheduler.step()
        seen.add(optimizer.flow.flats[0].group["betas"][0])
        assert float(optimizer.flow.flats[0].age_tables.momentum_kept[1]) == pytest.approx(optimizer.param_groups[0]["betas"][0])
    assert len(seen) > 10


def test_schedulers_act_on_every_group():
    net = model()
    optimizer = ds_scape.SCAPE([{"params": net[0].parameters(), "lr": 0.1}, {"params": net[1].parameters()}], lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(net, optimizer, range(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]
    assert [flat.group["lr"] for flat in optimizer.flow.flats] == [0.05, 0.005, 0.005]
