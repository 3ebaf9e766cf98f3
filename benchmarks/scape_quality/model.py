"""A GPT for W workers at once: every worker's loss on its own sequences, and every worker's own gradient, in one pass.

The weights are stacked once per worker, so that one call of autograd gives all gradients apart and a matrix product of all workers is one
batched call. Pre-norm, rotary positions, GELU, tied embeddings.
"""
import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ds_scape.sync.partition import TensorSlot


@dataclass(frozen=True)
class Shape:
    vocab: int = 4096
    dim: int = 384
    layers: int = 5
    heads: int = 6
    seq_len: int = 256

    def tensors(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """(name, how many, shape): equal tensors lie one after another in the flat buffer."""
        d, layers = self.dim, self.layers
        return [("embedding", 1, (self.vocab, d)), ("qkv", layers, (d, 3 * d)), ("out", layers, (d, d)), ("up", layers, (d, 4 * d)),
                ("down", layers, (4 * d, d)), ("gains", 2 * layers + 1, (d,))]

    @property
    def num_parameters(self) -> int:
        return sum(count * math.prod(shape) for _, count, shape in self.tensors())

    def slots(self) -> list[TensorSlot]:
        """Every tensor's place in the flat buffer."""
        slots, offset = [], 0
        for _, count, shape in self.tensors():
            for _ in range(count):
                slots.append(TensorSlot(offset, math.prod(shape), len(shape)))
                offset += math.prod(shape)
        return slots

    def initial(self, seed: int, numel: int) -> torch.Tensor:
        """fp32 [numel], on the host: the weights, then zeros. What writes into the stream starts smaller, as in GPT-2."""
        generator, made = torch.Generator("cpu").manual_seed(seed), []
        for name, count, shape in self.tensors():
            sigma = 0.02 / math.sqrt(2 * self.layers) if name in ("out", "down") else 0.02
            drawn = torch.randn(count * math.prod(shape), generator=generator, device="cpu") * sigma
            made.append(torch.ones_like(drawn) if name == "gains" else drawn)
        return F.pad(torch.cat(made), (0, numel - self.num_parameters))


class _Embed(torch.autograd.Function):
    """Rows of the workers' embeddings. Its gradient is a matrix product, which sums in an order of its own but always the same one:
    adding row after row with atomics, as a GPU would, gives other bits in every run."""

    @staticmethod
    def forward(ctx, weight, tokens):
        workers, vocab, dim = weight.shape
        ctx.save_for_backward(tokens)
        ctx.vocab = vocab
        offsets = torch.arange(workers, device=tokens.device)[:, None] * vocab
        return weight.reshape(workers * vocab, dim).index_select(0, (tokens + offsets).flatten()).view(workers, -1, dim)

    @staticmethod
    def backward(ctx, gradient):
        tokens, = ctx.saved_tensors
        picked = torch.zeros(*tokens.shape, ctx.vocab, dtype=gradient.dtype, device=gradient.device)
        picked.scatter_(2, tokens[..., None], 1.0)
        return torch.bmm(picked.transpose(1, 2), gradient), None


def _rotate(x, cos, sin):
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


def trunk(x, embedding, qkv, out, up, down, gains, cos, sin, heads: int):
    """x [W, B * T, dim] -> logits [W, B * T, vocab]. The other tensors: [W, count, ...]; cos, sin: [T, dim / heads / 2]."""
    workers, rows, dim = x.shape
    seq_len = cos.shape[0]
    gains = gains.unbind(1)

    def norm(x, number):
        return F.rms_norm(x, (dim,)) * gains[number].unsqueeze(1)

    for i, (w_qkv, w_out, w_up, w_down) in enumerate(zip(qkv.unbind(1), out.unbind(1), up.unbind(1), down.unbind(1), strict=True)):
        mixed = torch.bmm(norm(x, 2 * i), w_qkv).view(workers * rows // seq_len, seq_len, 3, heads, dim // heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + torch.bmm(attended.transpose(1, 2).reshape(workers, rows, dim), w_out)
        x = x + torch.bmm(F.gelu(torch.bmm(norm(x, 2 * i + 1), w_up), approximate="tanh"), w_down)
    return torch.bmm(norm(x, -1), embedding[:, 0].transpose(1, 2))


def losses(x, targets, *weights_and_rest):
    """fp32 [W]: every worker's mean loss per token. targets: int64 [W, B * T]."""
    logits = trunk(x, *weights_and_rest)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def squares(gradients):
    """float64 [W] of gradients [W, n]: sums of squares, exact but for the order of the sum."""
    return gradients.double().square().sum(1)


class Model:
    """``copies`` bf16 [n]: the weights that all workers compute with. ``gradients`` bf16 [W, n]: each worker's, of its last sequences."""

    def __init__(self, shape: Shape, workers: int, batch: int, numel: int, device: torch.device, compiled: bool):
        self.shape, self.workers, self.batch = shape, workers, batch
        self.copies = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        self.gradients = torch.zeros(workers, numel, dtype=torch.bfloat16, device=device)
        self._leaves = [torch.zeros(workers, count, *size, dtype=torch.bfloat16, device=device, requires_grad=True)
                        for _, count, size in shape.tensors()]
        half = shape.dim // shape.heads // 2
        frequency = 10000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(shape.seq_len, device=device, dtype=torch.float32), frequency)
        self._rotary = angles.cos().bfloat16(), angles.sin().bfloat16()
        self._losses, self._squares = (_compiled(losses), _compiled(squares)) if compiled else (losses, squares)

    def _parts(self, flat: torch.Tensor):
        """Of [..., n], per kind of tensor its [..., count, *shape]."""
        offset = 0
        for _, count, shape in self.shape.tensors():
            numel = count * math.prod(shape)
            yield flat[..., offset:offset + numel].view(*flat.shape[:-1], count, *shape)
            offset += numel

    @torch.no_grad()
    def load(self) -> None:
        """The copies into what the workers compute with."""
        for leaf, part in zip(self._leaves, self._parts(self.copies), strict=True):
            leaf.copy_(part.expand_as(leaf))

    def forward_backward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fills ``gradients`` from tokens int64 [W * B, T + 1]. Returns fp32 [W] losses and float64 [W] squared norms."""
        self.load()
        inputs, targets = (part.reshape(self.workers, -1) for part in (tokens[:, :-1], tokens[:, 1:]))
        x = _Embed.apply(self._leaves[0][:, 0], inputs)
        found = self._losses(x, targets, *self._leaves, *self._rotary, self.shape.heads)
        made = torch.autograd.grad(found.sum(), self._leaves)
        with torch.no_grad():
            for gradient, part in zip(made, self._parts(self.gradients), strict=True):
                part.copy_(gradient)
            return found.detach(), self._squares(self.gradients)

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of the losses, number of tokens that were predicted right), fp32, of tokens int64 [B, T + 1] by worker 0's weights."""
        inputs, targets = (part.reshape(1, -1) for part in (tokens[:, :-1], tokens[:, 1:]))
        first = [leaf[:1] for leaf in self._leaves]
        logits = trunk(_Embed.apply(first[0][:, 0], inputs), *first, *self._rotary, self.shape.heads).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), reduction="sum"), (logits.argmax(1) == targets.flatten()).sum().float()


_COMPILED = {}


def _compiled(function):
    """One compilation for all runs of a process, whose shapes are equal."""
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function, dynamic=False, fullgraph=True)
    return _COMPILED[function]
