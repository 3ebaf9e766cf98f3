"""ZeRO-3 with ``cache_params``: parameters are gathered as frames that were made once, at the end of the optimizer's step.

The seam is each parameter's ``all_gather_coalesced``, which DeepSpeed calls for every fetch and prefetch of a forward and backward pass;
the functions inside it that copy shards into a flat tensor are closures, so it is replaced as a whole for parameters that have frames and
called for all others. Source: deepspeed/runtime/zero/partition_parameters.py (``_convert_to_deepspeed_param``: ``_all_gather_dtype``,
``_all_gather_sequential``, ``AllGatherCoalescedHandle``), partitioned_param_coordinator.py, 0.19.8. Who writes parameters:
zero3_writers.py.
"""
import functools
import logging
import weakref

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus, get_allgather_dtype

from ds_zipccl.backend import zero3_writers
from ds_zipccl.backend.deepspeed_comm import live_runtime
from ds_zipccl.backend.deepspeed_native import resolve
from ds_zipccl.backend.policy import WORTHWHILE
from ds_zipccl.backend.zero3_writers import ATTRIBUTE
from ds_zipccl.collectives.frame_cache import FrameCache
from ds_zipccl.collectives.frame_slot import CacheStats, Slot
from ds_zipccl.collectives.one_sided import ranges_of_row
from ds_zipccl.collectives.runtime import Runtime

log = logging.getLogger("ds_zipccl")
MAX_SETS = 4096             # of parameters that are gathered together
_stats: "weakref.WeakKeyDictionary[Runtime, CacheStats]" = weakref.WeakKeyDictionary()


def install(engine_class) -> None:
    """Makes every engine keep frames whose section says ``cache_params``. Patches chain."""
    engine_class.__init__ = zero3_writers.after(engine_class.__init__, attach)
    engine_class.destroy = _first(detach, engine_class.destroy)


def attach(engine, *_args, **_kwargs) -> None:
    """Keeps frames of the engine's parameters if the process's section says so. All ranks at the same point."""
    runtime = live_runtime()
    if runtime is not None and runtime.config.cache_params and engine.zero_optimization_stage() == 3:
        zero3_writers.install()
        EngineFrames(engine, runtime)


def _first(then, method):

    @functools.wraps(method)
    def patched(self, *args, **kwargs):
        then(self)
        return method(self, *args, **kwargs)

    return patched


def detach(engine) -> None:
    """Undoes ``attach``."""
    frames = getattr(engine, ATTRIBUTE, None)
    if frames is not None:
        frames.close()


def invalidate(parameters) -> None:
    """For writers of your own: says that this rank has changed the shards (``param.ds_tensor``) of these parameters, outside of
    ``optimizer.step``, ``load_checkpoint``, ``GatheredParameters`` and the ``safe_set_*`` functions. Needs no other rank."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for frames in {getattr(p, ATTRIBUTE, None) for p in parameters} - {None}:
        frames.changed_here(parameters)


def stats_of(runtime: Runtime) -> CacheStats:
    """The counters and the bound that all frame caches of the process share."""
    stats = _stats.get(runtime)
    if stats is None:
        stats = _stats[runtime] = CacheStats(runtime.config.max_cache_bytes)
        runtime.stats.sections["cache_params"] = stats.section
    return stats


class EngineFrames:
    """The frames of one engine's parameters: a FrameCache per partition group."""

    def __init__(self, engine, runtime: Runtime):
        self.runtime, self.stats = runtime, stats_of(runtime)
        self._engine_reason = _engine_reason(engine, runtime)
        self._caches: dict[object, FrameCache] = {}
        self._slots: dict[torch.nn.Parameter, tuple[FrameCache, list[Slot]]] = {}       # of one shard, one behind the other
        self._reasons: dict[torch.nn.Parameter, str] = {}
        self._originals: dict[torch.nn.Parameter, object] = {}
        self._known: dict[frozenset[int], _Known] = {}
        parameters = {p: name for name, p in engine.module.named_parameters() if hasattr(p, "ds_id")}
        for p in sorted(parameters, key=lambda p: p.ds_id):
            self._enrol(p, parameters[p])
        self._owners = [owner for owner in (engine, engine.optimizer) if owner is not None]
        for owner in self._owners:
            setattr(owner, ATTRIBUTE, self)
        eligible = [[slot for slot in slots if slot.eligible] for _, slots in self._slots.values()]
        log.info("cache_params: %d of %d parameters, about %.1f MiB on this rank, at most %.1f MiB in this process%s",
                 sum(map(bool, eligible)), len(parameters), sum(slot.frame_bytes() for slots in eligible for slot in slots) / 2**20,
                 self.stats.max_bytes / 2**20,
                 f"; bypassed: {self._engine_reason}" if self._engine_reason else "")

    def _enrol(self, p: torch.nn.Parameter, name: str) -> None:
        reason = self._engine_reason or _parameter_reason(p)
        if reason is None:
            group = resolve(p.ds_process_group)
            if group not in self._caches:
                self._caches[group] = FrameCache(self.runtime, group, torch.device(get_accelerator().current_device_name()), self.stats,
                                                 zero3_writers.forward_passes)
            cache = self._caches[group]
            numel, dtype = p.ds_tensor.ds_numel, p.ds_tensor.dtype
            ranges = ranges_of_row(self.runtime.config, dtype, numel, group.size())
            slots = [Slot(name, functools.partial(_range_of, p, *at), at[1] - at[0], dtype) for at in ranges]
            for slot in slots:
                cache.add(slot)
            self._slots[p] = cache, slots
        else:
            self._reasons[p] = reason
        # All of them, since DeepSpeed asks whichever parameter of a set comes first, and that may be another one on another rank.
        self._originals[p] = p.all_gather_coalesced
        p.all_gather_coalesced = functools.partial(self.all_gather_coalesced, p.all_gather_coalesced)
        setattr(p, ATTRIBUTE, self)

    @property
    def groups(self) -> list[torch.distributed.ProcessGroup]:
        """In which frames are gathered, in the order of the model."""
        return list(self._caches)

    # -- gathers

    def all_gather_coalesced(self, original, params, safe_mode: bool = False, quantize: bool = False):
        """Stands for DeepSpeed's function of that name: launches the gather of ``params``, returns a handle with
        ``wait(handle_dependency=True)``."""
        which = frozenset(map(id, params))
        known = self._known.get(which)
        if known is not None and not quantize and self.runtime.held is None and live_runtime() is self.runtime:
            handle = known.launch()
            if handle is not None:
                return handle
        params = sorted(params, key=lambda p: p.ds_id)          # from a set: its order differs between ranks
        why_not = "quantized" if quantize else "switched_off" if live_runtime() is not self.runtime else self.runtime.held
        if why_not is not None:
            self.stats.bypassed[why_not] += len(params)
            return original(params, safe_mode=safe_mode, quantize=quantize)
        by_cache: dict[FrameCache, list] = {}
        others = []
        for p in params:
            if self._has_slot(p):
                by_cache.setdefault(self._slots[p][0], []).append(p)
            else:
                others.append(p)
        handles = []
        for cache, members in by_cache.items():
            gather = self._gather(cache, members)
            if gather is None:
                others.extend(members)
            else:
                handles.append(gather)
        if not others and len(handles) == 1:
            self._know(which, handles[0])
        if others or not handles:
            handles.append(original(sorted(others, key=lambda p: p.ds_id), safe_mode=safe_mode, quantize=quantize))
        return handles[0] if len(handles) == 1 else MultipleAllGatherHandles(handles)

    def _know(self, which: frozenset[int], handle: "_Handle") -> None:
        """After a gather of these parameters, by their ids, alone."""
        cache, slots = self._slots[handle.params[0]][0], [slot for slots in handle.slots for slot in slots]
        gather = cache.known(slots)
        before = self._known.get(which)
        if gather is None or before is not None and before.gather is gather or not handle.outputs:
            return
        if len(handle.outputs) != gather.num_outputs:           # one of them is empty
            return
        if len(self._known) >= MAX_SETS:
            self._known.clear()
        self._known[which] = _Known(handle, gather)

    def _has_slot(self, p) -> bool:
        found = self._slots.get(p)
        reason = self._reasons.get(p, "not_enrolled") if found is None else _present_reason(p, found[1])
        if reason is not None:
            self.stats.bypassed[reason] += 1
        return reason is None

    def _gather(self, cache: FrameCache, params: list):
        for p in params:
            if p.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(p.ds_summary())
        handle = _Handle(params, [self._slots[p][1] for p in params], cache.group.size())
        handle.gather = cache.gather([slot for slots in handle.slots for slot in slots], handle.make_outs, [p.ds_tensor for p in params])
        if handle.gather is None:
            return None
        for p in params:
            p.ds_status = ZeroParamStatus.INFLIGHT
        return handle

    # -- writers

    def changed(self, params=None) -> None:
        """All ranks write these parameters (None: all of the engine) at this point of their program."""
        for cache, slots in self._by_cache(params).items():
            cache.changed(slots)

    def changed_here(self, params=None) -> None:
        """This rank writes these parameters, or moves them."""
        for cache, slots in self._by_cache(params).items():
            cache.changed_here(slots)

    def refresh(self) -> None:
        """Makes the frames of what was written and gathered since they were made. All ranks, at the end of a step."""
        if live_runtime() is self.runtime and self.runtime.held is None:           # what is stale is made at its next gather
            for cache in self._caches.values():
                cache.refresh()

    def free(self) -> None:
        """Gives the memory of this rank's frames back until they are needed again."""
        self._known.clear()
        for cache in self._caches.values():
            cache.free()

    def close(self) -> None:
        """Undoes the constructor."""
        for cache in self._caches.values():
            cache.close()
        for p, original in self._originals.items():
            p.all_gather_coalesced = original
            delattr(p, ATTRIBUTE)
        for owner in self._owners:
            if getattr(owner, ATTRIBUTE, None) is self:
                delattr(owner, ATTRIBUTE)
        self._caches, self._slots, self._originals, self._known, self._owners = {}, {}, {}, {}, []

    def _by_cache(self, params) -> dict[FrameCache, list[Slot]]:
        found: dict[FrameCache, list[Slot]] = {}
        for p in self._slots if params is None else params:
            if p in self._slots:
                cache, slots = self._slots[p]
                found.setdefault(cache, []).extend(slots)
        return found


class _Handle:
    """Of one gather. ``wait`` leaves every parameter whole, in memory of its own."""

    def __init__(self, params: list, slots: list[list[Slot]], world_size: int):
        """``slots``: each parameter's. ``gather``: set by who launches it; ``outputs``: by ``make_outs``, each parameter's."""
        self.params, self.slots, self.world_size, self.gather, self.outputs = params, slots, world_size, None, []

    def make_outs(self) -> list[torch.Tensor]:
        """Each slot's, in the memory of its parameter."""
        device = torch.device(get_accelerator().current_device_name())
        self.outputs = [torch.empty(self.world_size * p.ds_tensor.ds_numel, dtype=p.ds_tensor.dtype, device=device) for p in self.params]
        return [part for out, slots in zip(self.outputs, self.slots, strict=True)
                for part in out.view(self.world_size, -1).split([slot.numel for slot in slots], dim=1)]

    def wait(self, handle_dependency: bool = True) -> None:
        if self.gather is None:
            return
        gather, self.gather = self.gather, None
        gather.wait()
        outputs, self.outputs = self.outputs, []
        for p, out in zip(self.params, outputs, strict=True):
            if p.ds_status != ZeroParamStatus.INFLIGHT:
                raise RuntimeError(f"expected param {p.ds_summary()} to be inflight")
            p.data = out.narrow(0, 0, p.ds_numel).view(p.ds_shape)
            p.ds_status = ZeroParamStatus.AVAILABLE


class _Known:
    """Launches the gather of a handle's parameters again, where ``gather`` can and they and their shards are as they were."""

    def __init__(self, handle: _Handle, gather):
        self.gather, self._of = gather, (handle.params, handle.slots, handle.world_size)
        shards = [p.ds_tensor for p in handle.params]
        self._shards = [(p, shard, shard.numel(), shard.dtype) for p, shard in zip(handle.params, shards, strict=True)]
        self._device = handle.outputs[0].device
        self._sizes = [(out.numel(), out.dtype) for out in handle.outputs]

    def launch(self) -> _Handle | None:
        there, away = PartitionedParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE
        for p, shard, numel, dtype in self._shards:
            if (p.ds_tensor is not shard or p.ds_status is not away or p.ds_secondary_tensor is not None or shard.status is not there
                    or shard.numel() != numel or shard.dtype is not dtype or get_allgather_dtype(p, shard) is not dtype):
                return None
        handle, device = _Handle(*self._of), self._device

        def make_outputs() -> list[torch.Tensor]:
            handle.outputs = [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in self._sizes]
            return handle.outputs

        handle.gather = self.gather.launch(make_outputs)
        if handle.gather is None:
            return None
        for p in handle.params:
            p.ds_status = ZeroParamStatus.INFLIGHT
        return handle


def _range_of(p, start: int, end: int) -> torch.Tensor:
    """Of the parameter's shard as it is now."""
    return p.ds_tensor if end - start == p.ds_tensor.numel() else p.ds_tensor[start:end]


def _engine_reason(engine, runtime: Runtime) -> str | None:
    """Why none of the engine's parameters has a frame: the same on every rank, since it follows from the configuration."""
    zero = engine._config.zero_config
    if runtime.config.collectives.all_gather == "never":
        return "never"
    if runtime.config.nan_check != "off":
        return "nan_check"                          # what is gathered must be seen on its way
    offload = zero.offload_param
    if offload is not None and str(getattr(offload.device, "value", offload.device)) != "none":
        return f"offload_param_{getattr(offload.device, 'value', offload.device)}"      # _cpu, _nvme
    if zero.zenflow is not None:
        return "zenflow"                            # its optimizers write shards while the model computes
    if not zero3_writers.knows(engine.optimizer):
        return "unknown_optimizer"                  # SuperOffload, or somebody's own: writes in functions that are not watched
    if zero.use_all_reduce_for_fetch_params:
        return "use_all_reduce_for_fetch_params"
    return None


def _parameter_reason(p) -> str | None:
    """Why a parameter never gets a frame."""
    if p.ds_zero_partition_world_size == 1:
        return "world_size_1"
    if getattr(resolve(p.ds_process_group), "zips_itself", False):
        return "zips_itself"                        # torch's backend "zipccl": never both on one call
    if p.ds_tensor.dtype not in WORTHWHILE:
        return "dtype"
    if hasattr(p.ds_tensor, "ds_quant_scale"):
        return "quantized"
    if p.nvme_swapper is not None:
        return "nvme"
    return None


def _present_reason(p, slots: list[Slot]) -> str | None:
    """Why a parameter with a frame is gathered without it now: the same on every rank."""
    if p.ds_secondary_tensor is not None:
        return "hpz_secondary"                      # its second copy is gathered, in the node's own group
    shard = p.ds_tensor
    dtype = slots[0].dtype
    if shard.dtype != dtype or shard.numel() != sum(slot.numel for slot in slots) or shard.status != PartitionedParamStatus.AVAILABLE:
        return "shard_replaced"
    return "comm_dtype" if get_allgather_dtype(p, shard) != dtype else None
