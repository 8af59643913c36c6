"""Medusa heads: each predicts one token further ahead, all from the same hidden state.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774. Head k consists of one or more residual blocks:

    h_k = h + SiLU(W_k h + b_k)        logits_k = O h_k

O is the target's output matrix, which is not stored in their file. It may be cut to a draft
vocabulary, which makes drafting faster. (In the paper each head has an output matrix of its own.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.llama.model import Model
from batching.tree import Floats
from speculation.drafting.tree_growth import top_tokens, with_target_ids
from speculation.heads.base import Head, silu
from speculation.heads.file import HeadsFile, HeadsInfo, own_format, write_heads

N_CHOICES = 8  # of each head
Choices = list[tuple[int, float]]  # tokens with their probabilities, likeliest first


@dataclass(frozen=True)
class MedusaWeights:
    """The parameters of a set of heads.

    weights  W of each residual block, (n_blocks, n_heads, n_embd, n_embd)
    biases   b of each residual block, (n_blocks, n_heads, n_embd)
    output   O, (n_drafted, n_embd)
    tokens   the draft vocabulary, a token per row of O, (n_drafted,); None = all tokens
    """

    weights: Floats
    biases: Floats
    output: Floats
    tokens: npt.NDArray[np.int32] | None


class MedusaHeads(Head):
    """Medusa heads, in NumPy."""

    def __init__(self, weights: MedusaWeights) -> None:
        self._blocks = list(zip(weights.weights, weights.biases[:, :, :, None], strict=True))
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


def load_medusa(file: HeadsFile, model: Model) -> MedusaHeads:
    """Load heads for ``model``, after ``HeadsFile.check_target``.

    Raises HeadsError if the file's tensors contradict its metadata, OutOfMemory if there is no room
    for the target's output matrix.
    """
    return MedusaHeads(read_weights(file, model.path))


KIND = own_format("medusa", load_medusa)


def read_weights(file: HeadsFile, target: Path) -> MedusaWeights:
    """Read the parameters; ``target`` is the target's GGUF, which has the output matrix."""
    n_embd = file.info.n_embd
    n_heads, n_blocks = file.value("medusa.head_count", int), file.value("medusa.block_count", int)
    weights = np.empty((n_blocks, n_heads, n_embd, n_embd), np.float32)
    biases = np.empty((n_blocks, n_heads, n_embd), np.float32)
    for head in range(n_heads):
        for block in range(n_blocks):
            name = f"head.{head}.block.{block}"
            weights[block, head] = file.tensor(f"{name}.weight", n_embd, n_embd)
            biases[block, head] = file.tensor(f"{name}.bias", n_embd)
    return MedusaWeights(weights, biases, file.output_matrix(target), file.tokens())


def write_medusa(path: Path, info: HeadsInfo, weights: MedusaWeights) -> None:
    """Write heads to a GGUF, matrices as F16."""
    n_blocks, n_heads = weights.biases.shape[:2]
    metadata = {
        "medusa.head_count": n_heads,
        "medusa.block_count": n_blocks,
        "medusa.shares_target_output": True,
    }
    tensors: dict[str, npt.NDArray[Any]] = {}
    for block in range(n_blocks):
        for head in range(n_heads):
            name = f"head.{head}.block.{block}"
            tensors[f"{name}.weight"] = weights.weights[block, head]
            tensors[f"{name}.bias"] = weights.biases[block, head].astype(np.float32)
    write_heads(path, info, metadata, tensors, tokens=weights.tokens)
