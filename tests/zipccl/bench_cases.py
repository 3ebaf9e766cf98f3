"""Cases run on every rank by test_cli_bench_collectives.py."""
import torch

from ds_zipccl.cli.bench_collectives import count_wrong, make_call
from ds_zipccl.collectives.registry import specs


def case_count_wrong(rank, world):
    for spec in specs().values():
        call = make_call(spec, 1 << 16, torch.bfloat16, torch.device("cpu"), False)

        def right(call=call, spec=spec):
            spec.native(call).wait()

        def flipped(call=call, right=right):
            right()
            call.outputs[-1].view(-1).view(torch.int16)[7] ^= 1

        assert count_wrong(spec, call, right) == 0, spec.name
        assert count_wrong(spec, call, flipped) == 1, spec.name
        if not any(o.data_ptr() == i.data_ptr() for o in call.outputs for i in call.inputs):
            assert count_wrong(spec, call, lambda: None) > 1000, f"{spec.name}: an output that is never written was not seen"
