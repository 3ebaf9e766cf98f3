"""The GPT that ``ds_zipccl bench step`` trains."""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    vocab: int
    dim: int
    layers: int
    heads: int


#: By name; the parameters without and with the embedding, which is tied to the head.
SIZES = {"tiny": Size(512, 64, 2, 2), "5m": Size(4096, 256, 5, 4), "350m": Size(50304, 1024, 24, 16), "1.3b": Size(50304, 2048, 24, 16)}


def _parameter(make, *shape: int) -> nn.Parameter:
    """On the device that torch makes a script's modules on."""
    return nn.Parameter(make(*shape, device=torch.get_default_device()))


class Block(nn.Module):
    """One layer, norm first, without biases. All its parameters are its own, not those of modules below it: ZeRO-3 then fetches a layer at
    once, as it does what ``stage3_module_granularity_threshold`` makes a leaf, and runs its hooks once a layer."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = _parameter(torch.ones, dim), _parameter(torch.ones, dim)
        self.qkv, self.out = _parameter(torch.empty, 3 * dim, dim), _parameter(torch.empty, dim, dim)
        self.up, self.down = _parameter(torch.empty, 4 * dim, dim), _parameter(torch.empty, dim, 4 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq_len, dim = x.shape
        q, k, v = F.linear(F.layer_norm(x, (dim,), self.norm1), self.qkv).view(batch, seq_len, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(batch, seq_len, dim), self.out)
        return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (dim,), self.norm2), self.up)), self.down)


class GPT(nn.Module):
    """Tokens int64 [batch, seq_len + 1] to the mean loss of all but the first."""

    def __init__(self, size: Size, seq_len: int):
        super().__init__()
        self.tokens, self.positions = _parameter(torch.empty, size.vocab, size.dim), _parameter(torch.empty, seq_len, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim, size.heads) for _ in range(size.layers))
        self.norm = _parameter(torch.ones, size.dim)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens[:, :-1], self.tokens) + self.positions[:tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(F.layer_norm(x, x.shape[-1:], self.norm), self.tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
