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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from speculation.drafter import AsSource, MethodSpec, PlainSteps, Requirements, Step
from speculation.drafting.acceptance import Acceptance, by_length
from speculation.drafting.copying import Branch, Copy, CopyDrafter, CopyParams, along
from speculation.drafting.resources import Resources
from speculation.drafting.suffix_index import LENGTHS, LONGEST_CONTEXT, SuffixIndex, agreement
from speculation.drafting.suffix_memory import SuffixMemory
from speculation.system.params import param

_CANDIDATES = 6  # occurrences to compare; 4, 8 and 16 were as good on recorded replies
_TOP = len(LENGTHS) - 1  # the level of the longest suffixes
_SHORTEST_IN_MEMORY = 1  # level; a single token occurs nearly always

# What the occurrences say of a token that is copied: there is one occurrence; all continue with it;
# more than half of them do; the largest part does; a smaller part does, and the token of the
# largest is wrong; or it is the first token of a reply.
_ALONE, _AGREED, _MOST, _SOME, _BRANCH, _FIRST = range(6)
# Log-odds of acceptance after one common token, and their change with each doubling. Set by hand
# after 6,200 reply tokens of the bundled model and 1,900 of SmolLM2-135M: edits of the same file,
# chat, questions on a text, Spec-Bench. Alone, for example, 0.48, 0.72, 0.90, 0.93 of the tokens
# were accepted after 1, 2, 4 and 8, and 0.97 after 32.
_LINES = ((0.0, 0.8), (0.2, 1.0), (-1.0, 0.9), (-1.4, 0.5), (-0.6, 0.0), (-2.0, 0.6))
_IN_MEMORY = (-1.6, 0.32)  # added for the memory: 0.13, 0.41, 0.60 after 2, 4 and 8, 0.96 after 32
PRIORS = [
    log_odds
    for more_start, more_slope in ((0.0, 0.0), _IN_MEMORY)
    for start, slope in _LINES
    for log_odds in by_length(start + more_start, slope + more_slope)
]
_IN_TEXT_CELLS, _IN_MEMORY_CELLS = (
    [along(first + said) for said in range(len(_LINES))] for first in (0, len(_LINES))
)


@dataclass(frozen=True)
class SuffixParams(CopyParams):
    """What is copied, and from where."""

    memory: bool = param(True, "also copy from earlier texts, and remember this one")
    branches: int = param(1, "continuations drafted in one tree", (1, _CANDIDATES))


class Suffix(CopyDrafter):
    """The index of one text beside the memory of all."""

    def __init__(
        self,
        params: SuffixParams,
        memory: SuffixMemory | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        """``memory`` may be shared with other texts; ``acceptance`` starts from PRIORS."""
        self.params = params
        self.requires = Requirements(branches=params.branches if params.branches > 1 else 0)
        self._memory = memory if params.memory else None
        super().__init__(acceptance or Acceptance(PRIORS), params.p_min)

    def _start(self, prompt: Sequence[int]) -> None:
        self._index = SuffixIndex(prompt)
        self._is_first = True  # whether this is the first step of the text
        self._search()

    def end(self, tokens: Sequence[int]) -> None:
        super().end(tokens)
        if self._memory is not None:
            self._memory.remember(tokens)

    def observe_plain(self, steps: PlainSteps) -> None:
        self._is_first = False

    def observe(self, step: Step) -> None:
        self._is_first = False
        super().observe(step)

    def _read(self, tokens: Sequence[int], n_new: int) -> None:
        self._index.extend(tokens[-n_new:])
        self._search()

    def _search(self) -> None:
        """Find the longest suffix that occurs earlier: in this text, else in the memory.

        A match here is worth one in the memory that is two levels longer. The two are not mixed:
        the memory has this conversation's earlier turns, too, which must not count twice.
        """
        self._tail = tail = self._index.tokens[-LONGEST_CONTEXT:]
        # The index in which the end of the text was found, at which level (-1 = nowhere), and the
        # latest position after it.
        self._where, (self._level, self._latest) = self._index, self._index.longest(tail)
        if self._memory is not None and self._level < _TOP:
            there, shortest = self._memory.index, max(_SHORTEST_IN_MEMORY, self._level + 2)
            level, latest = there.longest(tail, min(shortest, _TOP))
            if level >= 0:
                self._where, self._level, self._latest = there, level, latest

    def _foresee(self) -> tuple[int, int] | None:
        """What followed the latest occurrence, whose match is taken to end within its level."""
        if self._level < 0:
            return None
        tables = _IN_TEXT_CELLS if self._where is self._index else _IN_MEMORY_CELLS
        cell = tables[_ALONE][3 * LENGTHS[self._level] // 2]
        return self._where.tokens[self._latest], cell

    def _find(self) -> Copy | None:
        """Compare what follows the occurrences found, those with the longest match first."""
        if self._level < 0:
            return None
        index, tail = self._where, self._tail
        positions = index.matches(self._level, tail, _CANDIDATES)
        found = [(index.common_context(position, tail), position) for position in positions]
        found.sort(key=lambda pair: -pair[0])  # of equal ones, the latest stays first
        copies = [index.copy(position, self.params.draft_max) for _, position in found]
        lead, said, others = vote(copies, self.params.branches - 1)
        length = next(n for copy, (n, _) in zip(copies, found, strict=True) if copy is lead)
        tables = _IN_TEXT_CELLS if index is self._index else _IN_MEMORY_CELLS
        cells: list[int] = []
        for what, end in said:
            cells += tables[what][length + len(cells) : length + end]
        if self._is_first:
            cells[0] = tables[_FIRST][length]
        branches = []
        for depth, copy in others:
            first, last = length + depth, length + len(copy)
            own = [tables[_BRANCH][first], *tables[_ALONE][first + 1 : last]]
            branches.append(Branch(depth, copy[depth:].tolist(), own))
        return Copy(lead.tolist(), cells, branches)


class Votes(NamedTuple):
    """What several copies continue with.

    lead    the copy that continues as most of them do, token by token
    said    what they say of the lead's tokens: (_ALONE, …, depth where that ends)
    others  copies that differ from the lead, and the depth at which they do
    """

    lead: array[int]
    said: list[tuple[int, int]]
    others: list[tuple[int, array[int]]]


def vote(copies: Sequence[array[int]], max_others: int) -> Votes:
    """Compare ``copies``, preferred ones first, none empty."""
    said: list[tuple[int, int]] = []
    others: list[tuple[int, array[int]]] = []
    depth, group = 0, copies
    while len(group) > 1:
        longer = [copy for copy in group if len(copy) > depth]  # the others' texts end here
        tokens = [copy[depth] for copy in longer]
        if not tokens:
            break
        token = max(tokens, key=tokens.count)
        n_votes = tokens.count(token)
        if n_votes < len(group):
            said.append((_AGREED, depth))
        if n_votes == len(tokens):
            group = longer
            depth = agreement(group)
        else:
            said.append((_MOST if 2 * n_votes > len(group) else _SOME, depth + 1))
            for i, other in enumerate(tokens):
                if other != token and other not in tokens[:i] and len(others) < max_others:
                    others.append((depth, longer[i]))
            group = [copy for copy, other in zip(longer, tokens, strict=True) if other == token]
            depth += 1
    said.append((_AGREED if len(group) > 1 else _ALONE, len(group[0])))
    return Votes(group[0], said, others)


def _make(params: SuffixParams, resources: Resources) -> Suffix:
    return Suffix(params, resources.memory, resources.acceptance("suffix", PRIORS))


spec = MethodSpec(
    name="suffix",
    title="Suffix decoding",
    params=SuffixParams,
    make=_make,
    as_source=AsSource(
        lambda resources: SuffixParams(branches=4 if resources.rows_are_cheap else 1),
    ),
)
