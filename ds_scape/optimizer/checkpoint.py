"""The residuals in checkpoints: all of them, their mean, or none after everything waiting was synchronised (docs/scape.md, Checkpoints).

A record goes into every rank's file. DeepSpeed's ds_to_universal keeps rank 0's as it is, so what is to survive another world size is in
there, by parameter: the mean of the residuals and, because a universal checkpoint has no place for them, the ages and decay products.
"""
import torch

from ds_scape.optimizer.flow import Flow
from ds_scape.optimizer.state import FlatState
from zipscape.errors import ConfigError, describe

#: Coordinates of all partitions together that are averaged at a time: 64 MiB in fp32.
PIECE = 1 << 24


def size_text(flow: Flow, kind: str) -> str:
    """What the residuals will take, for the log."""
    numel = sum(flat.residual.numel() for flat in flow.flats)
    size, ranks = numel * flow.flats[0].residual.element_size() / 1e6, flow.transport.world_size
    if kind == "full":
        return f"checkpoint: residuals (full) take {size:.1f} MB in every rank's file, {size * ranks:.1f} MB in all"
    ages = sum(flat.residual.numel() * _age_dtype(flat).itemsize for flat in flow.flats) / 1e6
    return {"mean": f"checkpoint: residuals (mean) and ages take {size + ages:.1f} MB in rank 0's file, nothing in the others'",
            "flush": "checkpoint: no residuals: everything is synchronised before saving"}[kind]


@torch.no_grad()
def make_record(flow: Flow, kind: str, places: list[list[tuple[str, int, int]]]) -> dict:
    """What this rank saves. All ranks together: "mean" exchanges. "flush" expects that flow.flush() was called since the last step.

    places: per buffer (name, offset, numel) of every parameter in it.
    """
    record = {"kind": kind, "world_size": flow.transport.world_size}
    if kind == "full":
        record["residual"] = [flat.residual.to("cpu", copy=True) for flat in flow.flats]
    elif kind == "mean":
        means = [_gather(flow, flat, _mean_of_residuals, flat.residual.dtype) for flat in flow.flats]
        ages = [_gather(flow, flat, _ages, _age_dtype(flat)) for flat in flow.flats]
        if flow.transport.rank == 0:
            record["mean"], record["age"] = ({name: whole[offset:offset + numel].clone() for whole, own in zip(wholes, places, strict=True)
                                              for name, offset, numel in own} for wholes in (means, ages))
            record["decay"] = [flat.decay.cpu() for flat in flow.flats]
    return record


def _gather(flow: Flow, flat: FlatState, part, dtype: torch.dtype) -> torch.Tensor | None:
    """[W * P] on rank 0's host, piece by piece: ``part(flow, flat, start, stop)`` of every rank's partition. None on other ranks."""
    size, whole = flat.layout.partition_numel, None
    piece = max(1, PIECE // flow.transport.world_size)
    if flow.transport.rank == 0:
        whole = torch.empty(flow.transport.world_size, size, dtype=dtype, device="cpu")
    for start in range(0, size, piece):
        stop = min(size, start + piece)
        own = part(flow, flat, start, stop).to(flat.copies.device)
        rows = flow.transport.gather(own.view(torch.uint8), "checkpoint")       # no backend knows all dtypes
        if whole is not None:
            whole[:, start:stop] = rows.view(dtype)
    return whole if whole is None else whole.view(-1)


def _mean_of_residuals(flow: Flow, flat: FlatState, start: int, stop: int) -> torch.Tensor:
    """The mean over the ranks, summed in rank order, of the residuals of [start, stop) of this rank's partition."""
    num_ranks = flow.transport.world_size
    pieces = flat.residual.view(num_ranks, -1)[:, start:stop].to(flat.copies.device).reshape(-1)
    rows = flow.transport.to_owners(pieces, [stop - start] * num_ranks, "checkpoint")
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.div_(num_ranks)


def _ages(flow: Flow, flat: FlatState, start: int, stop: int) -> torch.Tensor:
    """Steps since the last synchronisation; so many as the decay products know are as good as more."""
    return flat.ages(flow.num_steps, start, stop).clamp_(max=flat.decay.numel() - 1).to(_age_dtype(flat))


def _age_dtype(flat: FlatState) -> torch.dtype:
    return torch.int16 if flat.decay.numel() <= 1 << 15 else torch.int32


def check_record(flow: Flow, record: dict | None) -> None:
    """Raises ConfigError unless this rank's record fits; no communication."""
    problem = None
    if not isinstance(record, dict):
        problem = "no record of SCAPE in it"
    elif record["world_size"] != flow.transport.world_size:
        problem = f"world size {record['world_size']}"
    elif record["kind"] == "full":
        numels = [saved.numel() for saved in record["residual"]]
        if numels != [flat.residual.numel() for flat in flow.flats]:
            problem = f"residuals of {numels} elements"
    if problem:
        raise ConfigError(describe("this checkpoint has no residuals that fit this run", got=problem,
                                   expected=f"world size {flow.transport.world_size}, residuals of "
                                            f"{[flat.residual.numel() for flat in flow.flats]} elements"))


@torch.no_grad()
def restore_residuals(flow: Flow, record: dict, places) -> None:
    """The inverse of make_record() for a record that was checked, at the same world size, all ranks together."""
    for i, flat in enumerate(flow.flats):
        if record["kind"] == "full":
            flat.residual.copy_(record["residual"][i])
            continue
        flat.residual.zero_()
        for name, offset, numel in places[i] if record["kind"] == "mean" else ():
            saved = record["mean"][name] if flow.transport.rank == 0 else torch.empty(numel, dtype=flat.residual.dtype, device="cpu")
            flat.residual[offset:offset + numel] = flow.transport.from_first(saved.to(flat.copies.device), "checkpoint")


@torch.no_grad()
def restore_from_universal(flow: Flow, record: dict | None, places) -> str:
    """After flow.restart(), at any world size, from the record that was rank 0's: what was waiting waits again. No communication: every
    rank has read the record. Returns what is lost, for the log, or ""."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind == "flush":
        return ""
    if kind != "mean":
        return ("gradients that were waiting when this checkpoint was saved are lost: a universal checkpoint keeps them only if it was "
                'saved with "save_residual": "mean" or "flush"')
    rank = flow.transport.rank
    for i, flat in enumerate(flow.flats):
        ages = torch.zeros(flat.residual.numel(), dtype=torch.int32, device="cpu")
        for name, offset, numel in places[i]:
            flat.residual[offset:offset + numel] = record["mean"][name]
            ages[offset:offset + numel] = record["age"][name]
        flat.last_sync.sub_(flat.own(ages, rank).to(flat.last_sync.device))
        flat.restore_decay(record["decay"][i])
    return ""
