"""Prompt lookup: what followed the last few tokens earlier in the text is drafted again.

Saxena's rule (github.com/apoorvumang/prompt-lookup-decoding, 2023) looks for the last
``max_ngram`` tokens, then fewer, and copies the ``draft`` tokens after the first match. With
``order=first,adaptive=off`` this is that rule. The default goes further: an incremental index
instead of a scan, the match with the longest common context first, several continuations as
branches of one tree, and a draft that is as long as it is likely to hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batching.cache import common_prefix
from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import Step
from speculation.estimates import Estimates
from speculation.ranges import check_ranges

ORDERS = ("longest", "recent", "frequent", "first")
_TOKEN_BITS = 32  # that tokens have in an n-gram's key
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
                key = key << _TOKEN_BITS | text[end - n]
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
            key = key << _TOKEN_BITS | text[end - n]
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
        floor = tree.floor or params.p_min
        left = 1.0  # probability that the branches so far are all wrong
        for position, context in self._matches():
            if self._best is None:
                self._best = position, context
            if tree.room <= 0:
                break
            if params.adaptive:
                most = min(params.draft_max, tree.room)
                probs = self._estimates.run(context, left, floor, most)
                if not tree.floor:
                    del probs[_even_length(len(probs)) :]
                if probs:
                    copied = index.continuation(position, len(probs))
                    p = probs[0]
                    probs[0] = left * p
                    tree.add_chain(0, copied, probs)
                    left *= 1.0 - p
                if left < floor:  # no further match is worth the search
                    break
            else:
                tree.add_chain(0, index.continuation(position, params.draft))

    def observe(self, step: Step) -> None:
        """Compare the first match with what the text became, drafted or not."""
        if self._best is None:
            return
        position, context = self._best
        self._best = None
        tokens = step.tree.tokens
        became = [tokens[node] for node in step.path[1:]]
        became.append(step.bonus)
        copied = self._index.continuation(position, len(became))
        n_held = common_prefix(became, copied)
        self._estimates.learn_run(context, n_held, failed=n_held < len(became))

    def _matches(self) -> Iterator[tuple[int, int]]:
        """Positions to copy from and their common context, best first, one a branch."""
        params = self.params
        latest = self._index.latest()
        longest = len(latest)
        found: list[int] = []
        for n in range(longest, params.min_ngram - 1, -1):
            if n == longest < params.max_ngram and params.order in ("longest", "recent"):
                # No longer n-gram has occurred, so all of them have n tokens in common.
                some = self._index.matches(n, latest[n - 1], params.branches)
                ranked = [(position, n) for position in some]
            else:
                ranked = self._ranked(n, latest[n - 1])
            for match in ranked:
                if match[0] not in found:
                    yield match
                    found.append(match[0])
                    if len(found) == params.branches:
                        return

    def _ranked(self, n: int, latest: int) -> list[tuple[int, int]]:
        params, index = self.params, self._index
        if params.order == "first":
            positions = index.matches(n, latest, len(index.tokens))
            return [(p, n) for p in positions[: -params.branches - 1 : -1]]
        positions = index.matches(n, latest, params.candidates)
        if params.order == "longest":
            return self._longest_first(positions)
        matches = [(p, index.common_context(p)) for p in positions]
        if params.order == "recent":
            return matches
        counts: dict[int, int] = {}
        for p in positions:
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
