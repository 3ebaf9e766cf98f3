"""Cases run on every rank by test_with_zipccl.py: both packages in one run. They meet in deepspeed.comm alone."""
import json
from pathlib import Path

import deepspeed  # noqa: F401 - first: the hooks of both packages run when it is imported

from ds_scape.optimizer.memory import kept_bytes
from ds_zipccl.backend import deepspeed_comm, deepspeed_hooks
from tests.helpers.bits import assert_same_bits
from tests.scape.zero_cases import check_copies, initialize, micro_step, settings, train_beside_simulation

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SECTION = {"enabled": True, "collectives": "always", "min_bytes": 256, "transport": "process_group"}


def case_zipped_equals_native(rank, world_size):
    runs = []
    for section in (None, SECTION):
        config = settings(2, "bf16", accumulation=2, gradient_clipping=0.1)
        if section:
            config["zipccl"] = section
        engine = initialize(config)
        losses = [micro_step(engine, number) for number in range(14)]
        live = deepspeed_comm.live_runtime()
        assert (live is not None) == bool(section), (section, live)
        stats = live.stats.snapshot() if live else {}
        runs.append((losses, [flat.clone() for flat in engine.optimizer.bit16_groups_flat]))
        engine.destroy()
        deepspeed_hooks.deactivate()
    assert runs[0][0] == runs[1][0]
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        assert_same_bits(a, b, "weights")
    assert stats["all_gather_into_tensor"]["calls_zipped"] > 0, stats


def case_zipped_follows_the_simulation(rank, world_size):
    engine = initialize({**settings(1, "bf16"), "zipccl": SECTION})
    train_beside_simulation(engine, 5)
    engine.destroy()
    deepspeed_hooks.deactivate()


def case_shipped_configs_train(rank, world_size):
    documents = {path.name: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("scape_*.json"))}
    assert {"scape_90.json", "scape_99_offload.json", "scape_zipccl.json"} <= set(documents)
    for document in documents.values():
        document["optimizer"]["params"]["dense_warmup_steps"] = 2
        engine = initialize(document)
        for number in range(8):
            micro_step(engine, number)
        assert not engine.optimizer.flow.is_dense(engine.optimizer.flow.num_steps) and engine.skipped_steps == 0
        check_copies(engine)
        check_kept_bytes(engine.optimizer.flow)
        engine.destroy()
        deepspeed_hooks.deactivate()


def check_kept_bytes(flow) -> None:
    """What is announced at the start is what is kept."""
    masks = flow._mask_message.nbytes + flow._arriving.wait().nbytes
    assert kept_bytes(flow.layout) == {
        "residual": sum(flat.residual.nbytes for flat in flow.flats), "ages": sum(flat.last_sync.nbytes for flat in flow.flats),
        "masks": masks, "q": sum(flat.square.nbytes for flat in flow.flats)}
