"""Calls known to go native: found by a look, forgotten when the switch's costs change or are due, hidden while calls are in flight."""
import gc

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.backend import front
from ds_zipccl.collectives import group_state
from ds_zipccl.collectives.cost import Costs, Curve
from ds_zipccl.collectives.native_calls import MAX_KNOWN, NativeCalls, key_of, list_signature, signature
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.switch import Measured
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.stats import Stats

AG, AR, SUM, MAX = "all_gather_into_tensor", "all_reduce", dist.ReduceOp.SUM, dist.ReduceOp.MAX


class Group:
    """Stands for a process group: equal to itself only."""
    group_name = "stand-in"

    def size(self):
        return 2

    def rank(self):
        return 1


GROUP = Group()


def call(numel=64, dtype=torch.bfloat16, group=GROUP, data=None, op=AG, **fields) -> Call:
    data = torch.empty(numel, dtype=dtype) if data is None else data
    return Call(op, torch.empty(2 * data.numel(), dtype=dtype), data, group, **fields)


def costs() -> Costs:
    return Costs(Curve((1, 2), (1.0, 2.0)), Curve((1, 2), (5.0, 9.0)), 1.41)


def knowing(*calls, reason="min_bytes", measured=None, reprobe_calls=0) -> NativeCalls:
    known = NativeCalls(Stats(), reprobe_calls)
    for each in calls:
        known.remember(each, reason, 128, measured)
        known.show(each.group)
    return known


def look(known: NativeCalls, call: Call):
    return known.find(call.op, call.input, call.group)


def test_found_by_everything_that_decides():
    known = knowing(call())
    for _ in range(2):
        look(known, call()).add()
    row = known._stats.snapshot()[AG]
    assert (row["native_reasons"], row["calls_native"], row["raw_bytes"]) == ({"min_bytes": 2}, 2, 256)
    others = call(65), call(dtype=torch.float16), call(group=Group()), call(op=AR), call(data=torch.empty(
        64, dtype=torch.bfloat16, device="meta"))
    assert [look(known, other) is None for other in others[:4]] == [True] * 4 and look(known, others[4]) is not None       # no GPU either
    assert look(known, call(data=torch.empty(8, 8, dtype=torch.bfloat16)))          # ranks may shape theirs differently
    assert known.find(AG, [torch.empty(64)], GROUP) is None and known.find(AG, torch.empty(64), None) is None


def test_what_does_not_last_is_not_remembered():
    for reason in ("graph_capture", "layout", "incompressible", "max_workspace_bytes", "shape"):
        assert look(knowing(call(), reason=reason), call()) is None
    lists = Call("all_gather", (torch.empty(4),) * 2, torch.empty(4), GROUP)
    uneven = Call("all_to_all_single", torch.empty(4), torch.empty(4), GROUP, input_splits=(1, 3), output_splits=(2, 2))
    assert signature(lists) is None and signature(uneven) is None and key_of(uneven) is None
    known = knowing(uneven, reason="dtype")
    assert known.find_any(uneven) is None and look(known, uneven) is None


def test_lists_are_found_by_the_sizes_of_all_their_tensors():
    def lists(out, data, op="all_gather"):
        tensors = [tuple(torch.empty(n, dtype=torch.bfloat16) for n in side) for side in (out, data)]
        return Call(op, *(side if len(side) > 1 else side[0] for side in tensors), GROUP)

    keys = {list_signature(call) for call in (
        lists([8, 8], [8]), lists([8, 9], [8]), lists([8, 8], [9]), lists([8], [8, 8]), lists([8, 8], [8], "other"),
        lists([8, 8], [8, 8], "all_to_all"), lists([8, 8], [7, 8], "all_to_all"))}
    assert len(keys) == 7 and None not in keys
    assert list_signature(lists([8, 8], [8])) in keys
    assert list_signature(lists([8, 8, 8], [8])) is None and list_signature(lists([8], [8])) is None
    known = knowing(lists([8, 8], [8]))
    assert known.find_any(lists([8, 8], [8])) and known.find_any(lists([8, 9], [8])) is None


def test_reductions_that_cannot_be_zipped_are_counted_as_such():
    """One look finds them by the sums of their size, which go native too; alone they say nothing of sums."""
    measured = Measured(costs())
    known = knowing(call(op=AR, reduce_op=SUM), reason="native_is_faster", measured=measured)
    for reduce_op in (dist.ReduceOp(SUM), dist.ReduceOp(MAX), dist.ReduceOp.AVG, None):          # torch's backends see such objects
        look(known, call(op=AR, reduce_op=reduce_op)).add(reduce_op)
    assert known._stats.snapshot()[AR]["native_reasons"] == {"native_is_faster": 3, "reduce_op": 1} and measured.num_calls == 3
    known = knowing(call(op=AR, reduce_op=MAX), reason="reduce_op")
    assert look(known, call(op=AR)) is None and known.find_any(call(op=AR, reduce_op=SUM)) is None
    assert known.find_any(call(op=AR, reduce_op=MAX))
    known = knowing(call(op=AR, reduce_op=MAX, dtype=torch.float32), reason="dtype")
    look(known, call(op=AR, dtype=torch.float32)).add(MAX)
    assert known._stats.snapshot()[AR]["native_reasons"] == {"dtype": 1}


def test_a_root_sends():
    known = knowing(call(op="broadcast", root=0))
    for root in (0, 1, 1):
        look(known, call(op="broadcast")).add(root=root)
    assert known._stats.snapshot()["broadcast"]["raw_bytes"] == 2 * 128           # this is rank 1


def test_the_switch_counts_these_calls_and_decides_anew_when_it_is_due():
    measured = Measured(costs(), num_calls=1)
    known = knowing(call(), call(7), reason="native_is_faster", measured=measured, reprobe_calls=4)
    look(known, call()).add()
    assert look(known, call(7)) and measured.num_calls == 2
    look(known, call()).add()
    assert look(known, call()) is None and look(known, call(7)) is None and measured.num_calls == 3         # the fourth call measures
    known.remember(call(), "native_is_faster", 128, measured)
    assert look(known, call()) is None
    assert measured.due(4) and measured.num_calls == 4
    known.remember(call(), "native_is_faster", 128, measured)
    assert look(known, call())
    measured.costs = costs()                                               # measured by a call of another size
    assert look(known, call()) is None


def test_other_calls_that_the_switch_counts_make_it_due_too():
    measured = Measured(costs())
    known = knowing(call(), reason="native_is_faster", measured=measured, reprobe_calls=3)
    assert not measured.due(3) and look(known, call()) and not measured.due(3) and look(known, call()) is None


def test_bounded_and_forgotten():
    known = knowing(*(call(data=torch.empty(1, dtype=torch.bfloat16).expand(numel + 1)) for numel in range(MAX_KNOWN + 5)))
    assert len(known.shown[id(GROUP)]) == 5 and look(known, call(MAX_KNOWN + 2))
    known.forget(Group())
    assert look(known, call(MAX_KNOWN + 2))
    known.forget(GROUP)
    assert not known.shown and known.find_any(call(MAX_KNOWN + 2)) is None


def test_goes_with_its_group():
    group = Group()
    known = knowing(call(group=group))
    assert look(known, call(group=group))
    del group
    gc.collect()
    assert not known.shown and not known._tables


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr(group_state, "SideChannel", lambda *_: None)
    live = Runtime(ZipcclConfig(enabled=True, min_bytes=1 << 20), {"cpu": "cpu"})
    live.state(GROUP, torch.device("cpu"))
    return live


def test_a_front_launches_before_it_counts(runtime):
    seen = []

    def native(_):
        seen.append(runtime.stats.snapshot().get(AG, {}).get("calls_native", 0))
        return "work"

    assert [front.run(runtime, call(), native) for _ in range(3)] == ["work"] * 3
    assert seen == [1, 1, 2] and runtime.stats.snapshot()[AG]["native_reasons"] == {"min_bytes": 3}         # the first is decided
    assert front.run(runtime, call()) is None and runtime.stats.snapshot()[AG]["calls_native"] == 4

    def fails(_):
        raise ValueError
    with pytest.raises(ValueError):
        front.run(runtime, call(), fails)
    assert runtime.stats.snapshot()[AG]["calls_native"] == 4


def test_a_call_that_torch_refused_says_nothing_of_right_ones(runtime):
    """Only this rank may have made it wrong, in its output's device, size or dtype; the right one must meet the other ranks'."""
    data, decided = torch.empty(1 << 20, dtype=torch.bfloat16), []
    run = runtime.decide
    runtime.decide = lambda call, why_not: (decided.append(why_not()), run(call, why_not))[1]

    def refuses(_):
        raise RuntimeError

    for output in (data.new_empty(2 << 20, device="meta"), data.new_empty(2 << 20, dtype=torch.float16), data.new_empty(7)):
        with pytest.raises(RuntimeError):
            front.run(runtime, Call(AG, output, data, GROUP), refuses)
        assert look(runtime.native_calls, Call(AG, output, data, GROUP)) is None
    assert decided == ["device", "shape", "shape"]


def test_nothing_goes_past_calls_in_flight(runtime):
    """They are asked for before a native call is launched, whatever is known of it."""
    state, settled = runtime.state(GROUP, torch.device("cpu")), []
    front.run(runtime, call())
    assert look(runtime.native_calls, call())

    class Pending:
        settled, abandoned, finished, two_phases = False, False, False, False

        def await_words(self):
            pass

        def has_words(self):
            return False

        def settle(self):
            self.settled = True
            settled.append(self)

    pending = Pending()
    state.add(pending)
    assert look(runtime.native_calls, call()) is None
    assert front.run(runtime, call(), lambda _: len(settled)) == 1                 # on a CPU it is settled first
    assert look(runtime.native_calls, call()) is None                              # in flight still
    pending.finished = True
    state.settle()
    assert front.run(runtime, call()) is None and look(runtime.native_calls, call())
    state.in_flight.clear()


def test_splits_and_lists_are_no_calls_of_one_tensor(runtime):
    """Of a size that is known: with splits the pieces decide, with lists all sizes."""
    alike = call(op="all_to_all_single")
    runtime.native_calls.remember(alike, "native_is_faster", 128, Measured(costs()))
    runtime.native_calls.show(GROUP)
    asked = []
    runtime.decide = lambda call, _: asked.append(call)
    front.run(runtime, alike, lambda _: None)
    assert not asked
    for fields in ({"input_splits": (60, 4)}, {"output_splits": (60, 4)}):
        front.run(runtime, call(op="all_to_all_single", **fields), lambda _: None)
    lists = Call("reduce_scatter", torch.empty(64), (torch.empty(64),) * 2, GROUP)
    front.run(runtime, lists, lambda _: None)
    assert len(asked) == 3
    runtime.native_calls.remember(lists, "dtype", 128, None)
    assert front.run(runtime, lists, lambda _: "work") == "work" and len(asked) == 3
    front.run(runtime, Call("reduce_scatter", torch.empty(64), (torch.empty(64), torch.empty(65)), GROUP), lambda _: None)
    assert len(asked) == 4
