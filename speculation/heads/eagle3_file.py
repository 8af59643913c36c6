"""Whether a GGUF of the architecture ``eagle3`` is a head that llama.cpp can run for a model.

llama.cpp's converter writes more than llama.cpp runs, and some of what does not fit is found while
decoding, where it ends the process. So everything is looked at here, before anything is loaded.
"""

from __future__ import annotations

import numpy as np

from batching.errors import HeadsError
from batching.gguf_file import GGUFFile, fingerprint
from batching.model import Model
from speculation.heads.file import model_name

ARCHITECTURE = "eagle3"
EMBEDDINGS, OUTPUT, DRAFTED = "token_embd.weight", "output.weight", "d2t"
NORM_BEFORE_FC = "enc.output_norm.weight"
TENSORS = {"fc", "output_norm", "rope_freqs", "token_embd", "output"}
LAYER_TENSORS = {
    *("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
}
_I64 = 27  # ggml_type
_ANEW = "convert it anew with the convert_hf_to_gguf.py of a recent llama.cpp"
_ANOTHER = "take the head that was made for it"


def check_eagle3(gguf: GGUFFile, model: Model) -> tuple[int, ...]:
    """The layers of ``model`` that the head reads, in its order.

    Raises HeadsError where head and model do not fit each other, or llama.cpp cannot run the head.
    """
    _check_target(gguf, model)
    _check_graph(gguf)
    _check_sharing(gguf, model)
    _check_drafted(gguf, model)
    return _layers(gguf, model)


def _check_target(gguf: GGUFFile, model: Model) -> None:
    name = gguf.path.name
    n_files = gguf.metadata.get("split.count", 1)
    if n_files > 1:
        raise HeadsError(
            f"{name} is one of {n_files} files; join them with llama.cpp's llama-gguf-split --merge"
        )
    made_for = gguf.metadata.get("heads.target.fingerprint")
    if made_for is not None and made_for != fingerprint(model.path):
        raise HeadsError(
            f"the head {name} was trained on {gguf.metadata.get('heads.target.name')!r} (file "
            f"{made_for}), and the model is {model_name(model)!r} ({model.path.name}, file "
            f"{fingerprint(model.path)}); load that model, or train a head for this one"
        )
    width = _value(gguf, "target_hidden_size")
    if width != model.n_embd:
        raise HeadsError(
            f"the head {name} is for states {width} wide, those of {model_name(model)!r} are "
            f"{model.n_embd}; {_ANOTHER}"
        )


def _layers(gguf: GGUFFile, model: Model) -> tuple[int, ...]:
    name = gguf.path.name
    layers = _value(gguf, "target_layers")
    if not isinstance(layers, list) or len(layers) != 3:
        raise HeadsError(
            f"the head {name} names {layers!r} as the layers it reads, and llama.cpp runs heads "
            f"over three; take another, or if it was converted by an old llama.cpp, {_ANEW}"
        )
    if model.n_layer in layers:
        raise HeadsError(
            f"the head {name} reads the inputs of layers {layers}, and {model_name(model)!r} has "
            f"{model.n_layer}, counted from 0: what the last one gives cannot be had here; take a "
            f"head over earlier layers"
        )
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
                f"{model.n_embd}: it cannot share the model's; {_ANOTHER}"
            )
    if EMBEDDINGS in gguf.tensors and gguf.tensors[EMBEDDINGS].shape[0] < model.n_vocab:
        raise HeadsError(
            f"the head {name} has embeddings of {gguf.tensors[EMBEDDINGS].shape[0]} tokens, "
            f"{model_name(model)!r} has {model.n_vocab}; {_ANOTHER}"
        )


def _check_drafted(gguf: GGUFFile, model: Model) -> None:
    """Each row of the output matrix must stand for a token.

    ``d2t`` names the token of each row; without it they are the whole vocabulary.
    """
    name = gguf.path.name
    n_rows = gguf.tensors[OUTPUT].shape[0] if OUTPUT in gguf.tensors else model.n_vocab
    if DRAFTED not in gguf.tensors:
        if n_rows != model.n_vocab:
            raise HeadsError(
                f"the head {name} gives {n_rows} logits and has no {DRAFTED} to say for which of "
                f"the {model.n_vocab} tokens of {model_name(model)!r}; {_ANOTHER}"
            )
        return
    if gguf.tensors[DRAFTED].type != _I64:
        raise HeadsError(
            f"the head {name} has a {DRAFTED} of type {gguf.tensors[DRAFTED].type}, and llama.cpp "
            f"reads 64-bit integers ({_I64}); {_ANEW}"
        )
    tokens = gguf.raw(DRAFTED).reshape(-1).view(np.int64)
    if len(tokens) != n_rows:
        whose = "its" if OUTPUT in gguf.tensors else "having none of its own, the model's"
        raise HeadsError(
            f"the head {name} has a {DRAFTED} of {len(tokens)} tokens, and {whose} {OUTPUT} has "
            f"{n_rows} rows; take a head that is whole"
        )
    if tokens.min() < 0 or tokens.max() >= model.n_vocab:
        raise HeadsError(
            f"the head {name} drafts tokens from {tokens.min()} to {tokens.max()}, and "
            f"{model_name(model)!r} has {model.n_vocab}; {_ANOTHER}"
        )
    if len(np.unique(tokens)) < len(tokens):
        raise HeadsError(
            f"the {DRAFTED} of the head {name} names tokens twice: it may hold differences, as "
            f"checkpoints do, where llama.cpp reads the tokens themselves; {_ANEW}"
        )


def _value(gguf: GGUFFile, key: str) -> object:
    return gguf.metadata.get(f"{ARCHITECTURE}.{key}")
