"""Suffix decoding: copies what followed the end of the text earlier, here or in other texts.

The memory has the prompts and replies that this engine read and wrote before. The longest suffix of
the text that occurs earlier, in this text or else in the memory, has up to six latest
occurrences. What most of them continue with is drafted, and what the others continue with as
branches. Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
Applications", arXiv 2411.04975. There a tree of suffixes counts how often each token follows; here
the counts choose among learnt acceptance probabilities, which end a draft and reach ``auto``.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log2, prod
from typing import NamedTuple

from batching.cache import common_prefix
from batching.tree import TokenTree
from speculation.drafter import (
    AsSource,
    DraftBudget,
    Drafter,
    MethodSpec,
    PlainSteps,
    Requirements,
    Step,
)
from speculation.drafting.draft_length import round_length
from speculation.drafting.estimates import Estimates
from speculation.drafting.suffix_index import (
    LENGTHS,
    LONGEST_CONTEXT,
    LONGEST_COPY,
    SuffixIndex,
    agreement,
)
from speculation.drafting.suffix_memory import SuffixMemory
from speculation.ranges import check_ranges
from speculation.resources import Resources

_CANDIDATES = 6  # occurrences to compare; 4, 8 and 16 were as good on recorded replies
_TOP = len(LENGTHS) - 1  # the level of the longest suffixes
_SHORTEST_IN_MEMORY = 1  # level; a single token occurs nearly always
_RANKED = 8  # tokens from which occurrences are ranked by their common context
_LEARN_EVERY = 8  # steps; Python code right after a decode is several times slower (cold caches)

# A copied token's kind of estimate: what the occurrences say of it, whether they are in the memory,
# and the length of the common context before it.
_ALONE = 0  # there is one occurrence
_AGREED = 1  # all occurrences continue with it
_MOST = 2  # more than half of them do
_SOME = 3  # the largest part of them does
_RIVAL = 4  # a smaller part does, and the token of the largest is wrong
_FIRST = 5  # it is the first token of a reply
_CONTEXTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Log-odds of acceptance after one common token, and their change with each doubling. Set by hand
# after 6,200 reply tokens of the bundled model and 1,900 of SmolLM2-135M: edits of the same file,
# chat, questions on a text, Spec-Bench. Alone, for example, 0.48, 0.72, 0.90, 0.93 of the tokens
# were accepted after 1, 2, 4 and 8, and 0.97 after 32.
_LOG_ODDS = ((0.0, 0.8), (0.2, 1.0), (-1.0, 0.9), (-1.4, 0.5), (-0.6, 0.0), (-2.0, 0.6))
_IN_MEMORY = (-1.6, 0.32)  # added for the memory: 0.13, 0.41, 0.60 after 2, 4 and 8, 0.96 after 32
_KINDS_OF = [*product((0, 1), range(len(_LOG_ODDS)), _CONTEXTS)]


def _prior(in_memory: int, said: int, context: int) -> float:
    start, slope = _LOG_ODDS[said]
    if in_memory:
        start, slope = start + _IN_MEMORY[0], slope + _IN_MEMORY[1]
    return 1 / (1 + exp(-start - slope * log2(context)))


def _kind(in_memory: int, said: int, context: int) -> int:
    nearest = _CONTEXTS[max(0, bisect_right(_CONTEXTS, context) - 1)]
    return _KINDS_OF.index((in_memory, said, nearest))


PRIORS = [_prior(*kind) for kind in _KINDS_OF]
# Kinds by what is said, and by context plus distance from it: _KINDS[in_memory][_AGREED][12].
_KINDS = [
    [
        [_kind(in_memory, said, n) for n in range(LONGEST_CONTEXT + LONGEST_COPY + 1)]
        for said in range(len(_LOG_ODDS))
    ]
    for in_memory in (0, 1)
]


@dataclass(frozen=True)
class SuffixParams:
    """What is copied, and from where.

    memory     also copy from earlier texts, and remember this one
    draft_max  most tokens in a draft, whose length is 1, 3, 7, 15, … up to this
    p_min      minimum path probability of a draft; auto decides by cost instead
    branches   continuations drafted in one tree
    """

    memory: bool = True
    draft_max: int = 63
    p_min: float = 0.55
    branches: int = 1

    def __post_init__(self) -> None:
        check_ranges(
            self,
            (("draft_max", 1, LONGEST_COPY), ("p_min", 0.0, 1.0), ("branches", 1, _CANDIDATES)),
        )


class Rival(NamedTuple):
    """A continuation other than the lead, equal to it up to ``depth``."""

    depth: int
    tokens: array[int]


class Lookup:
    """What earlier occurrences of the text's end continue with.

    chosen    the occurrence that continues as most of them do, step by step
    lead      its continuation
    rivals    other continuations, by their first difference from the lead
    context   tokens before it that equal the end of the text
    """

    def __init__(
        self, copies: Sequence[array[int]], n_rivals: int, *, in_memory: bool, is_first: bool
    ) -> None:
        """``copies`` are the occurrences' continuations, preferred ones first; none is empty."""
        self.context = 0
        self.rivals: list[Rival] = []
        self._tables = _KINDS[in_memory]
        self._is_first = is_first
        self._said: list[tuple[int, int]] = []  # (_ALONE, …, depth where it ends), along the lead
        depth, group = 0, copies
        while len(group) > 1:
            longer = [copy for copy in group if len(copy) > depth]  # the others' texts end here
            tokens = [copy[depth] for copy in longer]
            if not tokens:
                break
            token = max(tokens, key=tokens.count)
            n_votes = tokens.count(token)
            if n_votes < len(group):
                self._said.append((_AGREED, depth))
            if n_votes == len(tokens):
                group = longer
                depth = agreement(group)
            else:
                self._said.append((_MOST if 2 * n_votes > len(group) else _SOME, depth + 1))
                for i, other in enumerate(tokens):
                    if other != token and other not in tokens[:i] and len(self.rivals) < n_rivals:
                        self.rivals.append(Rival(depth, longer[i]))
                group = [copy for copy, other in zip(longer, tokens, strict=True) if other == token]
                depth += 1
        self.chosen = next(i for i, copy in enumerate(copies) if copy is group[0])
        self.lead: list[int] = group[0].tolist()
        self._said.append((_AGREED if len(group) > 1 else _ALONE, len(self.lead)))

    def kinds(self, n: int) -> list[int]:
        """The kinds of estimates of the lead's first ``n`` tokens."""
        kinds: list[int] = []
        for said, end in self._said:
            first, end = self.context + len(kinds), self.context + min(end, n)
            kinds += self._tables[said][first:end]
        if self._is_first and kinds:
            kinds[0] = self._tables[_FIRST][self.context]
        return kinds

    def rival_kinds(self, rival: Rival, n: int) -> list[int]:
        """The kinds of the first ``n`` tokens that differ from the lead."""
        first = self.context + rival.depth
        return [self._tables[_RIVAL][first], *self._tables[_ALONE][first + 1 : first + n]]


class Suffix(Drafter):
    """The index of one text beside the memory of all, with learnt acceptance estimates."""

    def __init__(
        self,
        params: SuffixParams,
        memory: SuffixMemory | None = None,
        estimates: Estimates | None = None,
    ) -> None:
        """``memory`` and ``estimates``, started from PRIORS, may be shared with other texts."""
        self.params = params
        self.requires = Requirements(branches=params.branches if params.branches > 1 else 0)
        self._memory = memory if params.memory else None
        self._estimates = estimates or Estimates(PRIORS)
        self._start([])

    def begin(self, prompt: Sequence[int]) -> None:
        self._start(prompt)
        self._estimates.new_text()
        self._read(prompt)

    def _start(self, prompt: Sequence[int]) -> None:
        self._index = SuffixIndex(1 << max(12, (2 * len(prompt)).bit_length()))
        self._n_read = 0  # tokens of the text in the index
        self._where = self._index  # the index in which the end of the text was found …
        self._level = -1  # … at this level; -1 = nowhere
        self._lookup: Lookup | None = None  # after the tokens read
        self._is_drafted = False  # whether this step's draft came from it
        self._outcomes: list[tuple[Lookup, list[int]]] = []  # lookups and actual tokens to learn
        self._is_first = True  # whether this is the first step of the text

    def end(self, tokens: Sequence[int]) -> None:
        self._learn()
        if self._memory is not None:
            self._memory.remember(tokens)

    def strength(self, tokens: Sequence[int]) -> int:
        """1 to 4 for a match of 1, 2, 4, 8 or more tokens in this text; 5 to 7 for one of 2, 4, 8
        or more in the memory."""
        self._read(tokens)
        if self._level < 0:
            return 0
        return min(self._level, 3) + (1 if self._where is self._index else 4)

    def observe_plain(self, steps: PlainSteps) -> None:
        self._is_first = False

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._read(tokens)
        lookup = self._look_up()
        if lookup is None:
            return
        self._is_drafted = True
        params = self.params
        max_length = min(len(lookup.lead), budget.room(tree), budget.max_depth)
        floor = budget.min_path_prob or params.p_min
        probs = self._estimates.chain_probs(lookup.kinds(max_length), 1.0, floor)
        if not budget.min_path_prob:
            del probs[round_length(len(probs)) :]
        if not probs:
            return
        drafted = lookup.lead[: len(probs)]
        tree.add_chain(0, drafted, probs)
        if lookup.rivals and not budget.chain_only:
            path = [0, *tree.follow(0, drafted)]
            self._add_rivals(lookup, probs, path, tree, budget)

    def _add_rivals(
        self,
        lookup: Lookup,
        probs: list[float],
        path: list[int],
        tree: TokenTree,
        budget: DraftBudget,
    ) -> None:
        """Add branches to the lead, whose tokens have ``probs`` and are the nodes of ``path``."""
        floor = budget.min_path_prob or self.params.p_min
        depth, left = -1, 0.0  # probability that no sibling before is accepted
        for rival in lookup.rivals:
            if rival.depth >= len(probs):
                return
            if rival.depth != depth:
                depth = rival.depth
                left = 1.0 - probs[depth]
            length = min(len(rival.tokens) - depth, budget.max_depth - depth, budget.room(tree))
            if length < 1:
                return
            kinds = lookup.rival_kinds(rival, length)
            added = self._estimates.chain_probs(kinds, left * prod(probs[:depth]), floor)
            if added:
                added[0] *= left
                left -= added[0]
                tokens = rival.tokens[depth : depth + len(added)].tolist()
                tree.add_chain(path[depth], tokens, added)

    def observe(self, step: Step) -> None:
        """Record the step's tokens, drafted or not; every few steps, learn from them."""
        self._is_first = False
        if self._is_drafted and self._lookup is not None:
            self._is_drafted = False
            self._outcomes.append((self._lookup, step.tokens))
            if len(self._outcomes) >= _LEARN_EVERY:
                self._learn()

    def _learn(self) -> None:
        """Update the estimates with the recorded lookups and tokens."""
        estimates = self._estimates
        for lookup, actual in self._outcomes:
            lead, n = lookup.lead, min(len(actual), len(lookup.lead))
            n_accepted = n if lead[:n] == actual[:n] else common_prefix(actual, lead)
            estimates.learn_chain(lookup.kinds(n), n_accepted, failed=n_accepted < n)
            for rival in lookup.rivals:
                if rival.depth == n_accepted < n:
                    is_right = rival.tokens[n_accepted] == actual[n_accepted]
                    estimates.learn(lookup.rival_kinds(rival, 1)[0], accepted=is_right)
                    if is_right:
                        break
        self._outcomes.clear()

    def _read(self, tokens: Sequence[int]) -> None:
        """Read ``tokens``, the whole text, and search for its end; once for each length."""
        n = self._n_read
        if n < len(tokens):
            self._index.extend(tokens[n:])
            self._n_read = len(tokens)
            self._lookup = None
            self._search()

    def _search(self) -> None:
        """Find the longest suffix that occurs earlier: in this text, else in the memory.

        A match here is worth one in the memory that is two levels longer. The two are not mixed:
        the memory has this conversation's earlier turns, too, which must not count twice.
        """
        memory = self._memory
        self._where, self._level = self._index, self._longest(self._index, 0)
        if memory is not None and memory.index.n_tokens and self._level < _TOP:
            shortest = max(_SHORTEST_IN_MEMORY, min(self._level + 2, _TOP))
            level = self._longest(memory.index, shortest)
            if level >= 0:
                self._where, self._level = memory.index, level

    def _longest(self, index: SuffixIndex, shortest: int) -> int:
        """The highest level, from ``shortest``, at which ``index`` has a match; -1 = none."""
        longest = -1
        for level in range(shortest, _TOP + 1):
            if LENGTHS[level] > self._n_read or not index.matches(level, self._index, 1):
                break
            longest = level
        return longest

    def _look_up(self) -> Lookup | None:
        """Compare what follows the occurrences found; once for each length of the text."""
        if self._lookup is None and self._level >= 0:
            positions = self._where.matches(self._level, self._index, _CANDIDATES)
            if positions:  # else the memory took in another text since the search
                self._lookup = self._compare(self._where, positions, LENGTHS[self._level])
        return self._lookup

    def _compare(self, index: SuffixIndex, positions: list[int], n: int) -> Lookup:
        """Compare the continuations at ``positions``, which have ``n`` tokens in common."""
        tail = self._index.tail
        if n >= _RANKED:
            positions.sort(key=lambda position: -index.common_context(position, tail, n))
        lookup = Lookup(
            [index.copy(position, self.params.draft_max) for position in positions],
            self.params.branches - 1,
            in_memory=index is not self._index,
            is_first=self._is_first,
        )
        lookup.context = index.common_context(positions[lookup.chosen], tail, n)
        return lookup


def _make(params: SuffixParams, resources: Resources) -> Suffix:
    estimates = resources.estimates("suffix", PRIORS)
    return Suffix(params, resources.memory, estimates)


spec = MethodSpec(
    name="suffix",
    title="Suffix decoding",
    params=SuffixParams,
    make=_make,
    as_source=AsSource(
        lambda resources: SuffixParams(branches=4 if resources.rows_are_cheap else 1),
        gains=(0.1, 0.3, 1.0, 2.0, 0.1, 0.3, 1.0),
    ),
)
