"""Cases run on every rank by test_zero3_cache.py: ZeRO-3 with ``cache_params``, bit by bit the same training as without."""
import contextlib
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.swap_tensor import partitioned_param_swapper
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import safe_set_full_fp32_param

from ds_zipccl.backend import deepspeed_hooks
from ds_zipccl.backend.zero3_params import ATTRIBUTE
from ds_zipccl.collectives.frame_guard import Guard
from ds_zipccl.errors import CollectiveError
from tests.helpers.ranks import DEVICE
from tests.train.zero3_cache_helpers import (
    CACHED,
    STEPS,
    assert_same,
    batches,
    cache_counters,
    compare,
    config_for,
    muted,
    sample_loss,
    train,
    without_default_device,
)
from tests.train.zero_cases import Net

FRAMED = 5              # of Net's parameters: embedding, three layers, head; the biases are too small
GAS = 2


def case_plain_training(rank, world_size):
    """Frames are made once per step, not once per gather, and nothing else changes."""
    run = compare(world_size=world_size)
    cache = run.cache
    assert cache["encodes"] == FRAMED * (STEPS + 1), cache          # before the first step, and after each
    assert cache["refreshes"] == STEPS + 1 and cache["repairs"] == 0, cache
    assert cache["shards"] > GAS * STEPS * FRAMED and cache["gathers"] < cache["shards"], cache       # forward, and backward for most
    assert cache["encodes_saved"] == cache["shards"] - cache["encodes"] > cache["encodes"], cache
    assert cache["raw_bytes"] / cache["wire_bytes"] > 1.2, cache
    assert 0 < cache["held_bytes"] < cache["max_bytes"], cache


def write_weight(engine, scale: float) -> None:
    weight = engine.module.layers[1].weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data.mul_(scale)


class Eventful:
    """Writes by everybody who may write, between steps. All ranks do the same."""

    def __init__(self, folder: str):
        self.folder = folder

    def __call__(self, step: int, engine):
        if step == 1:
            write_weight(engine, 1.5)
        if step == 2:
            engine.save_checkpoint(self.folder, tag="early")
            return sample_loss(engine)
        if step == 3:
            safe_set_full_fp32_param(engine.module.layers[0].weight, torch.full((96, 96), 0.01))
            write_weight(engine, 0.5)
            return sample_loss(engine)
        if step == 4:
            engine.load_checkpoint(self.folder, tag="early")
            return sample_loss(engine)
        if step == 5:
            state = {name: torch.full(p.ds_shape, 0.02) for name, p in engine.module.named_parameters()}
            engine.load_module_state_dict({"module": state}, fetch_z3_params=True)
            return sample_loss(engine)
        return None


def shared_folder(folder: str) -> str:
    folders = [folder]
    dist.broadcast_object_list(folders)
    return folders[0]


def case_every_writer(rank, world_size):
    with tempfile.TemporaryDirectory() as own:
        run = compare(Eventful(shared_folder(own)), world_size=world_size)
        dist.barrier()
    assert run.cache["repairs"] == 0 and run.cache["refreshes"] == STEPS + 5, run.cache        # one more for each event that wrote


@contextlib.contextmanager
def compared_as_on_a_gpu():
    """On a CPU too: the host waits for no comparison, so no frame is made again for what it says."""
    init = Guard.__init__

    def on_gpu(self, *arguments):
        init(self, *arguments)
        self.on_host = False

    with mock.patch.object(Guard, "__init__", on_gpu) if DEVICE == "cpu" else contextlib.nullcontext():
        yield


def error_in(step: int, between) -> str:
    """Of a training that is compared as on a GPU: all ranks raise it in this step's forward pass, the first after the ranks' next exchange
    of status words, and nothing was made again."""
    seen = []

    def noting(now, engine):
        seen.append(engine)
        return between(now, engine)

    with compared_as_on_a_gpu(), pytest.raises(CollectiveError) as error:
        train(CACHED, noting, steps=step + 1)
    assert len(seen) == step + 1 and cache_counters()["unknown_writes"] == cache_counters()["repairs"] == 0, (len(seen), cache_counters())
    seen[0].destroy()
    deepspeed_hooks.deactivate()
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(error.value))
    assert len(set(texts)) == 1 and "changed by a writer that ds_zipccl does not know" in texts[0], texts
    return texts[0]


def _finds_muted(act, expected: int, at_once: bool) -> None:
    """With its writers muted the action is found by the guard, so the counts of the other cases prove that writers announce. Without guard
    and writers, training differs: the announcements are what keeps it right. ``at_once``: a GPU repairs it too, for versions have moved."""
    if expected:
        seen = train(CACHED, lambda step, engine: act(engine) if step == 2 else None, steps=4)
        assert seen.cache["unknown_writes"] == 0

    def quietly(step, engine):
        if step == 2:
            with muted():
                act(engine)

    if at_once or DEVICE == "cpu":
        found = train(CACHED, quietly, steps=4)
        assert found.cache["unknown_writes"] == expected, found.cache
        if expected:
            assert found.losses == seen.losses
    if not at_once:
        text = error_in(3, quietly)
        assert all(f"embedding.weight on rank {rank}" in text for rank in range(dist.get_world_size())), text

    def unseen(step, engine):
        for cache in getattr(engine, ATTRIBUTE)._caches.values():
            cache.guard = False
        if step == 2:
            versions = [p.ds_tensor._version for p in engine.module.parameters()]
            with muted():
                act(engine)
            for p, version in zip(engine.module.parameters(), versions, strict=True):
                torch._C._autograd._unsafe_set_version_counter((p.ds_tensor,), (version,))

    stale = train(CACHED, unseen, steps=4)
    if expected:
        assert stale.losses != seen.losses and stale.cache["unknown_writes"] == 0, "the writer's announcement makes no difference"


def case_forgotten_gathered_parameters(rank, world_size):
    _finds_muted(lambda engine: write_weight(engine, 1.5), 1, at_once=True)


def case_forgotten_checkpoint(rank, world_size):
    with tempfile.TemporaryDirectory() as own:
        folder = shared_folder(own)

        def act(engine):
            engine.save_checkpoint(folder, tag="now")
            with torch.no_grad():
                for group in engine.optimizer.fp32_partitioned_groups_flat:
                    group.mul_(0.5)
            engine.save_checkpoint(folder, tag="halved")
            engine.load_checkpoint(folder, tag="halved")

        _finds_muted(act, FRAMED, at_once=False)
        dist.barrier()


def case_forgotten_step(rank, world_size):
    """The mutation "optimizer.step says nothing": found at the next forward, in every step; on a GPU when a step says something again."""
    if DEVICE == "cpu":
        honest = train(CACHED, steps=3)
        with muted():
            found = train(CACHED, steps=3)
        assert found.losses == honest.losses and found.cache["unknown_writes"] == 2 * FRAMED, found.cache
    with contextlib.ExitStack() as silence:
        silence.enter_context(muted())
        assert "embedding.weight on rank 0" in error_in(3, lambda step, engine: silence.close() if step == 2 else None)


def case_unannounced_write_on_one_rank(rank, world_size):
    """A script that writes into a shard behind everybody's back, on one rank alone. A CPU makes the frame again before it is sent; on a
    GPU the step uses the old one, and ends with an error that names parameter and rank, on all ranks."""

    def between(step, engine):
        if step in (1, 3):
            if rank == 1:
                engine.module.layers[2].weight.ds_tensor.data[5:9] *= -3
            return sample_loss(engine)
        return None

    if DEVICE == "cpu":
        run = compare(between, world_size=world_size, unknown_writes=2 * (rank == 1))
        assert run.cache["repairs"] == 2 * (rank == 1), run.cache
    text = error_in(2, between)
    assert "layers.2.weight on rank 1" in text and text.count(" on rank ") == 1, text


def case_training_and_sampling_take_turns(rank, world_size):
    """C86: the bare module runs between steps, and after hooks were set anew; parameters come from the same frames."""

    def between(step, engine):
        before = engine.module(torch.zeros(2, 3, dtype=torch.long)).item().hex() if step == 1 else None
        losses = [sample_loss(engine, seed) for seed in range(3)]
        if step == 4:
            engine.optimizer.parameter_offload._remove_module_hooks()
            engine.optimizer.parameter_offload.setup_zero_stage3_hooks()
        return before, losses

    run = compare(between, world_size=world_size)
    assert run.cache["encodes"] == FRAMED * (STEPS + 1), run.cache


def case_engines_of_one_process(rank, world_size):
    """Two engines share runtime, counters and bound; one ends, the other goes on."""

    def run_two(section):
        losses, engines = [], []
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = Net()
            from tests.train.zero3_cache_helpers import config_for
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_for(section))
            engines.append(engine)
        from tests.train.zero3_cache_helpers import batches, cache_counters
        data = batches(rank)
        for step in range(8):
            for engine in engines[:1] if step > 5 else engines:
                loss = engine(next(data))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item().hex())
            if step == 5:
                held = cache_counters().get("held_bytes", 0)
                engines[1].destroy()
                assert cache_counters().get("held_bytes", 0) == held // 2
        counters = cache_counters()
        engines[0].destroy()
        if counters:
            assert cache_counters()["held_bytes"] == 0 and not hasattr(engines[0], ATTRIBUTE)
        from ds_zipccl.backend import deepspeed_hooks
        deepspeed_hooks.deactivate()
        return losses, counters

    cached, counters = run_two(CACHED)
    assert counters["unknown_writes"] == 0
    assert cached == run_two({**CACHED, "cache_params": False})[0]


class Quantizer:
    """Stands for DeepSpeed's, which is built for GPUs alone: int8, one scale for what is quantized at once."""
    Symmetric = None

    def quantize(self, data, *_):
        scale = (data.float().abs().max() / 127).clamp(min=1e-30).view(1)
        return (data.float() / scale).round().to(torch.int8), scale

    def dequantize(self, data, scales, *_, dtype=torch.bfloat16):
        """Equal parts, a scale for each; the last part may be cut short."""
        each = scales.repeat_interleave(-(-data.numel() // scales.numel()))[:data.numel()]
        return (data.float().view(-1) * each).view(data.shape).to(dtype)

    def swizzle_quant(self, data, groups, bits, kind, pipelines, nodes, ranks):
        assert ranks == 1
        parts, scales = zip(*map(self.quantize, data.view(nodes, -1)), strict=True)
        return torch.cat(parts), torch.cat(scales)

    def quantized_reduction(self, data, scales, *_):
        return data, scales                 # of one rank


class Even(Net):
    """Without padding: DeepSpeed leaves it as it finds it, and quantizes it with the rest."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(96, 64)


def case_quantized_by_zero_plus_plus(rank, world_size):
    """C70: what ZeRO++ has made small travels as it is, the rest as without it: its settings win. Every rank is a node of its own."""
    with (mock.patch.object(partition_parameters, "CUDAQuantizer", Quantizer),
          mock.patch.object(type(get_accelerator()), "device_count", lambda self: 1),
          mock.patch.object(coalesced_collectives, "quantizer_module", Quantizer())):
        for quantized, op in (("weights", "all_gather_into_tensor"), ("gradients", "all_to_all_single")):
            run = compare(world_size=world_size, make=Even, extra={"zero_optimization": {f"zero_quantized_{quantized}": True}}, steps=3)
            cache, row = run.cache, run.ops[op]
            assert row["native_reasons"]["dtype"] > 0, run.ops
            if quantized == "weights":
                assert set(cache["bypassed"]) == {"quantized"} and cache["encodes"] == cache["held_bytes"] == 0, cache
                assert run.ops["reduce_scatter_tensor"]["calls_zipped"] > 0
            else:
                assert cache["shards"] > 0 and row["calls_zipped"] == 0 and "quantized" not in cache["bypassed"], run


def case_nans_end_the_step_on_all_ranks(rank, world_size):
    """C50: of one rank's gradients, and of its shard of a parameter that would be gathered as a kept frame."""
    section = {**CACHED, "nan_check": "error"}
    for stage in (1, 2, 3):
        for what in ("gradient", "shard")[:1 + (stage == 3)]:
            config = config_for(section)
            config["zero_optimization"]["stage"] = stage
            torch.manual_seed(0)
            model = Net()
            engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
            data = batches(rank)
            for step in range(3):
                if (step, what, rank) == (2, "shard", 1):
                    model.layers[1].weight.ds_tensor[5] = float("nan")
                with pytest.raises(CollectiveError) if step == 2 else contextlib.nullcontext() as error:
                    for _ in range(engine.gradient_accumulation_steps()):
                        loss = engine(next(data))
                        engine.backward(loss * (float("nan") if (step, what, rank) == (2, "gradient", 1) else 1))
                        engine.step()
            text = str(error.value)
            assert "NaNs in what ranks are about to send" in text and " on rank 1, the first at element" in text, text
            assert "on rank 0" not in text, text
            texts = [None] * world_size
            dist.all_gather_object(texts, text)
            assert len(set(texts)) == 1, texts
            if stage == 3:
                assert set(cache_counters()["bypassed"]) == {"nan_check"}, cache_counters()
            engine.destroy()
            deepspeed_hooks.deactivate()


def case_padding_is_no_nan(rank, world_size):
    """C50: what DeepSpeed pads shards and buckets with is memory that nobody has written. Here all such memory is NaNs."""
    empty = torch.empty

    def of_nans(*args, **kwargs):
        t = empty(*args, **kwargs)
        return t.fill_(float("nan")) if t.is_floating_point() and not t.is_meta else t

    plain = train({**CACHED, "cache_params": False})
    with mock.patch.object(torch, "empty", of_nans):
        assert_same(train({**CACHED, "nan_check": "error"}), plain)


class Files:
    """Stands for DeepSpeed's asynchronous I/O, which needs libaio and takes minutes to build: what was asked for is done by ``wait``."""

    def __init__(self, **settings):
        self.asked, self.reads, self.writes = [], 0, 0

    def async_pread(self, buffer, path, offset):
        self.asked.append((True, buffer, path))
        return 0

    def async_pwrite(self, buffer, path, offset):
        self.asked.append((False, buffer, path))
        return 0

    def wait(self):
        asked, self.asked = self.asked, []
        for is_read, buffer, path in asked:
            data = buffer.view(torch.uint8).numpy()
            if is_read:
                found = Path(path).read_bytes()
                data[:] = memoryview(found)[:data.size]
            else:
                Path(path).write_bytes(data.tobytes())
            Files.counts[is_read] += 1
        return len(asked)

    def new_cpu_locked_tensor(self, numel, like):
        return torch.empty(numel, dtype=like.dtype, device="cpu")

    def is_pinned(self, tensor):
        return tensor.device.type == "cpu"


@without_default_device()
def case_parameters_on_nvme_are_bypassed(rank, world_size):
    """Through DeepSpeed's own swapper, to files: the same training as with parameters in memory, each gather without a frame, counted."""
    Files.counts = [0, 0]                   # writes, reads
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    nvme = {"offload_param": {"device": "nvme", "nvme_path": folders[0], "buffer_count": 5, "buffer_size": 16384, "max_in_cpu": 0},
            "offload_optimizer": {"device": "cpu"}}
    extra = {"zero_optimization": nvme, "aio": {"block_size": 1024}, "zero_force_ds_cpu_optimizer": False}
    try:
        with (mock.patch.object(partitioned_param_swapper.AsyncIOBuilder, "load", lambda *_, **how: SimpleNamespace(aio_handle=Files)),
              mock.patch.object(partitioned_param_swapper, "MIN_AIO_BYTES", 1024)):
            run = compare(world_size=world_size, extra=extra, steps=3)
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folders[0])
    assert min(Files.counts) > 20, Files.counts
    assert run.cache["encodes"] == run.cache["held_bytes"] == 0 and set(run.cache["bypassed"]) == {"offload_param_nvme"}, run.cache
    assert run.ops["all_gather_into_tensor"]["calls_zipped"] > 0, run.ops
    plain = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
    in_memory = train(None, config=config_for(None, **plain), steps=3)
    assert in_memory.losses == run.losses and in_memory.parameters == run.parameters
