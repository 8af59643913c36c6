"""A random head of the architecture ``dflash``, in the layout of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import TokenType

from batching.tree import Floats
from tests.support.head_checks import random_weights
from tests.support.tiny_gguf import (
    N_TINY,
    finish_head,
    started_writer,
    vocabulary,
    write_hybrid_gguf,
    write_tiny_gguf,
)

N_HEAD, N_HEAD_KV, HEAD, N_FF = 4, 2, 8, 64
MASK = 0  # the unknown token, which occurs in no text
ROPE_BASE = 10.0  # of the counting head: large enough to tell neighbouring positions apart


def dflash_tensors(
    n_embd: int = 32, n_layers: int = 3, n_blocks: int = 2, seed: int = 0, influence: float = 1.0
) -> dict[str, Floats]:
    """The tensors of a head without its own embeddings and output matrix; its layers add
    ``influence`` of what random weights would."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (n_embd, n_layers * n_embd),
        "enc.output_norm.weight": (n_embd,),
        "output_norm.weight": (n_embd,),
    }
    for i in range(n_blocks):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (n_embd,),
            f"blk.{i}.attn_q.weight": (N_HEAD * HEAD, n_embd),
            f"blk.{i}.attn_k.weight": (N_HEAD_KV * HEAD, n_embd),
            f"blk.{i}.attn_v.weight": (N_HEAD_KV * HEAD, n_embd),
            f"blk.{i}.attn_output.weight": (n_embd, N_HEAD * HEAD),
            f"blk.{i}.attn_q_norm.weight": (HEAD,),
            f"blk.{i}.attn_k_norm.weight": (HEAD,),
            f"blk.{i}.ffn_norm.weight": (n_embd,),
            f"blk.{i}.ffn_gate.weight": (N_FF, n_embd),
            f"blk.{i}.ffn_up.weight": (N_FF, n_embd),
            f"blk.{i}.ffn_down.weight": (n_embd, N_FF),
        }
    weights = random_weights(shapes, seed)
    for i in range(n_blocks):
        weights[f"blk.{i}.attn_output.weight"] *= influence
        weights[f"blk.{i}.ffn_down.weight"] *= influence
    return weights


def write_tiny_dflash(
    path: Path,
    *,
    layers: Sequence[int] = (1, 2, 3),
    n_embd: int = 32,
    n_blocks: int = 2,
    block_size: int = 8,
    seed: int = 0,
    influence: float = 1.0,
    tensors: Mapping[str, npt.NDArray[np.generic] | None] | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Path:
    """Write the head. ``tensors`` and ``metadata``, by their names in the file, are added or
    replace existing ones; None leaves one out."""
    sizes = (N_FF, N_HEAD, N_HEAD_KV)
    writer = started_writer(path, "dflash", n_embd, n_blocks, sizes, head=HEAD)
    keys: dict[str, object] = {
        "dflash.target_layers": list(layers),
        "dflash.block_size": block_size,
        "tokenizer.ggml.mask_token_id": MASK,
    }
    made = dflash_tensors(n_embd, len(layers), n_blocks, seed, influence)
    return finish_head(writer, path, {**keys, **(metadata or {})}, {**made, **(tensors or {})})


# A target that counts, each token followed by the next on a circle, and a head that predicts it.

_TURNS = (1, 7, 29, 101)  # over the whole circle, in each of the planes that a token lies in
_CONSTANT = 8  # a component that every token has, besides the eight of these planes
_OWN = slice(16, 24)  # where the head keeps the features of a token of the text
N_COUNTED = 4  # tokens that a block predicts


def counted() -> list[int]:
    """The tokens in counting order, without the special ones."""
    types = vocabulary()[2]
    return [token for token in range(3, N_TINY) if types[token] != TokenType.CONTROL]


def _on_circle() -> Floats:
    """The position of each token on the circle, (N_TINY, 8)."""
    places = np.zeros((N_TINY, 8), np.float32)
    order = counted()
    angles = 2 * np.pi * np.outer(np.arange(len(order)), _TURNS) / len(order)
    places[order, 0::2], places[order, 1::2] = np.cos(angles), np.sin(angles)
    return places


def _turn(n: int) -> Floats:
    """The rotation that maps a token to the one ``n`` positions later, (8, 8)."""
    turn = np.zeros((8, 8), np.float32)
    for plane, turns in enumerate(_TURNS):
        angle = 2 * np.pi * n * turns / len(counted())
        i = 2 * plane
        turn[i, i] = turn[i + 1, i + 1] = np.cos(angle)
        turn[i + 1, i], turn[i, i + 1] = np.sin(angle), -np.sin(angle)
    return turn


def write_counting_gguf(path: Path, *, influence: float = 0.0, hybrid: bool = False) -> Path:
    """Write a model of four layers that counts, with more errors the larger the ``influence`` of
    its random layers; ``hybrid`` writes one that can rewind only a few tokens."""
    embeddings = np.zeros((N_TINY, 32), np.float32)
    embeddings[:, :8] = _on_circle()
    embeddings[:, _CONSTANT] = 1
    output = np.zeros((N_TINY, 32), np.float32)
    output[:, :8] = 2 * _on_circle() @ _turn(-1).T
    write = write_hybrid_gguf if hybrid else write_tiny_gguf
    return write(
        path,
        n_layer=4,
        influence=influence,
        tensors={"token_embd.weight": embeddings, "output.weight": output},
    )


def counting_tensors() -> dict[str, Floats]:
    """The tensors of a head of one layer whose masks look back at the second-last token: the first
    mask from two positions later, the second from three, each with its own attention head.
    """
    weights = {name: 0 * values for name, values in dflash_tensors(n_blocks=1).items()}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] += 6 if "_q_" in name or "_k_" in name else 1
    for i in range(8):  # each component from the input of a different layer
        weights["fc.weight"][_OWN.start + i, 32 * (i // 3) + i] = 1
    weights["fc.weight"][_CONSTANT, _CONSTANT] = 1
    weights["blk.0.attn_k.weight"][:, _CONSTANT] = 1
    for kv_head in range(N_HEAD_KV):
        weights["blk.0.attn_v.weight"][HEAD * kv_head : HEAD * (kv_head + 1), _OWN] = np.eye(8)
    speeds = ROPE_BASE ** (-2 * np.arange(HEAD // 2) / HEAD)
    for head in range(N_HEAD):
        rows = slice(HEAD * head, HEAD * (head + 1))
        angles = -(head + 2) * speeds  # keys are (1, 1) in each plane, and so is what they meet
        query = [np.cos(angles) - np.sin(angles), np.sin(angles) + np.cos(angles)]
        weights["blk.0.attn_q.weight"][rows, _CONSTANT] = np.concatenate(query)
        # Heads that look further back than the second-last token add little.
        weights["blk.0.attn_output.weight"][:8, rows] = 9 * 0.2**head * _turn(head + 1)
    return weights


def write_counting_head(path: Path, **more: Any) -> Path:
    """Write the head for layers 0, 2 and 3 of the counting model."""
    more["metadata"] = {"dflash.rope.freq_base": ROPE_BASE, **more.get("metadata", {})}
    more["tensors"] = {**counting_tensors(), **more.get("tensors", {})}
    return write_tiny_dflash(path, layers=(0, 2, 3), n_blocks=1, block_size=1 + N_COUNTED, **more)
