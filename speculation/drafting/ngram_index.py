"""NgramIndex: where every n-gram of a growing text occurs."""

from __future__ import annotations

from collections.abc import Container, Sequence

LONGEST_CONTEXT = 32  # common context is told apart up to this length
_TOKENS = 1 << 20  # tokens that a key tells apart; keys of three have two of Python's digits


class NgramIndex:
    """Where every n-gram of a growing text occurs.

    An n-gram's positions are linked, each to the one before: a dictionary has the latest. Appending
    a token costs one dictionary entry a length, looking one up as much and what is looked at of
    its positions, whatever the length of the text. Keys and positions are integers: tuples and
    lists for every token would have Python's garbage collector run again and again.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.tokens: list[int] = []
        self._min_ngram = min_ngram
        # For each length from 1 on: n-gram -> the position right after it, the latest; position ->
        # the one before it that follows the same n-gram. No n-gram ends at 0: it stands for none.
        self._lengths: list[tuple[int, dict[int, int], list[int]]] = [
            (n, {}, [0]) for n in range(1, max_ngram + 1)
        ]

    @property
    def known(self) -> Container[int]:
        """The tokens that another one follows somewhere, where single tokens are looked up."""
        return self._lengths[0][1]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``. An n-gram is indexed once a token follows it."""
        text, least = self.tokens, self._min_ngram
        first = max(len(text), 1)
        text.extend(tokens)
        for end in range(first, len(text)):
            key = 0
            for n, latest, before in self._lengths:
                if n > end:
                    before.append(0)
                    continue
                key = key * _TOKENS + text[end - n]
                if n >= least:
                    before.append(latest.get(key, 0))
                    latest[key] = end

    def latest(self) -> list[int]:
        """The latest position that follows an earlier occurrence of the text's last token, of its
        last two and so on, as far as there is one; 0 for lengths that are not indexed."""
        text, end = self.tokens, len(self.tokens)
        found: list[int] = []
        key = 0
        for n, latest, _ in self._lengths:
            if n > end:
                break
            key = key * _TOKENS + text[end - n]
            position = latest.get(key, 0)
            if not position and n >= self._min_ngram:  # nor has a longer one occurred
                break
            found.append(position)
        return found

    def matches(self, n: int, position: int, most: int) -> list[int]:
        """``position`` and the positions before it that follow the same ``n`` tokens.

        The latest first, ``most`` of them.
        """
        _, _, before = self._lengths[n - 1]
        found: list[int] = []
        while position and len(found) < most:
            found.append(position)
            position = before[position]
        return found

    def continuation(self, position: int, length: int) -> list[int]:
        """``length`` tokens from ``position`` on. Where the text ends it goes on with the copy
        itself, so that a repetition shorter than the draft is repeated further."""
        period = self.tokens[position : position + length]
        if len(period) == length:
            return period
        return (period * (length // len(period) + 1))[:length]

    def common_context(self, position: int, length: int = 0) -> int:
        """How many tokens before ``position`` equal those at the end of the text, 32 at most;
        ``length`` of them are known to."""
        text, end = self.tokens, len(self.tokens)
        longest = min(LONGEST_CONTEXT, position)
        if length < longest and text[position - 1 - length] != text[end - 1 - length]:
            return length
        if text[position - longest : position] == text[end - longest : end]:
            return longest
        here, there = position - length, end - length
        while here >= 8 and text[here - 8 : here] == text[there - 8 : there]:
            here, there = here - 8, there - 8
        while text[here - 1] == text[there - 1]:
            here, there = here - 1, there - 1
        return position - here
