"""The seam to DeepSpeed: ``"type": "SCAPE"`` in ds_config.json, and ZeRO 1 and 2 whose gradients and weights travel by mask.

Called by zipscape.activate when deepspeed.runtime.engine is imported. ZeRO's partitions, master weights and checkpoint files are
DeepSpeed's own; what is replaced is everything between a parameter's gradient and its changed weight (optimizer/flow.py). Stages 1 and 2 do
the same.
Sources of the seam: deepspeed/runtime/engine.py, deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8.
"""
import functools
import hashlib
import itertools
import json
import logging

import deepspeed
import torch
import torch.distributed
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.utils import groups
from torch.distributed import distributed_c10d as c10d

from ds_scape.optimizer.checkpoint import announce_size, residual_record, restore_residuals
from ds_scape.optimizer.flow import Flow
from ds_scape.optimizer.offload import Passage, host_residual
from ds_scape.optimizer.refusals import check_engine
from ds_scape.optimizer.scape import SCAPE
from ds_scape.optimizer.scape_adams import ScapeAdamS
from ds_scape.optimizer.state import FlatState
from ds_scape.optimizer.statistics import StepRows
from ds_scape.sync.partition import TensorSlot, flat_layout
from ds_scape.sync.transport import Transport
from zipscape import __version__, handshake
from zipscape.errors import ConfigError, ZipScapeError, describe

log = logging.getLogger("ds_scape")
TESTED_DEEPSPEED = ("0.19.8",)
OPTIMIZERS = {"scape": SCAPE, "scapeadams": ScapeAdamS}
_engine_numbers = itertools.count()


def install(engine_module) -> None:
    """Makes DeepSpeed know the optimizers. Patches chain: each calls what it found."""
    for cls in OPTIMIZERS.values():
        setattr(torch.optim, cls.__name__, cls)             # the engine looks names up there
        if cls not in zero_utils.ZERO_SUPPORTED_OPTIMIZERS:
            zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(cls)
    engine = engine_module.DeepSpeedEngine
    engine.optimizer_name = _any_case(engine.optimizer_name)
    engine.step = _monitored(engine.step)
    engine.save_checkpoint = _announced(engine.save_checkpoint)
    engine._do_optimizer_sanity_check = _checked(engine._do_optimizer_sanity_check, engine_module.ZERO_OPTIMIZATION)
    engine_module.DeepSpeedZeroOptimizer = _dispatching(engine_module.DeepSpeedZeroOptimizer)


def _any_case(method):

    @functools.wraps(method)
    def optimizer_name(self):
        name = method(self)
        known = OPTIMIZERS.get(name.lower()) if isinstance(name, str) else None
        return known.__name__ if known else name

    return optimizer_name


def _monitored(method):
    """Writes the statistics of a step to the engine's monitors."""

    @functools.wraps(method)
    def step(self, *args, **kwargs):
        watched = isinstance(self.optimizer, ScapeZeroOptimizer) and self.monitor.enabled and self.global_rank == 0
        if watched:
            self.optimizer.watch()
        ends_step = watched and (self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation())
        result = method(self, *args, **kwargs)
        if ends_step:
            self.monitor.write_events(self.optimizer.rows.events(self.optimizer.last_row, self.global_samples))
        return result

    return step


def _announced(method):

    @functools.wraps(method)
    def save_checkpoint(self, *args, **kwargs):
        if isinstance(self.optimizer, ScapeZeroOptimizer):
            self.optimizer.prepare_save()
        return method(self, *args, **kwargs)

    return save_checkpoint


def _checked(method, zero_optimization):
    """The engine asks this method which wrapper an optimizer gets; all ranks come here before anything is built."""

    @functools.wraps(method)
    def _do_optimizer_sanity_check(self, basic_optimizer):
        if not isinstance(basic_optimizer, SCAPE):
            return method(self, basic_optimizer)
        error = None
        try:
            if deepspeed.__version__ not in TESTED_DEEPSPEED:
                raise ConfigError(describe("SCAPE hooks into DeepSpeed's internals and was not tested with this version",
                                           got=deepspeed.__version__, expected=" or ".join(TESTED_DEEPSPEED)))
            _check_log(basic_optimizer.params.log)
            check_engine(self, groups._get_sequence_parallel_world_size(), _tensor_parallel_size(self))
        except ZipScapeError as problem:
            error = problem
        except Exception as problem:        # the other ranks must hear of it, not wait for this one
            error = ZipScapeError(describe("SCAPE could not be set up", got=f"{type(problem).__name__}: {problem}"))
        _agree(basic_optimizer, error)
        if not self.zero_optimization():
            return method(self, basic_optimizer)
        trainable = [g for g in basic_optimizer.param_groups if any(p.requires_grad for p in g["params"])]
        basic_optimizer.param_groups[:] = trainable         # ZeRO cannot flatten a group of frozen parameters
        # The engine's own choice for bf16 with fp32 accumulation at stage 1 would be a wrapper without partitions of ours.
        return zero_optimization

    return _do_optimizer_sanity_check


def _check_log(path: str | None) -> None:
    """Before the ranks agree: what fails on rank 0 alone must be heard by all."""
    if path is not None and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0):
        try:
            open(path, "a").close()
        except OSError as error:
            raise ConfigError(describe("SCAPE's log cannot be written", got=f"log = {path!r}: {error.strerror}",
                                       expected="a file that rank 0 can append to", where="ds_config.json")) from None


def _tensor_parallel_size(engine) -> int:
    sizes = [engine.autotp_size()]
    if engine.mpu is not None and hasattr(engine.mpu, "get_model_parallel_world_size"):
        sizes.append(engine.mpu.get_model_parallel_world_size())
    return max(sizes)


def _agree(optimizer: SCAPE, error: ZipScapeError | None) -> None:
    """All ranks must have the same settings; an error on one rank is raised on all."""
    number = next(_engine_numbers)
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        if error is not None:
            raise error
        return
    keys = ("lr", "betas", "eps", "weight_decay", "density")
    config = optimizer.params.model_dump(exclude={"log"})
    config["groups"] = [{key: group[key] for key in keys} for group in optimizer.param_groups]
    fingerprint = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
    record = {"version": __version__, "config_hash": fingerprint, "enabled": True, "config": config,
              "error": None if error is None else str(error)}
    handshake.agree(c10d._get_default_store(), torch.distributed.get_rank(), torch.distributed.get_world_size(),
                    json.loads(json.dumps(record, default=str)), name=f"scape/{number}")


def _dispatching(stock):
    """A class in the place of ``stock`` that builds ours for SCAPE and exactly ``stock`` for everything else."""

    class DeepSpeedZeroOptimizer(stock):

        def __new__(cls, init_optimizer, *args, **kwargs):
            # What is returned is no instance of cls, so Python does not call __init__ again.
            if isinstance(init_optimizer, SCAPE):
                return ScapeZeroOptimizer(init_optimizer, *args, **kwargs)
            return stock(init_optimizer, *args, **kwargs) if cls is DeepSpeedZeroOptimizer else super().__new__(cls)

    return DeepSpeedZeroOptimizer


class ScapeZeroOptimizer(stage_1_and_2.DeepSpeedZeroOptimizer):
    """ZeRO 1 and 2 with SCAPE: gradients stay on their rank until the step, nothing is reduced in the backward pass."""

    def __init__(self, init_optimizer, *args, **kwargs):
        super().__init__(init_optimizer, *args, **kwargs)
        if not self._grad_acc_hooks:                        # stage 1 with contiguous_gradients=false makes none
            self.create_gradient_handling_hooks()
        #: This step's gradients so far, per group [W * P], apart from the residuals until they are known to be finite.
        self.fresh_gradients = [torch.zeros_like(flat, dtype=self.gradient_accumulation_dtype) for flat in self.bit16_groups_flat]
        self._places = {}
        flats = []
        for i, group in enumerate(init_optimizer.param_groups):
            slots = []
            for param, offset, meta in zip(self.round_robin_bit16_groups[i], self.round_robin_bit16_offsets[i],
                                           self.round_robin_bit16_meta[i], strict=True):
                self._places[param] = (i, offset)
                slots.append(TensorSlot(offset, meta.numel(), meta.dim()))
            flats.append(self._flat_state(i, group, slots, init_optimizer.params))
        transport = Transport(comm, self.dp_process_group, comm.get_rank(group=self.dp_process_group),
                              comm.get_world_size(group=self.dp_process_group))
        self.flow = Flow(flats, init_optimizer.params, transport)
        init_optimizer.attach(self.flow)
        self._announce_memory()
        self._is_flushed = False
        self.rows: StepRows | None = None
        self.last_row: dict | None = None
        if init_optimizer.params.log is not None and transport.rank == 0:
            self.watch()
        self._lazy_init_hp_params_optimizer_state()

    def _flat_state(self, i, group, slots, params) -> FlatState:
        copies, weight = self.bit16_groups_flat[i], self.single_partition_of_fp32_groups[i]
        weight.grad = None                                  # under offload, a buffer for a gradient that never comes
        layout = flat_layout(slots, copies.numel(), self.partition_count[i], group["density"])
        momentum, square = (torch.zeros_like(weight, requires_grad=False) for _ in range(2))
        last_sync = torch.zeros_like(weight, dtype=torch.int32, requires_grad=False)
        if not params.offload:
            residual, passage = torch.zeros_like(copies, dtype=weight.dtype), None
        else:
            residual, passage = host_residual(copies.numel(), weight.dtype, copies.device), self._passage(copies.device)
        return FlatState(layout, copies, residual, weight, momentum, square, last_sync, group, params, passage)

    def _passage(self, device) -> Passage:
        """One for all groups: its two buffers are all that offload needs on the device."""
        self._way = getattr(self, "_way", None) or Passage(device)
        return self._way

    def _announce_memory(self) -> None:
        """Rank 0 says what SCAPE holds on this rank beyond dense ZeRO with gradients of the same type."""
        layout, flats = self.flow.layout, self.flow.flats
        residual = sum(flat.residual.numel() * flat.residual.element_size() for flat in flats)
        owner = sum(flat.square.numel() * 4 + flat.last_sync.numel() * 4 for flat in flats)
        positions = 8 * sum(layout.splits(dense=False)) if layout.has_masks else 0
        if self.flow.transport.rank == 0:
            log.info("SCAPE: %.1f MB a rank beyond dense ZeRO: residual %.1f, owner's q and ages %.1f, positions of a mask %.1f",
                     (residual + owner + positions) / 1e6, residual / 1e6, owner / 1e6, positions / 1e6)

    def watch(self) -> None:
        """Statistics of every step from now on, in ``last_row`` and in the log."""
        self.rows = self.rows or StepRows(self.flow, self.optimizer.params.log)

    # --- backward: gradients are collected, never communicated ---------------------------------------------------------------------------
    def process_gradients(self, param, i):
        if not self._coalesce_grad_reduction:
            self.reduce_ready_partitions_and_remove_grads(param, i)

    @torch.no_grad()
    def reduce_ready_partitions_and_remove_grads(self, param, i):
        """Adds one parameter's gradient to its place; the mean over micro-steps comes from the loss, which the engine divides."""
        if param.grad is None or not getattr(param, "ds_grad_is_ready", True):
            return
        self.setup_buckets()
        group, offset = self._places[param]
        self.fresh_gradients[group].narrow(0, offset, param.numel()).add_(param.grad.view(-1) if param.grad.is_contiguous()
                                                                          else param.grad.reshape(-1))
        param.grad = None

    def setup_buckets(self):
        if not self.ready_for_gradients:
            self.micro_step_id += 1
            self.ready_for_gradients = True

    def reduce_gradients(self, pipeline_parallel=False):
        self.overlapping_partition_gradients_reduce_epilogue()

    def independent_gradient_partition_epilogue(self):
        self.ready_for_gradients = False
        self._clear_param_grad_only()
        self._epilogue_ran_this_backward = True

    def backward_epilogue(self, *args, **kwargs):
        pass

    def finalize_gradient_accumulation_boundary(self):
        self.set_gradient_accumulation_boundary(True)

    def _no_dense_reduction(self, *args, **kwargs):
        raise ZipScapeError(describe("DeepSpeed tried to reduce dense gradients under SCAPE",
                                     todo="report this: a path that SCAPE does not know"))

    average_tensor = gradient_reduction_w_predivide = allreduce_bucket = _no_dense_reduction

    # --- step ----------------------------------------------------------------------------------------------------------------------------
    def step(self, closure=None):
        """One optimizer step over all ranks; ``overflow`` tells the engine whether it was skipped."""
        self.micro_step_id = stage_1_and_2.INITIAL_MICRO_STEP_ID
        self.timers(stage_1_and_2.OPTIMIZER_STEP_TIMER).start()
        self._is_flushed = False
        result = self.flow.step(self.fresh_gradients, max_norm=self.clip_grad, loss_scale=self.loss_scale)
        for fresh in self.fresh_gradients:
            fresh.zero_()
        self.overflow = not result.applied
        self._update_scale(self.overflow)
        self._global_grad_norm = result.grad_norm if result.applied else float("inf")
        if self.overflow:
            self._report_skipped(result)
        else:
            self.optimizer.publish_state()
            for i in range(len(self.bit16_groups)):
                self._update_model_bit16_weights(i)
        if self.rows is not None:
            self.last_row = self.rows.row(result)
        self.timers(stage_1_and_2.OPTIMIZER_STEP_TIMER).stop()
        for timer in (stage_1_and_2.OPTIMIZER_GRADIENTS_TIMER, stage_1_and_2.OPTIMIZER_ALLGATHER_TIMER):
            self.timers(timer).start()                      # the engine reads all three
            self.timers(timer).stop()
        self.timers.log(stage_1_and_2.OPTIMIZER_TIMERS)

    def _report_skipped(self, result) -> None:
        expected = self.dtype == torch.float16              # that is how a dynamic loss scale finds its value
        if self.flow.transport.rank == 0:
            log.log(logging.DEBUG if expected else logging.WARNING, "step skipped on all ranks: the gradients of rank %s are not finite",
                    ", ".join(map(str, result.nonfinite_ranks)))

    # --- checkpoints: one ZeRO file per rank, so that what a rank holds alone has its place ---------------------------------------------
    def prepare_save(self) -> None:
        """Before anything is written; all ranks together."""
        kind = self.flow.params.save_residual
        announce_size(self.flow, kind)
        if kind == "flush" and not self._is_flushed:
            self.flow.flush()
            self._is_flushed = True

    def state_dict(self):
        state = super().state_dict()
        kind = self.flow.params.save_residual
        # Asked for without save_checkpoint, nothing was flushed: then nothing may be left out.
        state["scape"] = residual_record(self.flow, "full" if kind == "flush" and not self._is_flushed else kind)
        return state

    def _load_legacy_checkpoint(self, state_dict_list, load_optimizer_states=True, load_from_fp32_weights=False):
        super()._load_legacy_checkpoint(state_dict_list, load_optimizer_states, load_from_fp32_weights)
        if load_optimizer_states:
            restore_residuals(self.flow, state_dict_list[self.flow.transport.rank].get("scape"))

    def _load_universal_checkpoint(self, checkpoint_folder, load_optimizer_states, load_from_fp32_weights):
        """Weights, m and q come from the folder; it has no place for residuals, ages and masks, which start anew."""
        densities = [group["density"] for group in self.optimizer.param_groups]
        super()._load_universal_checkpoint(checkpoint_folder, load_optimizer_states, load_from_fp32_weights)
        for group, density in zip(self.optimizer.param_groups, densities, strict=True):
            group["density"] = density
        self.flow.restart(self.optimizer.adopt_state())
        self.optimizer.publish_state()
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()
        if self.flow.transport.rank == 0:
            log.warning("a universal checkpoint has no residuals: gradients that were waiting when it was saved are lost, unless it was "
                        'saved with "save_residual": "flush"; the next step runs without masks')

    def offload_states(self, include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False):
        super().offload_states(include, device, pin_memory, non_blocking)
        if include is None or OffloadStateTypeEnum.optim_states in include:
            self._move_residuals(device.value)

    def reload_states(self, non_blocking=False):
        super().reload_states(non_blocking)
        self._move_residuals(get_accelerator().current_device_name())

    def _move_residuals(self, device) -> None:
        """They go with the optimizer's states; so do the gradients of the step under way."""
        for tensor in (*self.fresh_gradients, *(flat.residual for flat in self.flow.flats if flat.passage is None)):
            tensor.data = tensor.data.to(device)
