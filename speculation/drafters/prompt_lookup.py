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
from math import prod
from operator import itemgetter
from typing import NamedTuple

from batching.cache import common_prefix
from batching.errors import InvalidParameter
from batching.tree import NO_LIMIT, TokenTree
from speculation.drafter import (
    AsSource,
    DraftBudget,
    Drafter,
    IdleHint,
    MethodSpec,
    PlainSteps,
    Requirements,
    Step,
)
from speculation.drafting.estimates import Estimates
from speculation.drafting.ngram_index import LONGEST_CONTEXT, NgramIndex
from speculation.ranges import check_ranges
from speculation.resources import Resources

ORDERS = ("longest", "recent", "frequent", "first")
# How often the next token of a match is right, by the length of the common context up to 32: where
# it is the only match, where the second best goes on alike, and where it goes on otherwise. Counted
# on 7,500 reply tokens of quoting, extraction, editing, dialogue and prose (alone 0.47, 0.66, 0.72,
# 0.79, 0.84, …, 0.95; otherwise 0.18, 0.23, 0.23, 0.31, 0.38, …) and on 9,200 of a model of 7M
# parameters (0.66, 0.75, 0.86, 0.91, 0.96, …; 0.26, 0.45, 0.26, 0.50, 0.62, …, 0.88), and set
# between the two, since that small model repeats itself more than others. Where the second best
# agrees: 0.982 for 8 common tokens, 0.991 for 16, 0.997 for 24, 0.998 for 32 (9,500 reply tokens).
_ALONE = (
    0.5, 0.53, 0.69, 0.77, 0.84, 0.89, 0.89, 0.93, 0.93, *[0.935] * 8, *[0.945] * 15, 0.955
)  # fmt: skip
_AGREED = (
    0.5, 0.67, 0.77, 0.86, 0.90, 0.95, *[0.97] * 3, *[0.98] * 8, *[0.99] * 8, *[0.995] * 7, 0.998
)  # fmt: skip
_DISPUTED = (
    0.5, 0.21, 0.25, 0.30, 0.38, 0.50, 0.50, 0.60, 0.60, *[0.65] * 4, *[0.75] * 19, 0.88
)  # fmt: skip
_RIVAL = 0.3  # the second best match, where it goes on otherwise and the best is wrong
_FIRST = 0.3  # a text's first token: what matches there is how the turns before began
PRIORS = (*_ALONE, *_AGREED, *_DISPUTED, _RIVAL, _FIRST)
_RIVAL_KIND, _FIRST_KIND = len(PRIORS) - 2, len(PRIORS) - 1
_AT_A_TIME = 8  # steps that are learnt from: right after a decode, code takes several times as long
# By context and how many tokens further, the kinds of estimates.
_FAR = 32 + 256 + 1
_ALONE_KINDS, _AGREED_KINDS, _DISPUTED_KINDS = (
    [first + min(length, LONGEST_CONTEXT) for length in range(_FAR)] for first in (0, 33, 66)
)


@dataclass(frozen=True)
class PromptLookupParams:
    """How matches are found, ranked and copied.

    max_ngram   tokens at the end of the text that are looked up, tried from the longest
    min_ngram   the shortest suffix that counts as a match
    draft       tokens copied after a match when not adaptive
    adaptive    let a draft go on while its tokens are likely to hold, as learnt from this text
    p_min       adaptive: the probability that all of a draft holds, below which it ends; in
                auto measured costs decide instead
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
    p_min: float = 0.55
    draft_max: int = 63
    branches: int = 1
    order: str = "longest"
    candidates: int = 3

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


class Match(NamedTuple):
    """An earlier place in the text that could go on here.

    position  of the token that would be next
    context   tokens before it that equal those at the end of the text
    """

    position: int
    context: int


class Lookup(NamedTuple):
    """What was found for a step.

    context   tokens that the best match has in common with the end of the text
    copied    what followed there
    others    what followed the second best match, the rival; None where there is none
    agreed    tokens with which both go on
    is_first  whether it is the first step of a text
    """

    context: int
    copied: list[int]
    others: list[int] | None
    agreed: int
    is_first: bool

    def kinds(self, n: int) -> list[int]:
        """The kinds of estimates of the first ``n`` copied tokens."""
        context = self.context
        if self.is_first and n:
            return [_FIRST_KIND, *_ALONE_KINDS[context + 1 : context + n]]
        if self.others is None:
            return _ALONE_KINDS[context : context + n]
        parting = context + self.agreed
        return [
            *_AGREED_KINDS[context : min(parting, context + n)],
            *_DISPUTED_KINDS[parting : min(parting + 1, context + n)],
            *_ALONE_KINDS[parting + 1 : context + n],
        ]


class PromptLookup(Drafter):
    """The index of one text, and what was learnt of how well its matches hold.

    The second best match is looked at even where it is not drafted: a copy is trusted as long as
    the two go on alike, and distrusted where they part.
    """

    def __init__(self, params: PromptLookupParams, estimates: Estimates | None = None) -> None:
        """``estimates`` of PRIORS, to have what earlier texts taught."""
        self.params = params
        self.requires = Requirements(branches=params.branches if params.branches > 1 else 0)
        self._index = NgramIndex(params.min_ngram, params.max_ngram)
        self._estimates = estimates or Estimates(PRIORS)
        self._found: Lookup | None = None  # in this step
        self._outcomes: list[tuple[Lookup, list[int]]] = []  # and what the text became: not learnt
        self._is_first = True  # step of the text

    def begin(self, prompt: Sequence[int]) -> None:
        self._learn()
        self._index = NgramIndex(self.params.min_ngram, self.params.max_ngram)
        self._index.extend(prompt)
        self._estimates.new_text()
        self._is_first = True

    def idle(self, tokens: Sequence[int]) -> IdleHint | None:
        """Nothing can be copied after a token that is new to the text."""
        index = self._index
        index.extend(tokens[len(index.tokens) :])
        if self.params.min_ngram > 1 or tokens[-1] in index.known:
            return None
        return IdleHint(index.known, NO_LIMIT)

    def observe_plain(self, steps: PlainSteps) -> None:
        self._is_first = False

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        index, params = self._index, self.params
        index.extend(tokens[len(index.tokens) :])
        self._found = None
        matches = self._matches()
        if not matches:
            return
        best = matches[0]
        if not params.adaptive:
            most = min(params.draft, budget.max_depth)
            for match in matches[: params.branches]:
                copied = index.continuation(match.position, most)
                tree.add_chain(0, copied, max_new=budget.room(tree))
            return
        copied, others, agreed = index.continuation(best.position, params.draft_max), None, 0
        if len(matches) > 1:
            others = index.continuation(matches[1].position, params.draft_max)
            agreed = _FAR if copied == others else common_prefix(copied, others)
        self._found = found = Lookup(best.context, copied, others, agreed, self._is_first)
        most = min(params.draft_max, budget.room(tree), budget.max_depth)
        floor = budget.min_path_prob or params.p_min
        probs = self._estimates.chain_probs(found.kinds(most), 1.0, floor)
        if not budget.min_path_prob:
            del probs[_even_length(len(probs)) :]
        if probs:
            tree.add_chain(0, copied[: len(probs)], probs)
        if params.branches > 1 and len(matches) > 1 and self._estimates.of(_RIVAL_KIND) >= floor:
            for match in matches[1 : params.branches]:
                self._branch(match, tree, budget, floor)

    def observe(self, step: Step) -> None:
        """See what the text became, drafted or not; it is learnt from some steps at a time."""
        self._is_first = False
        if self._found is not None:
            self._outcomes.append((self._found, step.tokens))
            if len(self._outcomes) >= _AT_A_TIME:
                self._learn()

    def _learn(self) -> None:
        """Compare what was found with what the texts became."""
        estimates = self._estimates
        for found, became in self._outcomes:
            copied, n = found.copied, min(len(became), len(found.copied))
            n_accepted = n if copied[:n] == became[:n] else common_prefix(became, copied)
            estimates.learn_chain(found.kinds(n), n_accepted, failed=n_accepted < n)
            if found.others is not None and n_accepted == found.agreed < n:
                estimates.learn(
                    _RIVAL_KIND, accepted=found.others[n_accepted] == became[n_accepted]
                )
        self._outcomes.clear()

    def _branch(self, match: Match, tree: TokenTree, budget: DraftBudget, floor: float) -> None:
        """Add ``match`` where it parts from what is drafted already, if that is likely enough."""
        most = min(self.params.draft_max, budget.room(tree), budget.max_depth)
        copied = self._index.continuation(match.position, most)
        path = tree.follow(0, copied)
        depth = len(path)
        if depth == len(copied):
            return  # it is drafted already
        node = path[-1] if path else 0
        siblings = [n for n in range(node + 1, len(tree)) if tree.parents[n] == node]
        if depth and not siblings:
            return  # the best match was not likely enough beyond
        reached = prod([tree.probs[n] for n in path])
        left = max(0.0, 1.0 - sum(tree.probs[n] for n in siblings))
        further = match.context + depth
        kinds = [_RIVAL_KIND, *_ALONE_KINDS[further + 1 : match.context + most]]
        probs = self._estimates.chain_probs(kinds, reached * left, floor)
        if probs:
            probs[0] *= left
            added = copied[depth : depth + len(probs)]
            tree.add_chain(node, added, probs, max_new=budget.room(tree))

    def _matches(self) -> list[Match]:
        """Places to copy from, best first: all that are ranked of the longest n-gram, and of
        shorter ones as long as branches are missing."""
        params = self.params
        latest = self._index.latest()
        longest = len(latest)
        found: list[Match] = []
        for n in range(longest, params.min_ngram - 1, -1):
            if n == longest < params.max_ngram and params.order in ("longest", "recent"):
                # No longer n-gram has occurred, so all of them have n tokens in common.
                some = self._index.matches(n, latest[n - 1], max(2, params.branches))
                found = [Match(position, n) for position in some]
            else:
                found += self._ranked(n, latest[n - 1], {match.position for match in found})
            if len(found) >= params.branches:
                break
        return found

    def _ranked(self, n: int, latest: int, known: set[int]) -> list[Match]:
        """Where the last ``n`` tokens occurred, best first, without the ``known`` positions."""
        params, index = self.params, self._index
        if params.order == "first":
            positions = index.matches(n, latest, len(index.tokens))
            return [Match(p, n) for p in reversed(positions) if p not in known]
        positions = index.matches(n, latest, max(params.candidates, params.branches))
        matches = [Match(p, index.common_context(p, n)) for p in positions if p not in known]
        if params.order == "longest":
            return sorted(matches, key=itemgetter(1), reverse=True)
        if params.order == "recent":
            return matches
        counts: dict[int, int] = {}
        for p in positions:
            counts[index.tokens[p]] = counts.get(index.tokens[p], 0) + 1
        return sorted(matches, key=lambda match: -counts[index.tokens[match.position]])


def _even_length(length: int) -> int:
    """Rounded down to 1, 3, 7, 15, …: with the root a power of two.

    llama.cpp keeps its compute graph while batches have the same shape, and a change costs as much
    as a row or two.
    """
    return (1 << (length + 1).bit_length() - 1) - 1


def _make(params: PromptLookupParams, resources: Resources) -> PromptLookup:
    return PromptLookup(params, resources.keep(params, lambda: Estimates(PRIORS)))


spec = MethodSpec(
    name="prompt-lookup",
    title="Prompt lookup",
    params=PromptLookupParams,
    make=_make,
    as_source=AsSource(lambda resources: PromptLookupParams(branches=2)),
)
