"""Trains a GPT with DeepSpeed and measures its steps: one rank's part of ``ds_zipccl bench step``."""
import contextlib
import gc
import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ds_zipccl.cli import step_trace
from ds_zipccl.cli.step_model import GPT, SIZES
from ds_zipccl.cli.step_runs import Run, engine_config

TRACED_STEPS = 2
#: Methods of DeepSpeed's backend -> (how many times (W - 1) / W of what is given a rank sends, 0: W times; where that stands); its names.
_SENT = {"all_reduce": (2, 0), "all_reduce_coalesced": (2, 0), "broadcast": (1, 0), "reduce": (1, 0), "reduce_scatter": (1, 1),
         "reduce_scatter_tensor": (1, 1), "all_to_all_single": (1, 1), "all_to_all": (1, 1), "all_gather": (0, 1),
         "all_gather_into_tensor": (0, 1), "all_gather_coalesced": (0, 1)}
_GIVEN = ("input_tensors", "input_tensor", "input_list", "input_tensor_list", "input", "tensors", "tensor")
#: The host's part of a step.
PARTS = ("forward", "backward", "optimizer")


def new_host_ms() -> dict[str, list[float]]:
    return {part: [] for part in PARTS}


def prepare(device: str) -> None:
    """Before DeepSpeed is imported."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)            # losses are compared by bits
    torch.utils.deterministic.fill_uninitialized_memory = False         # which that would do to whatever torch.empty gives


class Training:
    """An engine and its data. ``micro_batch`` may be changed between steps."""

    def __init__(self, model: str, stage: int, run: Run, seq_len: int, bucket_size: int, device: str):
        import deepspeed

        self.device, self._size, self._seq_len, self.micro_batch = device, SIZES[model], seq_len, 1
        self.bytes_before = self.allocated()
        torch.manual_seed(1)
        with torch.device(device):
            module = GPT(self._size, seq_len)
        self.num_parameters = sum(p.numel() for p in module.parameters())
        config = engine_config(run, stage, self.micro_batch, bucket_size)
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        self.host_ms = new_host_ms()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def tokens(self, number: int) -> torch.Tensor:
        """Of a step with that number: always the same."""
        generator = torch.Generator("cpu").manual_seed(1000 * number + dist.get_rank())
        shape = self.micro_batch, self._seq_len + 1
        return torch.randint(self._size.vocab, shape, generator=generator, device="cpu").to(self.engine.device)

    def step(self, tokens: torch.Tensor, mark=lambda: None) -> torch.Tensor:
        """Its loss. mark: called before and after the optimizer's part."""
        times = [time.perf_counter()]
        loss = self.engine(tokens)
        times.append(time.perf_counter())
        self.engine.backward(loss)
        times.append(time.perf_counter())
        mark()
        self.engine.step()
        mark()
        times.append(time.perf_counter())
        for part, start, end in zip(PARTS, times, times[1:], strict=False):
            self.host_ms[part].append((end - start) * 1e3)
        return loss.detach()

    def losses(self, count: int, first: int = 0) -> list[str]:
        """Of so many steps' data from the ``first`` on, in hex."""
        return [float(self.step(self.tokens(number))).hex() for number in range(first, first + count)]

    def block(self, num_before: int, num_steps: int) -> float:
        """Milliseconds a step of ``num_steps`` in a row, begun by all ranks together, after ``num_before`` that are not timed."""
        batches = [self.tokens(number) for number in range(num_before + num_steps)]
        for tokens in batches[:num_before]:
            self.step(tokens)
        self.settle()
        dist.barrier()
        self.settle()
        self.host_ms = new_host_ms()
        start = time.perf_counter()
        for tokens in batches[num_before:]:
            self.step(tokens)
        self.settle()
        return (time.perf_counter() - start) * 1e3 / num_steps

    def traced(self) -> dict[str, float] | None:
        """``step_trace.summarize`` of a few steps; None on a CPU. Ranks come out of the profiler's start at times of their own: one step
        is made after it, and they meet, before what is summarized begins."""
        if self.device != "cuda":
            return None
        batches = [self.tokens(number) for number in range(TRACED_STEPS + 1)]

        def steps() -> None:
            self.step(batches[0])
            dist.barrier()
            self.settle()
            step_trace.mark()
            for tokens in batches[1:]:
                self.step(tokens, step_trace.mark)

        return step_trace.summarize(step_trace.record(steps), TRACED_STEPS)

    def sent_bytes(self) -> dict[str, int]:
        """By collective: what this rank sends to others in a step if nothing is zipped."""
        with _sent_bytes() as sent:
            self.step(self.tokens(0))
        return dict(sent)

    def ahead_counts(self) -> dict[str, int] | None:
        """Of SCAPE with "ahead": this rank's steps so far whose residuals passed behind the backward pass, and others by reason."""
        return getattr(self.engine.optimizer, "ahead_counts", None)

    def settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """DeepSpeed's ZeRO-3 leaves functions in classes and a global list that know the engine for ever: what it holds on the device goes
        nevertheless."""
        engine, self.engine = self.engine, None
        engine.destroy()
        optimizer = engine.optimizer
        for p in engine.module.parameters():
            p.grad = None
            for t in (p, getattr(p, "ds_tensor", None)):
                if t is not None:
                    t.data = torch.empty(0, dtype=t.dtype, device=t.device)
        for held in (optimizer.optimizer, optimizer):
            held.__dict__.clear()
        del engine, optimizer, held
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


@dataclass
class Found:
    """Of one run on one cell: ``losses`` of its first steps and ``prints`` of the state after them; ``ahead_before``: ahead_counts() before
    these; ``busiest_bytes``: of a step, see ``zero12.ReduceStats``; the rest as in the rows."""
    losses: list[str]
    prints: list[int] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    host_ms: dict[str, list[float]] = field(default_factory=lambda: new_host_ms())
    trial: dict | None = None
    memory_bytes: int | None = None
    ops: dict = field(default_factory=dict)
    busiest_bytes: int = 0
    sent_bytes: dict = field(default_factory=dict)
    trace: dict | None = None
    ahead_before: dict[str, int] | None = None

    @property
    def step_ms(self) -> float:
        return statistics.median(self.times_ms)

    def take_trial(self, trial: dict, way: str) -> None:
        """Its times are those of a trial's steps, natively or zipped."""
        self.trial, self.times_ms, self.host_ms = trial, trial[f"{way}_ms"], trial[f"{way}_host_ms"]

    def add_block(self, training: Training, num_before: int, num_steps: int) -> None:
        took = training.block(num_before, num_steps)
        self.times_ms.append(slowest([took], training.device)[0])
        for part, times in training.host_ms.items():
            self.host_ms[part].append(statistics.mean(times))


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


def slowest(times: list[float], device: str) -> list[float]:
    """Each the largest of all ranks."""
    mine = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.tolist()


def per_step(before: dict, after: dict, num_steps: int) -> dict:
    """Calls and bytes of every operation a step."""
    names = ("calls_zipped", "calls_one_sided", "calls_native", "raw_bytes", "wire_bytes", "overflows")
    return {op: {name: (row.get(name, 0) - before.get(op, {}).get(name, 0)) / num_steps for name in names} for op, row in after.items()}
