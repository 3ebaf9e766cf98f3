"""Cases run on every rank by test_checkpoint.py: save and resume through DeepSpeed's own files."""
import os
import tempfile

import torch
import torch.distributed as dist

from tests.helpers.bits import assert_same_bits
from tests.scape.zero_cases import check_copies, initialize, micro_step, settings, train_beside_simulation


def shared_folder():
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return folder[0]


def config(kind, stage=2, **params):
    return settings(stage, "bf16", optimizer={"type": "SCAPE", "params": {"lr": 0.01, "density": 0.1, "save_residual": kind, **params}},
                    scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 8}}, gradient_clipping=0.5)


def state_of(engine):
    flow = engine.optimizer.flow
    return [t.detach().clone() for flat in flow.flats
            for t in (flat.copies, flat.weight, flat.momentum, flat.square, flat.last_sync.float(), flat.residual, flat.decay)]


def save_and_resume(kind, stage=2, resumed_with=None, **params):
    """(uninterrupted engine, resumed engine) after saving at step 5."""
    folder = shared_folder()
    engine = initialize(config(kind, stage, **params))
    for number in range(5):
        micro_step(engine, number)
    engine.save_checkpoint(folder, tag="here")
    dist.barrier()
    other = initialize(resumed_with or config(kind, stage, **params))
    micro_step(other, 99)                   # something to be overwritten
    path, _ = other.load_checkpoint(folder, tag="here")
    assert path is not None
    return engine, other, folder


def case_full_resumes_bit_equal(rank, world_size):
    """C101: residuals, pending mask, ages, decay products, scheduler: nothing is lost."""
    for stage, params in ((1, {}), (2, {}), (2, {"density": 0.02, "dense_warmup_steps": 4}), (2, {"dense_warmup_steps": 7})):
        engine, other, _ = save_and_resume("full", stage, **params)
        for number in range(5, 12):
            assert micro_step(engine, number) == micro_step(other, number), (stage, params, number)
        for a, b in zip(state_of(engine), state_of(other), strict=True):
            assert_same_bits(a, b, f"stage {stage} {params}")
        assert engine.get_lr() == other.get_lr()
        engine.destroy()
        other.destroy()


def case_mean_keeps_the_mean(rank, world_size):
    engine, other, _ = save_and_resume("mean")
    for a, b in zip(engine.optimizer.flow.flats, other.optimizer.flow.flats, strict=True):
        everyone = [None] * world_size
        dist.all_gather_object(everyone, a.residual)
        total = everyone[0].clone()
        for r in everyone[1:]:
            total += r
        assert_same_bits(b.residual, total / world_size, "mean residual")
        assert_same_bits(a.weight.detach(), b.weight.detach(), "weights")
        assert float(b.residual.abs().max()) > 0
    micro_step(other, 5)
    check_copies(other)


def case_flush_synchronises_everything_first(rank, world_size):
    folder = shared_folder()
    engine = initialize(config("flush"))
    for number in range(5):
        micro_step(engine, number)
    flow = engine.optimizer.flow
    held = [flat.residual.clone() for flat in flow.flats]
    before = [flat.weight.detach().clone() for flat in flow.flats]
    assert any(r.any() for r in held)
    engine.save_checkpoint(folder, tag="here")
    check_copies(engine)
    for flat, old in zip(flow.flats, before, strict=True):
        assert not flat.residual.any()
        waiting = flat.last_sync < 5
        moved = flat.weight.detach() != old
        assert not moved[~waiting].any() or bool((flat.last_sync == 5).all())
    dist.barrier()
    other = initialize(config("flush"))
    other.load_checkpoint(folder, tag="here")
    for number in range(5, 9):
        assert micro_step(engine, number) == micro_step(other, number)
    for a, b in zip(state_of(engine), state_of(other), strict=True):
        assert_same_bits(a, b, "after flush")
    size = os.path.getsize(os.path.join(folder, "here", f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    assert size < sum(r.numel() for r in held) * 4 * (4 / world_size + 0.5) + 200_000


def case_other_density_starts_without_masks(rank, world_size):
    engine, other, _ = save_and_resume("full", resumed_with=config("full", density=0.3))
    assert other.optimizer.optimizer.param_groups[0]["density"] == 0.3
    train_beside = [micro_step(other, number) for number in range(5, 8)]
    assert all(loss == loss for loss in train_beside)
    check_copies(other)
    assert micro_step(engine, 5) == train_beside[0]


def case_resumed_run_follows_the_rule(rank, world_size):
    """The simulation starts where the loaded engine stands."""
    _, other, _ = save_and_resume("full")
    flow = other.optimizer.flow
    import tests.scape.zero_cases as zero_cases
    original = zero_cases.simulation_of

    def simulation_of(engine):
        simulation = original(engine)
        simulation.t, simulation.dense = flow.num_steps, False
        for f, flat in enumerate(flow.flats):
            parts = [None] * world_size
            dist.all_gather_object(parts, [t.detach() for t in (flat.residual, flat.weight, flat.momentum, flat.square, flat.last_sync)])
            simulation.mask[f] = torch.zeros_like(simulation.mask[f])
            simulation.mask[f][flow._peek_positions().whole[f]] = True
            for r, (residual, w, m, q, last) in enumerate(parts):
                simulation.residual[r][f].copy_(residual)
                owner = simulation.owners[f][r]
                owner.w, owner.m, owner.q = w.clone(), m.clone(), q.clone()
                owner.age = flow.num_steps - last.long()
                owner.decay = flat.decay[owner.age.clamp(max=flat.decay.numel() - 1)].clone()
        return simulation

    zero_cases.simulation_of = simulation_of
    try:
        train_beside_simulation(other, 4, start=5)
    finally:
        zero_cases.simulation_of = original


def case_state_of_another_optimizer_is_refused(rank, world_size):
    folder = shared_folder()
    adam = settings(2)
    adam["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    engine = initialize(adam)
    micro_step(engine, 0, branch_ranks=())
    engine.save_checkpoint(folder, tag="adam")
    dist.barrier()
    other = initialize(settings(2))
    try:
        other.load_checkpoint(folder, tag="adam")
    except Exception as error:
        assert "no state of SCAPE" in str(error), error
    else:
        raise AssertionError("accepted")
    other.load_checkpoint(folder, tag="adam", load_optimizer_states=False)
    micro_step(other, 1)
    check_copies(other)
