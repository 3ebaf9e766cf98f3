"""Trains small models under ZeRO-3 with and without ``cache_params``, with things happening between the steps."""
import contextlib
import copy
import dataclasses
import hashlib

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from ds_zipccl.backend import deepspeed_comm, deepspeed_hooks
from ds_zipccl.backend.zero3_params import EngineFrames, stats_of
from tests.helpers.processes import DEVICE
from tests.train.zero_cases import VOCAB, ZIPPED, Net, settings

STEPS = 6
CACHED = {**ZIPPED, "cache_params": True}


@dataclasses.dataclass
class Run:
    """One training: sha256 of all parameters and the loss, per micro step; counters of the cache; statistics per operation."""
    losses: list
    parameters: list
    cache: dict
    ops: dict
    results: list


def batches(rank: int):
    generator = torch.Generator("cpu").manual_seed(100 + rank)
    while True:
        yield tokens((4, 7), generator)


def tokens(shape, generator: torch.Generator) -> torch.Tensor:
    """The same on every device."""
    return torch.randint(0, VOCAB, shape, generator=generator, device="cpu").to(DEVICE)


def hash_of(module: nn.Module) -> str:
    """Of all parameters, gathered by DeepSpeed without frames (GatheredParameters calls ``all_gather``, which is not cached)."""
    digest = hashlib.sha256()
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        for parameter in module.parameters():
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def cache_counters() -> dict:
    live = deepspeed_comm.live_runtime()
    if live is None or not live.config.cache_params:
        return {}
    counters, gauges = stats_of(live).section()
    return {**counters, **gauges, "bypassed": dict(stats_of(live).bypassed)}


def config_for(section: dict | None, **extra) -> dict:
    zero, bf16 = extra.pop("zero_optimization", {}), extra.pop("bf16", {})
    config = settings(3, "bf16", **extra)
    config["bf16"].update(bf16)
    config["zero_optimization"].update({"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 9000, **zero})
    return config if section is None else {**config, "zipccl": section}


def train(section: dict | None, between=None, *, make=Net, steps: int = STEPS, config: dict | None = None,
          hash_every_step: bool = True) -> Run:
    """``between(step, engine)`` is called before every step's forward; what it returns other than None is kept."""
    torch.manual_seed(0)
    model = make()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad],
                                      config=copy.deepcopy(config if config is not None else config_for(section)))
    data = batches(dist.get_rank())
    run = Run([], [], {}, {}, [])
    for step in range(steps):
        if between is not None:
            found = between(step, engine)
            if found is not None:
                run.results.append(found)
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(next(data))
            engine.backward(loss)
            engine.step()
            run.losses.append(loss.item().hex())
        if hash_every_step or step == steps - 1:
            run.parameters.append(hash_of(engine.module))
    run.cache = cache_counters()
    live = deepspeed_comm.live_runtime()
    run.ops = live.stats.snapshot() if live else {}
    engine.destroy()
    deepspeed_hooks.deactivate()
    return run


def assert_same(cached: Run, other: Run) -> None:
    """Every loss, every parameter after every step, and whatever was returned on the way."""
    assert cached.losses == other.losses and cached.parameters == other.parameters, \
        f"losses differ from micro step {first_difference(cached.losses, other.losses)}, " \
        f"parameters from step {first_difference(cached.parameters, other.parameters)}"
    assert cached.results == other.results


def first_difference(a: list, b: list) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def compare(between=None, *, world_size: int, extra: dict | None = None, unknown_writes: int = 0, section: dict = CACHED, **options) -> Run:
    """Cached against uncached, and at 2 ranks against native too. Returns the cached run."""
    extra = extra or {}
    with_section = lambda one: config_for(one, **copy.deepcopy(extra))          # noqa: E731
    cached = train(section, between, config=with_section(section), **options)
    uncached = {**section, "cache_params": False}
    assert_same(cached, train(uncached, between, config=with_section(uncached), **options))
    if world_size == 2:
        assert_same(cached, train(None, between, config=with_section(None), **options))
    assert cached.cache["unknown_writes"] == unknown_writes, cached.cache
    return cached


def sample_loss(engine, seed: int = 7) -> str:
    """A forward pass of the bare module, without gradients."""
    sample = tokens((3, 5), torch.Generator("cpu").manual_seed(seed))
    engine.module.eval()
    with torch.no_grad():
        loss = engine.module(sample)
    engine.module.train()
    return loss.item().hex()


@contextlib.contextmanager
def without_default_device():
    """As users' programs are: with a GPU as default device, DeepSpeed would find what it makes for the host, and pins, on the GPU."""
    before = torch.get_default_device()
    torch.set_default_device(None)
    try:
        yield
    finally:
        if before.type != "cpu":            # set to "cpu", functions of torch's would be called through a mode
            torch.set_default_device(before)


@contextlib.contextmanager
def muted():
    """Writers announce nothing: what a forgotten invalidation would be."""
    original = EngineFrames.changed, EngineFrames.changed_here
    EngineFrames.changed = EngineFrames.changed_here = lambda self, params=None: None
    try:
        yield
    finally:
        EngineFrames.changed, EngineFrames.changed_here = original
