"""Prompt lookup: what followed the last few tokens earlier in the text is drafted again.

Saxena's rule (github.com/apoorvumang/prompt-lookup-decoding, 2023) looks for the last
``max_ngram`` tokens, then fewer, and copies the ``draft`` tokens after the first match. With
``order=first,adaptive=off`` this is that rule. The default goes further: an incremental index
instead of a scan, the match with the longest common context first, several continuations as
branches of one tree, and a draft that is as long as it is likely to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import Step
from speculation.estimates import Estimates
from speculation.ranges import check_ranges

ORDERS = ("longest", "recent", "frequent", "first")
_LONGEST = 32  # common context is told apart up to this length
# How often the next token of a match is right, by the length of the common context. Counted on
# 8,400 reply tokens of quoting, extraction, editing, dialogue and prose (0.40, 0.59, 0.69, 0.73,
# 0.81, 0.82, …) and on 11,000 of a model of 7M parameters (0.45, 0.71, 0.80, 0.87, 0.92, …, 0.99
# from 32 on), and set between the two, since that small model repeats itself more than others.
_PRIORS = (
    0.5, 0.38, 0.58, 0.69, 0.76, 0.81, 0.84, 0.84, *[0.87] * 4, *[0.92] * 5, *[0.945] * 15, 0.975
)  # fmt: skip


@dataclass(frozen=True)
class PromptLookupParams:
    """How matches are found, ranked and copied.

    max_ngram   tokens at the end of the text that are looked up, tried from the longest
    min_ngram   the shortest suffix that counts as a match
    draft       tokens copied after a match when not adaptive
    adaptive    let a draft go on while its tokens are likely to hold, as learnt from this text
    p_min       adaptive: the probability that all of a draft holds, below which it ends; where
                the tree has a floor of its own, that counts
    draft_max   adaptive: most tokens of a draft; its length is 1, 3, 7, 15, … up to this
    branches    continuations drafted in one tree
    order       which matches come first: longest common context, most recent, most frequent
                continuation, or first in the text (Saxena)
    candidates  matches that are ranked, latest first
    """

    max_ngram: int = 3
    min_ngram: int = 1
    draft: int = 10
    adaptive: bool = True
    p_min: float = 0.5
    draft_max: int = 15
    branches: int = 1
    order: str = "longest"
    candidates: int = 8

    def __post_init__(self) -> None:
        check_ranges(
            self,
            (
                ("max_ngram", 1, 16),
                ("min_ngram", 1, 16),
                ("draft", 1, 256),
                ("p_min", 0.0, 1.0),
                ("draft_max", 1, 256),
                ("branches", 1, 64),
                ("candidates", 1, 256),
            ),
        )
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

    def common_context(self, position: int) -> int:
        """How many tokens before ``position`` equal those at the end of the text, 32 at most."""
        text = self.tokens
        end = len(text)
        longest = min(_LONGEST, position)
        if text[position - longest : position] == text[end - longest : end]:
            return longest
        length = 0
        while text[position - 1 - length] == text[end - 1 - length]:
            length += 1
        return length


class PromptLookup:
    """The index of one text, and what was learnt of how well its matches hold."""

    def __init__(self, params: PromptLookupParams) -> None:
        self.params = params
        self.n_branches = params.branches if params.branches > 1 else 0
        self._index = ContextIndex(params.min_ngram, params.max_ngram)
        self._estimates = Estimates(_PRIORS)
        self._best: tuple[int, int] | None = None  # this step's first match: position, context

    def begin(self, prompt: Sequence[int]) -> None:
        self._index = ContextIndex(self.params.min_ngram, self.params.max_ngram)
        self._index.extend(prompt)
        self._estimates.new_text()

    def draft(self, tokens: Sequence[int], tree: TokenTree) -> None:
        index, params = self._index, self.params
        index.extend(tokens[len(index.tokens) :])
        self._best = None
        left = 1.0  # probability that the branches so far are all wrong
        for position, context in self._matches():
            if self._best is None:
                self._best = position, context
            if tree.room <= 0:
                break
            if params.adaptive:
                floor = tree.floor or params.p_min
                most = min(params.draft_max, tree.room)
                probs = self._estimates.run(context, left, floor, most)
                if not tree.floor:
                    del probs[_even_length(len(probs)) :]
                if probs:
                    copied = index.continuation(position, len(probs))
                    p = self._estimates.of(context)
                    probs[0] = left * p
                    tree.add_chain(0, copied, probs)
                    left *= 1.0 - p
            else:
                tree.add_chain(0, index.continuation(position, params.draft))

    def observe(self, step: Step) -> None:
        """Compare the first match with what the text became, drafted or not."""
        if self._best is None:
            return
        position, context = self._best
        became = [*(step.tree.tokens[node] for node in step.path[1:]), step.bonus]
        copied = self._index.continuation(position, len(became))
        for i, (token, copy) in enumerate(zip(became, copied, strict=True)):
            self._estimates.learn(context + i, held=token == copy)
            if token != copy:
                break

    def _matches(self) -> list[tuple[int, int]]:
        """Positions to copy from and their common context, best first, one a branch."""
        params, index = self.params, self._index
        chosen: list[tuple[int, int]] = []
        for n in range(params.max_ngram, params.min_ngram - 1, -1):
            positions = index.matches(n)
            if positions:
                chosen += self._ranked(positions, n)
                if len(chosen) >= params.branches:
                    break
        return chosen[: params.branches]

    def _ranked(self, positions: list[int], n: int) -> list[tuple[int, int]]:
        params, index = self.params, self._index
        if params.order == "first":
            return [(p, n) for p in positions[: params.branches]]
        latest = positions[: -params.candidates - 1 : -1]
        if params.order == "longest":
            return self._longest_first(latest)
        matches = [(p, index.common_context(p)) for p in latest]
        if params.order == "recent":
            return matches
        counts: dict[int, int] = {}
        for p in latest:
            counts[index.tokens[p]] = counts.get(index.tokens[p], 0) + 1
        return sorted(matches, key=lambda match: -counts[index.tokens[match[0]]])

    def _longest_first(self, latest: list[int]) -> list[tuple[int, int]]:
        matches = []
        n_full = 0
        for position in latest:
            context = self._index.common_context(position)
            matches.append((position, context))
            n_full += context == _LONGEST
            if n_full == self.params.branches:  # no other can be longer
                break
        return sorted(matches, key=lambda match: -match[1])


def _even_length(length: int) -> int:
    """Rounded down to 1, 3, 7, 15, …: with the root a power of two.

    llama.cpp keeps its compute graph while batches have the same shape, and a change costs as much
    as a row or two.
    """
    return (1 << (length + 1).bit_length() - 1) - 1
