"""Reads and writes files of ReDrafter heads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.llama.model import Model
from batching.llama.weights import Weights
from speculation.heads.base import torch_on_gpu
from speculation.heads.file import HeadsFile, HeadsInfo, write_heads
from speculation.heads.kind import own_format
from speculation.heads.redrafter import (
    ReDrafterHead,
    ReDrafterHeadOnGPU,
    ReDrafterWeights,
)


def load_redrafter(file: HeadsFile, model: Model) -> ReDrafterHead | ReDrafterHeadOnGPU:
    """Load the head for ``model``, after ``HeadsFile.check_target``.

    If the model runs on a GPU and PyTorch can use it, the head runs in PyTorch, else in NumPy.

    Raises HeadsError if the file's tensors contradict its metadata, OutOfMemory if there is no room
    for the target's output matrix, UnsupportedModel if the target's file lacks a matrix.
    """
    weights = read_weights(file, model.path)
    embeddings = partial(Weights(model.path).rows, "token_embd.weight")
    torch = torch_on_gpu()
    if torch is not None:
        return ReDrafterHeadOnGPU(weights, embeddings, torch)
    return ReDrafterHead(weights, embeddings)


KIND = own_format("redrafter", load_redrafter)


def read_weights(file: HeadsFile, target: Path) -> ReDrafterWeights:
    """Read the parameters; ``target`` is the target's GGUF, for a shared output matrix."""
    n = file.info.n_embd
    n_blocks = file.value("redrafter.block_count", int)
    blocks = np.empty((n_blocks, n, n), np.float32)
    block_biases = np.empty((n_blocks, n), np.float32)
    for block in range(n_blocks):
        blocks[block] = file.tensor(f"block.{block}.weight", n, n)
        block_biases[block] = file.tensor(f"block.{block}.bias", n)
    return ReDrafterWeights(
        token=file.tensor("token.weight", n, n),
        recurrent=file.tensor("recurrent.weight", n, n),
        bias=file.tensor("recurrent.bias", n),
        mixing=file.tensor("mixing.weight", n, 2 * n),
        mixing_bias=file.tensor("mixing.bias", n),
        blocks=blocks,
        block_biases=block_biases,
        projection=file.tensor("projection.weight", n, n),
        output=file.output_matrix(target),
        shares_target=file.shares_target,
        tokens=file.tokens(),
    )


def write_redrafter(path: Path, info: HeadsInfo, weights: ReDrafterWeights) -> None:
    """Write a head to a GGUF, matrices as F16, without an output matrix shared with the target."""
    metadata = {
        "redrafter.block_count": len(weights.blocks),
        "redrafter.shares_target_output": weights.shares_target,
    }
    tensors: dict[str, npt.NDArray[Any]] = {
        "token.weight": weights.token,
        "recurrent.weight": weights.recurrent,
        "recurrent.bias": weights.bias,
        "mixing.weight": weights.mixing,
        "mixing.bias": weights.mixing_bias,
        "projection.weight": weights.projection,
    }
    for block, (matrix, bias) in enumerate(zip(weights.blocks, weights.block_biases, strict=True)):
        tensors[f"block.{block}.weight"] = matrix
        tensors[f"block.{block}.bias"] = bias
    if not weights.shares_target:
        tensors["output.weight"] = weights.output
    write_heads(path, info, metadata, tensors, tokens=weights.tokens)
