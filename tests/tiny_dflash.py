"""A random head of the architecture ``dflash``, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType

from batching.tree import Floats
from tests.head_checks import random_weights
from tests.tiny_gguf import begun, finished, vocabulary

N_HEAD, N_HEAD_KV, HEAD, N_FF = 4, 2, 8, 64
N_TINY = len(vocabulary()[0])
MASK = 0  # the unknown token, which no text has


def dflash_tensors(
    n_embd: int = 32, n_layers: int = 3, n_blocks: int = 2, seed: int = 0, influence: float = 1.0
) -> dict[str, Floats]:
    """Those of a head without embeddings and output matrix of its own; its layers add ``influence``
    of what random weights would."""
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


def dflash2(top_k: int = 4, rank: int = 8, n_embd: int = 32, n_blocks: int = 2) -> dict[str, Floats]:
    """What DFlash 2 has besides: convolutions along the block, and what scores candidates."""
    n_groups, kernel = n_embd // 8, 2
    shapes: dict[str, tuple[int, ...]] = {
        "selector_predecessor.weight": (N_TINY, rank),
        "selector_successor.weight": (N_TINY, rank),
        "selector_hidden.weight": (rank, n_embd),
    }
    for i in range(n_blocks):
        for part in ("attn", "ffn"):
            shapes[f"blk.{i}.{part}_conv_proj.weight"] = (2 * kernel * n_groups, n_embd)
    weights = random_weights(shapes, 5)
    rng = np.random.default_rng(6)
    for i in range(n_blocks):
        for part in ("attn", "ffn"):
            base = rng.standard_normal((2, kernel, n_embd)).astype(np.float32)
            weights[f"blk.{i}.{part}_conv_base"] = base
    return weights


DFLASH2 = {
    "dflash.conv_kernel_size": 2,
    "dflash.conv_group_size": 8,
    "dflash.selector_rank": 8,
    "dflash.selector_top_k": 4,
}


def dspark(rank: int = 8, n_embd: int = 32, *, confidence: bool = True) -> dict[str, Floats]:
    """What DSpark has besides: what leans on the token before, and says how likely drafts are."""
    weights = random_weights(
        {"markov_w1.weight": (N_TINY, rank), "markov_w2.weight": (N_TINY, rank)}, 7
    )
    if confidence:
        weights |= random_weights({"conf_proj.weight": (1, n_embd + rank)}, 8)
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
    """Write the head. ``tensors`` and ``metadata``, by their names in the file, are added or take
    the place of what would be there; what is None is left out."""
    writer = begun(path, "dflash", 512, n_embd, n_blocks, None)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    keys: dict[str, object] = {
        "dflash.target_layers": list(layers),
        "dflash.block_size": block_size,
        "tokenizer.ggml.mask_token_id": MASK,
        **(metadata or {}),
    }
    for key, value in keys.items():
        if value is not None:
            kind = GGUFValueType.get_type(value)
            kind = GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind
            writer.add_key_value(key, value, kind)
    written = {
        **dflash_tensors(n_embd, len(layers), n_blocks, seed, influence),
        **(tensors or {}),
    }
    for name, values in written.items():
        if values is not None:
            i64 = GGMLQuantizationType.I64 if values.dtype == np.int64 else None
            writer.add_tensor(name, values, raw_dtype=i64)
    return finished(writer, path)
