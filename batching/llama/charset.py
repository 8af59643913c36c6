"""Which characters a vocabulary has no tokens for: llama.cpp ends the process over them.

It does so with SentencePiece vocabularies that lack byte tokens; others drop such characters or
have a token for all of them.
"""

from __future__ import annotations

import re
from typing import Any

import llama_cpp.llama_cpp as C

_SPACE = "\u2581"  # what SentencePiece writes for a space
_BYTES = frozenset(b"<0x%02X>" % byte for byte in range(256))
_FIRST = 1024  # tokens among which byte tokens usually are
_CONTROL = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN  # read on request only


class Spelling:
    """What the tokens of a vocabulary without byte tokens can spell."""

    def __init__(self, vocab: Any, texts: list[bytes]) -> None:
        self._texts = frozenset(texts)
        attributes = [C.llama_vocab_get_attr(vocab, token) for token in range(len(texts))]

        def whole(kinds: int) -> re.Pattern[str]:
            found = [t for t, kind in zip(texts, attributes, strict=True) if t and kind & kinds]
            return re.compile("|".join(re.escape(t.decode("utf-8", "replace")) for t in found))

        # Tokens that are found in a text before it is spelled.
        self._whole = {
            False: whole(C.LLAMA_TOKEN_ATTR_USER_DEFINED),
            True: whole(C.LLAMA_TOKEN_ATTR_USER_DEFINED | _CONTROL),
        }

    def first_unknown(self, text: str, *, parse_special: bool) -> str | None:
        """The first character of ``text`` that has no token, nor its bytes."""
        rest = self._whole[parse_special].sub("", text)
        for character in dict.fromkeys(rest):
            data = character.replace(" ", _SPACE).encode("utf-8")
            if data not in self._texts and any(
                b"<0x%02X>" % byte not in self._texts for byte in data
            ):
                return character
        return None


def spelling(vocab: Any, n_vocab: int) -> Spelling | None:
    """What a ``llama_vocab *`` can spell; None where no character ends the process."""
    if C.llama_vocab_type(vocab) != C.LLAMA_VOCAB_TYPE_SPM:
        return None
    for n in (min(n_vocab, _FIRST), n_vocab):
        texts = [C.llama_vocab_get_text(vocab, token) for token in range(n)]
        if _BYTES.issubset(texts):
            return None
    return Spelling(vocab, texts)
