"""Parameters of the optimizers, as they stand under ``"optimizer": {"type": "SCAPE", "params": {...}}``: frozen, unknown keys refused,
every range checked at construction."""
import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from zipscape.errors import ConfigError, describe, unknown_field

#: Ages are looked up in tables of max_age + 1 entries.
MAX_AGE_LIMIT = 1 << 16


def _number(value):
    """JSON's true and "0.1" are no numbers; pydantic would take them for some."""
    if any(isinstance(one, bool | str) for one in (value if isinstance(value, list | tuple) else [value])):
        raise ValueError("input should be a number" if isinstance(value, bool | str) else "input should be numbers")
    return value


class GroupParams(BaseModel):
    """What a parameter group may set for itself."""
    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(5e-4, ge=0, allow_inf_nan=False)
    """Learning rate: AdamS's with dense warm-up, half of it without."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the momentum and inside the normaliser, each in [0, 1)."""

    eps: float = Field(1e-6, gt=0, allow_inf_nan=False)
    """Added to the normaliser; scale it to the gradients' rms."""

    weight_decay: float = Field(0.1, ge=0, allow_inf_nan=False)
    """Decoupled weight decay per step, in units of lr."""

    _numbers = field_validator("lr", "betas", "eps", "weight_decay", mode="before")(_number)

    @model_validator(mode="after")
    def _betas_in_range(self):
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas}: each must be at least 0 and less than 1")
        return self


class AdamSParams(GroupParams):
    """All parameters of ScapeAdamS; each may differ per parameter group."""

    bias_correction: bool = Field(False, strict=True)
    """false: the published formula; true: the authors' code, whose first steps are 10 times as long."""

    kernels: Literal["best", "reference", "cpu", "cuda", "triton"] = "best"
    """As in SCAPE's parameters; one for all groups."""


class Offload(BaseModel):
    """Where residuals are. ``true`` stands for the defaults, ``false`` for {"residual": "none"}."""
    model_config = ConfigDict(extra="forbid", frozen=True)

    residual: Literal["cpu", "none"] = "cpu"
    """"cpu": in host memory; "none": on the device."""

    buffers: int = Field(2, ge=2, le=64)
    """Pieces of 64 MiB that are on the device at a time. So many come in behind the backward pass."""

    pin_memory: bool = Field(True, strict=True)
    """Page-locked host memory, where the device is a GPU. Without it, copies make the host wait."""

    ahead: bool = Field(False, strict=True)
    """Residuals and ages pass behind the backward pass, as if nothing were clipped, and the next mask is found behind the next forward
    pass; where a step is clipped after all, both follow the backward pass. Takes their host memory twice."""

    _numbers = field_validator("buffers", mode="before")(_number)


class ScapeParams(GroupParams):
    """All parameters of SCAPE. lr, betas, eps, weight_decay and density (or sparsity) may differ per parameter group."""

    density: float = Field(0.1, gt=0, le=1)
    """Share of the coordinates that is synchronised per step, in (0, 1]; 1 is dense AdamS. Tensors of one dimension are always dense."""

    dense_warmup_steps: int = Field(0, ge=0)
    """The first optimizer steps without masks. (The very first always is.)"""

    max_age: int | None = Field(None, ge=1, le=MAX_AGE_LIMIT)
    """A coordinate not synchronised for so many steps goes first; catching up counts at most so many. Steps; null: 4 / density. At least
    2 / density, or overdue coordinates alone would fill the masks."""

    mask_encoding: Literal["auto", "bits", "indices"] = "auto"
    """How masks are sent; "auto" takes the smaller."""

    values_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the gradient values on the wire; their rounding error stays in the residual."""

    mask_statistic: Literal["residual", "first_moment"] = "residual"
    """What ranks the coordinates. "first_moment" is the paper's summary read literally: it trains badly, for comparison only."""

    catch_up: bool = Field(True, strict=True)
    """A synchronisation stands for all steps since the last one. false: for one step, the literal reading, for comparison only."""

    offload: Offload = Offload(residual="none")
    """Residuals in host memory: true, false or an object of ``Offload``. Same results."""

    save_residual: Literal["full", "mean", "flush"] = "full"
    """What a checkpoint keeps of the residuals: every rank's (resuming is bit-equal), their mean, or none after one dense step."""

    kernels: Literal["best", "reference", "cpu", "cuda", "triton"] = "best"
    """Which implementation of the arithmetic runs; all give the same bits. "best" takes the fastest that works here."""

    log: str | None = None
    """File that rank 0 appends one JSON line of statistics to per optimizer step. null: none."""

    check_masks_every: int = Field(0, ge=0)
    """All ranks compare a checksum of their masks every so many steps; 0: never."""

    _more_numbers = field_validator("density", "dense_warmup_steps", "max_age", "check_masks_every", mode="before")(_number)

    @field_validator("offload", mode="before")
    @classmethod
    def _true_is_the_default(cls, value):
        return {"residual": "cpu" if value else "none"} if isinstance(value, bool) else value

    @model_validator(mode="before")
    @classmethod
    def _sparsity_is_one_minus_density(cls, values):
        if isinstance(values, dict) and "sparsity" in values:
            if "density" in values:
                raise ValueError("density and sparsity are the same setting: give one of them")
            values = dict(values)
            sparsity = values.pop("sparsity")
            if not isinstance(sparsity, int | float) or isinstance(sparsity, bool) or not 0 <= sparsity < 1:
                raise ValueError(f"sparsity = {sparsity!r}: must be a number in [0, 1)")
            values["density"] = round(1 - sparsity, 12)       # 1 - 0.9 is to mean 0.1
        return values

    @model_validator(mode="after")
    def _max_age_leaves_room(self):
        if self.max_age is not None and self.max_age < 2 / self.density and self.density < 1:
            raise ValueError(f"max_age = {self.max_age}: must be at least 2 / density = {math.ceil(2 / self.density)}")
        return self

    def age_limit(self, density: float) -> int:
        """max_age of a group with this density, in steps."""
        return self.max_age or min(MAX_AGE_LIMIT, math.ceil(4 / density))


def parse(values: dict, model=ScapeParams, where: str = "the optimizer's params in ds_config.json"):
    """The parsed parameters. Raises ConfigError naming every wrong field with its value and what is allowed."""
    try:
        return model(**values)
    except ValidationError as error:
        problems = "; ".join(_problem(e, model) for e in error.errors())
        raise ConfigError(describe("the parameters of the optimizer are wrong", got=problems, where=where,
                                   todo="correct these fields; docs/scape.md lists every field with its range")) from None


def _problem(error: dict, model) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        for part in error["loc"][:-1]:
            model = model.model_fields[part].annotation
        return unknown_field(path, model.model_fields)
    message = error["msg"].removeprefix("Value error, ")
    return f"{path} = {error['input']!r}: {message[0].lower()}{message[1:]}" if path else message
