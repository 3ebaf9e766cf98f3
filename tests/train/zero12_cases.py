"""Cases run on every rank by test_zero12.py: ZeRO 1 and 2 with their gradients reduce-scattered to the owners."""
import contextlib
import copy
import functools
from collections import Counter
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from ds_zipccl.backend import deepspeed_comm, deepspeed_hooks, zero12
from ds_zipccl.collectives import reduce_scatter_uneven
from ds_zipccl.kernels.rank_order import sum_in_order
from tests.train.zero_cases import VOCAB, WIDTH, ZIPPED, Net, settings, train

UNEVEN, TO_OWNER, A2A = "reduce_scatter_uneven", "reduce_to_owner", "all_to_all_single"


def together(stats: dict) -> dict:
    """With what went to one owner (of two ranks) in the row of what went to several."""
    rows = [stats[op] for op in (UNEVEN, TO_OWNER) if op in stats]
    if not rows:
        return stats
    sums = {name: sum(row[name] for row in rows) for name in ("calls_zipped", "calls_native", "raw_bytes", "wire_bytes", "overflows")}
    reasons = sum((Counter(row["native_reasons"]) for row in rows), Counter())
    return stats | {UNEVEN: rows[0] | sums | {"native_reasons": dict(reasons)}}


def run(stage, dtype="bf16", *, zipccl=None, steps=4, zero=None, model=Net, **extra):
    """(losses, parameters, statistics, section "zero12") of a training run; statistics: ``together``."""
    sections = {}
    original = deepspeed_hooks.deactivate

    def reading():
        live = deepspeed_comm.live_runtime()
        if live is not None:
            sections.update(zero12.stats_of(live).section()[0])
        original()

    config = copy.deepcopy(settings(stage, dtype, **extra))
    config["zero_optimization"].update(zero or {})
    if zipccl is not None:
        config["zipccl"] = {**ZIPPED, **zipccl}
    deepspeed_hooks.deactivate = reading
    try:
        losses, parameters, stats = train(config, stage, steps=steps, model=model)
        return losses, parameters, together(stats), sections
    finally:
        deepspeed_hooks.deactivate = original


def compare(stage, dtype="bf16", zipccl=None, **how):
    """Bit-equal to native; returns the zipped run's (statistics, section)."""
    native = run(stage, dtype, **how)
    zipped = run(stage, dtype, zipccl=zipccl or {}, **how)
    assert native[:2] == zipped[:2], f"stage {stage} {dtype} {how}: losses or parameters differ from native; {zipped[3]}"
    return zipped[2:]


def reasons(section) -> set[str]:
    return {key.removeprefix("native_") for key in section if key.startswith("native_")}


def case_stages_with_and_without_overlap_at_2(rank, world):
    """C60: both buffers, both kinds of buckets; small and large ones."""
    for stage in (1, 2):
        for overlap in (False, True):
            for bucket in (12000, 10**6):
                stats, section = compare(stage, steps=2, zero={"overlap_comm": overlap, "reduce_bucket_size": bucket})
                assert section["straight"] > 0 and section["two_phase"] == 0, section
                assert reasons(section) <= {"min_bytes"}, section
                sent, row = stats[UNEVEN]["wire_bytes"], stats[UNEVEN]
                assert row["calls_zipped"] == section["straight"] and row["calls_native"] == 0
                # Two ranks send B together for a bucket; a ring all_reduce sends 2 B.
                total = torch.tensor([float(sent), float(section["all_reduce_bytes"])])
                dist.all_reduce(total)
                assert total[0] < total[1] / 2 / 1.15, total             # frames of a few thousand elements


def case_fp32_is_left_to_deepspeed(rank, world):
    for stage in (1, 2):
        stats, section = compare(stage, "fp32", steps=2)
        assert reasons(section) == {"dtype"} and UNEVEN not in stats, section


def case_never_and_small_buckets(rank, world):
    for zipccl, reason in (({"collectives": {"reduce_scatter": "never"}, "min_bytes": 0}, "never"), ({"min_bytes": 1 << 24}, "min_bytes")):
        _, section = compare(2, steps=2, zipccl=zipccl)
        assert reasons(section) == {reason}, section


def case_adaptive(rank, world):
    """At 2 ranks whichever is faster, with the same bits; beyond, timing may not choose the arithmetic."""
    for stage in (1, 2):
        stats, section = compare(stage, steps=2, zipccl={"collectives": "adaptive"})
        if world > 2:
            assert reasons(section) == {"deterministic_reduce"} and not section["straight"], section
        else:
            assert reasons(section) <= {"switch", "min_bytes"}, section
            row = stats[UNEVEN]
            assert row["calls_zipped"] == section["straight"] and row["calls_native"] == section.get("native_switch", 0)
            assert row["calls_zipped"] or row["raw_bytes"] == 0, "native bytes are counted twice"


def case_in_parts_at_2(rank, world):
    """Buckets beyond the workspace's bound."""
    _, section = compare(2, steps=1, zipccl={"max_workspace_bytes": 1 << 20}, model=functools.partial(Wide, 800),
                         zero={"reduce_bucket_size": 10**7})
    assert section["straight"] == 2 * 1 and not reasons(section), section


class Wide(nn.Module):
    """A middle layer that is larger than everything else."""

    def __init__(self, width):
        super().__init__()
        self.net = Net()
        self.wide = nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH))

    def forward(self, tokens):
        return self.net(tokens) + self.wide(self.net.embedding(tokens)).float().square().mean()


class WithEmpty(nn.Module):
    """Parameters without elements, tiny ones (C64, C65), one that is larger than a bucket."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.net = Net()
        self.tiny = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in (1, 3, 31))
        self.also_empty = nn.Parameter(torch.empty(0))

    def forward(self, tokens):
        return self.net(tokens) + sum(p.square().sum() for p in self.tiny) + self.empty.sum() + self.also_empty.sum()


def case_empty_tiny_and_oversized_parameters_at_2(rank, world):
    for stage in (1, 2):
        for bucket in (3000, 20000):
            _, section = compare(stage, steps=2, model=WithEmpty, zero={"reduce_bucket_size": bucket})
            assert section["straight"] > 0 and reasons(section) <= {"min_bytes"}, section


class Tied(Net):
    """The head is the embedding; a layer is left out of every other call, a parameter of all."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight
        self.unused, self.calls = nn.Parameter(torch.randn(77)), 0

    def forward(self, tokens):
        self.calls += 1
        hidden = self.embedding(tokens)
        for layer in self.layers[:2 + self.calls % 2]:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def case_tied_and_unused_weights_at_2(rank, world):
    """C82, C83: one reduction a step (stage 2: a micro step), whatever has gradients in it."""
    for stage in (1, 2):
        for overlap in (False, True):
            stats, section = compare(stage, steps=3, model=Tied, zero={"overlap_comm": overlap, "reduce_bucket_size": 10**6})
            assert section["straight"] == stats[UNEVEN]["calls_zipped"] == (3 if stage == 1 else 6) and not reasons(section), section


def case_layouts_of_deepspeed_at_2(rank, world):
    """Each works, and what we do not reduce is counted with its reason (C74)."""
    table = [
        (dict(zero={"round_robin_gradients": True}), set()),
        (dict(zero={"reduce_scatter": False}), {"reduce_scatter_false"}),
        (dict(zero={"use_multi_rank_bucket_allreduce": False}), {"use_multi_rank_bucket_allreduce_false"}),
        (dict(zero={"contiguous_gradients": False}), {"contiguous_gradients_false"}),
        (dict(zero={"contiguous_gradients": False, "overlap_comm": True}), {"contiguous_gradients_false"}),
        (dict(communication_data_type="fp32"), {"dtype"}),
        (dict(data_types={"grad_accum_dtype": "fp32"}), set()),
        (dict(zero={"parameter_alignment": True}), set()),
        (dict(zero={"offload_optimizer": {"device": "cpu"}}, zero_force_ds_cpu_optimizer=False), set()),
    ]
    for how, expected in table:
        for stage in (1, 2):
            if stage == 1 and "data_types" in how:
                continue                                    # DeepSpeed takes its BF16_Optimizer, which is not this seam
            _, section = compare(stage, steps=2, **how)
            assert reasons(section) - {"min_bytes"} == expected, (how, stage, section)
            assert bool(section.get("straight")) == (not expected), (how, stage, section)


def case_prescaling_at_2(rank, world):
    """C74: stage 1 alone; DeepSpeed refuses it in stage 2."""
    for how in (dict(prescale_gradients=True), dict(gradient_predivide_factor=2.0)):
        _, section = compare(1, steps=2, zero={"reduce_scatter": False}, **how)
        assert reasons(section) == {"reduce_scatter_false"}, section
        compare(1, steps=2, **how)


def case_bf16_on_the_wire_of_an_fp32_model_at_2(rank, world):
    """C68: communication_data_type bf16, also for a parameter that is larger than a bucket."""
    for stage in (1, 2):
        for bucket in (3000, 20000):
            _, section = compare(stage, "fp32", steps=3, communication_data_type="bf16", zero={"reduce_bucket_size": bucket})
            assert section["straight"] > 0 and reasons(section) <= {"min_bytes"}, section


def case_non_finite_and_zero_gradients_at_2(rank, world):
    """C79: one Inf, one NaN, all zeros: the same steps as native, clipping included."""
    for factor in (float("inf"), float("nan"), 0.0):
        for stage in (1, 2):
            compare(stage, steps=3, model=functools.partial(Scaled, factor))


class Scaled(nn.Module):
    """The loss of its second call is multiplied with something."""

    def __init__(self, factor):
        super().__init__()
        self.net, self.factor, self.calls = Net(), factor, 0

    def forward(self, tokens):
        self.calls += 1
        return self.net(tokens) * (self.factor if self.calls == 3 else 1.0)


def rank_order_reference(zero, runtime, group, bucket, dtype):
    """Stands for ``zero12.Reduction``: gathers everything, sums the own slices in rank order."""
    stock = Original(zero, runtime, group, bucket, dtype)

    class Reference:
        def run(self):
            reason = stock._why_native()
            num_bytes = sum(t.numel() for t in stock._slices) * stock._dtype.itemsize
            if reason is not None or num_bytes < runtime.config.min_bytes:
                return reason or "min_bytes"
            mine = torch.cat([t.reshape(-1) for t in stock._slices]).to(stock._dtype)
            everyones = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(everyones, mine, group=group)
            sums = torch.empty_like(mine)
            sum_in_order(everyones, sums)
            for owner, t, place, part in zip(stock._owners, stock._slices, stock._places,
                                             sums.split([t.numel() for t in stock._slices]), strict=True):
                if group.rank() in owner:
                    zero._add_to_grad_partition_buffer(place, part)
                    t.copy_(part)
            return None

    return Reference()


Original = zero12.Reduction


def against_reference(stage, **how):
    """Statistics of the zipped run, which equals the reference's bit for bit."""
    zero12.Reduction = rank_order_reference
    try:
        reference = run(stage, zipccl={}, **how)
    finally:
        zero12.Reduction = Original
    zipped = run(stage, zipccl={}, **how)
    assert reference[:2] == zipped[:2], f"stage {stage} {how}: not the rank-order sum; {zipped[3]}"
    return zipped[2:]


def case_rank_order_sums(rank, world):
    """At any number of ranks, both ways of reducing a bucket."""
    ways = {"straight": 0, "two_phase": 0}
    for stage in (1, 2):
        for zero in ({"reduce_bucket_size": 12000}, {"reduce_bucket_size": 10**6}, {"reduce_bucket_size": 12000, "overlap_comm": True},
                     {"reduce_bucket_size": 12000, "round_robin_gradients": True}):
            if stage == 1 and "round_robin_gradients" in zero:
                continue
            stats, section = against_reference(stage, steps=2, zero=zero)
            assert reasons(section) <= {"min_bytes"}, section
            for way in ways:
                ways[way] += section[way]
            assert section["two_phase"] == 0 or stats[A2A]["calls_zipped"] + stats[A2A]["calls_native"] == section["two_phase"]
    assert ways["straight"] > 0 and (ways["two_phase"] > 0) == (world > 2), ways
    for stage in (1, 2):                            # C71: odd sizes that no number of ranks divides
        _, section = against_reference(stage, steps=2, model=WithEmpty, zero={"reduce_bucket_size": 9000})
        assert section["straight"] + section["two_phase"] > 0, section


def case_bytes_against_all_reduce(rank, world):
    """C73. The busiest rank sends less than in a ring all_reduce: less than half of it where buckets are balanced."""
    for stage, bucket, two_phases, bound in ((1, 40000, False, 0.5), (2, 10**6, False, 0.5), (2, 40000, world > 2, 1.0)):
        *_, stats, section = run(stage, zipccl={"min_bytes": 0}, steps=2, model=Deep, zero={"reduce_bucket_size": bucket})
        assert reasons(section) == set() and (section["two_phase"] > 0) == two_phases, (stage, bucket, section)
        sent = stats[UNEVEN]["wire_bytes"] + stats.get(A2A, {"wire_bytes": 0})["wire_bytes"]
        row = torch.tensor([float(sent), float(section["all_reduce_bytes"])])
        rows = [torch.empty_like(row) for _ in range(world)]
        dist.all_gather(rows, row)
        busiest = max(float(r[0] / r[1]) for r in rows)
        assert busiest < bound, (stage, bucket, rows)               # frames of a few thousand elements: ratios of 1.2


class Deep(nn.Module):
    """Of many parameters, so that there are orders to choose from."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.net.layers.extend(nn.Linear(WIDTH, WIDTH) for _ in range(9))

    def forward(self, tokens):
        return self.net(tokens)


@contextlib.contextmanager
def incompressible():
    """All that goes to owners."""
    specs = reduce_scatter_uneven.SPEC, reduce_scatter_uneven.TO_OWNER
    original = [spec.start for spec in specs]
    for spec in specs:
        object.__setattr__(spec, "start", lambda *_: "incompressible")
    try:
        yield
    finally:
        for spec, start in zip(specs, original, strict=True):
            object.__setattr__(spec, "start", start)


def case_the_comparison_can_fail(rank, world):
    """Sums rounded after each rank, or one wrong element in one rank's sums: other losses or parameters."""
    if world > 2:
        clean, inner = run(2, zipccl={}, steps=3), reduce_scatter_uneven.sum_in_order
        reduce_scatter_uneven.sum_in_order = lambda rows, out, *_: out.copy_(functools.reduce(torch.add, rows))
        try:
            with incompressible():
                assert run(2, zipccl={}, steps=3)[:2] != clean[:2]
        finally:
            reduce_scatter_uneven.sum_in_order = inner
    clean = run(1, zipccl={}, steps=2)
    deliver = Original._deliver

    def forgetting(self, layout, sums):
        if rank == 0:
            sums[:1] = 1.0
        deliver(self, layout, sums)

    Original._deliver = forgetting
    try:
        assert run(1, zipccl={}, steps=2)[:2] != clean[:2]
    finally:
        Original._deliver = deliver


def case_uncompressed_sums_are_the_same(rank, world):
    """Gradients that do not compress: the same arithmetic."""
    clean = run(2, zipccl={}, steps=2)
    with incompressible():
        raw = run(2, zipccl={}, steps=2)
    assert raw[:2] == clean[:2]
    assert raw[2][UNEVEN]["native_reasons"] == {"incompressible": raw[2][UNEVEN]["calls_native"]}
    assert (raw[2][UNEVEN]["raw_bytes"] > 0) == (world > 2)                 # at 2 ranks DeepSpeed's all_reduce has the bytes


def case_experts_have_groups_of_their_own(rank, world):
    """MoE, one expert a layer on every rank: their gradients are reduced over the experts' data-parallel group."""
    def losses(zipccl):
        torch.manual_seed(0)
        model = Experts(world)
        config = settings(2, "bf16", **({} if zipccl is None else {"zipccl": zipccl}))
        params = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"})
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
        generator, seen = torch.Generator("cpu").manual_seed(rank), []
        for _ in range(4):
            loss = engine(torch.randint(0, VOCAB, (4, 8), generator=generator, device="cpu").to(engine.device))
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        live = deepspeed_comm.live_runtime()
        section = zero12.stats_of(live).section()[0] if live else {}
        engine.destroy()
        deepspeed_hooks.deactivate()
        return seen, section

    native, zipped = losses(None), losses(ZIPPED)
    assert world > 2 or native[0] == zipped[0], (native, zipped)
    assert zipped[1]["straight"] + zipped[1]["two_phase"] > 0 and reasons(zipped[1]) <= {"min_bytes"}, zipped[1]


class Experts(nn.Module):
    def __init__(self, world):
        super().__init__()
        self.net = Net()
        self.moe = deepspeed.moe.layer.MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), num_experts=2, ep_size=1, k=1,
                                           drop_tokens=False, use_tutel=False)

    def forward(self, tokens):
        hidden, balance, _ = self.moe(self.net.embedding(tokens))
        return nn.functional.cross_entropy(self.net.head(hidden).float().flatten(0, 1), tokens.flatten()) + 0.01 * balance.float()


def case_muon_matrices_with_several_owners(rank, world):
    """Split matrices are needed whole on each of their owners: those buckets are DeepSpeed's."""
    how = dict(steps=2, optimizer={"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}, zero={"reduce_bucket_size": 12000})
    for stage in (1, 2):
        with mock.patch.object(torch._dynamo.config, "disable", True):          # DeepSpeed compiles the orthogonalization: 10 s
            section = compare(stage, **how)[1] if world == 2 else run(stage, zipccl={}, **how)[3]
        assert section["native_several_owners"] > 0 and section["straight"] + section["two_phase"] > 0, section
        assert reasons(section) <= {"several_owners", "min_bytes", "no_gain"}, section


def case_offload_with_accumulation_at_2(rank, world):
    """C76: gradients of all micro-steps, kept on the host, also in fp32."""
    offload = {"offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 12000}
    for how in (dict(), dict(data_types={"grad_accum_dtype": "fp32"})):
        _, section = compare(2, steps=2, gradient_accumulation_steps=4, zero=offload, zero_force_ds_cpu_optimizer=False, **how)
        assert section["straight"] > 0 and reasons(section) <= {"min_bytes"}, section


def case_what_is_not_this_seams_goes_to_deepspeed(rank, world):
    """Sequence parallelism sums in fp32, ZenFlow reads what others own, averages are made before; owners may be plain numbers."""
    config = settings(2, "bf16", zipccl=ZIPPED)
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    live, zero = deepspeed_comm.live_runtime(), engine.optimizer
    bucket = [(frozenset((0,)), torch.randn(5000).bfloat16(), None)]
    zero.sequence_parallel_size = 2
    zero.allreduce_and_scatter(bucket, torch.bfloat16, divide=False)
    assert zero12.stats_of(live).native == {"dtype": 1}
    zero.sequence_parallel_size = 1
    zero.allreduce_and_scatter(bucket, torch.bfloat16)
    zero.zenflow = True
    zero.allreduce_and_scatter(bucket, torch.bfloat16, divide=False)
    assert zero12.stats_of(live).native == {"dtype": 1, "divide": 1, "zenflow": 1}
    zero.zenflow = False
    zero.allreduce_and_scatter([(0, bucket[0][1])], torch.bfloat16, divide=False)
    assert zero12.stats_of(live).straight + zero12.stats_of(live).two_phase == 1
    engine.destroy()
    deepspeed_hooks.deactivate()
