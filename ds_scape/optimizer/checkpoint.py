"""The residuals in checkpoints: all of them, their mean, or none after everything waiting was synchronised (docs/scape.md, Checkpoints)."""
import logging

import torch

from ds_scape.optimizer.flow import Flow
from zipscape.errors import ConfigError, describe

log = logging.getLogger("ds_scape")


def announce_size(flow: Flow, kind: str) -> None:
    """Rank 0 says what the residuals will take, before anything is written."""
    numel = sum(flat.residual.numel() * flat.residual.element_size() for flat in flow.flats)
    per_rank = {"full": numel, "mean": numel // flow.transport.world_size, "flush": 0}[kind]
    if flow.transport.rank == 0:
        log.info("checkpoint: residuals (%s) take %.1f MB a rank, %.1f MB in all", kind, per_rank / 1e6,
                 per_rank * flow.transport.world_size / 1e6)


@torch.no_grad()
def residual_record(flow: Flow, kind: str) -> dict:
    """What this rank saves. All ranks together: "mean" exchanges. "flush" expects that flow.flush() was called since the last step."""
    record = {"kind": kind, "world_size": flow.transport.world_size}
    if kind == "full":
        record["residual"] = [flat.residual.to("cpu", copy=True) for flat in flow.flats]
    elif kind == "mean":
        record["residual"] = [_mean(flow, flat).cpu() for flat in flow.flats]
    return record


def _mean(flow: Flow, flat) -> torch.Tensor:
    """[P]: the mean over the ranks of their residuals, this rank's partition, summed in rank order."""
    splits = [flat.layout.partition_numel] * flow.transport.world_size
    rows = flow.transport.to_owners(flat.residual.to(flat.copies.device), splits, "checkpoint")
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.div_(flow.transport.world_size)


@torch.no_grad()
def restore_residuals(flow: Flow, record: dict) -> None:
    """The inverse, at the same world size, all ranks together. Raises ConfigError where there is nothing to restore from."""
    if record is None or record["world_size"] != flow.transport.world_size:
        raise ConfigError(describe("this checkpoint has no residuals of SCAPE for this world size",
                                   got=None if record is None else f"world size {record['world_size']}",
                                   expected=f"world size {flow.transport.world_size}"))
    for i, flat in enumerate(flow.flats):
        if record["kind"] == "full":
            flat.residual.copy_(record["residual"][i])
        elif record["kind"] == "mean":
            flat.residual.copy_(flow.transport.gather(record["residual"][i].to(flat.copies.device), "checkpoint").reshape(-1))
        else:
            flat.residual.zero_()
