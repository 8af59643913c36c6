"""Medusa heads: each predicts one token further ahead, all from the same hidden state.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774. Head k consists of one or more residual blocks and an output matrix:

    h_k = h + SiLU(W_k h + b_k)        logits_k = O_k h_k

The heads may share one output matrix: the target's, which is then not stored in their file, or
another one. The matrices may be cut to a draft vocabulary, which makes drafting faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from batching.tree import Floats
from speculation.heads.base import Head
from speculation.heads.tree import Path

Ints = npt.NDArray[np.int64]
_BLOCKS = 64


@dataclass(frozen=True)
class MedusaWeights:
    """The parameters of a set of heads.

    weights   W of each residual block, (n_blocks, n_heads, n_embd, n_embd)
    biases    b of each residual block, (n_blocks, n_heads, n_embd)
    output    O of each head, (n_heads, n_drafted, n_embd), or of all, (n_drafted, n_embd)
    shares_target  whether O is the target's
    tokens    the draft vocabulary, a token per row of O, (n_drafted,); None = all tokens
    accuracy  accuracy of choice r of head k, measured in training, (n_heads, n_ranks)
    tree      the nodes to draft by default, see ``heads.tree``
    """

    weights: Floats
    biases: Floats
    output: Floats
    shares_target: bool
    tokens: npt.NDArray[np.int32] | None
    accuracy: Floats
    tree: tuple[Path, ...]

    @property
    def n_heads(self) -> int:
        return int(self.weights.shape[1])


class Heads(Protocol):
    """Medusa heads as the drafter sees them; tests use a fake."""

    @property
    def n_heads(self) -> int: ...

    @property
    def accuracy(self) -> Floats:
        """Accuracy of choice r of head k, (n_heads, n_ranks)."""
        ...

    @property
    def tree(self) -> tuple[Path, ...]:
        """The nodes to draft by default."""
        ...

    def top(self, parts: Sequence[tuple[Floats, int]]) -> list[tuple[Ints, Floats]]:
        """For each state of the target, (n_embd,), and n: the n likeliest tokens of each head and
        their probabilities, both (n_heads, n).

        The likeliest come first; fewer than n if the draft vocabulary is smaller.
        """
        ...


class MedusaHeads(Head):
    """Medusa heads in NumPy, on the CPU."""

    def __init__(self, weights: MedusaWeights) -> None:
        self.n_heads = weights.n_heads
        self.accuracy = weights.accuracy
        self.tree = weights.tree
        self._weights = weights

    def logits(self, hidden: Floats) -> Floats:
        """Logits of all heads, (n_heads, n, n_drafted), for n states, (n, n_embd)."""
        w, (n, n_embd) = self._weights, hidden.shape
        state: Floats = np.broadcast_to(hidden.T, (self.n_heads, n_embd, n))
        for weight, bias in zip(w.weights, w.biases, strict=True):
            inner = np.matmul(weight, state) + bias[:, :, None]
            with np.errstate(over="ignore"):  # exp(-inner) is infinite where SiLU is zero
                state = state + inner / (1.0 + np.exp(-inner))
        if w.output.ndim == 2:
            # OpenBLAS takes 0.3 ms for 4096 × 256 by 256 × 4, 0.8 ms for the transposed product.
            flat = state.transpose(1, 0, 2).reshape(n_embd, -1)
            logits: Floats = (w.output @ flat).T
            return logits.reshape(self.n_heads, n, -1)
        logits = np.matmul(w.output, state)
        return logits.transpose(0, 2, 1)

    def top(self, parts: Sequence[tuple[Floats, int]]) -> list[tuple[Ints, Floats]]:
        logits = np.ascontiguousarray(self.logits(np.stack([hidden for hidden, _ in parts])))
        return [self._top(logits[:, i], n) for i, (_, n) in enumerate(parts)]

    def _top(self, logits: Floats, n: int) -> tuple[Ints, Floats]:
        rows = np.stack([_top_indexes(row, n) for row in logits])
        values = np.take_along_axis(logits, rows, axis=1)
        peak = values[:, :1]
        weights: Floats = np.exp(values - peak)
        total: Floats = np.exp(logits - peak).sum(axis=1, keepdims=True)
        tokens = self._weights.tokens
        return (rows if tokens is None else tokens[rows].astype(np.int64)), weights / total


def _top_indexes(logits: Floats, n: int) -> Ints:
    """Indexes of the ``n`` highest of ``logits``, (n_drafted,), highest first; all if fewer.

    Takes the maxima of 64 blocks. At least n values reach the n-th highest maximum, and few more
    do, so only these are sorted. Compared with a partition of all logits, this takes a third of the
    time at 4,096 tokens and a twentieth at 150,000.
    """
    size = len(logits) // _BLOCKS
    if n <= _BLOCKS // 2 and size > 1:
        maxima = logits[: _BLOCKS * size].reshape(_BLOCKS, size).max(axis=1)
        rows = np.flatnonzero(logits >= np.partition(maxima, -n)[-n])
    else:
        rows = np.arange(len(logits))
    return rows[np.argsort(-logits[rows], kind="stable")[:n]]


class MedusaHeadsOnGPU(Head):
    """Medusa heads in PyTorch. The weights stay on the GPU; only the top tokens are copied back."""

    def __init__(self, weights: MedusaWeights, torch: Any, device: str = "cuda") -> None:
        """``torch`` is the module, ``device`` the PyTorch device to use."""
        self.n_heads = weights.n_heads
        self.accuracy = weights.accuracy
        self.tree = weights.tree
        self._torch = torch
        self._device = device
        self._weights, self._biases, self._output = (
            torch.from_numpy(np.ascontiguousarray(array)).to(device)
            for array in (weights.weights, weights.biases, weights.output)
        )
        self._tokens = weights.tokens

    def top(self, parts: Sequence[tuple[Floats, int]]) -> list[tuple[Ints, Floats]]:
        torch, most = self._torch, max(n for _, n in parts)
        hidden = np.stack([hidden for hidden, _ in parts], axis=1)  # (n_embd, n)
        with torch.inference_mode():
            state = torch.from_numpy(hidden).to(self._device).expand(self.n_heads, -1, -1)
            for weight, bias in zip(self._weights, self._biases, strict=True):
                inner = torch.matmul(weight, state) + bias.unsqueeze(-1)
                state = state + torch.nn.functional.silu(inner)
            logits = torch.matmul(self._output, state)  # (n_heads, n_drafted, n)
            top = torch.softmax(logits, dim=1).topk(min(most, logits.shape[1]), dim=1)
            rows: Ints = top.indices.cpu().numpy()
            probs: Floats = top.values.cpu().numpy()
        if self._tokens is not None:
            rows = self._tokens[rows].astype(np.int64)
        return [(rows[:, :n, i], probs[:, :n, i]) for i, (_, n) in enumerate(parts)]
