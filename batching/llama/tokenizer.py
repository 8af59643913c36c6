"""Splits text into tokens, a piece at a time. Part of the ctypes edge.

llama.cpp must not get a long text at once. After each control token it counts its list of fragments
from the start (``tokenizer_st_partition``), so 480 kB of them take minutes. Its regular expressions
recurse for each character of a run without a gap, until the stack ends and the process with it. And
nothing can stop it. So a long text is cut into pieces that overlap, and their tokens are joined
where both pieces agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import llama_cpp.llama_cpp as C

from batching.llama.native import NativeModel, filled
from batching.watched import checkpoint

PIECE = 1 << 13  # bytes
_OVERLAP = 1 << 9  # bytes


class Tokenizer:
    """Tokenizes UTF-8 text with a model's vocabulary."""

    def __init__(self, model: NativeModel, piece: Callable[[int], bytes]) -> None:
        """``piece`` returns the bytes of a token."""
        self._model, self._piece = model, piece

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """The tokens of ``text``. Calls ``checkpoint`` before each piece.

        Where two pieces do not agree, as in a long run of one character, the text is cut: the
        tokens there may be others than those of the whole text, and mean the same text.
        """
        checkpoint()
        end = _boundary(text, PIECE)
        tokens = self._native(text[:end], add_special, parse_special)
        # The tokens from the n-th on are those of the text from ``at`` on.
        n, at = int(add_special and C.llama_vocab_get_add_bos(self._model.vocab)), 0
        while end < len(text):
            checkpoint()
            begin, before = _boundary(text, end - _OVERLAP), end
            end = _boundary(text, begin + PIECE)
            more = self._native(text[begin:end], False, parse_special)
            places = dict(
                zip(self._ends(tokens[n:], text, at), range(n + 1, len(tokens)), strict=False)
            )
            found, middle = [], (begin + before) // 2
            for j, place in enumerate(self._ends(more, text, begin), 1):
                if place >= before:
                    break
                i = places.get(place)
                if i is not None and tokens[i - 1 : i + 1] == more[j - 1 : j + 1]:
                    found.append((abs(place - middle), place, i, j))
            if found:
                _, at, n, j = min(found)
                tokens[n:] = more[j:]
            else:
                n, at = len(tokens), before
                tokens += self._native(text[before:end], False, parse_special)
        return tokens

    def _ends(self, tokens: Iterable[int], text: bytes, at: int) -> Iterator[int]:
        """Where in ``text`` each of the tokens ends, of which the first begins ``at`` a place. They
        end early at one whose bytes are not found.

        Some vocabularies put a space before a text and after control tokens, and some control
        tokens swallow the spaces beside them.
        """
        for token in tokens:
            piece = self._piece(token)
            if not text.startswith(piece, at):
                if piece[:1] == b" " and text.startswith(piece[1:], at):
                    piece = piece[1:]
                else:
                    while text[at : at + 1].isspace():
                        at += 1
                    if not text.startswith(piece, at):
                        return
            at += len(piece)
            yield at

    def _native(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        """What llama.cpp makes of ``text``, without EOS."""
        vocab, how = self._model.vocab, (add_special, parse_special)
        tokens: list[int] = filled(
            lambda n: (C.llama_token * n)(),
            len(text) + 8,
            lambda buffer, n: C.llama_tokenize(vocab, text, len(text), buffer, n, *how),
        )
        if add_special and C.llama_vocab_get_add_eos(vocab):
            return tokens[:-1] if tokens[-1:] == [C.llama_vocab_eos(vocab)] else tokens
        return tokens


def _boundary(text: bytes, at: int) -> int:
    """The last place up to ``at`` that is not inside a character; the end if that comes first."""
    if at >= len(text):
        return len(text)
    while text[at] & 0xC0 == 0x80:
        at -= 1
    return at
