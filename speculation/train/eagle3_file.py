"""Writes an EAGLE-3 head in the GGUF format of llama.cpp's converter; its programs can load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.gguf.writer import FILE_TYPES, QUANTIZATION_VERSION, Value, write_gguf
from batching.tree import Floats
from speculation.heads.eagle import EagleShape
from speculation.heads.eagle3 import ARCHITECTURE
from speculation.heads.file import HeadsInfo, copied_tokenizer, new_tensor


def write_eagle3(
    path: Path,
    info: HeadsInfo,
    shape: EagleShape,
    tensors: Mapping[str, Floats],
    layers: Sequence[int],
    target: Path,
    tokens: npt.NDArray[np.int32] | None = None,
    output: Floats | None = None,
    kind: str = "q8_0",
) -> None:
    """Write a head that reads auxiliary hidden states, the inputs of ``layers``.

    Copies the tokenizer of the GGUF ``target``. A head that drafts only ``tokens`` has its own
    ``output`` matrix, (n_drafted, n_embd); otherwise it uses the target's. It always uses the
    target's embeddings. The file is written to a temporary name and renamed. Raises DiskFull.
    """
    metadata: dict[str, Value] = {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": f"EAGLE-3 head for {info.target_name}",
        "heads.target.name": info.target_name,
        "heads.target.fingerprint": info.fingerprint,
        "eagle3.context_length": 1 << 20,  # no effect: positions are relative
        "eagle3.embedding_length": shape.n_embd,
        "eagle3.block_count": 1,
        "eagle3.feed_forward_length": shape.n_ff,
        "eagle3.attention.head_count": shape.n_head,
        "eagle3.attention.head_count_kv": shape.n_head_kv,
        "eagle3.attention.layer_norm_rms_epsilon": float(shape.norm_eps),
        "eagle3.rope.dimension_count": shape.n_embd // shape.n_head,
        "eagle3.rope.freq_base": float(shape.rope_base),
        "eagle3.vocab_size": info.n_vocab,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": QUANTIZATION_VERSION,
        "eagle3.target_layers": list(layers),
        "eagle3.target_hidden_size": info.n_embd,
        "eagle3.norm_before_residual": False,  # variants that this project does not train
        "eagle3.norm_before_fc": False,
    }
    metadata |= copied_tokenizer(target)
    arrays: dict[str, npt.NDArray[Any]] = dict(tensors)
    if output is not None:
        arrays["output.weight"] = output
    if tokens is not None:
        arrays["d2t"] = tokens.astype(np.int64)
    write_gguf(path, metadata, {name: new_tensor(of, kind) for name, of in arrays.items()})
