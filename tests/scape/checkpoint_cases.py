"""Cases run on every rank by test_checkpoint.py: save and resume through DeepSpeed's own files."""
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ds_scape.optimizer import checkpoint
from tests.helpers.bits import assert_same_bits
from tests.scape.zero_cases import check_copies, from_all, initialize, micro_step, settings, train_beside_simulation_from_here, two_groups


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
    for stage, params in ((1, {}), (2, {"offload": True}), (2, {"density": 0.02, "dense_warmup_steps": 4}), (2, {"dense_warmup_steps": 7})):
        engine, other, _ = save_and_resume("full", stage, **params)
        for number in range(5, 12):
            assert micro_step(engine, number) == micro_step(other, number), (stage, params, number)
        for a, b in zip(state_of(engine), state_of(other), strict=True):
            assert_same_bits(a, b, f"stage {stage} {params}")
        assert engine.get_lr() == other.get_lr()
        engine.destroy()
        other.destroy()


def case_mean_keeps_the_mean(rank, world_size):
    with mock.patch.object(checkpoint, "PIECE", 1000 * world_size):         # several pieces, a short one last
        engine, other, _ = save_and_resume("mean")
    for a, b in zip(engine.optimizer.flow.flats, other.optimizer.flow.flats, strict=True):
        total, *others = (residual for residual, in from_all([a.residual]))
        for residual in others:
            total += residual
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
    train_beside_simulation_from_here(other, 4, start=5)


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


def case_zero_to_fp32(rank, world_size):
    folder = shared_folder()
    engine = initialize(config("full"))
    for number in range(4):
        micro_step(engine, number)
    engine.save_checkpoint(folder, tag="here")
    dist.barrier()
    if rank == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(folder, tag="here")
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and parameter.numel():
                assert weights[name].dtype == torch.float32
                assert_same_bits(weights[name].bfloat16().cpu(), parameter.detach().cpu(), name)
    dist.barrier()


def case_a_corrupt_file_of_one_rank_is_an_error_on_all(rank, world_size):
    """Cut short, of another program, with residuals of another size: one text on all ranks, no hang."""
    folder = shared_folder()
    engine = initialize(config("full"))
    for number in range(3):
        micro_step(engine, number)
    engine.save_checkpoint(folder, tag="here")
    dist.barrier()
    file = os.path.join(folder, "here", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    whole = open(file, "rb").read()

    def without_record(saved):
        del saved["optimizer_state_dict"]["scape"]

    def with_short_residual(saved):
        saved["optimizer_state_dict"]["scape"]["residual"][0] = torch.zeros(7)

    for change, expected in ((None, ""), (without_record, "no record of SCAPE"), (with_short_residual, "residuals of [7] elements")):
        if rank == 0:
            if change is None:
                open(file, "wb").write(whole[:len(whole) // 2])
            else:
                open(file, "wb").write(whole)
                saved = torch.load(file, weights_only=False)
                change(saved)
                torch.save(saved, file)
        dist.barrier()
        other, texts = initialize(config("full")), [None] * world_size
        try:
            other.load_checkpoint(folder, tag="here")
        except Exception as error:
            dist.all_gather_object(texts, str(error))
            assert len(set(texts)) == 1 and "rank 1 reported an error" in texts[0] and expected in texts[0], texts
        else:
            raise AssertionError(f"accepted: {expected}")
        dist.barrier()
    if rank == 0:
        open(file, "wb").write(whole)
    dist.barrier()
    other = initialize(config("full"))
    other.load_checkpoint(folder, tag="here")
    assert micro_step(engine, 3) == micro_step(other, 3)


def convert(folder):
    result = subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", f"{folder}/here",
                             "--output_folder", f"{folder}/universal", "--num_extract_workers", "1", "--num_merge_workers", "1",
                             "--inject_missing_state"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def universal_config():
    changed = config("full")
    changed["checkpoint"] = {"load_universal": True}
    return changed


def case_universal_checkpoint(rank, world_size):
    """C96: DeepSpeed's converter takes our files, and what was waiting survives: mean residuals, ages, decay. Saved with "full", residuals
    are lost, and that is said. The files stay for case_universal_at_another_world_size, where the test names a folder."""
    folder = os.environ.get("SCAPE_TEST_FOLDER") or shared_folder()
    for kind in ("full", "mean"):
        engine = initialize(config(kind))
        for number in range(6):
            micro_step(engine, number)
        engine.save_checkpoint(folder, tag="here")
        dist.barrier()
        if rank == 0:
            convert(folder)
            torch.save([p.detach().cpu() for p in engine.module.parameters()], f"{folder}/weights.pt")
        means = mean_residuals(engine)
        ages = ages_by_name(engine)
        if rank == 0:
            torch.save((means, ages), f"{folder}/waiting.pt")
        dist.barrier()
        other = initialize(universal_config())
        with warnings_of_deepspeed() as heard:
            other.load_checkpoint(folder, tag="universal")
        assert any("are lost" in text for text in heard) == (kind == "full" and rank == 0), heard
        for a, b in zip(engine.optimizer.flow.flats, other.optimizer.flow.flats, strict=True):
            for name in ("copies", "weight", "momentum", "square") + (("decay",) if kind == "mean" else ()):
                assert_same_bits(getattr(b, name).detach(), getattr(a, name).detach(), name)
            assert bool(b.residual.any()) == (kind == "mean")
        if kind == "mean":
            for expected, got in ((means, residual_by_name(other)), (ages, ages_by_name(other))):
                assert all(torch.equal(value, got[name]) for name, value in expected.items())
        assert other.optimizer.flow.num_steps == 6
        for number in range(6, 9):
            micro_step(other, number)
            check_copies(other)
    # A checkpoint of the loaded engine is a whole one again.
    other.save_checkpoint(folder, tag="again")
    dist.barrier()
    third = initialize(config("full"))
    third.load_checkpoint(folder, tag="again")
    for number in range(9, 12):
        assert micro_step(other, number) == micro_step(third, number)


def residual_by_name(engine):
    zero = engine.optimizer
    return {name: flat.residual[offset:offset + numel].cpu()
            for flat, places in zip(zero.flow.flats, zero._places, strict=True) for name, offset, numel in places}


def mean_residuals(engine):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, residual_by_name(engine))
    total = everyone[0]
    for other in everyone[1:]:
        total = {name: value + other[name] for name, value in total.items()}
    return {name: value / len(everyone) for name, value in total.items()}


def ages_by_name(engine):
    """All ranks together."""
    zero, found = engine.optimizer, {}
    for flat, places in zip(zero.flow.flats, zero._places, strict=True):
        ages = torch.cat([own.cpu() for own, in from_all([flat.ages(zero.flow.num_steps)])])
        found.update({name: ages[offset:offset + numel] for name, offset, numel in places})
    return found


@contextlib.contextmanager
def warnings_of_deepspeed():
    heard, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)


def case_universal_at_another_world_size(rank, world_size):
    """C97, C98, C100: saved by 2 ranks; loaded by others, with other padding: weights, the mean of the residuals, ages."""
    folder = os.environ["SCAPE_TEST_FOLDER"]
    other = initialize(universal_config())
    other.load_checkpoint(folder, tag="universal")
    for (name, parameter), saved in zip(other.module.named_parameters(), torch.load(f"{folder}/weights.pt"), strict=True):
        assert_same_bits(parameter.detach().cpu(), saved, name)
    check_copies(other)
    assert other.optimizer.flow.num_steps == 6
    means, ages = torch.load(f"{folder}/waiting.pt")
    assert any(bool(mean.any()) for mean in means.values()) and any(int(age.max()) > 3 for age in ages.values() if age.numel())
    for name, own in residual_by_name(other).items():
        assert torch.equal(own, means[name]), f"mean residual of {name}"
    for name, own in ages_by_name(other).items():
        assert torch.equal(own, ages[name]), f"ages of {name}"
    for number in range(6, 10):
        micro_step(other, number)
        check_copies(other)
    plain = initialize(config("full"))
    try:
        plain.load_checkpoint(folder, tag="here")
    except Exception as error:
        assert "another world size" in str(error) and "ds_to_universal" in str(error), error
    else:
        raise AssertionError("files of another world size were accepted")


def case_scape_adams_universal_checkpoint(rank, world_size):
    """C96, for the dense optimizer: the converter finds what it asks for."""
    folder = shared_folder()
    changed = {**config("full"), "optimizer": {"type": "ScapeAdamS", "params": {"lr": 0.01, "bias_correction": True}}}
    engine = initialize(changed)
    for number in range(4):
        micro_step(engine, number, branch_ranks=())
    engine.save_checkpoint(folder, tag="here")
    dist.barrier()
    if rank == 0:
        convert(folder)
    dist.barrier()
    other = initialize({**changed, "checkpoint": {"load_universal": True}})
    other.load_checkpoint(folder, tag="universal")
    for number in range(4, 8):
        assert micro_step(engine, number, branch_ranks=()) == micro_step(other, number, branch_ranks=())


def case_states_go_to_the_host_and_back(rank, world_size):
    """C119: offload_states and reload_states in mid-run change nothing, residuals included; two groups, their parameters reordered."""
    for offload in (False, True):
        changed = {**config("full", offload=offload), "zero_optimization": {"stage": 2, "round_robin_gradients": True}}
        engine, other = (initialize(changed, parameters=two_groups) for _ in range(2))
        for number in range(9):
            if number in (3, 6):
                other.offload_states(pin_memory=False)
                other.reload_states()
            assert micro_step(engine, number) == micro_step(other, number), number
        for a, b in zip(state_of(engine), state_of(other), strict=True):
            assert_same_bits(a, b)
