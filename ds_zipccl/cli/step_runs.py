"""What ``ds_zipccl bench step`` can run: optimizers and ways of communication, and which of them are compared."""
import json
from dataclasses import dataclass, field

_BETAS = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
_ADAMW = {"type": "AdamW", "params": _BETAS | {"torch_adam": True, "fused": True}}
_ADAMS = {"type": "ScapeAdamS", "params": _BETAS}
SILENT = "silent"


@dataclass(frozen=True)
class Run:
    """``zipccl``: its section; None: native collectives; SILENT: none but small ones. ``equal``: losses must be those of the first run of
    its engine, at 2 ranks. ``zero``: beside the common settings of "zero_optimization"; ``config``: beside those of it all.
    Runs with the same ``optimizer``, ``zero`` and ``config`` share an engine."""
    optimizer: dict
    rival: str | None = None
    zipccl: dict | str | None = None
    equal: bool = False
    stages: tuple[int, ...] = (1, 2, 3)
    zero: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)

    @property
    def engine_key(self) -> str:
        return json.dumps([self.optimizer, self.zero, self.config], sort_keys=True)


def _scape(density: float, **more) -> dict:
    return {"type": "SCAPE", "params": _BETAS | {"density": density} | more}


_ON = {"enabled": True}
_TRIED = _ON | {"collectives": "adaptive", "step_trials": True}         # judged by whole steps; others as each call is
# Gradients are reduced when backward is done, in buckets ten times as large: as DeepSpeed does if it is not told otherwise.
_LATE = {"overlap_comm": False, "reduce_bucket_size": 500_000_000}
# Elements: fewer and larger gathers, longer ahead (DeepSpeed's default is 50 million), and half as many reduce-scatters as in other runs.
_DEEP = {"stage3_prefetch_bucket_size": 200_000_000, "reduce_bucket_size": 100_000_000}
# Fresh weights' gradients are larger than 1.0 in every step, where DeepSpeed clips if it is not told otherwise; then nothing passes ahead.
_UNCLIPPED = {"gradient_clipping": 0.0}
RUNS = {
    "native": Run(_ADAMW),
    "zipped": Run(_ADAMW, "native", _ON, True),
    "zipped_sums": Run(_ADAMW, "native", _ON | {"deterministic_reduce": False}, True),      # beyond 2 ranks "zipped" leaves sums native
    "cached": Run(_ADAMW, "native", _ON | {"cache_params": True}, True, (3,)),
    "one_sided": Run(_ADAMW, "native", _ON | {"transport": "adaptive"}, True),
    "cached_one_sided": Run(_ADAMW, "native", _ON | {"cache_params": True, "transport": "adaptive"}, True, (3,)),
    "adaptive": Run(_ADAMW, "native", _TRIED, True),
    "adaptive_cached": Run(_ADAMW, "native", _TRIED | {"cache_params": True}, True, (3,)),
    "adaptive_one_sided": Run(_ADAMW, "native", _TRIED | {"transport": "adaptive"}, True),
    "always": Run(_ADAMW, "native", _ON | {"collectives": "always"}, True),
    "always_one_sided": Run(_ADAMW, "native", _ON | {"collectives": "always", "transport": "symmetric_memory"}, True),
    "native_deep": Run(_ADAMW, "native", None, False, (3,), _DEEP),
    "zipped_deep": Run(_ADAMW, "native", _ON, True, (3,), _DEEP),
    "native_late": Run(_ADAMW, "native", None, False, (1, 2), _LATE),
    "zipped_late": Run(_ADAMW, "native", _ON, True, (1, 2), _LATE),
    "adaptive_late": Run(_ADAMW, "native", _TRIED, True, (1, 2), _LATE),
    "again": Run(_ADAMW, "native", None, True),
    "silent": Run(_ADAMW, "native", SILENT),
    "zeropp": Run(_ADAMW, "native", None, False, (3,), {"zero_quantized_weights": True, "zero_quantized_gradients": True}),
    "adams": Run(_ADAMS),
    "adams_again": Run(_ADAMS, "adams", None, True),
    "adams_zipped": Run(_ADAMS, "adams", _ON, True),
    "adams_late": Run(_ADAMS, "adams", None, False, (1, 2), _LATE),
    "adams_silent": Run(_ADAMS, "adams", SILENT),
    **{f"scape{share}{name}": Run(_scape(density, **params), "adams", section, False, (1, 2))
       for share, density in ((90, 0.1), (99, 0.01))
       for name, params, section in (("", {}, None), ("_offload", {"offload": True}, None), ("_zipped", {}, _ON),
                                     ("_offload_zipped", {"offload": True}, _ON))},
    **{f"scape{share}_ahead": Run(_scape(density, offload={"ahead": True}), "adams", None, False, (1, 2), config=_UNCLIPPED)
       for share, density in ((90, 0.1), (99, 0.01))},
}
DEFAULT_RUNS = "native,zipped,again"


@dataclass(frozen=True)
class Cell:
    """One model, stage and size of batch, and the names of the runs that are compared on them. ``rounds`` None: as many as of others."""
    model: str
    stage: int
    tokens: int
    runs: tuple[str, ...]
    rounds: int | None = None

    def __str__(self) -> str:
        return f"{self.model}/{self.stage}/{self.tokens}/{','.join(self.runs)}"

    def known_runs(self) -> tuple[str, ...]:
        """Those that the stage has, with their rivals."""
        names = [name for name in self.runs if self.stage in RUNS[name].stages]
        return tuple(name for name in names if RUNS[name].rival in (None, *names))


def zero_settings(run: Run, stage: int, bucket_size: int) -> dict:
    """As one would train: buckets small enough that most are reduced while backward still runs, in a stream of their own. SCAPE reduces at
    the end of backward, whatever these say."""
    common = {"stage": stage, "reduce_bucket_size": bucket_size, "overlap_comm": run.optimizer["type"] != "SCAPE"}
    return common | run.zero


def engine_config(run: Run, stage: int, micro_batch: int, bucket_size: int) -> dict:
    return {"train_micro_batch_size_per_gpu": micro_batch, "bf16": {"enabled": True}, "steps_per_print": 1 << 30,
            "zero_optimization": zero_settings(run, stage, bucket_size), "optimizer": run.optimizer} | run.config
