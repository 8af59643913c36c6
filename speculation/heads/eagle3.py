"""EAGLE-3's head, from a GGUF of llama.cpp's architecture ``eagle3``.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv 2503.01840. Published heads load as converted by llama.cpp. An encoder
reduces the inputs l, m and h of three of the target's layers to one state g. Each row combines a
token with the state before it, from the encoder or predicted by the head:

    g_t = F [l_t; m_t; h_t]        g^_t = layer([norm(e(token_t)); norm(g_(t-1))]) + g_(t-1)

llama.cpp runs the encoder, the layer and the output. Its converter accepts heads that it does not
run correctly: it ignores unknown tensors, and aborts the process on some mismatches. So all are
checked before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.gguf.reader import GGUFFile
from batching.gguf.writer import FILE_TYPES, QUANTIZATION_VERSION, Value, write_gguf
from batching.llama.model import Model
from batching.slots import encoding
from batching.together import Coroutine
from batching.tree import Floats
from speculation.heads.converted import (
    CONVERT_AGAIN,
    DRAFT_TOKENS,
    EMBEDDINGS,
    OUTPUT,
    AuxStatesHead,
    ConvertedHead,
)
from speculation.heads.eagle import EagleShape
from speculation.heads.file import HeadsInfo, copied_tokenizer, llama_format, new_tensor

ARCHITECTURE = "eagle3"
NORM_BEFORE_FC = "enc.output_norm.weight"
_LAYER = "attn_norm attn_norm_2 attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down"
KNOWN = {
    *(f"{name}.weight" for name in "fc output_norm rope_freqs token_embd output".split()),
    *(f"blk.0.{name}.weight" for name in _LAYER.split()),
    *(NORM_BEFORE_FC, DRAFT_TOKENS),
}


def load_eagle3(gguf: GGUFFile, model: Model) -> Eagle3Head:
    """Load the head for ``model``; ``start`` it before drafting.

    Raises ModelError if the head does not fit the model or llama.cpp cannot run it,
    UnsupportedModel, UnsupportedModel if llama.cpp does not expose the model's layer inputs.
    """
    head = ConvertedHead(gguf, model)
    head.check_width("target_hidden_size")
    # llama.cpp would leave out other layers and tensors.
    n_blocks = head.value("block_count")
    fault = f"has {n_blocks} layers, but llama.cpp runs only heads with one"
    head.refuse(n_blocks != 1, fault, "use another")
    unknown = set(head.tensors) - KNOWN
    if not head.value("norm_before_fc"):
        unknown |= set(head.tensors) & {NORM_BEFORE_FC}
    fault = f"has {', '.join(sorted(unknown))}, which llama.cpp ignores in EAGLE-3 heads"
    head.refuse(bool(unknown), fault, "use a head without them")
    own_width = head.value("embedding_length")
    for shared in (EMBEDDINGS, OUTPUT):
        head.refuse(
            shared not in head.tensors and own_width != model.n_embd,
            f"is {own_width} wide and has no {shared}; it cannot share that of {head.target}, "
            f"which is {model.n_embd} wide",
        )
    n_embeddings = head.tensors[EMBEDDINGS].shape[0] if EMBEDDINGS in head.tensors else None
    head.refuse(
        n_embeddings is not None and n_embeddings < model.n_vocab,
        f"has embeddings of {n_embeddings} tokens, but {head.target} has {model.n_vocab}",
    )
    head.check_draft_vocabulary()
    layers = head.value("target_layers")
    head.refuse(
        not isinstance(layers, list) or len(layers) != 3,
        f"lists {layers!r} as the layers it reads, but llama.cpp runs only heads that read three",
        f"use another, or if an old llama.cpp converted this one, {CONVERT_AGAIN}",
    )
    head.check_last_layer(layers)
    model.check_layer_inputs(layers)
    return Eagle3Head(gguf.path, model, tuple(layers))


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
    target's embeddings. The file is written to a temporary name and renamed. Raises
    SpeculationError if the disk is full.
    """
    metadata: dict[str, Value] = {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": f"EAGLE-3 head for {info.target_name}",
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": QUANTIZATION_VERSION,
        "heads.target.name": info.target_name,
        "heads.target.fingerprint": info.fingerprint,
        **shape.metadata(ARCHITECTURE, info.n_vocab),
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


KIND = llama_format("eagle-3", ARCHITECTURE, load_eagle3)


class Eagle3Head(AuxStatesHead):
    """EAGLE-3's head over the inputs of three of the target's layers."""

    def encode(self, states: Floats) -> Coroutine[Floats]:
        return encoding(self.context, states)
