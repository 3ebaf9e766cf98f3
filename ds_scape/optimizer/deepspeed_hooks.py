"""What DeepSpeed's engine has to know: ``"type": "SCAPE"`` and ``"ScapeAdamS"`` in ds_config.json, and which class ZeRO 1 and 2 get.

Called by zipscape.activate when deepspeed.runtime.engine is imported. Source of the seam: deepspeed/runtime/engine.py, 0.19.8.
"""
import functools
import hashlib
import itertools
import json
import logging

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.utils import groups
from torch.distributed import distributed_c10d as c10d

from ds_scape.optimizer.refusals import check_engine
from ds_scape.optimizer.scape import SCAPE
from ds_scape.optimizer.scape_adams import ScapeAdamS
from ds_scape.optimizer.zero_adapter import ScapeZeroOptimizer
from zipscape import __version__, handshake, row_file
from zipscape.errors import ConfigError, ZipScapeError, describe

log = logging.getLogger("ds_scape")
TESTED_DEEPSPEED = ("0.19.8",)
#: How much later than the first rank the last one may have read its file, or made its model.
LOAD_TIMEOUT_S = 1800.0
OPTIMIZERS = {"scape": SCAPE, "scapeadams": ScapeAdamS}
#: Numbers of what the ranks agree on, and of engines, so that every agreement has a name of its own; all ranks count alike.
_agreements, _engines = itertools.count(), itertools.count()


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
    engine._load_zero_checkpoint = _loaded_by_all(engine._load_zero_checkpoint)
    engine._broadcast_model = _shaped_alike(engine._broadcast_model)
    engine._configure_basic_optimizer = _constructed_by_all(engine._configure_basic_optimizer)
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


def _loaded_by_all(method):
    """A file that one rank cannot use is an error on all; what ranks must do together comes after that."""

    @functools.wraps(method)
    def _load_zero_checkpoint(self, load_dir, tag, load_optimizer_states=True):
        if not isinstance(self.optimizer, ScapeZeroOptimizer):
            return method(self, load_dir, tag, load_optimizer_states=load_optimizer_states)
        result, error = None, None
        self.optimizer.is_load_finished_later = True
        try:
            if load_optimizer_states and not self.load_universal_checkpoint():
                _check_world_size(self.loaded_checkpoint_dp_world_size, self.seq_dp_world_size)
            result = method(self, load_dir, tag, load_optimizer_states=load_optimizer_states)
        except Exception as problem:
            error = problem
        self.optimizer.is_load_finished_later = False
        _agree(f"checkpoint {next(_agreements)}", {}, error, timeout_s=LOAD_TIMEOUT_S)
        self.optimizer.finish_load()
        return result

    return _load_zero_checkpoint


def _check_world_size(saved: int, present: int) -> None:
    if saved != present:
        raise ConfigError(describe("this checkpoint was saved at another world size", got=f"world size {saved}",
                                   expected=f"world size {present}",
                                   todo="convert it with DeepSpeed's ds_to_universal (saved with save_residual mean or flush it keeps what "
                                        "SCAPE has not sent yet), or load it with load_optimizer_states=False"))


def _shaped_alike(method):
    """Broadcasts of parameters whose shapes differ by rank would wait for ever on a GPU."""

    @functools.wraps(method)
    def _broadcast_model(self):
        number = next(_engines)
        if self.optimizer_name() != SCAPE.__name__ and not isinstance(self.client_optimizer, SCAPE):
            _tell_who_waits(f"model {number}")
        else:
            model = {}
            if not self.pipeline_parallelism and _tensor_parallel_size(self) <= 1:          # refused later, by their name
                named = [(name, str(p.dtype), *p.shape) for name, p in self.module.named_parameters()]
                model = {"parameters": len(named), "elements": sum(p.numel() for p in self.module.parameters()), "shapes": _digest(named)}
            _agree(f"model {number}", model, None, timeout_s=LOAD_TIMEOUT_S)
        return method(self)

    return _broadcast_model


def _tell_who_waits(about: str) -> None:
    """There: this rank's engine has another optimizer."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        try:
            handshake.announce(c10d._get_default_store(), torch.distributed.get_rank(),
                               {"version": __version__, "config_hash": None, "error": None, "enabled": False},
                               name=f"scape/{about}", world_size=torch.distributed.get_world_size())
        except Exception:           # a script that does not use us must not fail because of us: some backends have no store
            log.debug("could not tell the other ranks that this engine's optimizer is not SCAPE", exc_info=True)


def _constructed_by_all(method):
    """Parameters that are wrong on one rank alone are an error on all."""

    @functools.wraps(method)
    def _configure_basic_optimizer(self, model_parameters):
        try:
            return method(self, model_parameters)
        except ZipScapeError as error:
            if self.optimizer_name() != SCAPE.__name__:
                raise
            _agree(f"settings {next(_agreements)}", {}, error)

    return _configure_basic_optimizer


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
            if not any(map(_is_trained, basic_optimizer.param_groups)):
                raise ConfigError(describe("SCAPE was given nothing to train", got="frozen and empty parameters alone"))
            check_engine(self, groups._get_sequence_parallel_world_size(), _tensor_parallel_size(self))
        except Exception as problem:        # the other ranks must hear of it, not wait for this one
            error = problem
        _agree(f"settings {next(_agreements)}", _settings(basic_optimizer), error)
        if not self.zero_optimization():
            return method(self, basic_optimizer)
        # ZeRO cannot flatten a group in which nothing is trained.
        basic_optimizer.param_groups[:] = [group for group in basic_optimizer.param_groups if _is_trained(group)]
        # The engine's own choice for bf16 with fp32 accumulation at stage 1 would be a wrapper without partitions of ours.
        return zero_optimization

    return _do_optimizer_sanity_check


def _is_trained(group: dict) -> bool:
    return any(p.requires_grad and p.numel() for p in group["params"])


def _check_log(path: str | None) -> None:
    """Before the ranks agree: what fails on rank 0 alone must be heard by all."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        row_file.check(path, "SCAPE's log cannot be written")


def _tensor_parallel_size(engine) -> int:
    sizes = [engine.autotp_size()]
    if engine.mpu is not None and hasattr(engine.mpu, "get_model_parallel_world_size"):
        sizes.append(engine.mpu.get_model_parallel_world_size())
    return max(sizes)


def _settings(optimizer: SCAPE) -> dict:
    """What must be equal on all ranks."""
    keys = ("lr", "betas", "eps", "weight_decay", "density")
    groups_ = [{**{key: group[key] for key in keys}, "numels": _digest([p.numel() for p in group["params"] if p.requires_grad])}
               for group in optimizer.param_groups]
    return {**optimizer.params.model_dump(exclude={"log"}), "groups": groups_}


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _agree(about: str, config: dict, error: Exception | None, timeout_s: float = 60.0) -> None:
    """All ranks come here together. An error on one rank is raised on all, with one text; so are settings that differ. ``about``: a name
    of its own each time."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        if error is not None:
            raise error
        return
    text = error if error is None or isinstance(error, ZipScapeError) else f"{type(error).__name__}: {error}"
    record = {"version": __version__, "config_hash": _digest(config), "enabled": True, "config": config,
              "error": None if text is None else str(text)}
    try:
        handshake.agree(c10d._get_default_store(), torch.distributed.get_rank(), torch.distributed.get_world_size(),
                        json.loads(json.dumps(record, default=str)), name=f"scape/{about}",
                        timeout_s=timeout_s)
    except ZipScapeError as verdict:
        raise verdict from error


def _dispatching(stock):
    """A class in the place of ``stock`` that builds ours for SCAPE and exactly ``stock`` for everything else."""

    class DeepSpeedZeroOptimizer(stock):

        def __new__(cls, init_optimizer, *args, **kwargs):
            # What is returned is no instance of cls, so Python does not call __init__ again.
            if isinstance(init_optimizer, SCAPE):
                return ScapeZeroOptimizer(init_optimizer, *args, **kwargs)
            return stock(init_optimizer, *args, **kwargs) if cls is DeepSpeedZeroOptimizer else super().__new__(cls)

    return DeepSpeedZeroOptimizer
