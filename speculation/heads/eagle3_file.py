"""Whether a GGUF of the architecture ``eagle3`` is a head that llama.cpp can run for a model.

llama.cpp's converter writes more than llama.cpp runs, and some of what does not fit is found while
decoding, where it ends the process. So everything is looked at here, before anything is loaded.
"""

from __future__ import annotations

from batching.errors import HeadsError
from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from speculation.heads.converted import (
    ANEW,
    ANOTHER,
    DRAFTED,
    EMBEDDINGS,
    OUTPUT,
    check_drafted,
    check_last_layer,
    check_made_for,
    check_width,
)
from speculation.heads.file import model_name

ARCHITECTURE = "eagle3"
NORM_BEFORE_FC = "enc.output_norm.weight"
TENSORS = {"fc", "output_norm", "rope_freqs", "token_embd", "output"}
LAYER_TENSORS = {
    *("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
}


def check_eagle3(gguf: GGUFFile, model: Model) -> tuple[int, ...]:
    """The layers of ``model`` that the head reads, in its order.

    Raises HeadsError where head and model do not fit each other, or llama.cpp cannot run the head.
    """
    check_made_for(gguf, model)
    check_width(gguf, model, _value(gguf, "target_hidden_size"))
    _check_graph(gguf)
    _check_sharing(gguf, model)
    check_drafted(gguf, model)
    return _layers(gguf, model)


def _layers(gguf: GGUFFile, model: Model) -> tuple[int, ...]:
    name = gguf.path.name
    layers = _value(gguf, "target_layers")
    if not isinstance(layers, list) or len(layers) != 3:
        raise HeadsError(
            f"the head {name} names {layers!r} as the layers it reads, and llama.cpp runs heads "
            f"over three; take another, or if it was converted by an old llama.cpp, {ANEW}"
        )
    check_last_layer(gguf, model, layers)
    return tuple(layers)


def _check_graph(gguf: GGUFFile) -> None:
    """The head must be all that llama.cpp computes of it: what it passes over would be missing."""
    name = gguf.path.name
    n_blocks = _value(gguf, "block_count")
    if n_blocks != 1:
        raise HeadsError(
            f"the head {name} has {n_blocks} layers, and llama.cpp runs heads of one; take another"
        )
    known = {DRAFTED, *(f"{of}.weight" for of in TENSORS)}
    known |= {f"blk.0.{of}.weight" for of in LAYER_TENSORS}
    if _value(gguf, "norm_before_fc"):
        known.add(NORM_BEFORE_FC)
    unknown = sorted(set(gguf.tensors) - known)
    if unknown:
        raise HeadsError(
            f"the head {name} has {', '.join(unknown)}, which llama.cpp does not run in a head for "
            f"EAGLE-3; take a head without"
        )


def _check_sharing(gguf: GGUFFile, model: Model) -> None:
    """What the head lacks of embeddings and output matrix is the model's, and must fit."""
    name = gguf.path.name
    own_width = _value(gguf, "embedding_length")
    for shared in (EMBEDDINGS, OUTPUT):
        if shared not in gguf.tensors and own_width != model.n_embd:
            raise HeadsError(
                f"the head {name} has no {shared} and is {own_width} wide, {model_name(model)!r} "
                f"{model.n_embd}: it cannot share the model's; {ANOTHER}"
            )
    if EMBEDDINGS in gguf.tensors and gguf.tensors[EMBEDDINGS].shape[0] < model.n_vocab:
        raise HeadsError(
            f"the head {name} has embeddings of {gguf.tensors[EMBEDDINGS].shape[0]} tokens, "
            f"{model_name(model)!r} has {model.n_vocab}; {ANOTHER}"
        )


def _value(gguf: GGUFFile, key: str) -> object:
    return gguf.metadata.get(f"{ARCHITECTURE}.{key}")
