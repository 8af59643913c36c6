"""Shelf: texts copied out of the cache, for requests that go on with them.

A text that nobody writes costs time in the cache: attention passes over its cells. SmolLM2-135M
took 28% longer for a token beside 6,000 idle cells on two cores, and three times as long without
flash attention. Copying 1,000 tokens out and in takes a few milliseconds, reading them again
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batching.cache import common_prefix, n_kept

MAX_BYTES = 2**29
_LEAST = 32  # tokens; fewer are read as quickly


@dataclass(eq=False)
class Shelved:
    """A text's tokens, and its part of the cache as an array of bytes.

    saved  states of a target that cannot rewind, as in ``SequenceCache``; None if it can
    """

    tokens: tuple[int, ...]
    state: Any
    saved: list[tuple[int, Any]] | None = None

    @property
    def n_bytes(self) -> int:
        return len(self.state) + sum([len(state) for _, state in self.saved or ()])


class Shelf:
    """Keeps the texts used last, up to a number of bytes."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: list[Shelved] = []  # least recently used first

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether a text is worth a copy: not if it is short, or here already."""
        if len(tokens) < _LEAST:
            return False
        return all(common_prefix(text.tokens, tokens) < len(tokens) for text in self._texts)

    def put(
        self, tokens: Sequence[int], state: Any, saved: list[tuple[int, Any]] | None = None
    ) -> None:
        """Keep a text; it replaces those that it continues. Arguments as in ``Shelved``."""
        new = Shelved(tuple(tokens), state, saved)
        self._texts = [
            text
            for text in self._texts
            if common_prefix(text.tokens, new.tokens) < len(text.tokens)
        ]
        self._texts.append(new)
        while sum([text.n_bytes for text in self._texts]) > self._max_bytes:
            del self._texts[0]

    def best(self, prompt: Sequence[int]) -> tuple[Shelved | None, int]:
        """The text of which the most can be the beginning of ``prompt``, and how many tokens."""
        found, most = None, _LEAST - 1
        for text in self._texts:
            n = n_kept(text.tokens, prompt, text.saved)
            if n > most:
                found, most = text, n
        return found, most if found is not None else 0

    def use(self, text: Shelved, *, whole: bool) -> None:
        """A text went back into the cache; if ``whole``, it goes on there."""
        self._texts.remove(text)
        if not whole:
            self._texts.append(text)
