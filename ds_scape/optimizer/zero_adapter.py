"""ZeRO 1 and 2 whose gradients and weights travel by mask.

ZeRO's partitions, master weights and checkpoint files are DeepSpeed's own; what is replaced is everything between a parameter's gradient
and its changed weight (flow.py). Stages 1 and 2 do the same. Source of the seam: deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8.
"""
import logging

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.utils import log_dist
from deepspeed.utils.logging import print_dist

from ds_scape.optimizer import checkpoint, memory
from ds_scape.optimizer.flow import Flow
from ds_scape.optimizer.passage import host_zeros, passage_for
from ds_scape.optimizer.state import FlatState, sync_steps
from ds_scape.optimizer.statistics import StepRows
from ds_scape.optimizer.workspace import joined, parts_of
from ds_scape.sync.partition import TensorSlot, flat_layout
from ds_scape.sync.transport import Transport
from zipscape.errors import ConfigError, ZipScapeError, describe

log = logging.getLogger("ds_scape")


class ScapeZeroOptimizer(stage_1_and_2.DeepSpeedZeroOptimizer):
    """ZeRO 1 and 2 with SCAPE: gradients stay on their rank until the step, nothing is reduced in the backward pass."""

    def __init__(self, init_optimizer, *args, **kwargs):
        super().__init__(init_optimizer, *args, **kwargs)
        if not self._grad_acc_hooks:                        # stage 1 with contiguous_gradients=false makes none
            self.create_gradient_handling_hooks()
        #: This step's gradients so far, per group [W * P], apart from the residuals until they are known to be finite; in one memory, of
        #: which a step makes other use afterwards.
        self._fresh, self.fresh_gradients = joined(self.bit16_groups_flat, self.gradient_accumulation_dtype)
        # One way for all groups: its buffers are all that offload needs on the device.
        passage = passage_for(init_optimizer.params.offload, self.bit16_groups_flat[0].device,
                              sum(flat.numel() for flat in self.bit16_groups_flat))
        self._place_of, self._places, flats = {}, [], []    # where every parameter lies; the same by buffer, with names
        for i, group in enumerate(init_optimizer.param_groups):
            slots = []
            for param, offset, meta in zip(self.round_robin_bit16_groups[i], self.round_robin_bit16_offsets[i],
                                           self.round_robin_bit16_meta[i], strict=True):
                self._place_of[param] = (i, offset)
                slots.append(TensorSlot(offset, meta.numel(), meta.dim()))
            self._places.append([(self.param_names[param], slot.offset, slot.numel)
                                 for param, slot in zip(self.round_robin_bit16_groups[i], slots, strict=True)])
            flats.append(self._flat_state(i, group, slots, init_optimizer.params, passage))
        transport = Transport(comm, self.dp_process_group, comm.get_rank(group=self.dp_process_group),
                              comm.get_world_size(group=self.dp_process_group))
        self.flow = Flow(flats, init_optimizer.params, transport)
        init_optimizer.attach(self.flow)
        self._announce_memory()
        self._is_flushed = self._are_old = self._has_gradients = False      # _are_old: gradients that have entered the residuals
        self._to_finish = None                              # "plain" or "universal": a load whose part for all ranks together is to come
        self._loaded_record, self._loaded_step = None, 0
        self.is_load_finished_later = False
        """Set by the engine's hook, which lets all ranks agree that their files are whole before they do anything together."""
        self.rows: StepRows | None = None
        self.last_row: dict | None = None
        if init_optimizer.params.log is not None and transport.rank == 0:
            self.watch()
        self._lazy_init_hp_params_optimizer_state()

    def _flat_state(self, i, group, slots, params, passage) -> FlatState:
        copies, weight = self.bit16_groups_flat[i], self.single_partition_of_fp32_groups[i]
        weight.grad = None                                  # under offload, a buffer for a gradient that never comes
        layout = flat_layout(slots, copies.numel(), self.partition_count[i], group["density"])
        momentum, square = (torch.zeros_like(weight, requires_grad=False) for _ in range(2))
        last_sync = sync_steps(weight, params, group["density"], passage)
        if passage is None:
            residual = torch.zeros_like(copies, dtype=weight.dtype)
        else:
            residual = host_zeros(copies.numel(), weight.dtype, copies.device, params.offload.pin_memory)
        return FlatState(layout, copies, residual, weight, momentum, square, last_sync, group, params, passage)

    def _announce_memory(self) -> None:
        """Rank 0 says what SCAPE needs on a rank beyond dense ZeRO 1 with gradients of the same type (docs/scape.md, Memory)."""
        print_dist(memory.text(self.flow, self.fresh_gradients[0].element_size()), ranks=[0])

    def watch(self) -> None:
        """Statistics of every step from now on, in ``last_row`` and in the log."""
        self.rows = self.rows or StepRows(self.flow, self.optimizer.params.log)

    @property
    def ahead_counts(self) -> dict[str, int] | None:
        """With "ahead": this rank's steps with masks so far, "ahead_taken" and, by reason, "ahead_not_taken_..." (docs/scape.md)."""
        return None if self.flow._ahead is None else self.flow._ahead.counts()

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
        if param.grad.is_sparse:
            raise ConfigError(describe("SCAPE does not take sparse gradients", got=f"one of {self.param_names[param]}",
                                       todo="set sparse=False on the embedding"))
        group, offset = self._place_of[param]
        self._has_gradients = True                          # since the last step
        self.fresh_gradients[group].narrow(0, offset, param.numel()).add_(param.grad.view(-1) if param.grad.is_contiguous()
                                                                          else param.grad.reshape(-1))
        param.grad = None
        if self.is_gradient_accumulation_boundary():
            self.flow.gradient_is_complete(self.fresh_gradients, group, offset, offset + param.numel(), self.loss_scale)

    def setup_buckets(self):
        if not self.ready_for_gradients:
            self.micro_step_id += 1
            self.ready_for_gradients = True
            self.flow.prefetch()
            self._clear_gradients()

    def _clear_gradients(self) -> None:
        """For the next step; later, where the last one's work in their memory still goes on."""
        if self._are_old and not self.flow.uses_gradients:
            self._fresh.zero_()
            self._are_old = False

    def zero_grad(self, set_to_none=True):
        """Drops what was collected since the last step, so that a script can go on after a backward pass that failed; earlier micro-steps
        of the next step are dropped with it, as by stock ZeRO 1. (The engine calls this after each step too, when there is nothing.)"""
        super().zero_grad(set_to_none)
        if self._has_gradients:
            self.flow.settle()
            self._fresh.zero_()
            self._has_gradients = self.ready_for_gradients = False

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
        self.flow.prefetch()
        self._clear_gradients()                             # of the step before, if none came since
        result = self.flow.step(self.fresh_gradients, max_norm=self.clip_grad, loss_scale=self.loss_scale,
                                may_overwrite=True)
        self._are_old, self._has_gradients = True, False
        self.ready_for_gradients = False                    # a backward pass that failed has left it
        self._clear_gradients()
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
        print_dist(checkpoint.size_text(self.flow, kind), ranks=[0])
        if kind == "flush" and not self._is_flushed:
            self.flow.flush()
            self._is_flushed = True

    def state_dict(self):
        """All ranks together, where the mean of the residuals is saved."""
        state = super().state_dict()
        kind = self.flow.params.save_residual
        # Asked for without save_checkpoint, nothing was flushed: then nothing may be left out.
        kind = "full" if kind == "flush" and not self._is_flushed else kind
        state["scape"] = checkpoint.make_record(self.flow, kind, self._places)
        return state

    def load_state_dict(self, *args, **kwargs):
        super().load_state_dict(*args, **kwargs)
        if not self.is_load_finished_later:
            self.finish_load()

    def _load_global_state(self, sd):
        super()._load_global_state(sd)
        self._loaded_record = sd.get("scape")

    def _load_legacy_checkpoint(self, state_dict_list, load_optimizer_states=True, load_from_fp32_weights=False):
        super()._load_legacy_checkpoint(state_dict_list, load_optimizer_states, load_from_fp32_weights)
        if load_optimizer_states:
            checkpoint.check_record(self.flow, self._loaded_record)
            self._to_finish = "plain"

    def _load_universal_checkpoint(self, checkpoint_folder, load_optimizer_states, load_from_fp32_weights):
        densities = [group["density"] for group in self.optimizer.param_groups]
        super()._load_universal_checkpoint(checkpoint_folder, load_optimizer_states, load_from_fp32_weights)
        for group, density in zip(self.optimizer.param_groups, densities, strict=True):
            group["density"] = density
        self._loaded_step = self.optimizer.adopt_state()
        self._to_finish = "universal"

    def finish_load(self) -> None:
        """What all ranks do together after each has read its files."""
        kind, record, self._to_finish, self._loaded_record = self._to_finish, self._loaded_record, None, None
        if kind == "plain":
            checkpoint.restore_residuals(self.flow, record, self._places)
        elif kind == "universal":
            self.flow.restart(self._loaded_step)
            lost = checkpoint.restore_from_universal(self.flow, record, self._places)
            self.optimizer.publish_state()
            self._hp_optimizer_states_linked = False
            self._lazy_init_hp_params_optimizer_state()
            if lost:
                log_dist(f"SCAPE: {lost}", ranks=[0], level=logging.WARNING)
            print_dist("SCAPE: loaded a universal checkpoint; the next step runs without masks", ranks=[0])

    def offload_states(self, include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False):
        self.flow.settle()
        super().offload_states(include, device, pin_memory, non_blocking)
        if include is None or OffloadStateTypeEnum.optim_states in include:
            self._move_residuals(device.value)

    def reload_states(self, non_blocking=False):
        self.flow.settle()
        super().reload_states(non_blocking)
        self.optimizer.publish_ages()                       # DeepSpeed brings all of the state to the device
        self._move_residuals(get_accelerator().current_device_name())

    def _move_residuals(self, device) -> None:
        """They go with the optimizer's states; so do the gradients of the step under way."""
        for tensor in (flat.residual for flat in self.flow.flats if flat.passage is None):
            tensor.data = tensor.data.to(device)
        self._fresh = self._fresh.to(device)
        self.fresh_gradients = parts_of(self._fresh, self.bit16_groups_flat)
