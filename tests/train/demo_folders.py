"""Folders of the demo's five runs, made by hand: what train_gpt.py and the logs would leave. Every number of the SCAPE runs' traffic is
worked out here on paper, without the package's formula."""
import hashlib
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import demo_runs

STEPS = {"native": 3, "control": 3, "zipped": 3, "adams": 3, "scape": 3}
#: embedding 64 x 32, norm 5, scale 1: 2054 weights, padded to 2056, 1028 a rank. Rank 0 owns 1028 of the embedding and sends 103 of them;
#: rank 1 owns 1020 of it, of which 102, and the 6 dense ones: 108.
DENSE = {"norm": 16, "values": 2 * 1028, "weights": 2 * 1028}
SPARSE = {"norm": 16, "values": 2 * 108, "weights": 2 * 108, "mask": 129}
LAST_DENSE = {**DENSE, "mask": 129}


def setting(tmp_path):
    configs = demo_runs.write_configs(tmp_path, 2, 1)
    configs["scape"]["optimizer"]["params"]["dense_warmup_steps"] = 1
    return {"ranks": 2, "steps": STEPS, "transport": "gloo", "configs": configs, "data": None, "run_seconds": {}, "command": "demo"}


def write_run(folder, losses, weights):
    folder.mkdir(parents=True, exist_ok=True)
    val_losses = [rank[-1] for rank in losses]
    digest = hashlib.sha256(repr(weights).encode()).hexdigest()
    record = {"losses": losses, "losses_hex": [[x.hex() for x in rank] for rank in losses], "val_losses": val_losses,
              "val_losses_hex": [x.hex() for x in val_losses], "step_times_s": [0.5, 0.1, 0.1], "weights_sha256": [digest] * len(losses)}
    (folder / "losses.json").write_text(json.dumps(record))
    torch.save(weights, folder / "weights.pt")


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def count_row(step, **ops):
    """A line of the zipccl log in which everything went native."""
    return {"step": step, "time_s": 0.1, "ops": {
        op: {"calls_zipped": 0, "calls_native": 1, "raw_bytes": num, "wire_bytes": num, "native_reasons": {"never": 1}, "overflows": 0}
        for op, num in ops.items()}}


def scape_row(step, sent):
    return {"step": step, "applied": True, "phase": "?", "sent_bytes": sum(sent.values()), **{f"{k}_bytes": n for k, n in sent.items()},
            "dense_zero_bytes": 4112}


def write_scape_runs(out):
    """The runs adams and scape, as they should be."""
    random = torch.Generator().manual_seed(3)
    for name, losses in (("adams", [[3.0, 2.5, 2.0], [3.1, 2.6, 2.1]]), ("scape", [[3.0, 2.6, 2.2], [3.1, 2.7, 2.3]])):
        masters = {"embedding.weight": torch.randn(64, 32, generator=random), "norm.weight": torch.randn(5, generator=random),
                   "scale": torch.randn((), generator=random)}
        write_run(out / name, losses, {key: value.bfloat16() for key, value in masters.items()})
        torch.save(masters, out / name / "masters.pt")
    start = {"broadcast": 4108}
    write_lines(out / "adams" / "zipccl.jsonl", [
        count_row(step, all_reduce=4112 + 5, all_gather_into_tensor=2056, **(start if step == 1 else {})) for step in (1, 2, 3)])
    sent = [LAST_DENSE, SPARSE, SPARSE]
    write_lines(out / "scape" / "scape.jsonl", [scape_row(step, row) for step, row in enumerate(sent, 1)])
    write_lines(out / "scape" / "zipccl.jsonl", [
        count_row(step, all_to_all_single=row["values"], all_gather_into_tensor=sum(row.values()) - row["values"],
                  **(start if step == 1 else {})) for step, row in enumerate(sent, 1)])
