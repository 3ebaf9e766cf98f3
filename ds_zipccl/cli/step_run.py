"""Trains a GPT for a few DeepSpeed steps and measures them: one rank's part of ``ds_zipccl bench step``."""
import contextlib
import functools
import gc
import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_zipccl.cli import step_trace
from ds_zipccl.cli.step_model import GPT, SIZES

TRACED_STEPS = 2
#: Methods of DeepSpeed's backend -> (how many times (W - 1) / W of what is given a rank sends, 0: W times; where that stands); its names.
_SENT = {"all_reduce": (2, 0), "all_reduce_coalesced": (2, 0), "broadcast": (1, 0), "reduce": (1, 0), "reduce_scatter": (1, 1),
         "reduce_scatter_tensor": (1, 1), "all_to_all_single": (1, 1), "all_to_all": (1, 1), "all_gather": (0, 1),
         "all_gather_into_tensor": (0, 1), "all_gather_coalesced": (0, 1)}
_GIVEN = ("input_tensors", "input_tensor", "input_list", "input_tensor_list", "input", "tensors", "tensor")


@dataclass(frozen=True)
class Job:
    """What is trained: the rest of the configuration is ``config``."""
    model: str
    seq_len: int
    micro_batch: int
    config: dict
    steps: int
    warmup: int
    device: str


class Training:
    """An engine and its data. ``losses``: of the steps so far, in hex."""

    def __init__(self, job: Job):
        import deepspeed

        self._job, self._on_gpu = job, job.device == "cuda"
        torch.manual_seed(1)
        with torch.device(job.device):
            model = GPT(SIZES[job.model], job.seq_len)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=job.config)
        self._generator, self.losses = torch.Generator("cpu").manual_seed(100 + dist.get_rank()), []

    def steps(self, count: int, mark=lambda: None) -> list[float]:
        """Milliseconds of each, begun and ended by all ranks together. mark: called before and after the optimizer's part of each."""
        return [self._step(mark) for _ in range(count)]

    def _step(self, mark) -> float:
        shape = self._job.micro_batch, self._job.seq_len + 1
        tokens = torch.randint(SIZES[self._job.model].vocab, shape, generator=self._generator, device="cpu").to(self.engine.device)
        self._settle()
        dist.barrier()
        self._settle()
        start = time.perf_counter()
        loss = self.engine(tokens)
        self.engine.backward(loss)
        mark()
        self.engine.step()
        mark()
        self._settle()
        took = time.perf_counter() - start
        self.losses.append(float(loss).hex())
        return took * 1e3

    def _settle(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def run(job: Job) -> dict:
    """Steps on this rank, in the default process group; the same ``times_ms`` (of the slowest rank) and ``step_ms`` (their median) on every
    rank, and its own rest:

    ``losses`` (hex, one a step, warm-up included), ``num_parameters``, ``memory_bytes`` (peak on the device in the measured steps; None on
    a CPU), ``trace`` (``step_trace.summarize``; None on a CPU), ``ops`` (ZipCCL's counters per step; {} where it is off), ``sent_bytes``
    (by collective, what this rank sends to others in a step if nothing is zipped).
    """
    from ds_zipccl.backend import deepspeed_comm, deepspeed_hooks
    training, traced, on_gpu = Training(job), None, job.device == "cuda"
    training.steps(job.warmup)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    runtime = deepspeed_comm.live_runtime()
    before = runtime.stats.snapshot() if runtime else {}
    times = _slowest(training.steps(job.steps), job.device)
    after = runtime.stats.snapshot() if runtime else {}
    with _sent_bytes() as sent:
        training.steps(1)
    found = {"step_ms": statistics.median(times), "times_ms": times, "num_parameters": training.num_parameters, "memory_bytes": None,
             "trace": None, "ops": _per_step(before, after, job.steps), "sent_bytes": dict(sent)}
    if on_gpu:
        found["memory_bytes"] = torch.cuda.max_memory_allocated()
        traced = functools.partial(training.steps, TRACED_STEPS, step_trace.mark)
        found["trace"] = step_trace.summarize(step_trace.record(traced), TRACED_STEPS)
    found["losses"] = training.losses
    training.engine.destroy()
    if runtime:
        deepspeed_hooks.deactivate()
    training = traced = None
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return found


def prepare(device: str) -> None:
    """Before DeepSpeed is imported."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)            # losses are compared by bits
    torch.utils.deterministic.fill_uninitialized_memory = False         # which that would do to whatever torch.empty gives


@contextlib.contextmanager
def _sent_bytes():
    """{collective: bytes}, filled by what DeepSpeed is asked for inside: what rings send, on an average over the ranks."""
    import deepspeed

    backend, sent = deepspeed.comm.comm.cdb, Counter()

    def counting(name, method):
        times, place = _SENT[name]

        def call(*args, **kwargs):
            given = next((kwargs[key] for key in _GIVEN if kwargs.get(key) is not None), None)
            given = args[place] if given is None else given
            num_ranks = dist.get_world_size(kwargs.get("group"))
            size = sum(t.numel() * t.element_size() for t in ([given] if isinstance(given, torch.Tensor) else given))
            sent[name] += size * (times or num_ranks) * (num_ranks - 1) // num_ranks
            return method(*args, **kwargs)

        return call

    methods = {name: getattr(backend, name) for name in _SENT if hasattr(backend, name)}
    for name, method in methods.items():
        setattr(backend, name, counting(name, method))
    try:
        yield sent
    finally:
        for name in methods:
            delattr(backend, name)


def _slowest(times: list[float], device: str) -> list[float]:
    mine = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.tolist()


def _per_step(before: dict, after: dict, num_steps: int) -> dict:
    """Calls and bytes of every operation a step."""
    names = ("calls_zipped", "calls_native", "raw_bytes", "wire_bytes", "overflows")
    return {op: {name: (row[name] - before.get(op, {}).get(name, 0)) / num_steps for name in names} for op, row in after.items()}
