"""The switch's cost model: curves, crossover, ratio, hysteresis."""
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ds_zipccl.collectives import group_state, runtime, switch
from ds_zipccl.collectives.cost import NATIVE, ONE_SIDED, ZIPPED, Costs, Curve, fastest
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


def is_zipped(c: Costs, num_bytes: int, ratio: float) -> bool:
    return fastest(c.gains(num_bytes, ratio)) == ZIPPED


def test_curve_goes_through_its_points():
    curve = Curve((100, 200, 400), (10.0, 30.0, 40.0))
    assert [curve.at(size) for size in (100, 150, 200, 300, 400)] == [10, 20, 30, 35, 40]
    assert curve.us_per_byte(150) == pytest.approx(0.2) and curve.us_per_byte(1000) == pytest.approx(0.05)


def test_curve_outside_of_its_points():
    """No line through two noisy points: below the smallest size as long as that one takes, above the largest as fast as that one."""
    curve = Curve((100, 200, 400), (10.0, 30.0, 40.0))
    assert curve.at(0) == curve.at(99) == 10 and curve.at(800) == 80
    noisy = Curve((100, 200), (10.0, 8.0))
    assert noisy.at(1000) == 40 and noisy.us_per_byte(1000) == 0           # a larger message that is faster is noise


def test_nothing_is_gained_where_nothing_was_measured():
    """C94: a steep or flat stretch between probes says nothing of what lies beyond."""
    flat, steep = Curve(SIZES, (900.0, 890.0, 880.0)), Curve(SIZES, (100.0, 110.0, 200.0))
    beyond = Costs(steep, flat, 1.41)
    assert not any(is_zipped(beyond, size, 1.41) for size in (16 * MIB, 256 * MIB, 1 << 32))
    below = Costs(Curve(SIZES, (100.0, 110.0, 200.0)), Curve(SIZES, (120.0, 300.0, 900.0)), 1.41)
    assert not any(is_zipped(below, size, 1.41) for size in (0, 1000, MIB // 2, MIB))


def test_crossover():
    """Native 20 us + 10 GB/s, zipped 100 us + 13 GB/s: equal at 80 us / (1/10 - 1/13 us a KB) = 3.47 MB."""
    c = costs(20, 10, 100, 13)
    even = 80 / (1 / 10e3 - 1 / 13e3)
    assert c.gain(round(even), 1.41) == pytest.approx(1, abs=1e-3)
    assert not is_zipped(c, round(even), 1.41) and is_zipped(c, round(2 * even), 1.41)
    assert c.zipped_from() == 4 * MIB


def test_ratio_moves_the_links_part_only():
    c = costs(20, 10, 100, 13)
    size = 64 * MIB
    zipped = c.zipped.at(size) + size / 10e3 * (1 / 1.2 - 1 / 1.41)
    assert c.gain(size, 1.2) == pytest.approx(c.native.at(size) / zipped)
    assert c.gain(size, 1.48) > c.gain(size, 1.41) > c.gain(size, 1.2) > c.gain(size, 1.0)
    assert is_zipped(c, size, 1.41) and not is_zipped(c, size, 1.05)


def test_what_cannot_be_zipped_is_native():
    c = Costs(Curve(SIZES, (1.0, 2.0, 3.0)), Curve(SIZES, (math.inf,) * 3), 1.41)
    assert c.gain(MIB, 1.41) == 0 and c.zipped_from() is None
    mixed = Costs(Curve(SIZES, (100.0, 400.0, 1600.0)), Curve(SIZES, (math.inf, 300.0, 1200.0)), 1.41)
    assert not is_zipped(mixed, MIB, 1.41) and not is_zipped(mixed, 2 * MIB, 1.41) and is_zipped(mixed, 16 * MIB, 1.41)


@pytest.mark.parametrize("size, way", [(MIB, NATIVE), (4 * MIB, ZIPPED), (16 * MIB, ONE_SIDED), (1 << 32, ONE_SIDED)])
def test_each_of_three_ways_where_it_is_fastest(size, way):
    c = replace(three_ways(), ratio=1.41)
    assert fastest(c.gains(size, 1.41)) == Measured(c).way(size, 1.41) == way
    assert (c.zipped_from(), c.first(ZIPPED), c.first(ONE_SIDED)) == (4 * MIB, 4 * MIB, 16 * MIB)
    assert c.without_one_sided().first(ONE_SIDED) is None and c.without_one_sided().zipped_from() == 4 * MIB


def three_ways() -> Costs:
    return Costs(Curve(SIZES, (100.0, 400.0, 1600.0)), Curve(SIZES, (200.0, 300.0, 1200.0)), 1.41, Curve(SIZES, (500.0, 550.0, 700.0)))


@pytest.mark.parametrize("present, gains, way", [
    (NATIVE, (1.02, 1.02), NATIVE), (NATIVE, (1.04, 1.0), ZIPPED), (NATIVE, (1.04, 1.05), ZIPPED), (NATIVE, (1.04, 1.10), ONE_SIDED),
    (NATIVE, (1.02, 1.04), ONE_SIDED), (ZIPPED, (1.01, 1.0), ZIPPED), (ZIPPED, (0.99, 1.0), NATIVE), (ZIPPED, (1.01, 1.03), ZIPPED),
    (ZIPPED, (1.01, 1.05), ONE_SIDED), (ZIPPED, (0.99, 1.02), NATIVE), (ONE_SIDED, (1.30, 1.28), ONE_SIDED),
    (ONE_SIDED, (1.35, 1.28), ZIPPED), (ONE_SIDED, (0.0, 0.0), NATIVE)])
def test_a_change_of_way_must_gain(present, gains, way):
    assert fastest(dict(zip((NATIVE, ZIPPED, ONE_SIDED), (1.0, *gains), strict=True)), present) == way


@pytest.mark.parametrize("present, gains, way", [
    (NATIVE, (0.5, 0.51), ZIPPED), (NATIVE, (0.5, 0.6), ONE_SIDED), (ONE_SIDED, (0.51, 0.5), ONE_SIDED), (ZIPPED, (0.0, 0.2), ONE_SIDED)])
def test_where_native_is_no_choice(present, gains, way):
    assert fastest(dict(zip((NATIVE, ZIPPED, ONE_SIDED), (1.0, *gains), strict=True)), present, natively=False) == way


@pytest.mark.parametrize("single, burst, way", [
    ((100, 90, 200), (100, 90, 200), ZIPPED), ((100, 200, 90), (100, 200, 90), ONE_SIDED),
    ((100, 90, 80), (100, 103, 120), NATIVE), ((100, 103, 120), (100, 90, 80), NATIVE),                # wins in one of both alone
    ((100, 90, 80), (100, 98, 96), ONE_SIDED), ((100, 90, 80), (100, 90, 98), ZIPPED),
    ((408, 406, 500), (358, 307, 400), ZIPPED), ((223, 300, 220), (168, 190, 145), ONE_SIDED),         # wins in one, loses in neither
    ((100, 100.1, 120), (100, 50, 120), NATIVE), ((100, 99, 110), (100, 96, 90), NATIVE),              # in the mean it must gain 3 %
    ((100, 50, 110), (100, 110, 50), NATIVE),                                                          # each in another
    ((1000, 900, 800), (100, 90, 80), ONE_SIDED)])                                                     # each against its own native
def test_what_wins_must_not_lose_alone_nor_amid_others(single, burst, way):
    """C94: at no size is a way taken that was slower than native in either. (What the sweep itself shows on GPUs: benchmarks/results.)"""
    def made_up(times) -> Costs:
        native, zipped, one_sided = (Curve(SIZES, (t, t, t)) for t in times)
        return Costs(native, zipped, 1.41, one_sided)

    c = replace(made_up(single), burst=made_up(burst))
    assert Measured(c).way(4 * MIB, 1.41) == way
    gains = c.gains(4 * MIB, 1.41)
    for i, w in enumerate((ZIPPED, ONE_SIDED), 1):
        both = single[0] / single[i], burst[0] / burst[i]
        assert gains[w] == pytest.approx(math.sqrt(math.prod(both)) if min(both) >= 1 else min(both))
    without = c.without_one_sided()
    assert without.burst.one_sided is None and without.gains(4 * MIB, 1.41)[ONE_SIDED] == 0
    assert c.as_dict()["bytes"] == list(SIZES) and c.as_dict()["one_sided"] == [single[2]] * 3 and c.as_dict()["zipped_burst"] == [
        burst[1]] * 3


def test_bytes_of_another_collective_do_not_count_as_ours():
    """What two ranks own unevenly, against an all_reduce, which sends everything twice: frames that are 4 % larger than those that were
    measured cost 4 % of their own time, not of the all_reduce's."""
    c = Costs(Curve(SIZES, (400.0, 1500.0, 6000.0)), Curve(SIZES, (160.0, 600.0, 2400.0)), 1.41)
    assert c.gain(16 * MIB, 1.41 / 1.04, 16 * MIB) == pytest.approx(6000 / (2400 * 1.04), rel=0.01)
    assert c.gain(16 * MIB, 1.41 / 1.04, 8 * MIB) == pytest.approx(c.native.at(8 * MIB) / (2400 * 1.04), rel=0.01)


def test_new_costs_change_the_way():
    measured = Measured(three_ways())
    assert measured.way(16 * MIB, 1.41) == ONE_SIDED
    measured.costs = three_ways().without_one_sided()
    assert measured.way(16 * MIB, 1.41) == ZIPPED
    measured.costs = replace(three_ways(), one_sided=Curve(SIZES, (90.0, 350.0, 1100.0)))
    assert [measured.way(size, 1.41) for size in (MIB, 4 * MIB, 16 * MIB)] == [ONE_SIDED, ZIPPED, ONE_SIDED]


def test_no_flapping_at_the_border():
    measured = Measured(costs(20, 10, 100, 13))
    gain = measured.costs.gain
    border = next(size for size in range(3 * MIB, 8 * MIB, 4096) if gain(size, 1.41) > 1.005)
    assert gain(border, 1.41) < 1.03
    assert measured.way(border, 1.41) == NATIVE                 # not worth the change
    assert measured.way(border, 1.48) == ZIPPED
    assert measured.way(border, 1.41) == ZIPPED                 # nor the change back
    assert measured.way(border, 1.3) == NATIVE


def test_when_costs_are_due():
    measured = Measured()
    assert measured.due(3) and measured.due(3)
    measured.costs = costs(20, 10, 100, 13)
    assert [measured.due(3) for _ in range(7)] == [True, False, False, True, False, False, True]
    assert not any(measured.due(0) for _ in range(10))


@pytest.mark.parametrize("reprobe_calls, native", [(10, 6), (1000, 196)])
def test_data_that_changes_changes_the_decision(monkeypatch, reprobe_calls, native):
    """To the worse at the next call, since its ratio is known; to the better when costs are due, or at the second tenth of that in which
    nothing was zipped: until then nobody sees it."""
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
    config = ZipcclConfig(enabled=True, reprobe_calls=reprobe_calls)

    def zipped() -> bool:
        return switch.choose(spec, call, None, state, config) == ZIPPED

    def room():
        return state.capacity(spec.name, data.dtype, data.numel(), 0.0)

    answers = [zipped() for _ in range(3)]
    room().launched()
    room().observe(4500, True)                  # of 32,768 raw bytes of a tile: an overflow, and much room from now on
    answers += [zipped() for _ in range(native + 2)]
    assert answers == [True] * 3 + [False] * native + [True] * 2


def test_what_is_zipped_again_is_decided_as_by_a_rank_that_has_forgotten_it(monkeypatch):
    """Sizes, data and costs that change, two forms of one size, more sizes than are kept: what both know stays the same too."""
    monkeypatch.setattr(switch, "MAX_SIZES", 3)
    pace, spec, config = random.Random(5), specs()["all_gather_into_tensor"], ZipcclConfig(enabled=True, reprobe_calls=7)

    def measure(measured, spec, *_, **__):
        due = measured.due(config.reprobe_calls)
        if due:
            measured.costs = costs(10, 20, pace_of_costs.choice((10, 60, 120)), 24)
        return due

    monkeypatch.setattr(switch, "measure_if_due", measure)
    ranks, answers = [], [[], []]
    for _ in range(2):
        known = {}
        ranks.append(SimpleNamespace(capacities={}, known=known, choices={}, forget_rooms=lambda *_: None,
                                     measured=lambda op, dtype, known=known: known.setdefault((op, dtype), Measured())))
    num_held = 0
    for turn in range(3000):
        numel, spill = pace.choice((1, 2, 3, 8)) * MIB // 4, pace.choice((256, 256, 256, 1024, 4096))
        call = Call(spec.name, torch.empty(2 * numel, dtype=torch.bfloat16, device="meta"), torch.empty(
            numel, dtype=torch.bfloat16, device="meta"), SimpleNamespace(rank=lambda: 0, size=lambda: 2))
        for rank, state in enumerate(ranks):
            pace_of_costs = random.Random(turn)
            state.capacities.setdefault((call.op, call.dtype, numel), SimpleNamespace()).spill_per_tile = spill
            state.likely_spill = lambda *_, spill=spill: spill
            choice = state.choices.get(numel)
            if rank == 0 and choice is not None and choice.holds(config.reprobe_calls):
                num_held, way = num_held + 1, ZIPPED
            else:
                way = switch.choose(spec, call, None, state, config)
                state.choices[numel] = switch.zipped_again(spec, call, state) if way == ZIPPED else None
            answers[rank].append(way)
        a, b = (state.known[call.op, call.dtype] for state in ranks)
        assert answers[0][-1] == answers[1][-1] and (a.ways, a.num_calls, a.costs) == (b.ways, b.num_calls, b.costs), turn
    assert num_held > 100 and 0 < answers[0].count(NATIVE) < 3000


def test_an_all_to_all_that_is_zipped_again_is_counted_and_measured_as_ever():
    spec, measured = specs()["all_to_all_single"], Measured(costs(10, 20, 10, 40))
    data = torch.empty(1 << 22, dtype=torch.bfloat16)
    state = SimpleNamespace(measured=lambda op, dtype: measured, capacities={})
    call = Call(spec.name, data, data, SimpleNamespace(rank=lambda: 0, size=lambda: 2))
    choice, held = switch.zipped_again(spec, call, state), 0
    while choice.holds(5):
        held += 1
    assert held == measured.num_calls == 4              # the fifth measures
    measured.num_calls += 1
    assert choice.holds(5) and choice.holds(0)
    measured.costs = costs(10, 20, 10, 40)
    assert not choice.holds(0) and measured.num_calls == 7
    measured.costs = replace(measured.costs, one_sided=measured.costs.zipped)
    assert switch.zipped_again(spec, call, state) is None


def test_an_all_to_all_that_went_one_sided_goes_so_again_while_its_costs_hold():
    spec, measured, config = specs()["all_to_all_single"], Measured(three_ways()), ZipcclConfig(enabled=True, split_lists="all_or_none")
    data = torch.empty(8 * MIB, dtype=torch.bfloat16, device="meta")
    state = SimpleNamespace(measured=lambda op, dtype: measured, capacities={})
    call = Call(spec.name, data, data, SimpleNamespace(rank=lambda: 0, size=lambda: 2))
    router = SimpleNamespace(reason_against=lambda spec, call: None, keep_what_wins=lambda state: None)
    assert switch.choose_for_pairs(spec, call, None, state, config, router) == ONE_SIDED
    choice = switch.zipped_again(spec, call, state, ONE_SIDED)
    assert choice.way == ONE_SIDED and all(choice.holds(config.reprobe_calls) for _ in range(5)) and measured.num_calls == 6
    measured.costs = replace(three_ways(), one_sided=three_ways().native)
    assert not choice.holds(config.reprobe_calls)
    assert switch.choose_for_pairs(spec, call, None, state, config, router) == ZIPPED


def test_ratio_of_frames():
    assert frame_ratio(torch.bfloat16, 1 << 22) == pytest.approx(1.4124, abs=1e-3)
    assert frame_ratio(torch.bfloat16, 1 << 22, 2048) < 1.37
