"""NgramIndex: finds earlier occurrences of n-grams in a growing text."""

from __future__ import annotations

from collections.abc import Container, Sequence

LONGEST_CONTEXT = 32  # longer common contexts count as this
_TOKENS = 1 << 20  # vocabulary bound; a trigram key then fits two digits of a Python integer


class NgramIndex:
    """All positions of every n-gram of a growing text.

    The positions of an n-gram form a linked list, latest first; a dictionary has its head. The time
    to append or look up a token does not depend on the length of the text: one dictionary access
    per n-gram length, plus the positions visited. Keys and positions are integers, because tuples
    and lists for every token would trigger Python's garbage collector over and over.

    >>> index = NgramIndex(1, 2)
    >>> index.extend([7, 8, 9, 7, 8])
    >>> index.latest(), index.continuation(2, 3)
    ([2, 2], [9, 7, 8])
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.tokens: list[int] = []
        self._min_ngram = min_ngram
        # For each length n: the latest position after each n-gram, and for each position the
        # previous one after the same n-gram. 0 = none, since no n-gram ends there.
        self._lengths: list[tuple[int, dict[int, int], list[int]]] = [
            (n, {}, [0]) for n in range(1, max_ngram + 1)
        ]

    @property
    def known(self) -> Container[int]:
        """The tokens followed by another one somewhere. Requires ``min_ngram`` 1."""
        return self._lengths[0][1]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``. An n-gram is indexed once a token follows it."""
        text, min_ngram = self.tokens, self._min_ngram
        first = max(len(text), 1)
        text.extend(tokens)
        for end in range(first, len(text)):
            key = 0
            for n, latest, before in self._lengths:
                if n > end:
                    before.append(0)
                    continue
                key = key * _TOKENS + text[end - n]
                if n >= min_ngram:
                    before.append(latest.get(key, 0))
                    latest[key] = end

    def latest(self) -> list[int]:
        """For n = 1, 2, …: the latest position after an earlier occurrence of the last n tokens.

        Ends at the longest n-gram that has occurred; 0 for lengths that are not indexed.
        """
        text, end = self.tokens, len(self.tokens)
        positions: list[int] = []
        key = 0
        for n, latest, _ in self._lengths:
            if n > end:
                break
            key = key * _TOKENS + text[end - n]
            position = latest.get(key, 0)
            if not position and n >= self._min_ngram:  # no longer one has occurred either
                break
            positions.append(position)
        return positions

    def longest(self) -> int:
        """The length of the longest n-gram at the end of the text that occurred before; 0 = none.

        Faster than ``latest``.
        """
        text, end, key, longest = self.tokens, len(self.tokens), 0, 0
        for n, latest, _ in self._lengths:
            if n > end:
                break
            key = key * _TOKENS + text[end - n]
            if key in latest:
                longest = n
            elif n >= self._min_ngram:
                break
        return longest

    def matches(self, n: int, position: int, limit: int) -> list[int]:
        """Up to ``limit`` positions after the same ``n`` tokens, latest first from ``position``."""
        _, _, before = self._lengths[n - 1]
        positions: list[int] = []
        while position and len(positions) < limit:
            positions.append(position)
            position = before[position]
        return positions

    def continuation(self, position: int, length: int) -> list[int]:
        """The ``length`` tokens from ``position``.

        At the end of the text, continues with the copy itself, so a short period is repeated.
        """
        period = self.tokens[position : position + length]
        if len(period) == length:
            return period
        return (period * (length // len(period) + 1))[:length]

    def common_context(self, position: int, length: int = 0) -> int:
        """How many tokens before ``position`` equal those at the end of the text; 32 at most.

        ``length`` of them are known to be equal.
        """
        text, end = self.tokens, len(self.tokens)
        longest = min(LONGEST_CONTEXT, position)
        if length < longest and text[position - 1 - length] != text[end - 1 - length]:
            return length
        if text[position - longest : position] == text[end - longest : end]:
            return longest
        start, suffix = position - length, end - length
        while start >= 8 and text[start - 8 : start] == text[suffix - 8 : suffix]:
            start, suffix = start - 8, suffix - 8
        while text[start - 1] == text[suffix - 1]:
            start, suffix = start - 1, suffix - 1
        return position - start
