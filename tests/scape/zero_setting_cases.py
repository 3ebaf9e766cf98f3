"""More cases run on every rank by test_zero.py: how SCAPE is asked for, and what the host may do around it."""
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import ds_scape
from tests.helpers.bits import assert_same_bits
from tests.scape.zero_cases import (
    STEPS,
    check_copies,
    initialize,
    micro_step,
    settings,
    train_beside_simulation,
    train_beside_simulation_from_here,
    two_groups,
)
from zipscape.errors import ConfigError


def case_stage_1_without_contiguous_gradients(rank, world_size):
    engine = initialize(settings(1, zero_optimization={"contiguous_gradients": False, "round_robin_gradients": True}))
    train_beside_simulation(engine, STEPS)
    engine.destroy()


def case_parameter_alignment(rank, world_size):
    engine = initialize(settings(2, zero_optimization={"parameter_alignment": True, "overlap_comm": True}))
    assert any(any(p) for p in engine.optimizer.round_robin_bit16_padding)
    train_beside_simulation(engine, STEPS)
    engine.destroy()


def case_client_optimizer(rank, world_size):
    """C103: an optimizer object in place of the JSON section, with a scheduler of torch's; permission for untested ones is not needed."""
    for allowed in (True, False):
        config = settings(1, zero_allow_untested_optimizer=allowed)
        del config["optimizer"]
        engine = initialize(config, optimizer=lambda parameters: ds_scape.SCAPE(parameters, lr=0.01))
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 1, gamma=0.5)
        train_beside_simulation(engine, 3)
        scheduler.step()
        assert [flat.group["lr"] for flat in engine.optimizer.flow.flats] == [0.005]
        train_beside_simulation_from_here(engine, 2)
        try:
            engine.optimizer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
        except ConfigError as error:
            assert "after its first step" in str(error)
        else:
            raise AssertionError("a group was added to an optimizer whose layout is agreed on")
        engine.destroy()


def case_client_optimizer_with_optimizer_offload(rank, world_size):
    """C104: DeepSpeed refuses client optimizers that are not its own and says what to set; then it works."""
    for forced in (True, False):
        config = settings(2, zero_force_ds_cpu_optimizer=forced,
                          zero_optimization={"offload_optimizer": {"device": "cpu", "pin_memory": False}})
        del config["optimizer"]
        try:
            engine = initialize(config, optimizer=lambda parameters: ds_scape.SCAPE(parameters, lr=0.01))
        except Exception as error:
            assert forced and "zero_force_ds_cpu_optimizer" in str(error), error
            continue
        assert not forced
        train_beside_simulation(engine, 3)
        engine.destroy()


def case_building_the_engine_is_no_step(rank, world_size):
    """C106: nothing is counted, moved or chosen before the first gradient, however the host fills its states in."""
    engine = initialize(settings(2, zero_optimization={"offload_optimizer": {"device": "cpu", "pin_memory": False}}))
    flow = engine.optimizer.flow
    assert flow.num_steps == 0 and flow.is_dense(1) and not any(int(s["step"]) for s in engine.optimizer.optimizer.state.values())
    for flat in flow.flats:
        assert not any(t.any() for t in (flat.momentum, flat.square, flat.last_sync, flat.residual)) and bool((flat.decay == 1).all())
    check_copies(engine)
    engine.destroy()


def case_groups_of_frozen_and_of_empty_parameters(rank, world_size):
    """C109: nothing divided by zero, nothing sent for them."""

    def groups(model):
        empty, frozen = [model.empty], list(model.frozen.parameters())
        rest = [p for name, p in model.named_parameters() if not name.startswith(("empty", "frozen"))]
        return [{"params": frozen}, {"params": rest}, {"params": empty, "density": 0.01}]

    engine = initialize(settings(2), parameters=groups)
    frozen = [p.clone() for p in engine.module.frozen.parameters()]
    train_beside_simulation(engine, STEPS)
    assert sum(engine.optimizer.flow.layout.splits(False)) < 1200
    for a, b in zip(frozen, engine.module.frozen.parameters(), strict=True):
        assert_same_bits(a, b, "frozen")
    engine.destroy()


def case_every_group_keeps_its_learning_rate(rank, world_size):
    """C118: under a scheduler that scales, groups stay in their proportion."""
    engine = initialize(settings(1, scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4}}),
                        parameters=two_groups)
    rates = []
    for number in range(8):
        micro_step(engine, number)
        rates.append([flat.group["lr"] for flat in engine.optimizer.flow.flats])
    assert len({tuple(r) for r in rates}) > 5 and all(abs(b - 2 * a) < 1e-12 for a, b in rates if a), rates
    engine.destroy()


def case_sizes_are_said(rank, world_size):
    """Whatever the log level, by rank 0: memory at the start, the residuals' size before anything is written."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    heard, file = [], Path(folder[0]) / "here"
    with mock.patch("builtins.print", lambda *texts, **_: heard.append((" ".join(map(str, texts)), file.exists()))):
        for kind, expected in (("full", "residuals (full) take"), ("mean", "residuals (mean) and ages take"), ("flush", "no residuals")):
            engine = initialize(settings(2, optimizer={"params": {"save_residual": kind}}))
            micro_step(engine, 0)
            engine.save_checkpoint(folder[0], tag="here")
            said = [text for text in heard if "SCAPE" in text[0] or "checkpoint: " in text[0]]
            assert len(said) == (2 if rank == 0 else 0), said
            if rank == 0:
                assert "SCAPE keeps beyond dense ZeRO 1, per rank: 0.0 MB on the device (residual 0.0" in said[0][0], said
                assert expected in said[1][0] and (kind != "full" or not said[1][1]), said
            heard.clear()
            engine.destroy()


def case_others_are_left_alone(rank, world_size):
    """An engine without SCAPE gets DeepSpeed's own class, itself."""
    config = settings(1)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    engine = initialize(config)
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    assert type(engine.optimizer) is DeepSpeedZeroOptimizer
    assert not hasattr(torch.optim, "AdamS")                # C116: the name of another package's optimizer
    engine.destroy()


def case_boundaries_set_by_hand(rank, world_size):
    """set_gradient_accumulation_boundary: gradients add up until the caller says so; nothing is sent before."""
    engine = initialize(settings(2))
    flow = engine.optimizer.flow
    for number in range(9):
        engine.set_gradient_accumulation_boundary(number % 3 == 2)
        sent = sum(flow.transport.sent_bytes.values())
        micro_step(engine, number)
        assert (sum(flow.transport.sent_bytes.values()) > sent) == (number % 3 == 2)
    assert flow.num_steps == 3 and not any(fresh.any() for fresh in engine.optimizer.fresh_gradients)
    check_copies(engine)
    engine.destroy()


def case_what_is_dropped_leaves_nothing(rank, world_size):
    """A backward pass that fails half-way, and one without a step, then zero_grad(): the next steps are as if neither had been."""
    for stage, offload in ((1, {"ahead": True}), (2, False)):
        engine = initialize(settings(stage, gradient_clipping=0.0, optimizer={"params": {"offload": offload}}))
        losses, _ = train_beside_simulation(engine, 3)
        failing = engine.module.layers[0].weight.register_hook(lambda gradient: 1 // 0)
        tokens = torch.zeros(3, 6, dtype=torch.long, device=engine.device)
        try:
            engine.backward(engine(tokens, True))
        except ZeroDivisionError:
            assert any(fresh.any() for fresh in engine.optimizer.fresh_gradients), "it failed too early to leave anything"
        else:
            raise AssertionError("the backward pass did not fail")
        failing.remove()
        engine.optimizer.zero_grad()
        assert not any(fresh.any() for fresh in engine.optimizer.fresh_gradients)
        train_beside_simulation_from_here(engine, 1, 3)
        engine.backward(engine(tokens, True))
        engine.optimizer.zero_grad()
        train_beside_simulation_from_here(engine, 1, 4)
        assert engine.optimizer.ahead_counts == ({"ahead_taken": 4} if offload else None), engine.optimizer.ahead_counts
        other = initialize(settings(stage, gradient_clipping=0.0, optimizer={"params": {"offload": offload}}))
        assert [micro_step(other, number) for number in range(3)] == losses
        for number in (3, 4):
            micro_step(other, number)
        for a, b in zip(engine.optimizer.bit16_groups_flat, other.optimizer.bit16_groups_flat, strict=True):
            assert_same_bits(a, b, "weights")
        engine.destroy()
        other.destroy()


def case_a_step_after_a_backward_pass_that_failed(rank, world_size):
    """What had come of it counts, and nothing of it is left for the next steps: the same bits, whether residuals pass ahead or not."""
    weights = []
    for offload in (False, True, {"ahead": True}):
        engine = initialize(settings(1, gradient_clipping=0.0, optimizer={"params": {"offload": offload}}))
        for number in range(3):
            micro_step(engine, number)
        failing = engine.module.layers[0].weight.register_hook(lambda gradient: 1 // 0)
        try:
            engine.backward(engine(torch.full((3, 6), rank, dtype=torch.long, device=engine.device), True))
        except ZeroDivisionError:
            assert any(fresh.any() for fresh in engine.optimizer.fresh_gradients), "it failed too early to leave anything"
        failing.remove()
        engine.step()
        for number in range(3, 7):
            micro_step(engine, number)
        weights.append([flat.clone() for flat in engine.optimizer.bit16_groups_flat])
        engine.destroy()
    for others in weights[1:]:
        for a, b in zip(weights[0], others, strict=True):
            assert_same_bits(a, b, "weights")
