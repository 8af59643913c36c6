"""Whether a model can draft for another: their tokens must mean the same."""

from __future__ import annotations

import llama_cpp.llama_cpp as C

from batching.errors import VocabularyMismatch
from batching.model import Model

MAX_SIZE_DIFFERENCE = 128  # padding that model makers add
FIRST_CHECKED = 5  # what stands before are special tokens, whose texts differ between conversions
_SPECIAL = ("bos", "eos")


def check_same_vocabulary(target: Model, draft: Model) -> None:
    """Refuse a draft model whose tokens are not the target's, by llama.cpp's own rules.

    Same type, same special tokens, sizes within 128, and the same text from id 5 on (llama.cpp,
    common/speculative.cpp). Raises VocabularyMismatch naming the first difference.
    """
    types = [C.llama_vocab_type(model.vocab) for model in (target, draft)]
    if types[0] != types[1]:
        _refuse(target, draft, f"its tokenizer is of type {types[1]}, the target's of {types[0]}")
    for name in _SPECIAL:
        ids = [model.special_token(name) for model in (target, draft)]
        if ids[0] != ids[1]:
            _refuse(target, draft, f"its {name} token is {ids[1]}, the target's is {ids[0]}")
    sizes = target.n_vocab, draft.n_vocab
    if abs(sizes[0] - sizes[1]) > MAX_SIZE_DIFFERENCE:
        _refuse(target, draft, f"it has {sizes[1]} tokens, the target {sizes[0]}")
    for token in range(FIRST_CHECKED, min(sizes)):
        texts = [C.llama_vocab_get_text(model.vocab, token) for model in (target, draft)]
        if texts[0] != texts[1]:
            _refuse(
                target,
                draft,
                f"its token {token} is {texts[1].decode('utf-8', 'replace')!r}, "
                f"the target's is {texts[0].decode('utf-8', 'replace')!r}",
            )


def _refuse(target: Model, draft: Model, reason: str) -> None:
    raise VocabularyMismatch(
        f"{draft.path.name} cannot draft for {target.path.name}: {reason}; "
        f"take a smaller model of the same family"
    )
