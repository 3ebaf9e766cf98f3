"""Calls known to go native: found again by all that decides, forgotten when the switch's costs change."""
import torch

from ds_zipccl.collectives.cost import Costs, Curve
from ds_zipccl.collectives.native_calls import MAX_KNOWN, NativeCalls, list_signature, signature
from ds_zipccl.collectives.registry import Call
from ds_zipccl.collectives.switch import Measured
from ds_zipccl.stats import Stats


class Group:
    """Stands for a process group: equal to itself only."""

    def size(self):
        return 2


GROUP = Group()


def call(numel=64, dtype=torch.bfloat16, group=GROUP, data=None, **fields) -> Call:
    data = torch.empty(numel, dtype=dtype) if data is None else data
    return Call("all_gather_into_tensor", torch.empty(2 * data.numel(), dtype=dtype), data, group, **fields)


def costs() -> Costs:
    return Costs(Curve((1, 2), (1.0, 2.0)), Curve((1, 2), (5.0, 9.0)), 1.41)


def test_found_by_everything_that_decides():
    stats = Stats()
    known = NativeCalls(stats)
    known.remember(signature(call()), "min_bytes", 128, None)
    for _ in range(2):
        found = known.find(signature(call()), 0)
        found.count.add(found.raw_bytes)
    row = stats.snapshot()[call().op]
    assert (row["native_reasons"], row["calls_native"], row["raw_bytes"]) == ({"min_bytes": 2}, 2, 256)
    others = (call(65), call(dtype=torch.float16), call(group=Group()), call(reduce_op="AVG"), call(root=1),
)
    assert all(known.find(signature(other), 0) is None for other in others)
    assert known.find(signature(call(data=torch.empty(8, 8, dtype=torch.bfloat16))), 0)          # ranks may shape theirs differently


def test_what_does_not_last_is_not_remembered():
    known = NativeCalls(Stats())
    for reason in ("graph_capture", "layout", "incompressible", "max_workspace_bytes"):
        known.remember(signature(call()), reason, 128, None)
    assert known.find(signature(call()), 0) is None
    lists = Call("all_gather", (torch.empty(4),) * 2, torch.empty(4), GROUP)
    uneven = Call("all_to_all_single", torch.empty(4), torch.empty(4), GROUP, input_splits=(1, 3), output_splits=(2, 2))
    assert signature(lists) is None and signature(uneven) is None
    known.remember(None, "dtype", 1, None)
    assert known.find(None, 0) is None


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


def test_the_switch_counts_these_calls_and_decides_anew_when_it_is_due():
    known, measured, key = NativeCalls(Stats()), Measured(costs(), num_calls=1), signature(call())
    known.remember(key, "native_is_faster", 128, measured)
    assert [known.find(key, 4) is not None for _ in range(2)] == [True, True] and measured.num_calls == 3
    assert known.find(key, 4) is None and measured.num_calls == 3          # the fourth call measures, and counts itself
    assert measured.due(4) and measured.num_calls == 4
    known.remember(key, "native_is_faster", 128, measured)
    measured.costs = costs()                                               # measured by a call of another size
    assert known.find(key, 4) is None


def test_bounded_and_forgotten():
    known = NativeCalls(Stats())
    for numel in range(MAX_KNOWN + 5):
        known.remember(("op", numel), "dtype", 1, None)
    assert len(known._known) == 5
    known.forget()
    assert known.find(("op", MAX_KNOWN + 1), 0) is None
