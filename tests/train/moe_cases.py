"""Cases run on every rank by test_moe.py: DeepSpeed's MoE layer over expert-parallel groups, native against zipped, in one process each."""
import torch

from tests.train.moe_helpers import TOKENS, ZIPPED, Net, close, compare, initialize, samples, settings, train
from tests.zipccl.collective_helpers import flip, payloads_by_torch, spoiled

STEPS, EXCHANGES = 3, 4                 # of one step: there and back, forward and backward


def case_stages_1_and_2(rank, world):
    for stage in (1, 2):
        row = compare(Net, stage, calls=STEPS * EXCHANGES)
        assert row["zipped_raw_bytes"] > 1.15 * row["zipped_wire_bytes"], row


def case_two_experts_per_token(rank, world):
    compare(lambda: Net(k=2), 2, calls=STEPS * EXCHANGES)


def case_one_expert_per_rank_and_a_residual(rank, world):
    compare(lambda: Net(num_experts=2, use_residual=True), 1, calls=STEPS * EXCHANGES)


def case_every_token_to_one_expert(rank, world):
    """C82: the others see rows of zeros alone. With and without a capacity that drops most tokens."""
    for drop_tokens in (True, False):
        for favourite in (0, 3):
            compare(lambda: Net(favourite=favourite, drop_tokens=drop_tokens), 2, calls=STEPS * EXCHANGES)      # noqa: B023


def case_layer_unused_in_a_step(rank, world):
    """C82: all ranks skip the layer in one step: its parameters have no gradients."""
    compare(Net, 1, inputs=lambda step: (samples(step), None, step == 1), calls=(STEPS - 1) * EXCHANGES)


def case_rank_without_tokens(rank, world):
    """One rank masks all its tokens: it sends rows of zeros, and receives what the others send."""
    def inputs(step):
        return samples(step), torch.full((4 * TOKENS,), float(rank != 0))

    compare(Net, 2, inputs=inputs, calls=STEPS * EXCHANGES)


def case_uneven_batches_without_dropping(rank, world):
    """C53: the capacity is agreed on by the layer as long as it is below every rank's number of tokens."""
    compare(lambda: Net(drop_tokens=False), 2, inputs=lambda step: (samples(step, 4 if rank else 3),), calls=STEPS * EXCHANGES)


def case_evaluation(rank, world):
    """Inference takes another capacity: sizes that training never had."""
    def outputs(zipccl):
        torch.manual_seed(0)
        engine = initialize(Net(eval_capacity_factor=1.7), settings(1, zipccl))
        engine.eval()
        with torch.no_grad():
            losses = [engine(samples(step, count)).item() for step, count in enumerate((4, 1, 7))]
        return losses, close(engine)

    zipped, row = outputs(ZIPPED)
    assert outputs(None)[0] == zipped and row["calls_zipped"] == 6, row


def case_flipped_bit_changes_training(rank, world):
    """The comparison can fail: one bit that changes on the way."""
    from ds_zipccl.collectives import all_to_all
    native, _ = train(Net, 1, None)
    original, calls = all_to_all.exchange_bytes, []

    def flipping(arrivals, places, *rest):
        work = original(arrivals, places, *rest)
        calls.append(1)
        return spoiled(work, lambda: flip(arrivals[1 - rank], -128 - 1024, 0x80)) if len(calls) == 5 else work

    all_to_all.exchange_bytes = flipping
    try:
        with payloads_by_torch():
            flipped, _ = train(Net, 1, ZIPPED)
    finally:
        all_to_all.exchange_bytes = original
    assert len(calls) == STEPS * EXCHANGES and flipped != native, "a flipped bit went unseen"
