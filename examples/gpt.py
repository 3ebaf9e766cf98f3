"""A small decoder-only GPT: RMSNorm, rotary positions, causal attention, SwiGLU, tied or untied head."""
import torch
from torch import nn
from torch.nn import functional as F


def rotary_angles(seq_len, head_dim, device):
    """cos and sin of the rotary angles, each fp32 [seq_len, head_dim / 2]."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequency)
    return angles.cos(), angles.sin()


def rotate(x, rotary):
    """Turns x [batch, heads, seq_len, head_dim] by its positions, in fp32; same dtype back."""
    cos, sin = rotary
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def swiglu(x, gate_up, down):
    gate, up = gate_up(x).chunk(2, dim=-1)
    return down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream x [batch, seq_len, dim]."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        hidden = (dim * 8 // 3 + 31) // 32 * 32  # two thirds of 4 * dim: SwiGLU has three matrices instead of two
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def attention(self, x, rotary):
        batch, seq_len, dim = x.shape
        qkv = self.qkv(x).view(batch, seq_len, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
        return self.attention_out(heads.transpose(1, 2).reshape(batch, seq_len, dim))

    def mlp(self, x):
        return swiglu(x, self.gate_up, self.down)

    def forward(self, x, rotary):
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens int64 [batch, seq_len] to logits [batch, seq_len, vocab_size] in the model's dtype. block(dim, num_heads) makes a block."""

    def __init__(self, vocab_size, dim, num_layers, num_heads, tied=True, block=Block):
        super().__init__()
        self.head_dim = dim // num_heads
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # what writes into the stream starts smaller, as in GPT-2
                nn.init.normal_(weight, std=0.02 / (2 * num_layers) ** 0.5 if "out" in name or "down" in name else 0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        rotary = rotary_angles(tokens.shape[1], self.head_dim, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))
