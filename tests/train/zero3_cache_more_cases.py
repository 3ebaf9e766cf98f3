"""Cases run on every rank by test_zero3_cache.py: ``cache_params`` with other settings and models."""
import contextlib
import copy
import json
import tempfile
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups, safe_set_full_fp32_param, safe_set_local_fp32_param
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_zipccl.backend import deepspeed_hooks, zero3_params, zero3_writers
from ds_zipccl.errors import CollectiveError
from tests.helpers.ranks import DEVICE
from tests.train.zero3_cache_cases import compared_as_on_a_gpu
from tests.train.zero3_cache_helpers import CACHED, STEPS, cache_counters, compare, config_for, sample_loss, train, without_default_device
from tests.train.zero_cases import VOCAB, WIDTH, Net


class Checkpointed(Net):
    """C85, C83: layers are computed again in the backward pass, the head is the embedding, one layer is frozen."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.head.weight = self.embedding.weight
        for parameter in self.layers[1].parameters():
            parameter.requires_grad = False

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(checkpoint(layer, hidden, use_reentrant=self.use_reentrant))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def _checkpointed(world_size, use_reentrant):
    run = compare(world_size=world_size, make=lambda: Checkpointed(use_reentrant))
    trained, frozen = 3, 1                      # embedding and head are one; frozen frames are made once and stay
    assert run.cache["encodes"] == trained * (STEPS + 1) + frozen, run.cache


def case_activation_checkpointing(rank, world_size):
    _checkpointed(world_size, use_reentrant=False)


def case_reentrant_activation_checkpointing(rank, world_size):
    _checkpointed(world_size, use_reentrant=True)


class Odd(Net):
    """C65: parameters smaller than the world, than a block, empty on some ranks; one unused."""

    def __init__(self):
        super().__init__()
        self.small = nn.ParameterList(nn.Parameter(torch.linspace(-1, 1, n)) for n in (1, 3, 31, 2049))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        return super().forward(tokens) * (1 + sum(p.square().mean() for p in self.small))


def case_small_parameters_travel_in_the_same_row(rank, world_size):
    run = compare(world_size=world_size, make=Odd, extra={"zero_optimization": {"stage3_prefetch_bucket_size": 40000}})
    assert run.cache["bypassed"]["no_gain"] > 0 and set(run.cache["bypassed"]) == {"no_gain"}, run.cache
    assert run.cache["gathers"] < run.cache["shards"]


def case_persistent_parameters(rank, world_size):
    """Whole after every step: they are gathered natively then, and with the others where somebody has partitioned them."""
    run = compare(world_size=world_size, extra={"zero_optimization": {"stage3_param_persistence_threshold": 100}})
    assert run.cache["bypassed"].keys() == {"no_gain"} and run.cache["encodes"] == 5 * (STEPS + 1), run.cache
    run = compare(world_size=world_size, extra={"zero_optimization": {"stage3_param_persistence_threshold": 10**6}}, steps=2)
    assert run.cache["unknown_writes"] == 0


class Wide(Odd):
    """With shards worth a frame on 4 ranks too."""

    def __init__(self):
        super().__init__()
        self.layers[0] = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))


def case_second_partition_is_gathered_natively(rank, world_size):
    """hpZ: forward passes gather frames, backward passes the second copy inside its group, of 2 ranks; written copies count too. C65: also
    of parameters that leave ranks without an element."""
    def between(step, engine):
        if step == 2:
            weight = engine.module.layers[1].weight
            with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
                weight.data.mul_(1.5)
            return sample_loss(engine)
        return None

    run = compare(between, world_size=world_size, make=Wide, extra={"zero_optimization": {"zero_hpz_partition_size": 2}}, steps=4,
                  hash_every_step=False)            # whoever gathers parameters makes their second copies
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # else every later engine of the process has hpZ too
    assert run.cache["bypassed"]["hpz_secondary"] > 0 and run.cache["shards"] > 0, run.cache


@without_default_device()
def case_second_partition_with_offload_learns(rank, world_size):
    """C88: with optimizer state (and parameters) on the host, and hpZ, losses fall and no gradient is lost; 20 steps, native's bits."""
    hpz = {"zero_hpz_partition_size": world_size, "offload_optimizer": {"device": "cpu"}}

    def learns(**offload):
        extra = {"zero_optimization": {**hpz, **offload}, "gradient_accumulation_steps": 1, "zero_force_ds_cpu_optimizer": False}
        norms = lambda step, engine: float(engine.get_global_grad_norm()) if step else None             # noqa: E731
        run = compare(norms, world_size=world_size, extra=extra, steps=20, hash_every_step=False)
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        losses = [float.fromhex(loss) for loss in run.losses]
        assert max(losses[-3:]) < losses[0] / 3 and len(run.results) == 19 and min(run.results) > 0, (losses, run.results)
        return run

    run = learns()
    assert run.cache["bypassed"]["hpz_secondary"] > 0 and run.ops["reduce_scatter_tensor"]["calls_zipped"] > 0, run.cache
    assert set(learns(offload_param={"device": "cpu"}).cache["bypassed"]) == {"offload_param_cpu"}


@without_default_device()
def case_offloaded_parameters_are_bypassed(rank, world_size):
    run = compare(world_size=world_size, extra={"zero_optimization": {"offload_param": {"device": "cpu"}}}, steps=3)
    assert run.cache["encodes"] == 0 and run.cache["held_bytes"] == 0 and set(run.cache["bypassed"]) == {"offload_param_cpu"}, run.cache
    assert run.ops["all_gather_into_tensor"]["calls_zipped"] > 0             # without frames of its own, as before


def case_other_settings_bypass(rank, world_size):
    for extra, reason in (({"use_all_reduce_for_fetch_params": True}, "use_all_reduce_for_fetch_params"),):
        run = compare(world_size=world_size, extra={"zero_optimization": extra}, steps=2)
        assert run.cache["encodes"] == 0 and set(run.cache["bypassed"]) == {reason}, run.cache
    run = compare(world_size=world_size, extra={"zero_optimization": {"allgather_sequential": True}}, steps=2)
    assert run.cache["shards"] > 0, run.cache
    never = {**CACHED, "collectives": {"all_gather": "never", "reduce_scatter": "always"}}
    run = compare(world_size=world_size, section=never, steps=2)
    assert run.cache["encodes"] == 0 and set(run.cache["bypassed"]) == {"never"}, run.cache
    fp32 = config_for(CACHED)
    del fp32["bf16"]
    run = train(CACHED, config=fp32, steps=2)
    assert run.cache["encodes"] == 0 and set(run.cache["bypassed"]) == {"dtype"}, run.cache


def case_mixed_dtypes(rank, world_size):
    """C67: linear layers are gathered and reduced in BF16, the embedding in fp32, in one fetch: each dtype for itself."""
    run = compare(world_size=world_size, steps=2, extra={"bf16": {"enabled": False}, "torch_autocast": {
        "enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}})
    for op in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert run.ops[op]["calls_zipped"] > 0 and run.ops[op]["native_reasons"]["dtype"] > 0, run.ops[op]


def case_without_optimizer(rank, world_size):
    """An engine that only computes: frames are made once, and found out of date where somebody writes. On a GPU ranks hear of that when
    they next exchange status words, which without a step is when somebody announces a write."""
    def losses(section, then=lambda engine: None):
        torch.manual_seed(0)
        config = config_for(section)
        del config["optimizer"]
        engine, *_ = deepspeed.initialize(model=Net(), config=config)
        found = [sample_loss(engine, seed) for seed in range(4)]
        with deepspeed.zero.GatheredParameters(engine.module.head.weight, modifier_rank=0):
            engine.module.head.weight.data.mul_(2)
        found.append(sample_loss(engine))
        engine.module.head.weight.ds_tensor.data.mul_(1 + rank)
        found.append(sample_loss(engine))
        then(engine)
        cache = cache_counters()
        engine.destroy()
        deepspeed_hooks.deactivate()
        return found, cache

    def is_told(engine):
        with deepspeed.zero.GatheredParameters(engine.module.head.weight, modifier_rank=0):
            pass
        with pytest.raises(CollectiveError) as error:
            sample_loss(engine)
        assert "head.weight on rank 1" in str(error.value) and " on rank 0" not in str(error.value), error.value

    uncached, _ = losses({**CACHED, "cache_params": False})
    with compared_as_on_a_gpu():
        cached, counters = losses(CACHED, is_told)
    assert cached[:-1] == uncached[:-1] and counters["unknown_writes"] == 0, counters
    if DEVICE != "cpu":
        return
    cached, counters = losses(CACHED)
    assert cached == uncached
    assert counters["encodes"] == 5 + 1 + rank and counters["unknown_writes"] == rank and counters["refreshes"] == 2, counters


class OwnOptimizer(DeepSpeedZeroOptimizer_Stage3):
    """Somebody's subclass with a writer of its own."""

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):
        self.fp16_partitioned_groups_flat[sub_group_id].data.copy_(self.fp32_partitioned_groups_flat[sub_group_id].data)


def case_optimizers_with_writers_of_their_own_are_not_trusted(rank, world_size):
    zero3_writers.install()
    for cls, known in ((DeepSpeedZeroOptimizer_Stage3, True), (DeepSpeedZeRoOffload, True), (OwnOptimizer, False),
                       (SuperOffloadOptimizer_Stage3, False), (torch.optim.Adam, False)):
        assert zero3_writers.knows(cls.__new__(cls)) == known, cls
    original = zero3_writers.knows
    zero3_writers.knows = lambda optimizer: False
    try:
        run = compare(world_size=world_size, steps=2)
    finally:
        zero3_writers.knows = original
    assert run.cache["encodes"] == 0 and set(run.cache["bypassed"]) == {"unknown_optimizer"}, run.cache


def case_memory_is_bounded(rank, world_size):
    """Some shards have no frames, always the same ones on all ranks, and travel as they are."""
    bound = 20000
    run = compare(world_size=world_size, section={**CACHED, "max_cache_bytes": bound}, steps=3)
    assert 0 < run.cache["held_bytes"] <= bound and run.cache["bypassed"]["max_cache_bytes"] > 0, run.cache
    run = compare(world_size=world_size, section={**CACHED, "max_cache_bytes": 0}, steps=2)
    assert run.cache["held_bytes"] == run.cache["shards"] == 0, run.cache


def case_checked_frames(rank, world_size):
    for integrity in ("checksum", "roundtrip"):
        compare(world_size=world_size, section={**CACHED, "integrity": integrity}, steps=2)


def case_roundtrip_compares_before_every_use(rank, world_size):
    """A frame damaged in memory, its shard untouched: no fingerprint sees that, ``roundtrip`` does."""

    def between(step, engine):
        for slot in (s for c in getattr(engine, zero3_params.ATTRIBUTE, None)._caches.values() for s in c.slots) if step == 1 else ():
            if slot.name == "layers.1.weight" and rank == 0:
                slot.frame[-700] ^= 0x80

    clean = train(CACHED, steps=2)
    damaged = train(CACHED, between, steps=2)
    proven = train({**CACHED, "integrity": "roundtrip"}, between, steps=2)
    assert damaged.parameters != clean.parameters and proven.parameters == clean.parameters and proven.losses == clean.losses
    assert proven.cache["repairs"] == (1 if rank == 0 else 0) and damaged.cache["repairs"] == 0


def case_adaptive_choice(rank, world_size):
    """Whatever the probes find, bits are the same; where native wins nothing is encoded."""
    run = compare(world_size=world_size, section={**CACHED, "collectives": {"all_gather": "adaptive", "reduce_scatter": "always"}}, steps=3)
    assert run.cache["bypassed"].get("native_is_faster", 0) + run.cache["shards"] > 0          # timing decides which
    if not run.cache["shards"]:
        assert run.cache["encodes"] == 0, run.cache


def _randomize(engine, names, spread: float, seed: int) -> None:
    """On all ranks alike: exponents far apart, which frames have little or no room for."""
    parameters = [p for name, p in engine.module.named_parameters() if name in names]
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        generator = torch.Generator("cpu").manual_seed(seed)
        for p in parameters:
            scale, data = (torch.randn(p.numel(), generator=generator, device="cpu") for _ in range(2))
            p.data.copy_((data * scale.mul(spread).exp2() * 0.01).view_as(p))
    if isinstance(engine.optimizer.fp32_partitioned_groups_flat, list):
        engine.optimizer.refresh_fp32_params()


def case_shards_that_do_not_fit(rank, world_size):
    """Wide exponents get a larger frame within the same refresh, hopeless ones travel as they are."""
    found = {}

    def between(step, engine):
        if step == 1:
            _randomize(engine, {"layers.0.weight"}, 2.0, 5)
            _randomize(engine, {"layers.2.weight"}, 8.0, 6)
            loss = sample_loss(engine)
            for cache in getattr(engine, zero3_params.ATTRIBUTE)._caches.values() if hasattr(engine, zero3_params.ATTRIBUTE) else ():
                found.update({slot.name: (slot.reason, slot.capacity.spill_per_tile) for slot in cache.slots})
            return loss
        return None

    run = compare(between, world_size=world_size)
    assert found["layers.0.weight"][0] is None and found["layers.0.weight"][1] > found["layers.1.weight"][1], found
    assert found["layers.2.weight"][0] == "incompressible", found
    assert run.cache["bypassed"]["incompressible"] > 0 and run.cache["repairs"] == 0, run.cache


def case_bf16_master_weights_in_the_memory_of_the_shards(rank, world_size):
    """There ``safe_set_*`` writes the shards themselves, also on one rank alone: frames are made again there, unasked."""
    extra = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}

    def between(step, engine):
        weight = engine.module.layers[0].weight
        if step == 0:               # DeepSpeed's own condition for sharing compares a device with a string and is never true
            zero = engine.optimizer
            for master, shards in zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True):
                master.data = shards
        if step == 2:
            safe_set_full_fp32_param(weight, torch.linspace(-0.1, 0.1, WIDTH * WIDTH).view(WIDTH, WIDTH))
            return sample_loss(engine)
        if step == 3:
            if rank == 1:
                safe_set_local_fp32_param(weight, torch.linspace(0, 0.05, weight.ds_tensor.numel()).to(torch.bfloat16))
            return sample_loss(engine)
        return None

    run = compare(between, world_size=world_size, extra=extra)
    assert run.cache["repairs"] == (2 if rank == 1 else 1), run.cache


def case_optimizer_state_alone(rank, world_size):
    """``optimizer.load_state_dict`` with nothing around it."""
    kept = {}

    def between(step, engine):
        if step == 1:
            kept.update(copy.deepcopy(engine.optimizer.state_dict()))
        if step == 3:
            engine.optimizer.load_state_dict([kept] * world_size)
            engine.optimizer.checkpoint_event_epilogue()
            return sample_loss(engine)
        return None

    run = compare(between, world_size=world_size)
    assert run.cache["repairs"] == 0, run.cache


def case_frozen_parameters_from_a_checkpoint(rank, world_size):
    """DeepSpeed writes them shard by shard, past everything else."""

    def between(step, engine):
        if step == 3:
            frozen = {name: p.ds_tensor * 2 for name, p in engine.module.named_parameters() if not p.requires_grad}
            engine.load_module_state_dict({"module": {}, FROZEN_PARAM_FRAGMENTS: frozen}, strict=False)
            return sample_loss(engine)
        return None

    run = compare(between, world_size=world_size, make=lambda: Checkpointed(False))
    assert run.cache["encodes"] == 3 * (STEPS + 1) + 1 + 4 and run.cache["repairs"] == 0, run.cache       # all of them once more


def case_own_writers_announce_themselves(rank, world_size):
    def between(step, engine):
        if step == 2:
            weight = engine.module.layers[2].weight
            weight.ds_tensor.data.mul_(1 + rank)
            zero3_params.invalidate(weight)
            return sample_loss(engine)
        return None

    run = compare(between, world_size=world_size)
    assert run.cache["repairs"] == 1


def case_states_move_away_and_back(rank, world_size):
    def between(step, engine):
        if step == 2:
            engine.optimizer.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=False)
            frames = getattr(engine, zero3_params.ATTRIBUTE, None)
            assert frames is None or frames.stats.held_bytes == 0
            engine.optimizer.reload_states()
            return sample_loss(engine)
        return None

    run = compare(between, world_size=world_size)
    assert run.cache["repairs"] == 5, run.cache          # Net's five parameters with frames


def case_log_has_the_counters_of_each_step(rank, world_size):
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        train({**CACHED, "log": str(log)}, steps=3)
        if rank == 0:
            rows = [json.loads(line)["cache_params"] for line in log.read_text().splitlines()]
            assert [row["refreshes"] for row in rows] == [2, 1, 1] and [row["encodes"] for row in rows] == [10, 5, 5], rows
            assert all(row["shards"] > 0 and row["encodes_saved"] == row["shards"] - row["encodes"] for row in rows)
            assert len({row["held_bytes"] for row in rows}) == 1 and rows[0]["held_bytes"] > 0


def case_model_made_under_zero_init(rank, world_size):
    """Partitioned from the start; parameters that are added after the engine was made are gathered without frames."""
    def make(config):
        torch.manual_seed(3)
        with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(config)):
            return Net()

    def between(step, engine):
        if step == 2:
            with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(config_for(CACHED))):
                extra = nn.Linear(WIDTH, VOCAB)
            with deepspeed.zero.GatheredParameters(list(extra.parameters()), modifier_rank=0):
                return extra.weight.float().sum().item().hex() if rank == 0 else ""
        return None

    config = config_for(CACHED)
    runs = []
    for section in (CACHED, {**CACHED, "cache_params": False}):
        one = config_for(section)
        runs.append(train(section, between, make=lambda: make(one), config=one, steps=4))     # noqa: B023
    assert config and runs[0].losses == runs[1].losses and runs[0].parameters == runs[1].parameters
    assert runs[0].results == runs[1].results and runs[0].cache["unknown_writes"] == 0 and runs[0].cache["shards"] > 0


def case_process_group_ends(rank, world_size):
    """Must be last. An engine that outlives its process group holds no frames once it is destroyed: DeepSpeed's part of that fails."""
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_for(CACHED))
    engine(torch.zeros(2, 3, dtype=torch.long))
    stats = getattr(engine, zero3_params.ATTRIBUTE).stats
    assert stats.held_bytes > 0
    deepspeed.comm.destroy_process_group()
    with contextlib.suppress(AssertionError):
        engine.destroy()
    assert not dist.is_initialized() and not hasattr(engine, zero3_params.ATTRIBUTE) and stats.held_bytes == 0
