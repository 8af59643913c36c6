"""Prompt lookup: copies what followed the last few tokens earlier in the text.

Saxena's rule (github.com/apoorvumang/prompt-lookup-decoding, 2023) searches for the last
``max_ngram`` tokens, then fewer, and copies the ``draft`` tokens after the first match;
``order=first,adaptive=off`` reproduces it. The default goes further: an incremental index instead
of a scan, the match with the longest common context first, several continuations as branches of one
tree, and a draft length that follows the acceptance probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import NamedTuple

from batching.cache import common_prefix
from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import (
    DraftBudget,
    Drafter,
    MethodSpec,
    PlainSteps,
    Requirements,
    Step,
)
from speculation.drafting.draft_length import round_length
from speculation.drafting.estimates import Estimates
from speculation.drafting.ngram_index import LONGEST_CONTEXT, NgramIndex
from speculation.ranges import check_ranges
from speculation.resources import Resources

ORDERS = ("longest", "recent", "frequent", "first")
# Acceptance rate of a match's next token by length of the common context, 0 to 32: if it is the
# only match (alone), if the second-best match agrees, and if that disputes it. Measured on 7,500
# reply tokens of quoting, extraction, editing, dialogue and prose (alone 0.47, 0.66, 0.72, 0.79,
# 0.84, …, 0.95; disputed 0.18, 0.23, 0.23, 0.31, 0.38, …) and on 9,200 from a 7M-parameter model
# (0.66, 0.75, 0.86, 0.91, 0.96, …; 0.26, 0.45, 0.26, 0.50, 0.62, …, 0.88). The values are in
# between, since that small model repeats itself more than others. Agreed: 0.982 for 8 common
# tokens, 0.991 for 16, 0.997 for 24, 0.998 for 32 (9,500 reply tokens).
_ALONE = (
    0.5, 0.53, 0.69, 0.77, 0.84, 0.89, 0.89, 0.93, 0.93, *[0.935] * 8, *[0.945] * 15, 0.955
)  # fmt: skip
_AGREED = (
    0.5, 0.67, 0.77, 0.86, 0.90, 0.95, *[0.97] * 3, *[0.98] * 8, *[0.99] * 8, *[0.995] * 7, 0.998
)  # fmt: skip
_DISPUTED = (
    0.5, 0.21, 0.25, 0.30, 0.38, 0.50, 0.50, 0.60, 0.60, *[0.65] * 4, *[0.75] * 19, 0.88
)  # fmt: skip
_RIVAL = 0.3  # the second-best match, where it disputes the best and the best is wrong
_FIRST = 0.3  # a reply's first token, which matches the start of an earlier turn
PRIORS = (*_ALONE, *_AGREED, *_DISPUTED, _RIVAL, _FIRST)
_RIVAL_KIND, _FIRST_KIND = len(PRIORS) - 2, len(PRIORS) - 1
_LEARN_EVERY = 8  # steps; Python code right after a decode is several times slower (cold caches)
# Kinds of estimates, indexed by the common context plus the distance from the match.
_FAR = 32 + 256 + 1
_ALONE_KINDS, _AGREED_KINDS, _DISPUTED_KINDS = (
    [first + min(length, LONGEST_CONTEXT) for length in range(_FAR)] for first in (0, 33, 66)
)


@dataclass(frozen=True)
class PromptLookupParams:
    """How matches are found, ranked and copied.

    max_ngram   longest suffix of the text to look up; shorter ones are tried next
    min_ngram   shortest suffix that counts as a match
    draft       tokens to copy if not adaptive
    adaptive    end a draft where its tokens are no longer likely, as learnt from this text
    p_min       adaptive: minimum path probability of a draft; auto decides by cost instead
    draft_max   adaptive: most tokens in a draft, whose length is 1, 3, 7, 15, … up to this
    branches    continuations drafted in one tree
    order       preferred matches: longest common context, most recent, most frequent
                continuation, or first in the text (Saxena)
    candidates  matches to rank, latest first
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
    """An earlier position in the text whose continuation may be copied.

    position  position of the first token to copy
    context   tokens before it that equal those at the end of the text
    """

    position: int
    context: int


class Lookup(NamedTuple):
    """The result of a step's lookup.

    context   tokens the best match has in common with the end of the text
    copied    continuation of the best match
    others    continuation of the second-best match, the rival; None if there is none
    agreed    length of the two continuations' common prefix
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
        dispute = context + self.agreed
        return [
            *_AGREED_KINDS[context : min(dispute, context + n)],
            *_DISPUTED_KINDS[dispute : min(dispute + 1, context + n)],
            *_ALONE_KINDS[dispute + 1 : context + n],
        ]


class PromptLookup(Drafter):
    """The n-gram index of one text, with learnt acceptance estimates.

    The second-best match is looked up even if it is not drafted: a copy is trusted as long as both
    agree, and distrusted at their first difference.
    """

    def __init__(self, params: PromptLookupParams, estimates: Estimates | None = None) -> None:
        """``estimates``, started from PRIORS, may be shared with earlier texts."""
        self.params = params
        self.requires = Requirements(branches=params.branches if params.branches > 1 else 0)
        self._index = NgramIndex(params.min_ngram, params.max_ngram)
        self._estimates = estimates or Estimates(PRIORS)
        self._lookup: Lookup | None = None  # of this step
        self._outcomes: list[tuple[Lookup, list[int]]] = []  # lookups and actual tokens to learn
        self._is_first = True  # whether this is the first step of the text

    def begin(self, prompt: Sequence[int]) -> None:
        self._learn()
        self._index = NgramIndex(self.params.min_ngram, self.params.max_ngram)
        self._index.extend(prompt)
        self._estimates.new_text()
        self._is_first = True

    def strength(self, tokens: Sequence[int]) -> int:
        """The length of the longest n-gram at the end of ``tokens`` that occurred before."""
        index = self._index
        n = len(index.tokens)
        if n != len(tokens):
            index.extend(tokens[n:])
        return index.longest()

    def observe_plain(self, steps: PlainSteps) -> None:
        self._is_first = False

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        index, params = self._index, self.params
        index.extend(tokens[len(index.tokens) :])
        self._lookup = None
        matches = self._matches()
        if not matches:
            return
        best = matches[0]
        if not params.adaptive:
            length = min(params.draft, budget.max_depth)
            for match in matches[: params.branches]:
                copied = index.continuation(match.position, length)
                tree.add_chain(0, copied, max_new=budget.room(tree))
            return
        copied, others, agreed = index.continuation(best.position, params.draft_max), None, 0
        if len(matches) > 1:
            others = index.continuation(matches[1].position, params.draft_max)
            agreed = _FAR if copied == others else common_prefix(copied, others)
        self._lookup = lookup = Lookup(best.context, copied, others, agreed, self._is_first)
        max_length = min(params.draft_max, budget.room(tree), budget.max_depth)
        floor = budget.min_path_prob or params.p_min
        probs = self._estimates.chain_probs(lookup.kinds(max_length), 1.0, floor)
        if not budget.min_path_prob:
            del probs[round_length(len(probs)) :]
        if probs:
            tree.add_chain(0, copied[: len(probs)], probs)
        if params.branches > 1 and len(matches) > 1 and self._estimates.prob(_RIVAL_KIND) >= floor:
            for match in matches[1 : params.branches]:
                self._add_branch(match, tree, budget, floor)

    def observe(self, step: Step) -> None:
        """Record the step's tokens, drafted or not; every few steps, learn from them."""
        self._is_first = False
        if self._lookup is not None:
            self._outcomes.append((self._lookup, step.tokens))
            if len(self._outcomes) >= _LEARN_EVERY:
                self._learn()

    def _learn(self) -> None:
        """Update the estimates with the recorded lookups and tokens."""
        estimates = self._estimates
        for lookup, actual in self._outcomes:
            copied, n = lookup.copied, min(len(actual), len(lookup.copied))
            n_accepted = n if copied[:n] == actual[:n] else common_prefix(actual, copied)
            estimates.learn_chain(lookup.kinds(n), n_accepted, failed=n_accepted < n)
            if lookup.others is not None and n_accepted == lookup.agreed < n:
                estimates.learn(
                    _RIVAL_KIND, accepted=lookup.others[n_accepted] == actual[n_accepted]
                )
        self._outcomes.clear()

    def _add_branch(self, match: Match, tree: TokenTree, budget: DraftBudget, floor: float) -> None:
        """Add ``match`` from where it differs from the tree, if that is likely enough."""
        max_length = min(self.params.draft_max, budget.room(tree), budget.max_depth)
        copied = self._index.continuation(match.position, max_length)
        path = tree.follow(0, copied)
        depth = len(path)
        if depth == len(copied):
            return  # already in the tree
        node = path[-1] if path else 0
        siblings = [n for n in range(node + 1, len(tree)) if tree.parents[n] == node]
        if depth and not siblings:
            return  # the draft ends here because the best match was not likely enough
        path_prob = prod([tree.probs[n] for n in path])
        left = max(0.0, 1.0 - sum(tree.probs[n] for n in siblings))
        context = match.context + depth
        kinds = [_RIVAL_KIND, *_ALONE_KINDS[context + 1 : match.context + max_length]]
        probs = self._estimates.chain_probs(kinds, path_prob * left, floor)
        if probs:
            probs[0] *= left
            added = copied[depth : depth + len(probs)]
            tree.add_chain(node, added, probs, max_new=budget.room(tree))

    def _matches(self) -> list[Match]:
        """Matches of the longest n-gram, best first; shorter n-grams fill missing branches."""
        params = self.params
        latest = self._index.latest()
        longest = len(latest)
        matches: list[Match] = []
        for n in range(longest, params.min_ngram - 1, -1):
            if n == longest < params.max_ngram and params.order in ("longest", "recent"):
                # No longer n-gram has occurred, so every match has exactly n tokens in common.
                positions = self._index.matches(n, latest[n - 1], max(2, params.branches))
                matches = [Match(position, n) for position in positions]
            else:
                matches += self._ranked(n, latest[n - 1], {match.position for match in matches})
            if len(matches) >= params.branches:
                break
        return matches

    def _ranked(self, n: int, latest: int, known: set[int]) -> list[Match]:
        """Matches of the last ``n`` tokens, best first, without the ``known`` positions."""
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


def _make(params: PromptLookupParams, resources: Resources) -> PromptLookup:
    return PromptLookup(params, resources.estimates(f"{params}", PRIORS))


spec = MethodSpec(
    name="prompt-lookup",
    title="Prompt lookup",
    params=PromptLookupParams,
    make=_make,
)
