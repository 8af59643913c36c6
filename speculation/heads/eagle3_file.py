"""Checks whether llama.cpp can run an EAGLE-3 head (architecture ``eagle3``) for a model, and
writes heads in this format.

llama.cpp's converter accepts heads that llama.cpp does not run correctly: it ignores unknown
tensors, and aborts the process on some mismatches. So all are checked before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.errors import HeadsError
from batching.gguf.reader import GGUFFile
from batching.gguf.writer import FILE_TYPES, QUANTIZATION_VERSION, Value, write_gguf
from batching.llama.model import Model
from batching.tree import Floats
from speculation.heads.converted import (
    CONVERT_AGAIN,
    DRAFT_TOKENS,
    EMBEDDINGS,
    OUTPUT,
    USE_MATCHING,
    check_draft_vocabulary,
    check_last_layer,
    check_target,
    check_width,
)
from speculation.heads.eagle import EagleShape
from speculation.heads.file import HeadsInfo, copied_tokenizer, model_name, new_tensor

ARCHITECTURE = "eagle3"
NORM_BEFORE_FC = "enc.output_norm.weight"
TENSORS = {"fc", "output_norm", "rope_freqs", "token_embd", "output"}
LAYER_TENSORS = {
    *("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
}


def check_eagle3(gguf: GGUFFile, model: Model) -> tuple[int, ...]:
    """Check a head; return the layers of ``model`` whose inputs it reads, in its order.

    Raises HeadsError if the head does not fit the model or llama.cpp cannot run it.
    """
    check_target(gguf, model)
    check_width(gguf, model, _value(gguf, "target_hidden_size"))
    _check_graph(gguf)
    _check_sharing(gguf, model)
    check_draft_vocabulary(gguf, model)
    return _layers(gguf, model)


def _layers(gguf: GGUFFile, model: Model) -> tuple[int, ...]:
    name = gguf.path.name
    layers = _value(gguf, "target_layers")
    if not isinstance(layers, list) or len(layers) != 3:
        raise HeadsError(
            f"the head {name} lists {layers!r} as the layers it reads, but llama.cpp runs only "
            f"heads that read three; use another, or if an old llama.cpp converted this one, "
            f"{CONVERT_AGAIN}"
        )
    check_last_layer(gguf, model, layers)
    return tuple(layers)


def _check_graph(gguf: GGUFFile) -> None:
    """Raise HeadsError if llama.cpp would leave out a part of the head."""
    name = gguf.path.name
    n_blocks = _value(gguf, "block_count")
    if n_blocks != 1:
        raise HeadsError(
            f"the head {name} has {n_blocks} layers, but llama.cpp runs only heads with one; use "
            f"another"
        )
    known = {DRAFT_TOKENS, *(f"{tensor}.weight" for tensor in TENSORS)}
    known |= {f"blk.0.{tensor}.weight" for tensor in LAYER_TENSORS}
    if _value(gguf, "norm_before_fc"):
        known.add(NORM_BEFORE_FC)
    unknown = sorted(set(gguf.tensors) - known)
    if unknown:
        raise HeadsError(
            f"the head {name} has {', '.join(unknown)}, which llama.cpp ignores in EAGLE-3 heads; "
            f"use a head without them"
        )


def _check_sharing(gguf: GGUFFile, model: Model) -> None:
    """Raise HeadsError if the embeddings or output matrix, own or shared, do not fit."""
    name = gguf.path.name
    own_width = _value(gguf, "embedding_length")
    for shared in (EMBEDDINGS, OUTPUT):
        if shared not in gguf.tensors and own_width != model.n_embd:
            raise HeadsError(
                f"the head {name} is {own_width} wide and has no {shared}; it cannot share that of "
                f"{model_name(model)!r}, which is {model.n_embd} wide; {USE_MATCHING}"
            )
    if EMBEDDINGS in gguf.tensors and gguf.tensors[EMBEDDINGS].shape[0] < model.n_vocab:
        raise HeadsError(
            f"the head {name} has embeddings of {gguf.tensors[EMBEDDINGS].shape[0]} tokens, but "
            f"{model_name(model)!r} has {model.n_vocab}; {USE_MATCHING}"
        )


def _value(gguf: GGUFFile, key: str) -> object:
    return gguf.metadata.get(f"{ARCHITECTURE}.{key}")


def write_eagle3(
    path: Path,
    info: HeadsInfo,
    shape: EagleShape,
    tensors: Mapping[str, Floats],
    layers: Sequence[int],
    target: GGUFFile,
    tokens: npt.NDArray[np.int32] | None = None,
    kind: str = "q8_0",
) -> None:
    """Write a head that reads auxiliary hidden states, the inputs of ``layers``, as llama.cpp's
    converter does; its programs can load it.

    Copies the tokenizer of ``target``. A head that drafts only ``tokens`` has ``output.weight``,
    (n_drafted, n_embd), among its tensors; otherwise it uses the target's. It always uses the
    target's embeddings. The file is written to a temporary name and renamed. Raises DiskFull.
    """
    metadata: dict[str, Value] = {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": f"EAGLE-3 head for {info.target_name}",
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": QUANTIZATION_VERSION,
        "heads.target.name": info.target_name,
        "heads.target.fingerprint": info.fingerprint,
        **shape.metadata(ARCHITECTURE, 1, info.n_vocab),
        "eagle3.target_layers": list(layers),
        "eagle3.target_hidden_size": info.n_embd,
        "eagle3.norm_before_residual": False,  # variants that this project does not train
        "eagle3.norm_before_fc": False,
        **copied_tokenizer(target),
    }
    arrays: dict[str, npt.NDArray[Any]] = dict(tensors)
    if tokens is not None:
        arrays[DRAFT_TOKENS] = tokens.astype(np.int64)
    write_gguf(path, metadata, {name: new_tensor(of, kind) for name, of in arrays.items()})
