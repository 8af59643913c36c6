"""Reads and writes files of Medusa heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.errors import HeadsError
from batching.llama.model import Model
from batching.tree import Floats
from speculation.heads.base import torch_on_gpu
from speculation.heads.file import HeadsFile, HeadsInfo, write_heads
from speculation.heads.kind import own_format
from speculation.heads.medusa import MedusaHeads, MedusaHeadsOnGPU, MedusaWeights
from speculation.heads.tree import Path as TreePath
from speculation.heads.tree import assumed_accuracy, best_tree, parse_choices, show_choices

DEFAULT_NODES = 15
_N_RANKS = 10  # choices per head if the file has no measured accuracies


def load_medusa(file: HeadsFile, model: Model) -> MedusaHeads | MedusaHeadsOnGPU:
    """Load heads for ``model``, after ``HeadsFile.check_target``.

    If the model runs on a GPU and PyTorch can use it, the heads run in PyTorch, else in NumPy.

    Raises HeadsError if the file's tensors contradict its metadata, OutOfMemory if there is no room
    for the target's output matrix.
    """
    weights = read_weights(file, model.path)
    torch = torch_on_gpu()
    return MedusaHeads(weights) if torch is None else MedusaHeadsOnGPU(weights, torch)


KIND = own_format("medusa", load_medusa)


def read_weights(file: HeadsFile, target: Path | None = None) -> MedusaWeights:
    """Read the parameters from a file.

    ``target`` is the target's GGUF, for a shared output matrix. Without it, a shared matrix is left
    empty, for tools that do not need it.
    """
    n_embd = file.info.n_embd
    n_heads, n_blocks = file.value("medusa.head_count", int), file.value("medusa.block_count", int)
    weights = np.empty((n_blocks, n_heads, n_embd, n_embd), np.float32)
    biases = np.empty((n_blocks, n_heads, n_embd), np.float32)
    for head in range(n_heads):
        for block in range(n_blocks):
            name = f"head.{head}.block.{block}"
            weights[block, head] = file.tensor(f"{name}.weight", n_embd, n_embd)
            biases[block, head] = file.tensor(f"{name}.bias", n_embd)
    if file.shares_target or "output.weight" in file.gguf.tensors:
        output = file.output_matrix(target)
    else:
        names = [f"head.{head}.output.weight" for head in range(n_heads)]
        output = np.stack([file.output_matrix(target, name) for name in names])
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
    return MedusaWeights(weights, biases, output, file.shares_target, file.tokens(), accuracy, tree)


def default_tree(accuracy: Floats, n_nodes: int) -> tuple[TreePath, ...]:
    """The best tree by ``accuracy``, or by ``assumed_accuracy`` if every accuracy is 0."""
    return best_tree(accuracy, n_nodes) or best_tree(assumed_accuracy(*accuracy.shape), n_nodes)


def write_medusa(path: Path, info: HeadsInfo, weights: MedusaWeights) -> None:
    """Write heads to a GGUF, matrices as F16, without an output matrix shared with the target."""
    metadata: dict[str, bool | int | float | str | list[float]] = {
        "medusa.head_count": weights.n_heads,
        "medusa.block_count": len(weights.weights),
        "medusa.shares_target_output": weights.shares_target,
        "medusa.accuracy": weights.accuracy.ravel().tolist(),
        "medusa.choices": show_choices(weights.tree),
    }
    tensors: dict[str, npt.NDArray[Any]] = {}
    for block, (matrices, biases) in enumerate(zip(weights.weights, weights.biases, strict=True)):
        for head, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            tensors[f"head.{head}.block.{block}.weight"] = matrix
            tensors[f"head.{head}.block.{block}.bias"] = bias.astype(np.float32)
    if not weights.shares_target:
        if weights.output.ndim == 2:
            tensors["output.weight"] = weights.output
        else:
            for head, matrix in enumerate(weights.output):
                tensors[f"head.{head}.output.weight"] = matrix
    write_heads(path, info, metadata, tensors, tokens=weights.tokens)
