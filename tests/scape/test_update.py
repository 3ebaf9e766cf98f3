"""The arithmetic: AdamS, the owner's step, the ranking scores and the residual, each against its formula written another way."""
import math

import pytest
import torch

from ds_scape.update import adams, residual, scape_rule, tables
from tests.helpers.bits import assert_same_bits

B1, B2, EPS = 0.9, 0.95, 1e-6


def random(n, seed=0, dtype=torch.float32, scale=1e-2):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul_(scale).to(dtype)


@pytest.mark.parametrize("correction, expected", [(0, 0.44721), (1, 4.4721)])
def test_first_step_is_as_long_as_the_formula_and_the_code_of_the_authors_say(correction, expected):
    """C115: 0.447 lr without bias correction, 4.472 lr with it."""
    w, m = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    adams.dense_step(w, m, torch.tensor([1e-3, -2.0, 50.0], dtype=torch.float64), lr=0.1, betas=(B1, B2), eps=0.0, weight_decay=0.0,
                     bias_correction_step=correction)
    assert torch.allclose(w, torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64) * expected * 0.1, rtol=1e-4)


def test_dense_step_follows_the_formula():
    w, m = random(50, 1, torch.float64), random(50, 2, torch.float64)
    expected_w, expected_m = w.tolist(), m.tolist()
    for step in range(1, 6):
        g = random(50, 10 + step, torch.float64)
        adams.dense_step(w, m, g, lr=0.01, betas=(B1, B2), eps=EPS, weight_decay=0.1, bias_correction_step=step)
        for i, x in enumerate(g.tolist()):
            c = 1 - B1 ** step
            d = math.sqrt(B2 * (expected_m[i] / c) ** 2 + (1 - B2) * x * x) + EPS
            expected_m[i] = B1 * expected_m[i] + (1 - B1) * x
            expected_w[i] = (1 - 0.01 * 0.1) * expected_w[i] - 0.01 * expected_m[i] / c / d
    assert max(abs(a - b) for a, b in zip(w.tolist(), expected_w, strict=True)) < 1e-15


@pytest.mark.parametrize("betas, bound", [((0.9, 0.95), 1.026), ((0.9, 0.999), 3.29)])
def test_update_never_exceeds_the_bound_and_reaches_it(betas, bound):
    assert adams.update_bound(betas) == pytest.approx(bound, rel=2e-3)
    m = random(20000, 3, torch.float64, 1.0)
    g = m * torch.linspace(-300, 300, 20000, dtype=torch.float64)
    w = torch.zeros_like(m)
    adams.dense_step(w, m, g, lr=1.0, betas=betas, eps=0.0, weight_decay=0.0)
    assert 0.99 * adams.update_bound(betas) < float(w.abs().max()) <= adams.update_bound(betas) * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("catch_up", [True, False])
def test_owner_step_at_age_one_is_adams_bit_for_bit(dtype, catch_up):
    w, m, g = (random(1000, seed, dtype) for seed in range(3))
    w2, m2 = w.clone(), m.clone()
    adams.dense_step(w, m, g, lr=0.01, betas=(B1, B2), eps=EPS, weight_decay=0.1)
    decay = tables.advance_decay(tables.initial_decay(8), adams.decay_factor(0.01, 0.1)).to(dtype)
    scape_rule.owner_step(w2, m2, g, torch.ones(1000, dtype=torch.int32), tables.age_tables(8, B1, dtype=dtype, device="cpu"), decay,
                          lr=0.01, beta2=B2, eps=EPS, catch_up=catch_up)
    assert_same_bits(w, w2, "weights")
    assert_same_bits(m, m2, "momentum")


@pytest.mark.parametrize("age", [1, 2, 7, 40, 41, 1000])
def test_catch_up_is_the_displacement_of_that_many_dense_steps(age):
    """With a frozen normaliser: the sum over ``a`` steps of the momentum, each gradient being the mean; older ages count as max_age."""
    max_age = 40
    m0, u = random(64, 1, torch.float64), random(64, 2, torch.float64) * age
    counted = min(age, max_age)
    gradient, m, moved = u / counted, m0.clone(), torch.zeros(64, dtype=torch.float64)
    for _ in range(counted):
        m = B1 * m + (1 - B1) * gradient
        moved += m
    divisor = (B2 * m0 ** 2 + (1 - B2) * u ** 2 / counted).sqrt() + EPS
    w, m_after = torch.zeros(64, dtype=torch.float64), m0.clone()
    age_tables = tables.age_tables(max_age, B1, dtype=torch.float64, device="cpu")
    scape_rule.owner_step(w, m_after, u, torch.full((64,), age), age_tables, None, lr=0.5, beta2=B2, eps=EPS)
    assert torch.allclose(w, -0.5 * moved / divisor, rtol=1e-12, atol=0)
    assert torch.allclose(m_after, m, rtol=1e-11, atol=1e-18)


def test_one_synchronisation_never_exceeds_the_stated_bound():
    age_tables = tables.age_tables(40, B1, dtype=torch.float64, device="cpu")
    bound = scape_rule.step_bound(age_tables, B2)
    assert 4.4 * math.sqrt(40) * 0.5 < bound < 4.5 * math.sqrt(40)
    worst = 0.0
    for age in (1, 5, 40, 10000):
        m = random(5000, age, torch.float64, 1.0)
        w = torch.zeros_like(m)
        u = m * torch.linspace(-3000, 3000, 5000, dtype=torch.float64)
        scape_rule.owner_step(w, m, u, torch.full((5000,), age), age_tables, None, lr=1.0, beta2=B2, eps=0.0)
        worst = max(worst, float(w.abs().max()))
    assert 0.95 * bound < worst <= bound * (1 + 1e-12)


def test_decay_of_an_age_is_the_product_of_that_many_factors():
    factors = [1 - 0.01 * (i + 1) for i in range(9)]
    products = tables.initial_decay(5)
    for factor in factors:
        products = tables.advance_decay(products, factor)
    assert products[0] == 1
    for age in range(1, 6):
        assert float(products[age]) == pytest.approx(math.prod(factors[-age:]), rel=1e-14)


def test_no_operation_of_a_long_unused_coordinate_makes_nan():
    zero = torch.zeros(4)
    w, m = torch.ones(4), zero.clone()
    age_tables = tables.age_tables(40, B1, dtype=torch.float32, device="cpu")
    scape_rule.owner_step(w, m, zero.clone(), torch.tensor([1, 2, 40, 99]), age_tables, None, lr=0.1, beta2=B2, eps=EPS)
    assert w.tolist() == [1.0] * 4 and m.tolist() == [0.0] * 4
    assert scape_rule.score_residual(zero, zero).tolist() == [0.0] * 4


def test_scores_are_by_magnitude():
    """C112: negative values count like positive ones."""
    r, q = torch.tensor([-3.0, 2.0, -1.0]), torch.tensor([1.0, 1.0, 0.0])
    assert scape_rule.score_residual(r, q).tolist() == pytest.approx([3.0, 2.0, 1e9], rel=1e-6)
    assert scape_rule.score_first_moment(torch.tensor([-1.0, 1.0, 0.0]), r, beta1=0.9).tolist() == pytest.approx([1.2, 1.1, 0.1])


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize("everything", [True, False])
def test_sent_and_kept_add_up_to_what_came_in(wire, gradient_dtype, factor, everything):
    n, scales = 4096, torch.logspace(-44, 38, 4096)
    before = random(n, 1, scale=1.0) * scales
    gradient = (random(n, 2, scale=1.0) * scales.flip(0)).to(gradient_dtype)
    came = before + (gradient.float() * torch.tensor(factor) if factor != 1 else gradient.float())
    assert torch.isfinite(came).all()
    kept = before.clone()
    residual.accumulate(kept, gradient.clone(), factor)
    assert_same_bits(kept, came, "accumulated")
    index = None if everything else torch.randperm(n, generator=torch.Generator().manual_seed(3))[:n // 10].sort().values
    sent = residual.take(kept, index, residual.WIRE_DTYPES[wire])
    assert sent.dtype == residual.WIRE_DTYPES[wire]
    total = kept.clone()
    if everything:
        total += sent.float()
    else:
        total[index] += sent.float()
        untouched = torch.ones(n, dtype=torch.bool)
        untouched[index] = False
        assert_same_bits(kept[untouched], came[untouched], "not sent")
        assert_same_bits(sent, came[index].to(sent.dtype), "sent")
    assert torch.equal(total, came)          # -0.0 and 0.0 are equal sums
    if wire == "fp32" and everything:
        assert not kept.any()


def test_square_is_tracked_in_the_states_precision():
    q, g = random(64, 1).abs(), random(64, 2).bfloat16()
    expected = q * B2 + g.float() * g.float() * torch.tensor(1 - B2)
    scape_rule.track_square(q, g, beta2=B2)
    assert torch.allclose(q, expected, rtol=1e-6)
