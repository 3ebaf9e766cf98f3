"""The switch's cost model: curves, crossover, ratio, hysteresis."""
import math
from types import SimpleNamespace

import pytest
import torch

from ds_zipccl.collectives import group_state, runtime, switch
from ds_zipccl.collectives.cost import Costs, Curve
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.switch import Measured, frame_ratio
from ds_zipccl.config import ZipcclConfig

assert runtime                          # importing it registers the collectives

MIB = 1 << 20
SIZES = (MIB, 4 * MIB, 16 * MIB)


def costs(native_latency, native_gbs, zipped_latency, zipped_gbs, ratio=1.41) -> Costs:
    def line(latency_us, gbs):
        return Curve(SIZES, tuple(latency_us + size / gbs / 1e3 for size in SIZES))
    return Costs(line(native_latency, native_gbs), line(zipped_latency, zipped_gbs), ratio)


def test_curve_goes_through_its_points_and_on():
    curve = Curve((100, 200, 400), (10.0, 30.0, 40.0))
    assert [curve.at(size) for size in (100, 150, 200, 300, 400, 800)] == [10, 20, 30, 35, 40, 60]
    assert curve.at(0) == 0                                     # never negative: 10 - 20
    assert curve.us_per_byte(150) == pytest.approx(0.2) and curve.us_per_byte(1000) == pytest.approx(0.05)
    assert Curve((100, 200), (10.0, 8.0)).at(1000) == 10        # a larger message that is faster is noise


def test_crossover():
    """Native 20 us + 10 GB/s, zipped 100 us + 13 GB/s: equal at 80 us / (1/10 - 1/13 us a KB) = 3.47 MB."""
    c = costs(20, 10, 100, 13)
    even = 80 / (1 / 10e3 - 1 / 13e3)
    assert c.gain(round(even), 1.41) == pytest.approx(1, abs=1e-3)
    assert not c.zipped_is_faster(round(even), 1.41) and c.zipped_is_faster(round(2 * even), 1.41)
    assert c.zipped_from() == 4 * MIB


def test_ratio_moves_the_links_part_only():
    c = costs(20, 10, 100, 13)
    size = 64 * MIB
    zipped = c.zipped.at(size) + size / 10e3 * (1 / 1.2 - 1 / 1.41)
    assert c.gain(size, 1.2) == pytest.approx(c.native.at(size) / zipped)
    assert c.gain(size, 1.48) > c.gain(size, 1.41) > c.gain(size, 1.2) > c.gain(size, 1.0)
    assert c.zipped_is_faster(size, 1.41) and not c.zipped_is_faster(size, 1.05)


def test_what_cannot_be_zipped_is_native():
    c = Costs(Curve(SIZES, (1.0, 2.0, 3.0)), Curve(SIZES, (math.inf,) * 3), 1.41)
    assert c.gain(MIB, 1.41) == 0 and c.zipped_from() is None
    mixed = Costs(Curve(SIZES, (100.0, 400.0, 1600.0)), Curve(SIZES, (math.inf, 300.0, 1200.0)), 1.41)
    assert not mixed.zipped_is_faster(MIB, 1.41)


def test_no_flapping_at_the_border():
    measured = Measured(costs(20, 10, 100, 13))
    gain = measured.costs.gain
    border = next(size for size in range(3 * MIB, 8 * MIB, 4096) if gain(size, 1.41) > 1.005)
    assert gain(border, 1.41) < 1.03
    assert not measured.choose(border, 1.41)                    # not worth the change
    assert measured.choose(border, 1.48)
    assert measured.choose(border, 1.41)                        # nor the change back
    assert not measured.choose(border, 1.3)


def test_when_costs_are_due():
    measured = Measured()
    assert measured.due(3) and measured.due(3)
    measured.costs = costs(20, 10, 100, 13)
    assert [measured.due(3) for _ in range(7)] == [True, False, False, True, False, False, True]
    assert not any(measured.due(0) for _ in range(10))


def test_data_that_changes_changes_the_decision(monkeypatch):
    """To the worse at the next call, since its ratio is known; to the better when costs are due: until then nobody sees it."""
    monkeypatch.setattr(group_state, "SideChannel", lambda group, device: SimpleNamespace(abort=lambda: None))
    monkeypatch.setattr(switch, "measure", lambda *args: costs(20, 10, 20, 10.6))
    spec = specs()["all_gather_into_tensor"]
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    data = torch.empty(1 << 22, dtype=torch.bfloat16)
    call = Call(spec.name, torch.empty(2 << 22, dtype=torch.bfloat16), data, group)

    class Group:
        group_name = "g"

    owner = Group()
    state = group_state.GroupState(owner, data.device)
    config = ZipcclConfig(enabled=True, reprobe_calls=10)

    def zipped() -> bool:
        return switch.choose(spec, call, None, state, config)

    def room():
        return state.capacity(spec.name, data.dtype, data.numel(), 0.0)

    answers = [zipped() for _ in range(3)]
    room().observe(4500, True)                  # of 32,768 raw bytes of a tile: an overflow, and much room from now on
    answers += [zipped() for _ in range(8)]
    assert answers == [True] * 3 + [False] * 6 + [True] * 2


def test_ratio_of_frames():
    assert frame_ratio(torch.bfloat16, 1 << 22) == pytest.approx(1.4124, abs=1e-3)
    assert frame_ratio(torch.bfloat16, 1 << 22, 2048) < 1.37
