"""What the process groups of backend "zipccl" share in a process: their settings, one Runtime, the agreement of the ranks.

It begins with the first such group and ends with the last: whoever initializes anew may do so with other settings.
"""
import json
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from ds_zipccl.stats import Stats, StepLog
from zipscape import __version__, environment, handshake, row_file
from zipscape.errors import ConfigError, ZipScapeError, describe

log = logging.getLogger("ds_zipccl")
VARIABLE = "ZIPCCL_CONFIG"

_configured: ZipcclConfig | None = None         # by the script; wins over the environment
_current: "_Session | None" = None
_stats = Stats()                                # of the current session, or of the last one


def configure(**fields) -> None:
    """Settings of the torch backend "zipccl": the fields of the "zipccl" section, in place of the environment variable.

    Before init_process_group, on every rank alike. ``enabled`` is True unless given. Raises ConfigError naming every wrong field, or
    when zipccl groups exist already.
    """
    global _configured
    if _current is not None:
        raise ConfigError(describe("ds_zipccl.configure() came too late", got="process groups of backend zipccl that exist already",
                                   todo="call it before init_process_group, or after destroy_process_group"))
    _configured = _parse(fields, "ds_zipccl.configure()")


def statistics() -> dict[str, dict]:
    """{collective: counters} of the process's zipccl groups so far, or of the last ones where none exist now."""
    return _stats.snapshot()


def settings() -> ZipcclConfig:
    """What new groups will use: ``configure``'s word, else ZIPCCL_CONFIG, else the defaults. Raises ConfigError."""
    if _configured is not None:
        return _configured
    text = os.environ.get(VARIABLE, "").strip()
    return _parse(_section(text) if text else {}, VARIABLE)


def _section(text: str):
    """The section in a JSON text or file; of a whole ds_config.json its "zipccl" part."""
    where = VARIABLE
    try:
        if not text.startswith("{"):
            where, text = f"{VARIABLE}={text}", Path(text).read_text()
        section = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(describe("the settings of backend zipccl cannot be read", got=str(error), where=where,
                                   expected='the path of a JSON file, or JSON itself: {"collectives": "always"}')) from None
    return section["zipccl"] if isinstance(section, dict) and "zipccl" in section else section


def _parse(section, where: str) -> ZipcclConfig:
    """Choosing the backend means switching it on; {"enabled": false} makes every call native."""
    config = ZipcclConfig.from_section({"enabled": True, **section} if isinstance(section, dict) else section, where)
    return config if config.enabled else ZipcclConfig.from_section({**section, "collectives": "never"}, where)


def _kernels(config: ZipcclConfig) -> dict[str, str]:
    """An explicit name must serve the GPU where there is one; CPU tensors then take what is best for them."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return {"cpu": loader.resolve("best", "cpu", config.level)} | {device_type: loader.resolve(config.kernels, device_type, config.level)}


class _Session:

    def __init__(self, config: ZipcclConfig, kernels: dict[str, str], writes_log: bool):
        self.runtime = Runtime(config, kernels)
        self.num_groups = 0
        self._log = StepLog(config.log, self.runtime.stats) if config.log is not None and writes_log else None
        self._hook = register_optimizer_step_post_hook(lambda *_: self._log.write()) if self._log else None

    def close(self) -> None:
        if self._log is not None:
            self._hook.remove()
            self._log.close()
        self.runtime.close()


def _prepare(options) -> tuple[ZipcclConfig, dict[str, str]]:
    """Everything that can fail on one rank alone."""
    if _current is not None:
        return _current.runtime.config, _current.runtime.kernels
    environment.check()
    config = settings()
    if _global_rank(options) == 0:
        row_file.check(config.log, "the settings of backend zipccl are wrong", "ds_zipccl.configure or ZIPCCL_CONFIG")
    return config, _kernels(config)


def _global_rank(options) -> int:
    return dist.get_rank() if dist.is_initialized() else options.group_rank


def join(options) -> Runtime:
    """The Runtime for a new group (torch's ``_DistributedBackendOptions``). All ranks of the group come here before they connect.

    Raises HandshakeError with the same text on all of them where one has an error, another version or other settings, or does not come
    within the group's timeout.
    """
    global _current, _stats
    config, kernels, error = ZipcclConfig(enabled=True), {}, None
    try:
        config, kernels = _prepare(options)
    except ZipScapeError as problem:
        error = problem
    except Exception as problem:            # the other ranks must hear of it, not wait for this one
        log.debug("set-up failed", exc_info=True)
        error = ZipScapeError(describe("backend zipccl could not be set up", got=f"{type(problem).__name__}: {problem}"))
    _agree(options, config, error)
    if _current is None:
        _current = _Session(config, kernels, writes_log=_global_rank(options) == 0)
        _stats = _current.runtime.stats
        if _global_rank(options) == 0:
            log.info("backend zipccl %s: collectives %s, kernels %s", __version__, config.collectives.model_dump(), kernels)
    _current.num_groups += 1
    return _current.runtime


def leave(group: dist.ProcessGroup | None, at_once: bool = False) -> None:
    """Ends a group's part: completes what is in flight on ``group`` (None: it never came to life), whatever fails; then raises the first
    failure. With the last group the session ends. All ranks of the group at the same point; or ``at_once``, on this rank alone: what is in
    flight fails."""
    global _current
    session = _current
    try:
        if group is not None:
            (session.runtime.abort if at_once else session.runtime.close)(group)
    finally:
        session.num_groups -= 1
        if session.num_groups == 0:
            _current = None
            session.close()


def _agree(options, config: ZipcclConfig, error: ZipScapeError | None) -> None:
    if options.group_size == 1:
        if error is not None:
            raise error
        return
    # No key is used twice, also where the store outlives its groups. The store counts, not the process: a later group of the same name
    # may have other ranks.
    number = handshake.next_meeting(options.store, options.group_rank, options.group_size, name="torch")
    record = {"version": __version__, "config_hash": config.fingerprint(), "enabled": config.enabled,
              "config": config.model_dump(exclude={"log"}), "error": None if error is None else str(error)}
    handshake.agree(options.store, options.group_rank, options.group_size, record,
                    name=f"torch/{options.group_id}/{options.group_size}/{number}", timeout_s=options.timeout.total_seconds())
