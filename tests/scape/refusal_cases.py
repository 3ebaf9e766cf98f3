"""Cases run on every rank by test_refusals.py: what SCAPE does not work with is one error at deepspeed.initialize, the same everywhere."""
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from ds_scape.optimizer import deepspeed_hooks
from tests.scape.zero_cases import initialize, settings
from zipscape.errors import HandshakeError


def refused(config, expected, model=None, mpu=None, parameters=None):
    """One error, the same on all ranks, with ``expected`` in it."""
    texts = [None] * dist.get_world_size()
    try:
        initialize(config, model=model, mpu=mpu, parameters=parameters)
    except Exception as error:
        dist.all_gather_object(texts, str(error))
        assert len(set(texts)) == 1, f"ranks were told different things: {texts}"
        assert expected in texts[0], texts[0]
        return
    raise AssertionError(f"accepted: {config}")


#: Every row of refusals.py that settings alone can reach -> (changes to settings(1), what the error says). The others have cases below.
REFUSED = {
    "stage 3": ({"zero_optimization": {"stage": 3}}, "stage = 3"),
    "stage 0": ({"zero_optimization": {"stage": 0}}, "stage = 0"),
    "ZeRO++ gradients": ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "ZeRO++"),
    "ZeRO++ weights": ({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, "ZeRO++"),
    "ZeRO++ partition": ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, "ZeRO++"),
    "DeepCompile": ({"compile": {"deepcompile": True}}, "deepcompile"),
    "ZenFlow": ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
                                       "zenflow": {"topk_ratio": 0.1, "select_strategy": "step", "update_interval": 4, "select_interval": 8,
                                                   "full_warm_up_rounds": 0, "overlap_step": False}}}, "zenflow"),
    "torch_autocast": ({"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast"),
    "NVMe": ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}}, "nvme"),
    "elastic": ({"zero_optimization": {"elastic_checkpoint": True}}, "elastic_checkpoint"),
    "16-bit masters": ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "16 bits"),
    "prescaled": ({"prescale_gradients": True}, "prescale_gradients"),
    "predivided": ({"prescale_gradients": True, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
    "unknown field": ({"optimizer": {"params": {"densty": 0.1}}}, "densty: unknown field"),
    "log": ({"optimizer": {"params": {"log": "/no/such/folder/scape.jsonl"}}}, "/no/such/folder/scape.jsonl"),
}


def case_refused_settings(rank, world_size):
    """C107: one error, the same on all ranks, never a hang. C77: stage 0 among them."""
    for changes, expected in REFUSED.values():
        refused(settings(1, **changes), expected)


def case_a_setting_that_is_wrong_on_one_rank(rank, world_size):
    """The others hear of it at once: in the numbers, in what a field is called, in the model's shape."""
    refused(settings(1, optimizer={"params": {"density": 0.1 if rank else 0.2}}), "density")
    refused(settings(1, optimizer={"params": {"densty" if rank else "density": 0.1}}), "rank 1 reported an error")
    sent, inner = [], deepspeed.comm.broadcast
    deepspeed.comm.broadcast = lambda tensor, *how, **more: sent.append(tensor.numel()) or inner(tensor, *how, **more)
    try:
        refused(settings(1), "fields: elements, shapes", nn.Sequential(nn.Linear(8, 8 + rank)))
    finally:
        deepspeed.comm.broadcast = inner
    assert not sent, "over NCCL ranks wait for ever in a broadcast of different sizes"
    refused(settings(1), "fields: shapes", nn.Sequential(nn.Linear(8, 5 + rank, bias=False), nn.Linear(8, 6 - rank, bias=False)))
    refused(settings(1), "groups", nn.Linear(8, 8), parameters=lambda model: list(model.parameters())[rank:])


def case_another_optimizer_on_one_rank(rank, world_size):
    """The ranks with SCAPE hear of it at once; the other one goes on, as without us."""
    engine = SimpleNamespace(optimizer_name=lambda: "AdamW" if rank == 1 else "SCAPE", client_optimizer=None, module=nn.Linear(2, 2),
                             pipeline_parallelism=False, autotp_size=lambda: 0, mpu=None)
    broadcast = deepspeed_hooks._shaped_alike(lambda engine: "sent")
    if rank == 1:
        assert broadcast(engine) == "sent"
        return
    try:
        broadcast(engine)
    except HandshakeError as error:
        assert "enabled differs: true on rank 0, false on rank 1" in str(error), error
    else:
        raise AssertionError("not noticed")


def case_sparse_gradients(rank, world_size):
    refused(settings(1), "sparse = True", nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)))
    refused(settings(1), "real floating-point", nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]))


def case_moe(rank, world_size):
    from deepspeed.moe.layer import MoE
    model = nn.Sequential(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=1))
    refused(settings(1), "mixture of experts", model)


def case_pipeline(rank, world_size):
    from deepspeed.pipe import PipelineModule
    deepspeed.init_distributed(verbose=False)
    model = PipelineModule(layers=[nn.Linear(8, 8), nn.Linear(8, 8)], num_stages=world_size, loss_fn=nn.MSELoss())
    refused(settings(1), "pipeline", model)


def case_sequence_parallelism(rank, world_size):
    """As a Megatron mpu says it. DeepSpeed keeps the mpu for later engines."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    sizes = {"data": (1, 0, alone), "model": (1, 0, alone), "sequence": (world_size, rank, dist.group.WORLD),
             "sequence_data": (world_size, rank, dist.group.WORLD)}
    answers = {f"get_{kind}_parallel_{what}": lambda value=value: value
               for kind, values in sizes.items() for what, value in zip(("world_size", "rank", "group"), values, strict=True)}
    refused(settings(1), "sequence parallelism", mpu=SimpleNamespace(**answers))


def case_tensor_parallelism(rank, world_size):
    """All ranks hold parts of one replica, as a Megatron mpu says. Last: DeepSpeed keeps the mpu for all later engines."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: world_size, get_model_parallel_rank=lambda: rank,
                          get_model_parallel_group=lambda: dist.group.WORLD, get_data_parallel_world_size=lambda: 1,
                          get_data_parallel_rank=lambda: 0, get_data_parallel_group=lambda: alone)
    refused(settings(1), "tensor parallelism", mpu=mpu)
