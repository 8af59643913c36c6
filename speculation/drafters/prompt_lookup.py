"""Prompt lookup: what followed the last few tokens earlier in the text is drafted again.

Saxena's rule (github.com/apoorvumang/prompt-lookup-decoding, 2023) looks for the last
``max_ngram`` tokens, then fewer, and copies the ``draft`` tokens after the first match. With
``order=first,branches=1,adaptive=off`` this is that rule. The default goes further: an incremental
index instead of a scan, the match with the longest common context first, several continuations as
branches of one tree, and a draft length that follows what holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import Step

ORDERS = ("longest", "recent", "frequent", "first")


@dataclass(frozen=True)
class PromptLookupParams:
    """How matches are found, ranked and copied.

    max_ngram   tokens at the end of the text that are looked up, tried from the longest
    min_ngram   the shortest suffix that counts as a match
    draft       tokens copied after a match; where a draft starts when adaptive
    draft_max   most tokens of a draft when adaptive
    branches    continuations drafted in one tree
    order       which matches come first: longest common context, most recent, most frequent
                continuation, or first in the text (Saxena)
    adaptive    let the draft length double while drafts hold and shrink while they fail
    candidates  matches that are ranked, latest first
    """

    max_ngram: int = 3
    min_ngram: int = 1
    draft: int = 10
    draft_max: int = 40
    branches: int = 1
    order: str = "longest"
    adaptive: bool = True
    candidates: int = 8

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_ngram", 1, 16),
            ("min_ngram", 1, 16),
            ("draft", 1, 256),
            ("draft_max", 1, 256),
            ("branches", 1, 64),
            ("candidates", 1, 256),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidParameter(f"{name} is {value}; give {low} to {high}")
        if self.min_ngram > self.max_ngram:
            raise InvalidParameter(
                f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}; lower it"
            )
        if self.order not in ORDERS:
            raise InvalidParameter(f"order is {self.order!r}; give one of {', '.join(ORDERS)}")


class ContextIndex:
    """Where every n-gram of a growing text occurs.

    Appending a token costs one dictionary entry a length; looking one up costs as much, whatever
    the length of the text.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.tokens: list[int] = []
        self._lengths = range(min_ngram, max_ngram + 1)
        # n-gram -> positions right after it, in text order
        self._after: dict[tuple[int, ...], list[int]] = {}
        self._n_indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``. An n-gram is indexed once a token follows it."""
        text, after = self.tokens, self._after
        text.extend(tokens)
        lengths = self._lengths
        for end in range(max(self._n_indexed, 1), len(text)):
            for n in lengths:
                if n > end:
                    break
                key = tuple(text[end - n : end])
                positions = after.get(key)
                if positions is None:
                    after[key] = [end]
                else:
                    positions.append(end)
        self._n_indexed = len(text)

    def matches(self, n: int) -> list[int]:
        """Positions that follow an earlier occurrence of the text's last ``n`` tokens."""
        if n > len(self.tokens):
            return []
        return self._after.get(tuple(self.tokens[-n:]), [])

    def continuation(self, position: int, length: int) -> list[int]:
        """``length`` tokens from ``position`` on. Where the text ends it goes on with the copy
        itself, so that a repetition shorter than the draft is repeated further."""
        period = self.tokens[position : position + length]
        return (period * (length // len(period) + 1))[:length]

    def common_context(self, position: int, limit: int) -> int:
        """How many tokens before ``position`` equal those at the end of the text."""
        text = self.tokens
        end = len(text)
        length = 0
        while (
            length < limit
            and length < position
            and text[position - 1 - length] == (text[end - 1 - length])
        ):
            length += 1
        return length


class PromptLookup:
    """The index of one text and the draft length that follows from how drafts fared."""

    def __init__(self, params: PromptLookupParams) -> None:
        self.params = params
        self.n_branches = params.branches if params.branches > 1 else 0
        self._index = ContextIndex(params.min_ngram, params.max_ngram)
        self._length = params.draft
        self._drafted = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._index = ContextIndex(self.params.min_ngram, self.params.max_ngram)
        self._index.extend(prompt)
        self._length = self.params.draft
        self._drafted = 0

    def draft(self, tokens: Sequence[int], tree: TokenTree) -> None:
        index = self._index
        index.extend(tokens[len(index.tokens) :])
        before = len(tree)
        for position in self._matches():
            if tree.room <= 0:
                break
            tree.add_chain(0, index.continuation(position, self._length))
        self._drafted = len(tree) - before

    def observe(self, step: Step) -> None:
        if not self.params.adaptive or not self._drafted:
            return
        accepted = len(step.path) - 1
        if accepted >= self._length:
            self._length = min(2 * self._length, self.params.draft_max)
        else:
            self._length = max(1, (self._length + accepted + 1) // 2)

    def _matches(self) -> list[int]:
        """Positions to copy from, best first, one a branch."""
        params, index = self.params, self._index
        chosen: list[int] = []
        for n in range(params.max_ngram, params.min_ngram - 1, -1):
            positions = index.matches(n)
            if not positions:
                continue
            chosen += self._ranked(positions)
            if len(chosen) >= params.branches:
                break
        return chosen[: params.branches]

    def _ranked(self, positions: list[int]) -> list[int]:
        params, index = self.params, self._index
        if params.order == "first":
            return positions[: params.branches]
        latest = positions[: -params.candidates - 1 : -1]
        if len(latest) == 1 or params.order == "recent":
            return latest
        if params.order == "longest":
            lengths = {p: index.common_context(p, 32) for p in latest}
            return sorted(latest, key=lambda p: -lengths[p])
        counts: dict[int, int] = {}
        for p in latest:
            counts[index.tokens[p]] = counts.get(index.tokens[p], 0) + 1
        return sorted(latest, key=lambda p: -counts[index.tokens[p]])
