"""The ``"zipccl"`` section of ds_config.json: frozen, unknown keys refused, every range checked at construction."""
import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from zipscape.errors import ConfigError, describe, unknown_field

Choice = Literal["adaptive", "always", "never"]
FAMILIES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


class CollectiveChoices(BaseModel):
    """What to do per collective; one string in place of this object sets all of them."""
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    all_gather: Choice = "adaptive"
    """ZeRO's parameter gathers. "always": zipped whenever eligible; "never": native; "adaptive": whichever a probe
    finds faster."""

    reduce_scatter: Choice = "adaptive"
    """ZeRO's gradient reduction, in stages 1 and 2 in place of DeepSpeed's all_reduce. Same words. "always" also fixes the arithmetic: the
    rank-order fp32 sum at any world size."""

    all_reduce: Choice = "adaptive"
    """DDP's gradient reduction, and what of ZeRO-1/2's is not reduce-scattered. Same words; the same arithmetic as reduce_scatter."""

    all_to_all: Choice = "adaptive"
    """MoE's and Ulysses' exchanges, with equal or uneven splits. Decided for every pair of ranks by the size of what goes between
    them."""

    broadcast: Choice = "adaptive"
    """Same words."""


class ZipcclConfig(BaseModel):
    """Settings of ds_zipccl. Every rank must have equal ones, but for ``log``."""
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = False
    """Switch compressed collectives on."""

    collectives: CollectiveChoices = CollectiveChoices()
    """"adaptive" | "always" | "never", for all collectives or per collective."""

    min_bytes: int = Field(1 << 20, ge=0, le=1 << 40)
    """Calls whose whole tensor (gather output, scatter input) has fewer bytes go native, under every choice. In
    bytes."""

    max_workspace_bytes: int = Field(1 << 30, ge=1 << 20, le=1 << 44)
    """Upper bound of the frames one call may need, in bytes; larger gathers and reduce-scatters are carried out in parts, other calls go
    native and are counted."""

    cache_params: bool = False
    """ZeRO-3: make the frames of parameter shards once, at the end of the optimizer's step, and gather them as frames until
    the parameters change. Costs memory for the frames of this rank's shards, about 1.5 bytes per parameter and rank."""

    max_cache_bytes: int = Field(1 << 32, ge=0, le=1 << 44)
    """``cache_params``: upper bound of the kept frames of a process, in bytes; shards beyond it travel as they are, one-sided encoded on
    the way."""

    transport: Literal["adaptive", "process_group", "symmetric_memory"] = "process_group"
    """How frames travel. "process_group": by the group's own collectives; "symmetric_memory": one-sided over NVLink where all ranks of a
    group are on one host and their GPUs can access each other's memory, else by the process group, counted with the reason; "adaptive":
    where they can, the switch measures both ways and takes the faster one for each size. Not the default: not
    all tests on GPUs have run with it."""

    split_lists: Literal["any", "all_or_none"] = "any"
    """Which ranks pass split lists to one and the same all_to_all_single. "all_or_none" is your promise that all ranks of its group do, or
    none does: only then may those without lists go one-sided, since no rank can see what another one passes."""

    kernels: Literal["best", "reference", "cpu", "cuda", "triton"] = "best"
    """The codec's kernels. "best" takes the fastest that works here; a name is taken literally or is an error."""

    level: Literal[1, 2] = 1
    """The code of the exponents. 1: 3 bits, BF16 becomes 1.41 times smaller, at the speed of memory; 2: 2 + 2 + 4 bits, 1.48 times, and
    slower to make: for links up to some 50 GB/s."""

    window: Literal["block", "sigma"] = "block"
    """Which exponents are coded in 3 bits. "block": around the mean of each block of 1,024 elements; "sigma": the paper's way, one window
    from the tensor's standard deviation, measured once per group, collective, dtype and size, and again after an overflow."""

    reprobe_calls: int = Field(10_000, ge=0, le=1 << 40)
    """"adaptive": after so many eligible calls of a collective on a group its costs are measured again, since links change; at each tenth
    of them the data of what went native is tried anew. 0: never."""

    step_trials: bool = True
    """"adaptive" under DeepSpeed: some training steps are natively made and some zipped, in turns, and all calls go native for as long as
    zipped steps are not at least 1 % faster."""

    step_trial_every: int = Field(1000, ge=1, le=1 << 40)
    """Optimizer steps from one such trial's end to the next one."""

    deterministic_reduce: bool = True
    """Timing never chooses a reduction's arithmetic: beyond 2 ranks an adaptive reduce-scatter stays native. ("always"
    and "never" fix the arithmetic anyway; at 2 ranks both give the same bits.)"""

    integrity: Literal["off", "checksum", "roundtrip"] = "off"
    """"checksum": every frame carries a CRC-32 that the receiver verifies; "roundtrip": every frame is decoded again and compared before it
    is sent. With both, ranks whose calls do not fit together (collective, dtype, root, sizes) get an error that names them.
    Both read on the host and cost time: to find faults."""

    nan_check: Literal["off", "error"] = "off"
    """"error": before each call the ranks tell each other whether what they send has NaNs, also where it goes native; all raise the same
    error, which names the ranks. ``cache_params`` then keeps no frames. Reads on the host and costs time: to find faults."""

    log: str | None = None
    """File that rank 0 appends one JSON line of statistics to per optimizer step. null: none."""

    @model_validator(mode="after")
    def _level_2_has_no_given_window(self):
        if self.level == 2 and self.window == "sigma":
            raise ValueError('window "sigma" gives windows of level 1: level 2 takes its own from each block')
        return self

    @field_validator("collectives", mode="before")
    @classmethod
    def _one_word_for_all(cls, value):
        return dict.fromkeys(FAMILIES, value) if isinstance(value, str) else value

    @classmethod
    def from_section(cls, section, where: str = "ds_config.json") -> "ZipcclConfig":
        """Parses the section. Raises ConfigError naming every wrong field with its value and what is allowed. ``where`` it
        was read, for the message."""
        if not isinstance(section, dict):
            raise ConfigError(describe('the "zipccl" section must be a JSON object', got=section,
                                       expected='{"enabled": true, ...}', where=where))
        try:
            return cls(**section)
        except ValidationError as error:
            problems = "; ".join(_problem(e, cls) for e in error.errors())
            raise ConfigError(describe('the "zipccl" section is wrong', got=problems, where=where,
                                       todo="correct these fields; docs/config.md lists every field with its range")) from None

    @property
    def look_calls(self) -> int:
        """"adaptive": after so many eligible calls, which divide ``reprobe_calls``, the data of what went native is tried anew."""
        tenth, rest = divmod(self.reprobe_calls, 10)
        return tenth if tenth >= 100 and not rest else self.reprobe_calls

    @property
    def asks_each_call(self) -> bool:
        """Whether the ranks compare each call before it (collectives/check.py)."""
        return self.integrity != "off" or self.nan_check != "off"

    def fingerprint(self) -> str:
        """Hash of everything the ranks must agree on."""
        agreed = self.model_dump(exclude={"log"})
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]


def _problem(error: dict, cls) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        fields = CollectiveChoices.model_fields if path.startswith("collectives.") else cls.model_fields
        return unknown_field(path, fields)
    if not path:
        return error["msg"].removeprefix("Value error, ")
    return f"{path} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
