"""The demo's second comparison: the dense optimizer ScapeAdamS and SCAPE. Bytes and copies of the weights are judged exactly; that both
learn, and that they do not lie far apart, only roughly: a short run cannot show more."""
import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from demo_compare import DemoError, Run, load_masters, load_run

from ds_scape.config import ScapeParams, parse
from ds_scape.sync.partition import Layout, TensorSlot, flat_layout
from ds_scape.sync.traffic import dense_zero_bytes, step_bytes

KINDS = ("norm", "values", "weights", "mask")
#: Sanity bounds, in nats of validation loss. They catch training that is broken; they are no claim about quality.
MIN_LEARNED, MAX_GAP = 0.5, 0.5
WEIGHT_BYTES = 2  # bf16
ALIGNMENT = 2  # DeepSpeed pads ZeRO-1/2's flat buffer to a multiple of so many elements per rank


@dataclass(frozen=True)
class Comparison:
    """What the two runs left, and what the documented formula says of them. Bytes are those that rank 0 sends."""
    adams: Run
    scape: Run
    logged: list  # per step, by SCAPE's own log: ({kind: bytes}, their sum)
    counted: dict  # run -> per step {collective: bytes}, as ds_zipccl counted them
    masters: dict  # run -> {parameter: fp32 tensor}
    params: ScapeParams
    layout: Layout

    @property
    def num_steps(self):
        return len(self.scape.mean_losses)

    @property
    def num_dense(self):
        """Steps without masks; the first always is one."""
        return min(self.num_steps, max(1, self.params.dense_warmup_steps))

    @cached_property
    def dense_bytes(self):
        """Per step of dense ZeRO, with a true reduce-scatter."""
        return dense_zero_bytes(self.layout, WEIGHT_BYTES)

    @cached_property
    def documented(self):
        """{"dense", "last dense", "sparse"}: {kind: bytes} of such a step. The last dense one sends the first mask as well."""
        setting = {"value_bytes": 2 if self.params.values_dtype == "bf16" else 4, "weight_bytes": WEIGHT_BYTES,
                   "encoding": self.params.mask_encoding}
        dense, sparse = (step_bytes(self.layout, 0, dense=dense, **setting) for dense in (True, False))
        return {"dense": dense, "last dense": {**dense, "mask": sparse["mask"]}, "sparse": sparse}

    def phase(self, step):
        return "sparse" if step > self.num_dense else "last dense" if step == self.num_dense else "dense"


def load(out, setting):
    """Reads both runs' folders. DemoError where something is missing or not finite."""
    out, config = Path(out), setting["configs"]["scape"]
    adams, scape = (load_run(out / name, name) for name in ("adams", "scape"))
    params = parse(config["optimizer"]["params"])
    counted = {name: _read(out / name / "zipccl.jsonl", _sent) for name in ("adams", "scape")}
    return Comparison(adams, scape, _read(out / "scape" / "scape.jsonl", _logged), counted,
                      {name: load_masters(out / name) for name in ("adams", "scape")}, params,
                      _layout(scape.weights, setting["ranks"], params.density))


def judge(runs):
    """(ok, sentences), the headline first."""
    problems = [*_byte_problems(runs), *_copy_problems(runs), *_loss_problems(runs)]
    less = runs.dense_bytes / sum(runs.documented["sparse"].values())
    facts = [f"Bytes: a sparse step sends {less:.1f} times less than dense ZeRO. SCAPE's own log, the count of deepspeed.comm's calls and "
             "the documented formula agree on every byte of every step.",
             "Copies: every rank's copy of every weight is its owner's rounded master, at the end of both runs.",
             f"Losses are finite and both runs learned. Validation loss: SCAPE {runs.scape.val_loss:.4f}, dense {runs.adams.val_loss:.4f}, "
             f"so {runs.scape.val_loss - runs.adams.val_loss:+.4f} nats; this difference is reported, and judged only by a sanity bound of "
             f"{MAX_GAP} nats."]
    if not problems:
        return True, ["SCAPE trains, sends the bytes that are documented, and every rank's weights are their owners'.", *facts]
    return False, [f"FAILED: {problems[0]}", *problems[1:]]


def _byte_problems(runs):
    numbers = {"SCAPE's log": len(runs.logged), **{f"the count of {name}": len(rows) for name, rows in runs.counted.items()}}
    if set(numbers.values()) != {runs.num_steps}:
        yield f"{runs.num_steps} steps, but the logs have other numbers of rows: {', '.join(f'{k} {n}' for k, n in numbers.items())}."
        return
    for step, ((logged, total), counted) in enumerate(zip(runs.logged, runs.counted["scape"], strict=True), 1):
        expected = runs.documented[runs.phase(step)]
        exchanged = {"all_to_all_single": expected["values"], "all_gather_into_tensor": sum(expected.values()) - expected["values"]}
        if logged != expected or total != sum(expected.values()):
            yield f"bytes of step {step}: SCAPE's log says {logged}, {total} in all; the formula {expected}."
            return
        if counted != {op: num for op, num in exchanged.items() if num}:
            yield f"bytes of step {step}: counted were {counted}; the formula says {exchanged}."
            return
        dense = min(runs.dense_bytes, sum(runs.counted["adams"][step - 1].values()))
        if runs.phase(step) == "sparse" and total >= dense:
            yield f"bytes of step {step}: {total}, which is not less than dense ({dense})."
            return
    if runs.num_dense == runs.num_steps:
        yield "no step was sparse."


def _copy_problems(runs):
    for run in (runs.adams, runs.scape):
        masters = runs.masters[run.name]
        if len(set(run.rank_digests)) != 1:
            yield f"{run.name}: the ranks hold different weights at the end: {', '.join(d[:8] for d in run.rank_digests)}."
        if masters.keys() != run.weights.keys():
            yield f"{run.name}: masters and weights are not of the same parameters."
            continue
        for name, weight in run.weights.items():
            # By value: masters come as a sum of the owners' parts, in which -0.0 is 0.0.
            wrong = (weight != masters[name].to(weight.dtype)).sum().item()
            if wrong:
                yield f"{run.name}: {wrong} of {weight.numel()} elements of {name} are not their owner's rounded master."
                break


def _loss_problems(runs):
    for run in (runs.adams, runs.scape):
        if not run.mean_losses[0] - run.val_loss > MIN_LEARNED:
            yield (f"{run.name} did not learn: first loss {run.mean_losses[0]:.4f}, validation loss at the end {run.val_loss:.4f}; "
                   f"{MIN_LEARNED} nats less are the least.")
    gap = runs.scape.val_loss - runs.adams.val_loss
    if not gap <= MAX_GAP:
        yield f"SCAPE's validation loss is {gap:.4f} nats above dense, beyond the sanity bound of {MAX_GAP}."


def byte_rows(runs):
    """Bytes per step, as plain data: what is documented for dense ZeRO, what was counted of ScapeAdamS, what SCAPE logged by phase."""
    half = runs.dense_bytes / 2
    rows = [_row("dense ZeRO (formula)", runs.num_steps, {"values": half, "weights": half}, runs)]
    adams = _mean(runs.counted["adams"][1:])
    weights = adams.pop("all_gather_into_tensor", 0)
    rows.append(_row("adams (counted)", runs.num_steps, {"values": sum(adams.values()), "weights": weights}, runs))
    logged = [sent for sent, _ in runs.logged]
    parts = {"scape: dense": logged[:runs.num_dense], "scape: sparse": logged[runs.num_dense:], "scape: whole run": logged}
    return rows + [_row(name, len(part), _mean(part), runs) for name, part in parts.items() if part]


def _row(name, num_steps, sent, runs):
    total = sum(sent.values())
    return {"what": name, "steps": num_steps, **{f"{kind}_bytes": sent.get(kind, 0) for kind in KINDS}, "wire_bytes": total,
            "dense_zero_bytes": runs.dense_bytes, "ratio": runs.dense_bytes / total if total else None}


def table(rows):
    """(header, rows) as text, from byte_rows()."""
    def text(number):
        return f"{number / 1e6:.4f}" if number else "-"

    lines = [[row["what"], str(row["steps"]), *(text(row[f"{kind}_bytes"]) for kind in ("values", "weights", "mask")),
             f"{row['wire_bytes'] / 1e6:.4f}", f"{row['ratio']:.2f}" if row["ratio"] else "-"] for row in rows]
    return ["bytes of", "steps", "values", "weights", "mask", "all", "times less"], lines


def notes(runs):
    num_sparse = runs.num_steps - runs.num_dense
    return [f"SCAPE is another optimizer, not a lossless one. This is a short run: {runs.num_steps} steps, dense up to step "
            f"{runs.num_dense}, then {num_sparse} at density {runs.params.density:g}, so a coordinate was synchronised about "
            f"{num_sparse * runs.params.density:.0f} times while sparse. It shows that SCAPE trains, what it sends, and that no copy "
            "drifts. It cannot show what a long training of a large model reaches, for better or worse. Both optimizers have the same "
            "settings, tuned for neither; the losses of the other three runs do not compare with theirs, since ScapeAdamS is not AdamW.",
            "Dense ZeRO is here 2 bytes of gradient and 2 bytes of weight per parameter, times (W-1)/W for W ranks: what a true "
            "reduce-scatter sends. DeepSpeed 0.19.8 all-reduces the gradients of ZeRO-1/2, which makes 1.5 times that; it is what was "
            "counted in the dense run.",
            "Dense warm-up steps send as much as dense ZeRO, and a longer run has a smaller share of them. The mask travels behind the "
            "next forward and backward pass. 16 bytes of norms per step and peer are in \"all\"."]


def _sent(row):
    """{collective: bytes} of one step, without the broadcasts of the start."""
    return {op: num for op, counts in row["ops"].items() if op != "broadcast" and (num := counts["wire_bytes"])}


def _logged(row):
    """One step of SCAPE's own log: {kind: bytes}, and what it says of their sum."""
    return {kind: row.get(f"{kind}_bytes", 0) for kind in KINDS}, row["sent_bytes"]


def _read(path, take):
    """take(row) of every line of a log."""
    try:
        return [take(json.loads(line)) for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DemoError(f"{path}: no complete log of the run ({type(error).__name__}: {error}). Is ZIPSCAPE_DISABLE set? "
                        "Try `ds_zipccl report`.") from error


def _mean(rows):
    total = Counter()
    for row in rows:
        total.update(row)
    return {key: num / max(1, len(rows)) for key, num in total.items()}


def _layout(weights, num_ranks, density):
    """How ZeRO-1 lays out the weights: one buffer, in the model's order, padded at its end. Worked out here, not asked of the run."""
    slots, offset = [], 0
    for weight in weights.values():
        slots.append(TensorSlot(offset, weight.numel(), weight.dim()))
        offset += weight.numel()
    padded = math.ceil(offset / (ALIGNMENT * num_ranks)) * ALIGNMENT * num_ranks
    return Layout((flat_layout(slots, padded, num_ranks, density),), num_ranks)
