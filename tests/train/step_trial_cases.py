"""Cases run on every rank by test_step_trials.py. Which way is faster is made up: no time is measured here."""
import contextlib
import copy
import hashlib
import itertools
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from ds_zipccl.backend import deepspeed_comm, deepspeed_hooks, deepspeed_links, step_trials
from ds_zipccl.collectives import switch
from ds_zipccl.collectives.cost import Costs, Curve
from tests.train import moe_helpers
from tests.train.zero_cases import VOCAB, Net, settings

ADAPTIVE = {"enabled": True, "min_bytes": 1024, "step_trial_every": 3}
ZIPPED_WINS = Costs(Curve((1, 1 << 40), (9.0, 9.0)), Curve((1, 1 << 40), (1.0, 1.0)), 1.0)
NATIVE_WINS = Costs(Curve((1, 1 << 40), (1.0, 1.0)), Curve((1, 1 << 40), (9.0, 9.0)), 1.0)
WARM_UP, BLOCKS = 3, step_trials.BLOCKS[:4]
TRIAL = len(BLOCKS) * step_trials.BLOCK_STEPS
BEGIN = WARM_UP + 1 + step_trials.LAG           # steps before the first trial


@contextlib.contextmanager
def made_up(costs: Costs, zipped_s: float, native_s: float = 1.0):
    """What the switch finds; seconds of a step as this rank finds them: an evaluation of 100 now and then."""
    clock, steps = [0.0], itertools.count()
    ended = step_trials.StepTrials.step_ended

    def step_ended(self, engine, runtime):
        clock[0] += (native_s if runtime.held else zipped_s) + 100 * (next(steps) % 7 == 0)
        ended(self, engine, runtime)

    with (mock.patch.object(switch, "measure", lambda *_: costs), mock.patch.object(step_trials.StepTrials, "step_ended", step_ended),
          mock.patch.multiple(step_trials, WARM_UP=WARM_UP, BLOCKS=BLOCKS),
          mock.patch.object(step_trials.StepTrials.__init__, "__defaults__", (None, lambda: clock[0]))):
        yield


def train(section: dict | None, stage: int, steps: int, accumulation: int = 1):
    """([held] after every micro batch, sha256 of losses and parameters, counters of trials, statistics)."""
    torch.manual_seed(0)
    model = Net()
    config = settings(stage, "bf16", gradient_accumulation_steps=accumulation, **({} if section is None else {"zipccl": section}))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config))
    live, generator = deepspeed_comm.live_runtime(), torch.Generator("cpu").manual_seed(100 + dist.get_rank())
    held, digest = [], hashlib.sha256()
    for _ in range(steps * accumulation):
        loss = engine(torch.randint(0, VOCAB, (4, 7), generator=generator, device="cpu").to(engine.device))
        engine.backward(loss)
        engine.step()
        held.append(live and live.held)
        digest.update(loss.item().hex().encode())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        for parameter in model.parameters():
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    trials = step_trials.of(live)
    found = held, digest.hexdigest(), trials and trials.section(), live and live.stats.snapshot()
    engine.destroy()
    deepspeed_hooks.deactivate()
    return found


def assert_same_everywhere(value) -> None:
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    assert all(other == value for other in everyones), everyones


def in_trial(held: list, begin: int) -> None:
    """``held`` has, from ``begin`` on, the blocks of one."""
    expected = [None if way == step_trials.ZIPPED else "step_trial" for way in BLOCKS for _ in range(step_trials.BLOCK_STEPS)]
    assert held[begin:begin + TRIAL] == expected, held


def case_slower_on_one_rank_is_slower(rank, world_size):
    """Two trials under ZeRO-2, all ranks at the same steps; the bits are native's."""
    steps = BEGIN + 2 * (TRIAL + step_trials.LAG + ADAPTIVE["step_trial_every"])
    with made_up(ZIPPED_WINS, 1.5 if rank == world_size - 1 else 0.5):
        held, digest, (counters, gauges), ops = train(ADAPTIVE, 2, steps)
    assert_same_everywhere((held, counters, gauges))
    in_trial(held, BEGIN)
    after = BEGIN + TRIAL + step_trials.LAG
    assert held[:BEGIN] == [None] * BEGIN
    assert held[after:after + ADAPTIVE["step_trial_every"]] == ["steps_are_not_faster"] * ADAPTIVE["step_trial_every"], held
    in_trial(held, after + ADAPTIVE["step_trial_every"])
    assert (counters, gauges) == ({"kept_zipped": 0, "kept_native": 2}, {"choice": "native", "zipped_ms": 1500.0, "native_ms": 1000.0})
    gather = ops["all_gather_into_tensor"]
    assert gather["calls_zipped"] > 0 and {"step_trial", "steps_are_not_faster"} <= set(gather["native_reasons"]), gather
    assert digest == train(None, 2, steps)[1], "trials change bits"


def case_faster_stays(rank, world_size):
    """Frames of cache_params, gradient accumulation: a block has whole optimizer steps, and there are frames after native ones."""
    steps = BEGIN + TRIAL + step_trials.LAG + 5
    with made_up(ZIPPED_WINS, 0.9 if rank else 0.98):
        held, digest, (counters, _), ops = train({**ADAPTIVE, "cache_params": True}, 3, steps, 2)
    assert_same_everywhere((held, counters))
    ends = held[1::2]
    assert held[:-1:2] == [None, *ends[:-1]], "changed between micro batches"
    in_trial(ends, BEGIN)
    assert ends[BEGIN + TRIAL:] == [None] * (step_trials.LAG + 5) and counters == {"kept_zipped": 1, "kept_native": 0}
    assert ops["all_gather_into_tensor"]["calls_zipped"] > 0
    assert digest == train(None, 3, steps, 2)[1], "trials change bits"


def case_nothing_zipped_nothing_tried(rank, world_size):
    with made_up(NATIVE_WINS, 0.5):
        held, _, (counters, gauges), _ = train(ADAPTIVE, 2, BEGIN + 12)
    assert held == [None] * (BEGIN + 12) and gauges["choice"] is None and not any(counters.values())


def case_always_is_not_tried(rank, world_size):
    for section in ({"collectives": "always"}, {"collectives": {"reduce_scatter": "always"}}, {"collectives": "never"},
                    {"step_trials": False}):
        with made_up(ZIPPED_WINS, 2.0):
            held, _, trials, _ = train({**ADAPTIVE, **section}, 1, 2)
        assert held == [None] * 2 and trials is None


def case_another_engine_begins_anew(rank, world_size):
    """In the middle of a native block: what is held is released, steps are counted from the start."""
    model = Net()
    with made_up(ZIPPED_WINS, 1.5):
        config = settings(2, "bf16", gradient_accumulation_steps=1, zipccl=ADAPTIVE)
        first, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config))
        live, tokens = deepspeed_comm.live_runtime(), torch.arange(28).view(4, 7).to(first.device)

        def steps(engine, count):
            for _ in range(count):
                engine.backward(engine(tokens))
                engine.step()
            return live.held

        in_native_block = BEGIN + step_trials.BLOCK_STEPS + 1
        assert steps(first, in_native_block) == "step_trial"
        second, *_ = deepspeed.initialize(model=(other := Net()), model_parameters=other.parameters(), config=copy.deepcopy(config))
        assert live.held is None
        assert steps(second, in_native_block - 1) is None and steps(first, 2) is None, "of another engine than the first to end a step"
        assert steps(second, 1) == "step_trial"
    for engine in (first, second):
        engine.destroy()
    deepspeed_hooks.deactivate()


@contextlib.contextmanager
def at_measuring(tell):
    """Calls ``tell`` with a call of each kind that is measured, at small sizes."""
    original = switch.measure

    def measure(spec, call, *more):
        tell(call)
        return original(spec, call, *more)

    small = {"PROBE_SIZES": dict.fromkeys(("cpu", "cuda"), (1 << 16, 1 << 18, 1 << 20)), "LARGER_SIZES": {"cpu": (), "cuda": ()}}
    with mock.patch.object(switch, "measure", measure), mock.patch.multiple(switch, **small):
        yield


def case_links_are_measured_when_an_engine_is_made(rank, world):
    """Of its data-parallel and expert-parallel groups, what its steps will call; no step measures anything then. The same on all ranks.
    Of two ranks that own parts of each bucket it is only that: in the order of stage 1, or where there is one bucket."""
    section = {**ADAPTIVE, "step_trials": False}
    two, both = world == 2, {"reduce_scatter_uneven", "reduce_to_owner"}
    one, several = {"reduce_scatter_uneven"}, 20000
    runs = [(0, several, 0, 0, 0, set()), (1, several, 0, 0, 0, one), (1, 6000, 0, 0, 0, both), (2, several, 0, 0, 0, both),
            (2, several, 0, 0, 1, both), (2, 1 << 20, 0, 0, 1, one), (3, several, 0, 0, 0, set()), (3, several, 0, 1, 0, set()),
            (3, several, 1 << 20, 0, 0, set())]
    with at_measuring(lambda call: seen.append((len(steps), call.op, call.dtype, call.world_size))):
        for stage, bucket, min_bytes, cached, experts, to_owners in runs:
            steps, seen = [], []
            config = settings(stage, "bf16", gradient_accumulation_steps=1)
            config["zero_optimization"]["reduce_bucket_size"] = bucket
            sums = {*to_owners, "reduce_scatter_tensor" if stage == 3 else "all_reduce"}
            config["zipccl"] = {**section, "min_bytes": min_bytes or 1024, "cache_params": bool(cached)}
            torch.manual_seed(0)
            if experts:
                engine = moe_helpers.initialize(moe_helpers.Net(num_experts=2 * world, ep_size=world), config)
            else:
                model = Net()
                engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            expected = [] if min_bytes or not two else [(0, op, torch.bfloat16, world) for op in sums]
            expected += [(0, "all_gather_into_tensor", torch.bfloat16, world)] * (stage > 0 and not min_bytes)
            expected += [(0, "all_to_all_single", torch.bfloat16, world)] * experts
            found = [call for call in seen if call[1] != "broadcast"][cached:]          # DeepSpeed's first gather is one without frames
            assert sorted(map(str, found)) == sorted(map(str, expected)), (stage, bucket, seen)
            generator = torch.Generator("cpu").manual_seed(rank)
            for step in range(2):
                steps.append(step)
                tokens = torch.randint(0, VOCAB, (4, 7), generator=generator, device="cpu").to(engine.device)
                engine.backward(engine(moe_helpers.samples(step) if experts else tokens))
                engine.step()
            assert not any(step for step, *_ in seen), seen
            called = {op: row for op, row in deepspeed_comm.live_runtime().stats.snapshot().items() if op in both}
            assert set(called) <= to_owners, (stage, bucket, called)
            # What experts leave of each of several buckets nobody knows beforehand.
            assert not two or experts and bucket == several or set(called) == to_owners, (stage, bucket, called)
            groups = deepspeed_comm.live_runtime()._groups
            costs = [(key, measured.num_calls, measured.costs) for name in sorted(groups) for state in groups[name].values()
                     for key, measured in state._measured.items()]
            assert_same_everywhere(costs)
            assert not expected or any(cost for *_, cost in costs)
            engine.destroy()
            deepspeed_hooks.deactivate()


def case_links_of_a_pipeline_are_measured_when_its_engine_is_made_at_2(rank, world):
    """Of one stage: buckets are filled in the order of the parameters, which is not ours, so both ways to their owners may come."""
    from deepspeed.pipe import PipelineModule

    seen, steps = [], []
    section = {**ADAPTIVE, "step_trials": False, "min_bytes": 1024}
    config = settings(1, "bf16", gradient_accumulation_steps=1, zipccl=section, data_types={"grad_accum_dtype": "bf16"})
    config["zero_optimization"]["reduce_bucket_size"] = 20000
    with at_measuring(lambda call: seen.append((len(steps), call.op))):
        torch.manual_seed(0)
        model = PipelineModule([torch.nn.Linear(64, 64) for _ in range(16)], num_stages=1,
                               loss_fn=lambda out, aim: (out.float() - aim.float()).square().mean())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        live = deepspeed_comm.live_runtime()
        for step in range(2):
            steps.append(step)
            data = torch.randn(4, 64, generator=torch.Generator("cpu").manual_seed(2 * step + rank), device="cpu")
            engine.train_batch(iter([2 * (data.bfloat16().to(engine.device),)]))
        called = {op for op in live.stats.snapshot() if op.startswith("reduce_")}
    assert called == {"reduce_to_owner"}, f"the case tests nothing: {called}"       # in our order every bucket has both ranks' parts
    measured = {"reduce_scatter_uneven", "reduce_to_owner", "all_reduce", "all_gather_into_tensor"}
    assert {op for step, op in seen if not step} - {"broadcast"} == measured and not any(step for step, _ in seen), seen
    with mock.patch.object(engine.optimizer, "sequence_parallel_size", 2):          # then DeepSpeed sums in fp32, which is native
        gradients = [call for call in deepspeed_links.calls_of(engine, live) if call[0] != "all_gather_into_tensor"]
        assert [(op, dtype) for op, dtype, _ in gradients] == [("all_reduce", torch.float32)], gradients
    engine.destroy()
    deepspeed_hooks.deactivate()
