"""Medusa heads: each guesses one token further ahead, all from the same hidden state.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774. Head k is a residual block, or several, and an output matrix:

    h_k = h + SiLU(W_k h + b_k)        logits_k = O_k h_k

The output matrices may be one for all: the target's own, which the file of heads then does without,
or another. They may be cut to the tokens that are drafted at all, so that drafting costs less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from batching.tree import Floats
from speculation.heads.tree import Path

Ints = npt.NDArray[np.int64]
_BLOCKS = 64


@dataclass(frozen=True)
class MedusaWeights:
    """The heads as matrices.

    weights   W of each residual block, (n_blocks, n_heads, n_embd, n_embd)
    biases    b of each, (n_blocks, n_heads, n_embd)
    output    O of each head, (n_heads, n_drafted, n_embd), or of all, (n_drafted, n_embd)
    shares_target  whether O is the target's own
    tokens    the token of each row of O, (n_drafted,); None where that is the row's own number
    accuracy  how often choice r of head k was right in training, (n_heads, n_ranks)
    tree      nodes to draft by default, see ``heads.tree``
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
    """What drafting needs of Medusa heads; tests have a fake."""

    @property
    def n_heads(self) -> int: ...

    @property
    def accuracy(self) -> Floats:
        """How often choice r of head k is right, (n_heads, n_ranks)."""
        ...

    @property
    def tree(self) -> tuple[Path, ...]:
        """The nodes to draft by default."""
        ...

    def top(self, hidden: Floats, n: int) -> tuple[Ints, Floats]:
        """Of each head the ``n`` likeliest tokens and their probabilities, (n_heads, n) both.

        ``hidden`` is the target's state, (n_embd,). The likeliest come first; there are fewer
        where the heads draft fewer tokens in all.
        """
        ...


class MedusaHeads:
    """The forward pass in NumPy, for the CPU."""

    def __init__(self, weights: MedusaWeights) -> None:
        self.n_heads = weights.n_heads
        self.accuracy = weights.accuracy
        self.tree = weights.tree
        self._weights = weights

    def logits(self, hidden: Floats) -> Floats:
        """Logits of every head, (n_heads, n_drafted), for one state, (n_embd,)."""
        w = self._weights
        state = np.broadcast_to(hidden, (self.n_heads, len(hidden)))
        for weight, bias in zip(w.weights, w.biases, strict=True):
            inner = np.matmul(weight, state[:, :, None])[:, :, 0] + bias
            with np.errstate(over="ignore"):  # exp(-inner) is infinite where SiLU is zero
                state = state + inner / (1.0 + np.exp(-inner))
        if w.output.ndim == 2:
            # OpenBLAS takes 0.3 ms for 4096 × 256 by 256 × 4; the other way round 0.8.
            shared: Floats = (w.output @ state.T).T
            return shared
        own: Floats = np.matmul(w.output, state[:, :, None])[:, :, 0]
        return own

    def top(self, hidden: Floats, n: int) -> tuple[Ints, Floats]:
        logits = np.ascontiguousarray(self.logits(hidden))
        found = np.stack([_likeliest(row, n) for row in logits])
        values = np.take_along_axis(logits, found, axis=1)
        peak = values[:, :1]
        weights: Floats = np.exp(values - peak)
        total: Floats = np.exp(logits - peak).sum(axis=1, keepdims=True)
        tokens = self._weights.tokens
        return (found if tokens is None else tokens[found].astype(np.int64)), weights / total


def _likeliest(logits: Floats, n: int) -> Ints:
    """The ``n`` highest of ``logits``, (n_drafted,), the highest first; all where they are fewer.

    Of the highest in each of 64 blocks the n-th is a bound that n values at least reach, and few
    more do: a third of the time of a partition at 4,096 tokens, a twentieth at 150,000.
    """
    size = len(logits) // _BLOCKS
    if n <= _BLOCKS // 2 and size > 1:
        peaks = logits[: _BLOCKS * size].reshape(_BLOCKS, size).max(axis=1)
        found = np.flatnonzero(logits >= np.partition(peaks, -n)[-n])
    else:
        found = np.arange(len(logits))
    return found[np.argsort(-logits[found], kind="stable")[:n]]


class MedusaHeadsOnGPU:
    """The same in PyTorch, where what the heads weigh is on the GPU and little comes back."""

    def __init__(self, weights: MedusaWeights, torch: Any, device: str = "cuda") -> None:
        """``torch`` is the module; ``device`` is where it computes."""
        self.n_heads = weights.n_heads
        self.accuracy = weights.accuracy
        self.tree = weights.tree
        self._torch = torch
        self._device = device
        self._weights, self._biases, self._output = (
            torch.from_numpy(np.ascontiguousarray(part)).to(device)
            for part in (weights.weights, weights.biases, weights.output)
        )
        self._tokens = weights.tokens

    def top(self, hidden: Floats, n: int) -> tuple[Ints, Floats]:
        torch = self._torch
        with torch.inference_mode():
            start = torch.from_numpy(np.array(hidden)).to(self._device)
            state = start.expand(self.n_heads, -1)
            for weight, bias in zip(self._weights, self._biases, strict=True):
                inner = torch.matmul(weight, state.unsqueeze(-1)).squeeze(-1) + bias
                state = state + torch.nn.functional.silu(inner)
            if self._output.ndim == 2:
                logits = state @ self._output.T
            else:
                logits = torch.matmul(self._output, state.unsqueeze(-1)).squeeze(-1)
            probs, found = torch.softmax(logits, dim=1).topk(min(n, logits.shape[1]), dim=1)
            rows: Ints = found.cpu().numpy()
            values: Floats = probs.cpu().numpy()
        return (rows if self._tokens is None else self._tokens[rows].astype(np.int64)), values
