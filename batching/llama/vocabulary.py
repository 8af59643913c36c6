"""Checks that a draft model's vocabulary matches the target's."""

from __future__ import annotations

import llama_cpp.llama_cpp as C

from batching.errors import UnsupportedModel
from batching.gguf.unsupported import TEXT_MODEL
from batching.llama.model import Model

MAX_SIZE_DIFFERENCE = 128  # vocabularies are padded differently
FIRST_CHECKED = 5  # lower ids are special tokens, whose texts differ between conversions
_ADDS = {"bos": C.llama_vocab_get_add_bos, "eos": C.llama_vocab_get_add_eos}


def check_vocabulary(model: Model) -> None:
    """Reject a model without a vocabulary: llama.cpp aborts when asked for its tokens."""
    if C.llama_vocab_type(model.vocab) == C.LLAMA_VOCAB_TYPE_NONE:
        raise UnsupportedModel(
            f"{model.path} ({model.description}) has no vocabulary, so it cannot read or write "
            f"text; {TEXT_MODEL}"
        )


def check_same_vocabulary(target: Model, draft: Model, *, special: bool = True) -> None:
    """Reject a draft model whose tokens differ from the target's, by llama.cpp's rules.

    Same tokenizer type, same BOS and EOS if added, sizes within 128, and the same token texts from
    id 5 (llama.cpp, common/speculative.cpp). ``special=False`` skips BOS and EOS, for heads, which
    never start a text. Raises UnsupportedModel naming the first difference.
    """
    models = target, draft
    types = [C.llama_vocab_type(model.vocab) for model in models]
    if types[0] != types[1]:
        _reject(target, draft, f"its tokenizer has type {types[1]}, the target's {types[0]}")
    for name in _ADDS if special else ():
        # Compare only tokens that are added: otherwise the id may be arbitrary (Qwen's bos is 11).
        adds = _ADDS[name]
        ids = [model.special_token(name) if adds(model.vocab) else None for model in models]
        if ids[0] != ids[1]:
            ours, theirs = ("none" if token is None else str(token) for token in ids)
            _reject(target, draft, f"the {name} it adds to a text is {theirs}, the target's {ours}")
    sizes = target.n_vocab, draft.n_vocab
    if abs(sizes[0] - sizes[1]) > MAX_SIZE_DIFFERENCE:
        _reject(target, draft, f"it has {sizes[1]} tokens, the target {sizes[0]}")
    for token in range(FIRST_CHECKED, min(sizes)):
        texts = [C.llama_vocab_get_text(model.vocab, token) for model in models]
        if texts[0] != texts[1]:
            _reject(
                target,
                draft,
                f"its token {token} is {texts[1].decode('utf-8', 'replace')!r}, "
                f"the target's is {texts[0].decode('utf-8', 'replace')!r}",
            )


def _reject(target: Model, draft: Model, reason: str) -> None:
    raise UnsupportedModel(
        f"{draft.path.name} cannot draft for {target.path.name}: {reason}; "
        f"use a smaller model of the same family"
    )
