"""Compares two training runs by bits: every rank's loss of every step, and every parameter."""
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DemoError(Exception):
    """What went wrong, in words for the user."""


@dataclass(frozen=True)
class Run:
    """What one run of train_gpt.py wrote."""
    name: str
    losses: list  # [rank][step], floats
    losses_hex: list  # the same, exactly
    val_losses: list  # [rank]
    val_losses_hex: list
    step_times_s: list  # [step], rank 0
    weights: dict  # name -> CPU tensor
    rank_digests: list  # [rank], of the weights that each rank holds

    @property
    def mean_losses(self):
        """Mean over ranks, one per step."""
        return [sum(step) / len(step) for step in zip(*self.losses, strict=True)]

    @property
    def val_loss(self):
        return sum(self.val_losses) / len(self.val_losses)

    @property
    def losses_sha256(self):
        return hashlib.sha256(json.dumps([self.losses_hex, self.val_losses_hex]).encode()).hexdigest()

    @property
    def weights_sha256(self):
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(_bits(tensor).numpy().tobytes())
        return digest.hexdigest()


def load_run(folder, name):
    """Reads losses.json and weights.pt of one run; DemoError when they are missing or the training diverged."""
    folder = Path(folder)
    try:
        record = json.loads((folder / "losses.json").read_text())
        weights = torch.load(folder / "weights.pt", map_location="cpu", weights_only=True)
        run = Run(name, record["losses"], record["losses_hex"], record["val_losses"], record["val_losses_hex"],
                  record["step_times_s"], weights, record["weights_sha256"])
    except (OSError, ValueError, KeyError) as error:
        raise DemoError(f"{folder}: no complete result of the {name} run ({type(error).__name__}: {error})") from error
    if not all(math.isfinite(x) for rank in [*run.losses, run.val_losses] for x in rank):
        raise DemoError(f"the {name} run diverged (a loss is not finite): there is nothing to compare")
    return run


def load_masters(folder):
    """The fp32 weights that the optimizer held at the end of a run, by name. DemoError when they are missing."""
    try:
        return torch.load(Path(folder) / "masters.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError) as error:
        raise DemoError(f"{folder}: the optimizer's weights are missing ({type(error).__name__}: {error})") from error


def differences(left, right):
    """The first difference in losses and the first in parameters, as sentences; empty when the runs are bit-equal."""
    return [text for text in (_loss_difference(left, right), _weight_difference(left, right)) if text]


def spread(left, right):
    """How far two runs are apart: (largest |loss difference|, largest |parameter difference|)."""
    if any([t.shape for t in r.weights.values()] != [t.shape for t in left.weights.values()] or
           [len(x) for x in r.losses] != [len(x) for x in left.losses] for r in (left, right)):
        raise DemoError(f"the {left.name} and {right.name} runs are not of the same model and length")
    losses = [abs(x - y) for a, b in zip(left.losses, right.losses, strict=True) for x, y in zip(a, b, strict=True)]
    weights = [(tensor.double() - right.weights[name].double()).abs().max().item()
               for name, tensor in left.weights.items() if tensor.numel()]
    return max(losses, default=0.0), max(weights, default=0.0)


def _bits(tensor):
    """The tensor's elements as integers of their size, flat."""
    return tensor.detach().contiguous().reshape(-1).view(_INTEGER_OF_SIZE[tensor.element_size()])


def _hex(tensor, index):
    size = tensor.element_size()
    return f"0x{_bits(tensor)[index].item() % (1 << 8 * size):0{2 * size}x}"


def _loss_difference(left, right):
    a, b = left.losses_hex, right.losses_hex
    if [len(rank) for rank in a] != [len(rank) for rank in b]:
        return f"losses: {left.name} has steps per rank {[len(r) for r in a]}, {right.name} {[len(r) for r in b]}"
    unequal = [(step, rank) for rank in range(len(a)) for step in range(len(a[rank])) if a[rank][step] != b[rank][step]]
    if unequal:
        step, rank = min(unequal)
        return (f"losses: first difference at step {step + 1}, rank {rank}: "
                f"{left.name} {a[rank][step]} ({left.losses[rank][step]:.9g}), "
                f"{right.name} {b[rank][step]} ({right.losses[rank][step]:.9g}); {len(unequal)} values differ")
    for rank, (x, y) in enumerate(zip(left.val_losses_hex, right.val_losses_hex, strict=True)):
        if x != y:
            return f"validation loss: first difference at rank {rank}: {left.name} {x}, {right.name} {y}"
    return None


def _weight_difference(left, right):
    if left.weights.keys() != right.weights.keys():
        return f"parameters: only in one of the runs: {sorted(left.weights.keys() ^ right.weights.keys())}"
    for name, a in left.weights.items():
        b = right.weights[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return (f"parameter {name}: {left.name} {a.dtype} {tuple(a.shape)}, "
                    f"{right.name} {b.dtype} {tuple(b.shape)}")
        unequal = (_bits(a) != _bits(b)).nonzero().flatten()
        if len(unequal):
            flat = unequal[0].item()
            index = [i.item() for i in torch.unravel_index(unequal[0], a.shape)]
            return (f"parameters: first difference in {name}{index} ({str(a.dtype).removeprefix('torch.')}): "
                    f"{left.name} {_hex(a, flat)} ({a.reshape(-1)[flat].item():.9g}), "
                    f"{right.name} {_hex(b, flat)} ({b.reshape(-1)[flat].item():.9g}); "
                    f"{len(unequal)} of its {a.numel()} elements differ")
    return None
