"""Cases run on every rank by test_moe.py, on more than two ranks or with splits that differ: grids of expert and data parallelism, tensor
parallelism beside them, AutoEP's exchange."""
import functools
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import _AllToAllV, compute_split_plan
from torch import nn

from ds_zipccl.errors import CollectiveError
from tests.train.moe_helpers import DIM, EXCHANGE_ALONE, TOKENS, ZIPPED, Net, close, compare, expert, initialize, samples, settings, train

EXPERTS, STEPS = 4, 3
LARGE = 1e6                             # learning rate after which a weight is its gradient, to the 8 bits of BF16


def reference_gradients(model: Net, batches) -> dict:
    """{number of the expert: gradients of its parameters}, of the mean loss of all ranks' batches, in one process and FP32."""
    experts = nn.ModuleList(expert() for _ in range(EXPERTS))
    for e in experts:
        e.load_state_dict({k: v.float() for k, v in model.moe.deepspeed_moe.experts.deepspeed_experts[0].state_dict().items()})
    gate = model.moe.deepspeed_moe.gate.wg.weight.detach().float()
    for batch in batches:
        hidden = torch.tanh(model.enter(batch)).detach().float().view(-1, DIM)
        weights, chosen = (hidden @ gate.t()).softmax(1).max(1)
        hidden = torch.stack([w * experts[int(e)](h) for h, w, e in zip(hidden, weights, chosen, strict=True)])
        head = model.leave.weight.detach().float(), model.leave.bias.detach().float()
        (nn.functional.linear(hidden, *head).pow(2).mean() / len(batches)).backward()
    return {number: [p.grad for p in e.parameters()] for number, e in enumerate(experts)}


def case_expert_gradients_are_those_of_one_process(rank, world):
    """C56: for all grids of expert and data parallelism."""
    for ep_size in (1, 2, 4):
        for zipccl in (None, ZIPPED):
            torch.manual_seed(0)
            net = Net(EXPERTS, ep_size, capacity_factor=EXPERTS, gate_share=0.0)        # room for all tokens: no choice depends on others
            config = {key: value for key, value in settings(1, zipccl).items() if key not in ("optimizer", "gradient_clipping")}
            config["zero_allow_untested_optimizer"] = True
            engine = initialize(net, config, optimizer=lambda groups: torch.optim.SGD(groups, lr=LARGE))
            mine, wholes = samples(0), [torch.empty_like(samples(0)) for _ in range(world)]
            dist.all_gather(wholes, mine)
            expected = reference_gradients(net, wholes)
            engine.backward(engine(mine))
            engine.step()
            local = net.moe.deepspeed_moe.experts.deepspeed_experts
            for index, own in enumerate(local):
                number = rank % ep_size * len(local) + index
                for got, wanted in zip(map(torch.Tensor.detach, own.parameters()), expected[number], strict=True):
                    assert float((got.float() / -LARGE - wanted).norm() / wanted.norm()) < 0.03, (ep_size, zipccl, number)
            row = close(engine)
            assert zipccl is None or ep_size == 1 or (row["calls_zipped"], row["calls_native"]) == (4, 0), row


def case_grids_equal_native(rank, world):
    for stage, ep_size in ((1, 2), (2, 2), (2, 4)):
        compare(lambda: Net(EXPERTS, ep_size), stage, EXCHANGE_ALONE, calls=4 * STEPS)      # noqa: B023


def _tensor_parallel_pairs(rank):
    """What Megatron's mpu says where ranks 0, 1 and ranks 2, 3 hold a replica each."""
    pairs, across = ([dist.new_group(ranks) for ranks in grid] for grid in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    return SimpleNamespace(get_model_parallel_world_size=lambda: 2, get_model_parallel_rank=lambda: rank % 2,
                           get_model_parallel_group=lambda: pairs[rank // 2], get_data_parallel_world_size=lambda: 2,
                           get_data_parallel_rank=lambda: rank // 2, get_data_parallel_group=lambda: across[rank % 2])


def _gather_flat(gather, output, data, *args, **kwargs):
    """DeepSpeed gathers tensors into flat buffers, which gloo refuses and NCCL does not."""
    return gather(output, data.reshape(-1) if output.dim() == 1 else data, *args, **kwargs)


def _beside_tensor_parallelism(rank, stage, **moe):
    mpu = _tensor_parallel_pairs(rank)
    deepspeed.comm.all_gather_into_tensor = functools.partial(_gather_flat, deepspeed.comm.all_gather_into_tensor)

    def inputs(step):
        batch = samples(step)
        dist.broadcast(batch, rank // 2 * 2, group=mpu.get_model_parallel_group())         # a replica's ranks see the same tokens
        return batch,

    compare(lambda: Net(EXPERTS, 2, **moe), stage, EXCHANGE_ALONE, inputs=inputs, mpu=mpu, calls=4 * STEPS)


def case_beside_tensor_parallelism(rank, world):
    """C55: whole experts, each token sent by one rank of its replica."""
    _beside_tensor_parallelism(rank, 1)


def case_experts_in_tensor_parallel_parts(rank, world):
    """C55: expert-parallel groups across the replicas."""
    _beside_tensor_parallelism(rank, 2, enable_expert_tensor_parallelism=True)


class Uneven(nn.Module):
    """AutoEP's exchange, with splits as the routes have them; every rank is one expert."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(DIM, DIM), nn.Linear(DIM, 8)
        self.expert = expert()
        self.group, self.world = dist.group.WORLD, dist.get_world_size()

    def forward(self, x, chosen):
        """x bf16 [samples, TOKENS, DIM], chosen int64 [samples * TOKENS]: the rank that takes each token."""
        order = chosen.argsort(stable=True)
        hidden = torch.tanh(self.enter(x)).view(-1, DIM)[order]
        plan = compute_split_plan(chosen[:, None], self.world, self.world, 1, self.group)
        hidden = _AllToAllV.apply(self.group, hidden, plan.input_splits, plan.output_splits)
        hidden = _AllToAllV.apply(self.group, self.expert(hidden), plan.output_splits, plan.input_splits)
        return self.leave(hidden).float().pow(2).sum() / (4 * TOKENS)


def _routes(step, rank, world):
    """C36: nearly even; everything to one rank; a ring; a rank that sends nothing to others; a rank that nobody sends to; few to most."""
    numel = 4 * TOKENS
    generator = torch.Generator("cpu").manual_seed(10 * step + rank)
    everybody = torch.randint(world, (numel,), generator=generator, device="cpu").to(torch.get_default_device())
    return (everybody, torch.full_like(everybody, world - 1), torch.full_like(everybody, (rank + 1) % world),
            everybody if rank else torch.zeros_like(everybody), everybody.clamp(min=1),
            torch.where(torch.arange(numel) < 3, everybody, 0))[step]


def case_uneven_splits(rank, world):
    """Zero rows, receivers of everything, idle ranks: forward and backward."""
    row = compare(Uneven, 1, EXCHANGE_ALONE, inputs=lambda step: (samples(step), _routes(step, rank, world)), steps=6)
    reasons = row["native_reasons"]
    assert row["calls_zipped"] > 8 and reasons.pop("dtype") == 6 and row["calls_zipped"] + sum(reasons.values()) == 24, row


def _train_with_capacities_that_differ(rank, zipccl):
    """Without dropping, and with more tokens for one expert than the smaller batch has, DeepSpeed's layer exchanges other sizes on
    every rank."""
    train(lambda: Net(favourite=0, drop_tokens=False), 1, zipccl, inputs=lambda step: (samples(step, 1 if rank else 4),), steps=1)


def case_capacities_that_differ_are_named(rank, world):
    """C53: with ``integrity`` one error, the same on both ranks, ahead of the exchange."""
    try:
        _train_with_capacities_that_differ(rank, {**ZIPPED, "integrity": "checksum"})
    except CollectiveError as error:
        assert "rank 0 has 32768 elements for rank 1, which takes 8192" in str(error), error
    else:
        raise AssertionError("not seen")


def case_capacities_that_differ_fail_natively(rank, world):
    _train_with_capacities_that_differ(rank, None)


def case_capacities_that_differ_fail_zipped(rank, world):
    _train_with_capacities_that_differ(rank, ZIPPED)
