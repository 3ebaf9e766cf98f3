"""What a step did, as numbers: for the log file and the monitors. One rank's view, computed where somebody looks, without communication."""
import logging

import torch

from ds_scape.optimizer.flow import Flow, StepResult
from ds_scape.sync.traffic import dense_zero_bytes
from ds_scape.update import norms
from zipscape.row_file import RowFile

log = logging.getLogger("ds_scape")


class StepRows:
    """Rows of statistics of one flow. Sizes in bytes, ages in steps."""

    def __init__(self, flow: Flow, path: str | None = None):
        """path: file that gets one JSON line per row."""
        self._flow, self._file = flow, RowFile(path, log)
        self._sent = dict(flow.transport.sent_bytes)
        flow.is_watched = True

    @torch.no_grad()
    def row(self, result: StepResult) -> dict:
        """The row of the step that just ended; to be called after every step, once."""
        flow, layout = self._flow, self._flow.layout
        now = dict(flow.transport.sent_bytes)
        sent = {what: num - self._sent.get(what, 0) for what, num in now.items() if num != self._sent.get(what, 0)}
        self._sent = now
        dense = dense_zero_bytes(layout, flow.flats[0].copies.element_size())
        total = sum(sent.values())
        row = {"step": flow.num_steps, "applied": result.applied, "phase": "dense" if result.dense else "sparse",
               "sent_bytes": total, **{f"{what}_bytes": num for what, num in sent.items()}, "dense_zero_bytes": dense,
               "ratio": round(dense / total, 3) if total else None, "grad_norm": result.grad_norm if result.applied else None,
               "density": sum(layout.splits(result.dense)) / max(1, sum(layout.splits(True))), "mask_overlap": flow.mask_overlap,
               "residual_norm": float(norms.sum_of_squares([flat.residual for flat in flow.flats])) ** 0.5,
               **self._ages(), **(flow._ahead.counts() if flow._ahead is not None else {})}
        self._file.write(row)
        return row

    def _ages(self) -> dict:
        """Over the coordinates that this rank owns, without padding."""
        flow = self._flow
        ages = torch.cat([flat.ages(flow.num_steps, segment.start, segment.stop) for flat in flow.flats
                          for segment in flat.layout.segments[flow.transport.rank]] or [torch.zeros(1, dtype=torch.int32, device="cpu")])
        oldest, total, unsent = torch.stack([ages.max(), ages.sum(), (ages >= flow.num_steps - flow.last_dense_step).sum()]).tolist()
        return {"age_mean": total / ages.numel(), "age_max": oldest, "share_unsent_since_dense": unsent / ages.numel()}

    def events(self, row: dict, samples: int) -> list:
        """The row for DeepSpeed's monitors: [(name, number, samples)]."""
        numbers = {key: float(value) for key, value in row.items() if isinstance(value, int | float) and key != "step"}
        return [(f"Train/Samples/scape_{key}", value, samples) for key, value in numbers.items()]

    def close(self) -> None:
        self._file.close()
