"""A random head of the architecture ``eagle3``, in the layout of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batching.tree import Floats
from tests.support.head_checks import random_weights
from tests.support.tiny_gguf import finish_head, started_writer

N_HEAD, N_HEAD_KV, N_FF = 4, 2, 64


def eagle3_tensors(
    n_embd: int = 32, n_target: int = 32, seed: int = 0, n_drafted: int = 0
) -> dict[str, Floats]:
    n_kv = n_embd // N_HEAD * N_HEAD_KV
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (n_embd, 3 * n_target),
        "blk.0.attn_norm.weight": (n_embd,),
        "blk.0.attn_norm_2.weight": (n_embd,),
        "blk.0.attn_q.weight": (n_embd, 2 * n_embd),
        "blk.0.attn_k.weight": (n_kv, 2 * n_embd),
        "blk.0.attn_v.weight": (n_kv, 2 * n_embd),
        "blk.0.attn_output.weight": (n_embd, n_embd),
        "blk.0.ffn_norm.weight": (n_embd,),
        "blk.0.ffn_gate.weight": (N_FF, n_embd),
        "blk.0.ffn_up.weight": (N_FF, n_embd),
        "blk.0.ffn_down.weight": (n_embd, N_FF),
        "output_norm.weight": (n_embd,),
    }
    if n_drafted:
        shapes["output.weight"] = (n_drafted, n_embd)
    return random_weights(shapes, seed)


def write_tiny_eagle3(
    path: Path,
    *,
    layers: Sequence[int] = (1, 2, 3),
    n_embd: int = 32,
    n_target: int = 32,
    seed: int = 0,
    tokens: Sequence[int] | None = None,
    tensors: Mapping[str, npt.NDArray[np.generic] | None] | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Path:
    """Write the head; ``tokens`` are those that it drafts, with its own output matrix.

    ``tensors`` and ``metadata``, by their names in the file, are added or replace existing ones;
    None leaves a tensor out.
    """
    writer = started_writer(path, "eagle3", n_embd, 1, (N_FF, N_HEAD, N_HEAD_KV))
    writer.add_rope_dimension_count(n_embd // N_HEAD)
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", n_target)
    made = {
        **eagle3_tensors(n_embd, n_target, seed, 0 if tokens is None else len(tokens)),
        "d2t": None if tokens is None else np.array(tokens, np.int64),
    }
    return finish_head(writer, path, metadata or {}, {**made, **(tensors or {})})
