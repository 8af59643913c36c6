"""Medusa heads: each predicts one token further ahead, all from the same hidden state.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774. Head k consists of one or more residual blocks:

    h_k = h + SiLU(W_k h + b_k)        logits_k = O h_k

O is the target's output matrix, which is not stored in their file. It may be cut to a draft
vocabulary, which makes drafting faster. (In the paper each head has an output matrix of its own.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from batching.llama.model import Model
from batching.tree import Floats
from speculation.drafting.tree_growth import top_tokens, with_target_ids
from speculation.heads.base import Head, silu
from speculation.heads.file import HeadsFile, HeadsInfo, HeadsWeights, own_format, write_heads

N_CHOICES = 8  # of each head
Choices = Sequence[tuple[int, float]]  # tokens with their probabilities, likeliest first


class MedusaHeads(Head):
    """Medusa heads, in NumPy."""

    def __init__(self, weights: HeadsWeights) -> None:
        n_blocks, n_heads = counts(weights.tensors)

        def stacked(block: int, part: str) -> Floats:
            names = [f"head.{head}.block.{block}.{part}" for head in range(n_heads)]
            return np.stack([weights.tensors[name] for name in names])

        self._blocks = [
            (stacked(i, "weight"), stacked(i, "bias")[..., None]) for i in range(n_blocks)
        ]
        self._output = np.ascontiguousarray(weights.output)
        self._top = with_target_ids(top_tokens, weights.tokens)

    def logits(self, hidden: Floats) -> Floats:
        """Logits of all heads, (n_heads, n, n_drafted), for n states, (n, n_embd)."""
        n, n_embd = hidden.shape
        state: Floats = np.ascontiguousarray(hidden.T)
        for weight, bias in self._blocks:  # from the first on, (n_heads, n_embd, n)
            state = state + silu(weight @ state + bias)
        # OpenBLAS takes 0.3 ms for 4096 × 256 by 256 × 4, 0.8 ms for the transposed product.
        flat = state.swapaxes(0, 1).reshape(n_embd, -1)
        logits: Floats = (self._output @ flat).T.reshape(-1, n, len(self._output))
        return logits

    def top(self, parts: Sequence[Floats]) -> list[list[Choices]]:
        """For each state of the target, (n_embd,), the likeliest tokens of each head."""
        logits = self.logits(np.stack(parts))
        return [[self._top(row, N_CHOICES) for row in logits[:, i]] for i in range(len(parts))]


def shapes(n_heads: int, n_blocks: int, n_embd: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors by their names in the file."""
    names = [f"head.{head}.block.{block}" for block in range(n_blocks) for head in range(n_heads)]
    weights = {f"{name}.weight": (n_embd, n_embd) for name in names}
    return {**weights, **{f"{name}.bias": (n_embd,) for name in names}}


def counts(tensors: Mapping[str, Floats]) -> tuple[int, int]:
    """The numbers of blocks of a head, and of heads."""
    n_blocks = sum(name.startswith("head.0.") for name in tensors) // 2
    return n_blocks, len(tensors) // (2 * n_blocks)


def load_medusa(file: HeadsFile, model: Model) -> MedusaHeads:
    """Load heads, after ``HeadsFile.check_target``. Raises as ``HeadsFile.weights``."""
    n_heads, n_blocks = file.value("medusa.head_count", int), file.value("medusa.block_count", int)
    return MedusaHeads(file.weights(shapes(n_heads, n_blocks, file.info.n_embd), model.path))


KIND = own_format("medusa", load_medusa)


def write_medusa(path: Path, info: HeadsInfo, weights: HeadsWeights) -> None:
    """Write heads to a GGUF, matrices as F16."""
    n_blocks, n_heads = counts(weights.tensors)
    metadata = {"medusa.head_count": n_heads, "medusa.block_count": n_blocks}
    write_heads(path, info, metadata, weights.tensors, tokens=weights.tokens)
