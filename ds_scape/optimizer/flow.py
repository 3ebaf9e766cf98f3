"""One optimizer step of SCAPE on one rank, from the fresh gradients to the changed weights. The rule and its reasons: docs/scape.md.

    1. the fresh gradients' squared norms are exchanged: 8 bytes a rank, for clipping and to skip what is not finite
    2. r += factor * g;  q is tracked                                          every rank; the owner's part of it
    3. the coordinates of the present mask leave r, go to their owners, are summed in rank order
    4. the owner moves master weights and momentum of these coordinates
    5. the changed weights are gathered and written into every rank's copies
    6. the owner ranks its coordinates, and the next mask's gather is started: it has all of the next forward and backward

A step without masks does 2 to 5 in pieces, each with the same coordinates of every partition: everything is exchanged, but never at once.
Until 2 nothing is changed, so a step that is skipped leaves everything as it was, the mask under way included.
"""
import contextlib
import functools
import logging
import math
from dataclasses import dataclass

import torch

from ds_scape.config import ScapeParams
from ds_scape.kernels import impl_reference, loader
from ds_scape.optimizer import ranking, spans
from ds_scape.optimizer.ahead import ahead_for
from ds_scape.optimizer.passage import summed_for
from ds_scape.optimizer.spans import Span
from ds_scape.optimizer.state import FlatState
from ds_scape.optimizer.workspace import Workspace
from ds_scape.sync import mask as masks
from ds_scape.sync.partition import Layout
from ds_scape.sync.sparse_reduce import Positions, gather_weights, mean_of_rows
from ds_scape.sync.transport import Transport
from ds_scape.update import norms, scape_rule
from ds_scape.update import residual as residuals
from zipscape.errors import ZipScapeError, describe

log = logging.getLogger("ds_scape")
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
        self._all_dense = Positions(self.layout, None)
        self._masked = [i for i, flat in enumerate(flats) if not flat.layout.is_full]
        self._passage = flats[0].passage
        self._ages_pass = self._passage is not None and flats[0].weight.device == self._passage.device      # as in sync_steps()
        sizes = flats[0].stored_residual.element_size(), max(flat.stored_last_sync.element_size() for flat in flats) * self._ages_pass
        self._columns, self._partitions, own = spans.of_steps(self.layout, transport.rank, self._passage, *sizes, self._wire.itemsize)
        self._groups = ranking.groups(self.layout.flats, transport.rank, own) if own else []
        self._positions, self._mask_message, self._arriving = self._all_dense, None, None
        self._unmasked_step = 1             # a step that has no mask: the first, and one after a mask could not be restored
        self._ahead = ahead_for(self)

    def is_dense(self, step: int) -> bool:
        """Whether step number ``step`` (from 1) runs without masks."""
        return self.codec is None or step <= self.params.dense_warmup_steps or step == self._unmasked_step

    @torch.no_grad()
    def step(self, fresh: list[torch.Tensor], *, max_norm: float = 0.0, loss_scale: float = 1.0, may_overwrite: bool = False) -> StepResult:
        """One step from the fresh gradients, per buffer [W * P], any float dtype, multiplied by ``loss_scale``. may_overwrite: once a
        gradient has entered, its memory is used for what the step needs."""
        self.prefetch()
        square, bad = self._agree_on_norm(fresh, loss_scale)
        grad_norm = math.sqrt(square) if not bad else square
        step = self.num_steps + 1
        if bad:
            self._drop(None if self.is_dense(step) else "not_finite")
            return StepResult(False, bad, grad_norm, self.is_dense(step))
        self.num_steps = step
        positions = self._take_positions()
        self.last_dense_step = step if positions.dense else self.last_dense_step
        factor = norms.clip_factor(square, max_norm) / loss_scale
        space, early = Workspace(self._device, fresh if may_overwrite else []), self._place_for_early_scores()
        for flat in self.flats:
            flat.advance_decay()
        if positions.dense:
            self._exchange_all(fresh, factor, self._wire, early)
            self._lend(fresh, space, range(self.layout.world_size))
            left = None
        else:
            left = self._exchange_masked(fresh, factor, 1.0 / loss_scale, positions, early, space)
        if not self.is_dense(step + 1):
            with self._ahead.choosing() if self._ahead is not None else contextlib.nullcontext():
                self._start_mask(self._choose(early or left, early is not None, space), positions)
        return StepResult(True, (), grad_norm, positions.dense)

    def prefetch(self) -> None:
        """What is queued from now on may write gradients. Under offload, the first pieces of the residual come to the device meanwhile."""
        if self._ahead is not None:
            self._ahead.join()
        if self._passage is not None and not self._passage.has_begun and not (self._ahead is not None and self._ahead.is_running):
            masked = self._partitions if self._ahead is None else self._ahead.pieces()
            self._passage.begin(self._places(self._columns if self.is_dense(self.num_steps + 1) else masked))

    @property
    def uses_gradients(self) -> bool:
        """Whether the last step's work in the gradients' memory goes on until prefetch()."""
        return self._ahead is not None and self._ahead.is_choosing

    @torch.no_grad()
    def gradient_is_complete(self, fresh: list[torch.Tensor], flat: int, start: int, stop: int, loss_scale: float = 1.0) -> None:
        """A tensor's gradient, [start, stop) of a buffer, is what the coming step gets, unless this is said of it twice (ahead.py). In any
        order; what nothing is said of is taken in the step."""
        if self._ahead is not None and not self.is_dense(self.num_steps + 1):
            self._ahead.complete(fresh, flat, start, stop, 1.0 / loss_scale)

    def _drop(self, reason: str | None = None) -> None:
        if self._ahead is not None:
            self._ahead.drop(reason)

    def settle(self) -> None:
        """Under offload: the host waits until the residuals are whole in its memory."""
        if self._passage is not None:
            self._drop()
            self._passage.settle()

    @torch.no_grad()
    def flush(self) -> None:
        """Synchronises everything that is waiting, without a step: afterwards all residuals are 0 and every coordinate is up to date. Exact
        values are sent. What those of the last step still hold, the wire's rounding error, is dropped."""
        self._drop()
        self._exchange_all(None, 1.0, self.flats[0].weight.dtype, None)

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
        self.settle()
        self.num_steps = int(self.transport.gather(torch.tensor([num_steps], dtype=torch.int64, device=self._device), "checkpoint").max())
        for flat in self.flats:
            flat.residual.zero_()
            flat.all_are_synchronised(self.num_steps)
        self._unmasked_step = self.num_steps + 1

    # --- 1: before anything is changed ----------------------------------------------------------------------------------------------
    def _agree_on_norm(self, fresh, loss_scale) -> tuple[float, tuple[int, ...]]:
        """(mean over the ranks of |g_i|^2, ranks whose gradients are not finite). The same doubles on every rank, summed in rank order."""
        record = torch.cat([norms.sum_of_squares(fresh, self.kernels), self._checksum(fresh[0].device)])
        squares, checksums = self.transport.gather(record, "norm").t().tolist()
        if any(checksum != checksums[0] for checksum in checksums):
            raise ZipScapeError(describe("the ranks' masks differ", got=f"checksums {checksums}", expected="equal ones",
                                         where=f"before step {self.num_steps + 1}", todo="report this: a defect or a broken link"))
        bad = tuple(rank for rank, square in enumerate(squares) if not math.isfinite(square))
        return math.fsum(squares) / len(squares) / loss_scale ** 2 if not bad else math.nan, bad

    def _checksum(self, device) -> torch.Tensor:
        every = self.params.check_masks_every
        is_due = every and self.num_steps % every == 0 and not self.is_dense(self.num_steps + 1)
        return self._peek_positions().checksum(device) if is_due else torch.zeros(1, dtype=torch.float64, device=device)

    # --- 2: gradients into residuals, and what is sent out of them ----------------------------------------------------------------------
    def _through(self, pieces: list[list[Span]], write_back: bool = True, targets: list[list[torch.Tensor]] | None = None):
        """Yields every piece: its spans, their residuals on the device, and of own ones the last synchronisations where the weights are.
        targets: under offload what passes is written there, [residuals, ages]: per buffer, whole; no ages: where they were."""
        passing = self._places(pieces)
        if self._passage is not None:
            passing = self._passage.pass_through(passing, write_back, None if targets is None else self._places(pieces, *targets))
        for piece, parts in zip(pieces, passing, strict=True):
            lasts = iter(parts[len(piece):])
            yield [(span, part, next(lasts) if self._ages_pass and span.owner == self.transport.rank else self._stored_lasts(span))
                   for span, part in zip(piece, parts, strict=False)]

    def _places(self, pieces: list[list[Span]], residuals=None, ages=None) -> list[list[torch.Tensor]]:
        """Of what passes, in what is stored or in these, per buffer."""
        residuals, ages = residuals or [flat.stored_residual for flat in self.flats], ages or [flat.stored_last_sync for flat in self.flats]
        lasts = ([ages[s.flat][s.start:s.stop] for s in piece if self._ages_pass and s.owner == self.transport.rank] for piece in pieces)
        return [[*(s.of(residuals[s.flat], self.layout.flats[s.flat]) for s in piece), *own]
                for piece, own in zip(pieces, lasts, strict=True)]

    def _stored_lasts(self, span: Span) -> torch.Tensor | None:
        return self.flats[span.flat].stored_last_sync[span.start:span.stop] if span.owner == self.transport.rank else None

    def _enter(self, span: Span, residual, fresh, factor, index, values, early) -> None:
        """Adds a span's fresh gradients (None: nothing) to its residual and takes out what is sent, into ``values``. Of own coordinates q
        is tracked, and the literal reading's scores are written into ``early``."""
        flat, square = self.flats[span.flat], None
        gradient = None if fresh is None else span.of(fresh[span.flat], flat.layout)
        if gradient is not None and span.owner == self.transport.rank and not flat.layout.is_full:
            own, (beta1, beta2) = slice(span.start, span.stop), flat.group["betas"]
            square = flat.square[own]
            if square.device != residual.device:        # optimizer offload
                scape_rule.track_square(square, gradient.to(square.device), factor=factor, beta2=beta2, kernels=self.kernels)
                square = None
            if early is not None:
                self.kernels.enter(residual, gradient, factor, square=square, beta2=beta2)
                early[span.flat][own] = scape_rule.score_first_moment(flat.momentum[own], residual.to(flat.weight.device), beta1=beta1)
                gradient = square = None
        self.kernels.enter(residual, gradient, factor, index, values, first=span.start, square=square, beta2=flat.group["betas"][1])

    def _place_for_early_scores(self) -> list[torch.Tensor | None] | None:
        is_literal = self.params.mask_statistic == "first_moment"
        return [None if flat.layout.is_full else torch.empty_like(flat.weight) for flat in self.flats] if is_literal else None

    # --- 3, 4, 5: values to the owners, weights back ----------------------------------------------------------------------------------
    def _exchange_masked(self, fresh, factor, unclipped, positions: Positions, early, space: Workspace):
        """What the masks choose. Returns the own residuals, with a sign where they are overdue, or what has chosen among them, if there is
        room for them."""
        rank, left, lasts, ranked, last, out = self.transport.rank, None, None, None, None, None
        begun = self._ahead and self._ahead.take(factor, unclipped)
        sent, values, cuts = begun.exchanged if begun else positions.to_be_sent(self._partitions, self.layout, self._wire, self._device)
        for piece in self._ahead.rest(begun) if begun else self._through(self._partitions):
            for span, residual, last in piece:
                index, out = positions.of[span.owner][span.flat], values[span.owner][span.flat]
                if lasts is None and self._ages_pass and last is not None:
                    self._lend(fresh, space, [owner for owner in range(self.layout.world_size) if owner != rank])
                    if early is None and space.lends and ranking.fit_beside_the_exchange(
                            self.layout, rank, *(t.element_size() for t in (residual, fresh[0], sent, last))):
                        left = [None if flat.layout.is_full else space.empty(flat.layout.partition_numel, residual.dtype, is_tight=True)
                                for flat in self.flats]
                    lasts = [space.empty(num, flat.stored_last_sync.dtype, is_tight=True, at_end=rank == 0)    # away from the own gradients
                             for num, flat in zip(positions.counts[rank], self.flats, strict=True)]
                    if early is None and left is None and not self.is_dense(self.num_steps + 1):
                        ranked = ranking.as_they_pass(self._groups, self.layout, rank, self.flats, self.num_steps, space, self.kernels,
                                                      fresh[0].element_size(), sent.element_size(),
                                                      functools.partial(self._lend, fresh, space, [rank]))
                lo, hi = cuts[span] if index is not None else (span.start, span.stop)
                index = None if index is None else index[lo:hi]
                self._enter(span, residual, fresh, factor, index, out[lo:hi], early)
                if lasts is not None:
                    self.kernels.take_ages(last, index, span.start, self.num_steps, lasts[span.flat][lo:hi])
                    self._note_order(span, residual, last, early, left, ranked)
        passed = begun and self._ahead.finish(begun)
        self._lend(fresh, space, range(self.layout.world_size) if lasts is None else [rank])
        begun, lasts = None, lasts if passed is None else passed
        splits = positions.splits
        room, message, taken = space.for_exchange(sent, splits, rank, self.flats[0].copies.dtype)
        received = self.transport.to_owners(sent, splits, "values", lambda numel, _: room[:numel])
        del sent, values, out
        self._move_owned(received, positions, message[:splits[rank]].split(positions.counts[rank]), lasts, space)
        message[splits[rank]:] = 0
        space.give_back(*lasts or ())
        del received, lasts, last, passed
        mark = space.mark()
        gather_weights([flat.copies for flat in self.flats], message, positions, self.transport, space.empty, self.kernels)
        space.release(mark)
        space.give_back(*taken)
        return ranked or left

    def _move_owned(self, received, positions: Positions, outs, lasts, space: Workspace) -> None:
        """Steps 3 and 4 from the workers' values, [W, k], a part of the coordinates after another. outs: get the weights of each buffer."""
        rank, begin = self.transport.rank, 0
        mean = space.empty(min(max(positions.counts[rank]), summed_for(self.layout.numel)), self.flats[0].weight.dtype, is_tight=True)
        for i, (flat, index, out) in enumerate(zip(self.flats, positions.of[rank], outs, strict=True)):
            for lo in range(0, len(out), len(mean)):
                hi = min(lo + len(mean), len(out))
                part, last = mean_of_rows(received[:, begin + lo:begin + hi], mean[:hi - lo]), flat.stored_last_sync
                where = slice(lo, hi) if index is None else slice(None)
                if lasts is not None or index is None:
                    last = (lasts[i] if lasts is not None else last)[lo:hi]
                self._owner_step(flat, where, part, None if index is None else index[lo:hi], out[lo:hi], last)
            begin += len(out)
        space.give_back(mean)

    def _lend(self, fresh, space: Workspace, owners) -> None:
        """The gradients of these partitions have entered the residual."""
        for gradient, flat in zip(fresh, self.flats, strict=True):
            size = flat.layout.partition_numel
            for owner in owners:
                space.lend(gradient, owner * size, (owner + 1) * size)

    def _note_order(self, span: Span, residual, last, early, left, ranked) -> None:
        """What ranks a span of own coordinates, and whether they are overdue, which its sign says."""
        flat, kept = self.flats[span.flat], early or left
        if ranked is not None:
            ranked.look(span, residual, last)
        if kept is not None and not flat.layout.is_full:
            by = kept[span.flat][span.start:span.stop]
            if early is None:
                by.copy_(residual)
            self.kernels.mark_overdue(by, last, self.num_steps, flat.max_age)

    def _exchange_all(self, fresh, factor, wire: torch.dtype, early) -> None:
        """Everything, piece by piece. fresh: None to bring up to date what is waiting, without a step."""
        rank, world_size, state = self.transport.rank, self.layout.world_size, self.flats[0].weight.dtype
        empty = functools.partial(torch.empty, device=self._device)
        for piece in self._through(self._columns):
            sizes, own = [span.numel for span, _, _ in piece], [(span, last) for span, _, last in piece if span.owner == rank]
            numel, own_sizes = sum(sizes) // world_size, [span.numel for span, _ in own]
            sent = empty(sum(sizes), dtype=wire)
            for (span, residual, _), values in zip(piece, sent.split(sizes), strict=True):
                self._enter(span, residual, fresh, factor, None, values, early)
            received = self.transport.to_owners(sent, [numel] * world_size, "values")
            del sent, values
            mean = mean_of_rows(received, empty(numel, dtype=state))
            del received
            message = empty(numel, dtype=self.flats[0].copies.dtype)
            for (span, last), mean_part, out in zip(own, mean.split(own_sizes), message.split(own_sizes), strict=True):
                self._owner_step(self.flats[span.flat], slice(span.start, span.stop), mean_part, None, out, last, fresh is not None)
            del mean, mean_part
            received = self.transport.gather(message, "weights")
            for (span, _), part in zip(own, received.split(own_sizes, dim=1), strict=True):
                self.flats[span.flat].copies.view(world_size, -1)[:, span.start:span.stop] = part
            del message, received, out, part

    def _owner_step(self, flat: FlatState, part: slice, mean, index, out, last, is_step: bool = True) -> None:
        """Moves the owned coordinates at ``index`` (None: all) of a part of the partition; ``out`` gets their weights as the copies want
        them. last: the steps of the last synchronisation of the part, or of these coordinates alone. is_step: False: those that are up to
        date stay as they are."""
        group, device = flat.group, flat.weight.device
        weight, momentum = flat.weight[part], flat.momentum[part]
        if not is_step:
            index = (impl_reference.ages(last, self.num_steps) > 0).nonzero().view(-1)
        mean, index = mean.to(device), None if index is None else index.to(device)
        changed = out if is_step and out.device == device else torch.empty(mean.numel() if index is None else len(index), dtype=out.dtype,
                                                                            device=device)
        scape_rule.synchronise(weight, momentum, last, mean if is_step else mean[index], index, self.num_steps, flat.age_tables,
                               flat.decay_products, changed, lr=group["lr"], beta2=group["betas"][1], eps=group["eps"],
                               catch_up=self.params.catch_up, kernels=self.kernels)
        if changed is not out:
            out.copy_(changed if is_step else weight)

    # --- 6: the next mask ---------------------------------------------------------------------------------------------------------------
    def _choose(self, ranked_by, are_scores: bool, space: Workspace) -> torch.Tensor:
        """bool [mask_numel], where the weights are. ranked_by: per buffer [P], residuals or scores; or what has chosen; None: residuals as
        they are stored, which under offload pass again, or the host waits for them."""
        if isinstance(ranked_by, ranking.AsTheyPass):
            return ranked_by.all()
        if ranked_by is None and self._ages_pass:
            return ranking.as_they_pass_again(self._groups, self._through, self.flats, self.num_steps, space, self.kernels)
        device, numel, rank = self.flats[0].weight.device, self.layout.mask_numel, self.transport.rank
        empty = space.empty if device == self._device else None
        chosen = empty(numel, torch.bool) if empty else torch.empty(numel, dtype=torch.bool, device=device)
        for i, part in zip(self._masked, self.codec.parts(chosen), strict=True):
            flat = self.flats[i]
            by = ranked_by[i] if ranked_by else flat.own(flat.residual, rank)
            self.kernels.select(by.to(device), None if are_scores else flat.square, None if self._ages_pass else flat.stored_last_sync,
                                self.num_steps, flat.max_age, flat.layout.segments[rank], part, empty, flat.hints)
        return chosen

    def _start_mask(self, chosen: torch.Tensor, positions) -> None:
        rank = self.transport.rank
        if self.is_watched and not positions.dense:
            self.mask_overlap = self.codec.overlap(chosen, [positions.of[rank][i] for i in self._masked])
        self._send_mask(self.codec.encode(chosen, rank).to(self._device))

    def _send_mask(self, message: torch.Tensor) -> None:
        self._mask_message, self._positions = message, None
        self._arriving = self.transport.gather_async(message, "mask")

    def _peek_positions(self) -> Positions:
        """The positions of the coming step; waits for the mask under way."""
        if self._positions is None:
            messages = (self._arriving or self.transport.gather_async(self._mask_message, "mask")).wait()
            self._positions = Positions(self.layout, self.codec.decode_all(messages))
            self._arriving = None
        return self._positions

    def _take_positions(self) -> Positions:
        return self._all_dense if self.is_dense(self.num_steps) else self._peek_positions()
