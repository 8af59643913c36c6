"""Medusa heads: each predicts one token further ahead, all from the same hidden state.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774. Head k consists of one or more residual blocks and an output matrix:

    h_k = h + SiLU(W_k h + b_k)        logits_k = O_k h_k

The heads may share one output matrix: the target's, which is then not stored in their file, or
another one. The matrices may be cut to a draft vocabulary, which makes drafting faster.
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

    def top(self, hidden: Floats, n: int) -> tuple[Ints, Floats]:
        """The ``n`` likeliest tokens of each head and their probabilities, both (n_heads, n).

        ``hidden`` is the target's state, (n_embd,). The likeliest come first; fewer than ``n`` if
        the draft vocabulary is smaller.
        """
        ...


class MedusaHeads:
    """Medusa heads in NumPy, on the CPU."""

    def __init__(self, weights: MedusaWeights) -> None:
        self.n_heads = weights.n_heads
        self.accuracy = weights.accuracy
        self.tree = weights.tree
        self._weights = weights

    def logits(self, hidden: Floats) -> Floats:
        """Logits of all heads, (n_heads, n_drafted), for one state, (n_embd,)."""
        w = self._weights
        state = np.broadcast_to(hidden, (self.n_heads, len(hidden)))
        for weight, bias in zip(w.weights, w.biases, strict=True):
            inner = np.matmul(weight, state[:, :, None])[:, :, 0] + bias
            with np.errstate(over="ignore"):  # exp(-inner) is infinite where SiLU is zero
                state = state + inner / (1.0 + np.exp(-inner))
        logits: Floats
        if w.output.ndim == 2:
            # OpenBLAS takes 0.3 ms for 4096 × 256 by 256 × 4, 0.8 ms for the transposed product.
            logits = (w.output @ state.T).T
        else:
            logits = np.matmul(w.output, state[:, :, None])[:, :, 0]
        return logits

    def top(self, hidden: Floats, n: int) -> tuple[Ints, Floats]:
        logits = np.ascontiguousarray(self.logits(hidden))
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


class MedusaHeadsOnGPU:
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
            top = torch.softmax(logits, dim=1).topk(min(n, logits.shape[1]), dim=1)
            rows: Ints = top.indices.cpu().numpy()
            probs: Floats = top.values.cpu().numpy()
        return (rows if self._tokens is None else self._tokens[rows].astype(np.int64)), probs
