"""Cases run on every rank by test_collectives.py: every collective at level 2, bit for bit, overflow and the switch included."""
import torch
import torch.distributed as dist

from ds_zipccl.collectives import switch
from ds_zipccl.collectives.registry import specs
from tests.helpers.bits import assert_same_bits, gaussian, random_bits, specials
from tests.zipccl.collective_helpers import AG, RS, carry_out, gathered, rank_order_sum, runtime

SIZE = 70000


def case_every_collective_at_level_2(rank, world):
    with runtime(level=2) as live:
        for op, spec in specs().items():
            call = spec.make_call(dist.group.WORLD, SIZE, torch.bfloat16, torch.get_default_device())
            inputs = [t.clone() for t in call.inputs]
            spec.native(call).wait()
            expected = [t.clone() for t in call.outputs]
            for t, saved in zip(call.inputs, inputs, strict=True):
                t.copy_(saved)
            carry_out(live, op, call.output, call.input, root=call.root)
            for i, (got, want) in enumerate(zip(call.outputs, expected, strict=True)):
                assert_same_bits(got, want, f"{op} {i}")
            assert live.stats.snapshot()[op]["calls_zipped"] == 1, op


def case_bits_ratio_and_overflow_at_level_2(rank, world):
    with runtime(level=2) as live:
        for turn, make in enumerate((gaussian, gaussian, specials, random_bits, gaussian)):
            data, out = make(SIZE, seed=turn + 10 * rank), torch.empty(world * SIZE, dtype=torch.bfloat16)
            carry_out(live, AG, out, data)
            assert_same_bits(out, gathered(data, world), f"gather {turn}")
            data, out = make(world * SIZE, seed=turn + 10 * rank), torch.empty(SIZE, dtype=torch.bfloat16)
            if carry_out(live, RS, out, data):
                assert_same_bits(out, rank_order_sum(data, rank, world), f"sum {turn}")
            if turn == 1:
                row = live.stats.snapshot()[AG]
                assert 1.45 < row["ratio"] < 1.49 and not row["overflows"], row
        assert live.stats.snapshot()[AG]["overflows"] > 0, "no call overflowed: the case tests nothing of that"


def case_the_switch_reckons_with_the_level(rank, world):
    with runtime(level=2, collectives="adaptive", deterministic_reduce=False) as live:
        data, out = gaussian(SIZE, seed=rank), torch.empty(world * SIZE, dtype=torch.bfloat16)
        carry_out(live, AG, out, data)
        assert_same_bits(out, gathered(data, world), "adaptive")
        costs = live.state(dist.group.WORLD, data.device).measured(AG, torch.bfloat16).costs
        assert costs.ratio == switch.frame_ratio(torch.bfloat16, switch.PROBE_SIZES[data.device.type][-1] // 2 // world, level=2) > 1.46
