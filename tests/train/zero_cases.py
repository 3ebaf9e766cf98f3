"""Cases run on every rank by test_zero.py: DeepSpeed training, native against zipped, in one process each. Stages 1-2 come before 3,
because after a ZeRO-3 engine torch's F.linear stays replaced in the process."""
import contextlib
import copy
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from unittest import mock

import deepspeed
import deepspeed.comm as deepspeed_dist
import torch
import torch.distributed as dist
from torch import nn

from ds_zipccl.backend import deepspeed_comm, deepspeed_hooks
from ds_zipccl.collectives import reduce_scatter, transport
from tests.helpers.bits import assert_same_bits
from tests.zipccl.collective_helpers import flip, payloads_by_torch, spoiled
from zipscape.errors import ZipScapeError

WIDTH, VOCAB, STEPS = 96, 61, 4
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ZIPPED = {"enabled": True, "collectives": "always", "min_bytes": 1024, "transport": "process_group"}


class Net(nn.Module):
    """Embedding, three layers with an odd-sized bias, an untied head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def settings(stage: int, dtype: str, **extra) -> dict:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
              "zero_optimization": {"stage": stage, "reduce_bucket_size": 20000, "stage3_param_persistence_threshold": 0,
                                    "stage3_prefetch_bucket_size": 20000},
              "steps_per_print": 10**9, **extra}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def train(config: dict, stage: int, steps: int = STEPS, model=Net) -> tuple[str, str, dict]:
    """(sha256 of the losses, sha256 of all parameters, zipccl statistics or {}). ``model()`` makes the model."""
    torch.manual_seed(0)
    model = model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config))
    generator = torch.Generator("cpu").manual_seed(100 + dist.get_rank())
    losses, parameters = hashlib.sha256(), hashlib.sha256()
    for _ in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(torch.randint(0, VOCAB, (4, 7), generator=generator, device="cpu").to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.update(loss.item().hex().encode())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        for parameter in model.parameters():
            parameters.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    live = deepspeed_comm.live_runtime()
    stats = live.stats.snapshot() if live else {}
    engine.destroy()
    deepspeed_hooks.deactivate()
    return losses.hexdigest(), parameters.hexdigest(), stats


def compare(stage: int, dtype: str, world_size: int) -> None:
    native = train(settings(stage, dtype), stage)
    zipped = train(settings(stage, dtype, zipccl=ZIPPED), stage)
    control = train(settings(stage, dtype), stage)
    assert native[:2] == control[:2], "native training is not repeatable here, so nothing can be compared"
    assert not native[2] and zipped[2], "the section switched nothing on, or stayed on"
    gather = zipped[2]["all_gather_into_tensor"]
    if dtype == "bf16":
        assert gather["calls_zipped"] > 0 and gather["zipped_raw_bytes"] / gather["zipped_wire_bytes"] > 1.1, gather
        if stage == 3:
            assert zipped[2]["reduce_scatter_tensor"]["calls_zipped"] > 0
    else:
        assert gather["calls_zipped"] == 0 and gather["native_reasons"].get("dtype"), gather
    if world_size == 2 or dtype == "fp32":      # beyond 2 ranks the reduction's order differs from native's
        assert native[:2] == zipped[:2], f"stage {stage} {dtype}: losses or parameters differ from native"


def case_stage_1_fp32(rank, world_size):
    compare(1, "fp32", world_size)


def case_stage_1_bf16(rank, world_size):
    compare(1, "bf16", world_size)


def case_stage_2_fp32(rank, world_size):
    compare(2, "fp32", world_size)


def case_stage_2_bf16(rank, world_size):
    compare(2, "bf16", world_size)


class WithEmpty(Net):
    """Parameters without elements, in front and at the end. (ZeRO-3 itself fails on them.)"""

    def __init__(self):
        super().__init__()
        self.embedding.nothing, self.nothing = nn.Parameter(torch.empty(0, 7)), nn.Parameter(torch.empty(0))

    def forward(self, tokens):
        return super().forward(tokens) + self.embedding.nothing.sum() + self.nothing.sum()


def case_stage_0_with_parameters_without_elements(rank, world_size):
    """C64; stages 1 and 2: zero12_cases."""
    native, zipped = (train(settings(0, "bf16", **section), 0, model=WithEmpty) for section in ({}, {"zipccl": ZIPPED}))
    assert native[:2] == zipped[:2] and zipped[2]["all_reduce"]["calls_zipped"] > 0, zipped[2]


def case_script_without_section(rank, world_size):
    """Nothing changes: DeepSpeed's own class, no runtime."""
    train(settings(1, "bf16"), 1, steps=1)
    assert deepspeed_comm.live_runtime() is None
    assert type(deepspeed_dist.comm.cdb).__name__ == "TorchBackend"


def case_script_without_section_and_without_store(rank, world_size):
    """Some backends (MPI) have no store to announce through: the script still trains."""
    original = deepspeed_hooks.c10d._get_default_store
    deepspeed_hooks.c10d._get_default_store = lambda: None
    try:
        train(settings(1, "bf16"), 1, steps=1)
    finally:
        deepspeed_hooks.c10d._get_default_store = original


def case_shipped_configs_train(rank, world_size):
    """Every file in configs/ trains as it is, SCAPE's through steps with masks too; stage 3 comes last."""
    documents = [json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))]
    assert len(documents) >= 2
    for document in sorted(documents, key=lambda d: d["zero_optimization"]["stage"]):
        stage = document["zero_optimization"]["stage"]
        assert bool(train(document, stage, steps=2)[2]) == ("zipccl" in document), document
        if document["optimizer"]["type"] == "SCAPE":
            before = train(document, stage, steps=4)[1]
            document["optimizer"]["params"]["dense_warmup_steps"] = 1
            assert train(document, stage, steps=4)[1] != before


def case_fp32_accumulation_in_deepspeeds_bf16_optimizer(rank, world_size):
    """Stage 1 with gradients accumulated in FP32: DeepSpeed's BF16_Optimizer, which reduces them as BF16, by all_reduce."""
    extra = {"data_types": {"grad_accum_dtype": "fp32"}}
    native, zipped = (train(settings(1, "bf16", **extra, **section), 1) for section in ({}, {"zipccl": ZIPPED}))
    assert native[:2] == zipped[:2]
    for op in ("all_reduce", "all_gather_into_tensor"):
        assert zipped[2][op]["calls_zipped"] == STEPS and not zipped[2][op]["calls_native"], zipped[2][op]


@contextlib.contextmanager
def _logged():
    """The texts that the hooks log within."""
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    deepspeed_hooks.log.addHandler(handler)
    try:
        yield texts
    finally:
        deepspeed_hooks.log.removeHandler(handler)


def case_deepcompile_is_warned_of(rank, world_size):
    with _logged() as texts:
        for deepcompile in (False, True):
            model = Net()
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                              config=settings(1, "bf16", zipccl=ZIPPED, compile={"deepcompile": deepcompile}))
            assert sum("DeepCompile" in text for text in texts) == deepcompile, texts
            engine.destroy()
            deepspeed_hooks.deactivate()


def case_second_engine_with_other_section_is_refused(rank, world_size):
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                      config=settings(1, "bf16", zipccl=ZIPPED))
    other = Net()
    try:
        deepspeed.initialize(model=other, model_parameters=other.parameters(),
                             config=settings(1, "bf16", zipccl={**ZIPPED, "min_bytes": 2048}))
    except ZipScapeError as error:
        assert "second engine" in str(error)
    else:
        raise AssertionError("not refused")
    engine.destroy()
    deepspeed_hooks.deactivate()


def case_second_engine_may_differ_in_the_log(rank, world_size):
    """The log is each rank's own affair: that it differs on one rank must not stop that rank alone."""
    live = None
    for log in (None, os.devnull if rank == 1 else None):
        model = Net()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                          config=settings(1, "bf16", zipccl={**ZIPPED, "log": log}))
        live = live or deepspeed_comm.live_runtime()
        assert live is not None and deepspeed_comm.live_runtime() is live
        engine.destroy()
    deepspeed_hooks.deactivate()


def case_native_collectives_work_and_are_counted(rank, world_size):
    """What has no zipped form goes through unchanged, with the bytes that this rank sends."""
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                      config=settings(1, "bf16", zipccl=ZIPPED))
    live, world, last = deepspeed_comm.live_runtime(), world_size, rank == world_size - 1
    assert world == 2
    ones, zeros = (lambda: torch.ones(10)), (lambda: torch.zeros(10))
    both = lambda: [torch.zeros(10), torch.zeros(10)]           # noqa: E731
    ds, group = deepspeed_dist, deepspeed_dist.new_group([0])
    calls = [                                                   # name, call, bytes rank 0 sends, bytes rank 1 sends
        ("all_reduce", lambda: ds.all_reduce(ones()), 40, 40),
        ("reduce", lambda: ds.reduce(ones(), 0), 0, 40),
        ("broadcast", lambda: ds.broadcast(ones(), 1), 0, 40),
        ("all_gather", lambda: ds.all_gather(both(), ones()), 40, 40),
        ("reduce_scatter", lambda: ds.reduce_scatter(zeros(), both()), 40, 40),
        ("all_to_all_single", lambda: ds.all_to_all_single(zeros(), ones()), 20, 20),
        ("all_to_all_single", lambda: ds.all_to_all_single(torch.zeros(9 if last else 11), ones(), [4, 5] if last else [6, 5],
                                                           [5, 5] if last else [6, 4]), 16, 20),
        ("gather", lambda: ds.gather(ones(), None if last else both(), 0), 0, 40),
        ("scatter", lambda: ds.scatter(zeros(), None if last else both(), 0), 40, 0),
    ]
    for op, call, *sent in calls:
        before = live.stats.snapshot().get(op, {"raw_bytes": 0, "native_reasons": {}})
        call()
        after = live.stats.snapshot()[op]
        assert after["raw_bytes"] - before["raw_bytes"] == sent[rank], op
        reason = "not_zipped" if op in ("reduce", "gather", "scatter") else "dtype"
        assert after["native_reasons"][reason] == before["native_reasons"].get(reason, 0) + 1, op
    total, objects = ones(), [None] * world
    ds.all_reduce(total)
    ds.all_gather_object(objects, rank)
    ds.barrier()
    assert total.tolist() == [world] * 10 and objects == list(range(world))
    ds.all_gather_into_tensor(zeros(), zeros(), group=group)
    reason = "not_in_group" if last else "world_size_1"
    assert live.stats.snapshot()["all_gather_into_tensor"]["native_reasons"][reason] >= 1
    engine.destroy()
    deepspeed_hooks.deactivate()


def case_destroy_of_a_group_of_others(rank, world_size):
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                      config=settings(1, "bf16", zipccl=ZIPPED))
    group = deepspeed_dist.new_group([0])
    deepspeed_dist.destroy_process_group(group)          # on rank 1 a placeholder, no group
    assert deepspeed_comm.live_runtime() is not None
    engine.destroy()
    deepspeed_hooks.deactivate()


def _refused(section, rank, world_size) -> str:
    model = Net()
    try:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(1, "bf16", zipccl=section))
    except Exception as error:
        texts = [None] * world_size
        dist.all_gather_object(texts, str(error))
        assert len(set(texts)) == 1, f"ranks were told different things: {texts}"
        assert deepspeed_comm.live_runtime() is None
        return str(error)
    raise AssertionError(f"accepted: {section}")


def case_wrong_section_on_one_rank_is_an_error_on_all(rank, world_size):
    """C130: one clear error, the same on every rank, before any collective."""
    text = _refused({"enabled": True, "min_bytez": 3} if rank == 1 else ZIPPED, rank, world_size)
    assert "min_bytez" in text and "rank 1" in text, text
    text = _refused({"enabled": True, "min_bytes": -5}, rank, world_size)
    assert "min_bytes" in text and "-5" in text and "greater than or equal to 0" in text, text
    text = _refused({**ZIPPED, "min_bytes": 1024 + rank}, rank, world_size)
    assert "min_bytes" in text, text
    others = "cpu" if torch.get_default_device().type == "cuda" else "cuda"
    text = _refused({"enabled": True, "kernels": others}, rank, world_size)
    assert others in text, text
    text = _refused({**ZIPPED, "log": "/no/such/folder/zipccl.jsonl"}, rank, world_size)
    assert "/no/such/folder/zipccl.jsonl" in text and "rank 0" in text, text


def case_unforeseen_failure_on_one_rank_is_an_error_on_all(rank, world_size):
    original = deepspeed_hooks.loader.resolve

    def failing(*_):
        raise PermissionError("no cache for you")

    deepspeed_hooks.loader.resolve = failing if rank == 1 else original
    try:
        text = _refused(ZIPPED, rank, world_size)
    finally:
        deepspeed_hooks.loader.resolve = original
    assert "rank 1" in text and "PermissionError: no cache for you" in text, text


def case_world_of_one(rank, world_size):
    """Nobody to send to: native, counted, no handshake to wait for; a wrong section is still an error."""
    native = train(settings(1, "bf16"), 1)
    zipped = train(settings(1, "bf16", zipccl=ZIPPED), 1)
    assert native[:2] == zipped[:2]
    reasons = [row["native_reasons"] for row in zipped[2].values()]
    assert reasons and all(set(r) == {"world_size_1"} for r in reasons), zipped[2]
    assert "min_bytez" in _refused({"enabled": True, "min_bytez": 3}, rank, world_size)
    for launched in ("1", "2"):                 # C89: a launcher meant more ranks
        with _logged() as texts, mock.patch.dict(os.environ, WORLD_SIZE=launched):
            train(settings(1, "bf16", zipccl=ZIPPED), 1, steps=1)
        assert sum("alone in its process group" in text for text in texts) == int(launched) - 1, texts


def case_stage_3_fp32(rank, world_size):
    compare(3, "fp32", world_size)


def case_stage_3_bf16(rank, world_size):
    compare(3, "bf16", world_size)


def case_stage_3_uses_the_rank_order_sum(rank, world_size):
    """The gradients of a ZeRO-3 step are the documented sum, whatever the number of ranks: checked call by call."""
    checked, inner = [], reduce_scatter.SPEC.flight

    class Checking(inner):
        def begin(self, call):
            everything = torch.empty(world_size, call.input.numel(), dtype=call.input.dtype, device=call.device)     # no default here
            transport.all_gather_bytes(everything.view(torch.uint8).view(-1), call.input.view(torch.uint8).view(-1), call.group).wait()
            rows = everything.view(world_size, world_size, -1)[:, rank].float()
            self.total = rows[0].clone()
            for row in rows[1:]:
                self.total += row
            super().begin(call)

        def finish(self):
            super().finish()
            expected = self.total.bfloat16()
            expected.view(torch.int16)[self.total.isnan()] = 0x7FC0      # garbage padding sums to NaNs
            assert_same_bits(self.call.output.view(-1), expected, "reduce-scatter")
            checked.append(self.call.output.numel())

    object.__setattr__(reduce_scatter.SPEC, "flight", Checking)
    try:
        train(settings(3, "bf16", zipccl=ZIPPED), 3, steps=2)
    finally:
        object.__setattr__(reduce_scatter.SPEC, "flight", inner)
    assert len(checked) > 3


def case_flipped_bit_changes_training(rank, world_size):
    """The comparison can fail: one bit a gather, flipped on the way, changes the hashes or is found corrupt."""
    clean = train(settings(3, "bf16", zipccl=ZIPPED), 3, steps=2)
    from ds_zipccl.collectives import all_gather
    original, calls = all_gather.all_gather_bytes, []

    def flipping(out, own, group):
        work = original(out, own, group)
        calls.append(1)
        if 6 <= len(calls) <= 9:               # the first forward's; the five before it belong to the engine's set-up
            frame = out.view(world_size, -1)[(rank + 1) % world_size]
            return spoiled(work, lambda: flip(frame, -128 - 1024, 0x80))        # sign of the first element of the last block
        return work

    all_gather.all_gather_bytes = flipping
    try:
        with payloads_by_torch():
            flipped = train(settings(3, "bf16", zipccl=ZIPPED), 3, steps=2)
    finally:
        all_gather.all_gather_bytes = original
    assert len(calls) >= 9 and flipped[0] != clean[0], "a flipped bit went unseen"


def case_new_process_group_starts_afresh(rank, world_size):
    """After destroy_process_group nothing of the old engine is left: class, statistics, log. Must be last."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        log = Path(folders[0], "log.jsonl")
        model = Net()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                          config=settings(1, "bf16", zipccl={**ZIPPED, "log": str(log)}))
        run_one_step(engine)
        rows = log.read_text().count("\n") if rank == 0 else None
        assert rows in (1, None)
        first = deepspeed_comm.live_runtime()
        engine.destroy()
        dist.barrier()
        deepspeed_dist.destroy_process_group()
        assert deepspeed_comm.live_runtime() is None and not first._groups
        store = dist.FileStore(str(Path(folders[0], "store")), world_size)
        backend = "nccl" if torch.get_default_device().type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        deepspeed_dist.init_distributed(backend, verbose=False)
        model = Net()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                          config=settings(1, "bf16", zipccl=ZIPPED))
        run_one_step(engine)
        second = deepspeed_comm.live_runtime()
        assert second is not first and second.stats.snapshot()["all_gather_into_tensor"]["calls_zipped"] > 0
        if rank == 0:
            assert log.read_text().count("\n") == rows, "the old log was written to"
        engine.destroy()
        deepspeed_hooks.deactivate()
        dist.barrier()


def run_one_step(engine) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.zeros(4, 7, dtype=torch.long)))
        engine.step()
