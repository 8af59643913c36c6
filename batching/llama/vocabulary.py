"""Whether a model can draft for another: their tokens must mean the same."""

from __future__ import annotations

import llama_cpp.llama_cpp as C

from batching.errors import UnsupportedModel, VocabularyMismatch
from batching.gguf.unsupported import TEXT_MODEL
from batching.llama.model import Model

MAX_SIZE_DIFFERENCE = 128  # padding that model makers add
FIRST_CHECKED = 5  # what stands before are special tokens, whose texts differ between conversions


def check_vocabulary(model: Model) -> None:
    """Refuse a model without one: llama.cpp ends the process when asked about its tokens."""
    if C.llama_vocab_type(model.vocab) == C.LLAMA_VOCAB_TYPE_NONE:
        raise UnsupportedModel(
            f"{model.path} ({model.description}) has no vocabulary, and so neither reads nor "
            f"writes text; {TEXT_MODEL}"
        )


def check_same_vocabulary(target: Model, draft: Model, *, special: bool = True) -> None:
    """Refuse a draft model whose tokens are not the target's, by llama.cpp's own rules.

    Same type, the same tokens added to a text's beginning and end, sizes within 128, and the same
    text from id 5 on (llama.cpp, common/speculative.cpp). A head that never begins a text has no
    use for the second: ``special=False``. Raises VocabularyMismatch naming the first difference.
    """
    models = target, draft
    types = [C.llama_vocab_type(model.vocab) for model in models]
    if types[0] != types[1]:
        _refuse(target, draft, f"its tokenizer is of type {types[1]}, the target's of {types[0]}")
    for name in ("bos", "eos") if special else ():
        # Where none is added, files without one often name another's: Qwen's bos reads as 11.
        ids = [model.special_token(name) if _adds(model, name) else None for model in models]
        if ids[0] != ids[1]:
            ours, theirs = ("none" if found is None else str(found) for found in ids)
            _refuse(target, draft, f"the {name} it adds to a text is {theirs}, the target's {ours}")
    sizes = target.n_vocab, draft.n_vocab
    if abs(sizes[0] - sizes[1]) > MAX_SIZE_DIFFERENCE:
        _refuse(target, draft, f"it has {sizes[1]} tokens, the target {sizes[0]}")
    for token in range(FIRST_CHECKED, min(sizes)):
        texts = [C.llama_vocab_get_text(model.vocab, token) for model in models]
        if texts[0] != texts[1]:
            _refuse(
                target,
                draft,
                f"its token {token} is {texts[1].decode('utf-8', 'replace')!r}, "
                f"the target's is {texts[0].decode('utf-8', 'replace')!r}",
            )


def _adds(model: Model, name: str) -> bool:
    return bool(getattr(C, f"llama_vocab_get_add_{name}")(model.vocab))


def _refuse(target: Model, draft: Model, reason: str) -> None:
    raise VocabularyMismatch(
        f"{draft.path.name} cannot draft for {target.path.name}: {reason}; "
        f"take a smaller model of the same family"
    )
