"""The Llama decoder in PyTorch, computing exactly what llama.cpp computes for `llama`.

RMSNorm before each block, rotary embeddings on interleaved pairs (so that the weights need no
permutation in the GGUF), SwiGLU, tied embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder; `vocab`, `dim` and `hidden` must be multiples of 32 for Q8_0.

    head  size of a head; 0 = dim / heads
    """

    vocab: int = 4096
    dim: int = 256
    layers: int = 8
    heads: int = 4
    head: int = 0
    hidden: int = 704
    context: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if (not self.head and self.dim % self.heads) or self.head_dim % 2:
            raise ValueError(f"dim {self.dim} must split into {self.heads} heads of even size")
        if self.vocab % 32 or self.dim % 32 or self.hidden % 32 or self.inner % 32:
            raise ValueError("vocab, dim, hidden and all heads' size must be multiples of 32")

    @property
    def head_dim(self) -> int:
        return self.head or self.dim // self.heads

    @property
    def inner(self) -> int:
        """Size of all heads together."""
        return self.heads * self.head_dim


def rotations(shape: Shape) -> Tensor:
    """Cosine and sine of position times frequency: (2, context, head_dim / 2)."""
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float64), shape.rope_theta**-pairs)
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate neighbouring pairs (x[2i], x[2i+1]) by their position's angle.

    x: (rows, time, heads, head_dim); factors: (2, time, head_dim / 2).
    """
    cos, sin = factors[:, :, None, :].unbind(0)
    even, odd = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; q, k and v share one matrix here and are split on export."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = nn.Linear(shape.dim, 3 * shape.inner, bias=False)
        self.out = nn.Linear(shape.inner, shape.dim, bias=False)

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        rows, time, _ = x.shape
        heads = self.qkv(x).view(rows, time, 3, self.shape.heads, self.shape.head_dim)
        q, k, v = heads.unbind(2)  # each (rows, time, heads, head_dim)
        q, k = rotate(q, factors), rotate(k, factors)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(rows, time, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); gate and up share one matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.dim, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then feed-forward, each with pre-norm and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), factors)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token ids (rows, time) to logits (rows, time, vocab)."""

    factors: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.register_buffer("factors", rotations(shape), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, weight in self.named_parameters():
            if weight.ndim != 2 or name.startswith("embedding"):
                continue
            # Matrices that write into the residual stream start at zero: blocks start as identity.
            if name.endswith(("out.weight", "down.weight")):
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1]))

    def hidden(self, tokens: Tensor) -> Tensor:
        """States after the final norm: (rows, time, dim)."""
        x = self.embedding(tokens)
        factors = self.factors[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, factors)
        return self.norm(x)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens), self.embedding.weight)

    def loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Mean next-token cross-entropy in nats.

        tokens: (rows, time + 1); weights: (rows, time), 0 for targets to ignore.
        """
        logits = self(tokens[:, :-1])
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
        )
        return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1)
