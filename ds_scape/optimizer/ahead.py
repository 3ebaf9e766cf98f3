"""The residuals' pass behind the backward pass, as far as it goes there: as if nothing were clipped.

How much a gradient counts is known only when the norm is, after the backward pass. But mostly nothing is clipped, and then it is known
before. So where there is host memory for the residuals twice, they pass while gradients are still being made: in place of what is there,
the other memory is written, and if it turns out wrong (a norm above the limit, a gradient that is not finite, one that comes a second time)
the step takes the old residuals as if nothing had happened. Same bits, either way.

The own ones pass too, with their ages, and come in once more to be ranked: behind the next forward pass. The next mask is found there, in
the gradients' memory, which nobody needs before the next backward pass; whoever writes there calls join() before.

Every step with masks is counted, with the reason where nothing passed ahead.
"""
import bisect
import contextlib
import logging
import weakref
from collections import Counter

import torch

from ds_scape.optimizer.passage import host_zeros

log = logging.getLogger("ds_scape")
#: Why residuals did not pass ahead of a step. The first three are the same on all ranks.
REASONS = {
    "clipped": "it was clipped, so gradients count less than was assumed (gradient_clipping; without it DeepSpeed clips at 1.0)",
    "clipped_before": "the step before it was clipped, so it was not tried",
    "not_finite": "it was skipped, as gradients were not finite",
    "came_twice": "a gradient came a second time",
    "looked_at": "the host read or wrote residuals, or all was flushed, between the backward pass and the step",
    "loss_scale": "the loss scale changed between the backward pass and the step",
    "not_said": "no gradient was said to be complete before it",
}
_EVERYWHERE = ("clipped", "clipped_before", "not_finite")


def ahead_for(flow) -> "Ahead | None":
    """For a flow whose settings ask for it, if it has masks, other ranks and residuals in host memory."""
    is_asked_for = flow._passage is not None and flow.params.offload.ahead
    return Ahead(flow) if is_asked_for and flow.layout.world_size > 1 and flow.layout.has_masks else None


class _Run:
    """One step's pass: what it sends, which gradients are still to come, the piece that is on the device."""

    def __init__(self, fresh, factor: float, left: list[int], step: int):
        self.fresh, self.factor, self.left, self.step = fresh, factor, left, step
        self.seen, self.completed, self.num_passed = set(), [i for i, num in enumerate(left) if not num], 0
        self.positions = self.exchanged = self.lasts = self.passing = self.held = self.settled = self.kept = None


class Ahead:
    """Of one flow: see ahead_for(). ``is_whole``: own ones pass too; not where their ages stay with the weights (optimizer offload) or
    scores are made from gradients. ``is_choosing``: the next mask is being found in the gradients' memory. ``num_taken``: steps whose
    residuals passed ahead; ``num_missed``: {one of REASONS: steps}; together all steps with masks and those skipped in their place."""

    def __init__(self, flow):
        rank, layouts, device = flow.transport.rank, flow.layout.flats, flow._device
        self._flow = weakref.proxy(flow)                # which has this: its memory is to go with its last name
        self.is_whole = flow._ages_pass and flow.params.mask_statistic == "residual"
        self._early = [piece for piece in flow._partitions if self.is_whole or piece[0].owner != rank]
        self._late = flow._partitions[len(self._early):]
        self._order = list(reversed(range(len(self._early))))       # in which gradients were complete the last time
        self._sizes = [sum(max(0, min(stop, s.stop) - max(start, s.start)) for i, owner, start, stop in piece
                           for s in layouts[i].segments[owner]) for piece in self._early]
        self._places = [sorted((span.owner * flat.partition_numel + span.start, span.numel, number) for number, piece in enumerate(
            self._early) for span in piece if span.flat == i) for i, flat in enumerate(layouts)]
        self.spares = [[host_zeros(of.numel(), of.dtype, device, flow.params.offload.pin_memory) for of in stored] for stored in (
            [flat.stored_residual for flat in flow.flats], [flat.stored_last_sync for flat in flow.flats if self.is_whole])]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._run, self._is_void, self._is_wanted, self._passed, self.is_choosing = None, False, True, None, False
        self._was_dropped, self.num_taken, self.num_missed = False, 0, Counter()

    @property
    def is_running(self) -> bool:
        return self._run is not None

    def counts(self) -> dict[str, int]:
        """So far: steps whose residuals passed, "ahead_taken"; all others that have masks, "ahead_not_taken_..." by reason."""
        return {"ahead_taken": self.num_taken, **{f"ahead_not_taken_{reason}": num for reason, num in self.num_missed.items() if num}}

    def pieces(self) -> list[list]:
        """In the order in which they pass."""
        return [self._early[i] for i in self._order] + self._late

    def complete(self, fresh: list[torch.Tensor], flat: int, start: int, stop: int, factor: float) -> None:
        """What lies at [start, stop) of a gradient buffer, a whole tensor, is final, and counts ``factor`` times if nothing is clipped."""
        if self._is_void or not self._is_wanted or start == stop:       # an empty tensor lies where the next one does
            return
        if self._run is None:
            self._begin(fresh, factor)
        run = self._run
        if (flat, start) in run.seen:
            self._is_void = True
            return
        run.seen.add((flat, start))
        places = self._places[flat]
        for begin, numel, number in places[max(0, bisect.bisect_right(places, (start, float("inf"))) - 1):]:
            if begin >= stop:
                break
            overlap = min(stop, begin + numel) - max(start, begin)
            if overlap > 0:
                run.left[number] -= overlap
                if not run.left[number]:
                    run.completed.append(number)
        while run.num_passed < len(self._order) and not run.left[self._order[run.num_passed]]:
            with self._beside():
                self._enter(run)

    def _enter(self, run: _Run) -> None:
        """The gradients of the piece that is on the device. q is tracked later: there is only one of it."""
        flow, (_, values, cuts) = self._flow, run.exchanged
        for span, residual, last in run.held:
            lo, hi = cuts.get(span, (span.start, span.stop))
            index = run.positions.of[span.owner][span.flat]
            index = None if index is None else index[lo:hi]
            flow.kernels.enter(residual, span.of(run.fresh[span.flat], flow.layout.flats[span.flat]), run.factor, index,
                               values[span.owner][span.flat][lo:hi], first=span.start)
            if last is not None:
                flow.kernels.take_ages(last, index, span.start, run.step, run.lasts[span.flat][lo:hi])
        run.num_passed, run.held = run.num_passed + 1, next(run.passing, None)

    def _begin(self, fresh, factor) -> None:
        self._was_dropped = False
        flow, run = self._flow, _Run(fresh, factor, list(self._sizes), self._flow.num_steps + 1)
        run.kept = flow._arriving               # its memory belongs to the stream that goes on meanwhile
        with self._beside():
            run.positions, run.settled = flow._peek_positions(), flow._passage.num_settled
            run.exchanged = run.positions.to_be_sent(flow._partitions, flow.layout, flow._wire, flow._device)
            run.lasts = [torch.empty(num, dtype=of.dtype, device=flow._device) for num, of in zip(
                run.positions.counts[flow.transport.rank], self.spares[1], strict=False)]
            run.passing = flow._through(self.pieces(), targets=self.spares)
            run.held = next(run.passing, None)
        self._run = run

    @contextlib.contextmanager
    def _beside(self):
        """What is queued here comes after all that the current stream has been given, which does not wait for it."""
        if self._stream is None:
            yield
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._flow._device))
            with torch.cuda.stream(self._stream):
                yield

    def join(self) -> None:
        """The current stream goes on after all that was queued beside it."""
        self.is_choosing = False
        if self._stream is not None:
            torch.cuda.current_stream(self._flow._device).wait_stream(self._stream)

    def choosing(self):
        """Within, the next mask is found: beside what comes next, if what ranks it has passed already."""
        passed, self._passed = self._passed, None
        self.is_choosing = passed is not None
        if not self.is_choosing:
            return contextlib.nullcontext()
        for tensor in (*passed, *(flat.square for flat in self._flow.flats)) if self._flow._device.type == "cuda" else ():
            tensor.record_stream(self._stream)          # whoever drops all of this now does not wait for it
        return self._beside()

    def take(self, factor: float, unclipped: float) -> _Run | None:
        """What has passed already, if it was right, for a step whose gradients count ``factor`` times, and would ``unclipped`` times."""
        reason = self._why_not(factor, unclipped)
        self._is_wanted = factor == unclipped           # mostly the next step is like this one
        if reason is None:
            return self._run
        self.drop(reason)
        return None

    def _why_not(self, factor: float, unclipped: float) -> str | None:
        run = self._run
        if run is None:
            return "clipped_before" if not self._is_wanted else "looked_at" if self._was_dropped else "not_said"
        if self._is_void:
            return "came_twice"
        if run.settled != self._flow._passage.num_settled:
            return "looked_at"
        return None if run.factor == factor else "clipped" if factor != unclipped else "loss_scale"

    def rest(self, run: _Run):
        """Lets those pass whose gradients nothing was said of; yields the pieces that do not pass ahead."""
        while run.num_passed < len(self._order):
            self._enter(run)
        if run.held is not None:
            yield run.held
            yield from run.passing

    def finish(self, run: _Run) -> list[torch.Tensor] | None:
        """All have passed: the other memory is the residuals' from now on. If own ones passed ahead, returns the last synchronisations of
        those that are sent, per buffer."""
        flow = self._flow
        for flat, gradient in zip(flow.flats, run.fresh, strict=True) if self.is_whole else ():
            if not flat.layout.is_full:
                own = flat.own(gradient, flow.transport.rank)
                flow.kernels.track_square(flat.square, own, run.factor, beta2=flat.group["betas"][1])
        for spares, name in zip(self.spares, ("stored_residual", "stored_last_sync"), strict=True):
            for i, flat in enumerate(flow.flats[:len(spares)]):
                now = getattr(flat, name)
                setattr(flat, name, spares[i])
                spares[i] = now
        self._order = run.completed + [i for i in self._order if i not in set(run.completed)]
        self._passed = run.fresh if self.is_whole else None
        self.drop()
        self.num_taken, self._was_dropped = self.num_taken + 1, False
        return run.lasts if self.is_whole else None

    def drop(self, reason: str | None = None) -> None:
        """There is nothing under way any more, and the current stream goes on after what was. reason: of REASONS, where this is the step
        that it was for."""
        self.join()
        if self._run is not None:
            self._run.passing.close()
        self._was_dropped = reason is None and (self._was_dropped or self._run is not None)
        self._run, self._is_void = None, False
        if reason is not None:
            rank = self._flow.transport.rank
            if not self.num_missed[reason] and (rank == 0 or reason not in _EVERYWHERE):
                log.warning("ahead: rank %d's residuals could not pass behind the backward pass, only in the step: %s. From now on this "
                            "is counted (ahead_not_taken_%s)", rank, REASONS[reason], reason)
            self.num_missed[reason] += 1
