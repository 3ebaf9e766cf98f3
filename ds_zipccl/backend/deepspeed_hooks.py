"""Switches ZipCCL on from ds_config.json: hooks into DeepSpeedEngine, called by zipscape.activate when DeepSpeed is
imported.

The section is read where every engine is configured, on all ranks at once and before its first collective. Source of
the seam: deepspeed/runtime/engine.py (``_configure_with_arguments``, ``step``), 0.19.8.
"""
import functools
import itertools
import logging
import os

import deepspeed
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_zipccl.backend import (
    deepspeed_comm,
    deepspeed_links,
    deepspeed_reports,
    step_trials,
    zero3_padding,
    zero3_params,
    zero3_reduce,
    zero12,
)
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from ds_zipccl.stats import StepLog
from zipscape import __version__, environment, handshake, row_file
from zipscape.errors import ConfigError, ZipScapeError, describe

log = logging.getLogger("ds_zipccl")
TESTED_DEEPSPEED = ("0.19.8",)
_engine_numbers = itertools.count()
_step_log: StepLog | None = None                    # rank 0's
_comms_report: deepspeed_reports.CommsLoggerReport | None = None


def install(engine_module) -> None:
    """Patches DeepSpeedEngine in its freshly imported module. Patches chain: each calls what it found."""
    cls = engine_module.DeepSpeedEngine
    cls._configure_with_arguments = _after(cls._configure_with_arguments, _on_configured)
    cls.step = _around_step(cls.step)
    zero3_params.install(cls)
    deepspeed_links.install(cls)
    zero12.install()
    zero3_reduce.install()
    zero3_padding.install()


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
        runtime = deepspeed_comm.live_runtime()
        trials = step_trials.of(runtime)
        ends_step = (_step_log is not None or trials is not None) and self.is_gradient_accumulation_boundary()
        result = step(self, *args, **kwargs)
        if ends_step and _step_log is not None:
            deepspeed_reports.to_monitor(self, _step_log.write())
        if ends_step and trials is not None:
            trials.step_ended(self, runtime)
        return result

    return patched


def _on_configured(engine) -> None:
    """Reads the section, agrees with the other ranks, swaps the backend. Raises on every rank alike, before any
    collective: whatever can fail on one rank alone is done before the ranks agree."""
    if deepspeed_comm.live_runtime() is None:
        _close_reports()                        # of a process group that was destroyed
    section = engine._config._param_dict.get("zipccl")
    config, kernels, error = ZipcclConfig(), {}, None
    if section is not None:
        try:
            config = ZipcclConfig.from_section(section)
            if config.enabled:
                environment.check()
                _check_deepspeed()
                _check_running(config)
                _check_log(config)
                kernels = _resolve_kernels(config)
        except ZipScapeError as problem:
            error = problem
        except Exception as problem:        # the other ranks must hear of it, not wait for this one
            log.debug("set-up failed", exc_info=True)
            error = ZipScapeError(describe("ds_zipccl could not be set up", got=f"{type(problem).__name__}: {problem}"))
    _agree(config, error)
    if config.enabled:
        activate(config, kernels)
        launched = os.environ.get("WORLD_SIZE", "1")
        if dist.is_initialized() and dist.get_world_size() == 1 and launched.isdecimal() and int(launched) > 1:
            log.warning("WORLD_SIZE is %s, but this rank is alone in its process group: it trains by itself, and sends nothing", launched)
        if engine._config.compile_config.deepcompile:
            log.warning("DeepCompile calls NCCL from C++, past ds_zipccl: what it gathers and reduces stays uncompressed and uncounted")
    elif deepspeed_comm.live_runtime() is not None:
        log.warning('this engine has no "zipccl" section that is enabled; an earlier one of this process has, and there is one '
                    "communication object: its settings hold for both")


def _check_deepspeed() -> None:
    if deepspeed.__version__ not in TESTED_DEEPSPEED:
        raise ConfigError(describe("ds_zipccl hooks into DeepSpeed's internals and was not tested with this version",
                                   got=deepspeed.__version__, expected=" or ".join(TESTED_DEEPSPEED),
                                   todo="install a tested DeepSpeed, or take the zipccl section out"))


def _check_running(config: ZipcclConfig) -> None:
    running = deepspeed_comm.live_runtime()
    if running is not None and running.config.fingerprint() != config.fingerprint():
        raise ConfigError(describe('a second engine of this process has another "zipccl" section', got=config.model_dump(),
                                   expected=running.config.model_dump(), todo="give all engines the same section"))


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _check_log(config: ZipcclConfig) -> None:
    if _is_first():
        row_file.check(config.log, 'the "zipccl" section is wrong')


def _resolve_kernels(config: ZipcclConfig) -> dict[str, str]:
    """Kernel set per device type in use. An explicit name must serve the accelerator; a GPU process may also gather CPU
    tensors."""
    device_type = deepspeed.accelerator.get_accelerator().device_name()
    if device_type not in ("cpu", "cuda"):
        raise ConfigError(describe("no kernels for this accelerator", got=device_type, expected="cpu or cuda"))
    kernels = {device_type: loader.resolve(config.kernels, device_type, config.level)}
    kernels.setdefault("cpu", loader.resolve("best", "cpu", config.level))
    return kernels


def _agree(config: ZipcclConfig, error: ZipScapeError | None) -> None:
    """All ranks must have the same version and settings; an error on one rank is raised on all."""
    number = next(_engine_numbers)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    name = f"zipccl/{number}"
    record = {"version": __version__, "config_hash": config.fingerprint(), "enabled": config.enabled,
              "config": config.model_dump(exclude={"log"}), "error": None if error is None else str(error)}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if config.enabled or error is not None:
        handshake.agree(c10d._get_default_store(), rank, world_size, record, name=name)
        return
    try:
        handshake.announce(c10d._get_default_store(), rank, record, name=name, world_size=world_size)
    except Exception:           # a script that does not use us must not fail because of us: some backends have no store
        log.debug("could not tell the other ranks that there is no zipccl section", exc_info=True)


def activate(config: ZipcclConfig, kernels: dict[str, str]) -> Runtime:
    """Makes the process's communication zipped, or keeps it so. All ranks at the same point, after init_distributed.

    Raises ConfigError when the process already runs with other settings. The log of the first engine stays.
    """
    global _step_log, _comms_report
    _check_running(config)
    running = deepspeed_comm.live_runtime()
    if running is not None:
        if running.config.log != config.log and _is_first():
            log.warning("a second engine asks for the log %s; the statistics of the process stay in %s", config.log, running.config.log)
        step_trials.attach(running)             # there is more in a step now
        return running
    runtime = Runtime(config, kernels)
    deepspeed_comm.install(runtime)
    step_trials.attach(runtime)
    _comms_report = deepspeed_reports.CommsLoggerReport(runtime.stats)
    if _is_first():
        log.info("ds_zipccl %s is on: collectives %s, kernels %s", __version__, config.collectives.model_dump(), kernels)
        _step_log = StepLog(config.log, runtime.stats)
    return runtime


def deactivate() -> None:
    """Back to native collectives. All ranks at the same point."""
    deepspeed_comm.uninstall()
    _close_reports()


def _close_reports() -> None:
    global _step_log, _comms_report
    if _comms_report is not None:
        _comms_report.remove()
        _comms_report = None
    if _step_log is not None:
        _step_log.close()
        _step_log = None
