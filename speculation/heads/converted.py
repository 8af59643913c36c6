"""Files of heads that llama.cpp's converter wrote: what a head must share with its target.

Some of what does not fit is found by llama.cpp while it decodes, where it ends the process. So it
is looked at here, before anything is loaded.
"""

from __future__ import annotations

import numpy as np

from batching.errors import HeadsError
from batching.gguf.reader import GGUFFile, fingerprint
from batching.llama.model import Model
from speculation.heads.file import model_name

EMBEDDINGS, OUTPUT, DRAFTED = "token_embd.weight", "output.weight", "d2t"
ANEW = "convert it anew with the convert_hf_to_gguf.py of a recent llama.cpp"
ANOTHER = "take the head that was made for it"
_I64 = 27  # ggml_type


def check_made_for(gguf: GGUFFile, model: Model) -> None:
    """Refuse a head that is not in one file, or that says it is another model's: HeadsError."""
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


def check_width(gguf: GGUFFile, model: Model, width: object) -> None:
    """Refuse a head for states of another ``width`` than the model's: HeadsError."""
    if width != model.n_embd:
        raise HeadsError(
            f"the head {gguf.path.name} is for states {width} wide, those of "
            f"{model_name(model)!r} are {model.n_embd}; {ANOTHER}"
        )


def check_last_layer(gguf: GGUFFile, model: Model, layers: list[int]) -> None:
    """Refuse a head that reads what the model's last layer gives: HeadsError."""
    if model.n_layer in layers:
        raise HeadsError(
            f"the head {gguf.path.name} reads the inputs of layers {layers}, and "
            f"{model_name(model)!r} has {model.n_layer}, counted from 0: what the last one gives "
            f"cannot be had here; take a head over earlier layers"
        )


def check_drafted(gguf: GGUFFile, model: Model) -> None:
    """Each row of the output matrix must stand for a token: HeadsError where one does not.

    ``d2t`` names the token of each row; without it they are the whole vocabulary.
    """
    name = gguf.path.name
    n_rows = gguf.tensors[OUTPUT].shape[0] if OUTPUT in gguf.tensors else model.n_vocab
    if DRAFTED not in gguf.tensors:
        if n_rows != model.n_vocab:
            raise HeadsError(
                f"the head {name} gives {n_rows} logits and has no {DRAFTED} to say for which of "
                f"the {model.n_vocab} tokens of {model_name(model)!r}; {ANOTHER}"
            )
        return
    if gguf.tensors[DRAFTED].type != _I64:
        raise HeadsError(
            f"the head {name} has a {DRAFTED} of type {gguf.tensors[DRAFTED].type}, and llama.cpp "
            f"reads 64-bit integers ({_I64}); {ANEW}"
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
            f"{model_name(model)!r} has {model.n_vocab}; {ANOTHER}"
        )
    if len(np.unique(tokens)) < len(tokens):
        raise HeadsError(
            f"the {DRAFTED} of the head {name} names tokens twice: it may hold differences, as "
            f"checkpoints do, where llama.cpp reads the tokens themselves; {ANEW}"
        )
