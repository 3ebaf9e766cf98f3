"""An engine's collectives go one way or another from one step to the next, so that ways are compared within a minute and on the same
weights; and its weights and optimizer state can be put back."""
import torch
import torch.distributed as dist

from ds_zipccl.backend import deepspeed_comm, deepspeed_links, step_trials, zero3_params
from ds_zipccl.backend.deepspeed_comm import deepspeed_comm as seam
from ds_zipccl.backend.zero3_params import ZeroParamStatus
from ds_zipccl.cli.step_runs import SILENT
from ds_zipccl.collectives import held
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader

SMALL_BYTES = 1 << 16


class Way:
    """How an engine's collectives go: ``section`` None natively, SILENT not at all (but for small ones), else as that section says. All
    ranks enter, leave and close at the same points, between steps."""

    def __init__(self, engine, section: dict | str | None, device: str):
        self._engine, self._is_silent, self.runtime = engine, section == SILENT, None
        if isinstance(section, dict):
            config = ZipcclConfig.from_section(section)
            self.runtime = Runtime(config, {kind: loader.resolve(config.kernels, kind, config.level) for kind in {device, "cpu"}})
        self._is_measured = False
        self._is_tried = self.runtime is not None and section.get("step_trials", False)          # others are not disturbed by trials

    @property
    def trials(self) -> step_trials.StepTrials | None:
        return step_trials.of(self.runtime) if self._is_tried else None

    def begin_trial(self, num_before: int) -> None:
        """Where steps are to be tried: anew, after so many. To be called where steps become others; the way is entered."""
        if self._is_tried:
            step_trials.attach(self.runtime)
            if self.trials is not None:
                self.trials.warm_up = num_before

    def is_trying(self) -> bool:
        """Whether steps are to be made until a trial has ended, or found nothing zipped. The same on every rank."""
        return self.trials is not None and not self.trials.has_answer

    def give_up_trial(self) -> None:
        self.begin_trial(1 << 60)

    def release(self) -> None:
        """Calls go as the switch says, whatever a trial has found."""
        if self.runtime is not None:
            held.release(self.runtime)

    def enter(self) -> None:
        if self._is_silent:
            seam.cdb.__class__ = type("Silent", (_Silent, type(seam.cdb)), {})
        elif self.runtime is not None:
            deepspeed_comm.install(self.runtime)
            zero3_params.attach(self._engine)
            if not self._is_measured:                       # as when an engine is made
                deepspeed_links.measure(self._engine)
                self._is_measured = True

    def leave(self) -> None:
        if self._is_silent:
            seam.cdb.__class__ = type(seam.cdb).__bases__[-1]
        elif self.runtime is not None:
            zero3_params.detach(self._engine)
            deepspeed_comm.take_out()

    def close(self) -> None:
        if self.runtime is not None:
            self.runtime.close()
        self._engine = self.runtime = None


class _Silent:
    """Large collectives fill their outputs from this rank's own data alone, and wait for nobody."""

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if tensor.nbytes < SMALL_BYTES:
            return super().all_reduce(tensor, op, group=group, async_op=async_op)
        return _Done() if async_op else None

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        if output_tensor.nbytes < SMALL_BYTES:
            return super().all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        for row in output_tensor.view(dist.get_world_size(group), -1):
            if row.data_ptr() != input_tensor.data_ptr():
                row.copy_(input_tensor.reshape(-1))
        return _Done() if async_op else None

    def reduce_scatter_tensor(self, output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if input_tensor.nbytes < SMALL_BYTES:
            return super().reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        output_tensor.view(-1).copy_(input_tensor.reshape(dist.get_world_size(group), -1)[dist.get_rank(group)])
        return _Done() if async_op else None


class _Done:
    def wait(self, *_args) -> None:
        pass


class Snapshot:
    """An engine's weights, master weights and optimizer state (of DeepSpeed's ZeRO with an optimizer of torch), as they are between two
    steps: after the first one."""

    def __init__(self, engine):
        self._engine = engine
        self._tensors = [t for _, t in _state(engine)]
        self._names = [name for name, _ in _state(engine)]
        self._saved = [t.clone() for t in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Raises RuntimeError where the engine's tensors are others than they were."""
        found = _state(self._engine)
        if [name for name, _ in found] != self._names:
            raise RuntimeError("an engine has not the parameters at hand that it had when its state was taken")
        for (_, t), saved in zip(found, self._saved, strict=True):
            t.copy_(saved)

    @torch.no_grad()
    def prints(self) -> list[int]:
        """A number for each tensor as it is now, from all its bits."""
        return [print_of(t) for _, t in _state(self._engine)]


def print_of(tensor: torch.Tensor, chunk: int = 1 << 24) -> int:
    """A number from all bits of a contiguous tensor."""
    in_words = tensor.nbytes % 4 == 0 and tensor.storage_offset() * tensor.element_size() % 4 == 0
    flat, total = tensor.reshape(-1).view(torch.int32 if in_words else torch.uint8), 0
    for start in range(0, flat.numel(), chunk):
        part = flat[start:start + chunk].long()
        total = total + (part * torch.arange(start + 1, start + 1 + part.numel(), device=part.device)).sum()
    return int(total)


def _state(engine) -> list[tuple[str, torch.Tensor]]:
    zero, found = engine.optimizer, []
    for i, p in enumerate(engine.module.parameters()):
        if hasattr(p, "ds_tensor"):
            found.append((f"shard {i}", p.ds_tensor.data))
        if getattr(p, "ds_status", ZeroParamStatus.AVAILABLE) == ZeroParamStatus.AVAILABLE:
            found.append((f"parameter {i}", p.data))
    masters = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
    found += [(f"master {i}", t.data) for i, t in enumerate(masters)]
    for i, state in enumerate(zero.optimizer.state.values()):
        found += [(f"{name} {i}", t) for name, t in sorted(state.items()) if isinstance(t, torch.Tensor)]
    return found
