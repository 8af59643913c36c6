"""The decoder layer of EAGLE heads in PyTorch, and their training in several passes.

The layer computes what llama.cpp computes for one ``llama`` layer: RMSNorm, rotary embeddings on
interleaved pairs, grouped-query attention, SwiGLU. Parameters have llama.cpp's names.

While drafting, a head reads its own predictions. To train for that, it makes several passes over a
sequence: in pass s, every position sees the last s states as predicted in earlier passes and the
older ones as they are, as it does s tokens below the root of a tree. This is the "training-time
test" of EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and HASS (Zhang et al. 2024, arXiv 2408.15766).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batching.tree import Floats
from speculation.heads.eagle import EagleShape

Past = list[tuple[Tensor, Tensor]]  # keys and values of each pass, (rows, heads, time, size)


class Layer(nn.Module):
    """Attention and feed-forward block.

    ``width`` is the width of the attention's input: ``n_embd`` in a plain Llama layer, twice that
    in EAGLE-3's.
    """

    def __init__(self, shape: EagleShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        self.attn_norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)
        size = shape.n_embd // shape.n_head
        self.attn_q = nn.Linear(width, shape.n_embd, bias=False)
        self.attn_k = nn.Linear(width, size * shape.n_head_kv, bias=False)
        self.attn_v = nn.Linear(width, size * shape.n_head_kv, bias=False)
        self.attn_output = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)
        self.ffn_gate = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_up = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_down = nn.Linear(shape.n_ff, shape.n_embd, bias=False)
        for name, weight in self.named_parameters():
            if name in ("attn_output.weight", "ffn_down.weight"):
                nn.init.zeros_(weight)  # initially the layer adds nothing
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1]))

    def forward(self, inner: Tensor, residual: Tensor, past: Past) -> Tensor:
        """One pass: states (rows, time, n_embd) from ``inner``, (rows, time, width).

        ``past`` has the keys and values of the earlier passes; this pass's are appended.
        """
        rows, time, _ = inner.shape
        size = self.shape.n_embd // self.shape.n_head
        q, k, v = (
            linear(inner).view(rows, time, -1, size).transpose(1, 2)
            for linear in (self.attn_q, self.attn_k, self.attn_v)
        )
        factors = rotations(time, size, self.shape.rope_base, inner.device)
        shared = self.shape.n_head // self.shape.n_head_kv
        q, k = rotate(q, factors), rotate(k, factors)
        past.append((k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
        mixed = attend(q, past).transpose(1, 2).reshape(rows, time, -1)
        y = residual + self.attn_output(mixed)
        normed = self.ffn_norm(y)
        return y + self.ffn_down(F.silu(self.ffn_gate(normed)) * self.ffn_up(normed))


def attend(q: Tensor, past: Past) -> Tensor:
    """Attention of pass s = len(past) - 1, (rows, heads, time, size).

    Position t sees position t - s + j from pass j, for j = 1 … s, and positions up to t - s from
    pass 0. The results of the first s positions are meaningless.
    """
    s = len(past) - 1
    if s == 0:
        return F.scaled_dot_product_attention(q, *past[0], is_causal=True)
    time, scale = q.shape[2], q.shape[3] ** -0.5
    keys, values = past[0]
    seen = torch.ones(time, time, dtype=torch.bool, device=q.device).tril(-s)
    scores = (q @ keys.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    predicted = [(k.roll(s - j, 2), v.roll(s - j, 2)) for j, (k, v) in enumerate(past[1:], 1)]
    own = [(q * k).sum(dim=3, keepdim=True) * scale for k, _ in predicted]
    weights = torch.cat([scores, *own], dim=3).softmax(dim=3)
    mixed = weights[..., :time] @ values
    for j, (_, v) in enumerate(predicted):
        mixed = mixed + weights[..., time + j, None] * v
    return mixed


def rotations(time: int, size: int, base: float, device: torch.device) -> Tensor:
    """Cosine and sine of position times frequency, (2, time, size / 2)."""
    pairs = torch.arange(0, size, 2, dtype=torch.float64, device=device) / size
    angles = torch.outer(torch.arange(time, dtype=torch.float64, device=device), base**-pairs)
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x, (rows, heads, time, size), by their position's angle."""
    cos, sin = factors.unbind(0)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=4).flatten(3)


def passes(step: Callable[[Tensor], Tensor], first: Tensor, n: int) -> list[Tensor]:
    """The states of ``n`` passes. ``step`` predicts them from the states one token earlier, which
    are ``first`` and later those of the pass before, (rows, time, n_embd)."""
    found = [step(first)]
    while len(found) < n:
        found.append(step(torch.cat([first[:, :1], found[-1][:, :-1]], dim=1)))
    return found


class EagleModule(nn.Module):
    """EAGLE's head: embeddings and states (rows, time, n_embd) -> the states of each pass."""

    def __init__(self, shape: EagleShape, scale: float) -> None:
        """``scale`` is the root mean square of the target's states."""
        super().__init__()
        n = shape.n_embd
        self.fc = nn.Linear(2 * n, n)
        self.blk = nn.ModuleList([Layer(shape, n)])
        self.output_norm = nn.RMSNorm(n, eps=shape.norm_eps)
        with torch.no_grad():  # initially it repeats the previous state
            self.fc.weight.normal_(std=0.1 / math.sqrt(n))
            self.fc.weight[:, n:] += torch.eye(n)
            self.fc.bias.zero_()
            self.output_norm.weight.fill_(scale)

    def forward(self, embeddings: Tensor, states: Tensor, n_passes: int) -> list[Tensor]:
        (layer,) = self.blk
        past: Past = []

        def step(states: Tensor) -> Tensor:
            x = self.fc(torch.cat([embeddings, states], dim=2))
            return self.output_norm(layer(layer.attn_norm(x), x, past))

        return passes(step, states, n_passes)

    def read(self, states: Tensor) -> Tensor:
        """The input of the output matrix."""
        return states

    def tensors(self) -> dict[str, Floats]:
        """The parameters by their names in the head's file."""
        return arrays_of(self)


class Eagle3Module(nn.Module):
    """EAGLE-3's head: features of three layers (rows, time, 3 n_embd) -> the states of each pass.

    Computes what llama.cpp computes for the architecture ``eagle3``.
    """

    def __init__(self, shape: EagleShape, output_norm: Tensor, sizes: Tensor | None = None) -> None:
        """``output_norm`` is initialised with the target's own weight.

        ``sizes``, (3 n_embd,), are the root mean squares of the features' components. They differ
        by orders of magnitude, so the features are divided by them; ``tensors`` folds the
        division into ``fc.weight``.
        """
        super().__init__()
        n = shape.n_embd
        self.sizes: Tensor
        self.register_buffer("sizes", torch.ones(3 * n) if sizes is None else sizes)
        self.fc = nn.Linear(3 * n, n, bias=False)
        self.blk = nn.ModuleList([Layer(shape, 2 * n)])
        self.blk[0].attn_norm_2 = nn.RMSNorm(n, eps=shape.norm_eps)
        self.output_norm = nn.RMSNorm(n, eps=shape.norm_eps)
        with torch.no_grad():  # initially it passes on the input of the last of the three layers
            self.fc.weight.normal_(std=0.1 / math.sqrt(n))
            last = self.sizes[2 * n :]
            self.fc.weight[:, 2 * n :] += torch.diag(last) / last.square().mean().sqrt()
            self.output_norm.weight.copy_(output_norm)

    def forward(self, embeddings: Tensor, features: Tensor, n_passes: int) -> list[Tensor]:
        (layer,) = self.blk
        past: Past = []
        known = layer.attn_norm(embeddings)

        def step(states: Tensor) -> Tensor:
            inner = torch.cat([known, layer.attn_norm_2(states)], dim=2)
            return layer(inner, states, past)

        return passes(step, self.fc(features / self.sizes), n_passes)

    def read(self, states: Tensor) -> Tensor:
        return self.output_norm(states)

    def tensors(self) -> dict[str, Floats]:
        found = arrays_of(self)
        found["fc.weight"] = found["fc.weight"] / self.sizes.cpu().numpy()
        return found


def arrays_of(module: nn.Module) -> dict[str, Floats]:
    """A module's parameters by name."""
    return {name: of.detach().cpu().float().numpy() for name, of in module.named_parameters()}
