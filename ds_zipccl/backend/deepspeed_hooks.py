"""Switches ZipCCL on from ds_config.json: hooks into DeepSpeedEngine, called by zipscape.activate when DeepSpeed is
imported.

The section is read where every engine is configured, on all ranks at once and before its first collective. Source of
the seam: deepspeed/runtime/engine.py (``_configure_with_arguments``, ``step``), 0.19.8.
"""
import functools
import itertools
import logging

import deepspeed
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_zipccl.backend import deepspeed_comm
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from ds_zipccl.stats import StepLog
from zipscape import __version__, handshake
from zipscape.errors import ConfigError, ZipScapeError, describe

log = logging.getLogger("ds_zipccl")
TESTED_DEEPSPEED = ("0.19.8",)
_engine_numbers = itertools.count()
_step_log: StepLog | None = None


def install(engine_module) -> None:
    """Patches DeepSpeedEngine in its freshly imported module. Patches chain: each calls what it found."""
    cls = engine_module.DeepSpeedEngine
    cls._configure_with_arguments = _after(cls._configure_with_arguments, _on_configured)
    cls.step = _around_step(cls.step)


def _after(method, then):

    @functools.wraps(method)
    def patched(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        then(self)
        return result

    return patched


def _around_step(step):

    @functools.wraps(step)
    def patched(self, *args, **kwargs):
        ends_step = _step_log is not None and self.is_gradient_accumulation_boundary()
        result = step(self, *args, **kwargs)
        if ends_step:
            _step_log.write()
        return result

    return patched


def _on_configured(engine) -> None:
    """Reads the section, agrees with the other ranks, swaps the backend. Raises on every rank alike, before any
    collective."""
    section = engine._config._param_dict.get("zipccl")
    config, kernels, error = ZipcclConfig(), {}, None
    if section is not None:
        try:
            config = ZipcclConfig.from_section(section)
            if config.enabled:
                _check_deepspeed()
                kernels = _resolve_kernels(config)
        except ZipScapeError as problem:
            error = problem
    _agree(config, error)
    if config.enabled:
        activate(config, kernels)


def _check_deepspeed() -> None:
    if deepspeed.__version__ not in TESTED_DEEPSPEED:
        raise ConfigError(describe("ds_zipccl hooks into DeepSpeed's internals and was not tested with this version",
                                   got=deepspeed.__version__, expected=" or ".join(TESTED_DEEPSPEED),
                                   todo="install a tested DeepSpeed, or take the zipccl section out"))


def _resolve_kernels(config: ZipcclConfig) -> dict[str, str]:
    """Kernel set per device type in use. An explicit name must serve the accelerator; a GPU process may also gather CPU
    tensors."""
    device_type = deepspeed.accelerator.get_accelerator().device_name()
    if device_type not in ("cpu", "cuda"):
        raise ConfigError(describe("no kernels for this accelerator", got=device_type, expected="cpu or cuda"))
    kernels = {device_type: loader.resolve(config.kernels, device_type)}
    kernels.setdefault("cpu", loader.resolve("best", "cpu"))
    return kernels


def _agree(config: ZipcclConfig, error: ZipScapeError | None) -> None:
    """All ranks must have the same version and settings; an error on one rank is raised on all."""
    number = next(_engine_numbers)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    record = {"version": __version__, "config_hash": config.fingerprint(), "enabled": config.enabled,
              "config": config.model_dump(exclude={"log"}), "error": None if error is None else str(error)}
    store, rank, world_size = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    name = f"zipccl/{number}"
    if not config.enabled and error is None:
        handshake.announce(store, rank, record, name=name, world_size=world_size)
    else:
        handshake.agree(store, rank, world_size, record, name=name)


def activate(config: ZipcclConfig, kernels: dict[str, str]) -> Runtime:
    """Makes the process's communication zipped, or keeps it so. All ranks at the same point, after init_distributed.

    Raises ConfigError when the process already runs with other settings.
    """
    global _step_log
    running = deepspeed_comm.live_runtime()
    if running is not None:
        if running.config != config:
            raise ConfigError(describe('a second engine of this process has another "zipccl" section', got=config.model_dump(),
                                       expected=running.config.model_dump(), todo="give all engines the same section"))
        return running
    runtime = Runtime(config, kernels)
    deepspeed_comm.install(runtime)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first:
        log.info("ds_zipccl %s is on: collectives %s, kernels %s", __version__, config.collectives.model_dump(), kernels)
        if config.log is not None:
            _step_log = StepLog(config.log, runtime.stats)
    return runtime


def deactivate() -> None:
    """Back to native collectives. All ranks at the same point."""
    global _step_log
    deepspeed_comm.uninstall()
    if _step_log is not None:
        _step_log.close()
        _step_log = None
