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
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from batching.errors import HeadsError
from batching.llama.model import Model
from batching.tree import Floats
from speculation.heads.arrays import Arrays, Choices, fastest_arrays
from speculation.heads.base import Head
from speculation.heads.file import HeadsFile, HeadsInfo, own_format, write_heads
from speculation.heads.tree import Path as TreePath
from speculation.heads.tree import assumed_accuracy, best_tree, parse_choices, show_choices

DEFAULT_NODES = 15
_N_RANKS = 10  # choices per head if the file has no measured accuracies


@dataclass(frozen=True)
class MedusaWeights:
    """The parameters of a set of heads.

    weights   W of each residual block, (n_blocks, n_heads, n_embd, n_embd)
    biases    b of each residual block, (n_blocks, n_heads, n_embd)
    output    O, (n_drafted, n_embd)
    tokens    the draft vocabulary, a token per row of O, (n_drafted,); None = all tokens
    accuracy  accuracy of choice r of head k, measured in training, (n_heads, n_ranks)
    tree      the nodes to draft by default, see ``heads.tree``
    """

    weights: Floats
    biases: Floats
    output: Floats
    tokens: npt.NDArray[np.int32] | None
    accuracy: Floats
    tree: tuple[TreePath, ...]

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
    def tree(self) -> tuple[TreePath, ...]:
        """The nodes to draft by default."""
        ...

    def top(self, parts: Sequence[tuple[Floats, int]]) -> list[list[Choices]]:
        """For each state of the target, (n_embd,), and n: each head's n likeliest tokens.

        Fewer than n if the draft vocabulary is smaller.
        """
        ...


class MedusaHeads(Head):
    """Medusa heads; on a GPU in PyTorch, otherwise in NumPy."""

    def __init__(self, weights: MedusaWeights, arrays: Arrays | None = None) -> None:
        self.n_heads = weights.n_heads
        self.accuracy = weights.accuracy
        self.tree = weights.tree
        self._arrays = arrays = arrays or Arrays()
        self._blocks = [
            (arrays.array(weight), arrays.array(bias[:, :, None]))
            for weight, bias in zip(weights.weights, weights.biases, strict=True)
        ]
        self._output = arrays.array(weights.output)
        self._tokens = None if weights.tokens is None else weights.tokens.tolist()

    def logits(self, hidden: Floats) -> Any:
        """Logits of all heads, (n_heads, n, n_drafted), for n states, (n, n_embd)."""
        n, n_embd = hidden.shape
        state = self._arrays.array(hidden.T)
        for weight, bias in self._blocks:  # from the first on, (n_heads, n_embd, n)
            state = state + self._arrays.silu(weight @ state + bias)
        # OpenBLAS takes 0.3 ms for 4096 × 256 by 256 × 4, 0.8 ms for the transposed product.
        flat = state.swapaxes(0, 1).reshape(n_embd, -1)
        return (self._output @ flat).T.reshape(self.n_heads, n, -1)

    def top(self, parts: Sequence[tuple[Floats, int]]) -> list[list[Choices]]:
        logits = self.logits(np.stack([hidden for hidden, _ in parts]))
        rows = self._arrays.top(logits.reshape(-1, logits.shape[-1]), max(n for _, n in parts))
        if self._tokens is not None:
            rows = [[(self._tokens[token], prob) for token, prob in row] for row in rows]
        return [[row[:n] for row in rows[i :: len(parts)]] for i, (_, n) in enumerate(parts)]


def load_medusa(file: HeadsFile, model: Model) -> MedusaHeads:
    """Load heads for ``model``, after ``HeadsFile.check_target``.

    Raises HeadsError if the file's tensors contradict its metadata, OutOfMemory if there is no room
    for the target's output matrix.
    """
    return MedusaHeads(read_weights(file, model.path), fastest_arrays())


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
    accuracy = np.array(file.value("medusa.accuracy", list), np.float32)
    if accuracy.size == 0:
        accuracy = assumed_accuracy(n_heads, _N_RANKS)
    elif accuracy.size % n_heads:
        raise HeadsError(
            f"{file.path}: medusa.accuracy has {accuracy.size} values for {n_heads} heads; train "
            f"the heads again"
        )
    accuracy = accuracy.reshape(n_heads, -1)
    choices = file.gguf.metadata.get("medusa.choices", "")
    tree = parse_choices(choices) if choices else default_tree(accuracy, DEFAULT_NODES)
    if len(tree[-1]) > n_heads:
        raise HeadsError(
            f"{file.path}: the tree is {len(tree[-1])} deep, but there are only {n_heads} heads; "
            f"train the heads again"
        )
    output = file.output_matrix(target)
    return MedusaWeights(weights, biases, output, file.tokens(), accuracy, tree)


def default_tree(accuracy: Floats, n_nodes: int) -> tuple[TreePath, ...]:
    """The best tree by ``accuracy``, or by ``assumed_accuracy`` if every accuracy is 0."""
    return best_tree(accuracy, n_nodes) or best_tree(assumed_accuracy(*accuracy.shape), n_nodes)


def write_medusa(path: Path, info: HeadsInfo, weights: MedusaWeights) -> None:
    """Write heads to a GGUF, matrices as F16."""
    metadata: dict[str, bool | int | float | str | list[float]] = {
        "medusa.head_count": weights.n_heads,
        "medusa.block_count": len(weights.weights),
        "medusa.shares_target_output": True,
        "medusa.accuracy": weights.accuracy.ravel().tolist(),
        "medusa.choices": show_choices(weights.tree),
    }
    tensors: dict[str, npt.NDArray[Any]] = {}
    for block, (matrices, biases) in enumerate(zip(weights.weights, weights.biases, strict=True)):
        for head, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            tensors[f"head.{head}.block.{block}.weight"] = matrix
            tensors[f"head.{head}.block.{block}.bias"] = bias.astype(np.float32)
    write_heads(path, info, metadata, tensors, tokens=weights.tokens)
