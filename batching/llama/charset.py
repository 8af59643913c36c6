"""Finds characters a vocabulary cannot encode, on which llama.cpp aborts.

Only SentencePiece vocabularies without byte tokens are affected; others drop such characters or
map them to an unknown token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import llama_cpp.llama_cpp as C

from batching.llama.native import NativeModel

_SPACE = "\u2581"  # SentencePiece's symbol for a space
_BYTES = frozenset(b"<0x%02X>" % byte for byte in range(256))
_FIRST = 1024  # byte tokens are usually among these
CONTROL = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN  # parsed only with parse_special


def token_pattern(model: NativeModel, n_vocab: int, attributes: int) -> re.Pattern[str]:
    """Finds the texts of tokens of a model that have one of the ``attributes``."""
    vocab = model.vocab
    tokens = [t for t in range(n_vocab) if C.llama_vocab_get_attr(vocab, t) & attributes]
    texts = [C.llama_vocab_get_text(vocab, t).decode("utf-8", "replace") for t in tokens]
    return re.compile(any_of([text for text in texts if text]))


def any_of(texts: Sequence[str]) -> str:
    """A pattern for any of the texts, the longest first.

    It follows a tree of their beginnings. Alternatives in turn would try thousands of tokens at
    each place of a text, and nobody else could run meanwhile.

    >>> any_of(["<|end|>", "<|im|>", "<|im|><"])
    '<\\\\|(?:end\\\\|>|im\\\\|>(?:<)?)'
    """
    if not texts:
        return "(?!)"
    first, last = min(texts), max(texts)  # what these two begin with, all do
    n = next((i for i, char in enumerate(first) if last[i : i + 1] != char), len(first))
    start = first[:n]
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[len(start) : len(start) + 1], []).append(text[len(start) :])
    can_end = rests.pop("", None) is not None
    patterns = [any_of(each) for each in rests.values()]
    more = f"(?:{'|'.join(patterns)})" if patterns and (can_end or len(patterns) > 1) else ""
    return re.escape(start) + more + ("?" if more and can_end else "")


class Charset:
    """The characters a vocabulary without byte tokens can encode."""

    def __init__(self, model: NativeModel, texts: list[bytes]) -> None:
        self._texts = frozenset(texts)
        # Tokens matched as a whole, before the rest of the text is encoded.
        self._whole = {
            False: token_pattern(model, len(texts), C.LLAMA_TOKEN_ATTR_USER_DEFINED),
            True: token_pattern(model, len(texts), C.LLAMA_TOKEN_ATTR_USER_DEFINED | CONTROL),
        }

    def first_unknown(self, text: str, *, parse_special: bool) -> str | None:
        """The first character of ``text`` without a token for it or its bytes."""
        rest = self._whole[parse_special].sub("", text)
        for character in dict.fromkeys(rest):
            data = character.replace(" ", _SPACE).encode("utf-8")
            if data not in self._texts and any(
                b"<0x%02X>" % byte not in self._texts for byte in data
            ):
                return character
        return None


def limited_charset(model: NativeModel, n_vocab: int) -> Charset | None:
    """The characters a model can read; None if no text makes llama.cpp abort."""
    vocab = model.vocab
    if C.llama_vocab_type(vocab) != C.LLAMA_VOCAB_TYPE_SPM:
        return None
    for n in (min(n_vocab, _FIRST), n_vocab):
        texts = [C.llama_vocab_get_text(vocab, token) for token in range(n)]
        if _BYTES.issubset(texts):
            return None
    return Charset(model, texts)
