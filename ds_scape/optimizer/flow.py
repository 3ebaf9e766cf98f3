"""One optimizer step of SCAPE on one rank, from the fresh gradients to the changed weights. The rule and its reasons: docs/scape.md.

    1. the fresh gradients' squared norms are exchanged: 8 bytes a rank, for clipping and to skip what is not finite
    2. r += factor * g;  q is tracked                                          every rank; the owner's part of it
    3. the coordinates of the present mask leave r, go to their owners, are summed in rank order
    4. the owner moves master weights and momentum of these coordinates
    5. the changed weights are gathered and written into every rank's copies
    6. the owner ranks its coordinates, and the next mask's gather is started: it has all of the next forward and backward

Until 2 nothing is changed, so a step that is skipped leaves everything as it was, the mask under way included.
"""
import logging
import math
from dataclasses import dataclass

import torch

from ds_scape.config import ScapeParams
from ds_scape.kernels import loader
from ds_scape.optimizer import offload
from ds_scape.optimizer.state import FlatState
from ds_scape.sync import mask as masks
from ds_scape.sync.partition import Layout
from ds_scape.sync.sparse_reduce import Positions, gather_weights, reduce_to_owners
from ds_scape.sync.transport import Transport
from ds_scape.update import norms, scape_rule
from ds_scape.update import residual as residuals
from zipscape.errors import ZipScapeError, describe

log = logging.getLogger("ds_scape")
#: Checksums travel as doubles: integers below this are exact.
CHECKSUM_MODULUS = 1 << 52
_WIRE = {**residuals.WIRE_DTYPES, "fp64": torch.float64}


@dataclass(frozen=True)
class StepResult:
    """What a step did. Equal on all ranks."""
    applied: bool
    """False: skipped, nothing was changed on any rank."""
    nonfinite_ranks: tuple[int, ...]
    """The ranks whose gradients were not finite."""
    grad_norm: float
    """sqrt of the mean over the ranks of |g_i|^2, unscaled, before clipping; inf or nan where it was not finite."""
    dense: bool
    """Whether the step ran without masks."""


class Flow:
    """The state of SCAPE on one rank, and its steps. All ranks must call the same methods in the same order."""

    def __init__(self, flats: list[FlatState], params: ScapeParams, transport: Transport):
        self.flats, self.params, self.transport = flats, params, transport
        self.layout = Layout(tuple(flat.layout for flat in flats), transport.world_size)
        self.kernels = loader.choose(params.kernels, flats[0].copies.device.type)
        self.codec = masks.MaskCodec(self.layout, params.mask_encoding, self.kernels) if self.layout.has_masks else None
        self.num_steps = self.last_dense_step = 0
        self.is_watched, self.mask_overlap = False, None        # the share of the next mask that is in the present one too; if watched
        self._device = flats[0].copies.device
        self._wire = _WIRE[params.values_dtype]
        self._all_dense = Positions(self.layout, transport.rank, None)
        self._positions, self._mask_message, self._arriving = self._all_dense, None, None
        self._unmasked_step = 1             # a step that has no mask: the first, and one after a mask could not be restored

    def is_dense(self, step: int) -> bool:
        """Whether step number ``step`` (from 1) runs without masks."""
        return self.codec is None or step <= self.params.dense_warmup_steps or step == self._unmasked_step

    @torch.no_grad()
    def step(self, fresh: list[torch.Tensor], *, max_norm: float = 0.0, loss_scale: float = 1.0) -> StepResult:
        """One step from the fresh gradients, per buffer [W * P], any float dtype, multiplied by ``loss_scale``."""
        self.prefetch()
        square, bad = self._agree_on_norm(fresh, loss_scale)
        grad_norm = math.sqrt(square) if not bad else square
        step = self.num_steps + 1
        if bad:
            return StepResult(False, bad, grad_norm, self.is_dense(step))
        self.num_steps = step
        positions = self._take_positions()
        self.last_dense_step = step if positions.dense else self.last_dense_step
        factor = norms.clip_factor(square, max_norm) / loss_scale
        taken, ranked_by = [], []
        for flat, gradient, index in zip(self.flats, fresh, positions.whole, strict=True):
            values, *rest = self._enter(flat, gradient, factor, index, self._wire)
            taken.append(values)
            ranked_by.append(rest)
        means = reduce_to_owners(taken, positions, self.transport, self.flats[0].weight.dtype)
        del taken, values                   # in a step without masks they are as large as the model
        self._synchronise(means, positions)
        if not self.is_dense(step + 1):
            self._start_mask(ranked_by, positions)
        return StepResult(True, (), grad_norm, positions.dense)

    def prefetch(self) -> None:
        """Under offload: the first pieces of the residual may come to the device, while gradients are still being made."""
        for flat in self.flats:
            if flat.passage is not None:
                return flat.passage.begin(flat.stored_residual)

    def settle(self) -> None:
        """Under offload: the host waits until the residuals are whole in its memory."""
        for flat in self.flats:
            if flat.passage is not None:
                flat.passage.settle()

    @torch.no_grad()
    def flush(self) -> None:
        """Synchronises everything that is waiting, without a step: afterwards all residuals are 0 and every coordinate is up to date.

        Exact values are sent, once, by all ranks. What coordinates of the last step still hold is the wire's rounding error of that step;
        it is dropped, since no step has passed for which it could be applied.
        """
        dtype = self.flats[0].weight.dtype
        taken = [self._enter(flat, None, 1.0, None, dtype)[0] for flat in self.flats]
        means = reduce_to_owners(taken, self._all_dense, self.transport, dtype)
        for flat, mean in zip(self.flats, means, strict=True):
            waiting = (flat.last_sync < self.num_steps).nonzero().view(-1)
            self._owner_step(flat, mean.to(flat.weight.device)[waiting], waiting)
        gather_weights([flat.copies for flat in self.flats], [flat.weight.to(flat.copies.device, flat.copies.dtype) for flat in self.flats],
                       self._all_dense, self.transport, self.kernels)

    def _shape_of_masks(self) -> list:
        """Equal if and only if a mask message of one flow can be used by the other."""
        return [] if self.codec is None else [self.codec.encoding] + [[s.num_sent for own in flat.segments for s in own]
                                                                     for flat in self.layout.flats]

    def state_dict(self) -> dict:
        """What belongs to no single buffer: the step, this rank's part of the next mask, the decay products."""
        return {"num_steps": self.num_steps, "mask": None if self.is_dense(self.num_steps + 1) else self._mask_message,
                "shape_of_masks": self._shape_of_masks(), "decay": [flat.decay.cpu() for flat in self.flats]}

    def load_state_dict(self, saved: dict) -> None:
        """The inverse, at the same world size. No communication: the mask is gathered when the next step needs it. A mask of other
        densities or another encoding cannot be used: the next step is then one without masks, and says so."""
        self.num_steps = saved["num_steps"]
        for flat, decay in zip(self.flats, saved["decay"], strict=True):
            flat.restore_decay(decay)
        self._unmasked_step = 1
        if self.is_dense(self.num_steps + 1):
            return
        if saved["mask"] is not None and saved["shape_of_masks"] == self._shape_of_masks():
            self._mask_message, self._positions, self._arriving = saved["mask"].to(self._device, copy=True), None, None
        else:
            self._unmasked_step = self.num_steps + 1
            if self.transport.rank == 0 and self.num_steps:
                log.warning("the saved masks are of other densities or of a dense warm-up: the next step runs without masks")

    @torch.no_grad()
    def restart(self, num_steps: int) -> None:
        """Goes on from ``num_steps`` steps with the present weights, momentum and q, but with nothing waiting: residuals 0, all coordinates
        up to date, the next step without masks. All ranks together; the largest of their numbers counts."""
        number = torch.tensor([num_steps], dtype=torch.int64, device=self._device)
        self.num_steps = int(self.transport.gather(number, "checkpoint").max())
        for flat in self.flats:
            flat.residual.zero_()
            flat.last_sync.fill_(self.num_steps)
        self._unmasked_step = self.num_steps + 1

    # --- 1: before anything is changed ----------------------------------------------------------------------------------------------
    def _agree_on_norm(self, fresh, loss_scale) -> tuple[float, tuple[int, ...]]:
        """(mean over the ranks of |g_i|^2, ranks whose gradients are not finite). The same doubles on every rank, summed in rank order."""
        record = torch.cat([norms.sum_of_squares(fresh), self._checksum(fresh[0].device)])
        squares, checksums = self.transport.gather(record, "norm").t().tolist()
        if any(checksum != checksums[0] for checksum in checksums):
            raise ZipScapeError(describe("the ranks' masks differ", got=f"checksums {checksums}", expected="equal ones",
                                         where=f"before step {self.num_steps + 1}", todo="report this: a defect or a broken link"))
        bad = tuple(rank for rank, square in enumerate(squares) if not math.isfinite(square))
        return math.fsum(squares) / len(squares) / loss_scale ** 2 if not bad else math.nan, bad

    def _checksum(self, device) -> torch.Tensor:
        total = torch.zeros(1, dtype=torch.int64, device=device)
        every = self.params.check_masks_every
        if every and self.num_steps % every == 0 and not self.is_dense(self.num_steps + 1):
            for index in self._peek_positions().whole:
                if index is not None:
                    weights = torch.arange(1, len(index) + 1, device=device) % 65521
                    total += ((index + 1) * weights).sum() % CHECKSUM_MODULUS
        return (total % CHECKSUM_MODULUS).to(torch.float64)

    # --- 2: gradients into residuals, and what is sent out of them ----------------------------------------------------------------------
    def _enter(self, flat: FlatState, gradient, factor, index, wire):
        """Adds the fresh gradient (None: nothing) to the residual and takes out what is sent. Returns (values, scores of the literal
        reading where it is asked for, the residual that is left in the rank's own partition)."""
        rank, size, betas = self.transport.rank, flat.layout.partition_numel, flat.group["betas"]
        own, early = slice(rank * size, (rank + 1) * size), None
        is_early = self.params.mask_statistic == "first_moment" and gradient is not None
        is_ranked = gradient is not None and not flat.layout.is_full    # otherwise there is nothing to rank
        in_one_pass = gradient is not None and not is_early and flat.passage is None
        square = flat.square if is_ranked and in_one_pass and flat.square.device == flat.residual.device else None
        if is_ranked and square is None:
            scape_rule.track_square(flat.square, self._owned(flat, gradient), factor=factor, beta2=betas[1], kernels=self.kernels)
        if flat.passage is not None:
            values, before, after = offload.enter(flat.stored_residual, flat.passage, gradient, factor, index, wire, own, is_early,
                                                  self.kernels)
        elif in_one_pass:
            values, before, after = residuals.enter(flat.residual, gradient, factor, index, wire, square=square, own_start=own.start,
                                                    beta2=betas[1], kernels=self.kernels), None, flat.residual[own]
        else:
            if gradient is not None:
                residuals.accumulate(flat.residual, gradient, factor, self.kernels)
            before = flat.residual[own].clone() if is_early else None
            values, after = residuals.take(flat.residual, index, wire, self.kernels), flat.residual[own]
        if is_early:
            early = scape_rule.score_first_moment(flat.momentum, before.to(flat.weight.device), beta1=betas[0])
        return values, early, after

    # --- 3, 4, 5: values to the owners, weights back ----------------------------------------------------------------------------------
    def _synchronise(self, means, positions: Positions) -> None:
        changed = []
        for i, (flat, mean) in enumerate(zip(self.flats, means, strict=True)):
            flat.advance_decay()
            changed.append(self._owner_step(flat, mean, positions.own[i]))
        gather_weights([flat.copies for flat in self.flats], changed, positions, self.transport, self.kernels)

    def _owner_step(self, flat: FlatState, mean, index) -> torch.Tensor:
        """Moves the owned coordinates at ``index`` (None: all); returns their weights as the copies want them."""
        group, device = flat.group, flat.weight.device
        mean, index = mean.to(device), None if index is None else index.to(device)
        changed = scape_rule.synchronise(flat.weight, flat.momentum, flat.last_sync, mean, index, self.num_steps, flat.age_tables,
                                         flat.decay_products, lr=group["lr"], beta2=group["betas"][1], eps=group["eps"],
                                         catch_up=self.params.catch_up, copies_dtype=flat.copies.dtype, kernels=self.kernels)
        return changed.to(flat.copies.device)

    def _owned(self, flat: FlatState, whole: torch.Tensor) -> torch.Tensor:
        """This rank's partition of a whole buffer, where the owner's state is (the host, under optimizer offload)."""
        return flat.own(whole, self.transport.rank).to(flat.weight.device)

    # --- 6: the next mask ---------------------------------------------------------------------------------------------------------------
    def _start_mask(self, ranked_by, positions) -> None:
        rank, chosen = self.transport.rank, []
        for flat, (early, left) in zip(self.flats, ranked_by, strict=True):
            if flat.layout.is_full:
                continue
            rank_by, square = (left.to(flat.weight.device), flat.square) if early is None else (early, None)
            chosen.append(self.kernels.select(rank_by, square, flat.last_sync, self.num_steps, flat.max_age, flat.layout.segments[rank]))
        if self.is_watched and not positions.dense:
            present = [positions.own[i] for i, flat in enumerate(self.flats) if not flat.layout.is_full]
            both = sum(int(mask[index.to(mask.device)].sum()) for mask, index in zip(chosen, present, strict=True))
            self.mask_overlap = both / max(1, sum(map(len, present)))
        self._send_mask(self.codec.encode(chosen, rank).to(self._device))

    def _send_mask(self, message: torch.Tensor) -> None:
        self._mask_message, self._positions = message, None
        self._arriving = self.transport.gather_async(message, "mask")

    def _peek_positions(self) -> Positions:
        """The positions of the coming step; waits for the mask under way."""
        if self._positions is None:
            messages = (self._arriving or self.transport.gather_async(self._mask_message, "mask")).wait()
            decoded = (self.codec.decode(row, rank) for rank, row in enumerate(messages))
            self._positions = Positions(self.layout, self.transport.rank, decoded)
            self._arriving = None
        return self._positions

    def _take_positions(self) -> Positions:
        return self._all_dense if self.is_dense(self.num_steps) else self._peek_positions()
