"""Which steps' residuals passed behind the backward pass, and why others' did not: counted, logged once, in the statistics."""
import json
import logging

import pytest
import torch

from ds_scape.optimizer import workspace
from ds_scape.optimizer.ahead import REASONS
from ds_scape.optimizer.statistics import StepRows
from tests.scape.flow_helpers import Problem
from tests.scape.test_passage import Echo


class Training:
    """Steps of rank ``rank`` of two whose peer sends what it sends; step 1 has no masks."""

    def __init__(self, rank: int = 0, **settings):
        self.problem = Problem(2, dtype=torch.bfloat16, shapes=[[(40, 20)] * 6], densities=(0.05,), offload={"ahead": True}, **settings)
        self.flow, self.whole, self.fresh = self.problem.flow(Echo(), rank), *workspace.joined(self.problem.buffers, torch.bfloat16)
        self.step()

    @property
    def counts(self) -> dict[str, int]:
        return self.flow._ahead.counts()

    def say(self, slot, loss_scale: float = 1.0) -> None:
        self.flow.gradient_is_complete(self.fresh, 0, slot.offset, slot.offset + slot.numel, loss_scale)

    def step(self, between=lambda: None, says=True, **settings):
        """``between``: called after the backward pass."""
        self.flow.prefetch()
        self.whole.zero_()
        gradient = self.problem.gradient(0, self.flow.num_steps + 1)[0]
        for slot in reversed(self.problem.slots[0]):
            self.fresh[0][slot.offset:slot.offset + slot.numel] = gradient[slot.offset:slot.offset + slot.numel]
            if says:
                self.say(slot, settings.get("loss_scale", 1.0))
        between()
        return self.flow.step(self.fresh, may_overwrite=True, **settings)


def test_without_a_reason_all_steps_with_masks_are_taken():
    training = Training(dense_warmup_steps=3)
    for _ in range(5):
        training.step()
    assert training.counts == {"ahead_taken": 3}


def _not_finite(training):
    training.step(lambda: training.fresh[0][:1].fill_(float("nan")))


def _looked_at(training):
    training.step(lambda: training.flow.flats[0].residual)


def _settled(training):
    training.step(training.flow.settle)


def _came_twice(training):
    training.step(lambda: training.say(training.problem.slots[0][2]))


def _clipped(training):
    training.step(max_norm=1e-6)


def _loss_scale(training):
    training.step(loss_scale=2.0, between=lambda: setattr(training.flow._ahead._run, "factor", 1.0))


def _not_said(training):
    training.step(says=False)


WAYS = [("not_finite", _not_finite), ("looked_at", _looked_at), ("looked_at", _settled), ("came_twice", _came_twice), ("clipped", _clipped),
        ("loss_scale", _loss_scale), ("not_said", _not_said)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("reason, way", WAYS, ids=[way.__name__[1:] for _, way in WAYS])
def test_a_step_that_was_not_taken_says_why_once(reason, way, rank, caplog):
    caplog.set_level(logging.WARNING, "ds_scape")
    training, name = Training(rank), f"ahead_not_taken_{reason}"
    training.step()
    way(training)
    assert training.counts == {"ahead_taken": 1, name: 1}
    before = {"ahead_not_taken_clipped_before": 1} if reason == "clipped" else {}       # not tried then
    training.step()
    training.step()
    assert training.counts == {"ahead_taken": 3 - len(before), name: 1, **before}
    way(training)
    assert training.counts == {"ahead_taken": 3 - len(before), name: 2, **before}
    texts = [record.getMessage() for record in caplog.records if record.name == "ds_scape"]
    told = {reason, *(["clipped_before"] if before else [])}
    if rank and reason in ("clipped", "not_finite"):        # the same everywhere
        told = set()
    assert sorted(texts) == sorted(text for text in texts if any(REASONS[one] in text and f"rank {rank}'s" in text for one in told))
    assert len(texts) == len(told)


def test_all_reasons_are_known_here():
    assert {reason for reason, _ in WAYS} | {"clipped_before"} == set(REASONS)


def test_steps_without_masks_are_not_counted():
    """Skipped or not, whatever is said in them."""
    training = Training(dense_warmup_steps=4)
    training.step()
    _not_finite(training)
    _clipped(training)
    _not_said(training)
    assert training.flow.num_steps == 4 and training.counts == {"ahead_taken": 0}


def test_what_is_begun_again_after_it_was_dropped_may_be_taken():
    """Residuals are made whole in the middle of a backward pass: what is said from then on passes, the rest in the step."""
    training = Training()
    training.step(lambda: (training.flow.settle(), training.say(training.problem.slots[0][0])))
    assert training.counts == {"ahead_taken": 1}
    _not_said(training)
    assert training.counts == {"ahead_taken": 1, "ahead_not_taken_not_said": 1}


def test_nothing_of_a_pass_is_left_where_all_is_loaded_anew():
    """Between the backward pass and the step. (Without that the next step's gradients came to the old pass, a second time.)"""
    training = Training()
    training.step(lambda: training.flow.restart(7))
    assert training.flow.num_steps == 8 and training.flow.last_dense_step == 8 and training.counts == {"ahead_taken": 0}
    training.step()
    assert training.counts == {"ahead_taken": 1}


def test_an_empty_tensor_is_not_its_neighbour():
    """It begins where the next one does. (Found by this: that counted as a gradient that comes twice, in every step.)"""
    training = Training()
    start = training.problem.slots[0][2].offset
    training.step(lambda: training.flow.gradient_is_complete(training.fresh, 0, start, start))
    assert training.counts == {"ahead_taken": 1}


def test_statistics_have_the_counts_so_far(tmp_path):
    training = Training()
    rows = StepRows(training.flow, str(tmp_path / "log"))
    for settings in ({}, {"max_norm": 1e-6}, {}, {}):
        rows.row(training.step(**settings))
    rows.close()
    written = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    names = ("ahead_taken", "ahead_not_taken_clipped", "ahead_not_taken_clipped_before")
    assert [[row.get(name) for name in names] for row in written] == [[1, None, None], [1, 1, None], [1, 1, 1], [2, 1, 1]]
    assert ("Train/Samples/scape_ahead_taken", 2.0, 7) in rows.events(written[-1], 7)
