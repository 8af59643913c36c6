"""Checks of heads in llama.cpp's formats (EAGLE-3, DFlash): target, width, draft vocabulary.

llama.cpp detects some mismatches only while decoding, and then aborts the process. So they are
checked here, before anything is loaded.
"""

from __future__ import annotations

import numpy as np

from batching.errors import HeadsError
from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from speculation.heads.file import check_trained_on, model_name

EMBEDDINGS, OUTPUT, DRAFT_TOKENS = "token_embd.weight", "output.weight", "d2t"
CONVERT_AGAIN = "convert it again with convert_hf_to_gguf.py of a recent llama.cpp"
USE_MATCHING = "use the head made for this model"
_I64 = 27  # ggml_type


def check_target(gguf: GGUFFile, model: Model) -> None:
    """Raise HeadsError if a head is split into several files or names another target."""
    n_files = gguf.metadata.get("split.count", 1)
    if n_files > 1:
        raise HeadsError(
            f"{gguf.path.name} is one of {n_files} files; join them with llama.cpp's "
            f"llama-gguf-split --merge"
        )
    trained_on = gguf.metadata.get("heads.target.fingerprint")
    if trained_on is not None:
        check_trained_on(gguf.path, gguf.metadata.get("heads.target.name"), trained_on, model)


def check_width(gguf: GGUFFile, model: Model, width: object) -> None:
    """Raise HeadsError if the model's hidden states are not of the head's ``width``."""
    if width != model.n_embd:
        raise HeadsError(
            f"the head {gguf.path.name} needs hidden states {width} wide, but those of "
            f"{model_name(model)!r} are {model.n_embd} wide; {USE_MATCHING}"
        )


def check_last_layer(gguf: GGUFFile, model: Model, layers: list[int]) -> None:
    """Raise HeadsError if the head reads the output of the model's last layer."""
    if model.n_layer in layers:
        raise HeadsError(
            f"the head {gguf.path.name} reads the inputs of layers {layers}, but "
            f"{model_name(model)!r} has layers 0 to {model.n_layer - 1}, and the output of the "
            f"last one is not available; use a head that reads earlier layers"
        )


def check_draft_vocabulary(gguf: GGUFFile, model: Model) -> None:
    """Raise HeadsError unless the rows of the output matrix stand for distinct tokens of the model.

    ``d2t`` has the token of each row; without it, the rows are the whole vocabulary.
    """
    name = gguf.path.name
    n_rows = gguf.tensors[OUTPUT].shape[0] if OUTPUT in gguf.tensors else model.n_vocab
    if DRAFT_TOKENS not in gguf.tensors:
        if n_rows != model.n_vocab:
            raise HeadsError(
                f"the head {name} has {n_rows} logits and no {DRAFT_TOKENS} to map them to the "
                f"{model.n_vocab} tokens of {model_name(model)!r}; {USE_MATCHING}"
            )
        return
    if gguf.tensors[DRAFT_TOKENS].type != _I64:
        raise HeadsError(
            f"the head {name} has a {DRAFT_TOKENS} of type {gguf.tensors[DRAFT_TOKENS].type}, but "
            f"llama.cpp reads 64-bit integers ({_I64}); {CONVERT_AGAIN}"
        )
    tokens = gguf.raw(DRAFT_TOKENS).reshape(-1).view(np.int64)
    if len(tokens) != n_rows:
        matrix = f"its {OUTPUT}" if OUTPUT in gguf.tensors else f"the model's shared {OUTPUT}"
        raise HeadsError(
            f"the head {name} has a {DRAFT_TOKENS} of {len(tokens)} tokens, but {matrix} has "
            f"{n_rows} rows; use a complete head"
        )
    if tokens.min() < 0 or tokens.max() >= model.n_vocab:
        raise HeadsError(
            f"the head {name} drafts tokens from {tokens.min()} to {tokens.max()}, but "
            f"{model_name(model)!r} has {model.n_vocab}; {USE_MATCHING}"
        )
    if len(np.unique(tokens)) < len(tokens):
        raise HeadsError(
            f"the {DRAFT_TOKENS} of the head {name} has duplicate tokens: it may store differences "
            f"as checkpoints do, but llama.cpp reads token ids; {CONVERT_AGAIN}"
        )
