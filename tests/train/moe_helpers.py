"""Mixture-of-experts nets for moe_cases.py, and a run that returns every bit of it."""
import copy

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from ds_zipccl.backend import deepspeed_comm, deepspeed_hooks

A2A = "all_to_all_single"
DIM, TOKENS = 64, 64                    # of one sample
ZIPPED = {"enabled": True, "collectives": "always", "min_bytes": 1024, "transport": "process_group"}
#: Reductions of more than two ranks are native, so that every bit of a run can be compared.
EXCHANGE_ALONE = {**ZIPPED, "collectives": {"all_to_all": "always", "all_reduce": "never", "reduce_scatter": "never"}}


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))


class Net(nn.Module):
    """A layer, DeepSpeed's MoE, a layer. favourite: the gate sends every token of every rank to this expert."""

    def __init__(self, num_experts=4, ep_size=2, favourite=None, gate_share=0.01, **moe):
        super().__init__()
        self.gate_share = gate_share
        self.enter, self.leave = nn.Linear(DIM, DIM), nn.Linear(DIM, 8)
        self.moe = MoE(DIM, expert(), num_experts, ep_size, **moe)
        if favourite is not None:
            nn.init.zeros_(self.enter.weight[:, 0])
            with torch.no_grad():
                self.enter.bias[0], self.moe.deepspeed_moe.gate.wg.weight[favourite, 0] = 3.0, 100.0

    def forward(self, x, used_token=None, skip=False):
        hidden = torch.tanh(self.enter(x))
        if skip:                                                        # the layer and its gate are unused in this step
            return self.leave(hidden).float().pow(2).mean()
        hidden, gate_loss, _ = self.moe(hidden, used_token)
        return self.leave(hidden).float().pow(2).mean() + self.gate_share * gate_loss


def samples(step: int, count: int = 4) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * step + dist.get_rank())
    return torch.randn(count, TOKENS, DIM, generator=generator, device="cpu").bfloat16().to(torch.get_default_device())


def settings(stage: int, zipccl: dict | None) -> dict:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5, "bf16": {"enabled": True},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
              "zero_optimization": {"stage": stage, "reduce_bucket_size": 20000}, "steps_per_print": 10**9}
    return config if zipccl is None else {**config, "zipccl": zipccl}


def initialize(model: nn.Module, config: dict, **more):
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    return deepspeed.initialize(model=model, model_parameters=groups, config=copy.deepcopy(config), **more)[0]


def close(engine) -> dict:
    """The exchange's statistics; {} where nothing was on."""
    live = deepspeed_comm.live_runtime()
    row = live.stats.snapshot().get(A2A, {}) if live else {}
    engine.destroy()
    deepspeed_hooks.deactivate()
    return row


def train(make_model, stage: int, zipccl: dict | None, inputs=lambda step: (samples(step),), steps=3, mpu=None):
    """((losses and parameters after the last step, as hex), statistics of the exchange)."""
    torch.manual_seed(0)
    engine = initialize(make_model(), settings(stage, zipccl), mpu=mpu)
    bits = []
    for step in range(steps):
        loss = engine(*inputs(step))
        engine.backward(loss)
        engine.step()
        bits.append(loss.item().hex())
    bits += [p.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes().hex() for p in engine.module.parameters()]
    return bits, close(engine)


def compare(make_model, stage: int, zipccl: dict = ZIPPED, calls=None, **how) -> dict:
    """Zipped training against native, bit by bit; ``calls`` exchanges of this rank were zipped, and none native. Returns the statistics."""
    native, _ = train(make_model, stage, None, **how)
    zipped, row = train(make_model, stage, zipccl, **how)
    control, _ = train(make_model, stage, None, **how)
    assert native == control, "native training is not repeatable here, so nothing can be compared"
    assert len(set(native[:3])) > 1, "nothing was trained"
    assert zipped == native, "losses or parameters differ from native"
    if calls is not None:
        assert (row["calls_zipped"], row["calls_native"]) == (calls, 0), row
    return row
